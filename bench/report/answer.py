"""What a run says, in a few findings and one table: the first screen of the page and of report.md, and the terminal.

Findings are made from verdicts and exact counts. A ratio is always the time of X over the time of Y: below 1, X is
faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from bench.findings import Finding, good, note, warning
from bench.formatting import alike, digits, plural, size, some
from bench.grouping import grouped
from bench.judge.analysis import Analysis, CellRow, defect_of_cell
from bench.judge.baseline import percent, widest
from bench.judge.caveats import OTHER_DAYS, TRANSFER, link_words
from bench.judge.next_steps import next_command
from bench.judge.pairs import ComparedPair
from bench.judge.statistics import trials_to_show
from bench.judge.verdicts import MAY_DIFFER, Reason, Verdict, num_judged, scope_words
from bench.measure.host import IDLE_SHARE
from bench.plan.cell import Device, Sharding, Status, Sync, summarize
from bench.report.descriptions import cpu_name, eager_and_deferred, gpu_names, parameters
from bench.report.ranking import Group, ends_text, groups, interval_text, ratio_text

LONGEST = 240
"""Characters of a reason; the table of failed cells has it in full."""
UNDECIDED = {
    Reason.WIDE: "statistically indistinguishable from {}: the interval contains 1, and is wider than the margin",
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
        return (*([self.alarm] if self.alarm else []), *self.statements, self.scope)


def answer(data: Analysis) -> Answer:
    """The answer of a run."""
    every = groups(data)
    statements = [*_on_a_busy_machine(data)]
    for group in every[:1]:
        statements += [*_fastest(data, group), *_least(data, group), *_deferred_against_eager(data, group)]
    statements += [*_wrong(data), *_failed(data), *_undecided(data, every), *_other_days(data), *_resolution(data)]
    alarm = data.times_unavailable
    return Answer(
        alarm=alarm and replace(alarm, text=_with_full_stop(shortened(alarm.text))),
        statements=tuple(statements),
        scope=note("Scope", _scope_text(data)),
        groups=tuple(every),
        remarks=tuple(data.remarks),
    )


def _on_a_busy_machine(data: Analysis) -> Iterator[Finding]:
    """Of a run beside other programs: what is valid nevertheless, and for how long times need an idle machine."""
    if not data.times_unavailable or not any(row.reason is Reason.DISTURBED for row in data.verdicts):
        return
    text = "memory, bytes, step counts, updates and losses; other programs do not change them."
    yield good("Still valid", text)
    minutes = max(1, round(float(data.run.tables.trials["wall_s"].sum()) / 60))
    text = (
        f"other programs may use at most {100 * IDLE_SHARE:g} % of its CPUs while the trials run, "
        f"which took {plural(minutes, 'minute')} here."
    )
    yield note("Times need an idle machine", text)


def _fastest(data: Analysis, group: Group) -> Iterator[Finding]:
    """The fastest correct backend, and those that are slower by no verdict."""
    timed = [row for row in group.rows if row.correct == "yes" and row.step_time_s is not None]
    if not timed:
        return
    best, *others = timed
    assert best.step_time_s is not None, "those without one are left out"
    ends = ends_text(best.step_time_low_s, best.step_time_high_s)
    text = f"{digits(best.step_time_s)} s per step{ends} at {group.short_title}{_scope_words(data)}"
    pairs = data.against(best.backend)
    near_ids = data.not_slower([row.cell_id for row in timed], best.cell_id)
    if near := [row for row in timed if row.cell_id in near_ids]:
        named = ", ".join(_with_ratio(row.backend, pairs.get(row.cell_id)) for row in near)
        text += f". Not shown to be slower: {named}"
        told = [row.backend for row in near if (pair := pairs.get(row.cell_id)) and _looks_slower(pair)]
        if told:
            looks = "looks" if len(told) == 1 else "look"
            count = num_judged(pairs.values())
            text += f". Alone, {some(told)} {looks} slower; among {count} comparisons that may be chance"
    elif others:
        text += f". Next: {_with_ratio(others[0].backend, pairs.get(others[0].cell_id))} times its time"
    yield good("Fastest correct backend", f"{text}.", subject=best.backend)


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
    fine = [row for row in group.rows if row.status == Status.OK]
    known = [(row, row.peak_memory_bytes) for row in fine if row.peak_memory_bytes is not None]
    if not known or data.run.manifest.finished is None:  # what is to come may need less
        return
    (fastest, peak_of_fastest), least = known[0], min(peak for _, peak in known)
    best = [row for row, peak in known if alike(peak, least)]
    text = f"peak memory per rank {size(least)}, at {group.short_title}"
    pairs = data.against(fastest.backend) if group.is_timed else {}
    times = sorted(pair.time.ratio for row in best if (pair := pairs.get(row.cell_id)) and pair.time)
    if fastest not in best and times:
        share, ends = 100 * (1 - least / peak_of_fastest), map(digits, (times[0], times[-1]))
        text += (
            f": {share:.0f} % less than {fastest.backend}, at {' to '.join(dict.fromkeys(ends))} times its step time"
            f"{_scope_words(data)}"
        )
    yield good("Least memory", f"{text}.", subject=", ".join(row.backend for row in best))


def _deferred_against_eager(data: Analysis, group: Group) -> Iterator[Finding]:
    """Deferred against eager sync: of the run's first backend that shards parameters in full, of others in one line."""
    rows = {row.backend: row for row in group.rows}
    shown = {name: facts for name, facts in data.run.manifest.backends.items() if name in rows}
    pairs = [pair for how in (Sync.DEFERRED, Sync.DEFERRED_ALL_REDUCE) for pair in eager_and_deferred(shown, how)]
    sharded = [name for name, facts in shown.items() if facts.get("sharding") == Sharding.PARAMS]
    first = next((name for name in sharded if name in {deferred for _, deferred in pairs}), "")
    full, short = [], []
    for eager, deferred in sorted(pairs, key=lambda pair: pair[1] != first):
        pair = data.compared(rows[deferred].cell_id, rows[eager].cell_id) if group.is_timed else None
        texts, brief = [], []
        if pair is not None and pair.time is not None:
            texts.append(f"time {ratio_text(pair.time)}, {pair.words}")
            turning = MAY_DIFFER if pair.may_differ else ""
            brief.append(f"{digits(pair.time.ratio)} ({pair.verdict}{turning})")
        ours, theirs = (rows[name].peak_memory_bytes for name in (deferred, eager))
        if ours and theirs:
            texts.append(f"memory {digits(ours / theirs)} ({size(ours)} / {size(theirs)})")
            brief.append(digits(ours / theirs))
        if texts:
            full.append((f"{deferred} / {eager}", f"{'; '.join(texts)}, at {group.short_title}."))
            short.append(f"{deferred} {', '.join(brief)}")
    for lead, text in full[:1]:
        yield good("Deferred against eager", text, subject=lead)
    if short[1:]:
        what, scope = ("time and memory", _scope_words(data)) if group.is_timed else ("memory", "")
        yield note("Other families", f"{what} at {group.short_title}{scope}, deferred / eager: {'; '.join(short[1:])}.")


def _wrong(data: Analysis) -> Iterator[Finding]:
    """Which backends must not be used: each reason once, with all its cells."""
    invalid = [row for row in data.bad_rows if row.status == Status.INVALID]
    for reason, cells in _by_reason(data, invalid):
        yield warning("Do not use", _with_full_stop(reason), subject=_backends_of(data, cells))


def _failed(data: Analysis) -> Iterator[Finding]:
    """Which cells failed or could not run: each reason once."""
    others = [row for row in data.bad_rows if row.status != Status.INVALID]
    for status, rows in grouped((row.status, row) for row in others).items():
        for reason, cells in _by_reason(data, rows):
            named = _backends_of(data, cells)
            if status == Status.UNSUPPORTED:
                yield note("Not run", _with_full_stop(reason), subject=named)
            else:
                yield warning("Failed", _with_full_stop(f"{status}: {reason}"), subject=named)


def _with_full_stop(text: str) -> str:
    return text if text.endswith((".", "]")) else f"{text}."


def _by_reason(data: Analysis, rows: Sequence[CellRow]) -> list[tuple[str, list[CellRow]]]:
    """The cells by the reason why they failed, that of the first; cells that failed the same gates share one."""
    found: dict[object, tuple[str, list[CellRow]]] = {}
    for row in rows:
        defect = defect_of_cell(data.run.manifest, row)
        reason = shortened(row.reason or "no reason")
        kind: object = reason
        if defect:
            reason, kind = f"{defect} (a documented defect of the framework)", defect
        elif row.failed_gates:
            kind = (row.failed_gates, row.update_causes)
        found.setdefault(kind, (reason, []))[1].append(row)
    return list(found.values())


def _backends_of(data: Analysis, cells: Sequence[CellRow]) -> str:
    """The backends of these cells, with their N where not all cells of a backend are among them."""
    everywhere = data.cells.groupby("backend")["accumulate"].agg(set)
    sizes = data.cells.groupby("backend").size()
    places: dict[str, list[str]] = {}
    for backend in dict.fromkeys(row.backend for row in cells):
        mine = [row.cell for row in cells if row.backend == backend]
        numbers = sorted({cell.accumulate for cell in mine})
        where = "" if set(numbers) == everywhere[backend] else f"N = {', '.join(map(str, numbers))}"
        at_these = data.cells[(data.cells["backend"] == backend) & data.cells["accumulate"].isin(numbers)]
        if len(mine) < len(at_these):
            where = ", ".join(filter(None, (where, f"{len(mine)} of {plural(sizes[backend], 'cell')}")))
        places.setdefault(where, []).append(backend)
    return "; ".join(f"{', '.join(names)}{f' ({where})' if where else ''}" for where, names in places.items())


def _undecided(data: Analysis, every: Sequence[Group]) -> Iterator[Finding]:
    """Why correct cells are not compared while others are, or comparisons are undecided, and the command that helps."""
    found: dict[tuple[str, Reason, str], dict[str, list[str]]] = {}
    texts: dict[Reason, str] = {}
    for group in every:
        for row in group.rows:
            pair = data.pairs.get(row.cell_id) if group.is_timed else None
            if pair is not None and pair.verdict is Verdict.AMBIGUOUS:
                text = UNDECIDED[pair.reason].format(data.baseline, n=num_judged(data.verdicts))
                topic, text = "Undecided", f"{text}."
            elif pair is not None and pair.verdict is Verdict.NOT_COMPARABLE and row.correct == "yes":
                topic, text = "Not compared", texts.setdefault(pair.reason, _with_full_stop(shortened(pair.detail)))
            else:
                continue
            found.setdefault((topic, pair.reason, text), {}).setdefault(group.short_title, []).append(row.backend)
    for (topic, reason, text), places in sorted(found.items(), key=lambda item: item[0][0]):
        named = "; ".join(f"{', '.join(names)} at {place}" for place, names in places.items())
        command = next_command(data.run, {reason}, data.folder, len(data.pool.runs))
        yield note(topic, text, subject=named, command=command)


def _other_days(data: Analysis) -> Iterator[Finding]:
    """What another day may change in the times."""
    if data.times_unavailable:
        return
    texts = [finding.text for finding in data.findings if finding.topic == OTHER_DAYS]
    if texts:
        yield note("Other days", f"{'; '.join(texts)}.")


def _resolution(data: Analysis) -> Iterator[Finding]:
    """How many trials a small difference would need, if some comparison is undecided for want of them."""
    rows = [row for row in data.verdicts if row.has_interval]
    if (
        not data.pool.is_single
        or data.times_unavailable
        or not any(row.reason in (Reason.WIDE, Reason.MANY) for row in rows)
    ):
        return
    times = [row.time for row in rows if row.time is not None]
    needed, n = max(trials_to_show(time) for time in times), min(time.num_trials for time in times)
    if needed <= n:
        return
    minutes = float(data.run.tables.trials["wall_s"].sum()) / 60
    text = (
        f"A difference of 5 % between any two cells would show in 8 of 10 runs with {needed} trials per cell, about "
        f"{max(1, round(minutes * needed / n))} minutes of trials; this run has {n}, in {max(1, round(minutes))}."
    )
    yield note("Resolution", text)


def _scope_text(data: Analysis) -> str:
    """Model, ranks, device, link, counts and the A/A pair, and what does not follow from the run."""
    run, cells = data.run, [cell for cell in data.run.cells.values() if not cell.twin]
    shown = [cell for cell in cells if not cell.is_reference] or cells
    sizes = run.tables.trials.groupby("model")["num_parameters"].max()
    models = [f"{name} ({parameters(sizes[name])})" for name in dict.fromkeys(c.model for c in shown)]
    ranks = ", ".join(str(number) for number in sorted({cell.world_size for cell in shown}))
    cpu = any(cell.device is Device.CPU for cell in shown)
    about = run.manifest.machine
    counts = data.contestants.loc[data.contestants["num_ok"] > 0, "num_ok"]
    bad = set(data.contestants.index) - set(counts.index)
    trials = " to ".join(dict.fromkeys(str(int(n)) for n in (counts.min(), counts.max()))) if len(counts) else "0"
    wide = widest(data.verdicts)
    parts = [
        f"{', '.join(models)} on {ranks} rank{'' if ranks == '1' else 's'} of "
        f"{cpu_name(about) if cpu else gpu_names(about)}, {link_words(shown)}",
        f"n = {trials} good {'trial' if trials == '1' else 'trials'} per cell{_runs_text(data)}",
        "" if data.times_unavailable else _control_text(data.control),
        "" if wide is None else f"widest interval of a ratio {percent(wide)}",
        summarize((cell for name, cell in run.cells.items() if name not in bad), data.baseline),
        f"{len(bad)} more without a good trial" * bool(bad),
        TRANSFER if cpu and not data.times_unavailable else "",
    ]
    return f"{'; '.join(filter(None, parts))}."


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
    days = sorted(run.manifest.started[:10] for run in data.pool.runs)
    return f" in the first of {len(days)} runs, of {some(list(dict.fromkeys(days)))}"


def shortened(text: str) -> str:
    """The text, shortened at a space if it is too long."""
    return text if len(text) <= LONGEST else text[: LONGEST - 5].rsplit(" ", 1)[0] + " [...]"
