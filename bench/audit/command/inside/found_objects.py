"""Objects of frameworks that exist in the process: what they were asked for."""

from __future__ import annotations

import functools
import gc
from collections import defaultdict
from operator import attrgetter
from typing import Any

PACKAGES = ("torch", "deepspeed", "accelerate", "lightning", "pytorch_lightning", "transformers")
N = ("gradient_accumulation_steps", "accumulate_grad_batches")
"""Attributes with the number of micro-batches that was asked for."""
FACTS: dict[str, tuple[str, ...] | str] = {
    "DistributedDataParallel": (),
    "FSDPParam": ("sharded_param.device_mesh.shape", "sharded_param.placements"),
    "DeepSpeedEngine": (N[0], "zero_optimization_stage"),
    "ZeROOptimizer": (),
    "Accelerator": (N[0], "distributed_type"),
    "FullyShardedDataParallelPlugin": ("fsdp_version",),
    "TrainingArguments": (N[0],),
    "Trainer": (N[1],),
    "FullyShardedDataParallel": "keeps gradients in flat parameters",
    "PipelineModule": "has other layers on each rank",
    "_PipelineStageBase": "has other layers on each rank",
    "LocalSGD": "averages parameters instead of gradients",
}
"""By the name of a class or a base, the attributes that are read, or why a training with it is not judged."""
LEAVES = {
    "main_grad": "has the gradients, as in Megatron",
    "_local_tensor": "has a part of each gradient, as in tensor parallelism",
}
"""By an attribute of leaves, why a training with it is not judged."""


@functools.cache
def _name(kind: type) -> str:
    """What FACTS calls a class; empty if it has none."""
    bases = (base.__name__ for base in kind.__mro__ if str(base.__module__).partition(".")[0] in PACKAGES)
    return next((name for name in bases if name in FACTS), "")


class FoundObjects:
    """The objects that the garbage collector knows, by their name in FACTS."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[Any]] = defaultdict(list)
        for found in gc.get_objects():
            if name := _name(type(found)):
                self.by_name[name].append(found)
        parameters = (found for found in self.by_name["FSDPParam"] if hasattr(found, "_unsharded_param"))
        self.sharded = {id(found._unsharded_param): found for found in parameters}
        """FSDP2's parameters by the id of the leaf that autograd sees."""
        self.zero = next(reversed(self.by_name["ZeROOptimizer"]), None)

    def facts(self) -> dict[str, Any]:
        """What the last of each was asked for."""
        facts: dict[str, Any] = {}
        for name, found in self.by_name.items():
            wanted = FACTS[name]
            if found:
                facts[name] = wanted if isinstance(wanted, str) else {key: _read(found[-1], key) for key in wanted}
        return facts

    def asked(self) -> int:
        """The most micro-batches per update that one asks for now: a callback may change that."""
        counts = (_read(found, key) for same in self.by_name.values() for found in same[-1:] for key in N)
        return max((count for count in counts if isinstance(count, int)), default=1)


def _read(found: Any, attribute: str) -> int | str | None:
    """An attribute, or what a method returns; None before it is set up."""
    try:
        value = attrgetter(attribute)(found)
        value = value() if callable(value) else value
    except Exception:
        return None
    return value if isinstance(value, int) else str(value)
