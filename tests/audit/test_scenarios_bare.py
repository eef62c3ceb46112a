"""The newer scenarios against loops written without the bench (bare.py): every coefficient and every counter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT, bench

OBSERVATIONS = json.loads((ROOT / "results/semantics/observations.json").read_text())["observations"]
SUITE = {(one["scenario"]["name"], one["backend"]): one for one in OBSERVATIONS}
"""As committed; ``test_what_is_committed_is_measured_again`` measures it."""


@pytest.mark.parametrize(
    "framework", ["torch", "torchtitan", pytest.param("deepspeed", marks=pytest.mark.slow), pytest.param("lightning")]
)
def test_loops_without_the_bench_compute_the_same(framework: str, tmp_path: Path) -> None:
    command = [sys.executable, str(Path(__file__).parent / "bare.py"), framework]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    bare: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    assert bare
    for name, backends in bare.items():
        for backend, one in backends.items():
            seen = SUITE[name, backend]
            assert len(seen["updates"]) == len(one["updates"]), (name, backend)
            for update, coefficients in zip(seen["updates"], one["updates"], strict=True):
                assert update["samples"] == pytest.approx(coefficients, rel=1e-4), (name, backend)
            loading = one["reported"].pop("inner_steps_of_loading", 0)
            assert loading == (2 if (name, backend) == ("resume-epoch", "fsdp2-deferred") else 0)
            for counter, value in one["reported"].items():
                assert seen["steps_reported"][counter] == value, (name, backend, counter)


def test_steps_that_load_an_optimizer_are_counted_and_are_no_updates(tmp_path: Path) -> None:
    """torch's distributed checkpoint makes two with SGD: as many as in the loop without the bench above."""
    numbers = ["--samples", "40", "--micro-batch", "2", "--accumulate", "4", "--epochs", "2", "--json"]
    fault = ["--fault", "checkpoint", "--at", "10"]  # an epoch's end
    done = bench("semantics", "--backend", "tests.audit.dcp:WithDCP", *numbers, *fault, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    seen = json.loads(done.stdout)
    assert (seen["verdict"], seen["optimizer_steps_without_effect"]) == ("right", 2)
    assert [update["sum"] for update in seen["updates"]] == pytest.approx([1] * 6)
    assert "2 steps of the inner optimizer changed nothing: no update, but" in seen["diagnosis"]
