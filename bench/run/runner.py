"""Runs the trials of a run in order, decides what each does, and resumes where a run stopped."""

from __future__ import annotations

import dataclasses
import math
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench.backends import blocks
from bench.backends.base import Backend
from bench.errors import InputError
from bench.files import end_of, portable, subfolder, write
from bench.launch import dumps
from bench.launch.interrupt import held
from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.launch.telemetry import summarize
from bench.launch.two_codes import TwoCodes
from bench.measure.projection import EXPECTED, Truths
from bench.plan import task
from bench.plan.cell import Cell, Device, Status
from bench.plan.models import LLAMA
from bench.plan.schedule import Ended, InterimAnalysis, Trial
from bench.plan.task import CUDA_PASSES, EXTRA_PASSES, Spec
from bench.run import machine, start
from bench.run.journal import Journal, write_manifest
from bench.run.manifest import Manifest
from bench.run.state_check import read_truths
from bench.run.trial_record import TrialRecord, merge_ranks, parse_records, wrong

LOG_BYTES = 20_000
"""How much of the end of each rank's log is kept for a failed trial."""

RENEWED_FOR_S = 120.0
"""Least time between two renewals of the fork servers, which happen between pairs of blocks. Each
takes up to 15 s.

All children of one process have their libraries at the same addresses, which can shift times by
several per cent (Mytkowicz et al., "Producing Wrong Data Without Doing Anything Obviously Wrong!",
ASPLOS 2009). Several fork servers let the trials sample that variation.
"""


class Observer(Protocol):
    """Receives events, for a display."""

    def say(self, message: str) -> None: ...

    def waits(self, what: str) -> None:
        """No trial runs, and this is what the run waits for."""

    def expect(self, trials: Sequence[Trial], *, more: bool, budget_left_s: float) -> None:
        """These trials are left so far; with ``more``, others may follow within the budget."""

    def started(self, trial: Trial, done: int, total: int) -> None: ...

    def finished(self, trial: Trial, record: TrialRecord) -> None: ...

    def interim(self, analysis: InterimAnalysis) -> None: ...


Judge = Callable[[Sequence[TrialRecord], Manifest, int], InterimAnalysis]
"""Decides which cells to continue, from the journal's records, the manifest and the number of
finished blocks."""


class Runner:
    """Runs the trials of a run that are not in its journal yet."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        backends: Mapping[str, type[Backend]],
        launcher: Launcher | TwoCodes,
        observer: Observer,
        judge: Judge,
        *,
        retry_failed: bool = False,
        journal: Journal | None = None,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._backends = backends
        self._launcher = launcher
        self._observer = observer
        self._judge = judge
        self._retry_failed = retry_failed
        if journal is None:
            journal = Journal(folder)
        self._journal = journal
        self._scratch = folder / "scratch"
        self._life = uuid.uuid4().hex[:8]
        """Makes names of trial folders unique: a rank that outlives a killed bench cannot write
        into another trial."""
        self._begun_sha256 = manifest.begun_sha256
        self._settings = settings = manifest.settings
        self._corpus = None
        if settings.workload.corpus != "markov":
            self._corpus = str(Path(settings.workload.corpus).resolve())
        self._budget_s = math.inf
        if settings.budget_s:
            self._budget_s = float(settings.budget_s)
        self._skipped = manifest.skipped
        self.schedule = manifest.schedule()
        self._asked = task.passes(
            [cell for cell in self.schedule.cells if cell.cell_id not in self._skipped]
        )
        self._done: set[tuple[str, int]] = set()
        self._num_run = self._total = 0
        self._spent_s = self._since = self._trial_s = 0.0
        self._renew_at = time.monotonic() + RENEWED_FOR_S  # a new launcher has new processes
        self._have: set[tuple[str, str]] = set()
        """Pairs of a cell and an extra pass that a good trial has run."""

    def run(self) -> None:
        """Run the remaining trials until the run ends.

        Raises KeyboardInterrupt, or OSError if the disk is full; all finished trials are in the
        journal then.
        """
        self._take_stock()
        # A killed bench may have left folders of trials; the updates of references, which are
        # files, are complete.
        subfolder(self._folder, self._scratch.name)
        for path in filter(Path.is_dir, self._scratch.glob("*")):
            shutil.rmtree(path, ignore_errors=True)
        self._since = time.monotonic()
        self._expect()
        repeat = 0
        while repeat < self.schedule.known or not self._end():
            if repeat < self.schedule.known:
                repeat += self._run_block(repeat)
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._manifest = dataclasses.replace(
            self._manifest,
            parent_peak_bytes=machine.peak_memory_bytes(),
            journal_sha256=self._journal.digest(),
            finished=start.now(),
        )
        write_manifest(self._folder, self._manifest)

    def _take_stock(self) -> None:
        """Read the journal's finished trials. Of several records of one trial the last counts."""
        if moved := self._journal.mend():
            self._observer.say(
                "the last line of the journal was cut short, and never counted; the rest of it is "
                f"in {moved}"
            )
        records = self._records()
        latest: dict[tuple[str, int], Status] = {}
        for record in records:
            self._note_extras(record)
            latest[record.key] = record.status
            if record.status is not Status.INTERRUPTED:
                self._spent_s += record.wall_s
        self._num_run = len(records)
        again = {Status.INTERRUPTED}
        if self._retry_failed:
            again = set(Status) - {Status.OK}
        self._done = {key for key, status in latest.items() if status not in again}
        if self._retry_failed:
            # Updates were not checked while their reference was failing.
            for trial in self.schedule.trials():
                if trial.extra and self._lacks_update(trial):
                    self._done.discard(trial.key)

    def _records(self) -> list[TrialRecord]:
        return parse_records(self._journal.read(), self._journal.path)

    def _expect(self) -> None:
        left = [trial for trial in self.schedule.trials() if trial.key not in self._done]
        self._total = len(self._done) + len(left)
        budget_left_s = math.inf
        if not self.schedule.ended:
            budget_left_s = self._budget_s - self._spent()
        self._observer.expect(
            left,
            more=not self.schedule.ended and self.schedule.known < self.schedule.max_repeats,
            budget_left_s=budget_left_s,
        )

    def _spent(self) -> float:
        """Seconds of the budget that are used up, including those before a resume."""
        return self._spent_s + time.monotonic() - self._since

    def _run_block(self, repeat: int) -> bool:
        """Run the rest of a block; False, without running it, if it would exceed the budget.

        The first block always runs. A trial is expected to take as long as those of the block
        before it.
        """
        block = self.schedule.block(repeat)
        left = [trial for trial in block if trial.key not in self._done]
        seconds, expected = 0.0, self._spent() + self._trial_s * len(block)
        if repeat and left == block and not self.schedule.ended and expected > self._budget_s:
            self._decide(InterimAnalysis(repeats=repeat, open=()), Ended.BUDGET)
            return False
        if left and repeat % 2 == 0 and time.monotonic() >= self._renew_at:
            self._launcher.close()  # the next trials are forked from new processes
            self._renew_at = time.monotonic() + RENEWED_FOR_S
        self._prepare([trial.cell.backend for trial in left if not self._missing(trial)])
        for trial in left:
            if start.is_short(self._folder):
                raise start.full(self._folder)
            self._observer.started(trial, len(self._done), self._total)
            record = self._run_one(trial)
            seconds += record.wall_s
            self._done.add(trial.key)
            self._observer.finished(trial, record)
            _require_reference(record)
        if left:
            self._trial_s = seconds / len(left)
        return True

    def _prepare(self, names: Sequence[str]) -> None:
        """Start the processes that ranks of these backends are forked from: some seconds."""
        packages = set()
        for name in names:
            for module in self._backends[name].preloaded():
                packages.add(module.partition(":")[0].partition(".")[0])
        what = ", ".join(["torch", *sorted(packages - {"torch"})])
        self._observer.waits(f"the processes that ranks start from import {what}")
        self._launcher.prepare(names)

    def _end(self) -> bool:
        """Whether the run ends after all known blocks; makes the decision if it is still open."""
        if self.schedule.ended:
            return True
        repeats = self.schedule.known
        if repeats == self.schedule.repeats == self.schedule.max_repeats:
            self._decide(InterimAnalysis(repeats=repeats, open=()), Ended.MAX_REPEATS)
            return True
        look = self._judge(self._records(), self._manifest, repeats)
        if not look.open:
            ended = Ended.PRECISION
            if look.refused:
                ended = Ended.NOTHING_TO_COMPARE
            self._decide(look, ended)
        elif repeats >= self.schedule.max_repeats:
            self._decide(dataclasses.replace(look, open=()), Ended.MAX_REPEATS)
        else:
            self._decide(look, None)
        return self.schedule.ended

    def _decide(self, look: InterimAnalysis, ended: Ended | None) -> None:
        """Store a look, and what ended the run, if anything."""
        self.schedule.looks.append(look)
        self._manifest = dataclasses.replace(
            self._manifest, looks=tuple(self.schedule.looks), ended_by=ended
        )
        write_manifest(self._folder, self._manifest)
        self._observer.interim(look)
        self._expect()

    def _run_one(self, trial: Trial) -> TrialRecord:
        """Run one trial and append its record to the journal; after an interrupt, re-raise.

        An interrupted trial has a record, too. Raises OSError, without a record, if a trial failed
        while the disk was full, which is taken for the cause.
        """
        if missing := self._missing(trial):
            outcome = Outcome(status=Status.UNSUPPORTED, reason=missing, ranks=[], wall_s=0.0)
            return self._keep(self._record(trial, (), outcome))
        passes = self._passes(trial)
        folder = self._folder_of(trial)
        try:
            outcome = self._launch(trial.cell, passes, folder)
        except KeyboardInterrupt:
            outcome = Outcome(
                status=Status.INTERRUPTED, reason="stopped by the user", ranks=[], wall_s=0.0
            )
            with held():
                self._keep(self._record(trial, passes, outcome))
            raise
        with held():  # an interrupt waits until the trial is stored
            if outcome.status is not Status.OK and start.is_short(self._folder):
                shutil.rmtree(folder, ignore_errors=True)
                raise start.full(self._folder)
            content = self._record(trial, passes, outcome)
            if outcome.status is not Status.OK:
                content |= {"last_lines": outcome.last_lines, **self._keep_logs(trial, outcome)}
            record = self._keep(content)
            self._note_extras(record)
        shutil.rmtree(folder, ignore_errors=True)
        return record

    def _missing(self, trial: Trial) -> str:
        """Why a trial cannot run; empty if it can."""
        cell = trial.cell
        if cell.cell_id in self._skipped:
            return self._skipped[cell.cell_id]
        return blocks.skip(cell, self._backends[cell.backend])

    def _keep(self, content: dict[str, Any]) -> TrialRecord:
        """Append what is known of a trial to the journal; returns it as it is read again."""
        self._journal.append(content)
        self._num_run += 1
        (record,) = parse_records([content], self._journal.path)
        return record

    def _folder_of(self, trial: Trial) -> Path:
        return self._scratch / f"{trial.cell.cell_id}-{trial.repeat}-{self._life}"

    def _launch(self, cell: Cell, passes: tuple[str, ...], folder: Path) -> Outcome:
        shutil.rmtree(folder, ignore_errors=True)
        asked = Spec(
            cell=cell,
            passes=passes,
            folder=str(folder.resolve()),
            reference=str(self._reference_file(cell).resolve()),
            corpus=self._corpus,
            threads=machine.threads_per_rank(
                cell.num_processes // cell.num_nodes, self._settings.threads
            ),
        )
        outcome = self._launcher.run(
            asked, float(self._settings.timeout_s), float(self._settings.inactivity_s)
        )
        return outcome.limited_by("--timeout")

    def _reference_file(self, cell: Cell) -> Path:
        return self._scratch / f"reference-{cell.reference().cell_id}.safetensors"

    def _truths(self, cell: Cell) -> Truths | None:
        """What the cell's reference held after its training; None if it has not written that."""
        return read_truths(self._reference_file(cell).with_suffix(EXPECTED))

    def _ensure_reference(self, cell: Cell) -> None:
        """Train the reference again, unrecorded, if its files are gone, as after a resume."""
        reference = cell.reference()
        if (reference.cell_id, "update") in self._have and not self._reference_file(cell).exists():
            again = self._scratch / f"reference-again-{self._life}"
            self._launch(reference, ("time", "update"), again)

    def _passes(self, trial: Trial) -> tuple[str, ...]:
        """Passes of a trial: the time pass always, the others once.

        They run in the first good trial of the cell that may run them.
        """
        cell = trial.cell
        timed, wanted = [], []
        for name in self._asked[cell.cell_id]:
            if name == "time":
                timed.append(name)
            elif trial.extra and (cell.cell_id, name) not in self._have:
                wanted.append(name)
        if "update" in wanted and cell != cell.reference():
            self._ensure_reference(cell)
            if not self._reference_file(cell).exists():
                wanted.remove("update")
        return (*timed, *wanted)

    def _lacks_update(self, trial: Trial) -> bool:
        """Whether the cell of a trial still lacks the update to check."""
        cell_id = trial.cell.cell_id
        return "update" in self._asked.get(cell_id, ()) and (cell_id, "update") not in self._have

    def _note_extras(self, record: TrialRecord) -> None:
        if record.status is not Status.OK:
            return
        for name in (*EXTRA_PASSES, *CUDA_PASSES):
            if getattr(record, name) is not None:
                self._have.add((record.cell_id, name))

    def _record(self, trial: Trial, passes: tuple[str, ...], outcome: Outcome) -> dict[str, Any]:
        if damage := wrong(outcome.ranks, passes):
            outcome.status, outcome.reason, outcome.ranks = Status.CRASHED, damage, []
        facts: dict[str, Any] = {}
        if outcome.ranks:
            facts = merge_ranks(outcome.ranks, self._truths(trial.cell))
        if facts.get("time") and trial.cell.device is Device.CUDA:
            facts["gpus"] = _gpus(outcome, facts.get("device_uuids", ()))
        content = {
            **facts,
            "cell_id": trial.cell.cell_id,
            "repeat": trial.repeat,
            "slot": self._num_run,
            "begun_sha256": self._begun_sha256,
            "cell": trial.cell.to_dict(),
            "status": outcome.status,
            "reason": outcome.reason,
            "passes": passes,
            "ended": start.now(),
            "wall_s": outcome.wall_s,
        }
        if outcome.cold is not None:
            content["cold"] = outcome.cold
        return content

    def _keep_logs(self, trial: Trial, outcome: Outcome) -> dict[str, Any]:
        """Save the logs of a failed trial. Returns their paths within the run's folder.

        ``log``: the traceback and the end of each rank's log. ``dumps``: dumps of ranks, if any.
        """
        cell = trial.cell
        name = f"logs/{cell.backend}-{cell.cell_id}-{trial.repeat}"
        parts = [f"{cell.label}: {outcome.status}: {outcome.reason}\n", outcome.traceback]
        folder = self._folder_of(trial)
        for log in sorted(folder.rglob("*.log")):
            end = end_of(log, LOG_BYTES).decode(errors="replace")
            parts.append(f"--- {'/'.join(log.parts[-2:])}\n{end}\n")
        subfolder(self._folder, "logs")
        path = write(self._folder / f"{name}.log", portable("\n".join(parts)))
        kept: dict[str, Any] = {"log": f"{name}.log"}
        found = [f"{name}.{dump.name}" for dump in dumps.collect(folder, path.with_suffix(""))]
        if found:
            kept["dumps"] = found
        return kept


ENDS_RUN = (Status.CRASHED, Status.HANG, Status.TIMEOUT, Status.OOM)
"""How a reference may end without which nothing can be compared."""


def _require_reference(record: TrialRecord) -> None:
    """Raise InputError if this is the reference of a user's model and failed: nothing compares."""
    workload = record.cell.workload
    if record.cell.is_reference and workload != LLAMA and record.status in ENDS_RUN:
        raise InputError(
            f"workload '{workload}': its reference, with which all others are compared, ended "
            f"{record.status} ({record.reason}); mend the workload, and start a new run"
        )


def _gpus(outcome: Outcome, uuids: Sequence[str]) -> dict[str, Any] | None:
    """The GPUs of a good trial while its ranks timed their steps, by the clock of each node."""
    gpus: list[dict[str, object]] = []
    notes: list[str] = []
    is_known = False
    num_ranks = len(outcome.ranks) // max(1, len(outcome.recordings))
    for node, recording in enumerate(outcome.recordings):
        of_node = slice(node * num_ranks, (node + 1) * num_ranks)
        times = [rank["time"] for rank in outcome.ranks[of_node]]
        begins = [time["began"] for time in times if time["began"] is not None]
        ended = min(time["ended"] for time in times)
        summary = summarize(recording, max(begins, default=None), ended, uuids[of_node])
        if summary is not None:
            is_known = True
            gpus += summary["gpus"]
            notes += summary["notes"]
    if not is_known:
        return None
    return {"gpus": gpus, "notes": notes}
