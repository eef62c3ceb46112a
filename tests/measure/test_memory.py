"""Memory by category: a loop whose every byte is known, then every kind of backend on shapes that nothing divides."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.measure.ledger import Evidence, TensorLedger
from bench.measure.memory import MemoryProbe, reconcile
from bench.measure.taps import EventKind
from bench.plan import categories
from bench.plan.categories import HELD, PEAK, Category
from bench.run import record
from tests.conftest import ROOT, asked, first
from tests.memory_ranks import BLOCK_SHAPES, NUM_BLOCKS, SHAPES

KIB = 1024
NUMELS = [math.prod(shape) for shape in SHAPES]
P = sum(NUMELS)
BUCKET = sum(math.prod(shape) for shape in BLOCK_SHAPES) // 2 * 2 + sum(map(math.prod, BLOCK_SHAPES)) % 2 * 2
"""Elements of DeepSpeed's bucket: one block, rounded up to an even number."""


def nonzero(parts: dict[Category, int]) -> dict[str, int]:
    return {str(category): size for category, size in parts.items() if size}


def test_every_byte_of_a_loop_by_hand() -> None:
    """exp keeps its result for the backward; SGD with momentum works in place: nothing else is made."""
    probe = MemoryProbe("cpu")
    with probe.ledger:
        weight = torch.nn.Parameter(torch.zeros(KIB))
        optimizer = probe.optimizer(torch.optim.SGD([weight], lr=0.1, momentum=0.9, foreach=False))
        for window in range(2):
            for micro_batch in range(2):
                probe.event(EventKind.FETCH)
                if window == 1 and micro_batch == 1:
                    probe.hold()
                loss = weight.exp().sum()
                probe.event(EventKind.LOSS)
                loss.backward()
                del loss
            optimizer.step()
            probe.event(EventKind.STEP)
            if window == 0:
                weight.grad = None
                probe.open()
        probe.close()
    memory = probe.result
    assert nonzero(categories.parts(memory, HELD)) == {
        "parameters_unsharded": 4 * KIB,
        "gradients_unsharded": 4 * KIB,
        "optimizer_state": 4 * KIB,
    }
    assert nonzero(categories.parts(memory, PEAK)) == {
        "parameters_unsharded": 4 * KIB,
        "gradients_unsharded": 8 * KIB,  # the sum of one micro-batch, and the second's before it is added
        "optimizer_state": 4 * KIB,
        "activations": 4 * KIB + 4,  # what exp made, and the loss
        "temporaries": 4,  # the gradient of the loss
    }
    assert memory[PEAK] == 20 * KIB + 8
    assert memory[HELD] == 12 * KIB


def test_without_a_second_fetch_nothing_is_held() -> None:
    probe = MemoryProbe("cpu")
    with probe.ledger:
        probe.open()
        probe.close()
    assert probe.result == {PEAK: 0, **{f"peak_{category}": 0 for category in Category}}


def test_a_closed_probe_holds_no_backend() -> None:
    """Else an engine of DeepSpeed, which holds the probe, would live through all passes that follow."""

    class Holder:
        def holdings(self) -> dict[Category, list[torch.Tensor]]:
            return {}

    holder, probe = Holder(), MemoryProbe("cpu")
    probe.holdings, still = holder.holdings, weakref.ref(holder)
    with probe.ledger:
        probe.open()
        del holder
        assert still() is not None
        probe.close()
        assert still() is None


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


def test_what_lives_when_the_window_opens_and_has_no_use_is_other() -> None:
    with TensorLedger("cpu") as ledger:
        ledger.birth = Category.ACTIVATIONS
        kept = torch.zeros(KIB)
        ledger.reset_peak()
        made = torch.zeros(KIB)
        assert (ledger.category(kept), ledger.category(made)) == (Category.OTHER, Category.ACTIVATIONS)


def test_resizing_is_followed_within_the_peak() -> None:
    with TensorLedger("cpu") as ledger:
        gathered = torch.zeros(KIB)
        ledger.mark(gathered, Category.PARAMETERS_UNSHARDED, Evidence.DECLARED)
        gathered.untyped_storage().resize_(0)
        ledger.reset_peak()
        gathered.untyped_storage().resize_(4 * KIB)
        gathered.untyped_storage().resize_(0)
    assert nonzero(ledger.parts_at_peak()) == {"parameters_unsharded": 4 * KIB}
    assert ledger.live == 0


def test_a_copy_of_a_parameter_cast_by_autocast_is_a_whole_parameter() -> None:
    with TensorLedger("cpu") as ledger:
        layer = torch.nn.Linear(32, 32, bias=False)
        ledger.reset_peak()
        ledger.birth = Category.ACTIVATIONS
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(torch.zeros(1, 32))
            parts = ledger.parts(ledger.snapshot())
        assert parts[Category.PARAMETERS_UNSHARDED] == (4 + 2) * 32 * 32
        del out


def test_hooks_on_parameters_are_gone_afterwards() -> None:
    weight = torch.nn.Parameter(torch.zeros(4))
    with TensorLedger("cpu") as ledger:
        ledger.reset_peak()
        weight.exp().sum().backward()
        assert ledger.parts_at_peak()[Category.GRADIENTS_UNSHARDED] == 16
        assert weight._backward_hooks
    assert not weight._backward_hooks


def test_the_holder_of_a_new_peak_is_asked_in_the_next_operator() -> None:
    """For buffers in an attribute of a framework that lives within one backward only."""
    attribute: dict[str, torch.Tensor] = {}
    with TensorLedger("cpu") as ledger:

        def look() -> None:
            for buffer in attribute.values():
                ledger.mark(buffer, Category.GRADIENTS_SHARDED, Evidence.DECLARED)

        ledger.look, ledger.look_above = look, 3 * KIB
        ledger.reset_peak()
        small = torch.zeros(8)
        attribute["buffer"] = torch.zeros(KIB)
        attribute["buffer"].add_(1)
        attribute.clear()
        del small
    assert nonzero(ledger.parts_at_peak()) == {"gradients_sharded": 4 * KIB, "other": 32}


@pytest.fixture
def fake_group() -> Iterator[None]:
    """A pretended group of two ranks."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("fake_group")
@pytest.mark.parametrize("has_work", [True, False])
def test_what_a_collective_reads_and_writes_is_communication(monkeypatch: pytest.MonkeyPatch, has_work: bool) -> None:
    """NCCL hands back no Work for a synchronous collective: its boxed one is None."""
    if not has_work:
        monkeypatch.setattr(dist.Work, "unbox", lambda boxed: None)
    with TensorLedger("cpu") as ledger:
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


@pytest.mark.usefixtures("fake_group")
def test_what_a_barrier_takes_is_held_by_nobody() -> None:
    """torch 2.11 keeps the last one's; no formula has it, whoever calls barriers."""
    with TensorLedger("cpu") as ledger:
        ledger.reset_peak()
        kept = torch.empty(1, dtype=torch.uint8)
        assert ledger.live == 1
        torch.ops.c10d.barrier(kept, dist.group.WORLD.boxed(), [], True, -1)
        assert ledger.live == 0
        del kept
        assert ledger.live == 0


def test_the_allocator_is_reconciled_with_the_sum_of_the_categories() -> None:
    assert reconcile(STATS, PEAK, 8_000) == {
        "peak_allocator_requested": 10_500,
        "peak_allocator_allocated": 10_240,
        "peak_allocator_active": 11_264,
        "peak_allocator_reserved": 2_097_152,
        "peak_allocator_rounding": 764,  # of all active blocks, as requested is: more than what is allocated
        "peak_allocator_untracked": 2_240,
        "peak_allocator_retries": 3,
    }
    assert reconcile(STATS, HELD, 7_000)["held_allocator_untracked"] == 680


def test_tensors_without_memory_are_nothing_that_the_allocator_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: pytest.fail("asked"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: pytest.fail("asked"))
    probe = MemoryProbe("cuda", fake=True)
    with probe.ledger:
        probe.open()
        probe.hold()
        probe.close()
    assert not any("allocator" in name for name in probe.result)


def test_ranks_are_merged_so_that_parts_still_add_up() -> None:
    first = {"peak": 10, "peak_activations": 10, "peak_other": 0, "held": 5, "held_other": 5}
    second = {"peak": 9, "peak_activations": 0, "peak_other": 9, "held": 6, "held_other": 6}
    assert record.merge([first, second]) == {
        "peak": 10, "peak_activations": 10, "peak_other": 0, "held": 6, "held_other": 6,
    }  # fmt: skip
    assert record.merge([{"peak": 1}, {"peak": 2}]) == {"peak": 2}, "N = 1 holds nothing"


def test_parts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(AssertionError, match="add up to 4 of 5 bytes"):
        categories.named(PEAK, 5, {Category.OTHER: 4})


EVERY = (
    "ddp-eager", "ddp-deferred", "fsdp2-eager", "fsdp2-deferred", "fsdp2-zero2-eager", "fsdp2-deferred-resident",
    "deepspeed-zero2-eager", "deepspeed-zero2-deferred", "deepspeed-zero3-eager", "deepspeed-zero3-deferred",
)  # fmt: skip
IN_BF16 = ("fsdp2-eager", "fsdp2-deferred", "fsdp2-deferred-resident", "deepspeed-zero2-eager")
"""Not ZeRO-3, whose ``safe_set_full_fp32_param`` fails on a parameter that the ranks do not divide (DeepSpeed 0.19)."""
LONGER = ("ddp-deferred", "fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager", "deepspeed-zero3-eager")
CELL = {
    "global_batch_size": 24,
    "sequence_length": 1,
    "workload": "tests.memory_ranks:Perceptron",
    "warmup_windows": 2,
    "timed_windows": 1,
}
Key = tuple[str, int, int, str]
"""Backend, W, N and precision of a cell."""
Measured = dict[Key, list[dict[str, int]]]
KEYS: list[Key] = [
    *((name, 1, 2, "fp32") for name in ("fsdp2-eager", "fsdp2-deferred", "deepspeed-zero3-deferred")),
    *((name, 2, 2, "fp32") for name in EVERY),
    *((name, 2, 2, "bf16") for name in IN_BF16),
    *((name, 2, 4, "fp32") for name in LONGER),
    ("fsdp2-deferred", 2, 1, "fp32"),
    *((name, 3, 2, "fp32") for name in ("fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager")),
    ("deepspeed-zero3-eager", 3, 2, "fp32"),
]

CHOSEN = [
    *((name, 2, 2, "fp32") for name in EVERY),
    *((name, 3, 2, "fp32") for name in ("fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager")),
]


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The memory of every cell, by rank."""
    folder = tmp_path_factory.mktemp("memory")
    groups: dict[int, list[dict[str, Any]]] = {}
    cells = asked(request, CHOSEN, KEYS)
    for backend, world_size, n, precision in cells:
        values = {"backend": backend, "accumulate": n, "world_size": world_size, "precision": precision}
        groups.setdefault(world_size, []).append({**CELL, **values})
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    command = [sys.executable, "-m", "tests.memory_ranks", str(folder), json.dumps(groups)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    found: dict[Key, list[dict[str, int]]] = {}
    for world_size in groups:
        files = [folder / str(world_size) / f"rank{rank}.json" for rank in range(world_size)]
        assert all(file.exists() for file in files), done.stderr[-6000:]
        ranks = [json.loads(file.read_text()) for file in files]
        keys = [key for key in cells if key[1] == world_size]
        found |= {key: [rank[i] for rank in ranks] for i, key in enumerate(keys)}
    return found


@pytest.mark.parametrize("key", first(CHOSEN, KEYS), ids=str)
def test_the_categories_add_up_on_every_rank(measured: Measured, key: Key) -> None:
    for memory in measured[key]:
        for total in (PEAK, HELD) if key[2] > 1 else (PEAK,):
            assert sum(categories.parts(memory, total).values()) == memory[total] > 0
        assert (HELD in memory) == (key[2] > 1)


def rows(shape: Sequence[int], world_size: int) -> int:
    """Rows of one shard in FSDP2: as ``torch.chunk`` cuts, the last ones padded."""
    return math.ceil(shape[0] / world_size)


def own_rows(shape: Sequence[int], world_size: int, rank: int) -> int:
    """Rows of this rank's shard without padding."""
    each = rows(shape, world_size)
    return max(0, min(each, shape[0] - rank * each))


def padded(world_size: int) -> int:
    """Elements of all of FSDP2's shards on any rank."""
    return sum(rows(shape, world_size) * math.prod(shape[1:]) for shape in SHAPES)


def flat(world_size: int) -> int:
    """Elements of ZeRO-2's flat parameters, aligned to twice the number of ranks."""
    return math.ceil(P / (2 * world_size)) * 2 * world_size


def parts_of_zero3(world_size: int) -> int:
    """Elements of all of ZeRO-3's partitions on any rank."""
    return sum(math.ceil(numel / world_size) for numel in NUMELS)


def whole_in_partition(world_size: int, rank: int) -> int:
    """Elements of the parameters that overlap a rank's partition in ZeRO-2, each counted whole."""
    size, start, found = flat(world_size) // world_size, 0, 0
    for numel in NUMELS:
        found += numel * (start < (rank + 1) * size and start + numel > rank * size)
        start += numel
    return found


def expect_ddp(world_size: int, rank: int, bf16: bool, eager: bool) -> dict[str, int]:
    return {
        "parameters_unsharded": 4 * P,
        "gradients_unsharded": 4 * P,
        "optimizer_state": 8 * P + 4 * len(SHAPES),  # AdamW counts the steps of every parameter
        "communication": 4 * P,  # the buckets
    }


def expect_fsdp2(world_size: int, rank: int, bf16: bool, eager: bool) -> dict[str, int]:
    own = sum(own_rows(shape, world_size, rank) * math.prod(shape[1:]) for shape in SHAPES)
    gradients = {"gradients_sharded": 4 * padded(world_size)} if eager else {"gradients_unsharded": 4 * P}
    return {
        "parameters_sharded": 4 * padded(world_size),
        **gradients,
        "optimizer_state": 8 * own + 4 * len(SHAPES),
    }


def expect_resident(world_size: int, rank: int, bf16: bool, eager: bool) -> dict[str, int]:
    """Gathered parameters are as long as all shards with their padding."""
    gathered = (2 if bf16 else 4) * padded(world_size) * world_size
    return {**expect_fsdp2(world_size, rank, bf16, eager), "parameters_unsharded": gathered}


def expect_zero2(world_size: int, rank: int, bf16: bool, eager: bool) -> dict[str, int]:
    """In fp32 the accumulator is made of whole parameters, in bf16 (compact, of fp32) of the partition alone."""
    part = flat(world_size) // world_size
    summed = 4 * (part if bf16 else whole_in_partition(world_size, rank))
    return {
        "parameters_sharded": 4 * part,
        "parameters_unsharded": (2 if bf16 else 4) * flat(world_size),
        **({"gradients_sharded": summed} if eager else {"gradients_unsharded": 4 * P}),
        "optimizer_state": 8 * part + 4,
    }


def expect_zero3(world_size: int, rank: int, bf16: bool, eager: bool) -> dict[str, int]:
    """The partition of the gradients and the bucket are always there."""
    part = parts_of_zero3(world_size)
    return {
        "parameters_sharded": (2 if bf16 else 4) * part + 4 * part,
        "gradients_sharded": 4 * part,
        **({} if eager else {"gradients_unsharded": 4 * P}),
        "optimizer_state": 8 * part + 4,
        "communication": 4 * BUCKET,
    }


Expect = Callable[[int, int, bool, bool], dict[str, int]]


def expectation(backend: str) -> Expect:
    table: dict[str, Expect] = {
        "ddp": expect_ddp,
        "fsdp2-deferred-resident": expect_resident,
        "fsdp2": expect_fsdp2,
        "deepspeed-zero2": expect_zero2,
        "deepspeed-zero3": expect_zero3,
    }
    return next(expect for name, expect in table.items() if backend.startswith(name))


@pytest.mark.parametrize("key", first(CHOSEN, [key for key in KEYS if key[2] > 1]), ids=str)
def test_what_is_held_between_micro_batches_is_known_to_the_byte(measured: Measured, key: Key) -> None:
    backend, world_size, _, precision = key
    for rank, memory in enumerate(measured[key]):
        held = nonzero(categories.parts(memory, HELD))
        tokens_and_constants = held.pop("other")
        loss = held.pop("activations", 0)  # a loop's variable keeps it
        assert held == expectation(backend)(world_size, rank, precision == "bf16", "eager" in backend)
        assert loss in (0, 4)
        assert 0 <= tokens_and_constants - 3 * 24 * 65 * 4 <= 64


@pytest.mark.parametrize("world_size", first([2, 3], [1, 2, 3]))
def test_deferring_holds_whole_gradients_instead_of_shards(measured: Measured, world_size: int) -> None:
    """C8 of the research: 4P(1 - 1/W) bytes more, but for the shards' padding; nothing at W = 1."""
    eager, deferred = (measured[f"fsdp2-{sync}", world_size, 2, "fp32"][0][HELD] for sync in ("eager", "deferred"))
    assert deferred - eager == 4 * (P - padded(world_size))
    assert (deferred - eager == 0) == (world_size == 1)


@pytest.mark.slow
@pytest.mark.parametrize("backend", LONGER)
def test_more_micro_batches_hold_no_more(measured: Measured, backend: str) -> None:
    """C9 of the research."""
    two, four = (measured[backend, 2, n, "fp32"][0] for n in (2, 4))
    assert categories.parts(two, HELD) == categories.parts(four, HELD)


@pytest.mark.parametrize("key", first(CHOSEN, KEYS), ids=str)
def test_what_is_always_there_is_in_the_peak(measured: Measured, key: Key) -> None:
    """Parameters and optimizer state at the peak are as between micro-batches, gathered parameters more."""
    backend, world_size, _, precision = key
    for rank, memory in enumerate(measured[key]):
        peak = categories.parts(memory, PEAK)
        held = expectation(backend)(world_size, rank, precision == "bf16", "eager" in backend)
        for category in (Category.PARAMETERS_SHARDED, Category.OPTIMIZER_STATE):
            assert peak[category] == held.get(category, 0)
        assert peak[Category.PARAMETERS_UNSHARDED] >= held.get("parameters_unsharded", 0)
        assert peak[Category.OTHER] - 3 * 24 * 65 * 4 <= 64, "nothing of size is unexplained"


def test_zero2_has_two_copies_of_its_partition_when_it_adds(measured: Measured) -> None:
    """The buffer of a backward is made anew and then added: section 3.5 of the research on DeepSpeed."""
    most = max(measured["deepspeed-zero2-eager", 3, 2, "fp32"], key=lambda memory: memory[PEAK])
    assert most["peak_gradients_sharded"] == 2 * most["held_gradients_sharded"]


def test_fsdp2_gathers_and_reduces_one_unit_at_a_time(measured: Measured) -> None:
    """At an eager peak: one unit's whole gradients, and no more gathered than two units and the root."""
    block = sum(map(math.prod, BLOCK_SHAPES))
    memory: dict[str, Any] = measured["fsdp2-eager", 3, 2, "fp32"][0]
    assert block * 4 <= memory["peak_gradients_unsharded"] <= (block + P - NUM_BLOCKS * block) * 4
    assert memory["peak_parameters_unsharded"] < 4 * padded(3) * 3


def test_tensors_without_memory_are_counted_as_if_they_had_some() -> None:
    """As in a virtual world with fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), TensorLedger("cpu") as ledger:
        weight = torch.nn.Parameter(torch.zeros(KIB))
        ledger.reset_peak()
        ledger.birth = Category.ACTIVATIONS
        weight.exp().sum().backward()
        parts = ledger.parts_at_peak()
        assert parts[Category.PARAMETERS_UNSHARDED] == parts[Category.GRADIENTS_UNSHARDED] == 4 * KIB
        assert ledger.live == 8 * KIB
