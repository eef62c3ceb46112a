"""What the recorder of ``audit`` must not lose: each mutant of it is seen, and none accuses anybody."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.audit.command import audited_command
from bench.audit.command.training_audit import RIGHT
from tests.audit_command.cases import CASES, SCRIPTS, Case

pytestmark = pytest.mark.torch
KERNELS = "if self._only not in common:", "if True:"
HOOKS = (
    "self.handle = leaf.register_hook(self._on_gradient)",
    "self.handle = leaf.register_hook(lambda _: None)",
)
FREED = "self._libraries.append(library)", ""
SINK = "if has_others and len(outputs) <= 1:", "if has_others:"
EMPTY = 'getattr(leaf, "ds_shape", local.shape)', "local.shape"
OLDER = (
    ('getattr(node, "_input_metadata", None)', "None"),
    ('getattr(saved, "unpack_hook", _UNKNOWN)', "_UNKNOWN"),
    ('if hasattr(_AUTOGRAD.SavedTensor, "unpack_hook"):', "if False:"),
)
"""What torch 2.4 does not show."""
FAILS = "added, self.added, self.recording = self.added, None, False", "raise ValueError"
DDP = "ddp loss-inside"
ON_RANKS = pytest.mark.slow
MUTANTS = [
    pytest.param("leaf_probes", *HOOKS, "single tied", "weights unknown", id="no hooks of leaves"),
    pytest.param(
        "leaf_probes",
        "if not self.recording:",
        "if False:",
        "single penalty",
        None,
        id="autograd.grad",
    ),
    pytest.param("leaf_probes", *FAILS, "single scaler", "not judged", id="an error"),
    pytest.param(
        "training_recorder", "if num_inside > 1:", "if False:", "single lbfgs", None, id="LBFGS"
    ),
    pytest.param(
        "training_recorder",
        "if num_inside:",
        "if False:",
        "single closure",
        None,
        id="step before its closure",
    ),
    pytest.param(
        "c10d_kernels", *KERNELS, DDP, "no reduction seen", id="no kernels", marks=ON_RANKS
    ),
    pytest.param(
        "c10d_kernels", *FREED, DDP, "no reduction seen", id="freed libraries", marks=ON_RANKS
    ),
    pytest.param("autograd_nodes", *SINK, DDP, "scale not judged", id="DDP's sink", marks=ON_RANKS),
    pytest.param(
        "leaf_probes",
        *EMPTY,
        "deepspeed right 3",
        None,
        id="ZeRO-3 without elements",
        marks=ON_RANKS,
    ),
]


@pytest.mark.parametrize(("module", "code", "changed", "script", "finding"), MUTANTS)
def test_without_it_another_verdict(
    module: str,
    code: str,
    changed: str,
    script: str,
    finding: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = audit_changed(module, [(code, changed)], Case(script, ""), tmp_path, monkeypatch, capfd)
    topics = [judged["topic"] for judged in found["findings"]]
    if finding == "no reduction seen":
        assert found["verdict"] == RIGHT
    else:
        assert "scale 1" not in topics
    assert finding is None or finding in topics
    assert not finding or "error" not in [judged["level"] for judged in found["findings"]]


@pytest.mark.parametrize(
    "script",
    [
        "kinds lengths",
        *(
            pytest.param(script, marks=pytest.mark.slow)
            for script in (
                "single scaler",
                "single masked",
                "single checkpoint",
                "kinds cached",
                DDP,
            )
        ),
    ],
)
def test_where_torch_shows_no_shapes_and_no_hooks_of_saved_tensors_the_verdict_is_the_same(
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (case,) = (each for each in CASES if each.name == script)
    found = audit_changed("autograd_nodes", OLDER, case, tmp_path, monkeypatch, capfd)
    topics = [judged["topic"] for judged in found["findings"]]
    assert (found["verdict"], topics) == (case.verdict, topics)
    assert case.finding in ["", *topics]
    assert "a function of the model" in found["evidence"]["not seen"]


def test_where_torch_shows_no_hooks_of_saved_tensors_any_that_are_set_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from bench.audit.command.inside.autograd_nodes import SavedTensorHooks, is_at_hand

    autograd: Any = torch._C._autograd
    monkeypatch.setattr(autograd, "SavedTensor", object)
    push = "_push_saved_tensors_default_hooks"
    monkeypatch.setattr(autograd, push, getattr(autograd, push))  # it is put back
    monkeypatch.setattr(SavedTensorHooks, "were_set", False)
    SavedTensorHooks.watch()
    saved = object()
    assert is_at_hand(saved)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        pass
    assert not is_at_hand(saved)


def audit_changed(
    module: str,
    changes: Iterable[tuple[str, str]],
    case: Case,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> dict[str, Any]:
    """Audit with a recorder whose code is changed."""
    for name in ("audit/command/site", "audit/command/inside", "measure"):
        shutil.copytree(audited_command.SITE.parents[2] / name, folder / name)
    (path,) = folder.rglob(f"{module}.py")
    text = path.read_text(encoding="utf-8")
    for code, changed in changes:
        assert code in text
        text = text.replace(code, changed)
    path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(audited_command, "SITE", folder / "audit/command/site")
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cli.main(["audit", "--json", "--", *case.command])
    data: dict[str, Any] = json.loads(capfd.readouterr().out)
    return data
