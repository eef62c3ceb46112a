"""The launcher's process: torch elastic's agent, and a fork server for its ranks.

``python -m bench.launch.server``, started by ``launcher``. It lives as long as the bench's own process: when that is
gone, even by SIGKILL, this one ends everything that came from it, and itself.
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


def serve(requests: int, replies: int, *, cold: bool) -> None:
    """Trials as JSON lines from one pipe, one JSON line of answer each to the other."""
    import multiprocessing

    from bench.launch import agent  # imports torch for torch elastic's agent itself

    start_method = "spawn" if cold else "forkserver"
    if not cold:
        multiprocessing.set_forkserver_preload(["bench.launch.preload"])
    context: Any = multiprocessing.get_context(start_method)
    ours, theirs = context.Pipe(duplex=False)
    first = context.Process(target=_tell, args=(theirs,))
    first.start()
    theirs.close()  # so that its end is seen here
    initialized_by = ours.recv()
    first.join()
    helpers = _own()
    _reply(replies, {"ready": True, "initialized_by": initialized_by})
    with os.fdopen(requests) as lines:
        for line in lines:
            entry, world_size, folder, payload = json.loads(line)
            module, _, function = entry.partition(":")
            rank_main = getattr(importlib.import_module(module), function)
            answer = agent.run(rank_main, payload, world_size, folder, start_method)
            signal.signal(signal.SIGTERM, _end_quietly)  # torch elastic has set its own
            # Torch elastic ends only the ranks themselves, and what they leave running would be measured next.
            stragglers.kill(lambda: _own() - helpers)
            answer["spent"] = not all(map(stragglers.alive, helpers))  # one of them was killed
            _reply(replies, answer)


def _tell(pipe: Connection) -> None:
    """Makes multiprocessing start its helpers, and the fork server import; tells what initialized CUDA in that."""
    preload = sys.modules.get("bench.launch.preload")
    pipe.send(preload.initialized_by if preload else "")


def _own() -> set[psutil.Process]:
    """All that came from this process, without itself."""
    return stragglers.family(os.getpid(), os.environ[stragglers.MARK]) - {psutil.Process()}


def _reply(replies: int, answer: dict[str, Any]) -> None:
    os.write(replies, (json.dumps(answer) + "\n").encode())


def _end_quietly(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


def _end_with_parent(requests: int) -> None:
    """Wait until nobody can send a request any more, which is when the bench's own process has ended; then end all."""
    poll = select.poll()
    poll.register(requests, 0)  # POLLHUP is told of unasked
    poll.poll()
    with contextlib.suppress(OSError):
        stragglers.kill(lambda: stragglers.without_trackers(_own()))
    shutil.rmtree(os.environ["BENCH_TMPDIR"], ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end_quietly)
    stragglers.adopt_orphans()
    Path(os.environ["BENCH_TMPDIR"]).mkdir(mode=0o700)  # a name that nobody could foresee; taken, it is an error
    # To be woken up, if somebody stopped it, and find that it is alone.
    stragglers.signal_at_parents_end(signal.SIGCONT)
    threading.Thread(target=_end_with_parent, args=(int(sys.argv[1]),), daemon=True).start()
    try:
        serve(int(sys.argv[1]), int(sys.argv[2]), cold=sys.argv[3] == "cold")
    finally:
        shutil.rmtree(os.environ["BENCH_TMPDIR"], ignore_errors=True)
