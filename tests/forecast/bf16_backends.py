"""FSDP2 without fp32 masters: parameters, gradients and moments are bf16, as ``predict --parameters bf16`` says."""

from __future__ import annotations

from typing import Any

from bench.backends.fsdp2 import FSDP2Deferred, FSDP2Eager, FSDP2Zero2Eager, shard
from bench.plan.cell import Sharding


class Bf16Eager(FSDP2Eager):
    name, framework = "bf16-fsdp2-eager", "Bf16"
    is_mechanism = False

    def train(self, job: Any) -> None:
        import torch

        model = job.build().to(torch.bfloat16)
        reshards = self.sharding is Sharding.PARAMS
        self.model = shard(
            model, job.blocks(model), self.mesh(job), bf16=False, reshard_after_forward=reshards
        )
        self.optimizer = job.optimizer(model.parameters())
        self.continue_training(job)


class Bf16Deferred(Bf16Eager, FSDP2Deferred):
    name, framework = "bf16-fsdp2-deferred", "Bf16"
    is_mechanism = False


class Bf16Zero2Eager(Bf16Eager, FSDP2Zero2Eager):
    name, framework = "bf16-fsdp2-zero2-eager", "Bf16"
    is_mechanism = False
