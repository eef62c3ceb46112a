"""A comparison of two runs, or of two backends, as a table in the terminal and as a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.text import Text

from bench import files
from bench.formatting import markdown, plural, printable, some
from bench.grouping import grouped
from bench.judge.baseline import control_of
from bench.judge.caveats import suspect
from bench.judge.loading import missing_trials
from bench.judge.pairs import ComparedPair, Pair, frame_of_pairs
from bench.judge.pool import Pool
from bench.judge.statistics import MARGIN, Interval
from bench.judge.trial_columns import DASH
from bench.judge.verdicts import (
    ACROSS_DAYS,
    NEXT,
    Reason,
    Verdict,
    is_off,
    num_judged,
    scope_of,
)
from bench.run.machine import NOT_STORED, STORED, Changed
from bench.screen import Screen
from bench.tabular import Table, TableColumn, TableRow

COLUMNS = (
    TableColumn("cell", "cell", is_number=False),
    TableColumn("verdict", "verdict", is_number=False),
    TableColumn("ratio", "time B/A"),
    TableColumn("interval", "95 % interval", is_number=False, drop=2),
    TableColumn("n", "n", drop=3),
    TableColumn("memory", "memory B/A", drop=1),
    TableColumn("steps", "steps", is_number=False, drop=4),
    TableColumn("reason", "reason", is_number=False, drop=5),
)
"""Reasons also stand below the table."""
STYLES = {
    Verdict.FASTER: "bold blue",
    Verdict.SLOWER: "bold red",
    Verdict.SAME: "green",
    Verdict.AMBIGUOUS: "",
    Verdict.NOT_COMPARABLE: "dim",
}
DECIDED = frozenset({Reason.DIFFERENT, Reason.INSIDE_MARGIN})
"""Reasons whose details are columns of the table."""
MOST_KEYS = 6
"""Differing keys of the fingerprint that are named; ``--json`` has all."""
OTHER_TIMES = (
    "the runs were made at different times, so intervals allow for what runs of such machines "
    "differ by; for smaller differences, run both commits in turn: run --against COMMIT"
)
OF_THESE_RUNS = (
    "what runs of different days differ by is not in {which}; for a verdict, run both commits in "
    "turn: run --against COMMIT"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that is said of two runs, or of two backends of one."""

    a: str
    b: str
    """How A, the baseline, and B are called."""
    rows: Sequence[ComparedPair]
    differences: Sequence[Changed] = ()
    """Keys of the fingerprints that differ."""
    remarks: Sequence[str] = ()
    """On the cells (``bench.judge.caveats``); also said below the plots."""
    notes: Sequence[str] = ()
    margin: float = MARGIN
    threshold: float | None = None
    """The value of ``--fail-on slower``."""
    num_runs: int = 1
    """Of a pool whose backends are compared."""
    is_within: bool = True
    """Whether A and B are of the same runs."""
    is_of_days: bool = False
    """Whether A and B are runs of different days, and their intervals allow for that."""
    control_n: int | None = None
    """N of the A/A pair."""

    @property
    def scope(self) -> str:
        """Where the verdicts hold, in words that follow one."""
        return self.scope_of(self.rows)

    def scope_of(self, told: Sequence[ComparedPair]) -> str:
        """The same of those that are told."""
        if self.is_of_days:
            return ACROSS_DAYS
        if not self.is_within:
            return ""
        return scope_of(told, self.num_runs)

    @property
    def control_place(self) -> str:
        """Where the A/A pair was measured, in words that follow it."""
        if self.control_n is None:
            return ""
        return f" at N = {self.control_n}"


def headline(report: Report) -> str:
    """Who is compared with whom, and which way the ratios go."""
    return (
        f"B: {report.b}, compared with A: {report.a}; time B/A is the ratio of the times of an "
        f"optimizer step: above 1, B takes longer; verdicts are on B{report.scope}"
    )


def alarm(differences: Sequence[Changed]) -> str:
    """A warning with the keys in which the fingerprints differ; empty if there are none."""
    if not differences:
        return ""
    named = []
    for changed in differences[:MOST_KEYS]:
        named.append(f"{changed.key}: A {_value(changed.a)}, B {_value(changed.b)}")
    left = len(differences) - MOST_KEYS
    if left > 0:
        named.append(f"and {left} more: see --json")
    why = "so a ratio may have nothing to do with the code"
    return f"WARNING: DIFFERENT MACHINES OR SOFTWARE, {why}: {'; '.join(named)}"


def _value(value: object) -> str:
    if value in (NOT_STORED, STORED):
        return str(value)
    return json.dumps(value)


def table(rows: Sequence[ComparedPair]) -> Table:
    """The rows, each with its verdict in colour."""
    return Table(columns=COLUMNS, rows=[_row(row) for row in rows])


def _row(row: ComparedPair) -> TableRow:
    verdict, style = str(row.verdict), STYLES[row.verdict]
    if row.may_differ:
        verdict += ", may differ"
    if row.regressions:
        verdict += "; REGRESSED"
        style = "bold red"
    ratio = interval = n = memory = DASH
    if row.time is not None:
        ratio, n, interval = f"{row.time.ratio:.4f}", str(row.time.num_trials), "no interval"
        if row.has_interval:
            interval = f"{row.time.low:.4f} to {row.time.high:.4f}"
    if row.memory_ratio is not None:
        memory = f"{row.memory_ratio:.4f}"
    texts = {
        "cell": row.name,
        "verdict": verdict,
        "ratio": ratio,
        "interval": interval,
        "n": n,
        "memory": memory,
        "steps": _steps(row),
        "reason": str(row.reason),
    }
    return TableRow(texts, {"verdict": style})


def _steps(row: ComparedPair) -> str:
    """The optimizer steps of both sides, once if they are equal."""
    a, b = row.steps
    if a is None or b is None:
        return DASH
    if a == b:
        return str(b)
    return f"{b}, A {a}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedReason:
    """A reason with what to do next, and the details for which the table has no room."""

    text: str
    details: Sequence[str]


def reasons(rows: Sequence[ComparedPair]) -> list[ExplainedReason]:
    """Each reason that some of the rows have."""
    found = []
    for reason in Reason:
        names = grouped((row.detail, row.name) for row in rows if row.reason is reason)
        if not names:
            continue
        cells = plural(sum(map(len, names.values())), "cell")
        details = []
        if reason not in DECIDED:
            details = _with_cells(names)
        text = f"{reason} ({cells}): {NEXT[reason]}"
        found.append(ExplainedReason(text=text, details=details))
    return found


def _with_cells(names: Mapping[str, Sequence[str]]) -> list[str]:
    """Details, each with the cells that have it if there are several."""
    if len(names) == 1:
        return list(names)
    return [f"{some(of_cells)}: {detail}" for detail, of_cells in names.items()]


def show(report: Report) -> None:
    """Words and table on the terminal."""
    console = Screen()
    console.print(Text(printable(headline(report))), soft_wrap=True)
    if warning := alarm(report.differences):
        console.print(Text(printable(warning), style="bold red"), soft_wrap=True)
    table(report.rows).show(console)
    lines = []
    for explained in reasons(report.rows):
        lines.append(explained.text)
        for detail in explained.details:
            lines.append(f"  {detail}")
    for line in (*lines, "", *report.remarks, *report.notes):
        console.print(Text(printable(line)), soft_wrap=True)


def write(report: Report, folder: Path) -> list[Path]:
    """Write the same as Markdown with the forest plot, and the rows as parquet.

    Returns the paths.
    """
    from bench.report import canvas, forest

    frame, page = folder / "compare.parquet", folder / "compare.md"
    with files.replacing(frame) as draft:
        frame_of_pairs(report.rows).to_parquet(draft, index=False)
    pictures = []
    for drawing in forest.draw(report):
        stem = folder / drawing.stem
        pictures.append(canvas.save(drawing.figure, stem, drawing.words))
    files.write(page, _markdown(report, [path.name for path in pictures]))
    return [frame, page, *pictures]


def _markdown(report: Report, pictures: Sequence[str]) -> str:
    title = f"# {markdown(report.b)} against {markdown(report.a)}"
    lines = [title, "", f"{markdown(headline(report))}.", ""]
    if warning := alarm(report.differences):
        lines += [f"**{markdown(warning)}**", ""]
    for name in pictures:
        lines.append(f"![Ratios of step times with intervals]({name})")
    lines += ["", *table(report.rows).markdown()]
    lines += ["## Reasons, and what to do next", ""]
    for explained in reasons(report.rows):
        lines.append(f"- {markdown(explained.text)}")
        for detail in explained.details:
            lines.append(f"  - {markdown(detail)}")
    lines += ["", "## Notes", ""]
    for note in (*report.remarks, *report.notes):
        lines.append(f"- {markdown(note)}")
    return "\n".join([*lines, ""])


def controls(a: Pool, b: Pool) -> tuple[Interval | None, int | None, list[str]]:
    """The A/A pair with its N, of two sides the one farther from 1, and notes on it.

    None if a side has none.
    """
    sides = {"A: ": a, "B: ": b}
    if a is b:
        sides = {"": a}
    known: list[tuple[Interval, int]] = []
    found: list[str] = []
    for letter, pool in sides.items():
        control = control_of(pool)
        if control is None or control.time is None or not control.has_interval:
            text = f"{letter}{pool.first.name} has no interval of an A/A pair"
            if control is not None:
                text += f": {control.detail}"
            found.append(text)
            continue
        time = control.time
        known.append((time, control.a.accumulate))
        ends = f"{time.ratio:.4f} [{time.low:.4f}, {time.high:.4f}], n = {time.num_trials}"
        found.append(f"{letter}A/A pair: {control.a.label} against itself is {ends}")
        found += suspect(control.a, time)
    if len(known) < len(sides):
        return None, None, found
    farthest, n = max(known, key=lambda pair: _distance(pair[0]))
    return farthest, n, found


def _distance(time: Interval) -> tuple[bool, float]:
    """How far the ratio of an A/A pair is from 1; one that is off is farther than others."""
    return is_off(time), abs(math.log(time.ratio))


def notes(
    a: Pool,
    b: Pool,
    rows: list[ComparedPair],
    never: list[Pair],
    thresholds: dict[str, float],
    margin: float,
) -> list[str]:
    """What a reader should know before citing the rows, beside the remarks on their cells."""
    found: list[str] = []
    if all(row.control is None for row in rows):
        found.append("no A/A pair on both sides, so no row is called faster, slower or the same")
    if a is not b:
        found += _notes_on_days(rows)
    lacking = Counter(row.time.reason for row in rows if row.time is not None and row.time.reason)
    for reason, count in lacking.items():
        found.append(f"no interval for {count} of {plural(len(rows), 'cell')}: {reason}")
    compared = plural(num_judged(rows), "comparison")
    same = f"a ratio between {1 / (1 + margin):.4g} and {1 + margin:.4g}"
    found.append(f"same: {same}; Holm's correction over {compared}")
    sides = {"A": a, "B": b}
    if a is b:
        sides = {"the run": a}
    for side, pool in sides.items():
        missing = sum(map(missing_trials, pool.runs))
        if missing:
            text = f"{side} lacks {missing} of its trials: it is not finished, or was truncated"
            found.append(text)
    if never:
        names = ", ".join([pair.name for pair in never])
        found.append(f"left out, unsupported on both sides: {names}")
    if "slower" in thresholds:
        limit = thresholds["slower"]
        found.append(
            f"slower={_percent(limit)}: certain if the whole interval is beyond {1 + limit:.4g}, "
            "after Holm's correction"
        )
    for metric, limit in thresholds.items():
        found.append(_gate_note(metric, limit, rows))
    return found


def _notes_on_days(rows: Sequence[ComparedPair]) -> list[str]:
    """Whether intervals of two runs allow for what days differ by."""
    timed = [row for row in rows if row.has_interval]
    allowing = [row for row in timed if row.allows_for_days]
    if not timed:
        return []
    if not allowing:
        return [OF_THESE_RUNS.format(which="any interval")]
    if len(allowing) < len(timed):
        others = plural(len(timed) - len(allowing), "interval")
        return [OTHER_TIMES, OF_THESE_RUNS.format(which=others)]
    return [OTHER_TIMES]


def _gate_note(metric: str, limit: float, rows: Sequence[ComparedPair]) -> str:
    """How many cells regressed in a metric, and how many could not be checked."""
    bad, unknown = [], []
    for row in rows:
        if metric in row.regressions:
            bad.append(row.name)
        if metric in row.unchecked:
            unknown.append(row.name)
    text = f"{metric}={_percent(limit)}: {len(bad)} of {plural(len(rows), 'cell')} regressed"
    if bad:
        text += f": {some(bad)}"
    if unknown:
        text += f"; {len(unknown)} NOT CHECKED: {some(unknown)}"
    return text


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"
