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
        self._by_name: dict[str, Any] = {}
        self.sharded: dict[int, Any] = {}
        """FSDP2's parameters by the id of the leaf that autograd sees."""

    def search(self) -> dict[str, Any]:
        """Find them, and say what each was asked for."""
        names: dict[type, str] = {}
        facts = {}
        for found in gc.get_objects():
            kind = type(found)
            if kind not in names:
                bases = [base.__name__ for base in kind.__mro__ if str(base.__module__).partition(".")[0] in PACKAGES]
                names[kind] = next((name for name in bases if name in READERS), "")
            if name := names[kind]:
                try:
                    facts[name] = READERS[name](found)
                    self.sharded |= {id(found._unsharded_param): found} if name == "FSDPParam" else {}
                except Exception:  # one that is not set up
                    continue
                self._by_name[name] = found
        return facts

    @property
    def zero(self) -> Any:
        """DeepSpeed's ZeRO optimizer, or None."""
        return self._by_name.get("ZeROOptimizer")

    def asked(self) -> int:
        """The most micro-batches per update that an object asks for now: a callback may change that; or 1."""
        facts = (READERS[name](found) for name, found in self._by_name.items())
        counts = (fact.get("N") for fact in facts if isinstance(fact, dict))
        return max((count for count in counts if isinstance(count, int)), default=1)
