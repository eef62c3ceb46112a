"""What the recorder of ``audit`` must not lose: each mutant of it is seen, and none accuses anybody."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench import cli
from bench.audit.command import audited_process
from tests.audit_command.cases import SCRIPTS, Case

pytestmark = pytest.mark.torch
KERNELS = 'for key in ("AutogradCPU", "AutogradCUDA"):', "for key in ():"
HOOKS = "self.handle = leaf.register_hook(self._add)", "self.handle = leaf.register_hook(lambda gradient: None)"
DDP = "ddp loss-inside"
MUTANTS = [
    pytest.param("c10d_kernels", *KERNELS, DDP, "no reduction seen", id="no kernels"),
    pytest.param("leaf_probes", *HOOKS, "single tied", "weights unknown", id="no hooks of leaves"),
    pytest.param("training_recorder", "if inside:", "if False:", "single closure", None, id="step before its closure"),
    pytest.param("c10d_kernels", "self._libraries.append(library)", "", DDP, "no reduction seen", id="freed libraries"),
    pytest.param("criteria", "len(node._input_metadata) > 1", "False", DDP, "scale not judged", id="DDP's sink"),
    pytest.param("leaf_probes", "if not self.recording:", "if False:", "single penalty", None, id="autograd.grad"),
    pytest.param(
        *("leaf_probes", 'getattr(leaf, "ds_shape", leaf.shape)', "leaf.shape", "deepspeed right 3", None),
        id="ZeRO-3 without elements",
        marks=pytest.mark.slow,
    ),
    pytest.param("training_recorder", "inside=inside", "inside=1", "single lbfgs", None, id="LBFGS"),
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
    for name in ("site", "inside"):
        shutil.copytree(audited_process.SITE.parent / name, tmp_path / name)
    path = tmp_path / "inside" / f"{module}.py"
    text = path.read_text(encoding="utf-8")
    assert code in text
    path.write_text(text.replace(code, changed), encoding="utf-8")
    monkeypatch.setattr(audited_process, "SITE", tmp_path / "site")
    monkeypatch.chdir(SCRIPTS)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    cli.main(["audit", "--json", "--", *Case(script, "").command])
    found = json.loads(capfd.readouterr().out)
    topics = [one["topic"] for one in found["findings"]]
    assert "scale 1" not in topics if finding != "no reduction seen" else found["verdict"] == "right"
    assert finding is None or finding in topics
    assert not finding or "error" not in [one["level"] for one in found["findings"]]
