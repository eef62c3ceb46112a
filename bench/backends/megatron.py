"""Megatron-FSDP 0.6.1 in a hand-written loop. It has never run on a GPU.

Its constructor needs CUDA. Written from the package's source. Over the stub of CUDA
(tests/cuda_stub), which computes nothing, every pass ran on one rank; two ranks cannot there,
because the constructor exchanges objects between ranks. Nothing that it sends or holds has a
formula, and no value has been compared with the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bench.backends.base import Backend, BackendFamily
from bench.backends.training_job import Job
from bench.plan.cell import Cell, Device, Sharding, Stepping, Sync
from bench.plan.world import Refusals

if TYPE_CHECKING:
    from torch import Tensor


class UntriedMegatronFSDP(Backend):
    """ZeRO-3, ``optim_grads_params``: sharded gradients are reduced in every backward.

    ``set_model_auto_sync(False)`` defers only waiting for the reduction, to ``finish_grad_sync``,
    and with hybrid sharding the outer reduction (megatron_fsdp.py:no_sync).
    ``fully_shard_optimizer`` is not used: it steps the optimizer once to create its state. The loop
    makes the calls that it would add to ``step`` and ``zero_grad``.
    """

    name, framework = "megatron-fsdp", "Megatron-FSDP (untried)"
    family = BackendFamily.PYTORCH
    untried = True
    sync, sharding = Sync.EAGER, Sharding.PARAMS
    requires = ("megatron_fsdp",)
    stepping = Stepping.WINDOW
    refuses = Refusals(virtual="it has never been tried")

    @classmethod
    def missing(cls, device: Device) -> str:
        if device is Device.CPU:
            return "needs CUDA: --device cuda"
        return super().missing(device)

    @classmethod
    def remark(cls, cell: Cell) -> str:
        return (
            "megatron-fsdp is written from the package's source, and had never run on a GPU when "
            "this was released"
        )

    def train(self, job: Job) -> None:
        import torch
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

        model = job.build()
        self.model = fully_shard_model(
            model,
            fsdp_unit_modules=list({type(block) for block in job.blocks(model)}),
            device=job.device,
            mixed_precision_policy=MixedPrecisionPolicy(torch.float32, torch.float32),
            sync_model_each_microbatch=False,
            preproc_state_dict_for_dcp_ckpt=False,
        )
        self.optimizer = job.optimizer(self.model.parameters())
        for window in job.each_window():
            for batch, _ in window:
                with job.autocast():
                    loss = job.loss(self.model, batch)
                (loss / window.size).backward()
            self.model.finish_grad_sync()
            job.clip(self.model.parameters())
            self.optimizer.step()
            self.model.install_optimized_model_weights()
            self.optimizer.zero_grad()
            self.model.zero_grad_buffer()

    def full_parameters(self) -> Mapping[str, Tensor]:
        from megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor as whole

        return {name: whole(p).detach().cpu() for name, p in self.model.module.named_parameters()}

    def settings(self) -> dict[str, object]:
        return {"zero_dp_strategy": "optim_grads_params", "main_grads_dtype": "fp32"}
