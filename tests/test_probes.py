"""The probes against exact cases: the ledger's bytes, the counter's calls, the comparison of updates, the clock."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.probes import update
from bench.probes.clock import HostClock
from bench.probes.collectives import CollectiveCounter
from bench.probes.memory import TensorLedger

KIB = 1024


def test_ledger_counts_births_and_deaths() -> None:
    with TensorLedger("cpu") as ledger:
        a = torch.zeros(KIB)
        assert ledger.live == 4 * KIB
        b = a + 1
        assert ledger.live == 8 * KIB
        del a
        assert ledger.live == 4 * KIB
        assert ledger.peak == 8 * KIB
        ledger.reset_peak()
        assert ledger.peak == 4 * KIB
        del b
    assert ledger.live == 0


def test_ledger_counts_a_storage_once_whatever_its_views() -> None:
    with TensorLedger("cpu") as ledger:
        whole = torch.zeros(KIB)
        views = [whole.view(32, 32), whole[5:], whole.detach()]
        assert ledger.live == 4 * KIB
        del whole
        assert ledger.live == 4 * KIB, "a view keeps the storage alive"
        del views
        assert ledger.live == 0


def test_ledger_follows_resized_storages() -> None:
    with TensorLedger("cpu") as ledger:
        tensor = torch.zeros(KIB)
        tensor.untyped_storage().resize_(0)
        assert ledger.live == 0
        tensor.untyped_storage().resize_(8 * KIB)
        assert ledger.live == 8 * KIB
        del tensor
        assert ledger.live == 0
    assert torch.UntypedStorage.resize_.__name__ == "resize_", "the class is as it was"


def test_ledger_sees_gradients_and_what_backward_needs() -> None:
    weight = torch.zeros(KIB, requires_grad=True)
    with TensorLedger("cpu") as ledger:
        weight.exp().sum().backward()
        gc.collect()
        assert ledger.live == 4 * KIB, "only the gradient stays"
        assert ledger.peak >= 8 * KIB
        weight.grad = None
        assert ledger.live == 0


def test_ledger_of_a_training_step_equals_the_closed_form() -> None:
    elements = 64 * 64
    with TensorLedger("cpu") as ledger:
        model = torch.nn.Linear(64, 64, bias=False)
        assert ledger.live == 4 * elements
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        model(torch.zeros(1, 64)).sum().backward()
        optimizer.step()
        gc.collect()
        # Weights, gradient, two moments; and AdamW's one-element step counter.
        assert ledger.live == 4 * elements * 4 + 4


@pytest.fixture
def lonely_group(tmp_path: Path) -> Iterator[None]:
    """A gloo group of one rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("lonely_group")
def test_counter_counts_only_while_counting_and_by_dtype() -> None:
    counter = CollectiveCounter()
    with counter:
        dist.all_reduce(torch.zeros(10))
        counter.counting = True
        dist.all_reduce(torch.zeros(10))
        dist.all_reduce(torch.zeros(10, dtype=torch.bfloat16))
        dist.all_reduce(torch.zeros(6))
        dist.broadcast(torch.zeros(3), src=0)
        torch.zeros(5) + 1
    assert counter.rows() == [
        {"op": "all_reduce", "dtype": "bfloat16", "calls": 1, "payload_bytes": 20},
        {"op": "all_reduce", "dtype": "float32", "calls": 2, "payload_bytes": 64},
        {"op": "broadcast", "dtype": "float32", "calls": 1, "payload_bytes": 12},
    ]


def test_counter_takes_the_whole_of_gathers_and_scatters() -> None:
    """On a fake group of four ranks, where shapes are true and values are not."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        counter = CollectiveCounter()
        counter.counting = True
        with counter:
            dist.all_gather_into_tensor(torch.zeros(40), torch.zeros(10))
            dist.reduce_scatter_tensor(torch.zeros(10), torch.zeros(40))
            dist.all_gather([torch.zeros(5) for _ in range(4)], torch.zeros(5))
    finally:
        dist.destroy_process_group()
    assert counter.rows() == [
        {"op": "all_gather", "dtype": "float32", "calls": 2, "payload_bytes": 160 + 80},
        {"op": "reduce_scatter", "dtype": "float32", "calls": 1, "payload_bytes": 160},
    ]


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
    assert found == {
        "scale": pytest.approx(1.0),
        "error": pytest.approx(0.5),
        "residual": pytest.approx(0.5),
    }


def test_no_update_at_all_is_scale_zero(tmp_path: Path) -> None:
    update.save({"a": torch.ones(4)}, tmp_path / "truth.safetensors")
    found = update.compare({"a": torch.zeros(4)}, tmp_path / "truth.safetensors")
    assert found == {"scale": 0.0, "error": 1.0, "residual": 1.0}


def test_a_reference_that_did_not_move_is_refused(tmp_path: Path) -> None:
    update.save({"a": torch.zeros(4)}, tmp_path / "truth.safetensors")
    with pytest.raises(RuntimeError, match="nothing to compare with"):
        update.compare({"a": torch.ones(4)}, tmp_path / "truth.safetensors")


def test_intervals_are_differences_of_neighbours() -> None:
    assert HostClock().intervals([1.0, 1.5, 3.5]) == [0.5, 2.0]
    assert HostClock().intervals([1.0]) == []
