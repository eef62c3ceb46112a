"""Hosts without a cluster: network namespaces of this machine, joined by links of any rate, under a real Slurm.

Needs root, and Debian's packages iproute2, slurm-wlm and munge. Each host is a network namespace with the interface
eth0 and an address, a name and cores of its own. All are on a bridge in one more namespace, so nothing of the
machine's own network is touched. ``tc tbf`` limits what each host sends. Everything is removed at the end; of a program
that calls ``alone`` first, even if it is killed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.conftest import until

SLURM = """
ClusterName=rig
SlurmctldHost={control}({head})
SlurmctldPort=6817
SlurmdPort=6818
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
UP_S = 300.0
"""How long Slurm may take to come up, on a busy machine."""
PROGRAMS = ("ip", "tc", "unshare", "nsenter", "taskset", "munged", "slurmctld", "slurmd", "srun")
PRIVATE = "/run"
"""Holds the names of network namespaces, and what ``alone`` keeps to itself."""


def alone(*command: str) -> None:
    """Start the Python program anew, in a process namespace and with mounts of its own.

    However it ends, the kernel then ends all that it has started, and its hosts, temporary files and shared memory are
    gone.
    """
    _exit_unless_complete()
    if os.getpid() != 1:
        apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.execvp(apart[0], [*apart, sys.executable, *command])
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # nothing else would end process 1
    for folder in (PRIVATE, "/dev/shm"):
        _run(["mount", "-t", "tmpfs", "none", folder])
    tempfile.tempdir = os.environ["TMPDIR"] = PRIVATE


def _exit_unless_complete() -> None:
    if lacking := [name for name in PROGRAMS if not shutil.which(name)] + ["root"] * (
        os.geteuid() != 0
    ):
        sys.exit(
            f"tests.hosts: needs {', '.join(lacking)}; as root: apt-get install slurm-wlm munge iproute2"
        )


class Rig:
    """The hosts. Use ``rig`` to make them."""

    def __init__(self, folder: Path, num_hosts: int) -> None:
        self.folder = folder
        self.hosts = [f"host{letter}" for letter in "abcdefgh"[:num_hosts]]
        self._mark = f"rig{os.getpid()}"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def namespace(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def cores(self, host: str) -> list[int]:
        """The cores of a host, which no other one has while there are enough of them."""
        every = sorted(os.sched_getaffinity(0))
        share = max(1, len(every) // len(self.hosts))
        first = self.hosts.index(host) * share % len(every)
        return every[first : first + share]

    def inside(self, host: str, *command: str) -> list[str]:
        """The command on a host. (``ip netns exec`` would mount /sys anew, and slurmd could not find its cgroups.)"""
        entered = ["nsenter", f"--net=/run/netns/{self.namespace(host)}", "unshare", "--uts"]
        return [*entered, "sh", "-c", f'hostname {host}; exec "$@"', "sh", *command]

    def srun(self, num_hosts: int, *command: str) -> list[str]:
        """One process of the command on each of the first hosts, by Slurm."""
        asked = [
            f"--nodes={num_hosts}",
            "--ntasks-per-node=1",
            "--no-kill",
            "--kill-on-bad-exit=0",
            "--wait=0",
            "--quit-on-interrupt",
            "--label",
        ]
        return self.inside(self.hosts[0], "srun", *asked, *command)

    @property
    def environment(self) -> dict[str, str]:
        """Variables of whoever calls ``srun``."""
        head = self.address(self.hosts[0])
        return {
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "MASTER_ADDR": head,
            "BENCH_SECRET": secrets.token_hex(16),
        }

    def limit(self, rate: str) -> None:
        """Limit what each host sends, such as ``200mbit``; empty for no limit."""
        for host in self.hosts:
            netns = ["ip", "netns", "exec", self.namespace(host), "tc", "qdisc"]
            subprocess.run([*netns, "del", "dev", "eth0", "root"], check=False, capture_output=True)
            if rate:
                limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "200ms"]
                _run([*netns, "add", "dev", "eth0", *limit])

    def link(self, host: str, state: str) -> None:
        """Take the link of a host ``down`` or ``up``."""
        _run(["ip", "-n", self.namespace(host), "link", "set", "eth0", state])

    def daemon(self, name: str, host: str = "") -> subprocess.Popen[bytes]:
        """The process of slurmctld, munged, or of the slurmd of a host."""
        return next(
            daemon
            for daemon in self._daemons
            if daemon.poll() is None and {name, host} <= {*daemon.args, ""}
        )

    def start(self) -> None:
        switch = self.namespace("switch")
        _run(["ip", "netns", "add", switch])
        _run(["ip", "-n", switch, "link", "add", "bridge", "type", "bridge"])
        _run(["ip", "-n", switch, "link", "set", "bridge", "up"])
        for host in self.hosts:
            namespace = self.namespace(host)
            _run(["ip", "netns", "add", namespace])
            peer = ["type", "veth", "peer", "name", host, "netns", switch]
            _run(["ip", "-n", namespace, "link", "add", "eth0", *peer])
            _run(
                ["ip", "-n", namespace, "address", "add", f"{self.address(host)}/24", "dev", "eth0"]
            )
            for device in ("lo", "eth0"):
                _run(["ip", "-n", namespace, "link", "set", device, "up"])
            _run(["ip", "-n", switch, "link", "set", host, "master", "bridge", "up"])
        self._start_slurm()

    def _start_slurm(self) -> None:
        folder, first = self.folder, self.hosts[0]
        (folder / "state").mkdir()
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        each = f"CPUs={len(self.cores(first))} RealMemory=1000 State=UNKNOWN"
        nodes = [
            f"NodeName={h} NodeHostname={h} NodeAddr={self.address(h)} {each}" for h in self.hosts
        ]
        text = SLURM.format(
            control=first, head=self.address(first), folder=folder, nodes="\n".join(nodes)
        )
        (folder / "slurm.conf").write_text(text)
        names = ("key-file", "socket", "pid-file", "log-file", "seed-file")
        paths = [
            f"--{name}={folder}/munge.{name.split('-')[0].replace('socket', 'sock')}"
            for name in names
        ]
        self._start("munged", "--foreground", "--force", *paths)
        until((folder / "munge.sock").exists, UP_S)
        self._start(*self.inside(first, "slurmctld", "-D", "-f", str(folder / "slurm.conf")))
        for host in self.hosts:
            self.start_slurmd(host)
        self.ready()

    def ready(self) -> None:
        """Wait until Slurm could start a job on all hosts."""
        until(lambda: self._states() == ["idle"] * len(self.hosts), UP_S)

    def start_slurmd(self, host: str) -> None:
        pinned = ["taskset", "--cpu-list", ",".join(map(str, self.cores(host)))]
        self._start(
            *self.inside(
                host, *pinned, "slurmd", "-D", "-N", host, "-f", str(self.folder / "slurm.conf")
            )
        )

    def _start(self, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
            self._daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))

    def _states(self) -> list[str]:
        """The state of each host, as Slurm has it."""
        command = self.inside(self.hosts[0], "sinfo", "--noheader", "--Node", "--format=%T")
        environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        found = subprocess.run(
            command, capture_output=True, text=True, check=False, env=environment
        )
        return found.stdout.split()

    def stop(self) -> None:
        """End Slurm and everything that runs on the hosts, and remove them."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        for host in (*self.hosts, "switch"):
            name = self.namespace(host)
            pids = subprocess.run(
                ["ip", "netns", "pids", name], capture_output=True, text=True, check=False
            ).stdout
            for pid in map(int, pids.split()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _run(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def rig(num_hosts: int) -> Iterator[Rig]:
    """Hosts under Slurm, which are gone afterwards, whatever happens."""
    _exit_unless_complete()
    folder = Path(tempfile.mkdtemp(prefix="rig-"))
    made = Rig(folder, num_hosts)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)
