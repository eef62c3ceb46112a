"""Runs a process group for one trial or audit under torch elastic, watches it and always cleans up.

The ranks of a trial are on one or more nodes: this one (``node.Node``), and in a job of several
nodes those whose agents have joined (``nodes.Nodes``), which answer as this one does. Only here
trials are watched and judged.
"""

from __future__ import annotations

import contextlib
import math
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Self

from bench.backends.base import place_of, registry
from bench.files import ROOT
from bench.launch.channel import LostError
from bench.launch.node import ForkError, Node
from bench.launch.node_task import NodeReport, NodeTask
from bench.launch.nodes import Nodes, RemoteNode
from bench.launch.outcome import Ending, Outcome, RankJson, judge
from bench.launch.process import LauncherError
from bench.launch.watchdog import Sight, Watch, excessive
from bench.plan.cell import Device, Status
from bench.plan.task import Task

__all__ = ["Launcher", "LauncherError"]

RANK_MAIN = "bench.launch.rank:main"
"""The entry of a task that names none; the module is imported in the ranks alone."""
SETTLE_S = 1.0
"""After the ranks of one node failed: how long those of the others may take to end by themselves,
and say why."""


class Launcher:
    """Runs trials, one at a time. ``close`` leaves no process behind on any node.

    Use it as a context manager: it locks the visible GPUs against other benches, and raises
    InputError if another one uses them.
    """

    def __init__(
        self, device: Device, *, cold: bool = False, others: Nodes | None = None, code: Path = ROOT
    ) -> None:
        self._device = device
        self._cold = cold
        self._others = others
        if others is None:
            self._own = Node(code=code)
        else:
            self._own = Node(others.address, f"node 0 ({socket.gethostname()})")

    @property
    def _nodes(self) -> list[Node | RemoteNode]:
        if self._others is None:
            return [self._own]
        return [self._own, *self._others.nodes]

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.callback(self._own.release)
            try:
                for node in self._nodes:
                    if node.open(self._device):
                        self._cold = True
            except LostError as error:
                raise LauncherError(str(error)) from error
            stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        try:
            self.close()
        finally:
            self._own.release()

    def run(self, task: Task, timeout_s: float, inactivity_s: float = 0.0) -> Outcome:
        """Run one trial to its end, or end it after one of the limits; the calling thread sleeps.

        The limits are ``timeout_s`` in all, and ``inactivity_s`` without progress. Raises
        LauncherError if the launcher's process does not start.

        Ranks start cold wherever a forked process cannot use the device; the outcome says so. A
        trial on a node that is lost is ``interrupted``, so that it runs again when the run is
        resumed.
        """
        if not task.folder:
            with tempfile.TemporaryDirectory(prefix="accumulation-bench-") as folder:
                return self.run(replace(task, folder=folder), timeout_s, inactivity_s)
        if (place := place_of(task.backend)) and not task.plugin:
            task = replace(task, plugin=place)
        if self._others is not None:
            self._others.welcome_back(self._device)
        nodes = self._nodes[: task.num_nodes]
        if reason := _missing_nodes(nodes, task.num_nodes):
            return Outcome(status=Status.INTERRUPTED, reason=reason, ranks=[], wall_s=0.0)
        packages = self._packages(task.backend)
        started = time.perf_counter()
        try:
            trial = self._start(task, nodes, packages)
            outcome = trial.run(timeout_s, inactivity_s)
            if trial.died_early:  # the launcher's process, before any rank began
                outcome = self._start(task, nodes, packages).run(timeout_s, inactivity_s)
            return replace(outcome, cold=self._cold)
        except ForkError as error:
            self._cold = True
            print(f"bench: {error}", file=sys.stderr)
            self.close()  # all of them: trials that are compared must start the same way
            return self.run(task, timeout_s, inactivity_s)
        except LostError as error:
            wall_s = time.perf_counter() - started
            self.close()
            return Outcome(
                status=Status.INTERRUPTED,
                reason=str(error),
                ranks=[],
                wall_s=wall_s,
                cold=self._cold,
            )

    def prepare(self, backends: Iterable[str]) -> None:
        """Start the processes from which later trials of these backends are forked.

        Other nodes wait for theirs by themselves.
        """
        every = set(map(self._packages, backends))
        if every:
            for node in self._nodes:
                node.start(every, cold=self._cold)
        with contextlib.suppress(ForkError):  # told by the next trial
            self._own.ready()

    def _packages(self, backend: str) -> tuple[str, ...]:
        """What the process from which ranks of a backend are forked has loaded."""
        if self._cold:
            return ()
        return registry([backend])[backend].preloaded()

    def _start(
        self, task: Task, nodes: Sequence[Node | RemoteNode], packages: tuple[str, ...]
    ) -> _Trial:
        """A trial whose ranks can begin at once.

        On every node the processes from which they are forked are ready.
        """
        for node in reversed(nodes):
            node.start([packages], cold=self._cold)
        for node in nodes:
            node.ready()
        return _Trial(task, nodes, packages)

    def close(self) -> None:
        """End every process; SIGTERM first, SIGKILL after a grace period."""
        with contextlib.ExitStack() as every:  # all are closed, even if one fails or is interrupted
            for node in self._nodes:
                every.callback(node.close)


def _missing_nodes(nodes: Sequence[Node | RemoteNode], needed: int) -> str:
    """Why a trial that needs so many nodes cannot begin on these; empty if it can."""
    for node in nodes:
        if node.lost:
            return node.lost
    if len(nodes) < needed:
        return f"{needed} nodes are needed, and there are {len(nodes)}"
    return ""


class _Trial:
    """One trial on the nodes of its ranks; it can run once."""

    def __init__(
        self, task: Task, nodes: Sequence[Node | RemoteNode], packages: tuple[str, ...]
    ) -> None:
        self._task = task
        self._nodes = nodes
        self._packages = packages
        self._num_ranks = task.num_processes // len(nodes)
        """Ranks on each node."""
        self._names: list[str] = []
        for rank in range(task.num_processes):
            name = f"rank {rank}"
            if len(nodes) > 1:
                name += f" on {nodes[rank // self._num_ranks].name}"
            self._names.append(name)
        self._sights: dict[int, Sight] = {}
        self._reports: dict[int, NodeReport] = {}
        """Both by the number of the node."""

    def run(self, timeout_s: float, inactivity_s: float) -> Outcome:
        """Run the ranks until they end by themselves, or end them after one of the limits."""
        started = time.perf_counter()
        watch = Watch(self._names, timeout_s, inactivity_s)
        self._begin()
        ending = self._wait(watch)
        wall_s = time.perf_counter() - started
        self._look()
        results = self._end(dump=ending is not None and ending.dump)
        reports = [self._reports[number] for number in range(len(self._nodes))]
        if ending is None:
            ending = self._ending(results)
        if too_much := excessive(sum(report.log_bytes for report in reports)):
            ending = too_much
        outcome = judge(results, ending, wall_s, self._names)
        outcome.recordings = [report.recording for report in reports]
        return outcome

    @property
    def died_early(self) -> bool:
        """Whether a launcher's process died before any rank began."""
        return any(report.died_early for report in self._reports.values())

    def _begin(self) -> None:
        """Start the ranks of each node; those of the first open the store that all of them use."""
        entry = self._task.entry
        if not entry:
            entry = RANK_MAIN
        node_task = NodeTask(
            entry=entry,
            payload=self._task.to_json(),
            folder=self._task.folder,
            run_id=uuid.uuid4().hex,
            num_ranks=self._num_ranks,
            num_nodes=len(self._nodes),
            address=self._nodes[0].address,
            packages=self._packages,
        )
        for number, node in enumerate(self._nodes):
            port = node.begin(replace(node_task, node=number))
            if number == 0:
                node_task = replace(node_task, port=port)

    def _wait(self, watch: Watch) -> Ending | None:
        """Wait until all ranks have ended, or some have failed; or why to end the trial early."""
        settled = math.inf
        while True:
            self._look()
            if not all(report.is_good for report in self._reports.values()):
                settled = min(settled, time.monotonic() + SETTLE_S)
            if len(self._reports) == len(self._nodes) or time.monotonic() > settled:
                return None
            if ending := watch.look([self._sights[number] for number in range(len(self._nodes))]):
                return ending
            wait([self._nodes[number].fileno() for number in self._running], watch.interval_s)

    def _look(self) -> None:
        """Look at the nodes whose ranks have not ended."""
        for number in self._running:
            self._sights[number], report = self._nodes[number].look()
            if report is not None:
                self._reports[number] = report

    @property
    def _running(self) -> list[int]:
        """The numbers of the nodes whose ranks have not ended."""
        return [number for number in range(len(self._nodes)) if number not in self._reports]

    def _end(self, *, dump: bool) -> list[RankJson | None]:
        """End the ranks that still run, and return what each rank wrote by itself."""
        heard: set[int] = set()
        for sight in self._sights.values():
            heard.update(sight.written)
        running = self._running
        for number in reversed(running):
            self._reports[number] = self._nodes[number].end(dump=dump)
        results: list[RankJson | None] = []
        for number in range(len(self._nodes)):
            results += self._reports[number].results
        for rank in range(len(results)):
            if rank // self._num_ranks in running and rank not in heard:  # an effect of its end
                results[rank] = None
        return results

    def _ending(self, results: Sequence[RankJson | None]) -> Ending:
        """Why the ranks ended by themselves.

        Of several nodes: the one with a rank that a signal ended, or that reported nothing, is why
        the others failed.
        """

        def precedence(number: int) -> tuple[bool, bool, bool]:
            report = self._reports[number]
            rank = report.ending.rank
            return (
                report.is_good,
                not report.ending.signal,
                rank is None or results[rank] is not None,
            )

        number = min(sorted(self._reports), key=precedence)
        ending, name = self._reports[number].ending, self._nodes[number].name
        failure = ending.failure
        if ending.rank is not None:
            failure = f"{self._names[ending.rank]} {failure}"
        elif name:
            failure = f"{name}: {failure}"
        return replace(ending, failure=failure)
