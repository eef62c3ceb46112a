"""Trains several scripts in processes forked from one that has imported torch: forked.py FOLDER SCRIPT...

Each has a folder, named by its number, for its losses and, where this process is audited, for the events of its ranks.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path

from tests.audit_command.cases import ALONE, SCRIPTS


def train(script: str, folder: Path) -> None:
    """Fork the ranks of a script, and wait for them."""
    name, *arguments = script.split()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "BENCH_AUDIT_FOLDER": str(folder),
        "LOSSES": str(folder / "losses"),
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= {"MASTER_PORT": str(port), "WORLD_SIZE": "1" if name in ALONE else "2"}
    children = []
    for rank in range(int(os.environ["WORLD_SIZE"])):
        children.append(os.fork())
        if not children[-1]:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            sys.argv = [f"train_{name}.py", *arguments]
            sys.path.insert(0, str(SCRIPTS))
            runpy.run_path(str(SCRIPTS / sys.argv[0]), run_name="__main__")
            sys.exit()
    assert not any(os.waitpid(child, 0)[1] for child in children), script


if __name__ == "__main__":
    import torch.distributed.fsdp  # noqa: F401

    for number, script in enumerate(sys.argv[2:]):
        Path(sys.argv[1], str(number)).mkdir()
        train(script, Path(sys.argv[1], str(number)))
