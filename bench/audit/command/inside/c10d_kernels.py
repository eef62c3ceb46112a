"""Reports reductions where they are issued, by kernels on the operators of c10d, above those of the backends.

Calls from Python, from C++ (DDP's reducer), and from functional and compiled code pass these operators. Unlike a
dispatch mode, which sees every operator, a kernel costs nothing where nothing is reduced. The kernels stand at the key
BackendSelect, since functional collectives call c10d below the keys of autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

OPERATORS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_": "reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
}
"""The common name of each operator."""


class ReductionKernels:
    """Calls ``report`` with common name, process group and tensors of each reduction, until ``remove``."""

    def __init__(self, report: Callable[[str, Any, tuple[Any, ...]], None]) -> None:
        self._report = report
        self._libraries: list[Any] = []  # a kernel lives as long as its library, also in forked processes

    def install(self) -> None:
        """Register the kernels."""
        for name, common in OPERATORS.items() if dist.is_available() else ():
            library = torch.library.Library("c10d", "IMPL")
            kernel = self._kernel(getattr(torch.ops.c10d, name).default, common)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)
            self._libraries.append(library)

    def remove(self) -> None:
        """Take them away."""
        for library in self._libraries:
            library._destroy()
        self._libraries.clear()

    def _kernel(self, operator: Any, name: str) -> Any:
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        group = [argument.name for argument in operator._schema.arguments].index("process_group")

        def kernel(keys: Any, *arguments: Any, **options: Any) -> Any:
            # Outputs and inputs: before a reduction that scatters, the whole tensor is the larger of them.
            self._report(name, arguments[group], arguments[:2])
            return operator.redispatch(keys & below, *arguments, **options)

        return kernel
