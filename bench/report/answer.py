"""What a run says, in a few statements and one table: the first screen of the page and of report.md, and the terminal.

Statements are made from verdicts and exact counts. A ratio is always the time of X over the time of Y: below 1, X is
faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.formatting import alike, digits, plural, size
from bench.judge.baseline import Control, widest
from bench.judge.caveats import link_words, transfer
from bench.judge.gates import known_defect
from bench.judge.next_steps import next_command
from bench.judge.pairs import ComparedPair
from bench.judge.statistics import trials_to_show
from bench.judge.tables import rows_of
from bench.judge.verdicts import Reason, Verdict
from bench.plan.cell import Device, Status, Sync, summarize
from bench.report.ranking import Group, Ranked, ends_of, groups
from bench.report.report_data import ReportData, cpu_name, eager_and_deferred, gpu_names, parameters

LONGEST = 240
"""Characters of a reason; the table of failed cells has it in full."""
OPEN = {
    Reason.WIDE: "statistically indistinguishable from {}: the interval contains 1, and is wider than the margin",
    Reason.MANY: "the difference from {} is significant in one comparison, but not after correction for all of the run",
    Reason.NO_CONTROL: "not compared with {}: the run has no A/A pair with an interval",
    Reason.CLOCKS: "the verdict against {} in clock cycles differs from the one in seconds",
    Reason.FEW_TRIALS: "too few trials for an interval against {}",
    Reason.FAILED_TRIALS: "trials failed here or at {}; the others may be a biased sample",
}
"""Why a comparison with a baseline stays undecided."""
FIRST_DEFERRED = "fsdp2-deferred"
"""It is compared with its eager twin before all others are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statement:
    """One thing that the run says."""

    key: str
    title: str
    text: str
    lead: str = ""
    """What the text is about; it stands before the text."""
    is_warning: bool = False
    command: str = ""
    """What to do about it, ready to paste."""

    @property
    def sentence(self) -> str:
        """The statement without title and command."""
        return f"{self.lead}: {self.text}" if self.lead else self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The first screen."""

    alarm: Statement | None
    """Why no times can be compared."""
    statements: tuple[Statement, ...]
    scope: Statement
    """Model, ranks, device, link, n and the A/A pair in one line."""
    groups: tuple[Group, ...]
    """The tables, the one of the largest N first."""
    baseline: str
    remarks: tuple[str, ...]
    """What must be said beside the numbers (``bench.judge.caveats``)."""

    @property
    def all(self) -> tuple[Statement, ...]:
        """Every statement in order."""
        return (*([self.alarm] if self.alarm else []), *self.statements, self.scope)


def answer(data: ReportData) -> Answer:
    """The answer of a run."""
    every = groups(data)
    said: list[Statement] = []
    if every:
        first = every[0]
        said += [*_fastest(data, first), *_least(data, first), *_twins(data, first)]
    said += [*_wrong(data), *_failed(data), *_open(data, every), *_resolution(data)]
    return Answer(
        alarm=_alarm(data),
        statements=tuple(said),
        scope=Statement(key="scope", title="Scope", text=_scope(data)),
        groups=tuple(every),
        baseline=data.against_baseline.baseline,
        remarks=tuple(data.against_baseline.remarks),
    )


def _alarm(data: ReportData) -> Statement | None:
    found = data.times_unavailable
    if found is None:
        return None
    text = _sentence(cut(found.reason))
    title = "No times can be compared" if found.command else "No times"
    return Statement(key="alarm", title=title, text=text, is_warning=bool(found.command), command=found.command)


def _fastest(data: ReportData, group: Group) -> Iterator[Statement]:
    """The fastest correct backend, and those that cannot be told apart from it."""
    timed = [row for row in group.rows if row.is_correct and row.seconds is not None]
    if not timed:
        return
    best, *others = timed
    text = f"{digits(best.seconds or 0)} s per step{_ends(best.low, best.high)} at {group.where}"
    against = data.against_baselines.get(best.backend)
    rows = {} if against is None else against.by_cell
    cells = [data.rows[row.cell_id] for row in timed]
    alike_ids = {cell["cell_id"] for cell in data.not_slower(cells, data.rows[best.cell_id])}
    near = [row for row in others if row.cell_id in alike_ids]
    if near:
        text += f". Statistically indistinguishable: {', '.join(_with_ratio(row, rows) for row in near)}"
    elif others:
        text += f". Next: {_with_ratio(others[0], rows)} times its time"
    yield Statement(key="fastest", title="Fastest correct backend", lead=best.backend, text=f"{text}.")


def _with_ratio(row: Ranked, rows: Mapping[str, ComparedPair]) -> str:
    pair = rows.get(row.cell_id)
    if pair is None or pair.time is None:
        return row.backend
    return f"{row.backend}, {digits(pair.time.ratio)}{_ends(pair.time.low, pair.time.high)}"


def _ends(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" (95 % {ends_of(low, high)})"


def _least(data: ReportData, group: Group) -> Iterator[Statement]:
    """The correct backends with the least memory, and how they compare with the fastest."""
    known = [row for row in group.rows if row.memory is not None and row.correct in {"yes", "not checked"}]
    if not known:
        return
    least = min(row.memory or 0 for row in known)
    best = [row for row in known if alike(row.memory or 0, least)]
    names = ", ".join(row.backend for row in best)
    text = f"{size(least)} per rank at its peak, at {group.where}"
    fastest = known[0]
    against = data.against_baselines.get(fastest.backend)
    pair = against.by_cell.get(best[0].cell_id) if against and group.is_timed else None
    if fastest not in best and fastest.memory and pair and pair.time:
        share, time = 100 * (1 - least / fastest.memory), digits(pair.time.ratio)
        text += f": {share:.0f} % less than {fastest.backend}, at {time} times its step time"
    yield Statement(key="memory", title="Least memory", lead=names, text=f"{text}.")


def _twins(data: ReportData, group: Group) -> Iterator[Statement]:
    """Deferred against eager sync, of FSDP2 in full; one line for all other frameworks and shardings that have both."""
    about = data.run.manifest["backends"]
    rows = {row.backend: row for row in group.rows}
    shown = {name: about.get(name, {}) for name in rows}
    pairs = [pair for how in (Sync.DEFERRED, Sync.DEFERRED_ALL_REDUCE) for pair in eager_and_deferred(shown, how)]
    full, short = [], []
    for eager, deferred in sorted(pairs, key=lambda pair: pair[1] != FIRST_DEFERRED):
        ours, theirs = rows[deferred], rows[eager]
        found = data.against_baselines[eager].by_cell.get(ours.cell_id) if eager in data.against_baselines else None
        said, brief = [], []
        if group.is_timed and found is not None and found.time is not None:
            time, verdict = found.time, found.judgement.verdict
            said.append(f"time {digits(time.ratio)}{_ends(time.low, time.high)}, {verdict}")
            brief.append(f"{digits(time.ratio)} ({verdict})")
        if ours.memory and theirs.memory:
            ratio = digits(ours.memory / theirs.memory)
            said.append(f"memory {ratio} ({size(ours.memory)} / {size(theirs.memory)})")
            brief.append(ratio)
        if said:
            full.append((f"{deferred} / {eager}", f"{'; '.join(said)}."))
            short.append(f"{deferred} {', '.join(brief)}")
    for lead, text in full[:1]:
        yield Statement(key="sync", title="Deferred against eager", lead=lead, text=text)
    if short[1:]:
        text = f"{'time and ' * group.is_timed}memory, deferred / eager: {'; '.join(short[1:])}."
        yield Statement(key="families", title="Other families", text=text)


def _wrong(data: ReportData) -> Iterator[Statement]:
    """What must not be used: each reason once, with all its cells."""
    invalid = data.bad[data.bad["status"] == Status.INVALID]
    for reason, cells in _by_reason(data, invalid):
        yield Statement(
            key="wrong", title="Do not use", lead=_cells(data, cells), text=f"{_sentence(reason)}", is_warning=True
        )


def _failed(data: ReportData) -> Iterator[Statement]:
    """What failed or could not run: each reason once."""
    others = data.bad[data.bad["status"] != Status.INVALID]
    for status, rows in others.groupby("status", sort=False):
        for reason, cells in _by_reason(data, rows):
            title = "Not run" if status == Status.UNSUPPORTED else "Failed"
            bad = status != Status.UNSUPPORTED
            text = _sentence(f"{status}: {reason}" if bad else reason)
            yield Statement(key="failed", title=title, lead=_cells(data, cells), text=text, is_warning=bad)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "]")) else f"{text}."


def _by_reason(data: ReportData, rows: pd.DataFrame) -> list[tuple[str, list[dict[str, Any]]]]:
    """The cells by the reason why they failed, that of the first; cells that failed the same gates share one."""
    found: dict[Any, tuple[str, list[dict[str, Any]]]] = {}
    for cell in rows_of(rows):
        defect = known_defect(data.run.manifest, cell)
        reason = f"{defect} (a documented defect of the framework)" if defect else cut(cell["reason"] or "no reason")
        kind = defect or (cell["failed_gates"], cell["update_causes"]) if cell["failed_gates"] else reason
        found.setdefault(kind, (reason, []))[1].append(cell)
    return list(found.values())


def _cells(data: ReportData, cells: Sequence[Mapping[str, Any]]) -> str:
    """The backends of these cells, with their N where not all cells of a backend are among them."""
    everywhere = data.cells.groupby("backend")["accumulate"].agg(set)
    sizes = data.cells.groupby("backend").size()
    places: dict[str, list[str]] = {}
    for backend in dict.fromkeys(cell["backend"] for cell in cells):
        own = [cell for cell in cells if cell["backend"] == backend]
        numbers = sorted({cell["accumulate"] for cell in own})
        where = "" if set(numbers) == everywhere[backend] else f"N = {', '.join(map(str, numbers))}"
        at_these = data.cells[(data.cells["backend"] == backend) & data.cells["accumulate"].isin(numbers)]
        if len(own) < len(at_these):
            where = ", ".join(filter(None, (where, f"{len(own)} of {plural(sizes[backend], 'cell')}")))
        places.setdefault(where, []).append(backend)
    return "; ".join(f"{', '.join(names)}{f' ({where})' if where else ''}" for where, names in places.items())


def _open(data: ReportData, every: Sequence[Group]) -> Iterator[Statement]:
    """Why correct cells are not compared while others are, or comparisons are undecided, and the command that helps."""
    found: dict[tuple[str, Reason, str], dict[str, list[str]]] = {}
    texts: dict[Reason, str] = {}
    for where, row in ((one.where, row) for one in every for row in one.rows):
        if row.pair is None or data.times_unavailable is not None:
            continue
        judgement = row.pair.judgement
        if judgement.verdict is Verdict.AMBIGUOUS:
            key, text = "undecided", f"{OPEN[judgement.reason].format(data.against_baseline.baseline)}."
        elif judgement.verdict is Verdict.NOT_COMPARABLE and row.is_correct:
            key, text = "barred", texts.setdefault(judgement.reason, _sentence(cut(judgement.detail)))
        else:
            continue
        found.setdefault((key, judgement.reason, text), {}).setdefault(where, []).append(row.backend)
    for (key, reason, text), places in sorted(found.items(), key=lambda one: one[0][0]):
        title = "Undecided" if key == "undecided" else "Not compared"
        lead = "; ".join(f"{', '.join(names)} at {place}" for place, names in places.items())
        command = next_command(data.run, {reason}, data.folder)
        yield Statement(key=key, title=title, lead=lead, text=text, command=command)


def _resolution(data: ReportData) -> Iterator[Statement]:
    """How many trials a small difference would need, if some comparison is undecided for want of them."""
    rows = [row for row in data.against_baseline.rows if row.time is not None and row.time.low is not None]
    if data.times_unavailable or not any(row.judgement.reason in (Reason.WIDE, Reason.MANY) for row in rows):
        return
    times = [row.time for row in rows if row.time is not None]
    needed, n = max(trials_to_show(time) for time in times), min(time.num_trials for time in times)
    if needed <= n:
        return
    minutes = float(data.run.tables.trials["wall_s"].sum()) / 60
    text = (
        f"A difference of 5 % between any two cells would show in 8 of 10 runs with {needed} trials per cell, about "
        f"{max(1, round(minutes * needed / n))} minutes; this run has {n}, in {max(1, round(minutes))}."
    )
    yield Statement(key="resolution", title="Resolution", text=text)


def _scope(data: ReportData) -> str:
    """Model, ranks, device, link, counts and the A/A pair, and what does not follow from the run."""
    run, cells = data.run, [cell for cell in data.run.cells.values() if not cell.twin]
    own = [cell for cell in cells if not cell.is_reference] or cells
    sizes = run.tables.trials.groupby("model")["num_parameters"].max()
    models = [f"{name} ({parameters(sizes[name])})" for name in dict.fromkeys(c.model for c in own)]
    ranks = ", ".join(str(number) for number in sorted({cell.world_size for cell in own}))
    cpu = any(cell.device is Device.CPU for cell in own)
    about = run.manifest.get("machine") or {}
    machine = cpu_name(about) if cpu else gpu_names(about)
    counts = data.contestants.loc[data.contestants["num_ok"] > 0, "num_ok"]
    trials = " to ".join(dict.fromkeys(str(int(one)) for one in (counts.min(), counts.max()))) if len(counts) else "0"
    parts = [
        f"{', '.join(models)} on {ranks} rank{'' if ranks == '1' else 's'} of {machine}, {link_words(own)}",
        f"n = {trials} good {'trial' if trials == '1' else 'trials'} per cell",
        *([] if data.times_unavailable else [_control(data.against_baseline.control)]),
    ]
    if (wide := widest(data.against_baseline.rows)) is not None:
        parts.append(f"widest interval of a ratio {100 * wide:.2g} %")
    parts.append(summarize(run.cells.values(), data.against_baseline.baseline))
    if cpu and not data.times_unavailable:
        parts.append(transfer(sizes.max()))
    return f"{'; '.join(parts)}."


def _control(control: Control | None) -> str:
    """The ratio of the A/A pair."""
    if control is None:
        return "no A/A pair"
    found = control.interval
    if found is None or found.low is None or found.high is None:
        return f"the A/A pair has no interval: {cut(control.reason)}"
    return f"A/A pair {digits(found.ratio)} ({ends_of(found.low, found.high)})"


def cut(text: str, longest: int = LONGEST) -> str:
    """The text, shortened at a space if it is too long."""
    return text if len(text) <= longest else text[: longest - 5].rsplit(" ", 1)[0] + " [...]"
