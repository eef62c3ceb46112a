"""Samples of leaves of autograd: what backwards add to gradients, and what optimizers use."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .found_objects import FoundObjects
from .graph_survey import plain

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

ItemT = TypeVar("ItemT")
Guard = Callable[..., None]
"""Calls a function with its arguments; what it raises does not reach the training."""
MOST_LEAVES = 128
"""Leaves of a process that are sampled."""
MOST_AT_ONCE = 96
"""Leaves of one backward: others may reach others."""
MOST_COORDINATES = 64
"""Coordinates of a leaf."""
FEW_COORDINATES = 32
"""The same where more than 64 leaves are sampled."""
MANY_LEAVES = 64
START_VALUES = 8
"""Values of a parameter by which its changes are seen."""


class HeldPart(NamedTuple):
    """What the optimizer updates of a leaf: all of it, or what is on this rank."""

    holder: Tensor
    is_here: Tensor
    """Which coordinates are in it."""
    places: Tensor
    """Where these are, in its flattened elements."""


class Partition(NamedTuple):
    """The part of a leaf that a flat parameter of ZeRO has."""

    holder: Tensor
    first: int
    """Its first element in the leaf."""
    start: int
    """The same in the flat parameter."""
    size: int
    """Its elements."""


class LeafProbe:
    """Some coordinates of one leaf."""

    def __init__(
        self, leaf: Tensor, number: int, coordinates: int, objects: FoundObjects, guard: Guard
    ) -> None:
        self.leaf, self.number = leaf, number
        self._guard = guard
        self.name = objects.name_of(leaf, f"parameter {number + 1}")
        local = plain(leaf)
        self.part = _part(leaf)
        # ZeRO-3 leaves no elements between uses.
        self.shape = tuple(getattr(leaf, "ds_shape", local.shape))
        # The global generator belongs to the training.
        generator = torch.Generator("cpu").manual_seed(number)
        size = math.prod(self.shape)
        self.flat = torch.randint(size, (coordinates,), generator=generator).unique()
        # Copying an index to an accelerator may wait for it: once is enough.
        self._flat = self.flat.to(local.device, non_blocking=True)
        self._sharded = objects.sharded.get(id(leaf))
        part = self._held_part(objects.zero)
        self.holder = part.holder
        device = self.holder.device
        self._is_whole = bool(part.is_here.all())
        self._here = part.is_here.nonzero().flatten().to(device, non_blocking=True)
        self._places = part.places.to(device, non_blocking=True)
        self.start_places: Tensor | None = None
        """Where a few values of what the optimizer updates are; None if they are on other ranks."""
        if len(part.places):
            few = torch.arange(START_VALUES).remainder(len(part.places))
            self.start_places = self._places[few.to(device, non_blocking=True)]
        self.added: Tensor | None = None
        """What the running backward has added, or None."""
        self.recording = False
        self.is_fresh = True
        """Whether no backward has added to it since the last step."""
        self.was_held = False
        """Whether a gradient was held after the last backward."""
        self.handle = leaf.register_hook(self._on_gradient)

    def _held_part(self, zero: Any) -> HeldPart:
        if zero is not None:
            return _of_zero(self.leaf, self.flat, zero)
        if self._sharded is not None:
            return _of_fsdp2(self._sharded, self.flat, self.shape)
        return HeldPart(self.leaf, torch.ones_like(self.flat, dtype=torch.bool), self.flat)

    def _on_gradient(self, gradient: Tensor) -> None:
        self._guard(self._add, gradient)

    def _add(self, gradient: Tensor) -> None:
        # torch.autograd.grad calls the hooks of leaves, too.
        if not self.recording:
            return
        gradient = plain(gradient)
        if not gradient.is_sparse and tuple(gradient.shape) == self.shape:
            if self._flat.device != gradient.device:  # the model was moved
                self._flat = self._flat.to(gradient.device)
            values = gradient.detach().take(self._flat)
            if self.added is not None:
                values = self.added.double() + values
            self.added = values

    def take(self) -> Tensor | None:
        """What was added since the last call, or None."""
        added, self.added, self.recording = self.added, None, False
        return added

    def parameter(self) -> Tensor | None:
        """The values of the parameter, or None where they are not all here."""
        local = plain(self.leaf)
        if tuple(local.shape) != self.shape or not local.untyped_storage().size():
            return None
        return local.detach().take(self._flat)

    def start(self) -> Tensor | None:
        """A few values of what the optimizer updates, which may be a shard."""
        held = plain(self.holder)
        if self.start_places is None or not held.untyped_storage().size():
            return None
        return held.detach().take(self.start_places)

    def gradient(self) -> Tensor:
        """The gradient that the optimizer finds: 0 where it is None, NaN where not on this rank."""
        gradient = self.holder.grad
        local = None
        if gradient is not None:
            local = plain(gradient)
        if local is not None and self._is_whole and not local.is_sparse:
            return local.detach().take(self._places).double()
        values = torch.full(
            (len(self.flat),), math.nan, dtype=torch.float64, device=self._here.device
        )
        if local is None:
            values.index_fill_(0, self._here, 0.0)
        elif not local.is_sparse:
            values[self._here] = local.detach().take(self._places).double()
        return values

    def held(self) -> Tensor | None:
        """Where the sum of micro-gradients is between two backwards; None if there is none."""
        if self.leaf.grad is not None:
            return self.leaf.grad
        # Older versions of torch have no such attribute.
        accumulated: Tensor | None = getattr(self._sharded, "unsharded_accumulated_grad", None)
        if accumulated is not None:
            return accumulated
        return self.holder.grad


def _part(leaf: Tensor) -> str:
    """Which part of a distributed tensor is on this rank.

    That is its place on each dimension of the mesh that shards it.
    """
    if not hasattr(leaf, "_local_tensor"):
        return ""
    mesh, placements = leaf.device_mesh, leaf.placements  # type: ignore[attr-defined]
    coordinates = mesh.get_coordinate()
    if coordinates is None:  # the mesh is of other ranks
        return ""
    parts = []
    for placement, coordinate in zip(placements, coordinates):  # noqa: B905 - older Pythons
        if not placement.is_replicate():
            parts.append(f"{placement}@{coordinate}")
    return " ".join(parts)


def _of_fsdp2(sharded: FSDPParam, flat: Tensor, shape: tuple[int, ...]) -> HeldPart:
    """A shard along one dimension; the first ranks get one row more."""
    dimension = getattr(getattr(sharded, "fsdp_placement", None), "dim", 0)
    size = getattr(sharded.mesh_info, "shard_mesh_size", 1)
    rank = getattr(sharded.mesh_info, "shard_mesh_rank", 0)
    rows = sharded._orig_size[dimension]
    chunk = math.ceil(rows / size)
    first = min(chunk * rank, rows)
    count = min(chunk, rows - first)
    axes = list(torch.unravel_index(flat, shape))
    is_here = (axes[dimension] >= first) & (axes[dimension] < first + count)
    axes[dimension] = axes[dimension] - first
    lengths = list(shape)
    lengths[dimension] = count
    places = torch.zeros_like(flat)
    for axis, length in zip(axes, lengths):  # noqa: B905 - older Pythons
        places = places * length + axis
    return HeldPart(sharded.sharded_param, is_here, places[is_here])


def _of_zero(leaf: Tensor, flat: Tensor, zero: Any) -> HeldPart:
    """ZeRO's flat parameter with a part of the leaf."""
    part = _partition(leaf, zero)
    is_here = (flat >= part.first) & (flat < part.first + part.size)
    return HeldPart(part.holder, is_here, flat[is_here] - part.first + part.start)


def _partition(leaf: Tensor, zero: Any) -> Partition:
    """Which of ZeRO's flat parameters has a part of the leaf, and where."""
    if hasattr(leaf, "ds_tensor"):
        group, start, count = zero.grad_position[zero.get_param_id(leaf)]
        rank = dist.get_rank(leaf.ds_process_group)  # type: ignore[attr-defined]
        first = rank * leaf.ds_tensor.ds_numel
        return Partition(zero.fp32_partitioned_groups_flat[group], first, start, count)
    mapping: Any = getattr(leaf, "_hp_mapping", None)
    if mapping is not None:
        groups = getattr(zero, "single_partition_of_fp32_groups", None)
        if groups is None:  # of BF16_Optimizer
            groups = zero.fp32_groups_flat_partition
        for flat in groups:
            if _share_storage(flat, mapping.hp_fragment):
                source, target = mapping.lp_fragment_address, mapping.hp_fragment_address
                return Partition(flat, source.start, target.start, source.numel)
    return Partition(torch.empty(0), 0, 0, 0)  # on other ranks


def _share_storage(first: Tensor, second: Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()


def evenly(leaves: list[ItemT], most: int) -> list[ItemT]:
    """At most so many, evenly over their order."""
    step = max(1.0, len(leaves) / max(1, most))
    return [leaves[int(i * step)] for i in range(min(len(leaves), most))]
