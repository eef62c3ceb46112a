"""LoRA over frozen weights, under DDP and FSDP2, as ``predict --lora-rank`` says."""

from __future__ import annotations

from typing import Any

from bench.backends.fsdp2 import FSDP2Deferred, FSDP2Eager, FSDP2Zero2Eager, shard
from bench.backends.plain import DDPEager
from bench.plan.cell import Sharding

RANK = 8
TARGETS: tuple[str, ...] = ("q_proj", "v_proj")


def frozen(job: Any, targets: tuple[str, ...], *, bf16_parameters: bool) -> Any:
    """The model with frozen weights, and two trained matrices beside each target."""
    import torch
    from torch import nn

    class Low(nn.Module):
        """A linear layer with A and B of a low rank beside it."""

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear
            self.lora_A = nn.Linear(linear.in_features, RANK, bias=False)
            self.lora_B = nn.Linear(RANK, linear.out_features, bias=False)

        def forward(self, x: Any) -> Any:
            return self.linear(x) + self.lora_B(self.lora_A(x)) * 2.0

    model = job.build().requires_grad_(False)
    for block in job.blocks(model):
        for part in (block.self_attn, block.mlp):
            for name in targets:
                if hasattr(part, name):
                    setattr(part, name, Low(getattr(part, name)))
    if bf16_parameters:
        model = model.to(torch.bfloat16)
    return model


class LoraEager(FSDP2Eager):
    name, framework = "lora-fsdp2-eager", "LoRA"
    is_mechanism = False
    targets = TARGETS
    bf16_parameters = False

    def train(self, job: Any) -> None:
        model = frozen(job, self.targets, bf16_parameters=self.bf16_parameters)
        is_cast = job.bf16 and not self.bf16_parameters
        reshards = self.sharding is Sharding.PARAMS
        self.model = shard(
            model, job.blocks(model), self.mesh(job), bf16=is_cast, reshard_after_forward=reshards
        )
        self.optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
        self.continue_training(job)


class LoraDeferred(LoraEager, FSDP2Deferred):
    name, framework = "lora-fsdp2-deferred", "LoRA"
    is_mechanism = False


class LoraZero2Eager(LoraEager, FSDP2Zero2Eager):
    name, framework = "lora-fsdp2-zero2-eager", "LoRA"
    is_mechanism = False


class LoraBf16Eager(LoraEager):
    name = "lora-bf16-fsdp2-eager"
    bf16_parameters = True
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraDDP(DDPEager):
    name, framework = "lora-ddp-eager", "LoRA"
    is_mechanism = False
    targets = TARGETS
    bf16_parameters = False

    def train(self, job: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        model = frozen(job, self.targets, bf16_parameters=self.bf16_parameters)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=self.bucket_views)
        self.optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
        self.continue_training(job)


class LoraBf16DDP(LoraDDP):
    name = "lora-bf16-ddp-eager"
    bf16_parameters = True
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
