"""Samples of a few leaves of autograd: what each backward adds to the gradient, and what the optimizer uses of it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from .found_objects import FoundObjects

MOST_LEAVES = 8
MOST_COORDINATES = 64
"""Coordinates of a leaf."""
LEAST_ELEMENTS = 8
"""Smaller leaves are not sampled."""


class LeafProbe:
    """Some coordinates of one leaf."""

    def __init__(self, leaf: Any, seed: int, objects: FoundObjects) -> None:
        self.leaf = leaf
        self.shape = tuple(getattr(leaf, "ds_shape", leaf.shape))  # ZeRO-3 leaves no elements between uses
        generator = torch.Generator("cpu").manual_seed(seed)  # the global one belongs to the training
        self.flat = torch.randint(math.prod(self.shape), (MOST_COORDINATES,), generator=generator).unique()
        coordinates = torch.stack(torch.unravel_index(self.flat, self.shape))
        self._index = tuple(coordinates.to(leaf.device, non_blocking=True))
        self._sharded = objects.sharded.get(id(leaf))
        self.name = getattr(self._sharded, "_param_fqn", "")
        self.holder = leaf if self._sharded is None else self._sharded.sharded_param
        here, axes = torch.ones_like(self.flat, dtype=torch.bool), coordinates
        if objects.zero is not None:
            self.holder, first, start, count = _of_zero(leaf, objects.zero)
            here, axes = (self.flat >= first) & (self.flat < first + count), (self.flat - first + start).unsqueeze(0)
        elif hasattr(self.holder, "_local_tensor"):
            from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as local

            shape, offset = local(self.holder.shape, self.holder.device_mesh, self.holder.placements)
            axes = coordinates - torch.tensor(offset).unsqueeze(1)
            here = ((axes >= 0) & (axes < torch.tensor(shape).unsqueeze(1))).all(0)
        # Copying an index to an accelerator may wait for it: once is enough.
        self._here = here.nonzero().flatten().to(self.holder.device, non_blocking=True)
        self._held_index = tuple(axes[:, here].to(self.holder.device, non_blocking=True))
        self.added: Any = None
        """What the running backward has added, or None."""
        self.recording = False
        self.handle = leaf.register_hook(self._add)

    def _add(self, gradient: Any) -> None:
        # torch.autograd.grad calls the hooks of leaves, too.
        is_plain = not (gradient.is_sparse or hasattr(gradient, "_local_tensor"))
        if self.recording and is_plain and tuple(gradient.shape) == self.shape:
            values = gradient.detach()[self._index].double()
            self.added = values if self.added is None else self.added + values

    def take(self) -> Any:
        """What was added since the last call."""
        added, self.added, self.recording = self.added, None, False
        return torch.zeros(len(self.flat)) if added is None else added

    def parameter(self) -> Any:
        """The values of the parameter, or None where they are not all here."""
        leaf = self.leaf
        is_whole = tuple(leaf.shape) == self.shape and leaf.untyped_storage().size()
        return leaf.detach()[self._index].double() if is_whole and not hasattr(leaf, "_local_tensor") else None

    def gradient(self) -> Any:
        """The gradient as the optimizer finds it: 0 where it is None, and NaN where it is not on this rank."""
        values = torch.full((len(self.flat),), math.nan, dtype=torch.float64, device=self._here.device)
        local = getattr(self.holder.grad, "_local_tensor", self.holder.grad)
        if local is None:
            values.index_fill_(0, self._here, 0.0)
        elif not local.is_sparse:
            values[self._here] = local.detach()[self._held_index].double()
        return values

    def held_dtype(self) -> str:
        """The dtype in which the gradient is held between two micro-batches; empty if it is not found."""
        accumulated = getattr(self._sharded, "unsharded_accumulated_grad", None)
        places = [self.leaf.grad, accumulated, self.holder.grad]
        return next((str(held.dtype).removeprefix("torch.") for held in places if held is not None), "")


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


def choose(roots: Any, objects: FoundObjects) -> list[LeafProbe]:
    """Probes of at most MOST_LEAVES leaves, evenly over the depth of the graph; in the same order on all ranks."""
    queue, leaves, seen = [root.grad_fn for root in roots], [], set()
    for node in queue:
        if node is not None and node not in seen:
            seen.add(node)
            leaves += [node.variable] if hasattr(node, "variable") else []
            queue += [inner for inner, _ in node.next_functions]
    leaves = [leaf for leaf in leaves if getattr(leaf, "ds_numel", leaf.numel()) >= LEAST_ELEMENTS]
    step = max(1.0, len(leaves) / MOST_LEAVES)
    return [LeafProbe(leaves[int(i * step)], i, objects) for i in range(min(len(leaves), MOST_LEAVES))]
