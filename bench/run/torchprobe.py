"""``python -m bench.run.torchprobe``: prints what torch can do here as one line of JSON.

It is a separate process, since importing torch may fail and a driver may hang; the caller sets a time limit.
"""

from __future__ import annotations

import json
import multiprocessing
import socket
import warnings
from multiprocessing.connection import Connection
from typing import Any

RANKS = 2
TIMEOUT_S = 60.0


def gloo() -> str:
    """Why two processes cannot all-reduce over gloo on the loopback device; empty if they can.

    The processes are forked, so CUDA must not be initialized before.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(RANKS)]
    ranks = [context.Process(target=_add, args=(i, port, pipe[1]), daemon=True) for i, pipe in enumerate(pipes)]
    for one in ranks:
        one.start()
    for _, writer in pipes:
        writer.close()  # so that the pipe closes when a rank ends
    found = [_answer(reader) for reader, _ in pipes]
    return next(filter(None, found), "")


def _answer(reader: Connection) -> str:
    try:
        return str(reader.recv()) if reader.poll(TIMEOUT_S) else f"no answer within {TIMEOUT_S:g} s"
    except EOFError:
        return "the process ended without an answer"


def _add(rank: int, port: int, writer: Connection) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    try:
        limit = datetime.timedelta(seconds=TIMEOUT_S / 2)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timeout=limit, rank=rank, world_size=RANKS)
        value = torch.ones(1)
        dist.all_reduce(value)
        writer.send("" if value.item() == RANKS else f"the sum of {RANKS} ones is {value.item():g}")
    except Exception as error:  # any error is the answer
        writer.send(" ".join(f"{type(error).__name__}: {error}".split()))


def cuda() -> dict[str, Any]:
    """What torch reports about CUDA."""
    import torch
    import torch.distributed as dist

    facts: dict[str, Any] = {
        "cuda_error": "",
        "num_devices": 0,
        "capabilities": [],
        "architectures": [],
        "no_peers": [],
        "nccl": dist.is_nccl_available(),
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        usable = torch.cuda.is_available()
    if not usable:
        facts["cuda_error"] = "; ".join(" ".join(str(one.message).split()) for one in caught)
        return facts
    try:
        count = facts["num_devices"] = torch.cuda.device_count()
        facts["architectures"] = torch.cuda.get_arch_list()
        facts["capabilities"] = [list(torch.cuda.get_device_capability(i)) for i in range(count)]
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        facts["no_peers"] = [[i, j] for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    except (RuntimeError, AssertionError) as error:
        facts["cuda_error"] = " ".join(str(error).split())
    return facts


def main() -> None:
    """Print the facts as JSON."""
    import torch

    about = {"version": torch.__version__, "built_for": torch.version.cuda}
    print(json.dumps({**about, "gloo_error": gloo(), **cuda()}))


if __name__ == "__main__":
    main()
