"""The ranks of one node: its launcher's process, and the part of a trial that they run.

The bench's own process stays small and mostly asleep: it holds a ``Node`` and looks now and then at
the ranks (``watchdog``). The launcher's process (``server``) imports torch, runs torch elastic's
agent, and keeps fork servers whose children start with every framework imported. Its descendants
can be told from other processes (``stragglers``), so a trial is ended by ending those, whatever
state they are in.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterable
from pathlib import Path

from bench.files import ROOT
from bench.launch import gpus, job_nodes, outcome
from bench.launch.node_task import LauncherReply, NodeReport, NodeTask
from bench.launch.outcome import Ending, RankJson
from bench.launch.process import LauncherProcess
from bench.launch.telemetry import Telemetry
from bench.launch.watchdog import Ranks, Sight
from bench.measure import apart, heartbeat
from bench.plan.cell import Device, Status

CLOCK_STEP_S = 0.01
"""By how much the clock of files may move against one that nobody sets, in seconds; what slews one
slews both."""


class ForkError(RuntimeError):
    """A forked process could not use the device."""


class Node:
    """This node.

    Between ``open`` and ``release`` it locks the visible GPUs; ``close`` leaves no process behind.
    """

    lost = ""

    def __init__(
        self, address: str = job_nodes.LOOPBACK, name: str = "", code: Path = ROOT
    ) -> None:
        self.address, self.name, self._code = address, name, code
        self._device = Device.CPU
        self._telemetry: Telemetry | None = None
        self._interface = job_nodes.interface_of(address)
        self._server = LauncherProcess(self._device, self._interface, code)
        self._locks = contextlib.ExitStack()
        self._node_task: NodeTask
        self._ranks: Ranks
        self._answer: LauncherReply | None = None

    def open(self, device: Device) -> bool:
        """Lock the GPUs, if trials run on them; whether ranks can only start cold.

        One that runs other code is beside another node of this process, which has the lock.
        Raises InputError if another bench uses a GPU.
        """
        self._device, self._server = device, LauncherProcess(device, self._interface, self._code)
        self._telemetry = None
        visible: list[gpus.VisibleGpu] = []
        if device is Device.CUDA:
            self._telemetry, visible = Telemetry(), gpus.gpus()
        if self._code == ROOT:
            self._locks.enter_context(gpus.hold_gpus([gpu["uuid"] for gpu in visible]))
        # Torch counts MIG instances with CUDA instead of NVML, and a forked process cannot use CUDA
        # after that.
        return any("mig" in gpu for gpu in visible)

    def release(self) -> None:
        self._locks.close()

    def start(self, every: Iterable[tuple[str, ...]], *, cold: bool) -> None:
        """Start the launcher's process, unless it runs, and have it load these sets of packages."""
        self._server.start(every, cold=cold)

    def ready(self) -> None:
        """Wait until it has imported everything.

        Raises LauncherError if it does not start, and ForkError if an import initialized CUDA.
        """
        by = self._server.ready()
        if by and self._device is Device.CUDA:
            raise ForkError(
                f"importing {by} initializes CUDA here, and no forked process can use it then: "
                "from now on every trial starts from a new interpreter, as with --cold, which "
                "takes some seconds more"
            )

    @property
    def scratch(self) -> Path:
        """A folder for the trials of a follower, which does not exist yet.

        It is removed even if this process is killed.
        """
        return Path(self._server.scratch)

    def begin(self, node_task: NodeTask) -> int:
        """Start the ranks of this part; the port of the trial's store."""
        folder = Path(node_task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*folder.glob("rank*"), *folder.rglob("*.log")):  # files of an earlier trial
            stale.unlink()
        if self._telemetry:
            self._telemetry.start()
        self._node_task, self._ranks, self._answer = node_task, Ranks(folder, node_task.ranks), None
        self._kills, self._began = outcome.counters(), time.monotonic()
        self._clock_offset = time.time() - time.monotonic()
        reply = self._server.ask(dataclasses.asdict(node_task))
        if reply is None:
            reply = {"died": True}
        if "port" not in reply:
            self._answer = reply
        return reply.get("port", 0)

    def fileno(self) -> int:
        """A file that becomes readable when the ranks have ended."""
        return self._server.fileno()

    def look(self) -> tuple[Sight, NodeReport | None]:
        """What is seen of the ranks, and their report once they have ended by themselves."""
        if self._answer is None:
            self._answer = self._server.wait(0.0)
        sight, report = self._ranks.look(), None
        if self._answer is not None:
            report = self._report(self._answer)
        return sight, report

    def end(self, *, dump: bool) -> NodeReport:
        """End the ranks now, after they have dumped their stacks if asked to."""
        if dump:
            self._ranks.dump()
        self._server.close()
        return self._report({"failure": ""})

    def _report(self, answer: LauncherReply) -> NodeReport:
        """The report of the ranks, after ending what has to end with them."""
        node_task, folder = self._node_task, self._ranks.folder
        rank = answer.get("rank")
        failure, number = answer.get("failure", ""), answer.get("signal", 0)
        if answer.get("died"):
            failure, number = self._server.death()
        if answer.get("died") or answer.get("spent"):
            self._server.close()
        last_lines: list[str] = []
        if rank is not None:
            last_lines = outcome.last_lines(folder, rank - node_task.ranks.start)
        ending = Ending(
            failure=failure,
            rank=rank,
            signal=number,
            killed_for_memory=outcome.moved(self._kills, outcome.counters()),
            last_lines=last_lines,
        )
        recorded, recording = None, None
        if self._telemetry is not None:
            recorded = self._telemetry.stop()
        if recorded is not None:
            recording = dict(recorded)
        return NodeReport(
            results=[self._result(rank) for rank in node_task.ranks],
            ending=ending,
            log_bytes=self._ranks.log_bytes(),
            died_early=bool(answer.get("died")) and not any(folder.glob("rank*.beat")),
            recording=recording,
        )

    def _result(self, rank: int) -> RankJson | None:
        """What a rank wrote.

        The time of a failure counts from the begin of the trial: nodes have different clocks.
        """
        folder = self._ranks.folder
        result = outcome.read(folder / f"rank{rank}.json")
        if result is None:
            return None
        if result["status"] != Status.OK:
            result["time"] -= self._began
        elif why := apart.complete(folder, rank, result):
            return outcome.crash(why)
        elif isinstance(timed := result.get("time"), dict) and not self._clock_was_set():
            timed["observed_span_s"] = heartbeat.observed_span(folder, rank)
        return result

    def _clock_was_set(self) -> bool:
        """Whether somebody has set the clock since the trial began."""
        return abs(time.time() - time.monotonic() - self._clock_offset) > CLOCK_STEP_S

    def close(self) -> None:
        """End every process; SIGTERM first, SIGKILL after a grace period."""
        with contextlib.ExitStack() as every:  # all are closed, even if one fails or is interrupted
            if self._telemetry:
                every.callback(self._telemetry.stop)
            every.callback(self._server.close)
