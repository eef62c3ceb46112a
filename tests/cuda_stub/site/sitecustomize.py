"""On the path of every process over the stub: loads the values of operators or, for models of full size, does without.

Without values, what reads them is replaced: a function of torch's or of a framework's, by its name, once its module was
imported. A name that is gone is an error, so this list cannot silently become too long.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

LARGE_BYTES = 2**20
"""Tensors on the host from this size on are neither filled nor copied: of large models they would not fit into it."""


def replace(owner: Any, name: str, function: Any) -> None:
    """Put a function where one of that name is."""
    getattr(owner, name)
    setattr(owner, name, function)


def torch_values(_: ModuleType) -> None:
    """Printing a tensor looks at its values, and pickled objects that are broadcast have a length that torch sums."""
    import torch
    import torch.distributed as dist

    replace(torch.Tensor, "__repr__", lambda self, **_: f"<tensor {tuple(self.shape)}>")
    replace(torch.nn.Parameter, "__repr__", lambda self: f"<parameter {tuple(self.shape)}>")
    for module in (dist, dist.distributed_c10d):
        replace(module, "broadcast_object_list", lambda *_, **__: None)


def overflow(module: ModuleType) -> None:
    """DeepSpeed discards updates whose gradients are infinite or no numbers; it asks, and is told that they are not."""

    def without(question: Callable[..., bool]) -> Callable[..., bool]:
        return lambda *args, **kwargs: question(*args, **kwargs) and False

    replace(module, "is_invalid_grad_norm", without(module.is_invalid_grad_norm))
    for name in ("DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer_Stage3"):
        if optimizer := vars(module).get(name):
            replace(optimizer, "has_overflow", without(optimizer.has_overflow))


def initial_weights(_: ModuleType) -> None:
    """Large tensors on the host get no values, and no memory: asked for by FAKE_WEIGHTS, for models of full size."""
    import torch
    from torch.nn import init

    def is_large(tensor: torch.Tensor) -> bool:
        return not tensor.is_cuda and tensor.nbytes >= LARGE_BYTES

    def unfilled(fill: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda tensor, *args, **kwargs: (
            tensor if is_large(tensor) else fill(tensor, *args, **kwargs)
        )

    for name in ("normal_", "uniform_", "zero_", "fill_"):
        replace(torch.Tensor, name, unfilled(getattr(torch.Tensor, name)))
    for name in ("normal_", "uniform_", "zeros_", "ones_", "kaiming_uniform_", "trunc_normal_"):
        replace(init, name, unfilled(getattr(init, name)))
    whole = torch.nn.Parameter.__deepcopy__

    def parameter(self: torch.nn.Parameter, memo: dict[int, Any]) -> torch.nn.Parameter:
        if not is_large(self):
            return whole(self, memo)
        return memo.setdefault(id(self), type(self)(torch.empty_like(self), self.requires_grad))

    replace(torch.nn.Parameter, "__deepcopy__", parameter)


REPLACEMENTS: dict[str, Sequence[Callable[[ModuleType], None]]] = {
    "deepspeed.runtime.zero.stage_1_and_2": [overflow],
    "deepspeed.runtime.zero.stage3": [overflow],
    "bench.measure.trial": [
        torch_values,
        *([initial_weights] if os.environ.get("FAKE_WEIGHTS") else []),
    ],
}
"""What is replaced once a module was imported: a rank imports the last one, or what it is forked from does."""


def values(module: ModuleType) -> None:
    """Operators on CUDA get their values from the CPU."""
    module.ops.load_library(os.environ["CUDA_VALUES"])


def small_rates(module: ModuleType) -> None:
    """What is timed before a run has sizes for a GPU, on which the CPU would compute for minutes."""
    sizes = getattr(module, "SIZES", None) or module.SIZE
    sizes["cuda"] = sizes["cpu"]


def races(module: ModuleType) -> None:
    """Ranks train under torch's detector of races between streams, which ends no trial but writes to FAKE_RACES.

    A line for each race: the backend, and the places of both accesses, the earlier one first.
    """
    join = module.join

    def join_and_watch(task: Any) -> Any:
        import torch.cuda._sanitizer as sanitizer

        device, handle = join(task), sanitizer.EventHandler._handle_kernel_launch

        def note(self: Any, *launch: Any) -> list[Any]:
            for error in handle(self, *launch):
                with Path(os.environ["FAKE_RACES"]).open("a") as file:
                    places = map(
                        _place,
                        (error.previous_access.stack_trace, error.current_access.stack_trace),
                    )
                    file.write("\t".join((task.backend, *places)) + "\n")
            return []

        replace(sanitizer.EventHandler, "_handle_kernel_launch", note)
        sanitizer.enable_cuda_sanitizer()
        return device

    replace(module, "join", join_and_watch)


def _place(frames: Sequence[Any]) -> str:
    """The innermost line that is not torch's."""
    names = [(frame.filename.rpartition("/site-packages/")[2], frame) for frame in reversed(frames)]
    name, frame = next(
        (pair for pair in names if "/torch/" not in pair[0] and pair[0] != __file__), names[-1]
    )
    return f"{name}:{frame.lineno} {frame.name}"


if os.environ.get("CUDA_VALUES"):
    REPLACEMENTS = {
        "torch": [values],
        "bench.run.matmul": [small_rates],
        "bench.run.links": [small_rates],
    }
if os.environ.get("FAKE_RACES"):
    REPLACEMENTS["bench.launch.rank"] = [races]


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of REPLACEMENTS as all other finders would, and replaces when they have been executed."""

    def find_spec(
        self, name: str, path: Any, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in REPLACEMENTS:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            raise ImportError(f"tests/cuda_stub replaces functions of {name}, which is gone")
        execute = spec.loader.exec_module

        def then_replace(module: ModuleType) -> None:
            execute(module)
            for replacement in REPLACEMENTS[name]:
                replacement(module)

        spec.loader.exec_module = then_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
