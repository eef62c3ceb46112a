"""The state of a training, found among the objects of its process."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Union

import torch
from torch import Tensor

from ...command.inside.found_objects import AVERAGES, FoundObjects
from ...command.inside.graph_survey import plain

LEAST_COPIES = 2
"""Tensors that a list or dictionary of copies has at least."""
SCHEDULES = ("LRScheduler", "_LRScheduler")
SCHEDULES_OF_DEEPSPEED = "deepspeed.runtime.lr_schedules"
SPECTRAL = ("_SpectralNorm", "SpectralNorm")
"""Of torch's parametrization, and of its older hook."""
POSITIONS = ("last_epoch", "last_batch_iteration")
"""Where schedules of torch and of DeepSpeed stand."""

Number = Union[float, Tensor]  # noqa: UP007 - older Pythons
"""A tensor has one element."""


class FlatPart(NamedTuple):
    """Where a parameter is in a flat tensor of ZeRO."""

    name: str
    first: int
    """The first of its elements."""
    size: int
    """How many they are."""


class CopiedParameters(NamedTuple):
    """A list or dictionary that holds a tensor for each parameter."""

    name: str
    """The attribute or global variable that holds it."""
    container: list[object] | dict[object, object]


class FoundState:
    """Names of parameters, buffers, copies of parameters, schedules and scalers."""

    def __init__(self, optimized: set[int]) -> None:
        """``optimized`` has the ids of the tensors that optimizers update."""
        self.objects = FoundObjects()
        self._names: dict[int, str] = {}
        """Of FSDP2's shards, by id."""
        for held in self.objects.sharded.values():
            leaf = held._unsharded_param
            self._names[id(held.sharded_param)] = self.objects.name_of(leaf)
        self.parts: dict[int, list[FlatPart]] = {}
        """By the id of a flat tensor of ZeRO."""
        self._mapped: dict[int, Tensor] = {}
        """Parameters that ZeRO trains by way of its flat tensors, by id."""
        if self.objects.zero is not None:
            self._map_partitions(self.objects.zero)
        self._trained = optimized | self._mapped.keys()
        self.schedules: list[object] = []
        self._copied: list[CopiedParameters] = []
        self._is_averaged = False
        """Whether replicas drift apart on purpose."""
        self._scan(optimized)
        self.replicated: set[int] = set()
        """Ids of parameters that DistributedDataParallel keeps the same on all ranks."""
        if not self._is_averaged:
            self._find_replicated()

    def name_of(self, parameter: Tensor) -> str:
        """What the model calls it; empty if no module has it."""
        name = self._names.get(id(parameter))
        if name is None:
            return self.objects.name_of(parameter)
        return name

    def model_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Those that ZeRO trains by way of its flat tensors.

        Of stage 3 they are this rank's parts.
        """
        for parameter in self._mapped.values():
            yield self.name_of(parameter), getattr(parameter, "ds_tensor", parameter)

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those of modules with a parameter that is trained."""
        for root in self.objects.roots:
            if any(map(self._is_trained, root.parameters())):
                for name, buffer in root.named_buffers():
                    if isinstance(buffer, Tensor):
                        yield self.objects.name_of(buffer, name), buffer

    def copies(self) -> Iterator[tuple[str, Tensor]]:
        """Tensors that are shaped as trained parameters, and are not trained.

        These are moving averages, targets or references.
        """
        shapes = {tuple(parameter.shape) for parameter in self._trained_parameters()}
        seen: set[int] = set()
        for root in self.objects.roots:
            for name, parameter in root.named_parameters():
                is_new = id(parameter) not in seen and not self._is_trained(parameter)
                if is_new and parameter.grad is None and tuple(parameter.shape) in shapes:
                    seen.add(id(parameter))
                    yield self.objects.name_of(parameter, name), parameter
        for owner, container in self._copied:
            items: Sequence[tuple[object, object]]
            if isinstance(container, dict):
                items = list(container.items())
            else:
                items = list(enumerate(container))
            for key, tensor in items:
                if isinstance(tensor, Tensor):
                    yield f"{owner}[{key}]", tensor

    def positions(self) -> dict[str, Number]:
        """Where schedules stand, and the factors of loss scalers."""
        found: dict[str, Number] = {}
        for number, schedule in enumerate(self.schedules):
            for attribute in POSITIONS:
                place = getattr(schedule, attribute, None)
                if isinstance(place, (int, float)):
                    name = f"{type(schedule).__name__}.{attribute}"
                    if name in found:
                        name += f" #{number + 1}"
                    found[name] = place
        scale = self.objects.scaler_factor()
        if scale is not None:
            found["GradScaler.scale"] = scale.detach().double().reshape(())
        zero_scale = getattr(getattr(self.objects.zero, "loss_scaler", None), "cur_scale", None)
        if isinstance(zero_scale, (int, float)):
            found["ZeRO.cur_scale"] = zero_scale
        return found

    def dropouts(self) -> int:
        """Modules in training mode that drop elements at random."""
        kind = torch.nn.modules.dropout._DropoutNd
        count = 0
        for module in self.objects.modules:
            if isinstance(module, kind) and module.training and module.p > 0:
                count += 1
        return count

    def batch_norms(self) -> int:
        """Modules in training mode that normalize with the statistics of what they are given."""
        count = 0
        for module in self.objects.modules:
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm) and module.training:
                count += 1
        return count

    def moving(self) -> list[str]:
        """Kinds of modules in training mode, other than batch norms, whose state moves at each forward."""
        kinds = set()
        for module in self.objects.modules:
            if not module.training:
                continue
            names = {type(module).__name__}
            for hook in module._forward_pre_hooks.values():
                names.add(type(hook).__name__)
            if not names.isdisjoint(SPECTRAL):
                kinds.add("spectral normalization")
            if getattr(module, "track_running_stats", False) and _is_instance_norm(module):
                kinds.add("instance normalization with running statistics")
        return sorted(kinds)

    def _is_trained(self, parameter: Tensor) -> bool:
        return id(parameter) in self._trained or id(parameter) in self.objects.sharded

    def _trained_parameters(self) -> Iterator[Tensor]:
        for root in self.objects.roots:
            yield from filter(self._is_trained, root.parameters())

    def _find_replicated(self) -> None:
        for module in self.objects.modules:
            if type(module).__name__ != "DistributedDataParallel":
                continue
            ignored: Collection[str] = getattr(module, "parameters_to_ignore", ())
            inner: torch.nn.Module = module.module  # type: ignore[assignment]
            for name, parameter in inner.named_parameters():
                if name not in ignored:
                    self.replicated.add(id(parameter))

    # ZeRO's optimizers are of DeepSpeed, which has no types.

    def _map_partitions(self, zero: Any) -> None:
        """Where parameters are in the flat tensors that ZeRO's optimizer updates."""
        for module in self.objects.modules:
            for parameter in module._parameters.values():
                if parameter is None or id(parameter) in self._mapped:
                    continue
                if hasattr(parameter, "ds_tensor") and hasattr(zero, "grad_position"):
                    self._map_stage_3(parameter, zero)
                elif getattr(parameter, "_hp_mapping", None) is not None:
                    self._map_stage_2(parameter, zero)
                elif parameter.requires_grad and hasattr(zero, "single_partition_of_fp32_groups"):
                    self._mapped[id(parameter)] = parameter  # its part is on other ranks

    def _map_stage_3(self, parameter: Tensor, zero: Any) -> None:
        place = zero.grad_position.get(zero.get_param_id(parameter))
        if place is not None:
            group, first, count = place
            flat = zero.fp32_partitioned_groups_flat[group]
            self._add_part(flat, FlatPart(self.name_of(parameter), first, count))
            self._mapped[id(parameter)] = parameter

    def _map_stage_2(self, parameter: Tensor, zero: Any) -> None:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        pointer = mapping.hp_fragment.untyped_storage().data_ptr()
        for flat in zero.single_partition_of_fp32_groups:
            if flat.untyped_storage().data_ptr() == pointer:
                target = mapping.hp_fragment_address
                self._add_part(flat, FlatPart(self.name_of(parameter), target.start, target.numel))
        self._mapped[id(parameter)] = parameter

    def _add_part(self, flat: Tensor, part: FlatPart) -> None:
        self.parts.setdefault(id(flat), []).append(part)

    # All objects of the process

    def _scan(self, optimized: set[int]) -> None:
        """Find schedules, averages, and lists and dictionaries of copies of the parameters."""
        shapes = {id(found): tuple(found.shape) for found in self._trained_parameters()}
        excluded = optimized | shapes.keys()
        for root in self.objects.roots:
            for parameter in root.parameters():
                if parameter.grad is not None:
                    excluded.add(id(parameter.grad))
        are_schedules: dict[type, bool] = {}
        for found in gc.get_objects():
            kind = type(found)
            if kind in (list, dict):
                if len(found) == len(shapes) >= LEAST_COPIES:
                    self._look_for_copies(found, shapes.values(), excluded)
                continue
            if kind not in are_schedules:
                names = {base.__name__ for base in kind.__mro__}
                self._is_averaged |= not names.isdisjoint(AVERAGES)
                is_of_torch = not names.isdisjoint(SCHEDULES)
                module = str(kind.__module__)
                are_schedules[kind] = is_of_torch or module.endswith(SCHEDULES_OF_DEEPSPEED)
            if are_schedules[kind]:
                self.schedules.append(found)

    def _look_for_copies(
        self,
        container: list[object] | dict[object, object],
        shapes: Iterable[tuple[int, ...]],
        excluded: set[int],
    ) -> None:
        values = container
        if isinstance(container, dict):
            values = list(container.values())
        if _are_copies(values, shapes, excluded):
            owner = _owner(container)
            if owner:
                self._copied.append(CopiedParameters(owner, container))


def _is_instance_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)


def _are_copies(
    values: Iterable[object], shapes: Iterable[tuple[int, ...]], excluded: set[int]
) -> bool:
    for value, shape in zip(values, shapes):  # noqa: B905 - older Pythons
        if not isinstance(value, Tensor) or value.is_sparse:
            return False
        if tuple(plain(value).shape) != shape and tuple(value.shape) != shape:
            return False
        if id(value) in excluded:
            return False
    return True


def _owner(container: object) -> str:
    """The attribute or global variable that holds a container; empty if there is none."""
    for holder in gc.get_referrers(container):
        if type(holder) is dict:
            name = _key_of(holder, container)
            if name is not None and ("__name__" in holder or name.isidentifier()):
                return name
        elif hasattr(holder, "__dict__"):
            name = _key_of(vars(holder), container)
            if name is not None:
                return f"{type(holder).__name__}.{name}"
    return ""


def _key_of(holder: Mapping[Any, object], wanted: object) -> str | None:
    """The key of a value; None if the dictionary does not hold it."""
    for key, value in holder.items():
        if value is wanted:
            return str(key)
    return None
