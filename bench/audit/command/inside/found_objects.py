"""Objects of frameworks that exist in the process: what they were asked for."""

from __future__ import annotations

import gc
from operator import attrgetter
from typing import Any

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
"""By the name of a class or a base, the attributes that are read."""
OBSTACLES = {
    "FullyShardedDataParallel": "FSDP1 keeps gradients in flat parameters",
    "PipelineModule": "in a pipeline ranks hold different layers",
    "_PipelineStageBase": "in a pipeline ranks hold different layers",
    "LocalSGD": "local SGD averages parameters instead of gradients",
    "main_grad": "Megatron keeps gradients in main_grad",
    "_local_tensor": "gradients are distributed tensors, as in tensor parallelism",
}
"""By the name of a class, or of an attribute of leaves, why a training is not judged."""


class FoundObjects:
    """The objects that the garbage collector knows."""

    def __init__(self) -> None:
        objects: list[Any] = gc.get_objects()
        names = {kind: _name(kind) for kind in set(map(type, objects))}
        named = [(names[type(found)], found) for found in objects if names[type(found)]]
        self._last = dict(named)
        """The newest of each name."""
        self.zero = self._last.get("ZeROOptimizer")
        parameters = [found for name, found in named if name == "FSDPParam" and hasattr(found, "_unsharded_param")]
        self.sharded = {id(found._unsharded_param): found for found in parameters}
        """FSDP2's parameters by the id of the leaf that autograd sees."""

    def facts(self) -> dict[str, str]:
        """What each that is set up was asked for."""
        facts = {}
        for name, found in self._last.items():
            values = {key: _read(found, key) for key in FACTS.get(name, ())}
            if None not in values.values():
                facts[name] = ", ".join(f"{key} {value}" for key, value in values.items())
        return facts

    def obstacles(self, leaves: list[Any]) -> list[str]:
        """Why the training is not judged."""
        names = [*self._last, *(name for name in OBSTACLES if any(hasattr(leaf, name) for leaf in leaves))]
        return [OBSTACLES[name] for name in names if name in OBSTACLES]

    def asked(self) -> int:
        """The most micro-batches per update that one asks for now: a callback may change that."""
        counts = (_read(found, key) for found in self._last.values() for key in N)
        return max((count for count in counts if isinstance(count, int)), default=1)


def _name(kind: type) -> str:
    """What the tables call a class; empty if it is in none."""
    bases = (base.__name__ for base in kind.__mro__ if str(base.__module__).partition(".")[0] in PACKAGES)
    return next((name for name in bases if name in FACTS or name in OBSTACLES), "")


def _read(found: Any, attribute: str) -> Any:
    """An attribute, or what a method returns; None before it is set up."""
    try:
        value = attrgetter(attribute)(found)
        return value() if callable(value) else value
    except Exception:
        return None
