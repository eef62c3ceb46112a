"""Findings that were to be expected: a backend is known for a defect of its framework, and that is what was caught."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.analysis.gates import explain_update
from bench.cell import Status

EXPECTED = "a documented defect of the framework, which was expected"
"""How such a finding is called; what the defect is follows it."""


def documented(manifest: Mapping[str, Any], judged: Mapping[Any, Any]) -> str:
    """The defect in words, if a judged trial or cell is invalid by it and by nothing else; empty otherwise.

    ``judged`` has ``backend``, ``accumulate``, ``status`` and ``reason``, as rows of trials and cells do.
    """
    defect = _defect(manifest, judged["backend"])
    reason = str(judged["reason"])
    only = reason.startswith("the update is off")  # it is named last
    caught = judged["status"] == Status.INVALID and only and _cause(judged["accumulate"]) in reason
    return defect if caught else ""


def note(manifest: Mapping[str, Any], judged: Mapping[Any, Any]) -> str:
    """The same as a sentence to stand beside the reason; empty if there is nothing to say."""
    defect = documented(manifest, judged)
    return f"{EXPECTED}: {defect}" if defect else ""


def in_record(manifest: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """As ``note``, of a trial that has just ended, if its own update already shows the defect; empty otherwise."""
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
    """As the gates say it."""
    return f"the loss is divided by N = {accumulate} twice"
