"""Fork servers: one that has loaded what every trial needs, and one for each set of packages.

The others are forked from the first. They are those of Python's multiprocessing. Backends that need
different packages get different ones, so that no trial runs in a process that imported another
framework: some replace functions of torch on import. What all of them need is imported once, which
takes most of the time.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path

from bench.launch import stragglers


class ForkServers:
    """The fork servers of this process, by the packages that they have loaded."""

    def __init__(self) -> None:
        multiprocessing.set_forkserver_preload(["bench.launch.preload"])
        self._context = multiprocessing.get_context("forkserver")
        self._servers: dict[tuple[str, ...], forkserver.ForkServer] = {(): forkserver._forkserver}
        loading, told = self._context.Pipe(duplex=False)
        self._first = self._context.Process(target=_tell, args=(told,))
        self._first.start()
        told.close()  # so that recv fails if the child dies
        self._loading = [loading]

    def load(self, every: Iterable[Sequence[str]]) -> None:
        """Start one for each set of packages."""
        for packages in map(tuple, every):
            self._servers[packages] = server = _ForkServer(self._context, packages)
            self._loading.append(server.loading)

    def ready(self) -> str:
        """Wait until all have loaded everything; a module that has initialized CUDA, or nothing."""
        initialized = [str(loading.recv()) for loading in self._loading]
        self._loading.clear()
        self._first.join()
        return next(filter(None, initialized), "")

    def choose(self, packages: Sequence[str]) -> None:
        """Let multiprocessing fork from the one with these packages from now on."""
        server = self._servers[tuple(packages)]
        forkserver.connect_to_new_process = server.connect_to_new_process


class _ForkServer(forkserver.ForkServer):
    """One that is forked from another.

    multiprocessing reads its address and the pipe that keeps it alive.
    """

    def __init__(self, context: ForkServerContext, packages: tuple[str, ...]) -> None:
        super().__init__()
        self._forkserver_address = str(
            Path(os.environ["BENCH_TMPDIR"]) / f"fork-{os.urandom(4).hex()}"
        )
        alive, self._forkserver_alive_fd = os.pipe()
        self.loading, told = context.Pipe(duplex=False)
        with (
            socket.socket(socket.AF_UNIX) as listener,
            Connection(alive, writable=False) as kept,
            told,
        ):
            listener.bind(self._forkserver_address)
            listener.listen()
            context.Process(
                target=_serve, args=(listener, kept, packages, told), daemon=True
            ).start()

    def ensure_running(self) -> None:
        """Unlike one that multiprocessing starts, it cannot be started again."""


def _tell(told: Connection) -> None:
    """Send the module that initialized CUDA, if any.

    As the first child it starts the helpers and the preload.
    """
    preload = sys.modules.get("bench.launch.preload")
    told.send("" if preload is None else preload.initialized_by)


def _serve(
    listener: socket.socket, alive: Connection, packages: tuple[str, ...], told: Connection
) -> None:
    """Load the packages, say so, and fork what is asked for until no other process has the pipe."""
    stragglers.signal_at_parents_end(signal.SIGKILL)
    from bench.launch import preload

    told.send(preload.load_all(*packages))
    told.close()
    number = os.dup(alive.fileno())
    alive.close()
    forkserver.main(listener.detach(), number, [])
