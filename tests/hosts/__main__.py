"""``nox -s hosts``: runs the bench on two hosts of the rig at several rates, breaks it, and tells docs/hosts.md."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from bench.plan.cell import Status
from bench.run.journal import JOURNAL, Journal, read_manifest
from bench.run.links import PASSES, bus_rate
from tests.hosts.rig import Rig, rig, until

PAGE = Path(__file__).parents[2] / "docs" / "hosts.md"
HEADING = "## What was tried\n"
RATES = ("", "1gbit", "200mbit")
EVERY = ("--matrix", "smoke", "--world-size", "2", "--ranks-per-node", "1")
"""Every backend that two ranks can run, one on each host."""
TIMED = ("ddp-eager", "ddp-deferred", "fsdp2-eager", "fsdp2-deferred", "hsdp-eager", "hsdp-deferred")
SPREAD = ("--matrix", "smoke", "--world-size", "4", "--ranks-per-node", "2", "--batch", "8")
"""Two ranks on each host, which HSDP needs: it shards within a host and replicates across."""
RUN_S = 1800.0
WHERE = """`nox -s hosts` writes this section; last on {day}, on {cores} cores. It makes two network namespaces on one
machine, joined by a virtual link whose rate `tc tbf` limits, under a real Slurm, and trains the smoke matrix over gloo.
Both hosts share one kernel, so the load of one is not counted as foreign to the other. Nothing was run on several
machines, or over NCCL between hosts."""


class Hosts:
    """Runs the bench on the hosts of a rig."""

    def __init__(self, made: Rig, folder: Path) -> None:
        self.rig, self.folder = made, folder
        self._environment = {**os.environ, **made.environment, "OMP_NUM_THREADS": "1", "TMPDIR": "/tmp"}

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = self.rig.srun(2, sys.executable, "-m", "bench", "run", *arguments)
        return subprocess.Popen(command, env=self._environment)

    def run(self, name: str, *options: str) -> tuple[int, Path]:
        """The exit status and the folder of a run to its end."""
        folder = self.folder / name
        status = self.start(*options, "--out", str(folder)).wait(RUN_S)
        return status, folder

    def broken(self, name: str, harm: Callable[[], None], mend: Callable[[], None]) -> Iterator[str]:
        """A run to which harm is done in its third trial, and which is resumed after that is mended."""
        folder = self.folder / name
        options = ("--backend", "ddp-eager,ddp-deferred", "--repeats", "2")
        process = self.start(*EVERY, *options, "--out", str(folder))
        until(lambda: lines(folder) >= 2 or process.poll() is not None, RUN_S)
        kept = (folder / JOURNAL).read_bytes()
        harm()
        status = process.wait(RUN_S)
        left = [one for one in self.processes(1) if "slurm" not in one.name()]
        records = Journal(folder).read()
        lost = [one for one in records if one["status"] != Status.OK]
        yield (lost[0]["reason"] if lost else "no trial was lost") + f"; exit status {status}"
        yield f"{len(left)} processes left on the other host"
        mend()
        status = self.start("--resume", str(folder)).wait(RUN_S)
        latest = {(one["cell_id"], one["repeat"]): one["status"] for one in Journal(folder).read()}
        whole = (folder / JOURNAL).read_bytes().startswith(kept)
        good = all(one == Status.OK for one in latest.values())
        yield f"resumed: {'all' if good else 'not all'} {len(latest)} trials are ok, {'none' if whole else 'some'} lost"

    def processes(self, host: int) -> list[psutil.Process]:
        """The processes on a host."""
        command = ["ip", "netns", "pids", self.rig.namespace(self.rig.hosts[host])]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return [psutil.Process(int(pid)) for pid in found]

    def kill_follower(self) -> None:
        for one in self.processes(1):
            with contextlib.suppress(psutil.Error):
                if one.cmdline()[1:4] == ["-m", "bench", "run"]:
                    one.send_signal(signal.SIGKILL)


def lines(folder: Path) -> int:
    path = folder / JOURNAL
    return path.read_bytes().count(b"\n") if path.exists() else 0


def row(what: str, status: int, folder: Path) -> list[str]:
    """A run as a row of the page: trials, gates, bus bandwidth, and step times."""
    records, manifest = Journal(folder).read(), read_manifest(folder)
    good = sum(record["status"] == Status.OK for record in records)
    entry = next(one for one in manifest["matmul"] if one["num_nodes"] == 2)
    measured = bus_rate(entry["links"][-len(PASSES)], entry["world_size"]) / 1e6 if entry["links"] else None
    own = [record for record in records if not record["cell"]["twin"] and record["cell"]["ranks_per_node"] == 2]
    times = {record["cell"]["backend"]: _median(record) for record in own}
    return [
        what,
        f"{good} of {len(records)}",
        "all" if status == 0 else "not all",
        "-" if measured is None else f"{measured:.3g} MB/s",
        *(f"{times[name]:.3g}" if times.get(name) else "-" for name in TIMED),
    ]


def _median(record: dict[str, Any]) -> float | None:
    seconds = sorted((record.get("time") or {}).get("step_seconds", []))
    return seconds[len(seconds) // 2] if seconds else None


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def write(text: str) -> None:
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(f"{head}{HEADING}\n{text}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", nargs="*", default=RATES, help="of the links, as tc names them; '' for no limit")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))
    try:
        with rig(2) as made:
            hosts = Hosts(made, folder)
            rows = [row("1 + 1 ranks, every backend, unlimited", *hosts.run("every", *EVERY))]
            for rate in arguments.rates:
                made.limit(rate)
                name = rate or "unlimited"
                rows.append(row(f"2 + 2 ranks, {name}", *hosts.run(name, *SPREAD, "--backend", ",".join(TIMED))))
            made.limit("")
            faults = {
                "kill -9 of the other host's process": list(hosts.broken("kill", hosts.kill_follower, lambda: None)),
                "the other host's link is taken down": list(
                    hosts.broken("link", lambda: made.link("hostb", "down"), lambda: made.link("hostb", "up"))
                ),
            }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    day = datetime.datetime.now(datetime.UTC).date()
    write(
        f"{WHERE.format(day=day, cores=os.cpu_count())}\n\n"
        + table(["ranks and link", "trials ok", "gates", "all-reduce, bus", *(f"{n} s/step" for n in TIMED)], rows)
        + "\n\nOne trial of the smallest model each: do not cite these times.\n\n"
        + table(["in mid-run", "result"], [[name, "; ".join(found)] for name, found in faults.items()])
    )


if __name__ == "__main__":
    main()
