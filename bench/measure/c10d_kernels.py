"""Reports collectives as they are issued, by kernels on c10d's operators above those of backends.

Calls from Python, from C++ (DDP's reducer), and from functional and compiled code pass these
operators. Unlike a dispatch mode, which sees every operator, a kernel costs nothing where no
collective runs. The kernels stand at the key BackendSelect: functional collectives and DTensor's
are called below the keys of autograd. On fake tensors a functional collective calls none of c10d,
so these have kernels too, and a collective within another is not reported.

``bench.measure`` counts with this, and ``bench audit`` loads this file by its path in other
environments: it imports nothing of bench.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from torch._ops import OpOverload

C10D = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "scatter_": "scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
    "barrier": "barrier",
}
FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""The common name of each operator."""


@dataclass(frozen=True)
class CollectiveCall:
    """A call of a collective, by its common name."""

    name: str
    operator: OpOverload[..., object]
    arguments: tuple[Any, ...]
    result: object

    @property
    def group(self) -> dist.ProcessGroup:
        names = (argument.name for argument in self.operator._schema.arguments)
        given = dict(zip(names, self.arguments, strict=False))
        if "group_name" in given:
            return torch._C._distributed_c10d._resolve_process_group(given["group_name"])
        return dist.ProcessGroup.unbox(given["process_group"])

    @property
    def tensor_lists(self) -> list[list[torch.Tensor]]:
        """Its outputs and inputs, in any order.

        Operators of c10d are given both, functional ones return outputs.
        """
        sides = self.arguments[:2]
        if self.operator.namespace != "c10d":
            sides = (self.arguments[0], self.result)
        return [_tensors(side) for side in sides]

    @property
    def dtype(self) -> str:
        """That of the first tensor, or ``none``."""
        for side in self.tensor_lists:
            if side:
                return str(side[0].dtype).removeprefix("torch.")
        return "none"

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole tensor, which is the larger side.

        That is the one before a scatter or reduction, or after a gather.
        """
        return max(sum(map(_num_bytes, side)) for side in self.tensor_lists)


def _tensors(side: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(side) if isinstance(leaf, torch.Tensor)]


def _num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the values of a tensor; of a sparse one, those that are stored."""
    if tensor.is_sparse:
        return tensor._values().nbytes
    return tensor.nbytes


class CollectiveKernels:
    """Calls ``report`` after every collective of this process, from ``install`` until ``remove``.

    With ``only``, a part of their common names, others have no kernels, which would cost time.
    """

    def __init__(self, report: Callable[[CollectiveCall], None], only: str = "") -> None:
        self._report, self._only = report, only
        self._libraries: list[torch.library.Library] = []
        """A kernel lives as long as its library, also in forked processes."""
        self._running = threading.local()

    def install(self) -> None:
        if not dist.is_available():
            return
        for namespace, names in (("c10d", C10D), ("_c10d_functional", FUNCTIONAL)):
            library = torch.library.Library(namespace, "IMPL")
            for name, common in names.items():
                if self._only not in common:
                    continue
                kernel = self._kernel(getattr(getattr(torch.ops, namespace), name).default, common)
                library.impl(name, kernel, "BackendSelect", with_keyset=True)
            self._libraries.append(library)

    def remove(self) -> None:
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()

    def _kernel(self, operator: OpOverload[..., object], name: str) -> Callable[..., object]:
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

        def kernel(keys: torch._C.DispatchKeySet, *arguments: object, **options: object) -> object:
            is_outer = not getattr(self._running, "collective", False)
            self._running.collective = True
            try:
                result = operator.redispatch(keys & below, *arguments, **options)
            finally:
                self._running.collective = not is_outer
            if is_outer:
                self._report(CollectiveCall(name, operator, arguments, result))
            return result

        return kernel
