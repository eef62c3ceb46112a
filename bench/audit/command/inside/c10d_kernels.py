"""Counts collectives with kernels on the c10d operators, above those of the backends.

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
}
"""The common name of each operator that reduces."""


class CollectiveKernels:
    """Counts bytes by operation, dtype and number of ranks in ``traffic``."""

    def __init__(self, torch: Any) -> None:
        self.traffic: Counter[tuple[str, str, int]] = Counter()
        self._torch = torch
        self._libraries: list[Any] = []  # kernels live as long as their library, also in forked processes
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.ADInplaceOrView)
        for name, common in OPERATORS.items() if torch.distributed.is_available() else ():
            kernel = self._kernel(getattr(torch.ops.c10d, name).default, common, below)
            library = torch.library.Library("c10d", "IMPL")
            for key in ("AutogradCPU", "AutogradCUDA"):
                library.impl(name, kernel, key, with_keyset=True)
            self._libraries.append(library)

    def _kernel(self, operator: Any, name: str, below: Any) -> Any:
        def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
            self._count(name, arguments)
            return operator.redispatch(keys & below, *arguments, **options)

        return kernel

    def _count(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Count the whole tensor, which is the larger of output and input: one of them may be scattered."""
        torch = self._torch
        sides = [torch.utils._pytree.tree_leaves(argument) for argument in arguments[:2]]
        sides = [[leaf for leaf in side if isinstance(leaf, torch.Tensor)] for side in sides]
        objects = [value for value in arguments if isinstance(value, torch.ScriptObject)]
        groups = [value for value in objects if "ProcessGroup" in str(value._type())]
        ranks = torch.distributed.ProcessGroup.unbox(groups[0]).size()
        dtype = str(sides[0][0].dtype).removeprefix("torch.")
        self.traffic[name, dtype, ranks] += max(sum(tensor.nbytes for tensor in side) for side in sides)
