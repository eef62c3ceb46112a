"""What the page on claims needs beside the committed measurements: small trainings in one process on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.backends import deepspeed as ds
from bench.backends.lightning import on_cpu
from bench.workload import Workload, WorkloadSpec
from bench.workload.llama import LlamaWorkload

ACCUMULATE = 4
SIZES = (1, 4, 16)
"""Samples of the batches whose gradients are compared."""
DRAWS = 8
"""Batches of each size."""


def _workload() -> Workload:
    return LlamaWorkload(WorkloadSpec(model="tiny", sequence_length=64, seed=1, corpus=None))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def _gradient(workload: Workload, model: nn.Module, batch: Tensor) -> Tensor:
    return _flat(torch.autograd.grad(workload.loss(model, batch), list(model.parameters())))


def noise() -> dict[str, Any]:
    """The noise of the gradient of the shipped model with its initial weights, by batch size.

    ``relative``: for each batch size the mean of |g_B - g|^2 / |g|^2 over DRAWS batches, where g is the gradient of all
    samples. It falls with 1/B (https://arxiv.org/abs/1812.06162, section 2.2). ``error``: the relative distance between
    the gradient of the largest batch and the one that is accumulated over its micro-batches.
    """
    workload = _workload()
    model = workload.model()
    samples = workload.data(DRAWS * SIZES[-1])
    every = torch.stack(
        [_gradient(workload, model, part) for part in samples.split(SIZES[-1])]
    ).mean(0)
    relative = {}
    for size in SIZES:
        drawn = [
            _gradient(workload, model, part) - every for part in samples[: DRAWS * size].split(size)
        ]
        relative[size] = float(
            torch.stack([g.square().sum() for g in drawn]).mean() / every.square().sum()
        )
    batch = samples[: SIZES[-1]]
    whole = _gradient(workload, model, batch)
    parts = [_gradient(workload, model, part) / ACCUMULATE for part in batch.chunk(ACCUMULATE)]
    return {
        "relative": relative,
        "error": float((torch.stack(parts).sum(0) - whole).norm() / whole.norm()),
    }


def unscaled() -> dict[str, Any]:
    """The first update of an FSDP2 loop that does not divide the loss by N, beside the right one, by optimizer.

    ``length`` is its length divided by that of the right one, ``distance`` the relative distance between the two.
    """
    found = {}
    for make in (torch.optim.SGD, torch.optim.AdamW):
        changes = []
        for divisor in (ACCUMULATE, 1):
            workload = _workload()
            model = fully_shard(workload.model())
            parameters = list(model.parameters())
            before = _flat([p.full_tensor() for p in parameters])
            optimizer = make(parameters, lr=1e-3)
            for part in workload.data(4 * ACCUMULATE).chunk(ACCUMULATE):
                (workload.loss(model, part) / divisor).backward()
            optimizer.step()
            changes.append(_flat([p.full_tensor() for p in parameters]) - before)
        right, wrong = changes
        found[make.__name__] = {
            "length": float(wrong.norm() / right.norm()),
            "distance": float((wrong - right).norm() / right.norm()),
        }
    return found


class _Mean(nn.Module):
    """A loss whose gradient sums to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, _: Tensor) -> Tensor:
        return self.weight.mean()


def recovered() -> dict[str, dict[str, float]]:
    """What FSDP2 keeps of a window that an exception interrupted: the next update divided by the right one.

    By what is deferred, and by what is called after the exception, which comes after the first of N micro-batches.
    """
    found: dict[str, dict[str, float]] = {}
    for deferred, shape in (("reductions", (1,)), ("all-reduce", (1, 1))):
        for recovery in ("zero_grad", "reset_iter_state"):
            names = ("replicate", "shard")[-len(shape) :]
            model = fully_shard(_Mean(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
            (weight,) = model.parameters()
            optimizer = torch.optim.SGD([weight], lr=1.0)
            sync = (
                model.set_requires_gradient_sync
                if deferred == "reductions"
                else model.set_requires_all_reduce
            )
            sync(False)
            (model(torch.ones(1)) / ACCUMULATE).backward()
            model(torch.ones(1))  # the exception comes before its backward
            if recovery == "reset_iter_state":
                model.reset_iter_state()
            optimizer.zero_grad()
            for number in range(1, ACCUMULATE + 1):
                sync(number == ACCUMULATE)
                (model(torch.ones(1)) / ACCUMULATE).backward()
            optimizer.step()
            found.setdefault(deferred, {})[recovery] = -float(weight.full_tensor().detach().sum())
    return found


class _Module(lightning.LightningModule):
    """One linear layer, with SGD and a constant learning rate of 1 from Lightning."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)]


CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "neither": {},
    "optimizer": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
    "scheduler": {
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3}}
    },
}
"""What DeepSpeed's config has beside Lightning's own optimizer and scheduler."""


def _trained(config: Mapping[str, Any], **arguments: Any) -> lightning.Trainer:
    """A Trainer with DeepSpeed ZeRO-2 on the CPU, after two optimizer steps."""
    needed = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
    strategy = on_cpu(DeepSpeedStrategy)(
        config={"zero_optimization": {"stage": 2}, **needed, **config}
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet["enable_model_summary"] = False
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_steps=2, **quiet, **arguments
    )
    trainer.fit(_Module(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))
    return trainer


def both_defined() -> dict[str, Any]:
    """The optimizer and scheduler that train a LightningModule with its own, if DeepSpeed's config has one too."""
    found = {}
    for name, extra in CONFIGS.items():
        trainer = _trained(extra)
        optimizer = trainer.optimizers[0]
        found[name] = {
            "optimizer": type(getattr(optimizer, "optimizer", optimizer)).__name__,
            "scheduler": [
                type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs
            ],
        }
    return found


def equal_n() -> str:
    """The error of a Trainer whose N stands in DeepSpeed's config too; empty without one."""
    try:
        _trained({"gradient_accumulation_steps": 2}, accumulate_grad_batches=2)
    except MisconfigurationException as error:
        return type(error).__name__
    return ""


def measure() -> dict[str, Any]:
    """All probes in one process group of one rank over gloo."""
    logging.getLogger("lightning").setLevel(logging.ERROR)
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]  # exported, but the stubs do not say so
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "deepspeed"))
    ds.prepare()
    return {
        "versions": versions,
        "noise": noise(),
        "unscaled": unscaled(),
        "recovered": recovered(),
        "both_defined": both_defined(),
        "equal_n": equal_n(),
    }
