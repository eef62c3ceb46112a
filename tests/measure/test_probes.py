"""The probes against exact cases: the comparison of updates, the clock."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bench.measure import update
from bench.measure.taps import HostClock


@pytest.mark.parametrize("scale", [1.0, 0.25, 4.0, -1.0])
def test_a_scaled_update_is_all_scale_and_no_residual(tmp_path: Path, scale: float) -> None:
    truth = {"a": torch.randn(50), "b": torch.randn(7, 3)}
    update.save(truth, tmp_path / "truth.safetensors")
    found = update.compare({name: value * scale for name, value in truth.items()}, tmp_path / "truth.safetensors")
    assert found["scale"] == pytest.approx(scale)
    assert found["error"] == pytest.approx(abs(scale - 1), abs=1e-6)
    assert found["residual"] == pytest.approx(0, abs=1e-6)


def test_an_orthogonal_part_is_all_residual(tmp_path: Path) -> None:
    update.save({"a": torch.tensor([3.0, 0.0])}, tmp_path / "truth.safetensors")
    found = update.compare({"a": torch.tensor([3.0, 1.5])}, tmp_path / "truth.safetensors")
    assert found == {"scale": pytest.approx(1.0), "error": pytest.approx(0.5), "residual": pytest.approx(0.5)}


def test_a_reference_that_did_not_move_is_refused(tmp_path: Path) -> None:
    update.save({"a": torch.zeros(4)}, tmp_path / "truth.safetensors")
    with pytest.raises(RuntimeError, match="nothing to compare with"):
        update.compare({"a": torch.ones(4)}, tmp_path / "truth.safetensors")


def test_moments_are_on_the_clock_of_all_processes() -> None:
    clock = HostClock()
    before = time.monotonic()
    marks = [clock.mark(), clock.mark()]
    after = time.monotonic()
    first, second = clock.moments(marks)
    assert before - 1e-3 <= first <= second <= after + 1e-3
    assert clock.moments([]) == []
