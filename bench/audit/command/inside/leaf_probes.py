"""Samples of leaves of autograd: what each backward adds to the gradient, and what the optimizer uses of it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .found_objects import FoundObjects
from .graph_survey import plain

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


class LeafProbe:
    """Some coordinates of one leaf."""

    def __init__(self, leaf: Any, number: int, coordinates: int, objects: FoundObjects) -> None:
        self.leaf, self.number = leaf, number
        self.name = objects.name_of(leaf) or f"parameter {number + 1}"
        local = plain(leaf)
        self.part = _part(leaf)
        self.shape = tuple(
            getattr(leaf, "ds_shape", local.shape)
        )  # ZeRO-3 leaves no elements between uses
        generator = torch.Generator("cpu").manual_seed(
            number
        )  # the global one belongs to the training
        self.flat = torch.randint(
            math.prod(self.shape), (coordinates,), generator=generator
        ).unique()
        places = torch.stack(torch.unravel_index(self.flat, self.shape or (1,)))
        if not self.shape:
            places = places[:0]
        self._index = tuple(places.to(local.device, non_blocking=True))
        self._sharded = objects.sharded.get(id(leaf))
        self.holder = leaf if self._sharded is None else self._sharded.sharded_param
        here, axes = torch.ones_like(self.flat, dtype=torch.bool), places
        if objects.zero is not None:
            self.holder, first, start, count = _of_zero(leaf, objects.zero)
            here, axes = (
                (self.flat >= first) & (self.flat < first + count),
                (self.flat - first + start).unsqueeze(0),
            )
        elif self._sharded is not None:
            here, axes = _of_fsdp2(self._sharded, places)
        # Copying an index to an accelerator may wait for it: once is enough.
        self._here = here.nonzero().flatten().to(self.holder.device, non_blocking=True)
        self._held_index = tuple(axes[:, here].to(self.holder.device, non_blocking=True))
        few = tuple(places[:START_VALUES] for places in self._held_index)
        self.start_index: Any = few if len(self._here) else None
        """Where a few values of what the optimizer updates are; None if they are on other ranks."""
        self.added: Any = None
        """What the running backward has added, or None."""
        self.recording = False
        self.is_fresh = True
        """Whether no backward has added to it since the last step."""
        self.was_held = False
        """Whether a gradient was held after the last backward."""
        self.handle = leaf.register_hook(self._add)

    def _add(self, gradient: Any) -> None:
        # torch.autograd.grad calls the hooks of leaves, too.
        gradient = plain(gradient)
        if self.recording and not gradient.is_sparse and tuple(gradient.shape) == self.shape:
            values = gradient.detach()[self._index].double().reshape(-1)
            self.added = values if self.added is None else self.added + values

    def take(self) -> Any:
        """What was added since the last call, or None."""
        added, self.added, self.recording = self.added, None, False
        return added

    def parameter(self) -> Any:
        """The values of the parameter, or None where they are not all here."""
        local = plain(self.leaf)
        is_whole = tuple(local.shape) == self.shape and local.untyped_storage().size()
        return local.detach()[self._index].double().reshape(-1) if is_whole else None

    def start(self) -> Any:
        """A few values of what the optimizer updates, which may be a shard."""
        held = plain(self.holder)
        is_here = self.start_index is not None and held.untyped_storage().size()
        return held.detach()[self.start_index].double().reshape(-1) if is_here else None

    def gradient(self) -> Any:
        """The gradient as the optimizer finds it: 0 where it is None, and NaN where it is not on this rank."""
        values = torch.full(
            (len(self.flat),), math.nan, dtype=torch.float64, device=self._here.device
        )
        local = plain(self.holder.grad)
        if local is None:
            values.index_fill_(0, self._here, 0.0)
        elif not local.is_sparse:
            values[self._here] = local.detach()[self._held_index].double().reshape(-1)
        return values

    def held(self) -> Any:
        """Where the sum of micro-gradients is between two backwards; None if there is none."""
        accumulated = getattr(self._sharded, "unsharded_accumulated_grad", None)
        return next(
            (held for held in (self.leaf.grad, accumulated, self.holder.grad) if held is not None),
            None,
        )

    def held_dtype(self) -> str:
        """The dtype of that; empty if there is none."""
        held = self.held()
        return "" if held is None else str(held.dtype).removeprefix("torch.")


def _part(leaf: Any) -> str:
    """Which part of a distributed tensor is on this rank: its place on each dimension of the mesh that shards it."""
    if not hasattr(leaf, "_local_tensor"):
        return ""
    coordinates = leaf.device_mesh.get_coordinate() or []
    return " ".join(
        f"{placement}@{coordinate}"
        for placement, coordinate in zip(leaf.placements, coordinates)  # noqa: B905 - older Pythons
        if not placement.is_replicate()
    )


def _of_fsdp2(sharded: Any, places: Any) -> tuple[Any, Any]:
    """Which coordinates are in this rank's shard, and where there; the first ranks get one row more."""
    dimension = getattr(getattr(sharded, "fsdp_placement", None), "dim", 0)
    size, rank = (
        getattr(sharded.mesh_info, "shard_mesh_size", 1),
        getattr(sharded.mesh_info, "shard_mesh_rank", 0),
    )
    rows = sharded._orig_size[dimension]
    chunk = math.ceil(rows / size)
    first = min(chunk * rank, rows)
    count = min(chunk, rows - first)
    along = places[dimension]
    axes = places.clone()
    axes[dimension] = along - first
    return (along >= first) & (along < first + count), axes


def _of_zero(leaf: Any, zero: Any) -> tuple[Any, int, int, int]:
    """ZeRO's flat parameter with a part of the leaf; where that starts in the leaf and in it; its size."""
    if hasattr(leaf, "ds_tensor"):
        group, start, count = zero.grad_position[zero.get_param_id(leaf)]
        first = dist.get_rank(leaf.ds_process_group) * leaf.ds_tensor.ds_numel
        return zero.fp32_partitioned_groups_flat[group], first, start, count
    mapping: Any = getattr(leaf, "_hp_mapping", None)
    for flat in zero.single_partition_of_fp32_groups if mapping is not None else ():
        if flat.untyped_storage().data_ptr() == mapping.hp_fragment.untyped_storage().data_ptr():
            source, target = mapping.lp_fragment_address, mapping.hp_fragment_address
            return flat, source.start, target.start, source.numel
    return torch.empty(0), 0, 0, 0  # on other ranks


def evenly(leaves: list[Any], most: int) -> list[Any]:
    """At most so many, evenly over their order."""
    step = max(1.0, len(leaves) / max(1, most))
    return [leaves[int(i * step)] for i in range(min(len(leaves), most))]
