"""The launcher's process: torch elastic's agent, and the fork servers of its ranks.

``process`` starts it as ``python -m bench.launch.server`` with one end of a connection. When the
bench's own process ends, even by SIGKILL, this one ends all of its own descendants and itself, and
removes their files.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import shutil
import signal
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType

import psutil

from bench.launch import stragglers
from bench.launch.channel import Channel, LostError
from bench.launch.fork_servers import ForkServers
from bench.launch.node_task import NodeTask


def serve(channel: Channel, *, cold: bool) -> None:
    """Load sets of packages and run trials, as messages ask, until the bench's process ends.

    A trial is a ``bench.launch.node_task.NodeTask``. Two messages answer it: the port of its store
    when that listens, and what ended it.
    """
    forks = None
    if not cold:
        forks = ForkServers()
    from bench.launch import agent  # imports torch, as the fork server does meanwhile
    from bench.measure import apart

    channel.send({"ready": True, "initialized_by": forks.ready() if forks else ""})
    helpers = _descendants()

    def left_behind() -> set[psutil.Process]:
        return _descendants() - helpers

    while request := channel.receive():
        if forks and "load" in request:
            forks.load(request["load"])
            channel.send({"ready": True, "initialized_by": forks.ready()})
            helpers = _descendants()
            continue
        node_task = NodeTask(**request)
        if forks:
            forks.choose(node_task.packages)
        module, _, function = node_task.entry.partition(":")
        rank_main = getattr(importlib.import_module(module), function)
        rendezvous = agent.Rendezvous(node_task)
        channel.send({"port": rendezvous.master_port})
        answer = agent.run(rank_main, node_task, rendezvous, "forkserver" if forks else "spawn")
        signal.signal(signal.SIGTERM, _end_quietly)  # torch elastic has replaced the handler
        # Torch elastic ends only the ranks; processes that they leave running would disturb the
        # next trial.
        stragglers.kill(left_behind)
        apart.answer(Path(node_task.folder))
        answer["spent"] = not all(map(stragglers.alive, helpers))  # one of them was killed
        channel.send(answer)


def _descendants() -> set[psutil.Process]:
    return stragglers.family(os.getpid(), os.environ[stragglers.MARK]) - {psutil.Process()}


def _end_quietly(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _end_with_parent(connection: int) -> None:
    """Wait until the connection closes, as the bench's own process ends; then end everything."""
    poll = select.poll()
    poll.register(connection, 0)  # POLLHUP is always reported
    poll.poll()
    # The main thread could start another rank or write another file meanwhile; this program
    # replaces all threads.
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
    # Its name is random, so it must not exist yet.
    Path(os.environ["BENCH_TMPDIR"]).mkdir(mode=0o700)
    # So that this process is continued, if it was stopped, and notices that its parent has ended.
    stragglers.signal_at_parents_end(signal.SIGCONT)
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=[connection.fileno()], daemon=True).start()
    try:
        with contextlib.suppress(LostError):  # the bench's own process has ended
            serve(Channel(connection), cold=sys.argv[2] == "cold")
    finally:
        shutil.rmtree(os.environ["BENCH_TMPDIR"], ignore_errors=True)
