"""The gradient that clipping or the optimizer uses, at the coordinates of a probe, wherever a framework keeps it."""

from __future__ import annotations

from typing import Any

from .found_objects import FoundObjects
from .leaf_probes import LeafProbe

ABSENT = "absent"
"""The dtype of a gradient that is None although its parameter is updated."""


class UsedGradients:
    """Reads them; ``None`` stands for what another rank has, or for what was not found."""

    def __init__(self, torch: Any, objects: FoundObjects) -> None:
        self._torch = torch
        self._objects = objects
        self._indices: dict[tuple[int, int], Any] = {}

    def read(self, probe: LeafProbe, updated: set[int]) -> tuple[Any, str]:
        """The values, with the positions of those that are here; and their dtype. ``updated`` are ids of parameters."""
        sharded = self._objects.sharded.get(id(probe.leaf))
        parameter = probe.leaf if sharded is None else sharded.sharded_param
        if id(parameter) in updated:
            if parameter.grad is None:
                return None, ABSENT
            return self._of_parameter(probe, parameter.grad)
        found = self._of_zero(probe)
        if found is None:
            return None, ""
        flat, start = found
        if flat is None or id(flat) not in updated or flat.grad is None:
            return None, ""
        here = [place for place, at in enumerate(probe.flat) if 0 <= at - start[0] < start[2]]
        at = [probe.flat[place] - start[0] + start[1] for place in here]
        return self._take(probe, flat.grad, here, at)

    def _of_parameter(self, probe: LeafProbe, gradient: Any) -> tuple[Any, str]:
        local = getattr(gradient, "_local_tensor", None)
        if local is None:
            if gradient.is_sparse:
                return None, "sparse"
            return [list(range(len(probe.flat))), gradient.detach()[probe.index].double()], _dtype(gradient)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        shape, offset = compute_local_shape_and_global_offset(gradient.shape, gradient.device_mesh, gradient.placements)
        here, at = [], []
        for place, coordinate in enumerate(probe.coordinates):
            inner = [position - first for position, first in zip(coordinate, offset, strict=True)]
            if all(0 <= position < size for position, size in zip(inner, shape, strict=True)):
                here.append(place)
                at.append(sum(position * step for position, step in zip(inner, _strides(shape), strict=True)))
        return self._take(probe, local, here, at)

    def _of_zero(self, probe: LeafProbe) -> tuple[Any, tuple[int, int, int]] | None:
        """ZeRO's flat fp32 parameters with this leaf: where its part starts in the leaf and in them, and its length."""
        leaf, zero = probe.leaf, self._objects.zero
        if zero is None:
            return None
        if hasattr(leaf, "ds_tensor"):
            group, position, count = zero.grad_position[zero.get_param_id(leaf)]
            first = self._torch.distributed.get_rank(leaf.ds_process_group) * leaf.ds_tensor.ds_numel
            return zero.fp32_partitioned_groups_flat[group], (first, position, count)
        mapping = getattr(leaf, "_hp_mapping", None)
        if mapping is None:  # all of it is on other ranks
            return None
        storage = mapping.hp_fragment.untyped_storage().data_ptr()
        partitions = zero.single_partition_of_fp32_groups
        flat = next((part for part in partitions if part.untyped_storage().data_ptr() == storage), None)
        address = mapping.lp_fragment_address
        return flat, (address.start, mapping.hp_fragment_address.start, address.numel)

    def _take(self, probe: LeafProbe, gradient: Any, here: list[int], at: list[int]) -> tuple[Any, str]:
        key = id(probe), len(at)
        if key not in self._indices:
            self._indices[key] = self._torch.tensor(at, dtype=self._torch.int64).to(gradient.device, non_blocking=True)
        return [here, self._torch.take(gradient.detach(), self._indices[key]).double()], _dtype(gradient)

    def held(self, probe: LeafProbe) -> str:
        """The dtype in which the gradient is held between two micro-batches; empty if it is not found."""
        sharded = self._objects.sharded.get(id(probe.leaf))
        places = [(probe.leaf, "grad"), (sharded, "unsharded_accumulated_grad")]
        places.append((getattr(sharded, "sharded_param", None), "grad"))
        held = (getattr(owner, name, None) for owner, name in places)
        return next((_dtype(gradient) for gradient in held if gradient is not None), "")


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _strides(shape: tuple[int, ...]) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(shape)]
