"""Runs scripts in processes that are forked after the imports; needs nothing but Python.

``python forked.py MODULES JOBS``: MODULES is a list of names in JSON, JOBS one of scripts with their numbers of ranks.
For each a line of JSON is printed: ``script``, ``seconds``, the ``lines`` of rank 0, and an ``error`` if it has none.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

TIMEOUT_S = 300
GRACE_S = 5
"""How long other ranks may run when rank 0 has ended."""


def main(modules, jobs):
    for module in modules:
        with suppress(Exception):  # the script that needs it says why
            importlib.import_module(module)
    gc.freeze()  # the forked processes need not look through what was imported
    for script, ranks in jobs:
        start = time.monotonic()
        output, error = run(script, ranks)
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"case"')]
        seconds = round(time.monotonic() - start, 1)
        found = {
            "script": script,
            "seconds": seconds,
            "lines": lines,
            "error": "" if lines else last_error(error),
        }
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def run(script, ranks):
    """What rank 0 writes to stdout, and to stderr."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        os.environ["MASTER_PORT"] = str(server.getsockname()[1])
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), LOCAL_SIZE=str(ranks))
    with tempfile.TemporaryDirectory() as folder:
        processes = [start(script, rank, Path(folder)) for rank in range(ranks)]
        wait(processes)
        return [(Path(folder) / name).read_text(errors="replace") for name in ("0.out", "0.err")]


def start(script, rank, folder):
    """The id of a forked process that runs the script as this rank."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    status = 0
    try:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY), number)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
        os.chdir(folder)
        sys.argv = [script]
        runpy.run_path(script, run_name="__main__")
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def wait(processes):
    """Until rank 0 has ended; then all others end too."""
    end, left = time.monotonic() + TIMEOUT_S, list(processes)
    while left and time.monotonic() < end:
        for process in list(left):
            if os.waitpid(process, os.WNOHANG)[0]:
                left.remove(process)
                if process == processes[0]:
                    end = min(end, time.monotonic() + GRACE_S)
        time.sleep(0.05)
    for process in left:
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)


def last_error(text):
    """The last line that names an error, or else the last one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [
        line for line in lines if "Error" in line.split(":")[0] or "Exception" in line.split(":")[0]
    ]
    return (named or lines or [f"no answer within {TIMEOUT_S} s"])[-1]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
