"""The weights of micro-batches by version, as tables: what changed when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import groupby
from typing import Any

from packaging.version import Version

from bench.tabular import markdown_table
from studies.versions.grid import FRAMEWORKS, ON_TOP, RECORDS, VERSIONS
from studies.versions.layers import Record, read_records

TITLES = {
    "engine": "DeepSpeed's engine in a loop",
    "accelerate": "Accelerate with the DeepSpeed plugin",
    "lightning": "Lightning's DeepSpeedStrategy",
    "trainer": "transformers' Trainer with a DeepSpeed config",
}
NAMES = {
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "transformers": "transformers",
}
INTRODUCTION = """## Weights of micro-batches by version

Two windows of N = 4 micro-batches, SGD with learning rate 1, one process over gloo on the CPU. Right is 1/4 for each; \
other weights are those of the first window, and those of the second where they differ. Each version was installed on \
top of the project's environment (versions of transformers 4 with the Accelerate of their time, Lightning 2.1.4 with \
DeepSpeed 0.15.4, which newer ones refuse); torch is {torch}. `offload` is \
`offload_optimizer` on the CPU. Lightning's strategy asks for CUDA, so a subclass replaces the three methods that do. \
`nox -s versions -- --weights` writes [version-weights.jsonl](version-weights.jsonl).
"""
RAISES = "raises"


def fraction(weight: float) -> str:
    """A weight as a short fraction, or rounded: ``1/4``, ``0``, ``0.1237``."""
    exact = Fraction(weight).limit_denominator(64)
    return str(exact) if abs(float(exact) - weight) <= 1e-3 * abs(weight) else f"{weight:.4g}"


def spelled(measured: Any) -> str:
    """Weights of one window or of several, or any other measurement, in words."""
    if not isinstance(measured, list):
        return str(measured)
    if measured and isinstance(measured[0], list):
        windows = [spelled(window) for window in measured]
        return windows[0] if len(set(windows)) == 1 else "; ".join(windows)
    if all(isinstance(value, int) for value in measured):
        return ", ".join(map(str, measured))
    texts = [fraction(value) for value in measured]
    return f"{texts[0]} each" if len(texts) > 1 and len(set(texts)) == 1 else " ".join(texts)


def cell(record: Record) -> str:
    if record.error:
        return "not measured"
    if isinstance(record.measured, str):
        raised = record.measured.split(". ")[0].partition(", but found ")[0]
        return f"{RAISES} {raised.rstrip('.')}"
    return "right" if record.is_right else f"**{spelled(record.measured)}**"


@dataclass(frozen=True, slots=True)
class Row:
    """What one version of a package does: a text for each case."""

    package: str
    version: str
    texts: tuple[str, ...]


def weights_section(records: Sequence[Record] | None = None) -> str:
    """One table for each framework that trains with DeepSpeed."""
    records = read_records(RECORDS) if records is None else records
    torch = ", ".join(sorted({r.packages["torch"] for r in records if "torch" in r.packages}))
    lines = [INTRODUCTION.format(torch=torch)]
    engine: set[Row] = set()
    for framework in FRAMEWORKS:
        script = f"versions/weights_{framework}"
        of_framework = [record for record in records if record.script == script]
        cases = list(dict.fromkeys(record.case for record in of_framework if record.case))
        found = weights(of_framework, cases)
        lines += [f"### {TITLES[framework]}", "", *weights_table(found, cases, engine)]
        engine = engine or set(found)
    return "\n".join(lines)


def weights(records: Sequence[Record], cases: Sequence[str]) -> list[Row]:
    """A row for each version, in the order of ``ON_TOP`` and ``VERSIONS``."""
    rows = []
    for package in ON_TOP:
        for asked in VERSIONS[package]:
            found = [record for record in records if record.asked == asked]
            if not found:
                continue
            cells = {record.case: cell(record) for record in found}
            number = asked[0].partition("==")[2]
            failed = [record.error for record in found if record.error]
            texts = tuple(cells.get(case, failed[0] if failed else "") for case in cases)
            rows.append(Row(NAMES[package], number, texts))
    return rows


def weights_table(rows: Sequence[Row], cases: Sequence[str], engine: Collection[Row]) -> list[str]:
    """A row for neighbouring versions of a package that do the same, a column for each case.

    Rows that are as the engine's are counted below the table, and what is raised is told there.
    """
    shared: list[list[str]] = []
    raised: dict[str, list[str]] = {}
    for (package, texts), alike in groupby(
        (row for row in rows if row not in engine), lambda row: (row.package, row.texts)
    ):
        name = f"{package} {span(row.version for row in alike)}"
        for text in texts:
            if text.startswith(RAISES):
                names = raised.setdefault(text, [])
                if name not in names:
                    names.append(name)
        shared.append([name, *(RAISES if text.startswith(RAISES) else text for text in texts)])
    # Cases that are alike in all rows share a column.
    columns: dict[tuple[str, ...], list[str]] = {}
    for place, case in enumerate(cases, start=1):
        title = case.replace(", offload_optimizer", " offload")
        columns.setdefault(tuple(row[place] for row in shared), []).append(title)
    titles = [", ".join(alike) for alike in columns.values()]
    table = zip((row[0] for row in shared), *columns, strict=True)
    lines = markdown_table(["version", *titles], table)
    notes = [f"{' and '.join(names)}: {text}." for text, names in raised.items()]
    if same := sum(row in engine for row in rows):
        notes.insert(
            0,
            f"With {same} of the {len(engine)} versions of DeepSpeed in the engine's table, the weights are those of "
            "that table.",
        )
    return [*lines, *(line for note in notes for line in (note, ""))]


def span(numbers: Iterable[str]) -> str:
    """Versions in a row: all of them, for the reader sees which were measured."""
    return ", ".join(sorted(numbers, key=Version))
