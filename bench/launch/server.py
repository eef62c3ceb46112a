"""The launcher's process: torch elastic's agent, and a fork server for its ranks.

``launcher`` starts it as ``python -m bench.launch.server`` with two pipes. When the bench's own process ends, even by
SIGKILL, this one ends all of its own descendants and itself, and removes their files.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil

from bench.launch import stragglers
from bench.launch.node_task import NodeTask


def serve(requests: int, replies: int, *, cold: bool) -> None:
    """Read trials as JSON lines from one pipe and run each (``bench.launch.node_task.NodeTask``).

    Two JSON lines on the other pipe answer: the port of the trial's store when it listens, and what ended the trial.
    """
    import multiprocessing

    from bench.launch import agent  # imports torch

    start_method = "spawn" if cold else "forkserver"
    if not cold:
        multiprocessing.set_forkserver_preload(["bench.launch.preload"])
    context: Any = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    first = context.Process(target=_tell, args=(theirs,))
    first.start()
    theirs.close()  # so that recv fails if the child dies
    initialized_by = ours.recv()
    first.join()
    helpers = _descendants()
    _reply(replies, {"ready": True, "initialized_by": initialized_by})
    with os.fdopen(requests) as lines:
        for line in lines:
            node_task = NodeTask(**json.loads(line))
            module, _, function = node_task.entry.partition(":")
            rank_main = getattr(importlib.import_module(module), function)
            rendezvous = agent.Rendezvous(node_task)
            _reply(replies, {"port": rendezvous.master_port})
            answer = agent.run(rank_main, node_task, rendezvous, start_method)
            signal.signal(signal.SIGTERM, _end_quietly)  # torch elastic has replaced the handler
            # Torch elastic ends only the ranks; processes that they leave running would disturb the next trial.
            stragglers.kill(lambda: _descendants() - helpers)
            answer["spent"] = not all(map(stragglers.alive, helpers))  # one of them was killed
            _reply(replies, answer)


def _tell(pipe: Connection) -> None:
    """Send the module that initialized CUDA, if any. As the first child it starts the helpers and the preload."""
    preload = sys.modules.get("bench.launch.preload")
    pipe.send(preload.initialized_by if preload else "")


def _descendants() -> set[psutil.Process]:
    """The descendants of this process."""
    return stragglers.family(os.getpid(), os.environ[stragglers.MARK]) - {psutil.Process()}


def _reply(replies: int, answer: dict[str, Any]) -> None:
    os.write(replies, (json.dumps(answer) + "\n").encode())


def _end_quietly(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def _end_with_parent(requests: int) -> None:
    """Wait until the pipe of requests closes, which is when the bench's own process has ended; then end everything."""
    poll = select.poll()
    poll.register(requests, 0)  # POLLHUP is always reported
    poll.poll()
    # The main thread could start another rank or write another file meanwhile; this program replaces all threads.
    with contextlib.suppress(OSError):
        os.execv(sys.executable, [sys.executable, "-m", "bench.launch.server"])
    _clean_up()
    os._exit(1)


def _clean_up() -> None:
    """Leave no descendant and no file behind."""
    with contextlib.suppress(OSError):
        stragglers.kill(lambda: stragglers.without_trackers(_descendants()))
    for folder in ("BENCH_TMPDIR", "BENCH_SCRATCH"):
        shutil.rmtree(os.environ[folder], ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        _clean_up()
        sys.exit(1)
    signal.signal(signal.SIGTERM, _end_quietly)
    stragglers.adopt_orphans()
    Path(os.environ["BENCH_TMPDIR"]).mkdir(mode=0o700)  # the name is random, so it must not exist yet
    # So that this process is continued, if it was stopped, and notices that its parent has ended.
    stragglers.signal_at_parents_end(signal.SIGCONT)
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    try:
        serve(int(sys.argv[1]), int(sys.argv[2]), cold=sys.argv[3] == "cold")
    finally:
        shutil.rmtree(os.environ["BENCH_TMPDIR"], ignore_errors=True)
