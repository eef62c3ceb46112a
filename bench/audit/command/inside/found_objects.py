"""Objects of frameworks that exist in the process: what they were asked for, and where they keep gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

PACKAGES = ("torch", "deepspeed", "accelerate", "lightning", "pytorch_lightning", "transformers")
READERS: dict[str, Callable[[Any], Any]] = {
    "DistributedDataParallel": lambda found: True,
    "FullyShardedDataParallel": lambda found: True,
    "FSDPParam": lambda found: f"{tuple(found.sharded_param.device_mesh.shape)} {found.sharded_param.placements}",
    "DeepSpeedEngine": lambda found: {
        "N": found.gradient_accumulation_steps(),
        "stage": found.zero_optimization_stage(),
        "fp16": bool(found.fp16_enabled()),
    },
    "ZeROOptimizer": lambda found: True,
    "Accelerator": lambda found: {"N": found.gradient_accumulation_steps, "type": str(found.distributed_type)},
    "FullyShardedDataParallelPlugin": lambda found: {"version": found.fsdp_version},
    "TrainingArguments": lambda found: {"N": found.gradient_accumulation_steps},
    "Trainer": lambda found: {"N": found.accumulate_grad_batches, "strategy": type(found.strategy).__name__},
    "LocalSGD": lambda found: True,
    "PipelineModule": lambda found: True,
    "_PipelineStageBase": lambda found: True,
}
"""What is read of an object, by the name of its class or a base; N is how many micro-batches were asked for."""


class FoundObjects:
    """The objects of ``READERS`` that the garbage collector knows."""

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
                names[kind] = next((name for name in bases if name in READERS), "")
            if name := names[kind]:
                self.by_name[name] = found
                self.sharded |= {id(found._unsharded_param): found} if hasattr(found, "_unsharded_param") else {}

    def facts(self) -> dict[str, Any]:
        """What each is asked for now: a callback may change that."""
        facts = {}
        for name, found in self.by_name.items():
            try:
                facts[name] = READERS[name](found)
            except Exception:  # one that is not set up
                continue
        return facts
