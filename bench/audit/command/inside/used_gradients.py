"""The gradient that an optimizer uses, at the coordinates of a probe, wherever a framework keeps it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .found_objects import FoundObjects
from .leaf_probes import LeafProbe


class UsedGradients:
    """Reads them as [positions among the coordinates, values]: ranks with shards have some of them each."""

    def __init__(self, objects: FoundObjects) -> None:
        self._objects = objects
        self._places: dict[int, tuple[Any, list[int], tuple[Any, ...]]] = {}
        """By probe the tensor that has the gradient, the positions that it has, and where in it they are."""

    def read(self, probe: LeafProbe, updated: set[int]) -> Any:
        """The gradient of a parameter whose id is in ``updated``; [] if that has none, None if it is not seen."""
        if id(probe) not in self._places:  # copying an index to an accelerator may wait for it: once is enough
            self._places[id(probe)] = self._place(probe)
        holder, positions, index = self._places[id(probe)]
        if id(holder) not in updated or getattr(holder.grad, "is_sparse", False):
            return None
        if holder.grad is None:
            return []
        return [positions, getattr(holder.grad, "_local_tensor", holder.grad).detach()[index].double()]

    def _place(self, probe: LeafProbe) -> tuple[Any, list[int], tuple[Any, ...]]:
        leaf, sharded = probe.leaf, self._objects.sharded.get(id(probe.leaf))
        holder = leaf if sharded is None else sharded.sharded_param
        if "ZeROOptimizer" in self._objects.by_name:
            holder, first, start, count = self._of_zero(leaf)
            here, axes = (probe.flat >= first) & (probe.flat < first + count), (probe.flat - first + start).unsqueeze(0)
        elif hasattr(holder, "_local_tensor"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local

            shape, offset = local(holder.shape, holder.device_mesh, holder.placements)
            axes = probe.coordinates - torch.tensor(offset).unsqueeze(1)
            here = ((axes >= 0) & (axes < torch.tensor(shape).unsqueeze(1))).all(0)
        else:
            return holder, list(range(len(probe.flat))), probe.index
        index = tuple(axis.to(leaf.device, non_blocking=True) for axis in axes[:, here])
        return holder, here.nonzero().flatten().tolist(), index

    def _of_zero(self, leaf: Any) -> tuple[Any, int, int, int]:
        """ZeRO's flat parameter with a part of the leaf; where that starts in the leaf and in it; its size."""
        zero, mapping = self._objects.by_name["ZeROOptimizer"], getattr(leaf, "_hp_mapping", None)
        if hasattr(leaf, "ds_tensor"):
            group, start, count = zero.grad_position[zero.get_param_id(leaf)]
            first = dist.get_rank(leaf.ds_process_group) * leaf.ds_tensor.ds_numel
            return zero.fp32_partitioned_groups_flat[group], first, start, count
        if mapping is None:
            return None, 0, 0, 0
        storage = mapping.hp_fragment.untyped_storage().data_ptr()
        partitions = zero.single_partition_of_fp32_groups
        flat = next((part for part in partitions if part.untyped_storage().data_ptr() == storage), None)
        source, target = mapping.lp_fragment_address, mapping.hp_fragment_address
        return flat, source.start, target.start, source.numel

    def held_dtype(self, probe: LeafProbe) -> str:
        """The dtype in which the gradient is held between two micro-batches; empty if it is not found."""
        sharded = self._objects.sharded.get(id(probe.leaf))
        accumulated = getattr(sharded, "unsharded_accumulated_grad", None)
        places = [probe.leaf.grad, accumulated, None if sharded is None else sharded.sharded_param.grad]
        return next((str(held.dtype).removeprefix("torch.") for held in places if held is not None), "")
