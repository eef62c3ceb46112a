"""From older schema versions of run.json and trials.jsonl to the latest, one version at a time.

Files of an older version are read and upgraded in memory. They are never written: a run is gone on with only by the
code that began it, so it has no need to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

LATEST = 2

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
"""From one version to the next."""


def _manifest_from_1(manifest: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew no limit of inactivity."""
    matrix = manifest.get("matrix")
    if isinstance(matrix, dict) and isinstance(matrix.get("values"), dict):
        matrix = matrix | {"values": {**matrix["values"], "inactivity_s": 0}}
        manifest = manifest | {"matrix": matrix}
    return manifest | {"schema_version": 2}


def _record_from_1(record: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no checksums; its records are the same."""
    return record


MANIFEST: Mapping[int, Upgrade] = {1: _manifest_from_1}
"""Upgrades of run.json, by the version that they start from."""
RECORD: Mapping[int, Upgrade] = {1: _record_from_1}
"""Upgrades of a record of the journal."""


def apply(steps: Mapping[int, Upgrade], value: dict[str, Any], version: int) -> dict[str, Any]:
    """The value of a version as the latest has it."""
    for number in range(version, LATEST):
        value = steps[number](value)
    return value
