"""One rank's frame around its work: the process group, the result or the failure as a file, the end.

Torch elastic starts a rank; what the rank found out, or what went wrong, it writes to ``rank<r>.json`` itself, so that
nobody has to read logs.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import machine, sharing, virtual
from bench.cell import Device, Status
from bench.errors import UnsupportedError
from bench.launch import dumps, heartbeat, stragglers

if TYPE_CHECKING:
    import torch

AT_LIMIT_BYTES = 256 * 2**20
"""Address space that is left to a process that has used up its own."""
CUDA_OUT_OF_MEMORY = 2
"""cudaErrorMemoryAllocation: what CUDA says when there is no memory for a context, or for a library's buffers."""
LAST_WORDS_S = 0.5
"""How long a failed rank stays after it wrote what went wrong: longer than the watchdog sleeps between two looks."""
WAIT_S = 0.005
"""How long a rank that is done sleeps between two looks whether the others are."""


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
    own = stragglers.find(os.getpid())
    assert own is not None, "it is running"
    dumps.arm(folder, rank)  # first: whoever has the sign of life may ask
    heartbeat.begin(folder, rank, own.started)
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "":  # as the launcher sets it for trials on the CPU
        dumps.arm_flight_recorder(folder)


def join(
    device: Device, *, threads: int, seed: int, pretended: int | None = None, shared_gpu: bool = False
) -> torch.device:
    """Set up torch and the process group of this rank; its device.

    With ``pretended`` the rank is the only process of a virtual world of so many ranks. With ``shared_gpu`` it may have
    its GPU together with others; see ``bench.sharing``.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if shared_gpu:
        os.environ.update(sharing.environment(rank, world_size, machine.gpus()))
    import torch
    import torch.distributed as dist

    # DeepSpeed calls deprecated names of torch.distributed: a warning per collective would be timed with it.
    warnings.simplefilter("ignore", FutureWarning)
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    # What is called fp32 is that: no TF32, which containers ask for (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE), and which torch
    # itself takes for convolutions.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    own = torch.device("cpu")
    if device is Device.CUDA:
        own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(own)
        _number_gpus()
    if pretended is not None:
        virtual.join(pretended)
    elif device is Device.CUDA and not shared_gpu:
        # DeepSpeed makes more groups: of a bound one rank NCCL would split them off, which can fail (its issue 8248).
        dist.init_process_group("nccl", device_id=own if world_size > 1 else None)
    else:
        dist.init_process_group(sharing.BACKEND if shared_gpu else "gloo")
        dist.barrier()  # a rank that ended at once would fail those that are still connecting to it
    heartbeat.beat()
    return own


def _number_gpus() -> None:
    """Name this rank's GPUs by NVML's indices in CUDA_VISIBLE_DEVICES, if it names them by UUIDs; CUDA has read it.

    DeepSpeed reads it again, to ask NVML for the free memory of its GPU, and takes indices only.
    """
    has_uuids = "-" in os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if has_uuids and (numbers := [str(gpu["index"]) for gpu in machine.gpus()]):
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
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return limit - pages * resource.getpagesize() < AT_LIMIT_BYTES


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
