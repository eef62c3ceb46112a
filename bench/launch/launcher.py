"""Runs a process group for one trial or audit under torch elastic, watches it and always cleans up.

Two processes share the work. The bench's own process stays small and mostly asleep: it holds a ``Launcher`` and checks
now and then that the ranks make progress (``watchdog``). The launcher's process (``server``) imports torch, runs torch
elastic's agent, and keeps a fork server whose children start with every framework imported. Its descendants can be told
from other processes (``stragglers``), so a trial is ended by ending those, whatever state they are in.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, Self

import psutil

from bench.backends.base import registry
from bench.launch import gpus, interrupt, outcome, stragglers
from bench.launch.outcome import Ending, Outcome, judge, written
from bench.launch.watchdog import EndReason, Watch
from bench.plan.cell import Device
from bench.plan.task import Task

GRACE_S = 5.0
"""How long a process group may take to end after SIGTERM, before SIGKILL."""
LONGEST_TEMPORARY = 60
"""Longest path of the temporary folder that leaves room for the fork server's socket, whose limit is 107 on Linux."""
START_TIMEOUT_S = 180.0
"""How long the launcher may take to import everything, on a slow disk."""


class LauncherError(RuntimeError):
    """The launcher's process could not be started."""


class Launcher:
    """Runs trials, one at a time. Use as a context manager; ``close`` leaves no process behind.

    As a context it locks the visible GPUs against other benches, and raises InputError if another one uses them.

    Backends that need different packages get different fork servers, so that no trial runs in a process that imported
    another framework: some replace functions of torch on import.
    """

    def __init__(self, device: Device, *, cold: bool = False) -> None:
        self._device = device
        self._cold = cold
        self._servers: dict[tuple[str, ...], _Server] = {}
        self._held = contextlib.ExitStack()

    def __enter__(self) -> Self:
        visible = gpus.gpus() if self._device is Device.CUDA else []
        # Torch counts MIG instances with CUDA instead of NVML, and a forked process cannot use CUDA after that.
        self._cold = self._cold or any("mig" in gpu for gpu in visible)
        self._held.enter_context(gpus.hold_gpus([gpu["uuid"] for gpu in visible]))
        return self

    def __exit__(self, *exc: object) -> None:
        with self._held:
            self.close()

    def run(self, task: Task, timeout_s: float, inactivity_s: float = 0.0) -> Outcome:
        """Run one trial to its end, or end it after ``timeout_s``, or after ``inactivity_s`` without progress.

        The calling thread sleeps meanwhile. Raises LauncherError if the launcher's process does not start.

        Ranks start cold wherever a forked process cannot use the device; the outcome says so.
        """
        packages = () if self._cold else registry([task.backend])[task.backend].requires
        server = self._servers.setdefault(packages, _Server(self._device, packages, cold=self._cold))
        try:
            return replace(server.run(task, timeout_s, inactivity_s), cold=self._cold)
        except _ForkError as error:
            self._cold = True
            print(f"bench: {error}", file=sys.stderr)
            self.close()
            self._servers.clear()  # all of them: trials that are compared must start the same way
            return self.run(task, timeout_s, inactivity_s)

    def renew(self) -> None:
        """End every process, so that the next trials are forked from new ones.

        All children of one process have their libraries at the same addresses, which can shift times by several per
        cent (Mytkowicz et al., "Producing Wrong Data Without Doing Anything Obviously Wrong!", ASPLOS 2009). Several
        fork servers let the trials sample that variation.
        """
        self.close()

    def close(self) -> None:
        """End every process; SIGTERM first, SIGKILL after a grace period."""
        with contextlib.ExitStack() as every:  # all are closed, even if one fails or is interrupted
            for server in self._servers.values():
                every.callback(server.close)


class _ForkError(RuntimeError):
    """A forked process could not use the device."""


class _Server:
    """A launcher's process with its fork server, which imports the given packages."""

    def __init__(self, device: Device, packages: tuple[str, ...], *, cold: bool) -> None:
        self._device = device
        self._packages = packages
        self._cold = cold
        self._process: subprocess.Popen[bytes] | None = None
        self._requests = self._replies = -1
        self._stderr: IO[bytes]
        self._mark = self._temporary = ""

    def start(self) -> None:
        """Start the launcher's process and wait until its fork server has imported everything.

        ``run`` calls this when needed. Raises LauncherError if the process does not start, and _ForkError if an import
        initialized CUDA.
        """
        requests_read, self._requests = os.pipe()
        self._replies, replies_write = os.pipe()
        self._mark = uuid.uuid4().hex
        base = tempfile.gettempdir()
        # The launcher's process creates it, and removes it even if this process is killed.
        self._temporary = str(Path(base if len(base) <= LONGEST_TEMPORARY else "/tmp") / f"bench-{self._mark[:12]}")
        command = [sys.executable, "-m", "bench.launch.server", str(requests_read), str(replies_write)]
        command.append("cold" if self._cold else "warm")
        # A pipe would fill up, since nobody reads it during a trial.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        with interrupt.held():  # otherwise an interrupt could leave a process whose pid is not known
            self._process = subprocess.Popen(
                command,
                env=_environment(self._device, self._packages)
                | {stragglers.MARK: self._mark, "TMPDIR": self._temporary, "BENCH_TMPDIR": self._temporary},
                pass_fds=(requests_read, replies_write),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
            )
            os.close(requests_read)
            os.close(replies_write)
        reply = self._wait(START_TIMEOUT_S) or {}
        if not reply.get("ready"):
            detail = self._last_words()
            self.close()
            raise LauncherError(f"the launcher's process did not come up (limit {START_TIMEOUT_S:.0f} s): {detail}")
        if reply["initialized_by"] and self._device is Device.CUDA:
            self.close()
            raise _ForkError(
                f"importing {reply['initialized_by']} initializes CUDA here, and no forked process can use it then: "
                "from now on every trial starts from a new interpreter, as with --cold, which takes some seconds more"
            )

    def run(self, task: Task, timeout_s: float, inactivity_s: float, *, again: bool = True) -> Outcome:
        """Run one trial as ``Launcher.run`` does.

        With ``again``, retry once if the launcher's process died before any rank started.
        """
        if self._process is not None and (self._process.poll() is not None or not Path(self._temporary).is_dir()):
            self.close()  # it was killed after the last trial, or its temporary folder was removed
        if self._process is None:
            self.start()
        folder = Path(task.folder)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("rank*"):  # files of an earlier trial
            stale.unlink()
        kills = outcome.counters()
        started = time.perf_counter()
        watch = Watch(folder, task.num_processes, timeout_s, inactivity_s)
        found: dict[str, Any] | EndReason = {"died": True}
        with contextlib.suppress(BrokenPipeError):
            request = json.dumps([task.entry, task.num_processes, task.folder, task.to_json()]) + "\n"
            with os.fdopen(os.dup(self._requests), "wb") as pipe:
                pipe.write(request.encode())
            found = self._watch(watch)
        wall_s = time.perf_counter() - started
        heard = None
        if isinstance(found, EndReason):
            heard = written(folder, task.num_processes)
            if found.dump:
                watch.dump()
            self.close()
            ending = Ending(failure=found.reason, status=found.status)
        elif found.get("died"):
            ending = self._launcher_death(kills)
            if again and not any(folder.glob("rank*.beat")):
                return self.run(task, timeout_s, inactivity_s, again=False)
        else:
            ending = Ending(
                failure=found["failure"],
                rank=found.get("rank"),
                signal=found.get("signal", 0),
                killed_for_memory=outcome.moved(kills, outcome.counters()),
            )
            if found["spent"]:
                self.close()
        if excess := watch.excessive_output():
            ending = Ending(failure=excess.reason, status=excess.status, void=True)
        return judge(folder, task.num_processes, ending, wall_s, heard)

    def close(self) -> None:
        """End the launcher, the fork server and every rank; SIGTERM first, SIGKILL after a grace period."""
        process = self._process
        if process is None:
            return

        def every() -> set[psutil.Process]:
            return stragglers.family(process.pid, self._mark)

        def others() -> set[psutil.Process]:
            return {one for one in stragglers.without_trackers(every()) if one.pid != process.pid}

        held: set[str] = set()
        try:
            held = stragglers.mapped(one.pid for one in every())
            stragglers.terminate(others())
            stragglers.wait(others, GRACE_S)
            stragglers.kill(others)  # while the launcher's process is alive to adopt orphans
            process.terminate()
            process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        finally:  # also after a second Ctrl-C, which ends the waiting; a third has to wait for this
            with interrupt.held():
                stragglers.kill(others)
                process.kill()
                process.wait()
                stragglers.wait(every, GRACE_S)
                stragglers.kill(every)
                self._process = None
                os.close(self._requests)
                os.close(self._replies)
                self._stderr.close()
                shutil.rmtree(self._temporary, ignore_errors=True)
                stragglers.remove(held)

    def _wait(self, timeout_s: float) -> dict[str, Any] | None:
        """The launcher's next reply; None after ``timeout_s``; ``{"died": True}`` if the launcher has ended."""
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

    def _watch(self, watch: Watch) -> dict[str, Any] | EndReason:
        """The launcher's reply, or the reason to end the trial early."""
        while True:
            reply = self._wait(watch.interval_s)
            found = reply if reply is not None else watch.look()
            if found is not None:
                return found

    def _launcher_death(self, kills: dict[str, int]) -> Ending:
        """How the launcher's process died. Ends all of its descendants."""
        process = self._process
        assert process is not None, "run has started it"
        words = self._last_words()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        number = -process.returncode if process.returncode and process.returncode < 0 else 0
        how = f"was ended by {stragglers.name(number)}" if number else f"died: {words}"
        self.close()
        return Ending(
            failure=f"the launcher's process {how}",
            signal=number,
            killed_for_memory=outcome.moved(kills, outcome.counters()),
        )

    def _last_words(self) -> str:
        """The last line that the launcher's process wrote to its standard error."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no message"


def _environment(device: Device, packages: tuple[str, ...]) -> dict[str, str]:
    """The environment of the launcher and all ranks."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    environment = os.environ | {
        # bench must be importable in children when run from a checkout.
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        # torch.cuda.is_available() must not initialize CUDA in the fork server.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Read by bench.launch.preload in the fork server.
        "BENCH_PRELOAD": ",".join(packages),
        # Never download a model or data set.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # DeepSpeed imports torch.compile, which would keep a pool of idle compiler processes during the measurement.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Cache files are pickles, and earlier trials would influence how a trial is compiled.
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
    }
    # torch.load never reads a pickle that could run code, whatever a framework asks for.
    environment.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    # The default is inside the temporary folder, which differs for every launcher.
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    environment.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    if device is Device.CPU:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    else:
        # Number GPUs as NVML does; CUDA's default order puts the fastest first.
        environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        environment["DS_ACCELERATOR"] = "cuda"  # by default DeepSpeed falls back to the CPU
    return environment
