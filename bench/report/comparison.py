"""A comparison as a table in the terminal and as a page."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd
from rich import box
from rich.table import Table
from rich.text import Text

from bench.judge.pairs import ComparedPair, record
from bench.judge.verdicts import Exact, Exactly, Reason, Verdict
from bench.plan.columns import COLUMNS
from bench.run.machine import Changed
from bench.words import plural

if TYPE_CHECKING:
    from bench.judge.loading import Run
    from bench.judge.pairs import Pair

HEADER = ("cell", "verdict", "time B/A", "95 % interval", "n", "memory B/A", "steps", "reason")
DROPPED = ("reason", "steps", "n", "95 % interval", "memory B/A")
"""Columns that a narrow terminal does without, the first of them first; reasons stand below the table too."""
STYLES = {Verdict.FASTER: "bold blue", Verdict.SLOWER: "bold red", Verdict.SAME: "green", Verdict.AMBIGUOUS: ""}
DECIDED = frozenset({Reason.OUTSIDE_FLOOR, Reason.INSIDE_MARGIN})
"""Reasons whose details the table's columns say."""
NAMED = 6
"""Cells that are named where they have the same to be said of them."""
MOST_KEYS = 12
"""Differing keys of the fingerprint that are listed; ``--json`` has all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that is said of two runs, or of two backends of one."""

    a: str
    b: str
    """What A, the baseline, and B are called."""
    rows: Sequence[ComparedPair]
    differences: Sequence[Changed]
    """Of the fingerprints."""
    remarks: Sequence[str]
    """On the cells (``bench.judge.remarks``), also below the plots."""
    notes: Sequence[str]
    margin: float
    threshold: float | None = None
    """Of ``--fail-on slower``."""


def frame(rows: Sequence[ComparedPair]) -> pd.DataFrame:
    """The rows, at least one, as a table: compare.parquet of a comparison, ratios.parquet of a run."""
    typed = {name: column.dtype for name, column in COLUMNS["ratios"].items() if column.dtype != "string"}
    return pd.DataFrame([record(row) for row in rows]).astype(typed)


def headline(report: Report) -> str:
    """Who is compared with whom, and which way the ratios go."""
    return (
        f"B: {report.b}, compared with A: {report.a}; time B/A is the ratio of the times of an optimizer step: above "
        "1, B takes longer; verdicts are on B"
    )


def alarm(differences: Sequence[Changed]) -> list[str]:
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


def cells(row: ComparedPair) -> tuple[str, ...]:
    """What the table says of a pair."""
    time, judgement = row.time, row.judgement
    interval = "-"
    if time is not None:
        interval = "no interval" if time.low is None else f"{time.low:.4f} to {time.high:.4f}"
    return (
        row.pair.name,
        f"{judgement.verdict}{' (forced)' * row.forced}{'; REGRESSED' if row.regressions else ''}",
        "-" if time is None else f"{time.ratio:.4f}",
        interval,
        "-" if time is None else str(time.num_trials),
        _memory(row.memory),
        _steps(row.steps),
        str(judgement.reason),
    )


def _memory(number: Exactly) -> str:
    return "-" if number.ratio is None else f"{number.ratio:.4f}"


def _steps(number: Exactly) -> str:
    if number.verdict is Exact.UNKNOWN:
        return "-"
    return f"{number.verdict}, {number.b}" + ("" if number.a == number.b else f" of {number.a}")


def table(rows: Sequence[ComparedPair], width: int) -> Table:
    """The rows on a terminal of this width. What was forced is struck through, and the verdict says so."""
    texts = [cells(row) for row in rows]
    widths = {name: max(map(len, [name, *(row[i] for row in texts)])) + 1 for i, name in enumerate(HEADER)}
    shown = list(HEADER)
    for name in DROPPED:
        if sum(widths[one] for one in shown) > width:
            shown.remove(name)
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in shown:
        found.add_column(name, justify="right" if name in {"time B/A", "n", "memory B/A"} else "left")
    for row, words in zip(rows, texts, strict=True):
        styled = {name: Text(word) for name, word in zip(HEADER, words, strict=True)}
        if row.forced:
            for name in HEADER[2:7]:
                styled[name].stylize("strike")
        barred = row.judgement.verdict is Verdict.NOT_COMPARABLE
        style = "dim" if barred else STYLES[row.judgement.verdict]
        styled["verdict"].stylize("bold red" if row.regressions else style)
        found.add_row(*(styled[name] for name in shown))
    return found


def reasons(rows: Sequence[ComparedPair]) -> list[str]:
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
    lines += ["", f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
    for row in report.rows:
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


LISTED = 4
"""Cells that are named where they have the same to be said of them; of more, the first ones."""


def notes_on(
    a: Run, b: Run, rows: list[ComparedPair], never: list[Pair], thresholds: dict[str, float], margin: float
) -> list[str]:
    """What a reader should know, as sentences."""
    from bench.judge import loading
    from bench.judge import pairs as judge_pairs

    found = judge_pairs.notes(a, b, rows, margin)
    for letter, one in (("A", a), ("B", b)) if a is not b else (("", a),):
        if missing := loading.missing_trials(one):
            found.append(f"{letter or 'the run'} lacks {missing} of its trials: it is not finished, or was truncated")
    if never:
        found.append(f"left out, unsupported on both sides: {', '.join(pair.name for pair in never)}")
    if "slower" in thresholds:
        found.append(
            f"slower={_percent(thresholds['slower'])}: certain if the whole interval is beyond "
            f"{1 + thresholds['slower']:.4g}, after Holm's correction; with no noise floor, the threshold must be "
            "above what the machine does by itself"
        )
    for metric, limit in thresholds.items():
        bad = [row for row in rows if metric in row.regressions]
        unknown = [row for row in rows if metric in row.unchecked]
        words = f"{metric}={_percent(limit)}: {len(bad)} of {plural(len(rows), 'cell')} regressed"
        words += f": {_listed(bad)}" if bad else ""
        found.append(words + (f"; {len(unknown)} NOT CHECKED: {_listed(unknown)}" if unknown else ""))
    return found


def _listed(rows: list[ComparedPair]) -> str:
    names = [row.pair.name for row in rows]
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _percent(value: float) -> str:
    return f"{100 * value:.4g}%"
