"""The questions of a report, one section each: sentences made from the data, figures, a table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Annotated

import pandas as pd
from pydantic import Field

from bench import validation
from bench.formatting import plural, size, some
from bench.judge.analysis import Analysis, CellRow, defect_of_cell
from bench.judge.baseline import percent
from bench.judge.columns import COLUMNS
from bench.judge.expected import TRACKED, cells_watched, extent
from bench.judge.gates import EXPECTED, allowed
from bench.judge.samples import NAME, slowest
from bench.judge.tables import CollectiveRow, Value, number_in, rows_of
from bench.judge.trial_columns import (
    COMMUNICATION,
    CORRECTNESS,
    DASH,
    MEMORY,
    SEMANTICS,
    SPEED,
    Column,
)
from bench.judge.verdicts import Verdict, scope_of
from bench.plan.categories import (
    COPIED_TO_DEVICE,
    COPIED_TO_HOST,
    ON_HOST,
    PEAK,
    PINNED,
    Category,
)
from bench.plan.cell import Device, Status, among
from bench.report.bars import MIB, TOTAL, by_category, by_operation
from bench.run.machine import unlike_nodes
from bench.run.manifest import Manifest
from bench.tabular import Table

OPERATIONS = {
    "operations": Column(
        "string",
        "",
        "of one optimizer step",
        title="operations of one optimizer step",
    ),
    "as_formula": Column("string", "", "counts that match their formula", title="as the formula"),
    "sent": Column("Float64", "MiB", "handed to collectives", title="MiB in all", form=",.2f"),
}
"""Columns of the section on communication, of which there is a row per cell here alone."""
EPOCH_END = Path(__file__).with_name("epoch_end.json")
"""What the semantics suite found where an epoch ends within a window, which no timed trial shows.

``python -m studies.semantics`` writes it from results/semantics.
"""
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


def table(
    caption: str,
    cells: pd.DataFrame,
    key: str,
    more: Mapping[str, Column] | None = None,
) -> Table:
    """The columns of a section of the page, and more ones; those without any value are left out."""
    every = COLUMNS["cells"]
    asked = {"label": every["label"]}
    asked |= {name: column for name, column in every.items() if column.section == key}
    if more is not None:
        asked |= more
    known: dict[str, Column] = {}
    titles: list[str] = []
    numbers: list[int] = []
    for name, column in asked.items():
        if not cells[name].notna().any():
            continue
        if column.is_number:
            numbers.append(len(titles))
        title = column.title
        if not title:
            title = name
        titles.append(title)
        known[name] = column
    rows = []
    for row in rows_of(cells[[*known]]):
        rows.append([column.shown(row[name]) for name, column in known.items()])
    return Table.from_rows(titles, rows, numbers, caption)


def sections(data: Analysis) -> list[PageSection]:
    """All questions, in order; the one on time only where times may be compared."""
    found = [memory(data), communication(data), correctness(data), semantics(data)]
    if not data.times_unavailable:
        found.insert(0, speed(data))
    return found


def speed(data: Analysis) -> PageSection:
    """How long an optimizer step takes, and how sure that is."""
    rows = data.verdicts
    counts = Counter(row.verdict for row in rows)
    verdicts = []
    for verdict in Verdict:
        if counts[verdict]:
            verdicts.append(f"{counts[verdict]} {verdict}")
    if not verdicts:
        verdicts.append("none")
    scope = scope_of(rows, len(data.pool.runs))
    first = f"{plural(len(rows), 'comparison')} with {data.baseline}: {', '.join(verdicts)}{scope}."
    spread = (data.cells["slowest_s"] / data.cells["fastest_s"] - 1).dropna()
    second = "No cell has a time that may be compared."
    if not spread.empty:
        worst = str(spread.idxmax())
        second = (
            f"In the median cell, the slowest trial takes {percent(spread.median())} longer than "
            f"the fastest; at most it is {percent(spread.max())} ({data.run.labels[worst]})."
        )
    over = "the good trials of a cell"
    if not data.pool.is_single:
        over = "runs, of the good trials of a cell"
    caption = f"Step times: {NAME} over {over}, as they are cited"
    return PageSection(
        key=SPEED,
        title="How long does an optimizer step take?",
        sentences=(first, second, *nodes(data)),
        plots=("step_time_ratio", "step_time", "noise"),
        table=table(caption, data.cells, SPEED),
    )


def nodes(data: Analysis) -> Iterator[str]:
    """Of a run on several nodes: how they differ, and on which the slowest ranks were."""
    if not data.run.manifest.nodes:
        return
    for text in unlike_nodes(data.run.manifest):
        yield f"{text[:1].upper()}{text[1:]}."
    found: Counter[int] = Counter()
    for record in data.run.records:
        cell, timed = record.cell, record.time
        if timed and timed.rank_step_seconds and cell.num_nodes > 1:
            found[slowest(timed.rank_step_seconds) // cell.ranks_per_node] += 1
    for node, count in found.most_common(1):
        trials = plural(found.total(), "trial")
        yield f"The slowest rank was on node {node} in {count} of {trials} on several nodes."


OFFLOADED = {
    f"{TRACKED}_{ON_HOST}_{PEAK}": ("host", "live in the host's memory, at its peak"),
    f"{TRACKED}_{PINNED}": ("pinned", "of the host's memory, held between micro-batches"),
    f"{TRACKED}_{COPIED_TO_DEVICE}": ("to device", "copied from the host in an optimizer step"),
    f"{TRACKED}_{COPIED_TO_HOST}": ("to host", "copied from the device in an optimizer step"),
}
"""Categories of the memory table that only backends which offload from a device have: title and
meaning."""


def memory(data: Analysis) -> PageSection:
    """How much memory a rank needs."""
    contestants = data.contestants
    known = contestants[contestants["peak_memory_bytes"].notna()]
    known = known.sort_values("peak_memory_bytes", kind="stable")
    sentences = ["No cell has a measured peak memory."]
    if not known.empty:
        least, most = map(_peak, rows_of(known.iloc[[0, -1]]))
        text = f"The smallest peak of a rank is {least}, the largest {most}. Bytes have no noise."
        sentences = [text]
    if held := _held(data.run.tables.memory):
        sentences.append(held)
    parts = by_category(data.run.tables.memory)
    columns = {}
    for name in map(str, Category):
        if name in parts and (parts[name] > 0).any():
            title = name.replace("_", " ")
            columns[name] = Column("Int64", "B", "live at the peak", title=title)
    frame = data.cells.join(parts[list(columns)])
    sizes = data.run.tables.memory
    for category, (title, meaning) in OFFLOADED.items():
        of_cells = sizes[sizes["category"] == category].groupby("cell_id")["bytes"].max()
        if not of_cells.empty:
            frame = frame.join(of_cells.rename(category).astype("Int64"))
            columns[category] = Column("Int64", "B", meaning, title=title)
    caption = "Peak memory of a rank, and what it is made of"
    return PageSection(
        key=MEMORY,
        title="How much memory does a rank need?",
        sentences=tuple(sentences),
        plots=("memory_categories",),
        table=table(caption, frame, MEMORY, columns),
    )


def _peak(row: Mapping[str, Value]) -> str:
    """The peak of a cell, and whose it is."""
    peak = number_in(row, "peak_memory_bytes")
    assert peak is not None, "only measured peaks are compared"
    return f"{size(peak)} ({row['label']})"


def _held(memory: pd.DataFrame) -> str:
    """How many cells hold the bytes of gradients that their formula gives; empty without one."""
    is_held = memory["category"] == "held_gradients"
    rows = memory[is_held & memory["expected_bytes"].notna()]
    right = int((rows["bytes"] == rows["expected_bytes"]).sum())
    if rows.empty:
        return ""
    return (
        f"Between micro-batches, {right} of {plural(len(rows), 'cell')} hold exactly the bytes of "
        "gradients that their formula gives."
    )


def communication(data: Analysis) -> PageSection:
    """What ranks hand to collectives."""
    counted = data.run.tables.collective_rows
    totals = by_operation(data.run.tables.collectives)
    rows = _of_first_repeats(counted)
    watched = cells_watched(data.run.tables)
    frame = data.cells.assign(sent=None)
    if not totals.empty:
        frame["sent"] = totals[TOTAL] / MIB
    matching, operations = [], []
    for cell_id, row in data.rows.items():
        counts = rows.get(cell_id, ())
        matching.append(_matching(counts))
        operations.append(_operations(row, counts, cell_id in watched))
    frame["as_formula"], frame["operations"] = matching, operations
    good = frame[(frame["status"] == Status.OK) & frame["sent"].notna()]
    good = good.sort_values("sent", kind="stable")
    sentences = ["The collectives of no valid cell were counted."]
    if not good.empty:
        least, most = map(_sent, rows_of(good.iloc[[0, -1]]))
        text = f"In an optimizer step, a rank hands between {least} and {most} to collectives."
        sentences = [text]
        if all_matching := _matching(counted):
            sentences.append(f"{all_matching} counts match their formula in calls and bytes.")
    sentences += _measured_links(data.run.manifest)
    caption = "Collectives between two updates, on one rank"
    return PageSection(
        key=COMMUNICATION,
        title="What do ranks communicate?",
        sentences=tuple(sentences),
        plots=("communication",),
        table=table(caption, frame, COMMUNICATION, OPERATIONS),
    )


def _measured_links(manifest: Manifest) -> Iterator[str]:
    """A sentence on each link that was measured before the first trial."""
    if manifest.matmul is None:
        return
    for entry in manifest.matmul:
        if entry.link_text:
            yield f"Before the first trial, as nccl-tests defines it: {entry.link_text}."


def _sent(row: Mapping[str, Value]) -> str:
    """What a rank of a cell hands to collectives, and whose it is."""
    return f"{row['sent']:,.2f} MiB ({row['label']})"


def _of_first_repeats(counted: Sequence[CollectiveRow]) -> dict[str, list[CollectiveRow]]:
    """The counts by cell: each is counted in one repeat; of several, the first."""
    first: dict[str, int] = {}
    for row in counted:
        first[row.cell_id] = min(row.repeat, first.get(row.cell_id, row.repeat))
    found: dict[str, list[CollectiveRow]] = {}
    for row in counted:
        if row.repeat == first[row.cell_id]:
            found.setdefault(row.cell_id, []).append(row)
    return found


def _matching(rows: Sequence[CollectiveRow]) -> str | None:
    """How many of the counts with a formula match it: ``3 of 4``; None if none has one."""
    known, same = 0, 0
    for row in rows:
        if row.expected_calls is None:
            continue
        known += 1
        expected = (row.expected_calls, row.expected_payload_bytes)
        same += (row.calls, row.payload_bytes) == expected
    if not known:
        return None
    return f"{same} of {known}"


def _operations(row: CellRow, counts: Sequence[CollectiveRow], is_watched: bool) -> str:
    """The operations of one optimizer step of a cell, or why there are none."""
    if counts:
        texts = []
        for count in counts:
            what = f"{count.op} of {count.dtype}{among(count.group)}"
            texts.append(f"{what}: {count.calls} x, {count.payload_bytes / MIB:,.2f} MiB")
        return "; ".join(texts)
    if row.status != Status.OK:
        return DASH
    if row.cell.device is Device.CUDA and not is_watched:
        return "not counted at this N"
    return "none"


def correctness(data: Analysis) -> PageSection:
    """Whether every update equals that of the full batch."""
    cells = data.contestants
    fine = cells[cells["status"] == Status.OK]
    error = fine["update_error"].dropna()
    sentences = [f"{len(fine)} of {plural(len(cells), 'cell')} passed every gate."]
    num_without = sum(not data.run.cells[cell_id].world.has_values for cell_id in fine["cell_id"])
    if num_without:
        without = plural(num_without, "cell")
        sentences.append(f"For {without} of these no values were checked: their world has none.")
    if error.empty:
        sentences.append("No update of a valid cell was compared with the reference's.")
    else:
        worst = fine.iloc[int(fine["update_error"].astype(float).argmax())]
        cell = data.run.cells[worst["cell_id"]]
        limit = allowed(cell, data.run.manifest.lossy.get(cell.cell_id)).update_error
        whose = f"{worst['label']}; the limit is {limit:g}"
        sentences.append(f"Their largest update error is {float(error.max()):.2g} ({whose}).")
    if compared := extent(data.run.tables):
        sentences.append(compared)
    return PageSection(
        key=CORRECTNESS,
        title="Does every update equal that of the full batch?",
        sentences=tuple(sentences),
        plots=("loss_curves",),
        table=table("What the gates checked", data.cells, CORRECTNESS),
    )


def semantics(data: Analysis) -> PageSection:
    """Which optimizer steps were taken, and what the timed trials do not show of that."""
    found = _at_epoch_end(data)
    has_epoch_end = found is not None
    if found is None:
        found = table("Optimizer steps of the timed trials", data.cells, SEMANTICS)
    return PageSection(
        key=SEMANTICS,
        title="Which optimizer steps were taken?",
        sentences=tuple(_steps(data, has_epoch_end=has_epoch_end)),
        plots=(),
        table=found,
        is_open=True,
    )


def _steps(data: Analysis, *, has_epoch_end: bool) -> Iterator[str]:
    """``has_epoch_end``: whether the table below shows what becomes of an incomplete window."""
    numbers = ["optimizer_steps_observed", "optimizer_steps_expected"]
    seen = data.contestants.dropna(subset=numbers)
    if seen.empty:
        yield "No optimizer step of any cell was observed."
        return
    differs = seen["optimizer_steps_observed"] != seen["optimizer_steps_expected"]
    wrong = seen[differs]["label"].tolist()
    text = (
        f"A timed trial trains whole windows only: {len(seen) - len(wrong)} of "
        f"{plural(len(seen), 'cell')} took exactly one optimizer step per window"
    )
    if wrong:
        text += f", not {some(wrong)}"
    yield f"{text}."
    told = seen[seen["optimizer_steps_reported"].notna()]
    if len(told):
        differs = told["optimizer_steps_reported"] != told["optimizer_steps_observed"]
        wrong = told[differs]["label"].tolist()
        text = (
            f"{len(told) - len(wrong)} of {plural(len(told), 'count')} that frameworks report "
            "agree with the inner optimizer's"
        )
        if wrong:
            text += f"; not that of {some(wrong)}"
        yield f"{text}."
    where = "docs/semantics.md has every scenario"
    if has_epoch_end:
        where = "see the table below, and docs/semantics.md for every scenario"
    yield (
        "These counts do not show what becomes of a window that the end of an epoch leaves "
        f"incomplete: {where}."
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
    found = json.loads(EPOCH_END.read_text(encoding="utf-8"))
    return validation.read(EpochEnd, found, f"{EPOCH_END}: ")


def _at_epoch_end(data: Analysis) -> Table | None:
    """What the semantics suite found of the run's backends; None if it knows none of them."""
    suite = epoch_end()
    rows = []
    for name in dict.fromkeys(data.contestants["backend"]):
        found = suite.backends.get(name)
        if found is not None:
            counts = (str(suite.num_due), str(found.taken), _reported(found))
            rows.append((name, found.finding, *counts))
    if not rows:
        return None
    measured, other = [], []
    installed = data.run.manifest.packages
    for name, version in suite.packages.items():
        measured.append(f"{name} {version}")
        if name in installed and _release(installed[name]) != _release(version):
            other.append(f"{name} {installed[name]}")
    caption = f"{suite.scenario}; measured by the semantics suite with {', '.join(measured)}"
    if other:
        caption += f"; this run has {', '.join(other)}, which may differ"
    header = (
        "backend",
        "what becomes of the incomplete window",
        "updates due",
        "taken",
        "reported",
    )
    return Table.from_rows(header, rows, (2, 3, 4), caption)


def _reported(found: EpochEndOfBackend) -> str:
    """The steps by the first of COUNTERS that the framework has."""
    for counter in COUNTERS:
        if counter in found.reported:
            return str(found.reported[counter])
    return DASH


def _release(version: str) -> str:
    """A version without its build, such as ``+cpu``."""
    return version.partition("+")[0]


def failures(data: Analysis) -> Table:
    """Every cell with a failed trial, A/A twins too, with its reason."""
    rows = []
    for row in data.every_row.values():
        if row.status == Status.OK:
            continue
        reason = row.reason
        if not reason:
            reason = "no reason was recorded"
        defect = defect_of_cell(data.run.manifest, row)
        if defect:
            reason += f". This is {EXPECTED}: {defect}"
        rows.append((row.label, row.outcome, reason, str(row.num_trials)))
    header = ("cell", "status", "reason", "trials")
    return Table.from_rows(header, rows, (3,), "Cells without a valid result")


PUBLISHED = ("what", "how", "tokens/s per GPU", "memory of a GPU")
OTHER_CAUSES = (
    "They come from another machine and other versions, so a difference has several causes."
)


def published(data: Analysis) -> PageSection | None:
    """The matrix's published figures above the cells of the run; None if it has none."""
    figures = data.run.manifest.settings.published
    if not figures:
        return None
    rows = []
    sources: dict[str, None] = {}
    for figure in figures:
        speed, memory = f"{figure.tokens_per_s_per_gpu:,.0f}", size(figure.memory_gib * 2**30)
        rows.append((f"published: {figure.what}", figure.conditions, speed, memory))
        sources[figure.source] = None
    rows += _measured(data)
    caption = "Published figures, and what this run measured"
    return PageSection(
        key="published",
        title="What have others published about this training?",
        sentences=(
            f"The published figures are from {'; '.join(sources)}.",
            OTHER_CAUSES,
        ),
        plots=(),
        table=Table.from_rows(PUBLISHED, rows, (2, 3), caption),
    )


def _measured(data: Analysis) -> list[tuple[str, str, str, str]]:
    """The cells of the run in the columns of PUBLISHED, the fastest first."""
    devices = {
        record.cell_id: record.device_name for record in data.run.records if record.device_name
    }
    timed: list[tuple[float, CellRow]] = []
    for cell_id in data.contestants.index:
        row = data.rows[cell_id]
        if row.tokens_per_s is not None:
            timed.append((row.tokens_per_s, row))
    timed.sort(key=itemgetter(0), reverse=True)
    found = []
    for tokens_per_s, row in timed:
        cell, memory = row.cell, DASH
        if row.peak_memory_bytes is not None:
            memory = size(row.peak_memory_bytes)
        device = f"{cell.world_size} x {devices[cell.cell_id]}"
        found.append((row.label, device, f"{tokens_per_s / cell.world_size:,.0f}", memory))
    return found
