"""Memory by category: a loop whose every byte is known, then every kind of backend on shapes that nothing divides."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from bench.measure.ledger import Evidence, TensorLedger
from bench.measure.memory import MemoryProbe, reconcile
from bench.measure.taps import EventKind, SettledWindows, Taps
from bench.plan.categories import HELD, PEAK, Category
from bench.plan.task import SETTLED_WINDOWS
from bench.run import trial_record
from tests.worlds import pretended

KIB = 1024


def nonzero(parts: dict[Category, int]) -> dict[str, int]:
    return {str(category): size for category, size in parts.items() if size}


def parts(memory: dict[str, int], total: str) -> dict[str, int]:
    return nonzero({category: memory[f"{total}_{category}"] for category in Category})


@pytest.mark.parametrize("ahead", [False, True], ids=["one", "window"])
def test_every_byte_of_a_loop_by_hand(ahead: bool) -> None:
    """exp keeps its result for the backward; SGD with momentum works in place: nothing else is made.

    A loop that fetches a window ahead has the same activations.
    """
    probe, taps = MemoryProbe("cpu"), Taps(time.perf_counter)
    windows = SettledWindows(2, probe)

    def on_event(kind: EventKind) -> None:
        taps.losses.clear()
        probe.on_event(kind)
        windows.on_event(kind)

    taps.on_event = on_event
    loss_of = taps.loss(lambda model, _: model(weight).exp().sum())
    with probe.active():
        weight = torch.nn.Parameter(torch.zeros(KIB))
        optimizer = probe.optimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False))
        for _ in range(SETTLED_WINDOWS + 1):
            weight.grad = None
            for micro_batch in range(2):
                for _ in range(2 * (micro_batch == 0) if ahead else 1):
                    taps.record(EventKind.FETCH)
                loss_of(torch.nn.Identity(), torch.empty(0)).backward()
            optimizer.step()
            taps.record(EventKind.STEP)
    memory = probe.result
    assert parts(memory, HELD) == {
        "parameters_unsharded": 4 * KIB,
        "gradients_unsharded": 4 * KIB,
        "optimizer_state": 4 * KIB,
    }
    assert parts(memory, PEAK) == {
        "parameters_unsharded": 4 * KIB,
        "gradients_unsharded": 8
        * KIB,  # the sum of one micro-batch, and the second's before it is added
        "optimizer_state": 4 * KIB,
        "activations": 4 * KIB + 4,  # what exp made, and the loss
        "temporaries": 4,  # the gradient of the loss
    }
    assert memory[PEAK] == 20 * KIB + 8
    assert memory[HELD] == 12 * KIB


def test_the_peak_is_told_by_what_is_learned_later() -> None:
    """A gradient is one from its birth, though only a later look finds out; it may be dead by the end."""
    with TensorLedger("cpu") as ledger:
        ledger.reset_peak()
        ledger.birth = Category.TEMPORARIES
        early = torch.zeros(KIB)
        at_birth = ledger.parts_at_peak()
        ledger.mark(early, Category.GRADIENTS_SHARDED, Evidence.STRUCTURE)
        del early
        torch.zeros(8)
    assert nonzero(at_birth) == {"temporaries": 4 * KIB}
    assert nonzero(ledger.parts_at_peak()) == {"gradients_sharded": 4 * KIB}
    assert sum(ledger.parts_at_peak().values()) == ledger.peak == 4 * KIB


def test_the_strongest_evidence_counts_whatever_came_first() -> None:
    with TensorLedger("cpu") as ledger:
        tensor = torch.zeros(KIB)
        for evidence, category in (
            (Evidence.STRUCTURE, Category.GRADIENTS_UNSHARDED),
            (Evidence.COLLECTIVE, Category.COMMUNICATION),
            (Evidence.DECLARED, Category.PARAMETERS_SHARDED),
            (Evidence.STRUCTURE, Category.OPTIMIZER_STATE),
        ):
            ledger.mark(tensor[5:], category, evidence)
        assert ledger.category(tensor) is Category.PARAMETERS_SHARDED
        assert nonzero(ledger.parts(ledger.snapshot())) == {"parameters_sharded": 4 * KIB}


def test_hooks_on_parameters_are_gone_afterwards() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    with TensorLedger("cpu") as ledger:
        ledger.reset_peak()
        weight.exp().sum().backward()
        assert ledger.parts_at_peak()[Category.GRADIENTS_UNSHARDED] == 16
        assert weight._backward_hooks
    assert not weight._backward_hooks


def test_a_gradient_that_autograd_copies_is_one() -> None:
    """Both terms of a sum have the same gradient, which autograd keeps for one of them and copies for the other."""
    probe = MemoryProbe("cpu")
    with probe.active():
        terms = [torch.nn.Parameter(torch.zeros(KIB)) for _ in range(2)]
        probe.start()
        probe.ledger.birth = Category.TEMPORARIES
        sum(terms).exp().sum().backward()  # type: ignore[union-attr]
        probe.on_event(EventKind.FETCH)
        kept = [probe.ledger.category(term.grad) for term in terms]  # type: ignore[arg-type]
        probe.stop()
    assert kept == [Category.GRADIENTS_UNSHARDED] * 2


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


@pytest.mark.parametrize("has_work", [True, False])
def test_what_a_collective_reads_and_writes_is_communication(
    monkeypatch: pytest.MonkeyPatch, has_work: bool
) -> None:
    """NCCL hands back no Work for a synchronous collective: its boxed one is None."""
    if not has_work:
        monkeypatch.setattr(dist.Work, "unbox", lambda boxed: None)
    with pretended(2), TensorLedger("cpu") as ledger:
        part, whole = torch.zeros(KIB), torch.zeros(2 * KIB)
        dist.all_gather_into_tensor(whole, part)
        alone = torch.zeros(3)
        assert nonzero(ledger.parts(ledger.snapshot())) == {"communication": 12 * KIB, "other": 12}
        del alone


STATS = {
    "requested_bytes.all.peak": 10_500,
    "requested_bytes.all.current": 7_000,
    "allocated_bytes.all.peak": 10_240,
    "allocated_bytes.all.current": 7_680,
    "active_bytes.all.peak": 11_264,
    "active_bytes.all.current": 7_680,
    "reserved_bytes.all.peak": 2_097_152,
    "reserved_bytes.all.current": 2_097_152,
    "num_alloc_retries": 3,
}


def test_the_allocator_is_reconciled_with_the_sum_of_the_categories() -> None:
    assert (
        reconcile(STATS, PEAK, 8_000)
        == {
            "peak_allocator_requested": 10_500,
            "peak_allocator_allocated": 10_240,
            "peak_allocator_active": 11_264,
            "peak_allocator_reserved": 2_097_152,
            "peak_allocator_rounding": 764,  # of all active blocks, as requested is: more than what is allocated
            "peak_allocator_untracked": 2_240,
            "peak_allocator_retries": 3,
        }
    )
    assert reconcile(STATS, HELD, 7_000)["held_allocator_untracked"] == 680


def test_ranks_are_merged_so_that_parts_still_add_up() -> None:
    first = {"peak": 10, "peak_activations": 10, "peak_other": 0, "held": 5, "held_other": 5}
    second = {"peak": 9, "peak_activations": 0, "peak_other": 9, "held": 6, "held_other": 6}
    assert trial_record.merge([first, second]) == {
        "peak": 10, "peak_activations": 10, "peak_other": 0, "held": 6, "held_other": 6,
    }  # fmt: skip
    assert trial_record.merge([{"peak": 1}, {"peak": 2}]) == {"peak": 2}, "N = 1 holds nothing"
