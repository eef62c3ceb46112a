"""The gradient that clipping or the optimizer uses, at the coordinates of a probe, wherever a framework keeps it."""

from __future__ import annotations

from typing import Any

from .found_objects import FoundObjects
from .leaf_probes import LeafProbe


class UsedGradients:
    """Reads them as [positions among the coordinates, values]: ranks with shards have some of them each."""

    def __init__(self, torch: Any, objects: FoundObjects) -> None:
        self._torch = torch
        self._objects = objects
        self._places: dict[int, tuple[list[int], tuple[Any, ...]]] = {}

    def read(self, probe: LeafProbe, updated: set[int]) -> Any:
        """The gradient of a parameter whose id is in ``updated``; [] if that has none, None if it is not found."""
        sharded = self._objects.sharded.get(id(probe.leaf))
        parameter = probe.leaf if sharded is None else sharded.sharded_param
        if id(parameter) in updated:
            if parameter.grad is None:
                return []
            if hasattr(parameter.grad, "_local_tensor"):
                return self._of_distributed(probe, parameter.grad)
            return [list(range(len(probe.flat))), probe.sample(parameter.grad)]
        flat, first, start, count = self._of_zero(probe)
        if flat is None or id(flat) not in updated or flat.grad is None:
            return None
        places = probe.flat - first
        here = (places >= 0) & (places < count)
        return self._take(probe, flat.grad, here, (places + start).unsqueeze(0))

    def _of_distributed(self, probe: LeafProbe, gradient: Any) -> Any:
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(gradient.shape, gradient.device_mesh, gradient.placements)
        inner = probe.coordinates - self._torch.tensor(offset).unsqueeze(1)
        here = ((inner >= 0) & (inner < self._torch.tensor(shape).unsqueeze(1))).all(0)
        return self._take(probe, gradient._local_tensor, here, inner)

    def _take(self, probe: LeafProbe, tensor: Any, here: Any, axes: Any) -> Any:
        if id(probe) not in self._places:  # copying an index to an accelerator may wait for it: once is enough
            index = tuple(axis.to(tensor.device, non_blocking=True) for axis in axes[:, here])
            self._places[id(probe)] = here.nonzero().flatten().tolist(), index
        positions, index = self._places[id(probe)]
        return [positions, tensor.detach()[index].double()]

    def _of_zero(self, probe: LeafProbe) -> tuple[Any, int, int, int]:
        """ZeRO's flat parameter with a part of the leaf; where that starts in the leaf and in it; its size."""
        leaf, zero = probe.leaf, self._objects.zero
        if zero is not None and hasattr(leaf, "ds_tensor"):
            group, start, count = zero.grad_position[zero.get_param_id(leaf)]
            first = self._torch.distributed.get_rank(leaf.ds_process_group) * leaf.ds_tensor.ds_numel
            return zero.fp32_partitioned_groups_flat[group], first, start, count
        mapping = getattr(leaf, "_hp_mapping", None)
        if zero is None or mapping is None:
            return None, 0, 0, 0
        storage = mapping.hp_fragment.untyped_storage().data_ptr()
        partitions = zero.single_partition_of_fp32_groups
        flat = next((part for part in partitions if part.untyped_storage().data_ptr() == storage), None)
        return (
            flat,
            mapping.lp_fragment_address.start,
            mapping.hp_fragment_address.start,
            mapping.lp_fragment_address.numel,
        )

    def held_dtype(self, probe: LeafProbe) -> str:
        """The dtype in which the gradient is held between two micro-batches; empty if it is not found."""
        sharded = self._objects.sharded.get(id(probe.leaf))
        accumulated = getattr(sharded, "unsharded_accumulated_grad", None)
        places = [probe.leaf.grad, accumulated, None if sharded is None else sharded.sharded_param.grad]
        return next((str(held.dtype).removeprefix("torch.") for held in places if held is not None), "")
