"""Runs of the bench on the smallest work there is, as a user starts them, marked so that what they leave is found."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plan.categories import HELD, PEAK, UNTRACKED
from bench.plan.cell import REFERENCE
from bench.run.journal import JOURNAL, MANIFEST, Journal, read_document
from tests.conftest import ROOT, Run
from tests.faults import backends
from tests.faults.leaks import Leaks

HANG_S = 8
"""Without an event for so long, a trial hangs."""
TIMEOUT_S = 25
MATRIX = f"""
device = "cpu"
threads = 1
repeats = {{repeats}}
timeout_s = {TIMEOUT_S}
inactivity_s = {HANG_S}
baseline = "reference"

[workload]
model = "micro"
sequence_length = 8
global_batch_size = 4

[training]
seed = {{seed}}
warmup_windows = 1
timed_windows = 2

[axes]
backend = {{backend}}
accumulate = [{{accumulate}}]
world_size = [{{world_size}}]
"""
MATRIX_RUN = ("run", "--matrix", "matrix.toml", "--out", "run")


@dataclass
class Place:
    """A folder in which a matrix of some backends is run. A context manager, at whose end nothing runs any more."""

    folder: Path
    leaks: Leaks
    environment: dict[str, str] = field(default_factory=dict)
    program: Sequence[str] = ("-m", "bench")
    """What Python is to run."""
    before: Sequence[str] = ()
    """The program that starts Python, if not this process itself."""

    def write(self, *names: str, **changes: int) -> None:
        """The matrix of these backends; the reference comes along."""
        values = {"repeats": 1, "seed": 0, "accumulate": 2, "world_size": 2} | changes
        (self.folder / "matrix.toml").write_text(
            MATRIX.format(backend=[REFERENCE, *names], **values)
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """``python -m bench`` with these arguments; what it prints goes to files, which no one has to empty."""
        bench = {"PYTHONPATH": str(ROOT), "BENCH_BACKENDS": backends.named()}
        environment = os.environ | bench | self.leaks.environment | self.environment
        with (self.folder / "out.txt").open("w") as out, (self.folder / "err.txt").open("w") as err:
            return subprocess.Popen(
                [*self.before, sys.executable, *self.program, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
            )

    def run(self, *arguments: str, timeout_s: float = 400) -> Run:
        """The same, to its end; without arguments, the matrix into the folder ``run``."""
        process = self.start(*(arguments or MATRIX_RUN))
        try:
            status = process.wait(timeout_s)
        finally:
            process.kill()
        done = subprocess.CompletedProcess(
            process.args, status, self.output("out"), self.output("err")
        )
        return Run(self.folder / "run", done)

    def output(self, which: str) -> str:
        """What the last process printed to ``out`` or ``err``."""
        return (self.folder / f"{which}.txt").read_text(errors="replace")

    @property
    def journal(self) -> bytes:
        """The journal's bytes; none if there is no journal yet."""
        path = self.folder / "run" / JOURNAL
        return path.read_bytes() if path.exists() else b""

    @property
    def is_finished(self) -> bool:
        """Whether all trials are in the journal."""
        return (self.folder / "run" / MANIFEST).exists() and "finished" in read_document(
            self.folder / "run"
        )

    @property
    def whole_lines(self) -> bytes:
        """The journal without a torn last line."""
        return (journal := self.journal)[: journal.rfind(b"\n") + 1]

    @property
    def records(self) -> list[dict[str, Any]]:
        return Journal(self.folder / "run").read()


@contextlib.contextmanager
def place(folder: Path, **environment: str) -> Iterator[Place]:
    folder.mkdir(parents=True, exist_ok=True)
    with Leaks(folder) as leaks:
        yield Place(folder, leaks, environment)


def end(
    process: subprocess.Popen[str], number: signal.Signals, within_s: float
) -> tuple[int, float]:
    """Send the signal; the exit status and the seconds that passed until the end."""
    began = time.monotonic()
    process.send_signal(number)
    try:
        return process.wait(within_s), time.monotonic() - began
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"not ended {within_s:g} s after {number.name}") from None


TIMES = {"wall_s", "ended", "training_s", "slot", "sha256", "log"}
"""Keys of a record that differ from run to run."""
TIMES_OF_PASSES = {
    "time": {
        "began",
        "ended",
        "host",
        "marking_s",
        "num_warmup",
        "observed_span_s",
        "rank_step_seconds",
        "span_s",
        "step_seconds",
        "warmup_seconds",
    },
    "dispatch": {"cpu_s"},
    "memory": {f"{HELD}_{UNTRACKED}", f"{PEAK}_{UNTRACKED}"},
}
"""The same of its passes; what malloc has in use beside tensors differs, too."""


def facts(records: Sequence[dict[str, Any]]) -> dict[tuple[str, int], dict[str, Any]]:
    """All but timings of every trial that was not interrupted, by cell and repeat; each has to be there once."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for record in records:
        if record["status"] == "interrupted":
            continue
        key = (record["cell_id"], record["repeat"])
        assert key not in found, f"trial {key} is there twice"
        kept = {name: value for name, value in record.items() if name not in TIMES}
        for pass_name, times in TIMES_OF_PASSES.items():
            if kept.get(pass_name):
                kept[pass_name] = {
                    name: value for name, value in kept[pass_name].items() if name not in times
                }
        found[key] = kept
    return found
