"""The state of a training, found among the objects of its process: what each tensor is called, and where it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

from ...command.inside.found_objects import FoundObjects
from ...command.inside.graph_survey import plain

LEAST_COPIES = 2
"""Tensors that a list or dictionary of copies has at least."""
SCHEDULES = ("LRScheduler", "_LRScheduler")
AVERAGES = ("ModelAverager", "PostLocalSGDState", "LocalSGD")
"""With one of these, replicas drift apart on purpose."""
POSITIONS = ("last_epoch", "last_batch_iteration")
"""Where schedules of torch and of DeepSpeed stand."""

Part = tuple[str, int, int]
"""Name, first element and number of elements of a parameter in a flat tensor of ZeRO."""


class FoundState:
    """Names of parameters, buffers, copies of parameters, schedules and scalers."""

    def __init__(self, optimized: set[int]) -> None:
        """``optimized`` has the ids of the tensors that optimizers update."""
        self.objects = FoundObjects()
        self._names = {
            id(held.sharded_param): self.objects.name_of(_leaf(held))
            for held in self.objects.sharded.values()
        }
        self.parts: dict[int, list[Part]] = {}
        """By the id of a flat tensor of ZeRO."""
        self._mapped: list[Any] = []
        if self.objects.zero is not None:
            self._map_partitions(self.objects.zero)
        replicas: list[Any] = [
            module
            for module in self.objects.modules
            if type(module).__name__ == "DistributedDataParallel"
        ]
        self.replicated = {
            id(parameter)
            for module in replicas
            for name, parameter in module.module.named_parameters()
            if name not in getattr(module, "parameters_to_ignore", ())
        }
        self._trained = optimized | set(map(id, self._mapped))
        self._roots = self._outermost()
        self.schedules, self._lists = self._scan(optimized)
        if self._is_averaged:
            self.replicated = set()

    def name_of(self, parameter: Any) -> str:
        """What the model calls it; empty if no module has it."""
        return self._names.get(id(parameter)) or self.objects.name_of(parameter)

    def model_parameters(self) -> Iterator[tuple[str, Any]]:
        """Parameters that ZeRO trains by way of its flat tensors; those of stage 3 are this rank's parts."""
        for parameter in self._mapped:
            yield self.name_of(parameter), getattr(parameter, "ds_tensor", parameter)

    def buffers(self) -> Iterator[tuple[str, Any]]:
        """Those of modules with a parameter that is trained."""
        for root in self._roots:
            if any(self._is_trained(parameter) for parameter in root.parameters()):
                for name, buffer in root.named_buffers():
                    if isinstance(buffer, torch.Tensor):
                        yield self.objects.name_of(buffer) or name, buffer

    def copies(self) -> Iterator[tuple[str, Any]]:
        """Tensors that are shaped as parameters that are trained, and are not: moving averages, targets, references."""
        shapes = {
            tuple(parameter.shape)
            for root in self._roots
            for parameter in root.parameters()
            if self._is_trained(parameter)
        }
        seen: set[int] = set()
        for root in self._roots:
            for name, parameter in root.named_parameters():
                is_new = id(parameter) not in seen and not self._is_trained(parameter)
                if is_new and parameter.grad is None and tuple(parameter.shape) in shapes:
                    seen.add(id(parameter))
                    yield self.objects.name_of(parameter) or name, parameter
        for owner, found in self._lists:
            items = found.items() if isinstance(found, dict) else enumerate(found)
            for key, tensor in list(items):
                if isinstance(tensor, torch.Tensor):
                    yield f"{owner}[{key}]", tensor

    def positions(self) -> dict[str, Any]:
        """Where schedules stand, and the factors of loss scalers; some are tensors of one element."""
        found: dict[str, Any] = {}
        for number, schedule in enumerate(self.schedules):
            for attribute in POSITIONS:
                place = getattr(schedule, attribute, None)
                if isinstance(place, (int, float)):
                    name = f"{type(schedule).__name__}.{attribute}"
                    found[f"{name} #{number + 1}" if name in found else name] = place
        scaler = self.objects._last.get("GradScaler")
        if scaler is not None and scaler._enabled and scaler._scale is not None:
            found["GradScaler.scale"] = scaler._scale.detach().double().reshape(())
        scale = getattr(getattr(self.objects.zero, "loss_scaler", None), "cur_scale", None)
        if isinstance(scale, (int, float)):
            found["ZeRO.cur_scale"] = scale
        return found

    def dropouts(self) -> int:
        """Modules in training mode that drop elements at random."""
        kind = torch.nn.modules.dropout._DropoutNd
        return sum(
            isinstance(module, kind) and module.training and module.p > 0
            for module in self.objects.modules
        )

    def batch_norms(self) -> int:
        """Modules in training mode that normalize with the statistics of what they are given."""
        kind = torch.nn.modules.batchnorm._BatchNorm
        return sum(isinstance(module, kind) and module.training for module in self.objects.modules)

    def _is_trained(self, parameter: Any) -> bool:
        return id(parameter) in self._trained or id(parameter) in self.objects.sharded

    def _outermost(self) -> list[Any]:
        modules = self.objects.modules
        inner = {id(child) for module in modules for child in module._modules.values()}
        return [module for module in modules if id(module) not in inner]

    def _map_partitions(self, zero: Any) -> None:
        """Where parameters are in the flat tensors that ZeRO's optimizer updates."""
        for module in self.objects.modules:
            for parameter in module._parameters.values():
                if parameter is None or any(parameter is known for known in self._mapped):
                    continue
                if hasattr(parameter, "ds_tensor") and hasattr(zero, "grad_position"):
                    self._map_stage_3(parameter, zero)
                elif getattr(parameter, "_hp_mapping", None) is not None:
                    self._map_stage_2(parameter, zero)
                elif parameter.requires_grad and hasattr(zero, "single_partition_of_fp32_groups"):
                    self._mapped.append(parameter)  # its part is on other ranks

    def _map_stage_3(self, parameter: Any, zero: Any) -> None:
        place = zero.grad_position.get(zero.get_param_id(parameter))
        if place is not None:
            group, start, count = place
            flat = zero.fp32_partitioned_groups_flat[group]
            self.parts.setdefault(id(flat), []).append((self.name_of(parameter), start, count))
            self._mapped.append(parameter)

    def _map_stage_2(self, parameter: Any, zero: Any) -> None:
        mapping = parameter._hp_mapping
        pointer = mapping.hp_fragment.untyped_storage().data_ptr()
        for flat in zero.single_partition_of_fp32_groups:
            if flat.untyped_storage().data_ptr() == pointer:
                target = mapping.hp_fragment_address
                part = (self.name_of(parameter), target.start, target.numel)
                self.parts.setdefault(id(flat), []).append(part)
        self._mapped.append(parameter)

    def _scan(self, optimized: set[int]) -> tuple[list[Any], list[tuple[str, Any]]]:
        """Schedules, and lists and dictionaries of copies of the parameters with what their owners call them."""
        shapes = {
            id(parameter): tuple(parameter.shape)
            for root in self._roots
            for parameter in root.parameters()
            if self._is_trained(parameter)
        }
        gradients = {
            id(parameter.grad)
            for root in self._roots
            for parameter in root.parameters()
            if parameter.grad is not None
        }
        kinds: dict[type, bool] = {}
        schedules, lists = [], []
        self._is_averaged = False
        for found in gc.get_objects():
            kind = type(found)
            if kind in (list, dict):
                values = list(found.values()) if kind is dict else found
                if len(values) == len(shapes) >= LEAST_COPIES and _are_copies(
                    values, list(shapes.values()), set(shapes) | optimized | gradients
                ):
                    owner = _owner(found)
                    if owner:
                        lists.append((owner, found))
                continue
            if kind not in kinds:
                names = {base.__name__ for base in kind.__mro__}
                self._is_averaged = self._is_averaged or bool(names & set(AVERAGES))
                kinds[kind] = bool(names & set(SCHEDULES)) or str(kind.__module__).endswith(
                    "deepspeed.runtime.lr_schedules"
                )
            if kinds[kind]:
                schedules.append(found)
        return schedules, lists


def _leaf(held: Any) -> Any:
    """FSDP2's parameter as autograd sees it."""
    return getattr(held, "_unsharded_param", None)


def _are_copies(values: list[Any], shapes: list[Any], excluded: set[int]) -> bool:
    for value, shape in zip(values, shapes):  # noqa: B905 - older Pythons
        if not isinstance(value, torch.Tensor) or value.is_sparse:
            return False
        if tuple(plain(value).shape) != shape and tuple(value.shape) != shape:
            return False
        if id(value) in excluded:
            return False
    return True


def _owner(container: Any) -> str:
    """The attribute or global variable that holds a container; empty if there is none."""
    for holder in gc.get_referrers(container):
        if type(holder) is dict:
            named = [str(key) for key, value in holder.items() if value is container]
            if named and ("__name__" in holder or named[0].isidentifier()):
                return named[0]
        elif hasattr(holder, "__dict__"):
            for key, value in vars(holder).items():
                if value is container:
                    return f"{type(holder).__name__}.{key}"
    return ""
