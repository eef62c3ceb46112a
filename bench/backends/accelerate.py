"""Accelerate's ``accumulate()`` with DDP, FSDP2 and DeepSpeed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from bench.backends import deepspeed as ds
from bench.backends.base import Backend, Job

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import nn

DDP, FSDP2, DEEPSPEED = "DistributedDataParallel", "FSDPModule", "DeepSpeedEngine"
"""What Accelerate may wrap a model in, by the name of the class."""
_TYPES = {DDP: ("MULTI_CPU", "MULTI_GPU"), FSDP2: ("FSDP",), DEEPSPEED: ("DEEPSPEED",)}
"""The values of ``Accelerator.distributed_type`` that go with them."""


def set_up_state(job: Job, wrapper: str) -> None:
    """Set up Accelerate's ``PartialState`` for the existing process group; call before every ``Accelerator``.

    It first clears the singletons and variables of an earlier ``Accelerator`` in this process. On CUDA Accelerate then
    finds device and group by itself. On the CPU it has public options for DDP (``cpu=True``) and for DeepSpeed (the
    name of the group's backend), but knows no FSDP: beside an ``fsdp_plugin``, ``cpu=True`` trains DDP, and without it
    nothing is reduced at all (accelerate/state.py: ``_prepare_backend`` and ``AcceleratorState``). There, and only
    there, two methods are overridden: the ranks count as GPUs, while device and process group are the CPU's.
    """
    import torch
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState

    class OnCPU(PartialState):  # type: ignore[misc]
        def _prepare_backend(self, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
            return "gloo", DistributedType.MULTI_GPU

        def set_device(self) -> None:
            self.device = torch.device("cpu")

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str(wrapper == DEEPSPEED).lower()
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # or PartialState sets another number
    if wrapper == DEEPSPEED:
        ds.prepare()  # initializes its communication, or PartialState would
    if job.device.type == "cuda":
        PartialState()
    elif wrapper == DDP:
        PartialState(cpu=True)
    elif wrapper == DEEPSPEED:
        PartialState(backend="gloo")
    else:
        OnCPU()


def check(accelerator: Accelerator, model: nn.Module, wrapper: str, job: Job) -> None:
    """Raise RuntimeError unless the model is wrapped as asked and reduced over all ranks: Accelerate falls back."""
    found = accelerator.distributed_type, accelerator.num_processes, type(model).__name__
    is_wrapped = wrapper in {base.__name__ for base in type(model).__mro__}
    if found[0].name not in _TYPES[wrapper] or found[1] != job.world_size or not is_wrapped:
        raise RuntimeError(f"Accelerate was to train {wrapper} on {job.world_size} ranks, but set up {found}")


BACKENDS: tuple[type[Backend], ...] = ()
