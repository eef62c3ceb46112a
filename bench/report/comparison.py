"""A comparison as a table in the terminal and as a page."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from bench.analysis.compare import Difference, Number, Row, record
from bench.analysis.verdicts import Exact, Reason, Verdict
from bench.words import plural

HEADER = ("cell", "verdict", "time B/A", "95 % interval", "n", "peak memory B/A", "steps", "reason")
STYLES = {Verdict.FASTER: "bold blue", Verdict.SLOWER: "bold red", Verdict.SAME: "green", Verdict.AMBIGUOUS: ""}
DECIDED = frozenset({Reason.OUTSIDE_FLOOR, Reason.INSIDE_MARGIN})
"""Reasons whose details the table's columns say."""
NAMED = 6
"""Cells that are named where they have the same to be said of them."""
MOST_KEYS = 12
"""Differing keys of the fingerprint that are listed; ``--json`` has all."""
DTYPES = {
    "forced": "bool",
    **dict.fromkeys(("ratio", "low", "high", "p_different", "p_same", "peak_memory_ratio"), "Float64"),
    "num_trials": "Int64",
    "paired": "boolean",
    **dict.fromkeys(
        ("peak_memory_a_bytes", "peak_memory_b_bytes", "optimizer_steps_a", "optimizer_steps_b"),
        "Int64",
    ),
}
"""Columns of compare.parquet that may be empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that is said of two runs, or of two backends of one."""

    a: str
    b: str
    """What A, the baseline, and B are called."""
    rows: Sequence[Row]
    differences: Sequence[Difference]
    """Of the fingerprints."""
    remarks: Sequence[str]
    """On the cells (``bench.analysis.remarks``), also below the plots."""
    notes: Sequence[str]
    margin: float
    threshold: float | None = None
    """Of ``--fail-on slower``."""


def frame(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows, at least one, as a table: compare.parquet of a comparison, ratios.parquet of a run."""
    return pd.DataFrame([record(row) for row in rows]).astype(DTYPES)


def headline(report: Report) -> str:
    """Who is compared with whom, and which way the ratios go."""
    return (
        f"B: {report.b}, compared with A: {report.a}; time B/A is the ratio of the times of an optimizer step: above "
        "1, B takes longer; verdicts are on B"
    )


def alarm(differences: Sequence[Difference]) -> list[str]:
    """Says loudly that the fingerprints differ, and where; nothing if they do not."""
    if not differences:
        return []
    count = "1 key of the fingerprint differs" if len(differences) == 1 else f"{len(differences)} keys differ"
    found = [f"WARNING: DIFFERENT MACHINES OR SOFTWARE: {count}, so a ratio may have nothing to do with the code:"]
    found += [f"  {one.key}: A {_value(one.a)}, B {_value(one.b)}" for one in differences[:MOST_KEYS]]
    left = len(differences) - MOST_KEYS
    return [*found, f"  and {left} more: see --json"] if left > 0 else found


def _value(value: object) -> str:
    return value if isinstance(value, str) and value.startswith("(") else json.dumps(value)


def groups(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """The rows by group, in order."""
    return [(title, list(those)) for title, those in itertools.groupby(rows, key=lambda row: row.pair.group)]


def cells(row: Row) -> tuple[str, ...]:
    """What the table says of a pair."""
    time, judgement = row.time, row.judgement
    barred = judgement.verdict is Verdict.NOT_COMPARABLE
    interval = "-"
    if time is not None:
        interval = "no interval" if time.low is None else f"{time.low:.4f} to {time.high:.4f}"
    return (
        row.pair.name,
        f"{judgement.verdict} (forced)" if row.forced else str(judgement.verdict),
        "-" if time is None else f"{time.ratio:.4f}",
        interval,
        "-" if time is None else str(time.num_trials),
        "-" if barred and not row.forced else _memory(row.memory) + _regressed(row, "memory"),
        "-" if barred and not row.forced else _steps(row.steps),
        str(judgement.reason) + _regressed(row, "slower"),
    )


def _regressed(row: Row, metric: str) -> str:
    return "; REGRESSED" if metric in row.regressions else ""


def _memory(number: Number) -> str:
    if number.verdict.verdict is Exact.UNKNOWN:
        return "unknown"
    share = number.verdict.ratio
    return f"{number.verdict.verdict}" + ("" if share is None or share == 1 else f", {share:.4f}")


def _steps(number: Number) -> str:
    if number.verdict.verdict is Exact.UNKNOWN:
        return "unknown"
    return f"{number.verdict.verdict}, {number.b}" + ("" if number.a == number.b else f" of {number.a}")


def table(title: str, rows: Sequence[Row]) -> Table:
    """One group of rows in the terminal. What was forced is struck through, and the verdict says so."""
    found = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in HEADER:
        found.add_column(name, justify="right" if name in {"time B/A", "n"} else "left")
    for row in rows:
        texts = [Text(word) for word in cells(row)]
        if row.forced:
            for text in texts[2:7]:
                text.stylize("strike")
        style = "dim" if row.judgement.verdict is Verdict.NOT_COMPARABLE else STYLES[row.judgement.verdict]
        texts[1].stylize(style)
        if row.regressions:
            texts[-1].stylize("bold red")
        found.add_row(*texts)
    return found


def reasons(rows: Sequence[Row]) -> list[str]:
    """Each reason with what to do next, and the details that the table has no room for."""
    found = []
    for reason in Reason:
        those = [row for row in rows if row.judgement.reason is reason]
        if not those:
            continue
        found.append(f"{reason} ({plural(len(those), 'cell')}): {those[0].judgement.next}")
        if reason in DECIDED:
            continue
        details: dict[str, list[str]] = {}
        for row in those:
            details.setdefault(row.judgement.detail, []).append(row.pair.name)
        for detail, names in details.items():
            who = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            found.append(f"  {detail}" if len(details) == 1 else f"  {who}: {detail}")
    return found


def markdown(report: Report, pictures: Iterable[str]) -> str:
    """The page: the same words and tables, and the plots beside it."""
    lines = [f"# {_safe(report.b)} against {_safe(report.a)}", "", _safe(headline(report)) + ".", ""]
    if report.differences:
        first, *keys = alarm(report.differences)
        lines += [f"**{first}**", "", *(f"- {_safe(key.strip())}" for key in keys), ""]
    lines += [f"![Ratios of step times with intervals]({name})" for name in pictures]
    for title, rows in groups(report.rows):
        lines += ["", f"## {_safe(title)}", "", f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
        for row in rows:
            words = [_safe(word) for word in cells(row)]
            if row.forced:
                words[2:7] = [f"~~{word}~~" for word in words[2:7]]
            lines.append(f"| {' | '.join(words)} |")
    lines += ["", "## Reasons, and what to do next", ""]
    lines += [("  - " if line.startswith(" ") else "- ") + _safe(line.strip()) for line in reasons(report.rows)]
    lines += ["", "## Notes", "", *(f"- {_safe(note)}" for note in (*report.remarks, *report.notes)), ""]
    return "\n".join(lines)


def _safe(text: str) -> str:
    """One line in which nothing is read as markup."""
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*\[\]|])", r"\\\1", plain)
