"""A run that is ended again and again at random moments comes to the same results as one that is not."""

from __future__ import annotations

import functools
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from bench.errors import BAD, GOOD, INTERRUPTED
from bench.run.journal import MANIFEST
from tests.conftest import first
from tests.faults.form import FORM, marked, nothing, rng
from tests.faults.harness import MATRIX_RUN, Place, end, facts, place

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
INTERRUPTS = {INTERRUPTED, -signal.SIGINT}
"""One status for a shell: Python ends itself by SIGINT where the interrupt came inside of an ``exec`` of text."""
ENDS_IN_S = 20.0
"""How long the runner may take to end everything, asked to."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What is killed, and how long its lives are."""

    name: str
    what: str
    program: tuple[str, ...]
    backends: tuple[str, ...]
    repeats: int
    longest_s: float
    """The longest life."""
    after_first: bool = False
    """Whether the life is counted from when the first trial is finished, and not from the start."""


REAL = Kind(
    name="real",
    what="real trials of two ranks",
    program=("-m", "bench"),
    backends=("ddp-eager", "ddp-deferred"),
    repeats=8,
    longest_s=16.0,
)
SHORT = replace(REAL, backends=("ddp-eager",), repeats=2, longest_s=2.0, after_first=True)
SCRIPTED = Kind(
    name="scripted",
    what="trials that take no time",
    program=("-m", "tests.faults.scripted"),
    backends=(
        "ddp-eager",
        "ddp-deferred",
        "fsdp2-eager",
        "fsdp2-deferred",
        "deepspeed-zero2-eager",
    ),
    repeats=40,
    longest_s=4.0,
)
Facts = dict[tuple[str, int], dict[str, Any]]


@dataclass
class Tally:
    """What came of the kills."""

    kills: int = 0
    runs: int = 0
    """Runs that were brought to their end and compared with the unbroken one."""
    trials: int = 0
    """Trials of those runs."""
    lost: int = 0
    """Finished trials that were not there after a kill."""
    how: list[str] = field(default_factory=list)
    """What but the timings differs from the unbroken run's, in each trial of which anything does."""
    slowest_s: float = 0.0
    """The longest time from the signal to the runner's end."""
    left: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Facts]:
    """Gives the facts of a run that nobody disturbs."""

    @functools.cache
    def run(kind: Kind) -> Facts:
        with place(tmp_path_factory.mktemp("unbroken")) as here:
            here.program = kind.program
            here.write(*kind.backends, repeats=kind.repeats)
            done = here.run()
            assert done.process.returncode in {GOOD, BAD}, done.process.stderr
            return facts(here.records)

    return run


def next_life(here: Place) -> Sequence[str]:
    """The arguments that begin the run, or go on with it."""
    begun = (here.folder / "run" / MANIFEST).exists()
    return ("run", "--resume", "run") if begun else MATRIX_RUN


def kill_once(
    here: Place, kind: Kind, number: signal.Signals, moment_s: float, tally: Tally
) -> None:
    """One life, ended after so many seconds."""
    before = here.whole_lines
    process = here.start(*next_life(here))
    while kind.after_first and not here.journal and process.poll() is None:
        time.sleep(0.02)
    try:
        status = process.wait(moment_s)  # over before the signal
    except subprocess.TimeoutExpired:
        before = max(before, here.whole_lines, key=len)
        status, seconds = end(process, number, ENDS_IN_S)
        tally.kills += 1
        tally.slowest_s = max(tally.slowest_s, seconds)
    after = here.journal
    if not after.startswith(before):
        tally.lost += max(1, before.count(b"\n") - after.count(b"\n"))
    out, err = here.output("out"), here.output("err")
    assert status in {GOOD, BAD, -number, *INTERRUPTS}, (status, out, err)
    # Before, Python itself is still starting; afterwards the report is written.
    if "writing to" in out and not here.is_finished and number is not signal.SIGKILL:
        assert status in INTERRUPTS, (status, out, err)
        assert "Traceback" not in out + err, err


def difference(found: dict[str, Any] | None, expected: dict[str, Any] | None) -> str:
    """What differs between a trial and that of the unbroken run, in words; empty if nothing does."""
    if found is None or expected is None:
        return "is missing" if found is None else "is not in the unbroken run"
    if found["status"] != expected["status"]:
        return f"{found['status']} ({found['reason']}), not {expected['status']} ({expected['reason']})"
    # Each run has a manifest of its own, whose hash its records repeat.
    keys = (found.keys() | expected.keys()) - {"begun_sha256"}
    keys = {key for key in keys if found.get(key) != expected.get(key)}
    return f"another {', '.join(sorted(keys))}" if keys else ""


def disturb(folder: Path, kind: Kind, number: signal.Signals, kills: int, expected: Facts) -> Tally:
    """Kill runs until there were so many kills; each is resumed to its end and compared."""
    random, tally = rng(f"{kind.name} {number.name}"), Tally()
    while tally.kills < kills:
        with place(folder / f"broken-{tally.runs}") as here:
            here.program = kind.program
            here.write(*kind.backends, repeats=kind.repeats)
            while tally.kills < kills and not here.is_finished:
                kill_once(here, kind, number, random.uniform(0.0, kind.longest_s), tally)
                tally.left += here.leaks.left()
            if not here.is_finished:
                run = here.run(*next_life(here))
                assert run.process.returncode in {GOOD, BAD}, run.process.stderr
                tally.left += here.leaks.left()
            found = facts(here.records)
            keys = found.keys() | expected.keys()
            tally.how += [
                how
                for key in sorted(keys)
                if (how := difference(found.get(key), expected.get(key)))
            ]
            tally.runs += 1
            tally.trials += len(found)
        if not tally.how:
            shutil.rmtree(here.folder)
    return tally


def kill(folder: Path, kind: Kind, number: signal.Signals, kills: int, expected: Facts) -> None:
    tally = disturb(folder, kind, number, kills, expected)
    FORM.note(
        "kills",
        f"{kind.name} {number.name}",
        number.name,
        kind.what,
        *map(str, (tally.kills, tally.runs, tally.trials)),
        marked(str(tally.lost), not tally.lost),
        marked(str(len(tally.how)), not tally.how),
        f"{tally.slowest_s:.1f}",
        nothing(tally.left),
    )
    assert tally.lost == 0
    assert tally.how == []
    assert tally.left == []


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_kills_while_the_journal_is_written(
    tmp_path: Path, number: signal.Signals, unbroken: Callable[[Kind], Facts]
) -> None:
    kill(tmp_path, SCRIPTED, number, FORM.choose(3, FORM.kills), unbroken(SCRIPTED))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("number", first([signal.SIGKILL], SIGNALS), ids=lambda number: number.name)
def test_kills_of_real_runs(
    tmp_path: Path, number: signal.Signals, unbroken: Callable[[Kind], Facts]
) -> None:
    kind = FORM.choose(SHORT, REAL)
    kill(tmp_path, kind, number, FORM.choose(1, FORM.kills), unbroken(kind))
