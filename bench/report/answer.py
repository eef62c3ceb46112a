"""What a run says, in a few findings and one table: what the page and report.md begin with.

The terminal shows the same. Findings are made from verdicts and exact counts. A ratio is always the
time of X over the time of Y: below 1, X is faster.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.findings import Finding, good, note, warning
from bench.formatting import alike, digits, plural, size, some
from bench.grouping import grouped
from bench.judge.analysis import Analysis, CellRow, defect_of_cell
from bench.judge.baseline import percent, widest
from bench.judge.caveats import (
    GLOO_SCATTERS,
    OTHER_DAYS,
    TRANSFER,
    link_words,
    scatters_over_gloo,
)
from bench.judge.next_steps import next_command
from bench.judge.pairs import ComparedPair
from bench.judge.statistics import trials_to_show
from bench.judge.verdicts import DIFFERENT, MAY_DIFFER, Reason, Verdict, num_judged, scope_words
from bench.measure.host import IDLE_SHARE
from bench.plan.cell import Cell, Device, Sharding, Status, Sync, summarize
from bench.report.descriptions import (
    cpu_name,
    eager_and_deferred,
    gpu_names,
    one_or_many,
    parameters,
)
from bench.report.ranking import Group, RankedRow, ends_text, groups, interval_text, ratio_text

LONGEST = 240
"""Characters of a reason; the table of failed cells has it in full."""
UNDECIDED = {
    Reason.WIDE: (
        "statistically indistinguishable from {}: the interval contains 1, and is wider than the "
        "margin"
    ),
    Reason.MANY: "alone, it looks different from {}; among {n} comparisons that may be chance",
    Reason.CONTROL_OFF: "not compared with {}: the A/A pair is off, so the times are suspect",
    Reason.FEW_RUNS: "not compared with {}: two runs give no interval",
    Reason.NO_CONTROL: "not compared with {}: the run has no A/A pair with an interval",
    Reason.CLOCKS: "the verdict against {} in clock cycles differs from the one in seconds",
    Reason.FEW_TRIALS: "too few trials for an interval against {}",
    Reason.FAILED_TRIALS: "trials failed here or at {}; the others may be a biased sample",
}
"""Why a comparison with a baseline stays undecided."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the first screen of a report says."""

    alarm: Finding | None
    """Why no times can be compared."""
    statements: tuple[Finding, ...]
    scope: Finding
    """Model, ranks, device, link, n and the A/A pair in one line."""
    groups: tuple[Group, ...]
    """The tables, the one of the largest N first."""
    remarks: tuple[str, ...]
    """Caveats on the numbers (``bench.judge.caveats``)."""

    @property
    def all(self) -> tuple[Finding, ...]:
        """Every finding, in the order in which they are shown."""
        found = (*self.statements, self.scope)
        if self.alarm is None:
            return found
        return (self.alarm, *found)


def answer(data: Analysis) -> Answer:
    """The answer of a run."""
    every = groups(data)
    statements = [*_on_a_busy_machine(data)]
    for group in every[:1]:
        statements += _fastest(data, group)
        statements += _least(data, group)
        statements += _deferred_against_eager(data, group)
    statements += _wrong(data)
    statements += _failed(data)
    statements += _undecided(data, every)
    statements += _other_days(data)
    statements += _resolution(data)
    statements += _two_commits(data)
    alarm = data.times_unavailable
    if alarm is not None:
        alarm = replace(alarm, text=_with_full_stop(shortened(alarm.text)))
    return Answer(
        alarm=alarm,
        statements=tuple(statements),
        scope=note("Scope", _scope_text(data)),
        groups=tuple(every),
        remarks=tuple(data.remarks),
    )


def _on_a_busy_machine(data: Analysis) -> Iterator[Finding]:
    """Of a run beside other programs: what is valid nevertheless.

    And for how long times need an idle machine.
    """
    is_disturbed = any(row.reason is Reason.DISTURBED for row in data.verdicts)
    if not data.times_unavailable or not is_disturbed:
        return
    yield good(
        "Still valid",
        "memory, bytes, step counts, updates and losses; other programs do not change them.",
    )
    minutes = plural(max(1, round(_minutes_of_trials(data))), "minute")
    text = (
        f"other programs may use at most {100 * IDLE_SHARE:g} % of its CPUs while the trials run, "
        f"which took {minutes} here."
    )
    yield note("Times need an idle machine", text)


def _minutes_of_trials(data: Analysis) -> float:
    return float(data.run.tables.trials["wall_s"].sum()) / 60


def _fastest(data: Analysis, group: Group) -> Iterator[Finding]:
    """The fastest correct backend, and those that are slower by no verdict."""
    timed = []
    for row in group.rows:
        is_correct = row.correct == "yes"
        if is_correct and row.step_time_s is not None:
            timed.append(row)
    if not timed:
        return
    best, *others = timed
    assert best.step_time_s is not None, "those without one are left out"
    ends = ends_text(best.step_time_low_s, best.step_time_high_s)
    seconds = f"{digits(best.step_time_s)} s per step{ends}"
    text = f"{seconds} at {group.short_title}{_scope_words(data)}"
    pairs = data.against(best.backend)
    near_ids = data.not_slower([row.cell_id for row in timed], best.cell_id)
    near, named = [], []
    for row in timed:
        if row.cell_id in near_ids:
            near.append(row)
            named.append(_with_ratio(row.backend, pairs.get(row.cell_id)))
    if near:
        text += f". Not shown to be slower: {', '.join(named)}"
        text += _alone_slower(near, pairs)
    elif others:
        following = others[0]
        following_text = _with_ratio(following.backend, pairs.get(following.cell_id))
        text += f". Next: {following_text} times its time"
    yield good("Fastest correct backend", f"{text}.", subject=best.backend)


def _alone_slower(near: Sequence[CellRow], pairs: Mapping[str, ComparedPair]) -> str:
    """Which of these cells only the number of comparisons keeps from being called slower."""
    names = []
    for row in near:
        pair = pairs.get(row.cell_id)
        if pair is not None and _looks_slower(pair):
            names.append(row.backend)
    if not names:
        return ""
    looks = one_or_many(len(names), "looks", "look")
    count = num_judged(pairs.values())
    return f". Alone, {some(names)} {looks} slower; among {count} comparisons that may be chance"


def _scope_words(data: Analysis) -> str:
    """Where the times of the answer hold, in words that follow them."""
    return scope_words(len(data.pool.runs))


def _looks_slower(pair: ComparedPair) -> bool:
    """Whether only the number of comparisons keeps a cell from being called slower."""
    time = pair.time
    return pair.reason is Reason.MANY and time is not None and time.low is not None and time.low > 1


def _with_ratio(backend: str, pair: ComparedPair | None) -> str:
    if pair is None or pair.time is None:
        return backend
    return f"{backend}, {ratio_text(pair.time)}"


def _least(data: Analysis, group: Group) -> Iterator[Finding]:
    """The correct backends with the least memory, and how they compare with the fastest."""
    known: list[tuple[RankedRow, int]] = []
    for row in group.rows:
        peak = row.peak_memory_bytes
        if row.status == Status.OK and peak is not None:
            known.append((row, peak))
    if not known or data.run.manifest.finished is None:  # what is to come may need less
        return
    fastest, peak_of_fastest = known[0]
    least = min(peak for _, peak in known)
    best, names = [], []
    for row, peak in known:
        if alike(peak, least):
            best.append(row)
            names.append(row.backend)
    text = f"peak memory per rank {size(least)}, at {group.short_title}"
    pairs: list[ComparedPair] = []
    if group.is_timed:
        pairs = _pairs_of(best, data.against(fastest.backend))
    if fastest not in best and pairs:
        times = sorted(pair.time.ratio for pair in pairs if pair.time is not None)
        ends = " to ".join(dict.fromkeys(map(digits, (times[0], times[-1]))))
        text += f": {percent(1 - least / peak_of_fastest)} less than {fastest.backend}"
        text += f", at {ends} times its step time{_scope_words(data)}"
        verdicts = {pair.verdict for pair in pairs}
        if verdicts - DIFFERENT:
            text += f" ({', '.join(sorted(verdicts))})"
    yield good("Least memory", f"{text}.", subject=", ".join(names))


def _pairs_of(rows: Sequence[CellRow], pairs: Mapping[str, ComparedPair]) -> list[ComparedPair]:
    """Those of these cells that have a ratio of step times."""
    found = []
    for row in rows:
        pair = pairs.get(row.cell_id)
        if pair is not None and pair.time is not None:
            found.append(pair)
    return found


def _deferred_against_eager(data: Analysis, group: Group) -> Iterator[Finding]:
    """Deferred against eager sync.

    Of the run's first backend that shards parameters in full, of others in one line.
    """
    rows = {row.backend: row for row in group.rows}
    found = []
    for eager, deferred in _sync_pairs(data, rows):
        pair = None
        if group.is_timed:
            pair = data.compared(rows[deferred].cell_id, rows[eager].cell_id)
        compared = _compare_syncs(rows[deferred], rows[eager], pair)
        if compared.full:
            found.append(compared)
    if not found:
        return
    first, *others = found
    text = f"{'; '.join(first.full)}, at {group.short_title}."
    if group.is_timed and scatters_over_gloo(data.run, rows[first.eager].cell_id):
        text += f" {GLOO_SCATTERS[0].upper()}{GLOO_SCATTERS[1:]}."
    yield good("Deferred against eager", text, subject=f"{first.deferred} / {first.eager}")
    if others:
        what = f"memory at {group.short_title}"
        if group.is_timed:
            what = f"time and memory at {group.short_title}{_scope_words(data)}"
        texts = [f"{each.deferred} {', '.join(each.brief)}" for each in others]
        yield note("Other families", f"{what}, deferred / eager: {'; '.join(texts)}.")


def _sync_pairs(data: Analysis, rows: Mapping[str, CellRow]) -> list[tuple[str, str]]:
    """The eager and deferred backends among the rows, of which one that shards parameters is first.

    The others stay in order.
    """
    shown = {name: facts for name, facts in data.run.manifest.backends.items() if name in rows}
    pairs = eager_and_deferred(shown, Sync.DEFERRED)
    pairs += eager_and_deferred(shown, Sync.DEFERRED_ALL_REDUCE)
    every_deferred = {deferred for _, deferred in pairs}
    for name, facts in shown.items():
        if facts.get("sharding") == Sharding.PARAMS and name in every_deferred:
            return sorted(pairs, key=lambda pair: pair[1] != name)
    return pairs


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedSyncs:
    """A deferred backend against the eager one, in two lengths: time, then memory."""

    deferred: str
    eager: str
    full: Sequence[str]
    brief: Sequence[str]


def _compare_syncs(deferred: CellRow, eager: CellRow, pair: ComparedPair | None) -> ComparedSyncs:
    full, brief = [], []
    if pair is not None and pair.time is not None:
        full.append(f"time {ratio_text(pair.time)}, {pair.words}")
        verdict = str(pair.verdict)
        if pair.may_differ:
            verdict += MAY_DIFFER
        brief.append(f"{digits(pair.time.ratio)} ({verdict})")
    ours, theirs = deferred.peak_memory_bytes, eager.peak_memory_bytes
    if ours and theirs:
        ratio = digits(ours / theirs)
        full.append(f"memory {ratio} ({size(ours)} / {size(theirs)})")
        brief.append(ratio)
    return ComparedSyncs(deferred=deferred.backend, eager=eager.backend, full=full, brief=brief)


def _wrong(data: Analysis) -> Iterator[Finding]:
    """Which backends must not be used: each reason once, with all its cells."""
    invalid = [row for row in data.bad_rows if row.status == Status.INVALID]
    for shared in _by_reason(data, invalid):
        subject = _backends_of(data, shared.cells)
        yield warning("Do not use", _with_full_stop(shared.reason), subject=subject)


def _failed(data: Analysis) -> Iterator[Finding]:
    """Which cells failed or could not run: each reason once."""
    others = [row for row in data.bad_rows if row.status != Status.INVALID]
    for status, rows in grouped((row.status, row) for row in others).items():
        for shared in _by_reason(data, rows):
            subject = _backends_of(data, shared.cells)
            if status == Status.UNSUPPORTED:
                yield note("Not run", _with_full_stop(shared.reason), subject=subject)
            else:
                text = _with_full_stop(f"{status}: {shared.reason}")
                yield warning("Failed", text, subject=subject)


def _two_commits(data: Analysis) -> Iterator[Finding]:
    """How the commits of ``run --against`` compare, which is a report of its own."""
    commits = {cell.other_commit for cell in data.run.cells.values() if cell.other_commit}
    if commits:
        command = f"python -m bench compare {shlex.quote(str(data.folder))}"
        yield note(
            "Two commits",
            f"the cells were trained by {', '.join(commits)}, too; compare:",
            command=command,
        )


def _with_full_stop(text: str) -> str:
    if text.endswith((".", "]")):
        return text
    return f"{text}."


@dataclass(frozen=True, slots=True)
class SharedReason:
    """Why cells failed."""

    reason: str
    """That of the first."""
    cells: list[CellRow] = field(default_factory=list)


def _by_reason(data: Analysis, rows: Sequence[CellRow]) -> list[SharedReason]:
    """The cells by the reason why they failed; those that failed the same gates share one."""
    found: dict[object, SharedReason] = {}
    for row in rows:
        defect = defect_of_cell(data.run.manifest, row)
        reason = "no reason"
        if row.reason:
            reason = shortened(row.reason)
        kind: object = reason
        if defect:
            reason, kind = f"{defect} (a documented defect of the framework)", defect
        elif row.failed_gates:
            kind = (row.failed_gates, row.update_causes)
        found.setdefault(kind, SharedReason(reason)).cells.append(row)
    return list(found.values())


def _backends_of(data: Analysis, cells: Sequence[CellRow]) -> str:
    """The backends of these cells, with their N where not all cells of a backend are among them."""
    places: dict[str, list[str]] = {}
    for backend, mine in grouped((row.backend, row.cell) for row in cells).items():
        every = data.cells[data.cells["backend"] == backend]
        numbers = {cell.accumulate for cell in mine}
        where = []
        if numbers != set(every["accumulate"]):
            where.append(f"N = {', '.join(map(str, sorted(numbers)))}")
        if len(mine) < every["accumulate"].isin(numbers).sum():
            where.append(f"{len(mine)} of {plural(len(every), 'cell')}")
        places.setdefault(", ".join(where), []).append(backend)
    texts = []
    for where_of_all, names in places.items():
        text = ", ".join(names)
        if where_of_all:
            text += f" ({where_of_all})"
        texts.append(text)
    return "; ".join(texts)


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """Why cells have no verdict that decides."""

    topic: str
    reason: Reason
    text: str


def _undecided(data: Analysis, every: Sequence[Group]) -> Iterator[Finding]:
    """Why correct cells are not compared while others are, or comparisons are undecided.

    Each reason once, with the command that helps.
    """
    found: dict[OpenQuestion, dict[str, list[str]]] = {}
    first_details: dict[Reason, str] = {}
    for group in every:
        if not group.is_timed:
            continue
        for row in group.rows:
            question = _open_question(data, row, first_details)
            if question is not None:
                places = found.setdefault(question, {})
                places.setdefault(group.short_title, []).append(row.backend)
    for question in sorted(found, key=lambda question: question.topic):
        subjects = []
        for place, names in found[question].items():
            subjects.append(f"{', '.join(names)} at {place}")
        command = next_command(data.run, {question.reason}, data.folder, len(data.pool.runs))
        yield note(question.topic, question.text, subject="; ".join(subjects), command=command)


def _open_question(
    data: Analysis,
    row: RankedRow,
    first_details: dict[Reason, str],
) -> OpenQuestion | None:
    """Why a cell has no verdict that decides; None if it has one, or is wrong.

    Where details differ between cells of one reason, the first are told of all: they are kept in
    ``first_details``.
    """
    pair = data.pairs.get(row.cell_id)
    if pair is None:
        return None
    if pair.verdict is Verdict.AMBIGUOUS:
        text = UNDECIDED[pair.reason].format(data.baseline, n=num_judged(data.verdicts))
        return OpenQuestion("Undecided", pair.reason, f"{text}.")
    if pair.verdict is Verdict.NOT_COMPARABLE and row.correct == "yes":
        text = first_details.setdefault(pair.reason, _with_full_stop(shortened(pair.detail)))
        return OpenQuestion("Not compared", pair.reason, text)
    return None


def _other_days(data: Analysis) -> Iterator[Finding]:
    """What another day may change in the times."""
    if data.times_unavailable:
        return
    texts = [finding.text for finding in data.findings if finding.topic == OTHER_DAYS]
    if texts:
        yield note("Other days", f"{'; '.join(texts)}.")


def _resolution(data: Analysis) -> Iterator[Finding]:
    """How many trials a small difference would need.

    Only if some comparison is undecided for want of them.
    """
    times, lacks_trials = [], False
    for row in data.verdicts:
        if row.time is not None and row.has_interval:
            times.append(row.time)
            lacks_trials |= row.reason in (Reason.WIDE, Reason.MANY)
    if not data.pool.is_single or data.times_unavailable or not lacks_trials:
        return
    needed = max(map(trials_to_show, times))
    n = min(time.num_trials for time in times)
    if needed <= n:
        return
    minutes = _minutes_of_trials(data)
    text = (
        f"A difference of 5 % from {data.baseline} would be found in 8 of 10 runs, before Holm's "
        f"correction, with {needed} trials per cell, about {max(1, round(minutes * needed / n))} "
        f"minutes of trials; this run has {n}, in {max(1, round(minutes))}."
    )
    yield note("Resolution", text)


def _scope_text(data: Analysis) -> str:
    """What was measured, with which intervals, and what does not follow from the run."""
    counts = data.contestants["num_ok"]
    bad = set(counts.index) - set(counts[counts > 0].index)
    measured = [cell for cell_id, cell in data.run.cells.items() if cell_id not in bad]
    shown = _without_references(data)
    is_on_cpu = any(cell.device is Device.CPU for cell in shown)
    parts = [_setting_text(data, shown, is_on_cpu=is_on_cpu), _trials_text(data)]
    if not data.times_unavailable:
        parts.append(_control_text(data.control))
    wide = widest(data.verdicts)
    if wide is not None:
        parts.append(f"widest interval of a ratio {percent(wide)}")
    parts.append(summarize(measured, data.baseline))
    if bad:
        parts.append(f"{len(bad)} more without a good trial")
    if is_on_cpu and not data.times_unavailable:
        parts.append(TRANSFER)
    return f"{'; '.join(filter(None, parts))}."


def _without_references(data: Analysis) -> list[Cell]:
    """The cells but twins and references; with references if there are no others."""
    cells = [cell for cell in data.run.cells.values() if not cell.twin]
    contestants = [cell for cell in cells if not cell.is_reference]
    if contestants:
        return contestants
    return cells


def _setting_text(data: Analysis, cells: Sequence[Cell], *, is_on_cpu: bool) -> str:
    """Model, ranks, device and link."""
    sizes = data.run.tables.trials.groupby("model")["num_parameters"].max()
    models = []
    for name in dict.fromkeys(cell.model for cell in cells):
        size_of_model = parameters(sizes[name])
        models.append(f"{name} ({size_of_model})")
    machine = data.run.manifest.machine
    device = gpu_names(machine)
    if is_on_cpu:
        device = cpu_name(machine)
    numbers = sorted({cell.world_size for cell in cells})
    ranks = f"{', '.join(map(str, numbers))} ranks"
    if numbers == [1]:
        ranks = "1 rank"
    return f"{', '.join(models)} on {ranks} of {device}, {link_words(cells)}"


def _trials_text(data: Analysis) -> str:
    """How many good trials the cells have that have one."""
    counts = data.contestants["num_ok"]
    counts = counts[counts > 0]
    numbers = "0"
    if len(counts):
        ends = (str(int(counts.min())), str(int(counts.max())))
        numbers = " to ".join(dict.fromkeys(ends))
    noun = "trials"
    if numbers == "1":
        noun = "trial"
    return f"n = {numbers} good {noun} per cell{_runs_text(data)}"


def _control_text(control: ComparedPair | None) -> str:
    if control is None:
        return "no A/A pair"
    if control.time is None or not control.has_interval:
        return f"the A/A pair has no interval: {shortened(control.detail)}"
    ends = interval_text(control.time.low, control.time.high)
    return f"A/A pair at N={control.a.accumulate} {digits(control.time.ratio)} ({ends})"


def _runs_text(data: Analysis) -> str:
    """The runs of a pool, in words that follow those on the trials of its first."""
    if data.pool.is_single:
        return ""
    days = sorted({run.manifest.started[:10] for run in data.pool.runs})
    when = f"of {some(days)}"
    if len(days) > 2:
        when = f"on {len(days)} days from {days[0]} to {days[-1]}"
    return f" in the first of {len(data.pool.runs)} runs, {when}"


def shortened(text: str) -> str:
    """The text, shortened at a space if it is too long."""
    if len(text) <= LONGEST:
        return text
    whole_words = text[: LONGEST - 5].rsplit(" ", 1)[0]
    return f"{whole_words} [...]"
