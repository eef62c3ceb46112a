"""Objects of frameworks and models that exist in the process: what they were asked for, and what they are called."""

from __future__ import annotations

import gc
import sys
from operator import attrgetter
from typing import Any

import torch

PACKAGES = ("torch", "deepspeed", "accelerate", "lightning", "pytorch_lightning", "transformers")
N = ("gradient_accumulation_steps", "accumulate_grad_batches")
"""Attributes with the number of micro-batches that was asked for."""
FACTS: dict[str, tuple[str, ...]] = {
    "DistributedDataParallel": (),
    "FullyShardedDataParallel": (),
    "FSDPParam": ("sharded_param.device_mesh.shape", "sharded_param.placements"),
    "FullyShardedDataParallelPlugin": ("fsdp_version",),
    "DeepSpeedEngine": (N[0], "zero_optimization_stage"),
    "ZeROOptimizer": (),
    "Accelerator": (N[0], "distributed_type"),
    "TrainingArguments": (N[0],),
    "Trainer": (N[1],),
}
SCALER = "GradScaler"
"""By the name of a class or a base, the attributes that are read."""
OBSTACLES = {
    "FullyShardedDataParallel": "FSDP1 keeps gradients in flat parameters",
    "LocalSGD": "local SGD averages parameters instead of gradients",
    "main_grad": "Megatron keeps gradients in main_grad",
}
"""By the name of a class, or of an attribute of leaves, why a training is not judged."""
PARALLEL = {
    "PipelineModule": "in a pipeline ranks hold different layers",
    "_PipelineStageBase": "in a pipeline ranks hold different layers",
    "_local_tensor": "parameters are distributed tensors, as in tensor parallelism",
}
"""By the name of a class, or of an attribute of leaves, why ranks hold different parameters."""
KNOWN = {*FACTS, *OBSTACLES, *PARALLEL, SCALER}
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.")
"""What wrappers put into the names of parameters."""


class FoundObjects:
    """The objects that the garbage collector knows."""

    def __init__(self) -> None:
        objects: list[Any] = gc.get_objects()
        names = {kind: _name(kind) for kind in set(map(type, objects))}
        named = [(names[type(found)], found) for found in objects if names[type(found)]]
        self._last = dict(named)
        """The newest of each name."""
        self.zero = self._last.get("ZeROOptimizer")
        parameters = [
            found
            for name, found in named
            if name == "FSDPParam" and hasattr(found, "_unsharded_param")
        ]
        self.sharded = {id(found._unsharded_param): found for found in parameters}
        """FSDP2's parameters by the id of the leaf that autograd sees."""
        self.modules = [found for found in objects if _is_module(found)]
        """All modules, those of other modules among them."""
        self._names = self._parameter_names()

    def name_of(self, leaf: Any) -> str:
        """What the model calls a parameter; empty if no module has it."""
        sharded = self.sharded.get(id(leaf))
        if sharded is not None:
            return getattr(sharded, "_param_fqn", "") or self._names.get(
                id(sharded.sharded_param), ""
            )
        return self._names.get(id(leaf), "")

    def facts(self) -> dict[str, str]:
        """What each that is set up was asked for."""
        facts = {}
        for name, found in self._last.items():
            values = {key: _read(found, key) for key in FACTS.get(name, ())}
            if name in FACTS and None not in values.values():
                facts[name] = ", ".join(f"{key} {value}" for key, value in values.items())
        return facts

    def reasons(self, leaves: list[Any], table: dict[str, str]) -> list[str]:
        """The texts of the table's names that are found among objects, or attributes of leaves."""
        names = [
            *self._last,
            *(name for name in table if any(hasattr(leaf, name) for leaf in leaves)),
        ]
        return sorted({table[name] for name in names if name in table})

    def loss_scale(self) -> Any:
        """The factor of a loss scaler that is in use and has unscaled nothing since its last update."""
        scaler = self._last.get(SCALER)
        if scaler is None or not scaler._enabled or scaler._scale is None:
            return None
        stages = [state["stage"].name for state in scaler._per_optimizer_states.values()]
        return None if "UNSCALED" in stages else scaler._scale.detach().clone()

    def asked(self) -> int:
        """The most micro-batches per update that one asks for now: a callback may change that."""
        counts = (_read(found, key) for found in self._last.values() for key in N)
        return max((count for count in counts if isinstance(count, int)), default=1)

    def batch_norms(self, leaves: list[Any]) -> int:
        """Modules that are trained with the statistics of the micro-batch that they are given."""
        trained = set(map(id, leaves))
        count = 0
        for module in self.modules:
            is_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
            if is_norm and module.training and id(module.weight) in trained:
                count += 1
        return count

    def copies_of(self, leaf: Any, name: str) -> Any:
        """A parameter or buffer of another module with this name and shape that is not trained, as of an average."""
        ending = name.split(".", 1)[-1]
        for other in self._frozen.get(tuple(leaf.shape), ()):
            if self._names.get(id(other), "").endswith(ending) and ending:
                return other
        return None

    def _parameter_names(self) -> dict[int, str]:
        """By id, with the variable that holds the outermost module, where several are trained."""
        inner = {id(child) for module in self.modules for child in module._modules.values()}
        roots = [module for module in self.modules if id(module) not in inner]
        names: dict[int, str] = {}
        self._frozen: dict[tuple[int, ...], list[Any]] = {}
        variables = _variables(roots) if len(roots) > 1 else {}
        for root in roots:
            prefix = variables.get(id(root), type(root).__name__ if len(roots) > 1 else "")
            tensors = [*root.named_parameters(remove_duplicate=False), *root.named_buffers()]
            for name, parameter in tensors:
                full = f"{prefix}.{name}" if prefix else name
                for wrapper in WRAPPERS:
                    full = full.replace(wrapper, "")
                if len(full) < len(names.get(id(parameter), full + " ")):
                    names[id(parameter)] = full
                if not parameter.requires_grad:
                    self._frozen.setdefault(tuple(parameter.shape), []).append(parameter)
        return names


def _is_module(found: Any) -> bool:
    # isinstance would ask proxies for their class, some of which warn.
    return issubclass(type(found), torch.nn.Module) and "_modules" in vars(found)


def _variables(roots: list[Any]) -> dict[int, str]:
    """What the frames that train call these modules, the outermost first."""
    wanted = set(map(id, roots))
    frames = []
    frame = sys._getframe()
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back  # type: ignore[assignment]
    found: dict[int, str] = {}
    for frame in reversed(frames):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in (*PACKAGES, "_bench_audit"):
            continue
        for name, value in list(frame.f_locals.items()):
            if id(value) in wanted and not name.startswith("_"):
                found.setdefault(id(value), name)
    return found


def _name(kind: type) -> str:
    """What the tables call a class; empty if it is in none."""
    bases = (
        base.__name__ for base in kind.__mro__ if str(base.__module__).partition(".")[0] in PACKAGES
    )
    return next((name for name in bases if name in KNOWN), "")


def _read(found: Any, attribute: str) -> Any:
    """An attribute, or what a method returns; None before it is set up."""
    try:
        value = attrgetter(attribute)(found)
        return value() if callable(value) else value
    except Exception:
        return None
