"""Peak memory: the allocator's own peaks on CUDA, a ledger of live tensor storages elsewhere.

The ledger counts the bytes of every storage that an operator returned while it was on, from its birth (or resizing)
to its death. It does not see what libraries allocate without making a tensor: gloo's and oneDNN's work space, or the
interpreter. So it says what a backend holds, not what the process weighs.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LET_GO_S = 0.001
"""How long gloo's thread may take to drop a finished collective."""


class TensorLedger(TorchDispatchMode):
    """Live and peak bytes of the storages of one device type, for as long as the mode is on.

    FSDP2 frees and reuses its gathered parameters by resizing their storages outside any operator, so ``resize_`` is
    watched too.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self._device_type = device_type
        self._sizes: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[UntypedStorage]] = {}
        self.live = 0
        self.peak = 0

    def reset_peak(self) -> None:
        """Forget the peak so far."""
        self.peak = self.live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as operations on the local tensors
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            _wait(result)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor) and leaf.device.type == self._device_type:
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._watched:
            self._watched[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        self.live += size - self._sizes.get(key, 0)
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key, 0)
        self._watched.pop(key, None)

    def __enter__(self) -> Any:
        self._resizing = ExitStack()
        self._resizing.enter_context(_watch_resize(self))
        return super().__enter__()

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._resizing.close()


def _wait(result: Any) -> None:
    """Wait for a collective where it was issued, and until gloo's thread has let go of its tensors.

    Otherwise the peak would depend on how soon that thread is scheduled.
    """
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            torch.distributed.Work.unbox(leaf).wait()
    time.sleep(LET_GO_S)


@contextmanager
def _watch_resize(ledger: TensorLedger) -> Iterator[None]:
    """Let the ledger see ``UntypedStorage.resize_`` while the context is open."""
    original: Callable[..., Any] = UntypedStorage.resize_

    def resize(storage: UntypedStorage, size: int) -> Any:
        result = original(storage, size)
        if storage._cdata in ledger._watched:
            ledger._see(storage)
        return result

    UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        UntypedStorage.resize_ = original  # type: ignore[method-assign]


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
