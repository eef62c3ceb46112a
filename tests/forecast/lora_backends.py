"""LoRA over frozen weights, under DDP and FSDP2, as ``predict --lora-rank`` says."""

from __future__ import annotations

from typing import Any

from bench.backends.fsdp2 import FSDP2Deferred, FSDP2Eager, FSDP2Zero2Eager, shard
from bench.backends.plain import DDPEager
from bench.plan.cell import Sharding

RANK = 8
TARGETS: tuple[str, ...] = ("q_proj", "v_proj")
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def frozen(job: Any, cls: Any) -> Any:
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
            self.dropout = nn.Identity()
            if cls.dropout:
                self.dropout = nn.Dropout(cls.dropout)

        def forward(self, x: Any) -> Any:
            result = self.linear(x)
            low = self.lora_A(self.dropout(x.to(self.lora_A.weight.dtype)))
            return (result + self.lora_B(low) * 2.0).to(result.dtype)

    model = job.build().requires_grad_(False)
    parts = [part for block in job.blocks(model) for part in (block.self_attn, block.mlp)]
    for part in (*parts, model):
        for name in cls.targets:
            if hasattr(part, name):
                setattr(part, name, Low(getattr(part, name)))
    if cls.bf16_parameters:
        model = model.to(torch.bfloat16)
    if cls.fp32:
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = parameter.data.float()
    return model


class LoraEager(FSDP2Eager):
    name, framework = "lora-fsdp2-eager", "LoRA"
    is_mechanism = False
    targets = TARGETS
    bf16_parameters = False
    dropout = 0.0
    fp32 = False

    def train(self, job: Any) -> None:
        model = frozen(job, self)
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
    targets = EVERY


class LoraDDP(DDPEager):
    name, framework = "lora-ddp-eager", "LoRA"
    is_mechanism = False
    targets = TARGETS
    bf16_parameters = False
    dropout = 0.0
    fp32 = False

    def train(self, job: Any) -> None:
        from torch.nn.parallel import DistributedDataParallel

        model = frozen(job, self)
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=self.bucket_views)
        self.optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
        self.continue_training(job)


class LoraBf16DDP(LoraDDP):
    name = "lora-bf16-ddp-eager"
    bf16_parameters = True
    targets = EVERY


class LoraDropout(LoraEager):
    name = "lora-dropout-fsdp2-eager"
    targets, dropout = EVERY, 0.1


class LoraDropoutDDP(LoraBf16DDP):
    name = "lora-dropout-ddp-eager"
    dropout = 0.1


class LoraFp32DDP(LoraBf16DDP):
    name = "lora-fp32-ddp-eager"
    fp32 = True


class LoraHead(LoraEager):
    name = "lora-head-fsdp2-eager"
    targets = (*TARGETS, "lm_head")


class LoraGather(LoraEager):
    name = "lora-gather-fsdp2-eager"
