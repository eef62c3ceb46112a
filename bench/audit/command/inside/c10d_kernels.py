"""Counts collectives with kernels of ours on the c10d operators, above those of the backends.

Calls from Python, from C++ (DDP's reducer) and from compiled and functional code all pass the dispatcher. Unlike a
dispatch mode, which sees every operator, a kernel costs nothing where no collective runs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
}
"""The common name of each operator that may carry gradients or parameters."""


class CollectiveKernels:
    """Bytes by operation, dtype and number of ranks since the last ``take``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._libraries: list[Any] = []  # kernels live as long as their library, also in forked processes
        self._traffic: Counter[tuple[str, str, int]] = Counter()
        self.active = True

    def install(self) -> None:
        """Put a kernel before each operator, at the key that is called first."""
        torch = self._torch
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.ADInplaceOrView)
        for name, common in OPERATORS.items():
            kernel = self._kernel(getattr(torch.ops.c10d, name).default, common, below)
            library = torch.library.Library("c10d", "IMPL")
            for key in ("AutogradCPU", "AutogradCUDA"):
                library.impl(name, kernel, key, with_keyset=True)
            self._libraries.append(library)

    def _kernel(self, operator: Any, name: str, below: Any) -> Any:
        def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
            if self.active:
                self._count(name, arguments)
            return operator.redispatch(keys & below, *arguments, **options)

        return kernel

    def _count(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Count the whole tensor, before a scatter or after a gather: the larger of output and input."""
        torch = self._torch
        sides = [list(self._tensors(argument)) for argument in arguments[:2]]
        objects = [value for value in arguments if isinstance(value, torch.ScriptObject)]
        groups = [value for value in objects if "ProcessGroup" in str(value._type())]
        ranks = torch.distributed.ProcessGroup.unbox(groups[0]).size() if groups else 0
        dtype = next((str(tensor.dtype).removeprefix("torch.") for side in sides for tensor in side), "none")
        self._traffic[name, dtype, ranks] += max(sum(tensor.nbytes for tensor in side) for side in sides)

    def _tensors(self, value: Any) -> Any:
        if isinstance(value, self._torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for element in value:
                yield from self._tensors(element)

    @property
    def idle(self) -> bool:
        """Whether nothing was counted since the last ``take``."""
        return not self._traffic

    def take(self) -> list[list[Any]]:
        """The counts as [operation, dtype, ranks, bytes], and begin anew."""
        rows = [[*key, size] for key, size in self._traffic.items()]
        self._traffic.clear()
        return rows
