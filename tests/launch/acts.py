"""What ranks do for test_launch.py: each function is one act, of the rank that is told to."""

from __future__ import annotations

import json
import mmap
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from bench.launch.rank import join, run_and_write
from bench.plan.task import Task

LOG_BYTES = 2**20
"""What ranks may write in these tests: more than that ends a trial at once."""
FAMILY_S = "ACTS_FAMILY_S"
"""Names a number by which the processes that ``family`` leaves are told from those of other tests."""


def run(payload):
    task = json.loads(payload)
    folder = Path(task["folder"])

    def work(rank):
        if task["act"] == "end" and rank == task["rank"]:
            connect_late(folder)
        join(Task(backend="", world_size=2, folder=str(folder)))
        (folder / f"joined{rank}").write_text(str(time.monotonic()))
        if rank == task["rank"]:
            globals()[task["act"]](folder)
        elif task["group"]:
            import torch
            import torch.distributed as dist

            dist.all_reduce(torch.ones(1))
        return {"status": "ok", "rank": rank}

    run_and_write(folder, work)


def connect_late(folder):
    import torch.distributed as dist

    connect = dist.init_process_group

    def slowly(*args, **kwargs):
        connect(*args, **kwargs)
        time.sleep(0.5)
        (folder / "connected").write_text(str(time.monotonic()))

    dist.init_process_group = slowly


def end(folder): ...


def lock_the_interpreter(folder):
    re.match("(a+)+b", "a" * 64)  # in C for years


def stop(folder):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)  # it is woken up to tell where it is


def end_the_trial():
    os.write(1, bytes(2 * LOG_BYTES))
    time.sleep(3600)


def deaf(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_the_trial()


def family(folder):
    ignore = "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]"
    code = f"import signal, time; {ignore}; time.sleep({os.environ[FAMILY_S]})"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    subprocess.Popen([sys.executable, "-c", code], env={}, start_new_session=True)


def family_and_sleep(folder):
    family(folder)
    end_the_trial()


def hold_segment(folder):
    with Path((folder / "segment").read_text()).open("r+b") as file:
        _kept = mmap.mmap(file.fileno(), 0)
    end_the_trial()


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("ran",))


def read_pickle(folder):
    import torch

    os.chdir(folder)
    torch.save(Trap(), "trap.pt")
    torch.load("trap.pt", weights_only=False)


def listeners(folder):
    import psutil

    launcher = os.environ["BENCH_LAUNCHER"]
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BENCH_LAUNCHER") == launcher:
                found += [
                    c.laddr.ip for c in process.net_connections() if c.status == psutil.CONN_LISTEN
                ]
        except psutil.Error:
            continue
    (folder / "listeners").write_text(json.dumps(found))
