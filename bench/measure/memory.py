"""Memory of one settled window by category: at its peak, and held between two micro-batches.

The ledger counts storages; this module tells it their categories and when to look. On CUDA the
totals are compared with the allocator's at the same moments.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from bench.backends.base import Backend
from bench.measure.host_copies import HOST, HostCopies
from bench.measure.ledger import Block, Evidence, TensorLedger
from bench.measure.process_memory import bytes_in_use
from bench.measure.taps import EventKind
from bench.plan.categories import HELD, ON_HOST, PEAK, PINNED, UNTRACKED, Category, named

PHASES = {
    EventKind.FETCH: Category.ACTIVATIONS,
    EventKind.FORWARD: Category.ACTIVATIONS,
    EventKind.LOSS: Category.TEMPORARIES,
    EventKind.STEP: Category.TEMPORARIES,
}
"""Category of storages allocated after each event, unless more is known."""
NO_BACKWARD = -1
"""What torch calls the backward where none runs."""
LOOK_SHARE = 0.9
"""Share of the last window's peak above which every new peak is inspected."""
ALLOCATOR = ("requested", "allocated", "active", "reserved")
"""Sizes of the CUDA allocator, as in the keys of ``torch.accelerator.memory_stats``.

Allocated: blocks of live tensors, each rounded up to at least 512 bytes. Active: also blocks of
dead tensors that another stream may still use (``Tensor.record_stream``). Requested: the sizes
asked for in active blocks, so it may exceed allocated. Reserved: what was taken from the device.
"""


class MemoryProbe:
    """Watches one window; ``active`` must be open before the backend is built.

    With ``on_host`` it also watches tensors of the host, and what is copied between host and
    device. Call ``watch``, pass the stepped optimizer to ``optimizer``, and call ``on_event`` after
    every tapped event, before it opens or closes the window. Python's cycle collector is off
    meanwhile: some frameworks leave tensors in cycles, and the peak must not depend on when it
    runs.
    """

    def __init__(
        self,
        device_type: str,
        *,
        fake: bool = False,
        on_host: bool = False,
        given_bytes: int = 0,
    ) -> None:
        """``fake``: tensors have no memory, so no allocator is asked, nor what is pinned.

        ``on_host``: the host's memory is watched, too; ``given_bytes``: of tensors made before.
        """
        self.ledger = TensorLedger(device_type)
        self.host: TensorLedger | None = None
        if on_host and device_type != HOST:
            self.host = TensorLedger(HOST)
        self._copies = HostCopies()
        self.result: dict[str, int] = {}
        """Bytes by the keys of ``categories.named``, filled at the end of the window."""
        self.holdings: Callable[[], Mapping[Category, Iterable[Tensor]]] = dict
        """``holdings`` of the backend under test."""
        self._is_fake = fake
        self._cuda = device_type == "cuda" and not fake
        self._optimizers: list[Optimizer] = []
        self._is_open = False
        self._num_fetched = self._num_computed = 0
        self._last: EventKind | None = None
        self._held: dict[TensorLedger, tuple[int, list[tuple[Block, int]]]] = {}
        self._before: int | None = None
        """What ``malloc`` had in use, without the tensors that were made before; None if it is not
        asked."""
        if device_type == "cpu" and not fake and (in_use := bytes_in_use()) is not None:
            self._before = in_use - given_bytes
        self._most_untracked: int | None = None

    @property
    def ledgers(self) -> Iterator[tuple[str, TensorLedger]]:
        """The ledgers, each with what the keys of its results begin with."""
        yield "", self.ledger
        if self.host is not None:
            yield f"{ON_HOST}_", self.host

    @contextmanager
    def active(self) -> Iterator[None]:
        """The dispatch modes that see every tensor."""
        with ExitStack() as modes:
            for _, ledger in self.ledgers:
                modes.enter_context(ledger)
            if self.host is not None:
                modes.enter_context(self._copies)
            yield

    def watch(self, backend: Backend) -> None:
        """Ask this backend what it holds."""
        self.holdings = backend.holdings

    def built(self, model: nn.Module) -> None:
        """Know the buffers of a model.

        DDP broadcasts the only one of a dtype as it is, which makes it no bucket.
        """
        for buffer in model.buffers():
            self._mark(buffer, Category.OTHER, Evidence.DECLARED)

    def optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Watch the inner optimizer that the backend steps, and return it."""
        self._optimizers.append(optimizer)
        return optimizer

    def on_event(self, kind: EventKind) -> None:
        """Enter the phase after an event; inside the window, also look at who holds what."""
        for _, ledger in self.ledgers:
            ledger.birth = PHASES[kind]
        if kind is not EventKind.FORWARD:
            if self._is_open:
                self._look()
                self._note_untracked()
            elif kind is EventKind.FETCH and self._last is EventKind.STEP:
                for _, ledger in self.ledgers:
                    ledger.peak = ledger.live
            self._last = kind
        if self._is_open:
            self._num_fetched += kind is EventKind.FETCH
            self._num_computed += kind is EventKind.LOSS
            if kind is EventKind.FETCH and self._num_fetched == 2 and self._num_computed == 1:
                self._hold()
            elif kind is EventKind.LOSS and self._num_fetched != self._num_computed == 1:
                self._hold_before_forward()

    def start(self) -> None:
        gc.collect()
        gc.disable()
        self._is_open = True
        self._look()
        for _, ledger in self.ledgers:
            ledger.look, ledger.look_above = self._look, int(LOOK_SHARE * ledger.peak)
            ledger.reset_peak()
        self._copies.start()
        if self._cuda:
            torch.accelerator.reset_peak_memory_stats()

    def _hold(self) -> None:
        """Record what is held between micro-batches: live at the second fetch, or forward."""
        for _, ledger in self.ledgers:
            self._held[ledger] = ledger.live, ledger.snapshot()
        if self.host is not None and not self._is_fake:
            with _disable_current_modes():
                self.result[PINNED] = self.host.pinned()
        if (untracked := self._untracked()) is not None:
            self.result[f"{HELD}_{UNTRACKED}"] = untracked
        if self._cuda:
            self.result |= reconcile(torch.accelerator.memory_stats(), HELD, self.ledger.live)

    def _untracked(self) -> int | None:
        """Bytes in use now that the ledger does not know; None if they are not counted."""
        in_use = None
        if self._before is not None:
            in_use = bytes_in_use()
        if in_use is None or self._before is None:
            return None
        return in_use - self._before - self.ledger.live

    def _note_untracked(self) -> None:
        untracked = self._untracked()
        if untracked is None:
            return
        if self._most_untracked is None or untracked > self._most_untracked:
            self._most_untracked = untracked

    def _hold_before_forward(self) -> None:
        """``_hold`` before the next forward, in a loop that fetches ahead.

        A forward in a backward recomputes a block, and does not count.
        """

        def before(*_: object) -> None:
            if torch._C._current_graph_task_id() == NO_BACKWARD:
                handle.remove()
                if self._is_open:
                    self._look()
                    self._hold()

        # It is called before the hooks of the modules, which may gather parameters.
        handle = register_module_forward_pre_hook(before)

    def stop(self) -> None:
        """Close the window and compute ``result``."""
        self._copies.stop()
        self._is_open = False
        self.holdings = dict  # breaks a cycle with the backend, which may hold the probe
        for _, ledger in self.ledgers:
            ledger.look = None
        gc.enable()
        if self._cuda:
            self.result |= reconcile(torch.accelerator.memory_stats(), PEAK, self.ledger.peak)
        if self.host is not None:
            self.result |= self._copies.bytes
        if self._most_untracked is not None:
            self.result[f"{PEAK}_{UNTRACKED}"] = self._most_untracked
        for prefix, ledger in self.ledgers:
            found = named(PEAK, ledger.peak, ledger.parts_at_peak())
            if ledger in self._held:
                live, sizes = self._held[ledger]
                found |= named(HELD, live, ledger.parts(sizes))
            for name, size in found.items():
                self.result[f"{prefix}{name}"] = size

    def _look(self) -> None:
        """Mark what the backend and the optimizers hold now."""
        for category, tensors in self.holdings().items():
            for tensor in tensors:
                self._mark(tensor, category, Evidence.DECLARED)
        for optimizer in self._optimizers:
            for _, ledger in self.ledgers:
                for tensor, category in categorized(optimizer, ledger):
                    ledger.mark(tensor, category, Evidence.STRUCTURE)
        for _, ledger in self.ledgers:
            ledger.mark_gradients()

    def _mark(self, tensor: Tensor, category: Category, evidence: Evidence) -> None:
        for _, ledger in self.ledgers:
            ledger.mark(tensor, category, evidence)


def categorized(optimizer: Optimizer, ledger: TensorLedger) -> Iterator[tuple[Tensor, Category]]:
    """An optimizer's parameters, their gradients and its state, with their categories.

    A parameter is sharded if it is a DTensor or the backend declared it; its gradient likewise.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            of_parameter, of_gradient = Category.PARAMETERS_UNSHARDED, Category.GRADIENTS_UNSHARDED
            if (
                isinstance(parameter, DTensor)
                or ledger.category(parameter) is Category.PARAMETERS_SHARDED
            ):
                of_parameter, of_gradient = Category.PARAMETERS_SHARDED, Category.GRADIENTS_SHARDED
            yield parameter, of_parameter
            if parameter.grad is not None:
                yield parameter.grad, of_gradient
    for leaf in tree_leaves(list(optimizer.state.values())):
        if isinstance(leaf, Tensor):
            yield leaf, Category.OPTIMIZER_STATE


def reconcile(stats: Mapping[str, int], moment: str, tracked: int) -> dict[str, int]:
    """The CUDA allocator's sizes at a moment, compared with the bytes that the ledger tracked.

    The moment is PEAK, for those since the last reset, or HELD, for now.
    ``<moment>_allocator_untracked`` is allocated minus tracked: library allocations without a
    tensor (cuBLAS's workspace), temporaries of composite kernels, allocations from before the
    ledger, and rounding. ``<moment>_allocator_rounding`` is the rounding alone: active minus
    requested, which the allocator lowers together when a block becomes free on every stream;
    allocated already drops when the tensor dies.
    """
    when = "current"
    if moment == PEAK:
        when = "peak"
    sizes = _allocator(stats, when)
    sizes["rounding"] = sizes["active"] - sizes["requested"]
    sizes["untracked"] = sizes["allocated"] - tracked
    sizes["retries"] = int(stats["num_alloc_retries"])
    return {f"{moment}_allocator_{name}": size for name, size in sizes.items()}


def _allocator(stats: Mapping[str, int], when: str) -> dict[str, int]:
    return {name: int(stats[f"{name}_bytes.all.{when}"]) for name in ALLOCATOR}


def cuda_peaks() -> dict[str, int]:
    """The CUDA allocator's peaks since the last reset in bytes, its retries, and failures."""
    stats = torch.accelerator.memory_stats()
    peaks = _allocator(stats, "peak")
    del peaks["requested"]
    for name in ("num_alloc_retries", "num_ooms"):
        peaks[name] = stats[name]
    return peaks
