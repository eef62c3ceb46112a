"""Blocks that are checkpointed and compiled: the same losses, updates and collectives, less memory; and refusals."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from bench.backends import blocks
from bench.backends.base import registry
from bench.backends.deepspeed import ZeroStage3
from bench.backends.zero_options import check_input
from bench.errors import UnsupportedError
from bench.plan.cell import Device
from bench.plan.world import Refusals
from bench.workload import load
from tests.conftest import Run, run_matrix
from tests.factories import make_backend, make_cell

COMPILABLE = ["ddp-deferred", "fsdp2-deferred"]
ALL_COMPILABLE = [
    *COMPILABLE,
    "fsdp2-eager",
    "deepspeed-zero2-eager",
    "lightning-ddp",
    "lightning-fsdp2",
]
"""One of every way to wrap a model that can."""
HAS_COMPILER = not blocks.missing(make_cell(compiled=True))


class Block(nn.Module):
    """Two products and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, rows: Tensor, *, scale: float = 1.0) -> Tensor:
        return rows + scale * self.down(torch.nn.functional.gelu(self.up(rows)))


def test_a_graph_that_breaks_is_an_error() -> None:
    class Breaking(Block):
        def forward(self, rows: Tensor, *, scale: float = 1.0) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(rows, scale=scale)

    torch._dynamo.reset()
    made = Breaking()
    blocks.prepare([made], make_cell(compiled=True), "aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported):
        made(torch.randn(4, 8))


def test_the_shipped_model_is_checkpointed_and_compiled_whole() -> None:
    """No graph breaks in a transformers block, with and without checkpointing, and one graph for all of them.

    Checkpointed or compiled, gradients and names are those of the plain model.
    """
    for compiled, *ways in ((1, 0, 0), (1, 1, 0), (1, 1, 1), (0, 1, 0), (0, 1, 1)):
        changes = dict(
            zip(
                ("activation_checkpointing", "selective_checkpointing"),
                map(bool, ways),
                strict=True,
            )
        )
        cell = make_cell(model="micro", sequence_length=8, compiled=bool(compiled), **changes)
        workload = load(cell, None)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, plain = workload.model(), workload.model()
        blocks.prepare(workload.blocks(model), cell, "aot_eager")
        batch = workload.data(2)
        losses = [workload.loss(each, batch) for each in (model, plain)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        found, expected = dict(model.named_parameters()), dict(plain.named_parameters())
        assert found.keys() == expected.keys()
        for name, parameter in found.items():
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def compiled_run(folder: Path, names: list[str], checkpointing: str, precision: str) -> Run:
    """Backends with compiled blocks of the smallest model; ZeRO-3, which cannot, among them."""
    options = ("--compiled", "on", "--activation-checkpointing", checkpointing, "--model", "micro")
    return run_matrix(
        folder, *options, backend=[*names, "deepspeed-zero3-eager"], precision=precision
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not HAS_COMPILER, reason="torch.compile needs a C++ compiler, and there is none"
)
@pytest.mark.parametrize(
    ("names", "checkpointing", "precision"),
    [(COMPILABLE, "on", "fp32"), (ALL_COMPILABLE, "off", "fp32"), (ALL_COMPILABLE, "on", "bf16")],
)
def test_compiled_backends_equal_the_reference(
    tmp_path: Path, names: list[str], checkpointing: str, precision: str
) -> None:
    run = compiled_run(tmp_path, names, checkpointing, precision)
    assert run.process.returncode == 0, run.process.stdout + run.process.stderr
    for name in names:
        trial = run.trial(name)
        assert trial["status"] == "ok", trial["reason"]
        assert trial["compiled"] and trial["update_error"] < (
            2e-6 if precision == "fp32" else 1.5e-2
        )
        assert trial["activation_checkpointing"] == (checkpointing == "on")
        assert pd.isna(trial["peak_memory_bytes"]), "what is compiled allocates out of sight"
        assert run.record(name)["collectives"], "they are counted of blocks that are not compiled"
    refused = run.trial("deepspeed-zero3-eager")
    assert refused["status"] == "unsupported"
    assert "cannot run with compiled blocks: " in refused["reason"]


def test_nothing_is_compiled_again_between_the_end_of_warm_up_and_that_of_the_pass() -> None:
    torch._dynamo.reset()
    made = Block()
    blocks.prepare([made], make_cell(compiled=True), "aot_eager")
    rows = torch.randn(4, 8)
    with blocks.compiled_once(make_cell(compiled=True)) as warm:
        made(rows)
        made(rows, scale=2.0)
        warm()
        made(rows)
        with pytest.raises(RuntimeError, match="Detected recompile"):
            made(rows.double(), scale=3.0)
    with pytest.raises(RuntimeError, match="dtype"):  # compiled, and then wrong by itself
        made(rows.double(), scale=3.0)
    with blocks.compiled_once(make_cell()) as warm:
        warm()
        made(rows, scale=4.0)


def test_what_refuses_says_why() -> None:
    made = make_backend("made")
    assert blocks.refusal(make_cell(activation_checkpointing=True, compiled=True), made) == ""
    made.refuses = Refusals(compiled="it is compiled already", checkpointed="it has no blocks")
    assert blocks.refusal(make_cell(), made) == ""
    for option, why in (
        ("compiled", made.refuses.compiled),
        ("activation_checkpointing", made.refuses.checkpointed),
    ):
        text = blocks.refusal(make_cell(**{option: True}), made)
        assert text.startswith("made cannot run with ") and text.endswith(f": {why}")
    fake = make_cell(virtual=True, fake_tensors=True, compiled=True)
    assert "fake tensors cannot be compiled" in blocks.refusal(fake, make_backend("fine"))
    refusing = {name for name, backend in registry().items() if backend.refuses.compiled}
    assert refusing == {
        name for name, backend in registry().items() if issubclass(backend, ZeroStage3)
    }


def test_what_is_missing_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert blocks.missing(make_cell()) == ""
    assert blocks.missing(make_cell(compiled=True)) == "torch.compile needs a compiler: install g++"
    on_gpu = make_cell(compiled=True, device=Device.CUDA)
    assert blocks.missing(on_gpu) == "torch.compile needs a compiler: install gcc"
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert blocks.missing(make_cell(compiled=True)) == ""
    monkeypatch.setattr(blocks.importlib.util, "find_spec", lambda name: None)
    assert blocks.missing(on_gpu) == "torch.compile needs Triton: pip install triton"


@pytest.mark.parametrize("spoil", ["open to all", "a link", "a file", ""])
def test_compiled_code_is_kept_where_nobody_else_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    place = tmp_path / "cache"
    monkeypatch.setenv(blocks.CACHE, str(place))
    if spoil == "open to all":
        place.mkdir()
        place.chmod(0o777)
    elif spoil == "a link":
        place.symlink_to(tmp_path)
    elif spoil:
        place.touch()
    blocks.protect_cache()
    assert os.environ.get(blocks.CACHE) == (None if spoil else str(place))
    assert place.is_dir() or spoil == "a file"


def test_a_block_whose_input_needs_no_gradient_is_refused_by_zero3() -> None:
    block = Block()
    check_input(block)
    with pytest.raises(UnsupportedError, match="no input of Block needs a gradient"):
        block(torch.ones(1, 8))
