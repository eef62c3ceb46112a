"""The probes against exact cases: the comparison of updates, the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bench.measure import update
from bench.measure.taps import HostClock

CPU = torch.device("cpu")


@pytest.mark.parametrize("scale", [1.0, 0.25, 4.0, -1.0])
def test_a_scaled_update_is_all_scale_and_no_residual(tmp_path: Path, scale: float) -> None:
    truth = {"a": torch.randn(50), "b": torch.randn(7, 3)}
    update.save(truth, tmp_path / "truth.safetensors")
    change = [(name, value * scale) for name, value in truth.items()]
    found = update.compare(change, tmp_path / "truth.safetensors", CPU)
    assert found["scale"] == pytest.approx(scale)
    assert found["error"] == pytest.approx(abs(scale - 1), abs=1e-6)
    assert found["residual"] == pytest.approx(0, abs=1e-6)


def test_an_orthogonal_part_is_all_residual(tmp_path: Path) -> None:
    update.save({"a": torch.tensor([3.0, 0.0])}, tmp_path / "truth.safetensors")
    found = update.compare([("a", torch.tensor([3.0, 1.5]))], tmp_path / "truth.safetensors", CPU)
    assert (found.pop("tensor"), found.pop("tensor_error")) == ("a", pytest.approx(0.5))
    assert found == pytest.approx(
        {"scale": 1.0, "error": 0.5, "residual": 0.5, "norm": math.hypot(3.0, 1.5)}
    )


def test_the_tensor_that_is_furthest_off_is_named_and_rounding_is_not_counted(
    tmp_path: Path,
) -> None:
    """A tensor of noise is compared with the others, and what rounding its weight leaves is no error."""
    path = tmp_path / "truth.safetensors"
    large, small, noise = torch.ones(1000), torch.full((10,), 1e-2), torch.full((4,), 1e-8)
    update.save({"large": large, "small": small, "noise": noise}, path, {"large": 1e4})

    def worst(**change: Tensor) -> tuple[str, float]:
        right = {"large": large, "small": small, "noise": noise}
        found = update.compare((right | change).items(), path, CPU)
        return found["tensor"], found["tensor_error"]

    assert worst() == ("large", 0.0)
    assert worst(large=large + 1e-6)[1] == 0.0, "half of an ulp of 300"
    assert worst(small=torch.zeros(10)) == ("small", pytest.approx(0.1, rel=0.01))
    assert worst(noise=-noise)[1] < 1e-6
    assert worst(small=torch.full((10,), math.nan)) == ("small", math.inf)


def test_a_reference_that_did_not_move_is_refused(tmp_path: Path) -> None:
    update.save({"a": torch.zeros(4)}, tmp_path / "truth.safetensors")
    with pytest.raises(RuntimeError, match="nothing to compare with"):
        update.compare([("a", torch.ones(4))], tmp_path / "truth.safetensors", CPU)


def as_a_whole(change: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """What ``deviation`` finds, in fp64 without chunks."""
    u, r = (
        torch.cat([value.double().flatten() for value in values.values()])
        for values in (change, truth)
    )
    scale = float(u @ r / (r @ r))
    norms = {"error": u - r, "residual": u / scale - r}
    return {
        **{name: float(vector.norm() / r.norm()) for name, vector in norms.items()},
        "scale": scale,
        "norm": float(u.norm()),
    }


def test_chunks_give_the_figures_of_whole_tensors() -> None:
    """Also where a tensor is smaller than a chunk, is one chunk, or ends within one."""
    size = update.CHUNK_ELEMENTS["cpu"]
    shapes = {"small": (7, 3), "one": (size,), "many": (3, size + 11)}
    truth = {name: torch.randn(shape) for name, shape in shapes.items()}
    change = {name: 0.5 * value + 0.01 * torch.randn_like(value) for name, value in truth.items()}
    found = update.deviation(change.items(), truth.__getitem__, "the truth", CPU)
    del found["tensor"], found["tensor_error"]
    assert found == pytest.approx(as_a_whole(change, truth), rel=1e-9)


def test_a_change_is_read_once_and_only_of_the_models_own_names() -> None:
    model, read = nn.Linear(3, 2), []

    class After(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            read.append(name)  # where parameters are sharded, each reading is a collective
            return super().__getitem__(name)

    after = After({name: parameter.detach() + 1 for name, parameter in model.named_parameters()})
    change = dict(update.change_from(model, after, "mine"))
    assert read == ["weight", "bias"] == list(change)
    assert all(torch.allclose(value, torch.ones_like(value)) for value in change.values())
    with pytest.raises(
        RuntimeError, match=r"full_parameters\(\) of mine is not the model's: \['bias'\]"
    ):
        dict(update.change_from(model, After(weight=after["weight"]), "mine"))


def test_moments_are_on_the_clock_of_all_processes() -> None:
    clock = HostClock()
    before = time.monotonic()
    marks = [clock.mark(), clock.mark()]
    after = time.monotonic()
    first, second = clock.moments(marks)
    assert before - 1e-3 <= first <= second <= after + 1e-3
    assert clock.moments([]) == []
