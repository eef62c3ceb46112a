"""The weights of micro-batches by version, as tables: what changed when."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

Two windows of N = 4 micro-batches, each with a weight of its own, SGD with learning rate 1, one process, gloo, CPU. \
Right is 1/4 for each. What differs is written out: the weights of the first window, and those of the second where \
they are not the same. Each row is a version in an environment of its own on top of the project's, of which it has \
all other packages (versions of transformers 4 also get the Accelerate of their time); its torch is {torch}, since \
no other CPU build could be had. `offload` is `offload_optimizer` on the CPU. Lightning's strategy asks for CUDA, so \
a subclass replaces the three methods that do. Written by `nox -s versions -- --weights`; the records, with dates, \
are in [version-weights.jsonl](version-weights.jsonl).
"""


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
        return f"raises {record.measured.split('. ')[0].rstrip('.')}"
    return "right" if record.is_right else f"**{spelled(record.measured)}**"


def weights_section(records: Sequence[Record] | None = None) -> str:
    """One table for each framework that trains with DeepSpeed."""
    records = read_records(RECORDS) if records is None else records
    torch = ", ".join(sorted({r.packages["torch"] for r in records if "torch" in r.packages}))
    lines = [INTRODUCTION.format(torch=torch)]
    for framework in FRAMEWORKS:
        script = f"versions/weights_{framework}"
        lines += [f"### {TITLES[framework]}", ""]
        lines += weights_table([record for record in records if record.script == script])
    return "\n".join(lines)


def weights_table(records: Sequence[Record]) -> list[str]:
    """A row for neighbouring versions of a package that do the same, a column for each stage."""
    cases = list(dict.fromkeys(record.case for record in records if record.case))
    rows: list[tuple[str, str, tuple[str, ...]]] = []
    for package in ON_TOP:
        for asked in VERSIONS[package]:
            found = [record for record in records if record.asked == asked]
            if not found:
                continue
            cells = {record.case: cell(record) for record in found}
            number = asked[0].partition("==")[2]
            failed = [record.error for record in found if record.error]
            texts = tuple(cells.get(case, failed[0] if failed else "") for case in cases)
            rows.append((NAMES[package], number, texts))
    shared = []
    for (name, texts), alike in groupby(rows, lambda row: (row[0], row[2])):
        numbers = [row[1] for row in alike]
        shared.append([f"{name} {span(numbers)}", *texts])
    titles = [case.replace(", offload_optimizer", ", offload") for case in cases]
    return markdown_table(["version", *titles], shared)


def span(numbers: Iterable[str]) -> str:
    """Versions in a row: all of them, for the reader sees which were measured."""
    return ", ".join(sorted(numbers, key=Version))
