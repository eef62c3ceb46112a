"""The life of one rank: it joins its world, does its work, writes a result or failure, and ends.

Torch elastic starts a rank. The rank writes its result or failure to ``rank<r>.json`` itself, so
that nobody has to parse logs. How it joins a world (``bench.plan.world``):

- real: a process group over NCCL or gloo;
- virtual, with fake tensors or without: torch's process group that does not communicate
  (``FakeProcessGroup`` of torch >= 2.13: a gather repeats the rank's own shard, a reduction keeps
  its own values, so all values are finite);
- shared GPU: each rank sees one GPU, which it may share with others. The group uses NCCL where the
  ranks can (``bench.launch.shared_nccl``), otherwise gloo. Gloo copies GPU tensors through host
  memory in ``all_reduce``, ``broadcast``, ``reduce``, ``all_gather``, ``all_gather_into_tensor``,
  ``reduce_scatter_tensor``, ``gather`` and ``scatter``, which the built-in backends use; not in the
  coalesced collectives (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import psutil

from bench import files
from bench.backends.base import Backend, registry
from bench.backends.fsdp2 import FSDP2OffloadEager
from bench.errors import UnsupportedError
from bench.formatting import plain
from bench.launch import dumps, gpus, shared_nccl, stragglers
from bench.measure import heartbeat
from bench.plan.cell import Device, Status
from bench.plan.task import Spec, Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import GradBucket, ProcessGroup
    from torch.nn.parallel import DistributedDataParallel

AT_LIMIT_BYTES = 256 * 2**20
"""A process with less address space left than this counts as out of memory."""
CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation: no memory for a context or for a library's buffers."""
FAILED_LINGER_S = 2.0
"""How long a failed rank stays alive after it wrote its failure: time for a peer to end that failed
silently before, and whose memory the kernel still releases."""
WAIT_S = 0.005
"""How often a finished rank checks whether the others are."""
RESULTS = "bench/results"
"""Key of the trial's store that counts the ranks with a result."""
TRIAL = "bench.measure.trial:work"
"""The work of a trial, named because the module imports torch."""
SHARED_GPU_GROUP = "cpu:gloo,cuda:gloo"
"""Backend of the process group over gloo. With plain ``gloo``, some versions of ``DeviceMesh`` also
create an NCCL group."""
HOST_GROUP = "cpu:gloo,cuda:nccl"
"""Backend of the process group for a backend of the bench that also communicates tensors of the
host."""


def pretend(world_size: int) -> None:
    """Make this process rank 0 of a fake process group of ``world_size`` ranks.

    The other ranks seem to be on other nodes, one each, so that no framework looks for their
    devices on this one.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Lightning and DeepSpeed also read the environment, which describes the one process that torch
    # elastic started.
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK"):
        os.environ[name] = "0"
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    for name in ("WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"):
        os.environ[name] = str(world_size)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    _teach_ddp()


def _teach_ddp() -> None:
    """Make every DistributedDataParallel of this process work with the fake process group.

    Its C++ reducer takes a bucket from the result of the collective's future. The fake collective's
    future has none, which fails an internal assertion. A communication hook can return a future of
    its own.
    """
    from torch.nn.parallel import DistributedDataParallel

    initialize = DistributedDataParallel.__init__

    def __init__(  # noqa: N807 - replaces that method
        ddp: DistributedDataParallel, *args: Any, **kwargs: Any
    ) -> None:
        initialize(ddp, *args, **kwargs)
        ddp.register_comm_hook(ddp.process_group, _all_reduce)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign, assignment]


def _all_reduce(group: ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Divide and all-reduce the bucket in place, as DDP does without a hook.

    The future holds the bucket.
    """
    import torch
    import torch.distributed as dist

    buffer = bucket.buffer().div_(group.size())
    dist.all_reduce(buffer, group=group)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


_all_reduce.__annotations__.clear()  # torch accepts its own types or none, and ours are strings


def main(task_json: str) -> None:
    """Join the task's world and do its work: the entry point of a rank, called by torch elastic."""
    task = Task.from_json(task_json)
    place = task.work
    if isinstance(task, Spec) and not place:
        place = TRIAL
    module, _, name = place.partition(":")
    work = getattr(importlib.import_module(module), name)

    def joined(rank: int) -> Mapping[str, object]:
        found: Mapping[str, object] = work(task, rank, join(task))
        return found

    run_and_write(Path(task.folder), joined)


def run_and_write(folder: Path, work: Callable[[int], Mapping[str, object]]) -> None:
    """Do ``work(rank)`` and write its result, plain JSON, to ``rank<r>.json``, atomically.

    After an exception, write the failure there instead and end the process.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])  # work may change both
    path = folder / f"rank{rank}.json"
    try:
        _prepare(folder, rank)
        result = json.dumps(work(rank))
    except BaseException as error:
        traceback.print_exc()
        files.write(path, json.dumps({**failure(error), "time": time.monotonic()}))
        # If a peer that died silently is why, the agent must see that one too.
        time.sleep(FAILED_LINGER_S)
        # No cleanup: destroying an NCCL group while other ranks are inside a collective may block
        # for ever.
        sys.stderr.flush()
        os._exit(1)
    files.write(path, result)
    try:
        _leave(num_ranks)
    except BaseException:
        # The result is safe. Torch's own error handler would send the agent a pickle in a file.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _prepare(folder: Path, rank: int) -> None:
    """Set up the rank to end with its parent, send heartbeats, and dump its stacks on request."""
    stragglers.signal_at_parents_end(signal.SIGKILL)
    dumps.arm(folder, rank)  # before the heartbeat: a process that sees one may ask for a dump
    heartbeat.begin(folder, rank)
    is_on_cpu = os.environ.get("CUDA_VISIBLE_DEVICES") == ""  # as the launcher sets it
    if not is_on_cpu:
        dumps.arm_flight_recorder(folder)


def join(task: Task) -> torch.device:
    """Set up torch and this rank's process group in the task's world; return the rank's device."""
    if task.world.shares_gpus:
        os.environ.update(
            shared_gpu_environment(int(os.environ["RANK"]), task.world_size, gpus.gpus())
        )
        if task.shared_nccl:
            os.environ.update(shared_nccl.environment(int(os.environ["RANK"])))
            for name in shared_nccl.UNSET:
                os.environ.pop(name, None)
    import torch
    import torch.distributed as dist

    # DeepSpeed calls deprecated functions of torch.distributed: each collective would be timed with
    # a warning.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(task.threads)
    torch.manual_seed(task.seed)
    # fp32 means fp32, not TF32, which some containers enable (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), as
    # torch does by default for convolutions.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cpu")
    if task.device is Device.CUDA:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
        _number_gpus()
    if not task.world.has_all_ranks:
        pretend(task.world_size)
    elif task.device is Device.CUDA and (task.shared_nccl or not task.world.shares_gpus):
        name = "nccl"
        if _uses_host_group(task.backend):
            name = HOST_GROUP
        # DeepSpeed creates more groups. NCCL would split a bound group of one rank, which can fail
        # (DeepSpeed #8248).
        bound_to = None
        if task.world_size > 1:
            bound_to = device
        dist.init_process_group(name, device_id=bound_to)
    else:
        dist.init_process_group(SHARED_GPU_GROUP if task.world.shares_gpus else "gloo")
        dist.barrier()  # if a rank ended at once, ranks still connecting to it would fail
    heartbeat.beat()
    return device


def _uses_host_group(name: str) -> bool:
    """Whether a backend also communicates tensors of the host."""
    return issubclass(registry([name]).get(name, Backend), FSDP2OffloadEager)


def _number_gpus() -> None:
    """Replace UUIDs in CUDA_VISIBLE_DEVICES by NVML's indices, after CUDA has read it.

    DeepSpeed reads it again to query NVML for free memory, and accepts indices only.
    """
    has_uuids = "-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if has_uuids and (numbers := [str(gpu["index"]) for gpu in gpus.gpus()]):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)


def _leave(num_ranks: int) -> None:
    """Destroy the process group once all ranks, on all nodes, have results.

    A crash here would end the others.
    """
    import torch.distributed as dist

    if num_ranks > 1:
        store = dist.distributed_c10d._get_default_store()
        store.add(RESULTS, 1)
        while store.add(RESULTS, 0) < num_ranks:
            time.sleep(WAIT_S)
    dist.destroy_process_group()


def _is_at_limit() -> bool:
    """Whether this process has used up its address space (RLIMIT_AS), if that is limited.

    Torch's CPU allocator then raises a plain RuntimeError.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return False
    return bool(limit - psutil.Process().memory_info().vms < AT_LIMIT_BYTES)


class ToldFailure(TypedDict):
    """What a rank says of an exception; see ``bench.launch.outcome.RankFailure``."""

    status: Status
    reason: str
    traceback: str


def failure(error: BaseException) -> ToldFailure:
    """The status (by the type of the exception, never by its text), the reason and traceback.

    The reason is in one line.
    """
    import torch

    status = Status.CRASHED
    full = (
        isinstance(error, torch.AcceleratorError)
        and getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY
    )
    full = full or (type(error) is RuntimeError and _is_at_limit())
    if full or isinstance(error, torch.OutOfMemoryError | MemoryError):
        status = Status.OOM
    elif isinstance(error, UnsupportedError):
        status = Status.UNSUPPORTED
    first_line = "no message"
    if message := str(error).strip():
        first_line = message.splitlines()[0]
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return {
        "status": status,
        "reason": plain(f"{type(error).__name__}: {first_line}{where}"),
        "traceback": "".join(traceback.format_exception(error)[-20:]),
    }


def shared_gpu_environment(
    rank: int, world_size: int, visible: Sequence[gpus.VisibleGpu]
) -> dict[str, str]:
    """Environment variables of a rank, to be set before CUDA is used.

    Ranks are assigned to the visible GPUs round-robin. Each rank sees only its own GPU and seems to
    be alone on its node, so that no framework finds fewer devices than ranks. Raises RuntimeError
    if there is no GPU.
    """
    if not visible:
        raise RuntimeError("no GPU is visible that ranks could share")
    gpu = visible[rank % len(visible)]
    uuid = gpu.get("mig")
    if not uuid:
        uuid = gpu["uuid"]
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": str(world_size),
        "CUDA_VISIBLE_DEVICES": uuid,
    }
