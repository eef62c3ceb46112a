"""What DeepSpeed's engines are configured with, and when ZeRO-3 gathers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.backends.base import Offloading, known
from bench.backends.training_job import Job
from bench.errors import UnsupportedError
from bench.plan.cell import Cell, Device

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine
    from torch import nn

    from bench.backends.deepspeed import ZeroBackend

DDP_BUCKET = 25 * 2**20 // 4
"""fp32 elements of a bucket of DistributedDataParallel (``bucket_cap_mb``)."""
DEFAULTS = {
    "reduce_bucket_size": 5 * 10**8,
    "allgather_bucket_size": 5 * 10**8,
    "stage3_param_persistence_threshold": 10**5,
    "stage3_max_reuse_distance": 10**9,
    "stage3_max_live_parameters": 10**9,
    "stage3_prefetch_bucket_size": 5 * 10**7,
}
"""DeepSpeed's defaults, in elements (deepspeed/runtime/zero/config.py, 0.19.8)."""


def zero_config(backend: type[ZeroBackend], job: Job, model: nn.Module) -> dict[str, object]:
    """A DeepSpeed configuration that sets everything that affects the comparison explicitly.

    Clipping is set, because DeepSpeed >= 0.19.3 clips to norm 1 by default. Gradients are reduced
    and accumulated in fp32 (default: the model's dtype). The throughput timer is off, because it
    synchronizes the device in every micro-batch.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    options = zero_options(backend, job.cell, job.block_parameters, job.num_parameters)
    if "leaf_module" in options:
        blocks = job.blocks(model)
        kinds = {type(block) for block in blocks}
        options["leaf_module"] = {
            "classes": sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        }
        for block in blocks:
            check_input(block)
    allowed = {"zero_allow_untested_optimizer": True}
    if issubclass(backend, Offloading):
        allowed["zero_force_ds_cpu_optimizer"] = False
    return {
        "train_micro_batch_size_per_gpu": job.cell.micro_batch_size,
        "gradient_clipping": job.clip_norm,
        **allowed,
        "bf16": {"enabled": job.bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": known(DeepSpeedZeroConfig, options),
    }


def check_input(block: nn.Module) -> None:
    """Raise UnsupportedError at the first forward if no input needs a gradient.

    Without such an input, the backward of a leaf does not end.
    """

    def check(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        handle.remove()
        if not module.training:
            return
        for value in (*args, *kwargs.values()):
            if getattr(value, "requires_grad", False):
                return
        what = f"no input of {type(module).__name__} needs a gradient"
        raise UnsupportedError(f"{what}, without which ZeRO-3 cannot gather a block at once")

    handle = block.register_forward_pre_hook(check, with_kwargs=True)


def zero_options(
    backend: type[ZeroBackend], cell: Cell, block_parameters: int, num_parameters: int
) -> dict[str, object]:
    """The options of ZeRO; sizes in elements.

    Buckets and gathers are like those of what a stage is compared with. Stage 2 reduces in buckets
    as large as DDP's, or the model. Stage 3 does as FSDP2: it gathers a block in one collective
    (``leaf_module``, which has no default), one block ahead, releases it after its forward, keeps
    no small parameters gathered, and reduces in buckets of one block. ``own_defaults``: DeepSpeed's
    defaults instead, which keep models of up to 1e9 parameters gathered from forward to backward,
    and whose bucket of 2 GB dominates the peak of a small model.

    ``overlap_comm`` is off on the CPU, which has no streams. In stage 2 (default: off) it is on if
    there are several ranks, because DDP and FSDP2 overlap too; it synchronizes the device after
    every backward (stage_1_and_2.py:independent_gradient_partition_epilogue), which gains nothing
    on one rank. In stage 3 it is on, as by default: on one rank the host waits at every fetch for
    the gather stream (partition_parameters.py:NoGatherHandle.wait), which without overlap is the
    compute stream.

    Offloading uses pinned memory, the default, where there is a device to copy to.
    """
    stage = backend.stage
    options: dict[str, object] = {
        "stage": stage,
        "overlap_comm": cell.device is Device.CUDA and (stage == 3 or cell.world_size > 1),
        "contiguous_gradients": True,
        "reduce_scatter": True,
    }
    if backend.own_defaults:
        options.update(DEFAULTS)
    else:
        bucket = block_parameters
        if stage != 3:
            bucket = min(DDP_BUCKET, num_parameters)
        bucket = max(2, bucket + bucket % 2)  # DeepSpeed wants an even number
        options |= {
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_max_live_parameters": 2 * block_parameters,
            "stage3_prefetch_bucket_size": block_parameters,
        }
        if stage == 3:
            options["leaf_module"] = {}  # zero_config names the classes of the blocks
    if issubclass(backend, Offloading):
        on_host = {"device": "cpu", "pin_memory": cell.device is Device.CUDA}
        options["offload_optimizer"] = on_host
        if stage == 3:
            options["offload_param"] = on_host
    return options


def gather_after_updates(engine: DeepSpeedEngine) -> None:
    """Make the stream on which ZeRO-3 gathers wait for the update, before the next forward.

    The host does not wait. DeepSpeed writes updated shards on the current stream (stage3.py:
    ``_reassign_or_swap_out_partitioned_parameters``) and gathers them on another
    (partition_parameters.py: ``_all_gather_dtype``), which never waits for the first. By default
    two things hide that, since they synchronize the device: the throughput timer, which
    ``zero_config`` turns off, and the gather of small parameters after each update, of which
    ``zero_options`` leaves none.
    """
    from deepspeed.accelerator import get_accelerator

    gathers = engine.optimizer.parameter_offload._DeepSpeedZeRoOffload__allgather_stream
    ordered_steps = -1  # the initial weights are written on the current stream, too

    def wait(*_: object) -> None:
        nonlocal ordered_steps
        if engine.global_steps != ordered_steps:
            gathers.wait_stream(get_accelerator().current_stream())
            ordered_steps = engine.global_steps

    if gathers is not None:  # None on the CPU
        engine.module.register_forward_pre_hook(wait, prepend=True)
