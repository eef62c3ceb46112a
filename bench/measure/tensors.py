"""Real or fake tensors for a trial. Fake ones have shapes, dtypes and storages of a size, but no memory and no values.

With fake tensors a model of any size is trained on a laptop: an operator only works out the shape of its result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import _disable_current_modes

from bench.measure.views import loops, on_demand
from bench.plan.cell import Cell
from bench.plan.models import LLAMA

if TYPE_CHECKING:
    from torch import Tensor


class RealTensors(nullcontext[None]):
    """What a trial's tensors are made of; a context, open while a pass runs."""

    def __init__(self, device: torch.device, workload: str) -> None:
        super().__init__()
        self._device = device
        # A core takes 12 s to draw 1 G weights, which is longer than to train with them. GPUs of one kind draw alike.
        self._draws = device if workload == LLAMA and device.type != "cpu" else nullcontext()

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A model whose parameters can be counted, and that ``place`` takes."""
        with self._draws:
            return make()

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device, to be trained."""
        return model.to(self._device)

    def data(self, make: Callable[[int], Tensor], num_samples: int) -> Tensor:
        """So many samples on the device."""
        return make(num_samples).to(self._device)


def tensors(cell: Cell, device: torch.device, packages: Sequence[str] = ()) -> RealTensors | FakeTensors:
    """What the cell's tensors are made of; ``packages`` are those that its backend requires."""
    return RealTensors(device, cell.workload) if cell.world.computes else FakeTensors(device, packages)


KEPT_ELEMENTS = 65_536
"""The largest tensor of Python numbers that keeps its values."""
FROM_ALL = "_bench_from_all"
"""Attribute of a fake tensor that ``all`` returned."""
REAL = (
    (device_mesh, "init_device_mesh"),
    (device_mesh.DeviceMesh, "__init__"),
    (device_mesh.DeviceMesh, "__getitem__"),
)
"""What keeps the numbers of ranks in tensors and reads them."""

SHAPES = "_propagate_tensor_meta_non_cached"
"""Where a DTensor's operator tries its shapes on whole fake tensors of its own.

With real tensors it remembers them. Under fake ones it takes itself for traced and tries them anew in every step, which
torch 2.11 does for the optimizer's operators on lists too: they would count as if a step gathered all parameters.
"""


class FakeTensors:
    """The same as ``RealTensors``, but while this context is open, tensors that are made are fake ones.

    ``packages`` are those that the backend under test requires.
    """

    def __init__(self, device: torch.device, packages: Sequence[str] = ()) -> None:
        self._device = device
        self._packages = packages
        self._mode = _Mode(allow_non_fake_inputs=True)

    def __enter__(self) -> Self:
        self._open = ExitStack()
        self._replace(nn.Module, "_apply", _apply)
        for owner, name in REAL:
            self._replace(owner, name, _within(unset_fake_temporarily, getattr(owner, name)))  # with real tensors
        self._replace(_fsdp_param, "_chunk_with_empty", _first_chunk)
        # No mode sees its tensors: neither this one nor the ledger of memory.
        self._replace(ShardingPropagator, SHAPES, _within(_disable_current_modes, getattr(ShardingPropagator, SHAPES)))
        for owner, name in loops(self._packages):
            self._replace(owner, name, on_demand(getattr(owner, name)))
        self._open.enter_context(self._mode)
        return self

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Another attribute for as long as the context is open."""
        self._open.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """On the meta device, where initial weights take neither time nor memory."""
        with unset_fake_temporarily(), torch.device("meta"):
            return make()

    def place(self, model: nn.Module) -> nn.Module:
        """With fake tensors on the device for parameters and buffers, shared ones still shared."""
        placed: dict[int, tuple[Tensor, Tensor]] = {}  # with the original, so that no other gets its id

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
            own: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for tensors in own:
                tensors.update({name: place(tensor) for name, tensor in tensors.items() if tensor is not None})
        return model

    def data(self, make: Callable[[int], Tensor], num_samples: int) -> Tensor:
        """Of the shape and dtype of the first sample."""
        with unset_fake_temporarily():
            first = make(1)
        with self:
            return torch.zeros((num_samples, *first.shape[1:]), dtype=first.dtype, device=self._device)


class _Mode(FakeTensorMode):
    """Fake tensors that can be read all the same.

    Those made of Python numbers keep their values, also through a collective: they are what frameworks agree on, such
    as flags, lengths, and the optimizer's step. Of all others it is read that nothing is wrong: a number is 0, as the
    overflow of a sound step; a truth is False, as whether any is infinite, but True after ``all``.
    """

    def may_turn_const(self, t: Tensor) -> bool:
        """Whether a tensor may keep its values; torch has this for those of one element only."""
        return t.numel() <= KEPT_ELEMENTS and t.device.type != "meta" and not self.is_our_fake(t)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kwargs and kwargs.get("device") == torch.device("cpu", 0):
            kwargs = {**kwargs, "device": torch.device("cpu")}  # as real tensors have it; fake ones would be elsewhere
        try:
            result = super().dispatch(func, types, args, kwargs)
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype
            if dtype is torch.bool:
                return getattr(args[0], FROM_ALL, False)
            return 0.0 if dtype.is_floating_point else 0
        if func.name().startswith("aten::all"):
            setattr(result, FROM_ALL, True)
        return result


def _within(context: Callable[[], AbstractContextManager[Any]], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, run in a new such context each time."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return function(*args, **kwargs)

    return run


def _first_chunk(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    """FSDP2's shards of a parameter, of which rank 0 looks at its own alone: making all W takes minutes."""
    rows = -(-tensor.size(dim) // num_chunks)
    return [tensor.narrow(dim, 0, rows)] * num_chunks


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply`` for fake tensors: torch's own wants to swap tensors, and cannot if something refers to them.

    Only the dtype may change: they are on the device from the start.
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
