"""A ledger of live tensor storages on one device type: their bytes, peak, and categories.

It counts every storage that an operator returned or that was passed to ``mark``, from allocation or
resizing until it is freed, except the byte of a barrier. Each storage has one of nine categories,
so categories add up to the total. Allocations inside libraries are invisible: gloo's workspace (its
reduce-scatter copies the whole input), oneDNN's, temporaries inside composite kernels, and the
interpreter's. So it measures what a backend holds, not the process.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Parameter
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from bench.measure.local_mode import LocalMode
from bench.plan.categories import Category

if TYPE_CHECKING:
    from bench.measure.local_mode import Arguments, Operator, Options


class Evidence(IntEnum):
    """Why a storage is in its category.

    The strongest evidence counts for its whole life; of equals, the first.
    """

    DECLARED = 0
    """The backend lists it in ``Backend.holdings``."""
    STRUCTURE = 1
    """Autograd or the inner optimizer holds it as a parameter, gradient or state."""
    COLLECTIVE = 2
    """It was an argument or result of a ``c10d`` operator, or of FSDP2's copies in and out."""
    BIRTH = 3
    """When it was allocated: before the window, in a forward, or later."""


RELEASE_S = 0.001
"""How long gloo's thread may take to release the tensors of a finished collective."""
COMMUNICATING = frozenset({"c10d", "_c10d_functional", "fsdp"})
"""Namespaces of operators that communicate, or copy into and out of communication buffers."""
BARRIER = torch.ops.c10d.barrier.default
Parts = dict[Category, int]
"""Bytes by category."""


@dataclass(slots=True, eq=False)
class Block:
    """One storage: its current size in bytes, and the best known category."""

    category: Category
    size: int = 0
    evidence: Evidence = Evidence.BIRTH


class TensorLedger(LocalMode):
    """Live and peak bytes of the storages of one device type while the mode is active.

    FSDP2 frees and reuses gathered parameters by resizing their storages outside any operator, so
    ``resize_`` is patched; operators that gloo runs during a wait are ignored. From the first
    ``reset_peak`` on, categories are derived: parameters from the operators that take them,
    gradients from autograd, communication from collectives. ``mark`` adds more.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._blocks: dict[int, Block] = {}
        self._watched: dict[int, weakref.ref[UntypedStorage]] = {}
        self._gradient_hooks = WeakIdKeyDictionary()
        """The handle of the hook of each parameter."""
        self._log: list[tuple[Block, int]] | None = None
        self._at_reset: list[tuple[Block, int]] = []
        self._log_at_peak = 0
        self._waiting = False
        self._is_new_peak = False
        self._is_active = False
        self._lock = threading.RLock()  # threads may allocate at once
        self.birth = Category.OTHER
        """The category of new storages until more is known about them."""
        self.look: Callable[[], None] | None = None
        """Called in the operator after one that set a new peak of at least ``look_above`` bytes, to
        mark what is held now: some buffers live only during a backward, in attributes of a
        framework."""
        self.look_above = 0
        self.live = 0
        self.peak = 0

    def reset_peak(self) -> None:
        """Reset the peak. Live storages of unknown use become OTHER."""
        for block in self._blocks.values():
            if block.evidence is Evidence.BIRTH:
                block.category = Category.OTHER
        self._at_reset, self._log, self._log_at_peak = self.snapshot(), [], 0
        self.peak = self.live

    def snapshot(self) -> list[tuple[Block, int]]:
        """All live storages with their current bytes, for ``parts``."""
        return [(block, block.size) for block in list(self._blocks.values())]

    @staticmethod
    def parts(sizes: Iterable[tuple[Block, int]]) -> Parts:
        """Sum bytes, or changes of bytes, of storages by category."""
        found = dict.fromkeys(Category, 0)
        for block, size in sizes:
            found[block.category] += size
        return found

    def parts_at_peak(self) -> Parts:
        """The peak by category, as known now; some of its storages may be freed since."""
        changes = list(self._at_reset)
        if self._log is not None:
            changes += self._log[: self._log_at_peak]
        return self.parts(changes)

    def mark(self, tensor: Tensor, category: Category, evidence: Evidence) -> None:
        """Set the category of a tensor's storage. Storages on other devices are ignored."""
        local = tensor
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
        if local.device.type != self._device_type or local.layout is not torch.strided:
            return
        block = self._track(local.untyped_storage())
        if evidence < block.evidence:
            block.category, block.evidence = category, evidence

    def pinned(self) -> int:
        """Bytes of the live storages that are in pinned memory of the host."""
        found = 0
        for key, block in list(self._blocks.items()):
            storage = self._watched[key]()
            if storage is not None and storage.is_pinned():
                found += block.size
        return found

    def category(self, tensor: Tensor) -> Category | None:
        """The category of a tensor's storage; None if it was never seen."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is None:
            return None
        return block.category

    def run(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        if self._waiting:
            return func(*args, **kwargs)
        return self._count(func, args, kwargs)

    def _count(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        """Run an operator, and track what it returns."""
        if self._is_new_peak and self.look is not None:
            self._is_new_peak = False
            self.look()
        result: object = func(*args, **kwargs)
        if func.namespace == "c10d":
            _finish(result)
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and not isinstance(leaf, DTensor)
                and leaf.device.type == self._device_type
            ):
                self._track(leaf.untyped_storage())
        if func is BARRIER:  # torch 2.11 keeps its byte until the next barrier
            self._forget(args[0].untyped_storage()._cdata)
        else:
            self._classify(func, args, kwargs, result)
        return result

    def _classify(self, func: Operator, args: Arguments, kwargs: Options, result: Any) -> None:
        """Derive categories from an operator's arguments and results."""
        if func.namespace in COMMUNICATING:
            for leaf in tree_leaves((args, kwargs, result)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                    self.mark(leaf, Category.COMMUNICATION, Evidence.COLLECTIVE)
        elif self._log is not None:
            for arg in args:
                if _is_parameter(arg):
                    self._track_parameter(arg)
                    if func is torch.ops.aten._to_copy.default:
                        self.mark(result, Category.PARAMETERS_UNSHARDED, Evidence.STRUCTURE)

    def _track_parameter(self, parameter: Tensor) -> None:
        """Record a parameter that an operator took, so it is unsharded, and watch its gradients."""
        self.mark(parameter, Category.PARAMETERS_UNSHARDED, Evidence.STRUCTURE)
        if parameter.requires_grad and parameter not in self._gradient_hooks:
            # Before autograd adds it to ``grad``, and before any framework's hook moves it
            # elsewhere.
            self._gradient_hooks[parameter] = parameter.register_hook(
                lambda gradient: self.mark(
                    gradient, Category.GRADIENTS_UNSHARDED, Evidence.STRUCTURE
                )
            )

    def mark_gradients(self) -> None:
        """Mark the gradients that recorded parameters have now.

        Autograd keeps a copy, which no hook has seen, of one that others use too, such as that of
        two terms of a sum.
        """
        for parameter in list(self._gradient_hooks):
            if parameter.grad is not None:
                self.mark(parameter.grad, Category.GRADIENTS_UNSHARDED, Evidence.STRUCTURE)

    def _track(self, storage: UntypedStorage) -> Block:
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._blocks[key] = Block(self.birth)
        self._set(self._blocks[key], storage.nbytes())
        return self._blocks[key]

    def _set(self, block: Block, size: int) -> None:
        with self._lock:
            if size == block.size:
                return
            self.live += size - block.size
            if self._log is not None:
                self._log.append((block, size - block.size))
            block.size = size
            if self.live > self.peak:
                self.peak = self.live
                if self._log is not None:
                    self._log_at_peak = len(self._log)
                    self._is_new_peak = self.peak >= self.look_above

    def _resize(
        self,
        original: Callable[[UntypedStorage, int], object],
        storage: UntypedStorage,
        size: int,
    ) -> object:
        result = original(storage, size)
        if storage._cdata in self._watched:
            self._track(storage)
        return result

    def _wait(
        self, original: Callable[..., object], work: dist.Work, *timeout: timedelta
    ) -> object:
        before, self._waiting = self._waiting, True
        try:
            return original(work, *timeout)
        finally:
            self._waiting = before

    def _run_thread(
        self, original: Callable[[threading.Thread], object], thread: threading.Thread
    ) -> None:
        """Run a new thread with a mode of its own, since a thread starts without modes."""
        with _ThreadMode(self):
            original(thread)

    def of_thread(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        """Run an operator of another thread, and track its results while the ledger is active."""
        if not self._is_active:
            return func(*args, **kwargs)
        return self._count(func, args, kwargs)

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        if (block := self._blocks.pop(key, None)) is not None:
            self._set(block, 0)

    def __enter__(self) -> Self:
        self._patches = ExitStack()
        self._patches.enter_context(_patched(UntypedStorage, "resize_", self._resize))
        self._patches.enter_context(_patched(dist.Work, "wait", self._wait))
        self._patches.enter_context(
            _patched(threading.Thread, "_bootstrap_inner", self._run_thread)
        )
        self._is_active = True
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._is_active = False
        self._patches.close()
        for hook in self._gradient_hooks.values():
            hook.remove()
        self._gradient_hooks.clear()


class _ThreadMode(LocalMode):
    """Has a ledger track the operators of another thread than the one that it is active in."""

    def __init__(self, ledger: TensorLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def run(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        return self._ledger.of_thread(func, args, kwargs)


def _is_parameter(arg: object) -> bool:
    """Whether it is a parameter. ``isinstance`` is too slow here; tensor subclasses have a flag."""
    return type(arg) is Parameter or (isinstance(arg, Tensor) and "_is_param" in arg.__dict__)


def _finish(result: object) -> None:
    """Wait for a collective where it is issued, and until gloo's thread has released its tensors.

    Otherwise the peak would depend on the scheduling of that thread.
    """
    for leaf in tree_leaves(result):
        # NCCL returns no Work for a synchronous collective: it runs on the current stream.
        if isinstance(leaf, torch.ScriptObject) and (work := dist.Work.unbox(leaf)) is not None:
            work.wait()
    time.sleep(RELEASE_S)


@contextmanager
def _patched(owner: type, name: str, replacement: Callable[..., object]) -> Iterator[None]:
    """Replace a method while the context is open; its replacement is given the original first."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)
