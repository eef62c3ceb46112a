"""A process group for one trial or audit: torch elastic on a free loopback port, watched, always cleaned up.

Two processes share the work. The bench's own process stays small and asleep: it holds a ``Launcher``. The launcher's
process (``python -m bench.launch``) imports torch, runs torch elastic's agent, and keeps a fork server whose children
start with every framework imported. All of it is one process group of the operating system, so ending a trial means
ending that group, whatever state it is in.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any, ClassVar, Protocol, Self

from bench.backends.base import registry
from bench.cell import Device, Status

GRACE_S = 5.0
"""How long a process group may take to end after SIGTERM, before SIGKILL."""
MONITOR_INTERVAL_S = 0.25
"""How often torch elastic's agent looks at its ranks. Each look takes a core that may be measured on."""
START_TIMEOUT_S = 180.0
"""How long the launcher may take to import everything, on a slow disk."""


@dataclass(kw_only=True)
class Outcome:
    """How a trial ended."""

    status: Status
    reason: str
    ranks: list[dict[str, Any]]
    """What each rank wrote, rank 0 first; empty unless all of them succeeded."""
    wall_s: float
    traceback: str = ""


class Task(Protocol):
    """What a process group is started for."""

    entry: ClassVar[str]
    """``module:function``, called on every rank with the task's JSON; see ``bench.rank.live``."""
    folder: str
    """Where each rank writes ``rank<r>.json``, and torch elastic its logs."""

    @property
    def backend(self) -> str:
        """Name of the backend, whose packages the fork server imports."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""

    def to_json(self) -> str:
        """One line."""


class LauncherError(RuntimeError):
    """The launcher's process could not be started."""


class Launcher:
    """Starts trials, one at a time. Use as a context manager; ``close`` leaves no process behind.

    Backends that need different packages get different fork servers, so that no trial runs in a process into which
    another framework was imported: some replace functions of torch when they are.
    """

    def __init__(self, device: Device, *, cold: bool = False) -> None:
        self._device = device
        self._cold = cold
        self._servers: dict[tuple[str, ...], _Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, task: Task, timeout_s: float) -> Outcome:
        """Run one trial to its end, or end it after ``timeout_s``. The calling thread sleeps meanwhile.

        Raises LauncherError if the launcher's process does not come up.
        """
        packages = () if self._cold else registry()[task.backend].requires
        server = self._servers.setdefault(packages, _Server(self._device, packages, cold=self._cold))
        return server.run(task, timeout_s)

    def renew(self) -> None:
        """End every process, so that the next trials are forked from new ones.

        What is forked from one process has its libraries at the same addresses, which can move times by per cents
        (Mytkowicz et al., "Producing Wrong Data Without Doing Anything Obviously Wrong!", ASPLOS 2009); trials that are
        to vary by that too need several.
        """
        self.close()

    def close(self) -> None:
        """End every process; SIGTERM first, SIGKILL after a grace period."""
        with contextlib.ExitStack() as every:  # one that fails, or is interrupted, keeps no other from ending
            for server in self._servers.values():
                every.callback(server.close)


class _Server:
    """The launcher's process with one fork server, which has imported some packages."""

    def __init__(self, device: Device, packages: tuple[str, ...], *, cold: bool) -> None:
        self._device = device
        self._packages = packages
        self._cold = cold
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        self._stderr: IO[bytes]

    def start(self) -> None:
        """Start the launcher's process and wait until its fork server has imported everything.

        ``run`` does this itself when there is none. Raises LauncherError if it does not come up.
        """
        requests_read, self._requests = os.pipe()
        self._replies, replies_write = os.pipe()
        command = [sys.executable, "-m", "bench.launch", str(requests_read), str(replies_write)]
        command.append("cold" if self._cold else "warm")
        # A pipe would fill up, since nobody reads it meanwhile.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            command,
            env=_environment(self._device, self._packages),
            pass_fds=(requests_read, replies_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,
        )
        os.close(requests_read)
        os.close(replies_write)
        if self._wait(START_TIMEOUT_S) != {"ready": True}:
            detail = self._last_words()
            self.close()
            raise LauncherError(f"the launcher's process did not come up (limit {START_TIMEOUT_S:.0f} s): {detail}")

    def run(self, task: Task, timeout_s: float) -> Outcome:
        """Run one trial to its end, or end it after ``timeout_s``. The calling thread sleeps meanwhile."""
        if self._process is None:
            self.start()
        folder = Path(task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        reply: dict[str, Any] | None = {"failure": "the launcher's process has ended"}
        with contextlib.suppress(BrokenPipeError):
            request = [task.entry, task.world_size, task.folder, task.to_json()]
            os.write(self._requests, (json.dumps(request) + "\n").encode())
            reply = self._wait(timeout_s)
        wall_s = time.perf_counter() - started
        if reply is None:
            self.close()
            late = f"not finished after {timeout_s:g} s; raise --timeout"
            reply = {"failure": late, "timeout": True}
        elif reply.get("died"):
            reply = {"failure": f"the launcher's process died: {self._last_words()}"}
            self.close()
        return _outcome(folder, task.world_size, reply, wall_s)

    def close(self) -> None:
        """End the launcher, the fork server and every rank; SIGTERM first, SIGKILL after a grace period."""
        process, self._process = self._process, None
        if process is None:
            return
        os.close(self._requests)
        os.close(self._replies)
        try:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:  # also when a second Ctrl-C ends the waiting
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._stderr.close()
        _wait_for_group(process.pid)

    def _wait(self, timeout_s: float) -> dict[str, Any] | None:
        """The launcher's next reply; None after ``timeout_s``; ``{"died": True}`` if it is gone."""
        deadline = time.monotonic() + timeout_s
        received = b""
        while not received.endswith(b"\n"):
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            piece = os.read(self._replies, 65536)
            if not piece:
                return {"died": True}
            received += piece
        reply: dict[str, Any] = json.loads(received)
        return reply

    def _last_words(self) -> str:
        """The last line that the launcher's process wrote to its standard error."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


def _wait_for_group(group: int) -> None:
    """Wait until no process of the group is left, whose memory the next trial would miss; not for ever."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)


def _environment(device: Device, packages: tuple[str, ...]) -> dict[str, str]:
    """The environment of the launcher and all ranks."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        # bench must be importable in children when run from a checkout.
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        # torch.cuda.is_available() must not initialize CUDA in the fork server.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Read by bench.preload in the fork server.
        "BENCH_PRELOAD": ",".join(packages),
        # No model or data set is ever downloaded.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # DeepSpeed imports torch.compile, which would keep a pool of idle compilers beside what is measured.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device is Device.CPU:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return environment


def _outcome(folder: Path, world_size: int, reply: dict[str, Any], wall_s: float) -> Outcome:
    """Judge a trial by what its ranks wrote; the launcher's word counts only for ranks that wrote nothing.

    A rank that crashes after it handed over its result (gloo is known to abort at exit) spoils nothing.
    """
    results = []
    for rank in range(world_size):
        path = folder / f"rank{rank}.json"
        results.append(json.loads(path.read_text()) if path.exists() else None)
    done = [result for result in results if result is not None and result["status"] == Status.OK]
    if len(done) == world_size:
        return Outcome(status=Status.OK, reason="", ranks=done, wall_s=wall_s)
    if results[reply.get("rank", 0)] is None and "rank" in reply:
        # The agent saw this rank die first, and it left no word: its peers' lost connections are only the sequel.
        return Outcome(status=Status.CRASHED, reason=reply["failure"], ranks=[], wall_s=wall_s)
    failed = [(rank, result) for rank, result in enumerate(results) if result is not None and result not in done]
    if not failed:
        status = Status.TIMEOUT if reply.get("timeout") else Status.CRASHED
        return Outcome(status=status, reason=reply["failure"], ranks=[], wall_s=wall_s)
    order = [Status.OOM, Status.UNSUPPORTED, Status.CRASHED]
    rank, result = min(failed, key=lambda item: (order.index(Status(item[1]["status"])), item[1]["time"]))
    return Outcome(
        status=Status(result["status"]),
        reason=f"rank {rank}: {result['reason']}",
        ranks=[],
        wall_s=wall_s,
        traceback=result["traceback"],
    )


def serve(requests: int, replies: int, *, cold: bool) -> None:
    """The launcher's process: trials as JSON lines from one pipe, one JSON line of answer each to the other."""
    import multiprocessing

    # Imports torch for the agent itself.
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    start_method = "spawn" if cold else "forkserver"
    if not cold:
        multiprocessing.set_forkserver_preload(["bench.preload"])
    context: Any = multiprocessing.get_context(start_method)
    first = context.Process(target=_nothing)
    first.start()
    first.join()
    helpers = _group_members()
    _reply(replies, {"ready": True})
    with os.fdopen(requests) as lines:
        for line in lines:
            entry, world_size, folder, payload = json.loads(line)
            module, _, function = entry.partition(":")
            rank_main = getattr(importlib.import_module(module), function)
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=world_size,
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                max_restarts=0,
                monitor_interval=MONITOR_INTERVAL_S,
                start_method=start_method,
                logs_specs=DefaultLogsSpecs(log_dir=folder, redirects=Std.ALL),
            )
            answer = _supervise(elastic_launch(config, rank_main), payload)
            _end_stragglers(helpers)
            _reply(replies, answer)


def _supervise(launch: Callable[[str], Any], payload: str) -> dict[str, Any]:
    """Run torch elastic to its end; what failed, by rank and exit code or signal, from its structured error."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        launch(payload)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0:
            name = signal.Signals(-failure.exitcode).name
            return {"failure": f"rank {rank} was ended by {name}", "rank": rank}
        return {"failure": f"rank {rank} ended with exit code {failure.exitcode}", "rank": rank}
    except Exception as error:
        return {"failure": f"torch elastic: {type(error).__name__}: {error}"}
    return {"failure": "a rank ended without a result"}


def _nothing() -> None:
    """Makes multiprocessing start its helpers, and the fork server import."""


def _end_stragglers(helpers: set[int]) -> None:
    """Kill what the ranks left running (torch elastic ends only the ranks themselves), and wait until it is gone."""
    deadline = time.monotonic() + GRACE_S
    while (stragglers := _group_members() - helpers) and time.monotonic() < deadline:
        for straggler in stragglers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(straggler, signal.SIGKILL)
        time.sleep(0.01)


def _group_members() -> set[int]:
    """The live processes of this process group. Zombies hold nothing, and may wait long for whoever inherited them."""
    members, group = set(), os.getpgrp()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(ProcessLookupError, FileNotFoundError, PermissionError):
            state, _, of_group = path.read_text().rpartition(")")[2].split()[:3]  # after the name: proc(5)
            if int(of_group) == group and state not in "ZX":
                members.add(int(path.parent.name))
    return members


def _reply(replies: int, answer: dict[str, Any]) -> None:
    os.write(replies, (json.dumps(answer) + "\n").encode())


def _end_quietly(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end_quietly)
    serve(int(sys.argv[1]), int(sys.argv[2]), cold=sys.argv[3] == "cold")
