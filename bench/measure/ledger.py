"""A ledger of live tensor storages: the bytes of one device type, their peak, and what each is for.

It counts the bytes of every storage that an operator returned, or that was named to it, from its birth (or resizing) to
its death, but for the byte that a barrier takes. Each is in one of nine categories, so that they add up to the whole.
It does not see what libraries allocate for themselves: the work space of gloo (its reduce-scatter copies the whole
input) and oneDNN, what a composite kernel makes and frees inside, or the interpreter. So it says what a backend holds,
not what the process weighs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from bench.plan.categories import Category


class Evidence(IntEnum):
    """Why a storage is put into a category. The strongest counts for the storage's whole life, then the first."""

    DECLARED = 0
    """The backend names it in ``Backend.holdings``."""
    STRUCTURE = 1
    """Autograd or the inner optimizer holds it as a parameter, a parameter's gradient, or state."""
    COLLECTIVE = 2
    """It was an argument or a result of an operator of ``c10d`` or of FSDP2's copies in and out."""
    BIRTH = 3
    """When it was made: before the window, in a forward, or later."""


LET_GO_S = 0.001
"""How long gloo's thread may take to drop a finished collective."""
COMMUNICATING = frozenset({"c10d", "_c10d_functional", "fsdp"})
"""Namespaces of operators that communicate, or copy into and out of buffers that do."""
BARRIER = torch.ops.c10d.barrier.default
Parts = dict[Category, int]
"""Bytes by category."""


@dataclass(slots=True, eq=False)
class Block:
    """One storage's life: its size in bytes now, and the best that is known of what it is for."""

    category: Category
    size: int = 0
    evidence: Evidence = Evidence.BIRTH


class TensorLedger(TorchDispatchMode):
    """Live and peak bytes of the storages of one device type, for as long as the mode is on.

    FSDP2 frees and reuses its gathered parameters by resizing their storages outside any operator, so ``resize_`` is
    watched too; and what gloo does while it is waited for is passed over. From the first ``reset_peak`` on it also
    learns what storages are for: parameters from the operators that take them, their gradients from autograd,
    communication from the collectives; ``mark`` tells it more.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._blocks: dict[int, Block] = {}
        self._watched: dict[int, weakref.ref[UntypedStorage]] = {}
        self._gradient_hooks: Any = WeakIdKeyDictionary()
        self._log: list[tuple[Block, int]] | None = None
        self._at_reset: list[tuple[Block, int]] = []
        self._log_at_peak = 0
        self._waiting = False
        self._is_new_peak = False
        self.birth = Category.OTHER
        """The category of what is made from now on, unless more is learned about it."""
        self.look: Callable[[], None] | None = None
        """Called in the operator after one that made a new peak of at least ``look_above`` bytes, to mark what is now
        held: some buffers live within a backward only, in attributes of a framework."""
        self.look_above = 0
        self.live = 0
        self.peak = 0

    def reset_peak(self) -> None:
        """Forget the peak so far. What lives now and has no known use is OTHER, whenever it was made."""
        for block in self._blocks.values():
            if block.evidence is Evidence.BIRTH:
                block.category = Category.OTHER
        self._at_reset, self._log, self._log_at_peak = self.snapshot(), [], 0
        self.peak = self.live

    def snapshot(self) -> list[tuple[Block, int]]:
        """All live storages and their bytes now; ``parts`` sorts them, by what is known when it is called."""
        return [(block, block.size) for block in list(self._blocks.values())]

    @staticmethod
    def parts(sizes: Iterable[tuple[Block, int]]) -> Parts:
        """Bytes by category, of storages and their bytes or changes of bytes."""
        found = dict.fromkeys(Category, 0)
        for block, size in sizes:
            found[block.category] += size
        return found

    def parts_at_peak(self) -> Parts:
        """What ``peak`` was made of, by what is known now of storages that may have died since."""
        return self.parts([*self._at_reset, *(self._log or [])[: self._log_at_peak]])

    def mark(self, tensor: Tensor, category: Category, evidence: Evidence) -> None:
        """Say what a tensor's storage is for. Storages on other devices are passed over."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type != self._device_type or local.layout is not torch.strided:
            return
        block = self._see(local.untyped_storage())
        if evidence < block.evidence:
            block.category, block.evidence = category, evidence

    def category(self, tensor: Tensor) -> Category | None:
        """What is known of a tensor's storage; None if it was never seen."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        return None if block is None else block.category

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as operations on the local tensors
        if self._waiting:
            return func(*args, **(kwargs or {}))
        if self._is_new_peak and self.look is not None:
            self._is_new_peak = False
            self.look()
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            _finish(result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.device.type == self._device_type:
                self._see(leaf.untyped_storage())
        if func is BARRIER:
            self._forget(args[0].untyped_storage()._cdata)  # one byte, which torch 2.11 keeps until the next barrier
        else:
            self._learn(func, args, kwargs, result)
        return result

    def _learn(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any) -> None:
        """What an operator says of the storages that it took and gave."""
        if func.namespace in COMMUNICATING:
            for leaf in tree_leaves((args, kwargs, result)):
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                    self.mark(leaf, Category.COMMUNICATION, Evidence.COLLECTIVE)
        elif self._log is not None:
            for arg in args:
                if _is_parameter(arg):
                    self._take(arg)
                    if func is torch.ops.aten._to_copy.default:
                        self.mark(result, Category.PARAMETERS_UNSHARDED, Evidence.STRUCTURE)

    def _take(self, parameter: Tensor) -> None:
        """A parameter went into an operator as it is: its storage is whole. Its gradients will be noticed."""
        self.mark(parameter, Category.PARAMETERS_UNSHARDED, Evidence.STRUCTURE)
        if parameter.requires_grad and parameter not in self._gradient_hooks:
            # Before autograd adds it to ``grad``, and before any framework's hook moves it elsewhere.
            self._gradient_hooks[parameter] = parameter.register_hook(
                lambda gradient: self.mark(gradient, Category.GRADIENTS_UNSHARDED, Evidence.STRUCTURE)
            )

    def _see(self, storage: UntypedStorage) -> Block:
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
            self._blocks[key] = Block(self.birth)
        self._set(self._blocks[key], storage.nbytes())
        return self._blocks[key]

    def _set(self, block: Block, size: int) -> None:
        if size == block.size:
            return
        self.live += size - block.size
        if self._log is not None:
            self._log.append((block, size - block.size))
        block.size = size
        if self.live > self.peak:
            self.peak = self.live
            self._log_at_peak = len(self._log or [])
            self._is_new_peak = self.peak >= self.look_above and self._log is not None

    def _resize(self, original: Callable[..., Any], storage: UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        if storage._cdata in self._watched:
            self._see(storage)
        return result

    def _wait(self, original: Callable[..., Any], work: dist.Work, *timeout: Any) -> Any:
        before, self._waiting = self._waiting, True
        try:
            return original(work, *timeout)
        finally:
            self._waiting = before

    def _forget(self, key: int) -> None:
        self._watched.pop(key, None)
        if (block := self._blocks.pop(key, None)) is not None:
            self._set(block, 0)

    def __enter__(self) -> Any:
        self._patches = ExitStack()
        self._patches.enter_context(_patched(UntypedStorage, "resize_", self._resize))
        self._patches.enter_context(_patched(dist.Work, "wait", self._wait))
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._patches.close()
        for hook in self._gradient_hooks.values():
            hook.remove()
        self._gradient_hooks.clear()


def _is_parameter(arg: Any) -> bool:
    """As ``isinstance(arg, Parameter)``, which is slow where every operator asks; tensor subclasses have a flag."""
    return type(arg) is Parameter or (isinstance(arg, Tensor) and "_is_param" in arg.__dict__)


def _finish(result: Any) -> None:
    """Wait for a collective where it was issued, and until gloo's thread has let go of its tensors.

    Otherwise the peak would depend on how soon that thread is scheduled.
    """
    for leaf in tree_leaves(result):
        # NCCL hands back no Work for a collective that is not asynchronous: the current stream runs it.
        if isinstance(leaf, torch.ScriptObject) and (work := dist.Work.unbox(leaf)) is not None:
            work.wait()
    time.sleep(LET_GO_S)


@contextmanager
def _patched(owner: type, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """A method replaced while the context is open; the replacement is given the original one, then its arguments."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)
