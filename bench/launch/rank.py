"""One rank's frame around its work: the world that it joins, the result or the failure as a file, the end.

Torch elastic starts a rank; what the rank found out, or what went wrong, it writes to ``rank<r>.json`` itself, so that
nobody has to read logs. How it joins a world (``bench.plan.world``):

- real: a process group over NCCL or gloo;
- virtual, with fake tensors or without: torch's process group that only pretends to communicate (``FakeProcessGroup``
  of torch >= 2.13: a gather repeats the own shard, a reduction keeps the own values, so all values are finite);
- shared GPU: each rank is told of one GPU, which others may have too, and the group is gloo's, since NCCL refuses two
  ranks on one device. Gloo takes tensors of a GPU through the host's memory: ``all_reduce``, ``broadcast``, ``reduce``,
  ``all_gather``, ``all_gather_into_tensor``, ``reduce_scatter_tensor``, ``gather`` and ``scatter``, which is what the
  built-in backends issue; not the coalesced ones (torch/csrc/distributed/c10d/ProcessGroupGloo.cpp).
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
from typing import TYPE_CHECKING, Any

import psutil

from bench.errors import UnsupportedError
from bench.launch import dumps, gpus, stragglers
from bench.measure import heartbeat
from bench.plan.cell import Device, Status
from bench.plan.task import Task

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AT_LIMIT_BYTES = 256 * 2**20
"""Address space that is left to a process that has used up its own."""
CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation: what CUDA says when there is no memory for a context, or for a library's buffers."""
LAST_WORDS_S = 2.0
"""How long a failed rank stays after it wrote what went wrong: several times as long as the watchdog sleeps between
two looks, since a busy machine wakes it late."""
WAIT_S = 0.005
"""How long a rank that is done sleeps between two looks whether the others are."""
SHARED_GPU_GROUP = "cpu:gloo,cuda:gloo"
"""Of the process group. Not plain ``gloo``: beside that, ``DeviceMesh`` of some versions makes a group of NCCL's."""


def pretend(world_size: int) -> None:
    """Make this process rank 0 of ``world_size`` ranks, of which no other exists.

    The pretended ranks are on nodes of their own, one each: no framework then looks for their devices on this one.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Lightning and DeepSpeed ask the environment too, which says what torch elastic started: one process.
    alone = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
    pretended = {"WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": world_size, "ROLE_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in (alone | pretended).items()})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    _teach_ddp()


def _teach_ddp() -> None:
    """Let every DistributedDataParallel of this process get its reduced buckets.

    Its C++ reducer wants them as the result of the collective's future, and the pretended one's has none: it ends in an
    internal assertion. A communication hook may bring a future of its own.
    """
    from torch.nn.parallel import DistributedDataParallel

    if getattr(DistributedDataParallel, "_knows_virtual_worlds", False):
        return
    initialize = DistributedDataParallel.__init__

    def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes that name's place
        initialize(ddp, *args, **kwargs)
        ddp.register_comm_hook(ddp.process_group, _all_reduce)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign, assignment]
    DistributedDataParallel._knows_virtual_worlds = True  # type: ignore[attr-defined]


def _all_reduce(group: Any, bucket: Any) -> Any:
    """What DDP does without a hook, a division and an all-reduce in place; and the bucket as the result."""
    import torch
    import torch.distributed as dist

    buffer = bucket.buffer().div_(group.size())
    dist.all_reduce(buffer, group=group)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


_all_reduce.__annotations__.clear()  # torch wants its own types there or none, and ours are strings


def main(task_json: str) -> None:
    """Join the task's world and do its work: the entry point of a rank, called by torch elastic."""
    task = Task.from_json(task_json)
    module, _, name = task.work.partition(":")
    work = getattr(importlib.import_module(module), name)

    def joined(rank: int) -> dict[str, Any]:
        found: dict[str, Any] = work(task, rank, join(task))
        return found

    live(Path(task.folder), joined)


def live(folder: Path, work: Callable[[int], dict[str, Any]]) -> None:
    """Do ``work(rank)`` and write its result, plain JSON, to ``folder / "rank<r>.json"``, whole or not at all.

    What went wrong is written there too, before the process ends.
    """
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])  # work may tell frameworks others
    path = folder / f"rank{rank}.json"
    try:
        _arm(folder, rank)
        result = json.dumps(work(rank))
    except BaseException as error:
        traceback.print_exc()
        _write(path, json.dumps({**failure(error), "time": time.monotonic()}))
        # If a peer died without a word, let torch elastic notice that one first.
        time.sleep(LAST_WORDS_S)
        # No tidying up: ending a NCCL group whose other ranks are inside a collective may wait for ever.
        sys.stderr.flush()
        os._exit(1)
    _write(path, result)
    try:
        _leave(folder, num_ranks)
    except BaseException:
        # The result is safe. Torch's own way of telling the agent would be a pickle in a file.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _arm(folder: Path, rank: int) -> None:
    """End with whoever started this process, show signs of life, and tell where it is when asked."""
    stragglers.signal_at_parents_end(signal.SIGKILL)
    dumps.arm(folder, rank)  # first: whoever has the sign of life may ask
    heartbeat.begin(folder, rank)
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":  # as the launcher sets it for trials on the CPU
        dumps.arm_flight_recorder(folder)


def join(task: Task) -> torch.device:
    """Set up torch and the process group of this rank in the task's world; its device."""
    if task.world.shares_gpus:
        os.environ.update(shared_gpu_environment(int(os.environ["RANK"]), task.world_size, gpus.gpus()))
    import torch
    import torch.distributed as dist

    # DeepSpeed calls deprecated names of torch.distributed: a warning per collective would be timed with it.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(task.threads)
    torch.manual_seed(task.seed)
    # What is called fp32 is that: no TF32, which containers ask for (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), and which torch
    # itself takes for convolutions.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    own = torch.device("cpu")
    if task.device is Device.CUDA:
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        _number_gpus()
    if not task.world.has_all_ranks:
        pretend(task.world_size)
    elif task.device is Device.CUDA and not task.world.shares_gpus:
        # DeepSpeed makes more groups: of a bound one rank NCCL would split them off, which can fail (its issue 8248).
        dist.init_process_group("nccl", device_id=own if task.world_size > 1 else None)
    else:
        dist.init_process_group(SHARED_GPU_GROUP if task.world.shares_gpus else "gloo")
        dist.barrier()  # a rank that ended at once would fail those that are still connecting to it
    heartbeat.beat()
    return own


def _number_gpus() -> None:
    """Name this rank's GPUs by NVML's indices in CUDA_VISIBLE_DEVICES, if it names them by UUIDs; CUDA has read it.

    DeepSpeed reads it again, to ask NVML for the free memory of its GPU, and takes indices only.
    """
    has_uuids = "-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if has_uuids and (numbers := [str(gpu["index"]) for gpu in gpus.gpus()]):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(numbers)


def _leave(folder: Path, num_ranks: int) -> None:
    """End the process group, once the results of all ranks are safe: a crash here would end the others."""
    import torch.distributed as dist

    while not all((folder / f"rank{rank}.json").exists() for rank in range(num_ranks)):
        time.sleep(WAIT_S)
    dist.destroy_process_group()


def _write(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    draft = path.with_suffix(".tmp")
    draft.write_text(text)
    draft.replace(path)


def _is_at_limit() -> bool:
    """Whether this process has used up the address space that it may have (RLIMIT_AS), if there is such a limit.

    Torch's allocator for the CPU raises a RuntimeError like any other when the system gives it nothing.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return False
    return bool(limit - psutil.Process().memory_info().vms < AT_LIMIT_BYTES)


def failure(error: BaseException) -> dict[str, Any]:
    """What an exception means: status by its type, never by a word in its text; reason in one line; traceback."""
    import torch

    status = Status.CRASHED
    full = isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY
    full = full or (type(error) is RuntimeError and _is_at_limit())
    if full or isinstance(error, torch.OutOfMemoryError | MemoryError):
        status = Status.OOM
    elif isinstance(error, UnsupportedError):
        status = Status.UNSUPPORTED
    first_line = (str(error).strip() or "no message").splitlines()[0]
    where = "".join(f" ({note})" for note in getattr(error, "__notes__", []))
    return {
        "status": status,
        "reason": f"{type(error).__name__}: {first_line}{where}",
        "traceback": "".join(traceback.format_exception(error)[-20:]),
    }


def shared_gpu_environment(rank: int, world_size: int, gpus: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Environment variables of a rank, to be set before CUDA is used; ``gpus`` as ``bench.launch.gpus`` tells of them.

    Ranks are dealt out to the GPUs in turn. Each sees its own GPU alone, and is told that it is alone on its node: so
    no framework counts the devices of the machine and finds too few. Raises RuntimeError if there is no GPU.
    """
    if not gpus:
        raise RuntimeError("no GPU is visible that ranks could share")
    gpu = gpus[rank % len(gpus)]
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": world_size}
    return {name: str(value) for name, value in alone.items()} | {
        "CUDA_VISIBLE_DEVICES": str(gpu.get("mig") or gpu["uuid"])
    }
