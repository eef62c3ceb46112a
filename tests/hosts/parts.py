"""What is tried on the hosts of a rig: runs that have to be good, faults, interrupts, and jobs that cannot start."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from bench.judge.loading import load
from bench.judge.tables import rows_of
from bench.launch.job_nodes import SECRET
from bench.plan.cell import Status
from bench.plan.matrix import FOLDER
from bench.run.journal import JOURNAL, MANIFEST, Journal, read_document
from tests.conftest import ROOT, until
from tests.faults.leaks import Leaks
from tests.hosts.rig import Rig, rig

SCRIPT = ROOT / "docs" / "hosts.sbatch"
RUN_S, END_S = 3600.0, 300.0
"""How long a run may take, and what ends by itself after it; generous, since the machine may be busy."""
FEW = (
    "--backend",
    "ddp-eager,ddp-deferred",
    "--model",
    "tiny",
    "--world-size",
    "2",
    "--ranks-per-node",
    "1",
)
SMALL = ("--accumulate", "3", "--micro-batch", "1")
"""For any world size: the global batch follows."""
INTERRUPTS = 20
SEED = 19
REPEATS = 12
"""Trials of each cell in a run that is interrupted; if that is too few, another run is begun."""


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the page, and whether it is as it must be."""

    cells: Sequence[str]
    good: bool


class Hosts:
    """Runs the bench on the hosts of a rig. Use ``hosts`` to make it."""

    def __init__(self, made: Rig, folder: Path, leaks: Leaks) -> None:
        self.rig, self.folder, self.leaks = made, folder, leaks
        self.matrix = folder / "smoke.toml"
        # Otherwise a rank alone on its host would have more threads, and other sums.
        self.matrix.write_text(f"threads = 1\n{(FOLDER / 'smoke.toml').read_text()}")
        self._environment = {
            **os.environ,
            **made.environment,
            **leaks.environment,
            "PYTHONPATH": str(ROOT),
        }

    def start(
        self, *arguments: str, num_hosts: int = 2, change: str = "true"
    ) -> subprocess.Popen[bytes]:
        """``bench run`` on the first hosts. ``change`` is done by the shell of host 1 before."""
        begin = ["sh", "-c", f'[ "$SLURM_NODEID" != 1 ] || {{ {change}; }}; exec "$@"', "sh"]
        command = self.rig.srun(num_hosts, *begin, sys.executable, "-m", "bench", "run", *arguments)
        with self.log.open("wb") as log:
            return subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, cwd=self.folder
            )

    def submit(self, *arguments: str) -> subprocess.Popen[bytes]:
        """docs/hosts.sbatch on the first two hosts; ends with the job."""
        options = ("--wait", "--gpus-per-node=0", f"--output={self.log}", str(SCRIPT))
        environment = {
            name: value
            for name, value in self._environment.items()
            if name not in {"MASTER_ADDR", SECRET}
        }
        return subprocess.Popen(
            self.rig.inside(self.rig.hosts[0], "sbatch", *options, *arguments),
            env=environment,
            stdout=subprocess.DEVNULL,
            cwd=self.folder,
        )

    def cancel(self) -> None:
        """End all jobs as Slurm does at their time limit."""
        command = self.rig.inside(self.rig.hosts[0], "scancel", "--user=root")
        subprocess.run(command, env=self._environment, check=True)

    def fresh(self, name: str, *options: str, **how: Any) -> subprocess.Popen[bytes]:
        """The smoke matrix into a new folder. No trial is ended for its time, since the machine may be busy."""
        limits = ("--timeout", "1800", "--inactivity", "600")
        return self.start(
            "--matrix", str(self.matrix), *limits, *options, "--out", str(self.folder / name), **how
        )

    def run(self, name: str, *options: str, **how: Any) -> tuple[int, Path]:
        """The exit status and the folder of a run to its end."""
        return self.fresh(name, *options, **how).wait(RUN_S), self.folder / name

    def resume(
        self,
        folder: Path,
        kept: bytes,
        start: Callable[..., subprocess.Popen[bytes]] | None = None,
    ) -> tuple[str, bool]:
        """Run what is left of a run; what came of it, and whether every trial is ok and none was lost."""
        status = (start or self.start)("--resume", str(folder)).wait(RUN_S)
        records = Journal(folder).read()
        latest = {(record["cell_id"], record["repeat"]): record["status"] for record in records}
        ok = Counter(
            (record["cell_id"], record["repeat"])
            for record in records
            if record["status"] == Status.OK
        )
        whole = (folder / JOURNAL).read_bytes().startswith(kept)
        good = status == 0 and whole and set(ok.values()) == {1} and len(ok) == len(latest)
        words = (
            f"{len(ok)} of {len(latest)} trials ok, each once"
            if good
            else f"{latest}, exit status {status}"
        )
        return f"resumed: {words}; {'nothing' if whole else 'something'} lost", good

    @property
    def log(self) -> Path:
        return self.folder / "log.txt"

    def messages(self, node: int) -> list[str]:
        """The messages of a node in the last run, without those that say whom it waits for or follows."""
        found = self.log.read_text(errors="replace").splitlines()
        return [
            line[3:]
            for line in found
            if line.startswith(f"{node}: bench: ")
            and not any(word in line for word in (": waiting for ", "leads"))
        ]

    def bench(self, node: int) -> psutil.Process | None:
        """The bench's own process on a node, if it runs."""
        for process in self.processes(node):
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:4] == ["-m", "bench", "run"]:
                    return process
        return None

    def processes(self, node: int) -> list[psutil.Process]:
        """The processes of runs on a node."""
        command = ["ip", "netns", "pids", self.rig.namespace(self.rig.hosts[node])]
        pids = set(
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        )
        return [process for process in self.leaks.processes() if str(process.pid) in pids]

    def signal(self, node: int, number: signal.Signals) -> None:
        """Send a signal to the bench's own process on a node."""
        if process := self.bench(node):
            process.send_signal(number)


@contextlib.contextmanager
def hosts(count: int, folder: Path) -> Iterator[Hosts]:
    """So many hosts, and a folder for their runs."""
    with rig(count) as made, Leaks(folder) as leaks:
        yield Hosts(made, folder, leaks)


def journal(folder: Path) -> bytes:
    path = folder / JOURNAL
    return path.read_bytes() if path.exists() else b""


def smoke(on: Hosts) -> Iterator[Row]:
    """Every backend that two ranks can run, one on each host."""
    status, folder = on.run("smoke", "--world-size", "2", "--ranks-per-node", "1")
    yield _trials("1 + 1 ranks, every backend", status, folder)


def four(on: Hosts) -> Iterator[Row]:
    """One rank on each of all hosts."""
    count = len(on.rig.hosts)
    spread = ("--world-size", str(count), "--ranks-per-node", "1", *SMALL)
    names = "ddp-eager,ddp-deferred,fsdp2-deferred,hsdp-deferred"
    status, folder = on.run("four", *spread, "--backend", names, num_hosts=count)
    yield _trials(f"{' + '.join('1' * count)} ranks: {names.replace(',', ', ')}", status, folder)


def _trials(what: str, status: int, folder: Path) -> Row:
    trials = rows_of(load(folder).tables.trials)
    bad = [trial for trial in trials if trial["status"] != Status.OK]
    found = [f"`{trial['backend']}` is {trial['status']}: {trial['reason']}" for trial in bad]
    others = ", the others have documented defects of a framework" * (bool(bad) and status == 0)
    words = f"{len(trials) - len(bad)} of {len(trials)} trials pass all gates{others}; exit status {status}"
    return Row((what, "; ".join((words, *dict.fromkeys(found)))), status == 0)


def bits(on: Hosts) -> Iterator[Row]:
    """The same cells with both ranks on one host, and with one on each."""
    names = ("ddp-eager", "ddp-deferred", "fsdp2-eager", "fsdp2-deferred", "deepspeed-zero2-eager")
    _, folder = on.run(
        "bits", "--world-size", "2", "--ranks-per-node", "1,2", "--backend", ",".join(names)
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for record in Journal(folder).read():
        if (
            record["status"] == Status.OK
            and not record["cell"]["twin"]
            and record["cell"]["backend"] in found
        ):
            found[record["cell"]["backend"]].append(record)
    for name, trials in found.items():
        facts = [
            (record["update"], record["time"]["losses"], record["collectives"]) for record in trials
        ]
        same = (
            [len(facts) == 2 and a == b for a, b in zip(facts[0], facts[-1], strict=True)]
            if facts
            else [False]
        )
        yield Row(
            (name, *("the same" if is_same else "not the same" for is_same in same)), all(same)
        )


def faults(on: Hosts) -> Iterator[Row]:
    """A run that is harmed in its third trial, and resumed once that is mended."""
    harms: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "kill -9 of the follower": (lambda: on.signal(1, signal.SIGKILL), lambda: None),
        "SIGSTOP of the follower, SIGCONT once the leader has ended": (
            lambda: on.signal(1, signal.SIGSTOP),
            lambda: on.signal(1, signal.SIGCONT),
        ),
        "its link is taken down": (
            lambda: on.rig.link("hostb", "down"),
            lambda: on.rig.link("hostb", "up"),
        ),
        "kill -9 of its slurmd": (
            lambda: on.rig.daemon("slurmd", "hostb").kill(),
            lambda: on.rig.start_slurmd("hostb"),
        ),
    }
    for number, (what, (harm, mend)) in enumerate(harms.items()):
        yield _harmed(on, f"fault{number}", what, harm, mend)


def _harmed(
    on: Hosts, name: str, what: str, harm: Callable[[], None], mend: Callable[[], None]
) -> Row:
    """Harm a run that trains, and resume it. It survives the end of slurmd, whose steps go on by themselves."""
    folder = on.folder / name
    process = on.fresh(name, *FEW, "--repeats", "2")

    def training() -> bool:
        return journal(folder).count(b"\n") >= 2 and any(folder.glob("scratch/*/rank*.beat"))

    until(lambda: training() or process.poll() is not None, RUN_S)
    assert process.poll() is None, f"{what}: the run ended before it was harmed"
    kept = journal(folder)
    harm()
    until(lambda: on.bench(0) is None, RUN_S)
    cut = "" if "link" not in what else f"{_nothing(_left(on, 1))} left on it while cut off; "
    mend()
    status = process.wait(RUN_S)
    left = on.leaks.left(END_S)
    on.rig.ready()
    lost = [record for record in Journal(folder).read() if record["status"] != Status.OK]
    reasons = [f"`{record['status']}`: {record['reason']}" for record in lost[:1]] or [
        "no trial was lost"
    ]
    resumed, good = on.resume(folder, kept)
    words = f"{reasons[0]}; exit status {status}; {cut}{_nothing(left)} left on any host; {resumed}"
    named = all(
        record["status"] == Status.INTERRUPTED and "node 1 (hostb)" in record["reason"]
        for record in lost
    )
    return Row((what, words), good and bool(lost) != ("slurmd" in what) and named and not left)


def _left(on: Hosts, node: int) -> list[str]:
    """What still runs on a node, which gets a while to end it."""
    with contextlib.suppress(TimeoutError):
        until(lambda: not on.processes(node), END_S)
    return [process.name() for process in on.processes(node)]


def _nothing(left: Sequence[str]) -> str:
    return ", ".join(left) or "nothing"


def interrupts(on: Hosts) -> Iterator[Row]:
    """SIGINT or SIGTERM for node 0 at random moments, and --resume after each, until the runs are whole."""
    random_ = random.Random(SEED)
    signals: Counter[str] = Counter()
    statuses: Counter[int] = Counter()
    left, lost, resumed, reach = [], 0, [], 0.0
    folder, kept = on.folder / "interrupts0", b""
    while signals.total() < INTERRUPTS:
        begun = (folder / MANIFEST).exists()
        fresh = partial(on.fresh, folder.name, *FEW, "--repeats", str(REPEATS))
        process = on.start("--resume", str(folder)) if begun else fresh()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(random_.uniform(0, 1.5 * reach))
        reach = reach or _reach(folder)
        signals.update(_interrupt(on, process, random_.choice((signal.SIGINT, signal.SIGTERM))))
        statuses[process.wait(RUN_S)] += 1
        left += on.leaks.left(END_S)
        lost += not journal(folder).startswith(kept)
        kept = journal(folder)
        print(
            f"interrupts: {signals.total()} sent, {len(kept.splitlines())} trials kept", flush=True
        )
        if begun and read_document(folder).get("finished"):
            resumed.append(on.resume(folder, kept))
            folder, kept = on.folder / f"interrupts{len(resumed)}", b""
    if kept:
        resumed.append(on.resume(folder, kept))
    what = " and ".join(f"{count} {name}" for name, count in sorted(signals.items()))
    ended = ", ".join(f"{status} ({count} x)" for status, count in sorted(statuses.items()))
    words = f"{_nothing(left)} left on any host; {lost or 'no'} journals cut; exit statuses of srun: {ended}"
    yield Row((what, words), not lost and not left)
    for told, good in resumed:
        yield Row(("the run after them", told), good)


def batch(on: Hosts) -> Iterator[Row]:
    """The batch script of docs, as it is but without GPUs, ended by Slurm and resumed.

    MASTER_ADDR is not set: node 1 finds the head by its name in Slurm's list of nodes.
    """
    names = on.folder / "names"
    names.write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{on.rig.address(host)} {host}\n" for host in on.rig.hosts)
    )
    subprocess.run(["mount", "--bind", str(names), "/etc/hosts"], check=True)
    try:
        folder = on.folder / "batch"
        limits = ("--timeout", "1800", "--inactivity", "600")
        process = on.submit("--matrix", str(on.matrix), *limits, *FEW, "--out", str(folder))
        until(lambda: journal(folder).count(b"\n") >= 2 or process.poll() is not None, RUN_S)
        kept = journal(folder)
        on.cancel()
        ended = process.wait(END_S) != 0
        left = on.leaks.left(END_S)
        told, good = on.resume(folder, kept, on.submit)
        what = "`scancel` after two trials, and submitted again with `--resume`"
        words = f"{_nothing(left)} left on any host; {told}"
        yield Row((what, words), good and ended and not left)
    finally:
        subprocess.run(["umount", "/etc/hosts"], check=True)


def _reach(folder: Path) -> float:
    """Seconds until a new run has had two trials."""
    began = time.monotonic()
    until(lambda: journal(folder).count(b"\n") >= 2, RUN_S)
    return time.monotonic() - began


def _interrupt(on: Hosts, process: subprocess.Popen[bytes], number: signal.Signals) -> list[str]:
    """Send node 0 a signal as soon as it has begun; the signal's name, or nothing if the run had ended."""
    until(lambda: on.bench(0) is not None or process.poll() is not None, RUN_S)
    on.signal(0, number)
    return [number.name] if process.poll() is None else []


def refusals(on: Hosts) -> Iterator[Row]:
    """Jobs that cannot start: what both nodes print, and how they end."""
    fake, tree = on.folder / "fake", on.folder / "tree"
    (fake / "torch-2.0.0.dist-info").mkdir(parents=True)
    (fake / "torch-2.0.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.0.0\n"
    )
    shutil.copytree(ROOT / "bench", tree / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    with (tree / "bench" / "launch" / "job_nodes.py").open("a") as changed:
        changed.write("EXTRA = 1\n")
    cases = {
        "another torch": (
            f"export PYTHONPATH={fake}:{ROOT}",
            FEW,
            f"torch is 2.0.0, and {version('torch')} on node 0",
        ),
        "another bench": (f"export PYTHONPATH={tree}", FEW, "its code is "),
        "no secret": ("unset BENCH_SECRET", FEW, "node 1 of 2 did not join"),
        "another secret": (
            "export BENCH_SECRET=0123456789abcdef",
            FEW,
            "its BENCH_SECRET is not that of node 0",
        ),
        "no such interface": (
            "export GLOO_SOCKET_IFNAME=none7",
            FEW,
            "GLOO_SOCKET_IFNAME is 'none7'",
        ),
        "3 nodes": (
            "export SLURM_STEP_NUM_NODES=3 SLURM_STEP_NUM_TASKS=3",
            FEW,
            "it was started as one of 3 nodes",
        ),
        "nobody at the head's address": (
            "export MASTER_ADDR=10.77.0.99",
            FEW,
            "node 1 of 2 did not join",
        ),
        "ranks for 3 nodes": (
            "true",
            ("--world-size", "6", "--ranks-per-node", "2", *SMALL),
            "3 nodes",
        ),
    }
    for number, (what, (change, options, expected)) in enumerate(cases.items()):
        status, folder = on.run(f"refusal{number}", *options, change=change)
        told = [on.messages(node) for node in (0, 1)]
        left = on.leaks.left(END_S)
        good = (
            status == 2
            and len(told[0]) > 0
            and expected in told[0][-1]
            and not folder.exists()
            and not left
        )
        words = ["; ".join(f"`{line.removeprefix('bench: ')}`" for line in lines) for lines in told]
        yield Row(
            (
                what,
                words[0],
                "the same" if told[0] == told[1] else words[1],
                str(status),
                _nothing(left),
            ),
            good,
        )
