"""Compares counted collectives and held bytes with the formulas, and reports every difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import pandas as pd

from bench.judge.formulas import expect, layout_of
from bench.judge.tables import Tables, frame_of
from bench.plan.categories import HELD, PEAK, Category
from bench.plan.cell import ADDED_FIELDS, Cell, Device, Status
from bench.workload.layout import Layout

TRACKED = "tracked"
"""Prefix of the ledger's categories in the memory table."""
Operation = tuple[str, str]
"""Name and dtype of a collective."""
Amount = tuple[int, int]
"""Calls and payload bytes of one window."""


@dataclass
class Filled:
    """What ``fill`` returns."""

    tables: Tables
    """The tables with ``expected_calls`` and ``expected_payload_bytes`` filled in ``collectives``."""
    findings: dict[str, list[str]] = field(default_factory=dict)
    """By cell_id: one line per operation or category that differs."""


def fill(tables: Tables, layouts: Mapping[str, Layout] | None = None, peaks: Mapping[str, int] | None = None) -> Filled:
    """Add the expected collectives to every successful trial that counted them.

    By cell_id: ``layouts`` of models that are not shipped (``layouts_of`` finds them in a journal), and ``peaks``, the
    peaks of memory in bytes that run.json predicted before the run. An operation that is expected but was not seen gets
    a row with 0 calls; one that was seen but not expected has 0 expected calls. Without a formula (a plug-in backend, a
    model of unknown layout) the columns stay empty.
    """
    frame = tables.collectives
    rows: list[Mapping[Any, Any]] = []
    held: list[Mapping[Any, Any]] = []
    filled = Filled(tables)
    counted_of: dict[tuple[str, int], dict[Operation, Amount]] = {}
    for row in frame.to_dict("records"):
        of_trial = counted_of.setdefault((row["cell_id"], row["repeat"]), {})
        of_trial[row["op"], row["dtype"]] = (row["calls"], row["payload_bytes"])
    watched = cells_watched(tables)
    done: set[tuple[str, int]] = set()
    for trial in tables.trials.to_dict("records"):
        key = (trial["cell_id"], trial["repeat"])
        # All passes but the time pass run together, in one trial of a cell; on CUDA the counting ones only at one N.
        unwatched = trial["num_passes"] == 1 or (trial["device"] == Device.CUDA and key[0] not in watched)
        if trial["status"] not in (Status.OK, Status.INVALID) or unwatched:
            continue
        cell = cell_of(trial)
        layout = (layouts or {}).get(key[0]) or layout_of(cell)
        expectation = expect(cell, layout) if layout else None
        if layout is None or expectation is None:
            continue
        counted = counted_of.get(key, {})
        expected = {(r.op, r.dtype): (r.calls, r.payload_bytes) for r in expectation.collectives}
        rows += _rows(key, counted, expected)
        held += _held(filled, key, tables.memory, _most_held(cell, layout, expectation.held))
        held += _peak(key, tables.memory, (peaks or {}).get(key[0]))
        done.add(key)
        _compare(filled, key[0], counted, expected)
    untouched = [r for r in frame.to_dict("records") if (r["cell_id"], r["repeat"]) not in done]
    new = frame_of("collectives", [*untouched, *rows])
    memory = frame_of("memory", [*tables.memory.to_dict("records"), *held])
    filled.tables = replace(tables, collectives=new, memory=memory)
    return filled


def cells_watched(tables: Tables) -> set[str]:
    """Ids of the cells whose collectives were counted or memory was tracked; on CUDA only at one N."""
    tracked = tables.memory[tables.memory["category"].str.startswith(TRACKED)]
    return {*tables.collectives["cell_id"], *tracked["cell_id"]}


def _held(filled: Filled, key: tuple[str, int], memory: pd.DataFrame, due: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows ``held_<use>``: bytes held between micro-batches, measured and by formula; differences are findings.

    A use covers its sharded and unsharded categories. Empty if not measured (N = 1, older records) or already judged.
    """
    own = memory[(memory["cell_id"] == key[0]) & (memory["repeat"] == key[1])]
    sizes = dict(zip(own["category"], own["bytes"], strict=True))
    parts = {category: f"{TRACKED}_{HELD}_{category}" for category in Category}
    if not sizes.keys() >= set(parts.values()) or any(f"{HELD}_{use}" in sizes for use in due):
        return []
    rows = []
    for use, size in due.items():
        found = sum(int(sizes[name]) for category, name in parts.items() if category.startswith(use))
        rows.append(
            {"cell_id": key[0], "repeat": key[1], "category": f"{HELD}_{use}", "bytes": found, "expected_bytes": size}
        )
        if found != size:
            words = f"{use} held between micro-batches: {found} bytes, not {size}"
            filled.findings.setdefault(key[0], []).append(words)
    return rows


def _most_held(cell: Cell, layout: Layout, first: Mapping[str, int]) -> Mapping[str, int]:
    """The held bytes of the rank that holds most, which is the one that a merged record shows.

    Ranks differ if parameters do not divide evenly: the last shards are shorter, and ZeRO-2's partitions overlap
    different parameters.
    """
    others = (expect(cell, layout, rank=rank) for rank in range(1, cell.num_processes))
    return max([first, *(one.held for one in others if one)], key=lambda held: sum(held.values()))


def _peak(key: tuple[str, int], memory: pd.DataFrame, predicted: int | None) -> list[dict[str, Any]]:
    """A row ``peak``: measured bytes at the peak without OTHER, and the prediction; no row without a prediction.

    A difference here is never a finding.
    """
    own = memory[(memory["cell_id"] == key[0]) & (memory["repeat"] == key[1])]
    sizes = dict(zip(own["category"], own["bytes"], strict=True))
    total, other = f"{TRACKED}_{PEAK}", f"{TRACKED}_{PEAK}_{Category.OTHER}"
    if predicted is None or PEAK in sizes or not sizes.keys() >= {total, other}:
        return []
    found = int(sizes[total]) - int(sizes[other])
    return [{"cell_id": key[0], "repeat": key[1], "category": PEAK, "bytes": found, "expected_bytes": predicted}]


def layouts_of(records: list[dict[str, Any]]) -> dict[str, Layout]:
    """The layouts that ranks returned with their collectives (the key ``layout`` of a record), by cell_id."""
    return {record["cell_id"]: Layout.from_json(record["layout"]) for record in records if record.get("layout")}


def cell_of(trial: Mapping[Any, Any]) -> Cell:
    """The cell of a row of the trials table, as far as formulas need it; missing values are defaults."""
    values = {f.name: trial[f.name] for f in fields(Cell) if f.name in trial and not pd.isna(trial[f.name])}
    values["virtual"] = not pd.isna(trial.get("virtual_world_size"))
    return Cell.from_dict({name: default for name, default in ADDED_FIELDS.items() if name not in values} | values)


def _rows(
    key: tuple[str, int], counted: dict[Operation, Amount], expected: dict[Operation, Amount]
) -> list[dict[str, Any]]:
    """The rows of the collectives table for one trial: every operation that was counted or expected."""
    return [
        {
            "cell_id": key[0],
            "repeat": key[1],
            "op": operation[0],
            "dtype": operation[1],
            "calls": counted.get(operation, (0, 0))[0],
            "payload_bytes": counted.get(operation, (0, 0))[1],
            "expected_calls": expected.get(operation, (0, 0))[0],
            "expected_payload_bytes": expected.get(operation, (0, 0))[1],
        }
        for operation in sorted(counted.keys() | expected.keys())
    ]


def _compare(filled: Filled, cell_id: str, counted: dict[Operation, Amount], expected: dict[Operation, Amount]) -> None:
    """Add a finding for every operation whose calls or bytes are not the expected ones."""
    for op, dtype in sorted(counted.keys() | expected.keys()):
        seen, due = counted.get((op, dtype), (0, 0)), expected.get((op, dtype), (0, 0))
        if seen != due:
            text = f"{op} of {dtype}: {seen[0]} calls and {seen[1]} bytes per window, not {due[0]} and {due[1]}"
            filled.findings.setdefault(cell_id, []).append(text)
