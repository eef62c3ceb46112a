"""What a trial is held against: the losses of its reference, and the collectives and held bytes of the formulas."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pandas as pd

from bench.grouping import grouped
from bench.judge.columns import WORK
from bench.judge.formula_terms import NO_SETTINGS, Settings
from bench.judge.formulas import expect, layout_of
from bench.judge.tables import Tables, frame_of, rows_of
from bench.plan.categories import HELD, PEAK, Category
from bench.plan.cell import ADDED_FIELDS, REFERENCES, Cell, Device, Status, among
from bench.workload.layout import Layout

LONG_STEPS = 200
"""A training of this many optimizer steps is long: rounding alone makes its losses diverge in the end."""
COMPARED_STEPS = 50
"""Number of first losses compared in a long training: correct backends differed by up to 2e-4 nats after 60 steps."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Absolute differences between a trial's losses and the reference's, in nats per token."""

    first: float
    """At the first step."""
    largest: float
    """Over the compared steps; NaN if any loss is not finite."""
    num_steps: int
    """Number of compared first steps; at most as many as the reference has."""


class Losses:
    """The losses of a run."""

    def __init__(self, tables: Tables) -> None:
        ordered = tables.losses.sort_values("step").astype({"loss": float})
        columns = (ordered[name].tolist() for name in ("cell_id", "repeat", "loss"))
        self._of = grouped(((cell_id, repeat), loss) for cell_id, repeat, loss in zip(*columns, strict=True))
        """By cell id and repeat."""
        self._expected: dict[str, Sequence[float]] = {}
        """The reference's losses, by the id of the cell that is compared with it."""
        self._references: dict[tuple[Any, ...], Sequence[float]] = {}
        """Losses of the reference trained for most steps, from its first good trial."""
        good = tables.trials[tables.trials["backend"].isin(REFERENCES) & (tables.trials["status"] == Status.OK)]
        for row in rows_of(good.sort_values("repeat")):
            key = self._key(row, row["backend"], row["world_size"])
            if len(self._complete(row)) > len(self._references.get(key, ())):
                self._references[key] = self._complete(row)

    def deviation(self, row: Any) -> Deviation | None:
        """The deviation of a row of the trials table; None if it has not one loss per step, or no reference."""
        if (cell_id := row["cell_id"]) not in self._expected:
            reference = cell_of(row).reference()
            self._expected[cell_id] = self._references.get(self._key(row, reference.backend, reference.world_size), ())
        losses = self._complete(row)
        apart = [abs(a - b) for a, b in zip(losses, self._expected[cell_id], strict=False)]
        if not apart:
            return None
        compared = apart if len(losses) < LONG_STEPS else apart[:COMPARED_STEPS]
        finite = all(map(math.isfinite, [*losses, *apart]))
        return Deviation(apart[0], max(compared) if finite else math.nan, len(compared))

    def _complete(self, row: Any) -> Sequence[float]:
        """The losses of a trial; empty if any is missing."""
        found = self._of.get((row["cell_id"], row["repeat"]), ())
        return found if len(found) == row["optimizer_steps_expected"] else ()

    @staticmethod
    def _key(row: Any, backend: str, world_size: int) -> tuple[Any, ...]:
        """Identifies a reference and its work."""
        return (backend, world_size, *(row[name] for name in WORK))


def extent(tables: Tables) -> str:
    """A sentence on how many steps of losses were compared; empty if all were."""
    losses = Losses(tables)
    compared = tables.trials[tables.trials["max_loss_deviation"].notna()]
    short: set[int] = set()
    for row in rows_of(compared.drop_duplicates("cell_id")):
        found = losses.deviation(row)
        short |= {found.num_steps} if found and found.num_steps < row["optimizer_steps_expected"] else set()
    if not short:
        return ""
    steps = " or ".join(map(str, sorted(short)))
    return f"Losses of longer trainings were compared over the first {steps} steps alone."


TRACKED = "tracked"
"""Prefix of the ledger's categories in the memory table."""
NONE = (0, 0)
"""Calls and payload bytes of an operation that is not there."""


def fill(
    tables: Tables, records: Sequence[Mapping[str, Any]] = (), peaks: Mapping[str, int] | None = None
) -> tuple[Tables, dict[str, list[str]]]:
    """Add the expected collectives to every successful trial that counted them.

    Returns new tables, and by cell_id one line per operation or category that differs. The ``records`` have the layouts
    of models that are not shipped, and the settings that backends had; ``peaks``, by cell_id, are the peaks of memory
    in bytes that run.json predicted before the run. An operation that is expected but was not seen gets a row with 0
    calls; one that was seen but not expected has 0 expected calls. Without a formula (a plug-in backend, a model of
    unknown layout) the columns stay empty.
    """
    settings = settings_of(records)
    layouts = {record["cell_id"]: Layout.from_json(record["layout"]) for record in records if record.get("layout")}
    collectives = grouped(((row["cell_id"], row["repeat"]), row) for row in rows_of(tables.collectives))
    sizes: dict[tuple[str, int], dict[str, int]] = {}
    memory = rows_of(tables.memory)
    for row in memory:
        sizes.setdefault((row["cell_id"], row["repeat"]), {})[row["category"]] = row["bytes"]
    filled: list[Mapping[Any, Any]] = []
    watched = cells_watched(tables)
    findings: dict[str, list[str]] = {}
    # All passes but the time pass run together, in one trial of a cell; on CUDA the counting ones only at one N.
    counting = tables.trials["status"].isin([Status.OK, Status.INVALID]) & (tables.trials["num_passes"] != 1)
    trials = tables.trials[counting]
    cells = {row["cell_id"]: cell_of(row) for row in rows_of(trials.drop_duplicates("cell_id"))}
    for cell_id, repeat in zip(trials["cell_id"], trials["repeat"], strict=True):
        key, cell = (cell_id, repeat), cells[cell_id]
        if cell.device is Device.CUDA and cell_id not in watched:
            continue
        layout = layouts.get(cell_id) or layout_of(cell)
        given = settings.get(cell_id, NO_SETTINGS)
        expectation = expect(cell, layout, settings=given) if layout else None
        if layout is None or expectation is None:
            continue
        found = findings.setdefault(cell_id, [])
        counted = collectives.pop(key, ())
        seen = {(row["op"], row["group"], row["dtype"]): (row["calls"], row["payload_bytes"]) for row in counted}
        right = {(row.op, row.group, row.dtype): (row.calls, row.payload_bytes) for row in expectation.collectives}
        for kind in sorted(seen.keys() | right.keys()):
            op, group, dtype = kind
            ours, theirs = seen.get(kind, NONE), right.get(kind, NONE)
            row = {"cell_id": cell_id, "repeat": repeat, "op": op, "group": group, "dtype": dtype}
            row |= {"calls": ours[0], "payload_bytes": ours[1]}
            filled.append(row | {"expected_calls": theirs[0], "expected_payload_bytes": theirs[1]})
            if ours != theirs:
                text = f"{ours[0]} calls and {ours[1]} bytes per window, not {theirs[0]} and {theirs[1]}"
                found.append(f"{op} of {dtype}{among(group)}: {text}")
        for category, size, should in _memory(sizes.get(key, {}), cell, layout, (peaks or {}).get(cell_id), given):
            row = {"cell_id": cell_id, "repeat": repeat, "category": category, "bytes": size, "expected_bytes": should}
            memory.append(row)
            if category != PEAK and size != should:
                use = category.removeprefix(f"{HELD}_")
                found.append(f"{use} held between micro-batches: {size} bytes, not {should}")
    untouched = [row for rows in collectives.values() for row in rows]
    new = replace(tables, collectives=frame_of("collectives", [*untouched, *filled]), memory=frame_of("memory", memory))
    return new, {cell_id: texts for cell_id, texts in findings.items() if texts}


def cells_watched(tables: Tables) -> set[str]:
    """Ids of the cells whose collectives were counted or memory was tracked; on CUDA only at one N."""
    tracked = tables.memory[tables.memory["category"].str.startswith(TRACKED)]
    return {*tables.collectives["cell_id"], *tracked["cell_id"]}


def _memory(
    sizes: Mapping[str, int], cell: Cell, layout: Layout, predicted: int | None, settings: Settings
) -> Iterator[tuple[str, int, int]]:
    """Categories with their measured and expected bytes; none for what was not measured or is already judged.

    ``held_<use>`` is held between micro-batches, and covers the use's sharded and unsharded categories; it is not
    measured at N = 1. ``peak`` is the peak without OTHER beside the prediction, and differs without being wrong.
    """
    parts = {category: f"{TRACKED}_{HELD}_{category}" for category in Category}
    if sizes.keys() >= set(parts.values()):
        for use, size in _most_held(cell, layout, settings).items():
            if f"{HELD}_{use}" not in sizes:
                measured = (int(sizes[name]) for category, name in parts.items() if category.startswith(use))
                yield f"{HELD}_{use}", sum(measured), size
    total, other = f"{TRACKED}_{PEAK}", f"{TRACKED}_{PEAK}_{Category.OTHER}"
    if predicted is not None and PEAK not in sizes and sizes.keys() >= {total, other}:
        yield PEAK, int(sizes[total]) - int(sizes[other]), predicted


def _most_held(cell: Cell, layout: Layout, settings: Settings) -> Mapping[str, int]:
    """The held bytes of the rank that holds most, which is the one that a merged record shows.

    Ranks differ if parameters do not divide evenly: the last shards are shorter, and ZeRO-2's partitions overlap
    different parameters.
    """
    ranks = (expect(cell, layout, rank=rank, settings=settings) for rank in range(cell.num_processes))
    return max((rank.held for rank in ranks if rank), key=lambda held: sum(held.values()))


def settings_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Settings]:
    """The backend's settings that the trials of a cell have stored, by cell_id."""
    found = ((record["cell_id"], (record.get("time") or record).get("settings")) for record in records)
    return {cell_id: settings for cell_id, settings in found if settings is not None}


def cell_of(trial: Mapping[Any, Any]) -> Cell:
    """The cell of a row of the trials table, as far as formulas need it; missing values are defaults."""
    values = {f.name: trial[f.name] for f in fields(Cell) if f.name in trial and not pd.isna(trial[f.name])}
    values["virtual"] = not pd.isna(trial.get("virtual_world_size"))
    return Cell.from_dict({name: default for name, default in ADDED_FIELDS.items() if name not in values} | values)
