"""Backends that sum gradients in known dtypes, and a task that probes them and those of the registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from bench.backends import deepspeed as ds
from bench.backends.base import Backend, registry
from bench.backends.fsdp2 import Gathered
from bench.backends.training_job import Job
from bench.errors import UnsupportedError
from bench.measure.accumulation_dtype import accumulator, error
from bench.plan.cell import Precision, Sharding, Status, Sync
from bench.plan.task import Task
from tests.extra_backends import DividesTwice, LastOnly, StepsTooOften
from tests.factories import make_cell

BF16, FP32 = torch.bfloat16, torch.float32
FSDP2_POLICIES = {
    # storage, param_dtype, reduce_dtype: what eager and what deferred sync sum in.
    (FP32, None, None): ("fp32", "fp32"),
    (FP32, BF16, None): ("fp32", "bf16"),
    (FP32, BF16, FP32): ("fp32", "fp32"),
    (FP32, None, BF16): ("fp32", "bf16"),
    (BF16, None, None): ("bf16", "bf16"),
    (BF16, BF16, BF16): ("bf16", "bf16"),
    (BF16, BF16, FP32): ("bf16", "fp32"),
}
NS = (1, 32, 256)


def fsdp2(policy: tuple[Any, Any, Any], sync_: Sync) -> type[Backend]:
    """FSDP2 with parameters stored, gathered and reduced in these dtypes."""
    storage, param, reduce = policy

    class Variant(Backend):
        name, framework, sync, sharding = "variant", "FSDP2", sync_, Sharding.PARAMS

        def train(self, job: Job) -> None:
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            self.model = job.build().to(storage)
            kwargs = {"mp_policy": MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)}
            mesh = dist.init_device_mesh("cpu", (job.world_size,))
            for module in (*job.blocks(self.model), self.model):
                fully_shard(module, mesh=mesh, **kwargs)
            optimizer = job.optimizer(self.model.parameters())
            for window in job.each_window():
                for batch, last in window:
                    self.model.set_requires_gradient_sync(last or sync_ is Sync.EAGER)
                    (job.loss(self.model, batch) / window.size).backward()
                optimizer.step()

        def full_parameters(self) -> dict[str, torch.Tensor]:
            return {name: value.float() for name, value in Gathered(self.model).items()}

    return Variant


class SilentDeepSpeed(ds.DeepSpeedZero2Eager):
    """DeepSpeed that is not told in what to accumulate."""

    def train(self, job: Job) -> None:
        configure = ds.zero_config

        def silent(*arguments: Any) -> dict[str, Any]:
            return {
                key: value for key, value in configure(*arguments).items() if key != "data_types"
            }

        ds.zero_config = silent
        try:
            super().train(job)
        finally:
            ds.zero_config = configure


class CoalescingDeepSpeed(ds.DeepSpeedZero2Deferred):
    """``deepspeed-zero2-deferred`` without its refusal of bf16."""

    def train(self, job: Job) -> None:
        self.initialize(job, gradient_accumulation_steps=1)
        self.continue_training(job)


class Loop(Backend):
    """A loop with one reduction, in a dtype."""

    name, framework, sync, sharding = "loop", "torch", Sync.DEFERRED, Sharding.NONE
    dtype: ClassVar[torch.dtype] = FP32

    def train(self, job: Job) -> None:
        self.model = job.build().to(self.dtype)
        self.loop(job, job.optimizer(self.model.parameters()))

    def loop(self, job: Job, optimizer: torch.optim.Optimizer) -> None:
        for batch in job.loader:
            self.backward(job, batch)
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        optimizer.step()

    def backward(self, job: Job, batch: torch.Tensor) -> None:
        (job.loss(self.model, batch) / job.accumulate).backward()

    def full_parameters(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().double() for name, value in self.model.named_parameters()}


class FP16Loop(Loop):
    dtype = torch.float16


class FP64Loop(Loop):
    dtype = torch.float64


class SumLoop(Loop):
    def backward(self, job: Job, batch: torch.Tensor) -> None:
        job.loss(self.model, batch).backward()


class NoStepLoop(Loop):
    def loop(self, job: Job, optimizer: torch.optim.Optimizer) -> None:
        for batch in job.loader:
            self.backward(job, batch)


LOOPS = {
    cls.__name__: cls
    for cls in (Loop, *Loop.__subclasses__(), DividesTwice, LastOnly, StepsTooOften)
}


@dataclass(kw_only=True)
class SumDtypes(Task):
    """Everything the tests look at."""

    work: ClassVar[str] = "tests.sum_dtypes:findings"
    backend: str = "lightning-deepspeed-zero2"
    """Whose packages are imported before: all there are."""

    names: tuple[str, ...]
    """Backends that are probed."""


def findings(task: SumDtypes, rank: int, device: torch.device) -> dict[str, Any]:
    """What one rank found, by name."""
    ds.prepare()

    def probe(backend: type[Backend], precision: Precision = Precision.FP32, **changes: Any) -> Any:
        return accumulator(
            backend, make_cell(backend=backend.name, precision=precision, **changes), rank, device
        )

    def curve(backend: type[Backend], precision: Precision = Precision.FP32) -> list[Any]:
        return [
            error(backend, make_cell(backend=backend.name, precision=precision), rank, device, n)
            for n in NS
        ]

    found: dict[str, Any] = {}

    def note(name: str, ask: Callable[..., Any], *arguments: Any, **changes: Any) -> None:
        try:
            found[name] = ask(*arguments, **changes)
        except UnsupportedError as refusal:
            found[name] = {"unsupported": str(refusal)}

    for name in task.names:
        for precision in Precision:
            note(f"{name} {precision}", probe, registry()[name], precision)
    for policy in FSDP2_POLICIES:
        for sync in (Sync.EAGER, Sync.DEFERRED):
            note(f"{policy} {sync}", probe, fsdp2(policy, sync))
    for name, loop in LOOPS.items():
        note(name, probe, loop)
    for name, backend in {"silent": SilentDeepSpeed, "coalescing": CoalescingDeepSpeed}.items():
        note(name, probe, backend, Precision.BF16)
    note("virtual", probe, Loop, virtual=True)
    note("clipped", probe, registry()["fsdp2-deferred"], clip_norm=0.5)
    for name in ("ddp-eager", "fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager"):
        note(f"errors {name}", curve, registry()[name], Precision.BF16)
    note("errors bf16", curve, fsdp2((FP32, BF16, None), Sync.DEFERRED))
    note("errors twice", curve, DividesTwice)
    note("errors reference", curve, registry()["reference"])
    return {"status": Status.OK, "found": found}
