"""Objects of frameworks that exist in the process: what they were asked for, and where they keep gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

PACKAGES = ("torch", "deepspeed", "accelerate", "lightning", "pytorch_lightning", "transformers", "megatron")
READERS: dict[str, Callable[[Any], Any]] = {
    "DistributedDataParallel": lambda found: True,
    "FullyShardedDataParallel": lambda found: True,
    "FSDPParam": lambda found: f"{tuple(found.sharded_param.device_mesh.shape)} {found.sharded_param.placements}",
    "DeepSpeedEngine": lambda found: {
        "N": found.gradient_accumulation_steps(),
        "stage": found.zero_optimization_stage(),
        "fp16": bool(found.fp16_enabled()),
    },
    "DeepSpeedZeroOptimizer": lambda found: True,
    "DeepSpeedZeroOptimizer_Stage3": lambda found: True,
    "Accelerator": lambda found: {"N": found.gradient_accumulation_steps, "type": str(found.distributed_type)},
    "FullyShardedDataParallelPlugin": lambda found: {"version": found.fsdp_version},
    "TrainingArguments": lambda found: {"N": found.gradient_accumulation_steps},
    "Trainer": lambda found: {"N": found.accumulate_grad_batches, "strategy": type(found.strategy).__name__},
    "PipelineModule": lambda found: True,
    "_PipelineStageBase": lambda found: True,
}
"""What is read of an object, by the name of its class or a base; N is how many micro-batches were asked for."""


class FoundObjects:
    """The objects of ``READERS`` that the garbage collector knows."""

    def __init__(self) -> None:
        self.by_name: dict[str, Any] = {}
        self.sharded: dict[int, Any] = {}
        """FSDP2's parameters by the id of the leaf that autograd sees."""

    def search(self) -> dict[str, Any]:
        """Find them, and say what each was asked for."""
        names: dict[type, str] = {}
        facts = {}
        for found in gc.get_objects():
            kind = type(found)
            if kind not in names:
                names[kind] = _reader(kind)
            if not (name := names[kind]):
                continue
            try:
                facts[name] = READERS[name](found)
                if name == "FSDPParam":
                    self.sharded[id(found._unsharded_param)] = found
            except Exception:  # one that is not set up
                continue
            self.by_name[name] = found
        return facts

    @property
    def zero(self) -> Any:
        """DeepSpeed's ZeRO optimizer, or None."""
        return self.by_name.get("DeepSpeedZeroOptimizer") or self.by_name.get("DeepSpeedZeroOptimizer_Stage3")

    def asked(self) -> dict[str, int]:
        """How many micro-batches per update each object asks for now; a callback may change that."""
        counts = {}
        for name in ("TrainingArguments", "Trainer", "Accelerator", "DeepSpeedEngine"):
            count = READERS[name](self.by_name[name])["N"] if name in self.by_name else 1
            if isinstance(count, int) and count > 1:
                counts[name] = count
        return counts


def _reader(kind: type) -> str:
    for base in kind.__mro__:
        if base.__name__ in READERS and str(base.__module__).partition(".")[0] in PACKAGES:
            return base.__name__
    return ""
