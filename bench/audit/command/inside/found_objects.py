"""Objects of frameworks that exist in the process: what they were asked for."""

from __future__ import annotations

import gc
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


class FoundObjects:
    """The objects of ``FACTS`` that the garbage collector knows."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        """The last of each kind."""
        self.sharded: dict[int, Any] = {}
        """FSDP2's parameters by the id of the leaf that autograd sees."""

    def search(self) -> None:
        """Find them."""
        names: dict[type, str] = {}
        for found in gc.get_objects():
            kind = type(found)
            if kind not in names:
                bases = [base.__name__ for base in kind.__mro__ if str(base.__module__).partition(".")[0] in PACKAGES]
                names[kind] = next((name for name in bases if name in FACTS), "")
            if name := names[kind]:
                self.by_name[name] = found
                self.sharded |= {id(found._unsharded_param): found} if hasattr(found, "_unsharded_param") else {}

    def facts(self) -> dict[str, Any]:
        """What each was asked for."""
        return {
            name: FACTS[name] if isinstance(FACTS[name], str) else {key: _read(found, key) for key in FACTS[name]}
            for name, found in self.by_name.items()
        }

    def asked(self) -> int:
        """The most micro-batches per update that one asks for now: a callback may change that."""
        counts = (_read(found, key) for found in self.by_name.values() for key in N)
        return max((count for count in counts if isinstance(count, int)), default=1)


def _read(found: Any, attribute: str) -> int | str | None:
    """An attribute, or what a method returns; None before it is set up."""
    try:
        value = attrgetter(attribute)(found)
        value = value() if callable(value) else value
    except Exception:
        return None
    return value if isinstance(value, int) else str(value)
