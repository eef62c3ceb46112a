"""The launcher's process and its fork servers (``server``), as the bench's own process has it."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, cast

import psutil

from bench.files import ROOT, python_path
from bench.launch import interrupt, job_nodes, stragglers
from bench.launch.channel import Channel, LostError
from bench.launch.node_task import LauncherReply
from bench.plan.cell import Device

GRACE_S = 5.0
"""How long a process group may take to end after SIGTERM, before SIGKILL."""
LONGEST_TEMPORARY = 60
"""Longest path of the temporary folder that leaves room for the fork server's socket, whose limit
is 107 on Linux."""
START_TIMEOUT_S = 180.0
"""How long the launcher may take to import everything, on a slow disk."""
STORE_S = 30.0
"""How long the launcher's process may take to open the store of a trial."""


class LauncherError(RuntimeError):
    """The launcher's process could not be started."""


class LauncherProcess:
    """A launcher's process with its fork servers."""

    def __init__(self, device: Device, interface: str, code: Path = ROOT) -> None:
        self._device, self._interface, self._code = device, interface, code
        self.cold = False
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel
        self._loads: set[tuple[str, ...]] = set()
        """Sets of packages that it has loaded or was asked to load."""
        self._pending = 0
        """Answers that are due to that."""
        self._initialized_by = ""
        self._stderr: IO[bytes]
        self._mark = self._temporary = ""
        self.scratch = ""
        """See ``Node.scratch``."""

    def start(self, every: Iterable[tuple[str, ...]], *, cold: bool) -> None:
        """Start the process unless it runs, and have it load sets of packages unless it has."""
        if self._process is not None and (
            self._process.poll() is not None or not Path(self._temporary).is_dir()
        ):
            self.close()  # it was killed after the last trial, or its temporary folder was removed
        if self._process is None:
            self._begin(cold=cold)
        new: list[tuple[str, ...]] = []
        for packages in every:
            if packages not in self._loads:
                self._loads.add(packages)
                new.append(packages)
        if new:
            self._pending += 1
            with contextlib.suppress(LostError):  # waiting for the answer says why
                self._channel.send({"load": new})

    def _begin(self, *, cold: bool) -> None:
        self.cold, self._loads, self._pending, self._initialized_by = cold, {()}, 1, ""
        ours, theirs = Pipe()
        self._channel = Channel(ours)
        self._mark = uuid.uuid4().hex
        base = tempfile.gettempdir()
        # The launcher's process creates it, and removes it even if this process is killed.
        if len(base) > LONGEST_TEMPORARY:
            base = "/tmp"
        self._temporary = str(Path(base) / f"bench-{self._mark[:12]}")
        self.scratch = f"{self._temporary}-trial"
        command = [sys.executable, "-m", "bench.launch.server", str(theirs.fileno())]
        command.append("cold" if self.cold else "warm")
        # A pipe would fill up, since nobody reads it during a trial.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process runs
        place = None
        if self._code != ROOT:
            place = self._code  # which Python imports from before all others
        # Held, as an interrupt could leave a process whose pid is not known.
        with interrupt.held():
            self._process = subprocess.Popen(
                command,
                env={
                    **environment_of(self._device, self._interface, self._code),
                    stragglers.MARK: self._mark,
                    "TMPDIR": self._temporary,
                    "BENCH_TMPDIR": self._temporary,
                    "BENCH_SCRATCH": self.scratch,
                },
                cwd=place,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                start_new_session=True,
            )
            theirs.close()

    def ready(self) -> str:
        """Wait until the fork servers have loaded everything; what initialized CUDA, or nothing."""
        while self._pending:
            reply = self.wait(START_TIMEOUT_S)
            if reply is None or not reply.get("ready"):
                detail = self._last_words()
                self.close()
                raise LauncherError(
                    f"the launcher's process did not come up (limit {START_TIMEOUT_S:.0f} s): "
                    f"{detail}"
                )
            self._pending -= 1
            if not self._initialized_by:
                self._initialized_by = str(reply["initialized_by"])
        return self._initialized_by

    def ask(self, request: Mapping[str, object]) -> LauncherReply | None:
        """Hand over a trial; the first reply, as from ``wait``."""
        with contextlib.suppress(LostError):
            self._channel.send(request)
        return self.wait(STORE_S)

    def fileno(self) -> int:
        """A file that becomes readable when the process replies or ends."""
        return self._channel.fileno()

    def close(self) -> None:
        """End the launcher, the fork servers and every rank.

        SIGTERM first, SIGKILL after a grace period.
        """
        process = self._process
        if process is None:
            return

        def every() -> set[psutil.Process]:
            return stragglers.family(process.pid, self._mark)

        def others() -> set[psutil.Process]:
            return {p for p in stragglers.without_trackers(every()) if p.pid != process.pid}

        held: set[str] = set()
        try:
            held = stragglers.mapped(p.pid for p in every())
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
                self._channel.close()
                self._stderr.close()
                shutil.rmtree(self._temporary, ignore_errors=True)
                stragglers.remove(held)

    def wait(self, timeout_s: float) -> LauncherReply | None:
        """The launcher's next reply, or that it has ended (``died``); None after ``timeout_s``."""
        try:
            return cast("LauncherReply | None", self._channel.receive(timeout_s))
        except LostError:
            return {"died": True}

    def death(self) -> tuple[str, int]:
        """How the process died, and the signal that ended it or 0."""
        process = self._process
        assert process is not None, "start has started it"
        words = self._last_words()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        number = 0
        if process.returncode and process.returncode < 0:
            number = -process.returncode
        how = f"died: {words}"
        if number:
            how = f"was ended by {stragglers.name(number)}"
        return f"the launcher's process {how}", number

    def _last_words(self) -> str:
        """The last line that the launcher's process wrote to its standard error."""
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
        return "no message"


def environment_of(device: Device, interface: str, code: Path = ROOT) -> dict[str, str]:
    """The environment of the launcher and all ranks, which import the bench from ``code``."""
    environment = os.environ | {
        "PYTHONPATH": python_path(code),
        # torch.cuda.is_available() must not initialize CUDA in the fork server.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        # Never download a model or data set.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        # DeepSpeed imports torch.compile, which would keep a pool of idle compiler processes during
        # the measurement.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        # Cache files are pickles, and earlier trials would influence how a trial is compiled.
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO": "0",
    }
    # torch.load never reads a pickle that could run code, whatever a framework asks for.
    environment.setdefault("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment.setdefault("NCCL_SOCKET_IFNAME", interface)
    environment.pop(job_nodes.SECRET, None)
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
