"""DeepSpeed's Adam for the host, where it can be compiled: a tap sees each of its steps, which are those of AdamW."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

TRAINED = """
import json, time
import torch

from bench.measure.taps import EventKind, Taps

def train(make):
    generator, taps = torch.Generator().manual_seed(0), Taps(time.perf_counter)
    weight = torch.nn.Parameter(torch.randn(4096, generator=generator))
    before, optimizer = weight.detach().clone(), taps.optimizer(make([weight]))
    for step in range(20):
        weight.grad = torch.randn(4096, generator=generator) * 10.0 ** (step % 5 - 3)
        optimizer.step()
    return weight.detach() - before, taps.count(EventKind.STEP)

from deepspeed.ops.adam import DeepSpeedCPUAdam
theirs, seen = train(lambda weights: DeepSpeedCPUAdam(weights, lr=1e-3, weight_decay=0.01, adamw_mode=True))
ours, _ = train(lambda weights: torch.optim.AdamW(weights, lr=1e-3, weight_decay=0.01))
print(json.dumps({"seen": seen, "error": float((theirs - ours).norm() / ours.norm())}))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler")
def test_a_tap_sees_each_step_of_deepspeeds_adam(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled without CUDA, in a minute; it rounds otherwise: 1.4e-4 of the change of the weights in 50 steps."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", TRAINED], capture_output=True, text=True, cwd=ROOT, timeout=900
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["seen"] == 20
    assert found["error"] < 1e-3
