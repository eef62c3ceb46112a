"""Trains scripts at several splits in processes forked from one that has imported torch and the recorder.

forked_splits.py FOLDER: reads a list of jobs, each a folder's name, a script with its arguments, the number of ranks
and variables of the environment, from standard input; writes the status of each into its folder.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from pathlib import Path

from tests.invariance.cases import SCRIPTS

OF_HUGGING_FACE = ("accelerate", "transformers")
PRELOADED = {
    "accelerate": OF_HUGGING_FACE,
    "hf": OF_HUGGING_FACE,
    "lightning": ("lightning",),
    "torchtitan": ("datasets", "torch._inductor.compile_fx", "torch.nn.attention.varlen"),
}
"""By script, what is imported once, before the forks."""


def train(name: str, script: str, ranks: int, environment: dict[str, str], folder: Path) -> int:
    """Fork the ranks of a script, wait for them, and return the largest of their statuses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file, *arguments = script.split()
    path = next(found for where in SCRIPTS if (found := where / f"train_{file}.py").exists())
    os.environ |= {"BENCH_AUDIT_FOLDER": str(folder), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), **environment}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks)}
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            sys.argv = [str(path), *arguments]
            sys.path.insert(0, str(path.parent))
            output = os.open(folder / f"output.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1)
            os.dup2(output, 2)
            try:
                runpy.run_path(str(path), run_name="__main__")
            except Exception:
                traceback.print_exc()
                sys.exit(1)
            sys.exit()
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    import gc

    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel  # noqa: F401

    gc.freeze()  # the recorder looks at all objects: those of the imports are none of a training
    jobs = json.load(sys.stdin)
    names = {job["script"].split()[0] for job in jobs}
    for name in sorted(names & PRELOADED.keys()):
        for module in PRELOADED[name]:
            importlib.import_module(module)
    for job in jobs:
        folder = Path(sys.argv[1], job["name"])
        folder.mkdir(parents=True)
        status = train(**job, folder=folder)
        (folder / "status").write_text(str(status))
