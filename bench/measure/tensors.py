"""Real or fake tensors for a trial: fake ones have shapes and sized storages, but no values.

Fake tensors allow training a model of any size on a laptop: an operator only computes the shape of
its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from bench.plan.cell import Cell
from bench.plan.models import LLAMA, SIZES
from bench.workload import Batch, batches

if TYPE_CHECKING:
    from torch._ops import OpOverload

P = ParamSpec("P")
T = TypeVar("T")

MOST_DRAWN_ON_CPU = 10**8
"""Parameters. A core draws 1e9 in 12 s (18 s beside other work): before anything is timed, but in
every pass. That of 135m takes 2 s, and of 1b 15 s, as long as a trial on a GPU."""


class RealTensors(nullcontext[None]):
    """Real tensors: a context that is open while a pass runs.

    Weights are drawn on the CPU, so that a seed means the same weights on every device. Those of a
    large shipped model are drawn on the accelerator: equal GPUs draw equal weights, other devices
    do not.
    """

    def __init__(self, cell: Cell, device: torch.device) -> None:
        super().__init__()
        self._device = device
        is_large = cell.workload == LLAMA and SIZES[cell.model].num_parameters > MOST_DRAWN_ON_CPU
        self._draws: AbstractContextManager[object] = nullcontext()
        if is_large and device.type != "cpu":
            self._draws = device

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A model whose parameters can be counted, for ``place``."""
        with self._draws:
            return make()

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self._device)

    def data(self, make: Callable[[int], Batch], num_samples: int) -> Batch:
        return batches.to(make(num_samples), self._device)


def tensors(cell: Cell, device: torch.device) -> RealTensors | FakeTensors:
    """The tensors of a cell."""
    if cell.world.computes:
        return RealTensors(cell, device)
    return FakeTensors(device)


KEPT_ELEMENTS = 65_536
"""Maximum elements of a tensor made from Python numbers that keeps its values."""
FROM_ALL = "_bench_from_all"
"""Attribute that marks a fake tensor returned by ``all``."""
REAL = (
    (device_mesh, "init_device_mesh"),
    (device_mesh.DeviceMesh, "__init__"),
    (device_mesh.DeviceMesh, "__getitem__"),
)
"""Functions that store rank numbers in tensors and read them back; they run on real tensors."""

SHAPES = "_propagate_tensor_meta_non_cached"
"""The function in which a DTensor operator computes output shapes on its own full-size fake
tensors.

With real tensors DTensor caches the result. Under a fake mode it assumes tracing and repeats this
in every step, in torch 2.11 also for the optimizer's foreach operators, which would count as if a
step gathered all parameters. """


class FakeTensors:
    """Like ``RealTensors``, but tensors created while this context is open are fake."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._mode = _Mode()

    def __enter__(self) -> Self:
        self._open = ExitStack()
        self._replace(nn.Module, "_apply", _apply)
        for owner, name in REAL:
            on_real = _within(unset_fake_temporarily, getattr(owner, name))
            self._replace(owner, name, on_real)
        self._replace(_fsdp_param, "_chunk_with_empty", _first_chunk)
        # Hide its tensors from every mode: this one and the memory ledger.
        self._replace(
            ShardingPropagator,
            SHAPES,
            _within(_disable_current_modes, getattr(ShardingPropagator, SHAPES)),
        )
        self._open.enter_context(self._mode)
        return self

    def _replace(self, owner: object, name: str, value: object) -> None:
        self._open.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A model on the meta device, where initial weights take neither time nor memory."""
        with unset_fake_temporarily(), torch.device("meta"):
            return make()

    def place(self, model: nn.Module) -> nn.Module:
        """The model with fake parameters and buffers on the device; shared ones stay shared."""
        placed: dict[int, tuple[Tensor, Tensor]] = {}
        """By id; with the original, which is kept alive so that its id stays unique."""

        def place(tensor: Tensor) -> Tensor:
            if id(tensor) not in placed:
                made: Tensor = torch.empty_strided(
                    tensor.size(), tensor.stride(), dtype=tensor.dtype, device=self._device
                )
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                placed[id(tensor)] = made, tensor
            return placed[id(tensor)][0]

        for module in model.modules():
            registered: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in registered:
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = place(tensor)
        return model

    def data(self, make: Callable[[int], Batch], num_samples: int) -> Batch:
        """Fake samples with the shape and dtype of the first one."""
        with unset_fake_temporarily():
            first = make(1)
        with self:
            return batches.zeros_like(first, num_samples, self._device)


class _Mode(FakeTensorMode):
    """Fake tensors that can be read.

    Tensors made from Python numbers keep their values, also through a collective: frameworks use
    them to agree on flags and lengths, and for the optimizer's step. All others read as in a
    healthy step: a number is 0, as is the overflow flag; a bool is False, as for "is any infinite",
    but True after ``all``.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._pinned: set[int] = set()
        """Storages in pinned memory."""

    def may_turn_const(self, t: Tensor) -> bool:
        """Whether a tensor may keep its values; torch allows it only for single elements."""
        return t.numel() <= KEPT_ELEMENTS and t.device.type != "meta" and not self.is_our_fake(t)

    def dispatch(
        self,
        func: OpOverload[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if kwargs is None:
            kwargs = {}
        if func is torch.ops.aten.is_pinned.default:
            return args[0].untyped_storage()._cdata in self._pinned
        if func is torch.ops.aten._pin_memory.default:  # torch has no fake one
            copied: Any = super().dispatch(torch.ops.aten.clone.default, types, args[:1])
            self._pinned.add(copied.untyped_storage()._cdata)
            return copied
        if kwargs.get("device") == torch.device("cpu", 0):
            kwargs = {**kwargs, "device": torch.device("cpu")}  # as on real tensors
        try:
            result = super().dispatch(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            if dtype is torch.bool:
                return getattr(args[0], FROM_ALL, False)
            if dtype.is_floating_point:
                return 0.0
            return 0
        if func.name().startswith("aten::all"):
            setattr(result, FROM_ALL, True)
        return result


def _within(
    context: Callable[[], AbstractContextManager[object]], function: Callable[P, T]
) -> Callable[P, T]:
    """The function, run inside a new context each time."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with context():
            return function(*args, **kwargs)

    return run


def _first_chunk(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    """FSDP2's shards of a parameter. Rank 0 uses only its own, and creating all W takes minutes."""
    rows = -(-tensor.size(dim) // num_chunks)
    return [tensor.narrow(dim, 0, rows)] * num_chunks


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` for fake tensors.

    Only the dtype may change, because the tensors are on the device from the start. torch's own
    swaps tensors, which fails for referenced ones.
    """
    if recurse:
        for child in module.children():
            child._apply(fn)
    with torch.no_grad():
        for parameter in module._parameters.values():
            if parameter is not None and (applied := fn(parameter)) is not parameter:
                parameter.data = applied
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fn(buffer)
    return module
