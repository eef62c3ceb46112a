"""What must be said beside the numbers of cells, and beside a failure that was expected.

A remark is one sentence without its full stop, and appears once per place: among the answers, under a table, in a
figure, in a citation. It comes from what run.json says of cells and backends, so no backend is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from bench.backends.base import BF16_AUTOCAST
from bench.judge.gates import explain_update
from bench.plan.cell import REFERENCE, Cell, Precision, Status
from bench.words import some

EXPECTED = "a documented defect of the framework, which was expected"
"""Introduces the description of the defect."""
WAYS = "bf16 is computed in different ways, which by itself changes time and memory: "
"""Begins the remark that names the ways."""
IMPLIES = {BF16_AUTOCAST: ", which keeps the residual stream and norms in fp32"}
"""What a way of computing bf16 implies."""


def remarks(shown: Iterable[tuple[Mapping[str, Any], Cell]]) -> list[str]:
    """The remarks on cells that are shown together, each with the manifest of its run.

    They are the remarks of the cells' backends, as stored when the run began (``Backend.remark``), and how the cells
    compute bf16, if they do not all do it in the same way.
    """
    cells = [(manifest, cell) for manifest, cell in shown if cell.backend != REFERENCE]
    is_one_run = len({id(manifest) for manifest, _ in cells}) == 1
    own: dict[str, dict[str, None]] = {}
    ways: dict[str, dict[str, None]] = {}
    for manifest, cell in cells:
        if (stored := manifest.get("remarks")) and (text := stored.get(cell.cell_id)):
            own.setdefault(text, {})[cell.label] = None
        if cell.precision is Precision.BF16:
            way = manifest.get("backends", {}).get(cell.backend, {}).get("bf16_as") or "a way that was not stored"
            name = cell.backend if is_one_run else f"{cell.backend} of {manifest.get('run_id')}"
            ways.setdefault(way, {})[name] = None
    found = [text if len(cells) == 1 else f"{some(list(labels))}: {text}" for text, labels in own.items()]
    if len(ways) > 1:
        said = (f"{way}{IMPLIES.get(way, '')} ({some(list(names))})" for way, names in ways.items())
        found.append(WAYS + "; ".join(said))
    return found


def documented(manifest: Mapping[str, Any], judged: Mapping[Any, Any]) -> str:
    """The defect in words, if a judged trial or cell is invalid because of it alone; empty otherwise.

    ``judged`` has ``backend``, ``accumulate``, ``status`` and ``reason``, as rows of trials and cells do.
    """
    defect = _defect(manifest, judged["backend"])
    reason = str(judged["reason"])
    only = reason.startswith("the update is off")  # it is named last
    caught = judged["status"] == Status.INVALID and only and _cause(judged["accumulate"]) in reason
    return defect if caught else ""


def note(manifest: Mapping[str, Any], judged: Mapping[Any, Any]) -> str:
    """The same as a sentence beside the reason; empty if there is nothing to say."""
    defect = documented(manifest, judged)
    return f"{EXPECTED}: {defect}" if defect else ""


def in_record(manifest: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """``note`` for a trial that has just ended, if its own update already shows the defect; empty otherwise."""
    cell, update = record["cell"], record.get("update")
    defect = _defect(manifest, cell["backend"])
    if not (defect and update and record["status"] == Status.OK):
        return ""
    scale = update.get("unclipped_scale") or update["scale"]
    found = explain_update(scale, update["residual"], cell["accumulate"], cell["world_size"])
    return f"invalid, {EXPECTED}: {defect}" if _cause(cell["accumulate"]) in found else ""


def _defect(manifest: Mapping[str, Any], backend: str) -> str:
    return str(manifest.get("backends", {}).get(backend, {}).get("defect") or "")


def _cause(accumulate: int) -> str:
    """The gates' words for the cause."""
    return f"the loss is divided by N = {accumulate} twice"
