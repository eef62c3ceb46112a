"""A comparison of two runs, or of two backends, as a table in the terminal and as a page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from bench.formatting import markdown, plural, some
from bench.grouping import grouped
from bench.judge.baseline import control_of
from bench.judge.caveats import suspect
from bench.judge.loading import missing_trials
from bench.judge.pairs import ComparedPair, Pair, frame_of_pairs
from bench.judge.pool import Pool
from bench.judge.statistics import MARGIN, MIN_TRIALS, Interval
from bench.judge.trial_columns import DASH
from bench.judge.verdicts import ACROSS_DAYS, NEXT, Reason, Verdict, is_off, num_judged, scope_words
from bench.run.machine import NOT_STORED, STORED, Changed
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
MOST_KEYS = 12
"""Differing keys of the fingerprint that are listed; ``--json`` has all."""


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
    is_of_days: bool = False
    """Whether A and B are runs of different days."""
    control_n: int | None = None
    """N of the A/A pair."""

    @property
    def scope(self) -> str:
        """Where the verdicts hold, in words that follow one."""
        return ACROSS_DAYS if self.is_of_days else scope_words(self.num_runs)

    @property
    def control_place(self) -> str:
        return "" if self.control_n is None else f" at N = {self.control_n}"


def headline(report: Report) -> str:
    """Who is compared with whom, and which way the ratios go."""
    return (
        f"B: {report.b}, compared with A: {report.a}; time B/A is the ratio of the times of an optimizer step: above "
        f"1, B takes longer; verdicts are on B{report.scope}"
    )


def alarm(differences: Sequence[Changed]) -> list[str]:
    """A warning with the keys in which the fingerprints differ; nothing if there are none."""
    if not differences:
        return []
    count = "1 key of the fingerprint differs" if len(differences) == 1 else f"{len(differences)} keys differ"
    found = [f"WARNING: DIFFERENT MACHINES OR SOFTWARE: {count}, so a ratio may have nothing to do with the code:"]
    found += [f"  {changed.key}: A {_value(changed.a)}, B {_value(changed.b)}" for changed in differences[:MOST_KEYS]]
    left = len(differences) - MOST_KEYS
    return [*found, f"  and {left} more: see --json"] if left > 0 else found


def _value(value: object) -> str:
    return str(value) if value in (NOT_STORED, STORED) else json.dumps(value)


def table(rows: Sequence[ComparedPair]) -> Table:
    """The rows, each with its verdict in colour."""
    return Table(columns=COLUMNS, rows=[_row(row) for row in rows])


def _row(row: ComparedPair) -> TableRow:
    time, steps, interval = row.time, row.steps, DASH
    if time is not None:
        interval = f"{time.low:.4f} to {time.high:.4f}" if row.has_interval else "no interval"
    taken = str(steps[1]) if steps[0] == steps[1] else f"{steps[1]}, A {steps[0]}"
    texts = {
        "cell": row.name,
        "verdict": f"{row.verdict}{', may differ' if row.may_differ else ''}{'; REGRESSED' if row.regressions else ''}",
        "ratio": DASH if time is None else f"{time.ratio:.4f}",
        "interval": interval,
        "n": DASH if time is None else str(time.num_trials),
        "memory": DASH if row.memory_ratio is None else f"{row.memory_ratio:.4f}",
        "steps": DASH if None in steps else taken,
        "reason": str(row.reason),
    }
    return TableRow(texts, {"verdict": "bold red" if row.regressions else STYLES[row.verdict]})


def reasons(rows: Sequence[ComparedPair]) -> list[tuple[str, list[str]]]:
    """Each reason with what to do next, and its details, for which the table has no room."""
    found = []
    for reason in Reason:
        if details := grouped((row.detail, row.name) for row in rows if row.reason is reason):
            texts = [f"{some(names)}: {text}" for text, names in details.items()] if len(details) > 1 else [*details]
            line = f"{reason} ({plural(sum(map(len, details.values())), 'cell')}): {NEXT[reason]}"
            found.append((line, [] if reason in DECIDED else texts))
    return found


def show(report: Report) -> None:
    """Words and table on the terminal."""
    console = Console()
    console.print(Text(headline(report)), soft_wrap=True)
    for line in alarm(report.differences):
        console.print(Text(line, style="bold red"), soft_wrap=True)
    table(report.rows).show(console)
    why = [line for reason, details in reasons(report.rows) for line in (reason, *(f"  {text}" for text in details))]
    for line in (*why, "", *report.remarks, *report.notes):
        console.print(Text(line), soft_wrap=True)


def write(report: Report, folder: Path) -> list[Path]:
    """Write the same as Markdown with the forest plot, and the rows as parquet; returns the paths."""
    from bench.report import canvas, forest

    frame, page = folder / "compare.parquet", folder / "compare.md"
    frame_of_pairs(report.rows).to_parquet(frame, index=False)
    pictures = [canvas.save(each.figure, folder / each.stem, each.words) for each in forest.draw(report)]
    page.write_text(_markdown(report, [path.name for path in pictures]), encoding="utf-8")
    return [frame, page, *pictures]


def _markdown(report: Report, pictures: Sequence[str]) -> str:
    lines = [f"# {markdown(report.b)} against {markdown(report.a)}", "", f"{markdown(headline(report))}.", ""]
    if report.differences:
        first, *keys = alarm(report.differences)
        lines += [f"**{first}**", "", *(f"- {markdown(key)}" for key in keys), ""]
    lines += [f"![Ratios of step times with intervals]({name})" for name in pictures]
    lines += ["", *table(report.rows).markdown(), "## Reasons, and what to do next", ""]
    for reason, details in reasons(report.rows):
        lines += [f"- {markdown(reason)}", *(f"  - {markdown(detail)}" for detail in details)]
    lines += ["", "## Notes", "", *(f"- {markdown(note)}" for note in (*report.remarks, *report.notes)), ""]
    return "\n".join(lines)


def controls(a: Pool, b: Pool) -> tuple[Interval | None, int | None, list[str]]:
    """The A/A pair with its N, of two sides the one farther from 1, and notes on it; None if a side has none."""
    known: list[tuple[Interval, int]] = []
    found: list[str] = []
    sides = [("", a)] if a is b else [("A: ", a), ("B: ", b)]
    for letter, pool in sides:
        control = control_of(pool)
        if control is None or control.time is None or not control.has_interval:
            why = "" if control is None else f": {control.detail}"
            found.append(f"{letter}{pool.first.name} has no interval of an A/A pair{why}")
            continue
        time = control.time
        known.append((time, control.a.accumulate))
        ends = f"{time.ratio:.4f} [{time.low:.4f}, {time.high:.4f}], n = {time.num_trials}"
        found += [f"{letter}A/A pair: {control.a.label} against itself is {ends}", *suspect(control.a, time)]
    if len(known) < len(sides):
        return None, None, found
    farthest, n = max(known, key=lambda pair: (is_off(pair[0]), abs(math.log(pair[0].ratio))))
    return farthest, n, found


def notes(
    a: Pool, b: Pool, rows: list[ComparedPair], never: list[Pair], thresholds: dict[str, float], margin: float
) -> list[str]:
    """What a reader should know before citing the rows, beside the remarks on their cells."""
    found = []
    if not any(row.control for row in rows):
        found.append("no A/A pair on both sides, so no row is called faster, slower or the same")
    if a is not b:
        found.append(
            "the runs were made at different times, so intervals allow for what runs of such machines differ by; "
            "smaller differences show only between cells of one run, which are interleaved"
        )
    if few := sum(row.time is not None and not row.has_interval for row in rows):
        found.append(f"no interval for {few} of {plural(len(rows), 'cell')}: fewer than {MIN_TRIALS} trials")
    found.append(
        f"same: a ratio between {1 / (1 + margin):.4g} and {1 + margin:.4g}; Holm's correction over "
        f"{plural(num_judged(rows), 'comparison')}"
    )
    for letter, pool in (("A", a), ("B", b)) if a is not b else (("the run", a),):
        if missing := sum(map(missing_trials, pool.runs)):
            found.append(f"{letter} lacks {missing} of its trials: it is not finished, or was truncated")
    if never:
        found.append(f"left out, unsupported on both sides: {', '.join(pair.name for pair in never)}")
    if "slower" in thresholds:
        found.append(
            f"slower={_percent(thresholds['slower'])}: certain if the whole interval is beyond "
            f"{1 + thresholds['slower']:.4g}, after Holm's correction"
        )
    for metric, limit in thresholds.items():
        bad = [row.name for row in rows if metric in row.regressions]
        unknown = [row.name for row in rows if metric in row.unchecked]
        text = f"{metric}={_percent(limit)}: {len(bad)} of {plural(len(rows), 'cell')} regressed"
        text += f": {some(bad)}" if bad else ""
        found.append(text + (f"; {len(unknown)} NOT CHECKED: {some(unknown)}" if unknown else ""))
    return found


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"
