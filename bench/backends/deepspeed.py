"""DeepSpeed ZeRO stages 2 and 3 in a plain loop, with eager and with coalesced reduction."""

from __future__ import annotations

import itertools
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, ClassVar

from bench.backends.base import BF16_PARAMETERS, Backend, BackendFamily, Offloading
from bench.backends.training_job import Job
from bench.backends.zero_options import gather_after_updates, zero_config
from bench.errors import UnsupportedError
from bench.plan.categories import Category
from bench.plan.cell import Cell, Device, Sharding, Stepping, Sync
from bench.plan.world import Refusals

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import Tensor, nn


GATHERS_IN_HOOKS = (
    "stage 3 gathers parameters in hooks of the modules within a block, which a graph cannot "
    "contain"
)
"""Why blocks cannot be compiled under stage 3."""
SUMS_IN_BF16 = (
    "coalesce_grad_reduction sums gradients in bf16, all others in fp32, so the backend refuses "
    "bf16"
)
"""Why a deferred reduction is not offered in bf16."""
PRELOAD = ("deepspeed", "deepspeed.runtime.zero.muon.original_muon")
"""deepspeed.initialize imports the second module, and that all of torch.compile."""


def prepare() -> None:
    """Prepare DeepSpeed; call before its first use.

    All its compiled operators are disabled: the shared-memory operator would be compiled on any
    CPU, and listing the others runs compilers (ops/__init__.py: _probe_compatible_ops). Without
    LOCAL_SIZE, which DeepSpeed's launcher sets (launcher/launch.py), it starts ``numactl`` on the
    CPU whenever stage 3 reduces a bucket (cpu_accelerator.py: device_count).
    """
    import logging
    import os

    import deepspeed.ops
    from deepspeed import comm
    from deepspeed.utils.logging import logger

    logger.setLevel(logging.ERROR)
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    if not comm.is_initialized():
        comm.init_distributed(dist_init_required=False)


@contextmanager
def short_parameter_repr() -> Iterator[None]:
    """Shorten the repr of parameters to their shape; use this while an engine is built.

    ZeRO-3's constructor formats all its arguments into a message that is never printed (stage3.py:
    ``print_rank_0`` of ``locals()``), which would copy every parameter to the host.
    """
    from torch import nn

    parameter: Any = nn.Parameter
    written = parameter.__repr__
    parameter.__repr__ = lambda self: f"Parameter of {tuple(self.shape)}"
    try:
        yield
    finally:
        parameter.__repr__ = written


def gather(model: nn.Module) -> dict[str, Tensor]:
    """The full fp32 masters of an engine's module, on the CPU. Collective.

    With frozen parameters, which have no masters.
    """
    from deepspeed import zero
    from deepspeed.utils import safe_get_full_fp32_param

    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[name] = safe_get_full_fp32_param(parameter).cpu()
            continue
        with zero.GatheredParameters([parameter]):
            found[name] = parameter.detach().cpu().clone()
    return found


MOMENTS = ("exp_avg", "exp_avg_sq")
"""The keys of AdamW's state."""


class GatheredState(Mapping[str, "Tensor"]):
    """What an engine's inner optimizer has under one key, by parameter.

    Gathered on access, which is collective.
    """

    def __init__(self, model: nn.Module, key: str) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._key = key

    def __getitem__(self, name: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        gathered: Tensor = safe_get_full_optimizer_state(self._parameters[name], self._key)
        return gathered.cpu()

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def gathered_state(engine: DeepSpeedEngine, model: nn.Module) -> dict[str, Mapping[str, Tensor]]:
    """The moments of an engine's AdamW; empty for an optimizer without."""
    if "betas" not in engine.optimizer.optimizer.defaults:
        return {}
    return {key: GatheredState(model, key) for key in MOMENTS}


def holdings(engine: DeepSpeedEngine) -> dict[Category, list[Tensor]]:
    """Tensors of the engine's ZeRO optimizer: flat parameters, fp32 masters, gradients, buckets.

    The attributes are those of ``DeepSpeedZeroOptimizer`` (stage 2) and
    ``DeepSpeedZeroOptimizer_Stage3`` in 0.19; missing ones are skipped. The inner optimizer's
    parameters are the masters; their ``grad`` exists only during a step.
    """
    import torch
    from torch.utils._pytree import tree_leaves

    zero = engine.optimizer

    def tensors(value: object) -> list[Tensor]:
        return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

    def named(*names: str) -> list[Tensor]:
        return tensors([getattr(zero, name, None) for name in names])

    buckets = tensors([bucket.buffer for bucket in zero.ipg_buckets.values()])
    buckets += named("temp_grad_buffer_for_cpu_offload", "temp_grad_buffer_for_gpu_offload")
    masters = named("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat")
    partitioned = list(itertools.chain.from_iterable(getattr(zero, "fp16_groups", [])))
    sharded = [*masters, *named("param_buffer_of_bit16_for_cpu_offload_groups")]
    sharded += [parameter.ds_tensor for parameter in partitioned]
    gradients = named("all_grad_tensors", "grads_in_partition", "grad_partitions_flat_buffer")
    gradients += named("accumulated_grads_in_cpu")
    for group in zero.averaged_gradients.values():
        gradients += tensors(getattr(group, "flat_partition", group))
    for master in masters:
        if master.grad is not None:
            gradients.append(master.grad)
    return {
        Category.COMMUNICATION: buckets,
        Category.PARAMETERS_SHARDED: sharded,
        Category.PARAMETERS_UNSHARDED: named("bit16_groups_flat") + partitioned,
        Category.GRADIENTS_SHARDED: gradients,
    }


def forget(engine: DeepSpeedEngine) -> None:
    """Remove a destroyed engine of stage 3 from what DeepSpeed keeps as long as the process lives.

    Otherwise its parameters, gradients and moments stay allocated. The outermost module stays on a
    stack (parameter_offload.py: ``setup_zero_stage3_hooks``), and a method of the coordinator of
    parameters has a cache whose keys hold the coordinator (partitioned_param_coordinator.py:
    ``__params_to_release``).
    """
    stage_3 = "deepspeed.runtime.zero"
    stack = getattr(sys.modules.get(f"{stage_3}.parameter_offload"), "FWD_MODULE_STACK", [])
    module = getattr(engine, "module", None)
    stack[:] = [kept for kept in stack if kept is not module]
    coordination = sys.modules.get(f"{stage_3}.partitioned_param_coordinator")
    coordinator = getattr(coordination, "PartitionedParameterCoordinator", None)
    method = getattr(coordinator, "_PartitionedParameterCoordinator__params_to_release", None)
    closure = getattr(method, "__closure__", None)
    if closure is None:
        return
    for cell in closure:  # the cache is wrapped for profilers
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


class ZeroBackend(Backend):
    """What all backends with a DeepSpeed engine have in common, whoever owns the loop.

    Of stage 2 by default.
    """

    sharding = Sharding.GRADS
    bf16_as = BF16_PARAMETERS
    stage: ClassVar[int] = 2
    """Of ZeRO."""
    own_defaults: ClassVar[bool] = False
    """Whether buckets and gathers are those of DeepSpeed's defaults; see ``zero_options``."""
    config: dict[str, object]
    """That of ``zero_config``."""
    masters: dict[str, Tensor]

    @abstractmethod
    def wrapped(self) -> DeepSpeedEngine:
        """The engine. Raises AttributeError before there is one."""

    def __del__(self) -> None:
        """Remove the engine's hooks from its parameters.

        On CUDA the garbage collector does not find these cycles.
        """
        engine: DeepSpeedEngine | None = None
        with suppress(AttributeError):
            engine = self.wrapped()
        if engine is not None and hasattr(engine, "destroy"):
            engine.destroy()
            forget(engine)

    def save_masters(self, model: nn.Module, job: Job) -> None:
        """Copy the fp32 parameters of a built model to the CPU in bf16, for ``restore_masters``."""
        self.masters = {}
        if job.bf16:
            self.masters = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}

    def restore_masters(self, model: nn.Module) -> None:
        """Set the fp32 masters to the initial weights, once. Collective.

        In bf16 the engine casts the module before it copies the masters from it, so without this
        they would start as bf16 roundings of the weights that all other backends start from.
        """
        import torch
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if not self.masters:
            return
        for name, parameter in model.named_parameters():
            if not hasattr(parameter, "ds_tensor"):
                safe_set_full_fp32_param(parameter, self.masters[name].to(parameter.device))
                continue
            # Stage 3's own safe_set_full_fp32_param fails on the last rank where W does not divide
            # a parameter.
            size = parameter.ds_tensor.ds_numel
            shard = torch.zeros(size)
            part = self.masters[name].flatten()[torch.distributed.get_rank() * size :][:size]
            shard[: part.numel()] = part
            safe_set_local_fp32_param(parameter, shard.to(parameter.device))
        self.masters = {}  # or their memory would be counted in every window

    @classmethod
    def remark(cls, cell: Cell) -> str:
        """What step time and memory of stage 3 do not show.

        deepspeed/runtime/zero/partition_parameters.py: for a group of one rank
        ``all_gather_coalesced`` calls ``_no_gather_coalesced``, whose handles synchronize the
        gather stream in ``wait``; ``AllGatherHandle.wait`` does not. linear.py:
        ``LinearFunctionForZeroStage3`` saves its input after the product, where checkpointing stops
        recomputing.
        """
        found = []
        if cls.stage == 3 and cell.world_size == 1 and cell.device is Device.CUDA:
            found.append(
                "on one rank ZeRO-3 gathers nothing, and DeepSpeed makes the host wait for a CUDA "
                "stream at every fetch of a module's parameters, which it does not on several "
                "ranks: this step time says nothing about larger worlds"
            )
        if cls.own_defaults:
            found.append(
                "buckets and gathers are DeepSpeed's defaults: a bucket of 5e8 elements is part of "
                "the peak"
            )
        if cls.stage == 3 and cell.activation_checkpointing:
            found.append(
                "under activation checkpointing ZeRO-3 recomputes the last product of every block, "
                "others do not"
            )
        return "; ".join(found)

    def reported(self) -> dict[str, int]:
        counters = super().reported()
        # A Trainer may have refused before there is an engine.
        steps = getattr(self.wrapped(), "global_steps", None)
        if steps is not None:
            counters = counters | {"engine.global_steps": steps}
        return counters

    def holdings(self) -> Mapping[Category, Iterable[Tensor]]:
        return holdings(self.wrapped())

    def settings(self) -> dict[str, object]:
        return super().settings() | self.config


class ZeroStage3(ZeroBackend):
    """Turns a backend of stage 2 into one of stage 3: parameters are gathered module by module."""

    sharding: ClassVar[Sharding] = Sharding.PARAMS
    refuses: ClassVar[Refusals] = Refusals(compiled=GATHERS_IN_HOOKS)
    stage: ClassVar[int] = 3

    def restore_masters(self, model: nn.Module) -> None:
        super().restore_masters(model)
        gather_after_updates(self.wrapped())

    def settings(self) -> dict[str, object]:
        return super().settings() | {"gathers_wait_for_updates": True}


class DeepSpeedZero2Eager(ZeroBackend):
    """Stage 2 as documented: ``engine.backward`` and ``engine.step`` in every micro-batch.

    It reduces each time.
    """

    name, framework = "deepspeed-zero2-eager", "DeepSpeed"
    family, colour = BackendFamily.DEEPSPEED, "#009E73"
    sync = Sync.EAGER
    is_mechanism = True
    stepping = Stepping.CARRY
    requires, preload = ("deepspeed",), PRELOAD

    def train(self, job: Job) -> None:
        self.initialize(job, gradient_accumulation_steps=job.accumulate)
        self.continue_training(job)

    def continue_training(self, job: Job) -> None:
        for batch in job.loader:
            # The engine divides the loss by N, and step() decides whether the window is complete.
            self.engine.backward(job.loss(self.engine, batch))
            self.engine.step()

    def wrapped(self) -> DeepSpeedEngine:
        return self.engine

    def zero_grad(self) -> None:
        self.engine.optimizer.zero_grad()

    def initialize(self, job: Job, gradient_accumulation_steps: int) -> None:
        """Create an engine with ``zero_config`` and the tapped optimizer."""
        prepare()
        model = job.build()
        self.config = zero_config(type(self), job, model)
        self.config["gradient_accumulation_steps"] = gradient_accumulation_steps
        self.save_masters(model, job)
        # ZeRO takes its dtype from the optimizer's first parameter, which must not be a frozen one.
        optimizer = job.optimizer([p for p in model.parameters() if p.requires_grad])
        with short_parameter_repr():
            self.engine = self.start(model=model, optimizer=optimizer, config=self.config)
        self.restore_masters(self.engine.module)

    def start(self, **arguments: object) -> DeepSpeedEngine:
        import deepspeed

        return deepspeed.initialize(dist_init_required=False, **arguments)[0]

    def full_parameters(self) -> Mapping[str, Tensor]:
        return gather(self.engine.module)

    def optimizer_state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return gathered_state(self.engine, self.engine.module)


class DeepSpeedZero3Eager(ZeroStage3, DeepSpeedZero2Eager):
    """Stage 3, where every backward reduce-scatters gradients."""

    name = "deepspeed-zero3-eager"


class DeepSpeedZero2DefaultsEager(DeepSpeedZero2Eager):
    """Stage 2 with DeepSpeed's own buckets."""

    name = "deepspeed-zero2-defaults-eager"
    own_defaults = True


class DeepSpeedZero3DefaultsEager(DeepSpeedZero3Eager):
    """Stage 3 with DeepSpeed's own buckets, gathers and releases."""

    name = "deepspeed-zero3-defaults-eager"
    own_defaults = True

    def train(self, job: Job) -> None:
        if job.cell.selective_checkpointing:
            raise UnsupportedError(
                "modules of a block release their parameters while it is still being recomputed"
            )
        super().train(job)


class DeepSpeedZero2Deferred(DeepSpeedZero2Eager):
    """Stage 2 with ``engine.coalesce_grad_reduction``: one reduction for all backwards of a window.

    One such block is one engine step, so the engine's accumulation is 1 and the loop divides the
    loss. Autograd sums into the parameters' own ``grad`` there, which in bf16 ignores
    ``grad_accum_dtype``, so bf16 is refused.
    """

    name = "deepspeed-zero2-deferred"
    sync = Sync.DEFERRED
    stepping = Stepping.WINDOW
    refuses = Refusals(bf16=SUMS_IN_BF16)

    def train(self, job: Job) -> None:
        if job.bf16:
            raise UnsupportedError(
                "coalesce_grad_reduction sums in the model's dtype, bf16, and not in fp32 like all "
                "others"
            )
        self.initialize(job, gradient_accumulation_steps=1)
        self.continue_training(job)

    def continue_training(self, job: Job) -> None:
        for window in job.each_window():
            with self.engine.coalesce_grad_reduction():
                for batch, _ in window:
                    self.engine.backward(job.loss(self.engine, batch) / window.size)
            self.engine.step()


class DeepSpeedZero3Deferred(ZeroStage3, DeepSpeedZero2Deferred):
    """Stage 3 with ``engine.coalesce_grad_reduction``."""

    name = "deepspeed-zero3-deferred"
    refuses = Refusals(compiled=GATHERS_IN_HOOKS, bf16=SUMS_IN_BF16)


class ZeroOffload(Offloading, ZeroBackend):
    """Turns a backend of ZeRO into one whose masters, gradients and optimizer rest on the host.

    The update is that of torch's optimizer on tensors of the host, as
    ``zero_force_ds_cpu_optimizer`` allows: DeepSpeedCPUAdam has to be compiled first, with the CUDA
    toolkit on a machine with GPUs.
    """

    framework, colour = "DeepSpeed offload", "#117733"

    @classmethod
    def remark(cls, cell: Cell) -> str:
        if cell.device is Device.CPU:
            return super().remark(cell)
        return f"{super().remark(cell)}, by torch's optimizer and not by DeepSpeedCPUAdam"


class DeepSpeedZero2Offload(ZeroOffload, DeepSpeedZero2Eager):
    """Stage 2 with ``offload_optimizer``: in fp32 every micro-batch adds to sums on the host."""

    name = "deepspeed-zero2-offload"


class DeepSpeedZero2OffloadDeferred(ZeroOffload, DeepSpeedZero2Deferred):
    """``deepspeed-zero2-offload`` with ``engine.coalesce_grad_reduction``."""

    name = "deepspeed-zero2-offload-deferred"


class DeepSpeedZero3Offload(ZeroOffload, DeepSpeedZero3Eager):
    """Stage 3 with ``offload_optimizer`` and ``offload_param``.

    Shards of parameters rest on the host, too.
    """

    name = "deepspeed-zero3-offload"


class DeepSpeedZero3OffloadDeferred(ZeroOffload, DeepSpeedZero3Deferred):
    """``deepspeed-zero3-offload`` with ``engine.coalesce_grad_reduction``."""

    name = "deepspeed-zero3-offload-deferred"
