"""Progress of a run: a line that changes on a terminal, lines elsewhere, or JSON lines."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

from bench.formatting import plural, printable
from bench.judge.baseline import percent
from bench.judge.columns import labels
from bench.judge.evidence import restless
from bench.judge.gates import EXPECTED, defect_of_record
from bench.judge.tables import build, step_time
from bench.plan.cell import Cell, Status
from bench.plan.schedule import Cost, InterimAnalysis, Trial
from bench.run.manifest import Manifest
from bench.run.trial_record import TrialRecord
from bench.screen import Screen

REFRESH_PER_S = 1.0
"""Slow on purpose: the display shares the machine with what is measured."""
WIDEST_BAR = 40
BESIDE_BAR = 60
"""Columns of the terminal for the numbers beside the bar."""
BY_BUDGET = "at most about"
"""Before the time to go of a run that its budget ends."""
REFERENCE_FAILED = (
    "the reference failed: nothing can be checked against it, so all its cells will be invalid"
)
IF_BUSY = (
    "if that goes on, no times of this run can be compared; memory, bytes, steps and losses stay "
    "valid. What else runs here: python -m bench doctor"
)


class _NamedProgress(Progress):
    """Numbers in one line, and below it what they are of, in as many lines as that takes."""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.description, overflow="fold")


class TimeToGo(ProgressColumn):
    """The time to go as it is now: it gets shorter within a trial."""

    def __init__(self, display: Display) -> None:
        super().__init__(Column(no_wrap=True))
        self._display = display

    def render(self, task: Task) -> Text:
        return Text(self._display.time_left_now())


@dataclass(frozen=True, slots=True)
class TimeLeft:
    """How long a run takes from a moment on, as was expected then."""

    seconds: float
    bound: str
    """What the seconds are: ``about``, ``at least`` or BY_BUDGET."""
    of_trial_s: float
    """The part of the trial that runs."""
    since: float

    def at(self, now: float) -> float:
        """The seconds that are left; a trial that takes longer takes nothing from the others."""
        passed = now - self.since
        if self.bound != BY_BUDGET:
            passed = min(passed, self.of_trial_s)
        return max(0.0, self.seconds - passed)


class Display:
    """Shows done, running and left trials and the time to go. Use as a context manager."""

    def __init__(
        self,
        console: Console,
        estimates: Mapping[str, Cost],
        manifest: Manifest | None = None,
    ) -> None:
        """``estimates`` are by cell_id; the ``manifest`` tells which wrong updates are expected."""
        self._console = console
        self._estimates = estimates
        self._manifest = manifest
        self._left: dict[tuple[str, int], float] = {}
        self._measured: list[tuple[float, float]] = []
        self._started = time.monotonic()
        self._total = 0
        bar_width = min(WIDEST_BAR, max(1, console.width - BESIDE_BAR))
        self._progress = _NamedProgress(
            TextColumn("{task.fields[counts]}"),
            BarColumn(bar_width),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeToGo(self),
            console=console,
            refresh_per_second=REFRESH_PER_S,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=None, counts="")
        self._foreseen: TimeLeft | None = None
        self._awaited: set[str] = set()
        self._is_told_busy = False
        self._failed = 0
        self._done = 0
        self._more = False
        self._repeat = 0
        self._budget_ends = math.inf
        cells: Iterable[Cell] = ()
        if manifest is not None:
            cells = manifest.cells
        self._labels = labels(cells)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def say(self, message: str) -> None:
        self._console.print(Text(printable(message)), highlight=False, soft_wrap=True)

    def waits(self, what: str) -> None:
        """Show what the run waits for while no trial runs; where lines stay, once."""
        self._foreseen = None
        self._progress.update(self._task, description=f"waiting: {what}")
        if not self._console.is_terminal and what not in self._awaited:
            self.say(f"waiting: {what}")
        self._awaited.add(what)

    def expect(
        self,
        trials: Sequence[Trial],
        *,
        more: bool,
        budget_left_s: float = math.inf,
    ) -> None:
        """Take note of the trials that are left; ``more`` may follow."""
        self._more = more
        self._budget_ends = time.monotonic() + budget_left_s
        self._left = {trial.key: self._estimate(trial) for trial in trials}

    def _estimate(self, trial: Trial) -> float:
        """Seconds that a trial may take; 0 if unknown."""
        guess = self._estimates.get(trial.cell.cell_id)
        if guess is None or guess.seconds is None:
            return 0.0
        if trial.extra:
            return guess.total(1)
        return guess.seconds

    def interim(self, analysis: InterimAnalysis) -> None:
        text = f"after {plural(analysis.repeats, 'repeat')}"
        if analysis.widest is not None:
            text += f": the widest interval is {percent(analysis.widest)}"
        if analysis.open:
            text += f"; going on with {plural(len(analysis.open), 'cell')}"
        else:
            text += "; that is all"
        if analysis.refused:
            text += f" (nothing can be compared: {analysis.refused})"
        self.say(text)

    def started(self, trial: Trial, done: int, total: int) -> None:
        self._total = total
        self._done = done
        self._repeat = trial.repeat
        counts = ""
        if self._failed:
            counts = f"{self._failed} failed"
        seconds, bound = self._to_go()
        of_trial_s = self._seconds([self._left.get(trial.key, 0.0)])
        self._foreseen = TimeLeft(seconds, bound, of_trial_s, time.monotonic())
        self._progress.update(
            self._task,
            description=self._name(trial),
            completed=done,
            total=total,
            counts=counts,
        )

    def finished(self, trial: Trial, record: TrialRecord) -> None:
        self._count(trial, record)
        if trial.cell.is_reference and record.status is not Status.OK:
            self.say(REFERENCE_FAILED)
        place, took = f"[{self._done}/{self._total}]", f"{record.wall_s:.1f} s, {self._time_left()}"
        self.say(f"{place} {self._name(trial)}: {self._result(trial, record)} ({took})")
        self._tell_if_busy(record)

    def _tell_if_busy(self, record: TrialRecord) -> None:
        """Say, once, what would forbid comparing times if all trials of the cell were like this."""
        if self._is_told_busy or self._manifest is None or record.status is not Status.OK:
            return
        found = restless(build([record], self._manifest).trial_rows)
        if found:
            self._is_told_busy = True
            self.say(f"WARNING: {'; '.join(found)}; {IF_BUSY}")

    def _result(self, trial: Trial, record: TrialRecord) -> str:
        """The step time, or how the trial failed."""
        if record.reason:
            return f"{record.status}: {record.reason}"
        result = str(record.status)
        seconds = step_time(trial.cell, record.time)
        if seconds is not None:
            result = f"{seconds:.4f} s/step"
        if defect := defect_of_record(self._manifest, record):
            result += f"; invalid: its update shows {EXPECTED}: {defect}"
        return result

    def _count(self, trial: Trial, record: TrialRecord) -> None:
        self._measured.append((self._left.pop(trial.key, 0.0), record.wall_s))
        self._done += 1
        self._failed += record.status is not Status.OK

    def _name(self, trial: Trial) -> str:
        return f"{self._labels.get(trial.cell, trial.cell.label)} repeat {trial.repeat}"

    def _time_left(self) -> str:
        seconds, bound = self._to_go()
        return _left_text(seconds, bound)

    def time_left_now(self) -> str:
        """The same while a trial runs, at any moment of it; empty while none does.

        The thread that draws calls it, so it reads what the last event left.
        """
        foreseen = self._foreseen
        if foreseen is None:
            return ""
        return _left_text(foreseen.at(time.monotonic()), foreseen.bound)

    def _to_go(self) -> tuple[float, str]:
        """Seconds until the run ends, and what they are: ``about``, ``at least`` or BY_BUDGET."""
        every, block = [], []
        for (_, repeat), seconds in self._left.items():
            every.append(seconds)
            if repeat == self._repeat:
                block.append(seconds)
        left = self._seconds(every)
        # A block that has started is finished.
        within = max(self._budget_ends - time.monotonic(), self._seconds(block))
        if within < left:
            return within, BY_BUDGET
        if self._more:
            return left, "at least"
        return left, "about"

    def _seconds(self, left: Sequence[float]) -> float:
        """How long trials of these estimates take: their sum, corrected by how wrong these were."""
        total = sum(left)
        guessed = taken = 0.0
        for expected, seconds in self._measured:
            guessed += expected
            taken += seconds
        if guessed > 0 and total > 0:
            return total * taken / guessed
        if self._measured:
            return len(left) * taken / len(self._measured)
        return total


class JsonLines(Display):
    """The same as one JSON object per line on standard output, each with its ``event``."""

    def __init__(self, estimates: Mapping[str, Cost], manifest: Manifest) -> None:
        super().__init__(Screen(quiet=True), estimates, manifest)

    def say(self, message: str) -> None:
        """Event ``message``: a line for people."""
        emit("message", text=message)

    def interim(self, analysis: InterimAnalysis) -> None:
        """Event ``interim``: the width of the widest interval, and how many cells are left."""
        emit(
            "interim",
            repeats=analysis.repeats,
            widest=analysis.widest,
            open=len(analysis.open),
            refused=analysis.refused,
        )

    def started(self, trial: Trial, done: int, total: int) -> None:
        """Event ``started``: the trial, and how many there are."""
        super().started(trial, done, total)
        emit("started", **self._about(trial))

    def finished(self, trial: Trial, record: TrialRecord) -> None:
        """Event ``finished``: how a trial ended."""
        self._count(trial, record)
        emit(
            "finished",
            **self._about(trial),
            status=record.status,
            reason=record.reason,
            wall_s=record.wall_s,
            step_time_s=step_time(trial.cell, record.time),
        )
        self._tell_if_busy(record)

    def _about(self, trial: Trial) -> dict[str, object]:
        seconds, bound = self._to_go()
        return {
            "cell_id": trial.cell.cell_id,
            "label": self._labels[trial.cell],
            "repeat": trial.repeat,
            "done": self._done,
            "total": self._total,
            "seconds_to_go": round(seconds, 1),
            "bound": bound,
        }


def emit(event: str, **facts: object) -> None:
    """Print one event as a line of JSON."""
    print(json.dumps({"event": event, **facts}), flush=True)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes:
        return f"{minutes} min {rest:02d} s"
    return f"{rest} s"


def _left_text(seconds: float, bound: str) -> str:
    text = f"{bound} {_clock(seconds)} to go"
    if bound == BY_BUDGET:
        text += ", by the budget"
    return text
