"""Memory of one settled window, by category: at its peak, and held between its first two micro-batches.

The ledger counts storages; here is told what they are for, and when to look. On CUDA the sums are laid beside what the
allocator says of the same moments.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from bench.measure.ledger import Block, Evidence, TensorLedger
from bench.measure.taps import EventKind, SettledWindow
from bench.plan.categories import HELD, PEAK, Category, named

PHASES = {
    EventKind.FETCH: Category.ACTIVATIONS,
    EventKind.LOSS: Category.TEMPORARIES,
    EventKind.STEP: Category.TEMPORARIES,
}
"""What is made after an event is for, unless more is learned about it."""
LOOK_SHARE = 0.9
"""The share of the last window's peak from which on every new peak is looked at closely."""
ALLOCATOR = {"requested": "requested_bytes", "allocated": "allocated_bytes", "active": "active_bytes",
             "reserved": "reserved_bytes"}  # fmt: skip
"""Names of the CUDA allocator's sizes, and their keys in ``torch.cuda.memory_stats``.

Allocated is the blocks of live tensors, each rounded up to at least 512 bytes. Active adds the blocks of dead tensors
that another stream may still use (``Tensor.record_stream``). Requested is what was asked for in all active blocks, so
it may exceed allocated. Reserved is what was taken from the device.
"""


class MemoryProbe:
    """Watches one window; ``ledger`` must be on from before the backend is built.

    Set ``holdings``, call ``optimizer`` with what is stepped, ``event`` after every tapped event, and ``open``,
    ``hold`` and ``close`` at the window's start, its second fetch and its end. Python's cycle collector rests while the
    window is open: some frameworks leave tensors in cycles, and a peak must not depend on when it runs.
    """

    def __init__(self, device_type: str, *, fake: bool = False) -> None:
        """``fake`` says that tensors have no memory, so that the allocator has nothing to tell."""
        self.ledger = TensorLedger(device_type)
        self.result: dict[str, int] = {}
        """Bytes by the keys of ``categories.named``, filled by ``close``."""
        self.holdings: Callable[[], Mapping[Category, Iterable[Tensor]]] = dict
        """The ``holdings`` of the backend under test."""
        self._cuda = device_type == "cuda" and not fake
        self._optimizers: list[Optimizer] = []
        self._is_open = False
        self._last: EventKind | None = None
        self._held: tuple[int, list[tuple[Block, int]]] | None = None

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """The inner optimizer that the backend steps; returned as it is."""
        self._optimizers.append(optimizer)
        return optimizer

    def event(self, kind: EventKind) -> None:
        """What is made from now on belongs to another phase; within the window, look at who holds what."""
        self.ledger.birth = PHASES[kind]
        if self._is_open:
            self._look()
        elif kind is EventKind.FETCH and self._last is EventKind.STEP:
            self.ledger.peak = self.ledger.live
        self._last = kind

    def see(self, kind: EventKind, window: SettledWindow) -> None:
        """Call what an event calls for: the window is as it is after it."""
        self.event(kind)
        if window.open is not self._is_open:
            (self.open if window.open else self.close)()
        elif window.open and kind is EventKind.FETCH and window.num_fetched == 2:
            self.hold()

    def open(self) -> None:
        """The window starts."""
        gc.collect()
        gc.disable()
        self._is_open = True
        self._look()
        self.ledger.look, self.ledger.look_above = self._look, int(LOOK_SHARE * self.ledger.peak)
        self.ledger.reset_peak()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()

    def hold(self) -> None:
        """The second micro-batch was fetched: what lives now is held between micro-batches."""
        self._held = (self.ledger.live, self.ledger.snapshot())
        if self._cuda:
            self.result |= reconcile(torch.cuda.memory_stats(), HELD, self.ledger.live)

    def close(self) -> None:
        """The window ends, and all that could be learned of its storages is known."""
        ledger = self.ledger
        self._is_open = False
        self.holdings = dict  # the backend may hold the probe, by what it taps
        ledger.look = None
        gc.enable()
        if self._cuda:
            self.result |= reconcile(torch.cuda.memory_stats(), PEAK, ledger.peak)
        self.result |= named(PEAK, ledger.peak, ledger.parts_at_peak())
        if self._held is not None:
            live, sizes = self._held
            self.result |= named(HELD, live, ledger.parts(sizes))

    def _look(self) -> None:
        """Mark what the backend and the optimizers hold now."""
        for category, tensors in self.holdings().items():
            for tensor in tensors:
                self.ledger.mark(tensor, category, Evidence.DECLARED)
        for optimizer in self._optimizers:
            for tensor, category in held_by(optimizer, self.ledger):
                self.ledger.mark(tensor, category, Evidence.STRUCTURE)


def held_by(optimizer: Optimizer, ledger: TensorLedger) -> Iterator[tuple[Tensor, Category]]:
    """An optimizer's parameters, their gradients and its state, with their categories.

    A parameter is sharded if it is a DTensor, or if the backend declared it to be; its gradient as itself.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            known = None if isinstance(parameter, DTensor) else ledger.category(parameter)
            sharded = isinstance(parameter, DTensor) or known is Category.PARAMETERS_SHARDED
            yield parameter, Category.PARAMETERS_SHARDED if sharded else Category.PARAMETERS_UNSHARDED
            if parameter.grad is not None:
                yield parameter.grad, Category.GRADIENTS_SHARDED if sharded else Category.GRADIENTS_UNSHARDED
    for leaf in tree_leaves(list(optimizer.state.values())):
        if isinstance(leaf, Tensor):
            yield leaf, Category.OPTIMIZER_STATE


def reconcile(stats: Mapping[str, Any], moment: str, tracked: int) -> dict[str, int]:
    """What the CUDA allocator says of a moment (PEAK since the last reset, or HELD: now), beside the ledger's bytes.

    ``<moment>_allocator_untracked`` is allocated minus tracked: what libraries allocate without a tensor (cuBLAS's work
    space), what composite kernels need inside, what was there before the ledger, and the rounding up of every
    allocation. ``<moment>_allocator_rounding`` is that rounding alone: active minus requested, as the allocator lowers
    both when a block becomes free for every stream, but allocated already when its tensor dies.
    """
    when = "peak" if moment == PEAK else "current"
    sizes = {name: int(stats[f"{key}.all.{when}"]) for name, key in ALLOCATOR.items()}
    sizes["rounding"] = sizes["active"] - sizes["requested"]
    sizes["untracked"] = sizes["allocated"] - tracked
    sizes["retries"] = int(stats["num_alloc_retries"])
    return {f"{moment}_allocator_{name}": size for name, size in sizes.items()}


def cuda_peaks() -> dict[str, int]:
    """The CUDA allocator's peaks since they were last reset, in bytes, and its retries and out-of-memory events."""
    stats = torch.cuda.memory_stats()
    return {
        "allocated": stats["allocated_bytes.all.peak"],
        "active": stats["active_bytes.all.peak"],
        "reserved": stats["reserved_bytes.all.peak"],
        "num_alloc_retries": stats["num_alloc_retries"],
        "num_ooms": stats["num_ooms"],
    }
