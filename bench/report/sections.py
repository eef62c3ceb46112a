"""The questions of a report, one section each: a few sentences made from the data, figures, and a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import Field

from bench import validation
from bench.formatting import plural, size, some
from bench.grouping import grouped
from bench.judge.analysis import Analysis, CellRow, defect_of_cell
from bench.judge.baseline import percent
from bench.judge.columns import COLUMNS
from bench.judge.expected import cells_watched, extent
from bench.judge.gates import EXPECTED, tolerance
from bench.judge.samples import NAME, slowest
from bench.judge.tables import CollectiveRow, number_in, rows_of
from bench.judge.trial_columns import COMMUNICATION, CORRECTNESS, DASH, MEMORY, SEMANTICS, SPEED, Column
from bench.judge.verdicts import Verdict
from bench.plan.categories import Category
from bench.plan.cell import Device, Status, among
from bench.report.bars import MIB, TOTAL, by_category, by_operation
from bench.run.machine import unlike_nodes
from bench.tabular import Table

OPERATIONS = {
    "operations": Column("string", "", "of one optimizer step", title="operations of one optimizer step"),
    "as_formula": Column("string", "", "counts that match their formula", title="as the formula"),
    "sent": Column("Float64", "MiB", "handed to collectives", title="MiB in all", form=",.2f"),
}
"""Columns of the section on communication, of which there is a row per cell here alone."""
EPOCH_END = Path(__file__).with_name("epoch_end.json")
"""What the semantics suite found where an epoch ends within a window, which no timed trial shows.

``python -m studies.semantics`` writes it from results/semantics.
"""
SCENARIOS = Path(__file__).parents[2] / "docs" / "semantics.md"
"""All scenarios of the suite; only in a checkout."""
COUNTERS = ("trainer.global_step", "engine.global_steps")
"""Frameworks' own counters of steps: the first that a framework has is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSection:
    """One question."""

    key: str
    title: str
    sentences: tuple[str, ...]
    plots: tuple[str, ...]
    """Names of figures, without the number of a page."""
    table: Table
    is_open: bool = False
    """Whether the table is seen without unfolding it."""


def table(caption: str, cells: pd.DataFrame, key: str, more: dict[str, Column] | None = None) -> Table:
    """The columns of a section of the page, and more ones; those without any value are left out."""
    columns = {name: column for name, column in COLUMNS["cells"].items() if name == "label" or column.section == key}
    known = {name: column for name, column in (columns | (more or {})).items() if cells[name].notna().any()}
    titles = [column.title or name for name, column in known.items()]
    rows = [[column.shown(row[name]) for name, column in known.items()] for row in rows_of(cells[[*known]])]
    numbers = [place for place, column in enumerate(known.values()) if column.is_number]
    return Table.from_rows(titles, rows, numbers, caption)


def sections(data: Analysis) -> list[PageSection]:
    """All questions, in order; the one on time only where times may be compared."""
    asked = (memory, communication, correctness, semantics)
    return [ask(data) for ask in (asked if data.times_unavailable else (speed, *asked))]


def speed(data: Analysis) -> PageSection:
    """How long an optimizer step takes, and how sure that is."""
    rows = data.verdicts
    counts = Counter(row.verdict for row in rows)
    verdicts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    first = f"{plural(len(rows), 'comparison')} with {data.baseline}: {verdicts or 'none'}."
    spread = (data.cells["slowest_s"] / data.cells["fastest_s"] - 1).dropna()
    second = "No cell has a time that may be compared."
    if not spread.empty:
        worst = str(spread.idxmax())
        second = (
            f"In the median cell, the slowest trial takes {percent(spread.median())} longer than the fastest; at most "
            f"it is {percent(spread.max())} ({data.run.labels[worst]})."
        )
    return PageSection(
        key=SPEED,
        title="How long does an optimizer step take?",
        sentences=(first, second, *nodes(data)),
        plots=("step_time_ratio", "step_time", "noise"),
        table=table(f"Step times: {NAME} over the good trials of a cell, as they are cited", data.cells, SPEED),
    )


def nodes(data: Analysis) -> Iterator[str]:
    """Of a run on several nodes: how they differ, and on which the slowest ranks were."""
    if not data.run.manifest.nodes:
        return
    yield from (f"{text[:1].upper()}{text[1:]}." for text in unlike_nodes(data.run.manifest))
    found: Counter[int] = Counter()
    for record in data.run.records:
        cell, timed = record.cell, record.time
        if timed and timed.rank_step_seconds and cell.num_nodes > 1:
            found[slowest(timed.rank_step_seconds) // cell.ranks_per_node] += 1
    for node, count in found.most_common(1):
        yield f"The slowest rank was on node {node} in {count} of {plural(found.total(), 'trial')} on several nodes."


def memory(data: Analysis) -> PageSection:
    """How much memory a rank needs."""
    known = data.contestants[data.contestants["peak_memory_bytes"].notna()].sort_values(
        "peak_memory_bytes", kind="stable"
    )
    sentence = "No cell has a measured peak memory."
    if not known.empty:
        peaks = ((row["label"], number_in(row, "peak_memory_bytes")) for row in rows_of(known.iloc[[0, -1]]))
        ends = (f"{size(peak or 0)} ({label})" for label, peak in peaks)
        sentence = "The smallest peak of a rank is {}, the largest {}. Bytes have no noise.".format(*ends)
    parts = by_category(data.run.tables.memory)
    used = [name for name in map(str, Category) if name in parts and (parts[name] > 0).any()]
    frame = data.cells.join(parts[used])
    columns = {name: Column("Int64", "B", "live at the peak", title=name.replace("_", " ")) for name in used}
    return PageSection(
        key=MEMORY,
        title="How much memory does a rank need?",
        sentences=tuple(filter(None, (sentence, _held(data.run.tables.memory)))),
        plots=("memory_categories",),
        table=table("Peak memory of a rank, and what it is made of", frame, MEMORY, columns),
    )


def _held(memory: pd.DataFrame) -> str:
    """How many cells hold the bytes of gradients that their formula gives; empty if there is no formula."""
    rows = memory[(memory["category"] == "held_gradients") & memory["expected_bytes"].notna()]
    right = int((rows["bytes"] == rows["expected_bytes"]).sum())
    if rows.empty:
        return ""
    return (
        f"Between micro-batches, {right} of {plural(len(rows), 'cell')} hold exactly the bytes of gradients that their "
        "formula gives."
    )


def communication(data: Analysis) -> PageSection:
    """What ranks hand to collectives."""
    counted, totals = data.run.tables.collective_rows, by_operation(data.run.tables.collectives)
    # Each cell is counted in one repeat; of several, the first.
    first: dict[str, int] = {}
    for row in counted:
        first[row.cell_id] = min(row.repeat, first.get(row.cell_id, row.repeat))
    rows = grouped((row.cell_id, row) for row in counted if row.repeat == first[row.cell_id])
    watched = cells_watched(data.run.tables)

    def operations(row: CellRow) -> str:
        if row.cell_id in rows:
            return _operations(rows[row.cell_id])
        if row.status != Status.OK:
            return DASH
        unseen = row.cell.device is Device.CUDA and row.cell_id not in watched
        return "not counted at this N" if unseen else "none"

    frame = data.cells.assign(sent=None if totals.empty else totals[TOTAL] / MIB)
    frame["as_formula"] = [_matching(rows.get(cell_id, ())) for cell_id in frame.index]
    frame["operations"] = [operations(row) for row in data.rows.values()]
    good = frame[(frame["status"] == Status.OK) & frame["sent"].notna()].sort_values("sent", kind="stable")
    sentences = ["The collectives of no valid cell were counted."]
    if not good.empty:
        least, most = (f"{row['sent']:,.2f} MiB ({row['label']})" for row in rows_of(good.iloc[[0, -1]]))
        sentences = [f"In an optimizer step, a rank hands between {least} and {most} to collectives."]
        if matching := _matching(counted):
            sentences.append(f"{matching} counts match their formula in calls and bytes.")
    lines = [entry.link_text for entry in data.run.manifest.matmul or ()]
    sentences += [f"Before the first trial, as nccl-tests defines it: {line}." for line in lines if line]
    return PageSection(
        key=COMMUNICATION,
        title="What do ranks communicate?",
        sentences=tuple(sentences),
        plots=("communication",),
        table=table("Collectives between two updates, on one rank", frame, COMMUNICATION, OPERATIONS),
    )


def _matching(rows: Sequence[CollectiveRow]) -> str | None:
    """How many of the counts with a formula match it: ``3 of 4``; None if none has one."""
    known = [row for row in rows if row.expected_calls is not None]
    same = [(row.calls, row.payload_bytes) == (row.expected_calls, row.expected_payload_bytes) for row in known]
    return f"{sum(same)} of {len(same)}" if known else None


def _operations(rows: Sequence[CollectiveRow]) -> str:
    return "; ".join(
        f"{row.op} of {row.dtype}{among(row.group)}: {row.calls} x, {row.payload_bytes / MIB:,.2f} MiB" for row in rows
    )


def correctness(data: Analysis) -> PageSection:
    """Whether every update equals that of the full batch."""
    cells = data.contestants
    fine = cells[cells["status"] == Status.OK]
    error = fine["update_error"].dropna()
    second = "No update of a valid cell was compared with the reference's."
    if not error.empty:
        worst = fine.iloc[int(fine["update_error"].astype(float).argmax())]
        cell = data.run.cells[worst["cell_id"]]
        limit = tolerance(cell.precision, cell.workload, cell.model).update_error
        second = f"Their largest update error is {float(error.max()):.2g} ({worst['label']}; the limit is {limit:g})."
    first = f"{len(fine)} of {plural(len(cells), 'cell')} passed every gate."
    return PageSection(
        key=CORRECTNESS,
        title="Does every update equal that of the full batch?",
        sentences=tuple(filter(None, (first, second, extent(data.run.tables)))),
        plots=("loss_curves",),
        table=table("What the gates checked", data.cells, CORRECTNESS),
    )


def semantics(data: Analysis) -> PageSection:
    """Which optimizer steps were taken, and what the timed trials do not show of that."""
    return PageSection(
        key=SEMANTICS,
        title="Which optimizer steps were taken?",
        sentences=tuple(_steps(data)),
        plots=(),
        table=_at_epoch_end(data) or table("Optimizer steps of the timed trials", data.cells, SEMANTICS),
        is_open=True,
    )


def _steps(data: Analysis) -> Iterator[str]:
    seen = data.contestants.dropna(subset=["optimizer_steps_observed", "optimizer_steps_expected"])
    if seen.empty:
        yield "No optimizer step of any cell was observed."
        return
    wrong = seen[seen["optimizer_steps_observed"] != seen["optimizer_steps_expected"]]["label"].tolist()
    yield (
        f"A timed trial trains whole windows only: {len(seen) - len(wrong)} of {plural(len(seen), 'cell')} took "
        f"exactly one optimizer step per window{f', not {some(wrong)}' if wrong else ''}."
    )
    told = seen[seen["optimizer_steps_reported"].notna()]
    if len(told):
        wrong = told[told["optimizer_steps_reported"] != told["optimizer_steps_observed"]]["label"].tolist()
        text = f"{len(told) - len(wrong)} of {plural(len(told), 'count')} that frameworks report agree with the inner "
        yield text + (f"optimizer's; not that of {some(wrong)}." if wrong else "optimizer's.")
    yield (
        "These counts do not show what becomes of a window that the end of an epoch leaves incomplete: see the table "
        "below, and docs/semantics.md for every scenario."
    )


@dataclass(frozen=True, kw_only=True)
class EpochEndOfBackend:
    """What a backend does there."""

    finding: str
    taken: int
    """Updates."""
    reported: Mapping[str, int]
    """Steps that the framework reports, by counter."""


@dataclass(frozen=True, kw_only=True)
class EpochEnd:
    """What the suite found where an epoch ends within a window."""

    packages: Mapping[str, str]
    """That were measured."""
    scenario: str
    num_due: Annotated[int, Field(alias="due")]
    """Updates."""
    backends: Mapping[str, EpochEndOfBackend]


@cache
def epoch_end() -> EpochEnd:
    """What stands in EPOCH_END."""
    return validation.read(EpochEnd, json.loads(EPOCH_END.read_text(encoding="utf-8")), f"{EPOCH_END}: ")


def _at_epoch_end(data: Analysis) -> Table | None:
    """What the semantics suite found of the run's backends; None if it knows none of them."""
    suite, installed = epoch_end(), data.run.manifest.packages
    rows = []
    for name in dict.fromkeys(data.contestants["backend"]):
        if found := suite.backends.get(name):
            reported = next((str(found.reported[key]) for key in COUNTERS if key in found.reported), DASH)
            rows.append((name, found.finding, str(suite.num_due), str(found.taken), reported))
    measured = suite.packages
    other = [
        f"{name} {installed[name]}"
        for name in measured
        if name in installed and installed[name].partition("+")[0] != measured[name].partition("+")[0]
    ]
    caption = f"{suite.scenario}; measured by the semantics suite with "
    caption += ", ".join(f"{name} {version}" for name, version in measured.items())
    caption += f"; this run has {', '.join(other)}, which may differ" if other else ""
    header = ("backend", "what becomes of the incomplete window", "updates due", "taken", "reported")
    return Table.from_rows(header, rows, (2, 3, 4), caption) if rows else None


def failures(data: Analysis) -> Table:
    """Every cell with a failed trial, with its reason."""
    rows = []
    for row in data.bad_rows:
        defect = defect_of_cell(data.run.manifest, row)
        reason = (row.reason or "no reason was recorded") + (f". This is {EXPECTED}: {defect}" if defect else "")
        rows.append((row.label, row.outcome, reason, str(row.num_trials)))
    return Table.from_rows(("cell", "status", "reason", "trials"), rows, (3,), "Cells without a valid result")


PUBLISHED = ("what", "how", "tokens/s per GPU", "memory of a GPU")


def published(data: Analysis) -> PageSection | None:
    """The matrix's published figures above the cells of the run; None if it has none."""
    figures = data.run.manifest.settings.published
    if not figures:
        return None
    rows = [
        (
            f"published: {figure.what}",
            figure.conditions,
            f"{figure.tokens_per_s_per_gpu:,.0f}",
            size(figure.memory_gib * 2**30),
        )
        for figure in figures
    ]
    devices = {record.cell_id: record.device_name for record in data.run.records}
    contestants = [data.rows[cell_id] for cell_id in data.contestants.index]
    timed = [(row, row.tokens_per_s) for row in contestants if row.tokens_per_s is not None]
    for row, tokens_per_s in sorted(timed, key=lambda item: item[1], reverse=True):
        cell, peak = row.cell, row.peak_memory_bytes
        device = f"{cell.world_size} x {devices[cell.cell_id]}"
        speed = f"{tokens_per_s / cell.world_size:,.0f}"
        rows.append((row.label, device, speed, DASH if peak is None else size(peak)))
    sources = dict.fromkeys(figure.source for figure in figures)
    return PageSection(
        key="published",
        title="What have others published about this training?",
        sentences=(
            f"The published figures are from {'; '.join(sources)}.",
            "They come from another machine and other versions, so a difference has several causes.",
        ),
        plots=(),
        table=Table.from_rows(PUBLISHED, rows, (2, 3), "Published figures, and what this run measured"),
    )
