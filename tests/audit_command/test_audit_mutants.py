"""What the recorder of ``audit`` must not lose: each mutant of it is seen, and none accuses anybody."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench import cli
from bench.audit.command import audited_command
from bench.audit.command.training_audit import RIGHT
from tests.audit_command.cases import SCRIPTS, Case

pytestmark = pytest.mark.torch
KERNELS = "if self._only not in common:", "if True:"
HOOKS = (
    "self.handle = leaf.register_hook(self._add)",
    "self.handle = leaf.register_hook(lambda _: None)",
)
FREED = "self._libraries.append(library)", ""
SINK = "if has_others and len(node._input_metadata) <= 1:", "if has_others:"
EMPTY = 'getattr(leaf, "ds_shape", local.shape)', "local.shape"
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
    pytest.param("criteria", *SINK, DDP, "scale not judged", id="DDP's sink", marks=ON_RANKS),
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
    for name in ("audit/command/site", "audit/command/inside", "measure"):
        shutil.copytree(audited_command.SITE.parents[2] / name, tmp_path / name)
    (path,) = tmp_path.rglob(f"{module}.py")
    text = path.read_text(encoding="utf-8")
    assert code in text
    path.write_text(text.replace(code, changed), encoding="utf-8")
    monkeypatch.setattr(audited_command, "SITE", tmp_path / "audit/command/site")
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cli.main(["audit", "--json", "--", *Case(script, "").command])
    found = json.loads(capfd.readouterr().out)
    topics = [judged["topic"] for judged in found["findings"]]
    if finding == "no reduction seen":
        assert found["verdict"] == RIGHT
    else:
        assert "scale 1" not in topics
    assert finding is None or finding in topics
    assert not finding or "error" not in [judged["level"] for judged in found["findings"]]
