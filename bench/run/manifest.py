"""Whether a manifest holds what it may hold, and upgrades of older files: what was edited or is hostile is refused.

Missing keys are allowed: older runs have fewer, and whoever needs one says so. Files of an older version are upgraded
in memory, one version at a time, and never written: only the code that began a run goes on with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.errors import shown
from bench.run.predicates import Check, anything, boolean, integer, list_of, number, or_none, table, table_of, text

CHECKS: dict[str, Check] = {
    "run_id": text,
    "started": text,
    "finished": or_none(text),
    "command": list_of(text),
    "matrix": table(name=text, source=text, values=table_of(anything), places=table_of(text)),
    "cells": list_of(table_of(anything)),
    "remarks": table_of(text),
    "backends": table_of(table_of(text)),
    "baseline": text,
    "cold": boolean,
    "code": table_of(text),
    "git": or_none(table(commit=or_none(text), clean=or_none(boolean))),
    "machine": or_none(
        table(
            cpu=or_none(text),
            cores=or_none(integer),
            governor=or_none(text),
            memory_bytes=or_none(integer),
            gpus=list_of(table(name=text, uuid=text, mig=text, driver=text, index=integer, memory_bytes=integer)),
            gpu_settings=list_of(table_of(anything)),
            system=or_none(text),
            python=or_none(text),
        )
    ),
    "matmul": list_of(table(world_size=integer, threads=integer, flops_per_s=table_of(list_of(number)), reason=text)),
    "packages": or_none(table_of(text)),
    "distributions": or_none(table_of(text)),
    "torch_build": or_none(table_of(or_none(text))),
    "environment": or_none(table_of(text)),
    "once": list_of(text),
    "looks": or_none(
        list_of(table(repeats=integer, wanted=integer, open=list_of(text), refused=text, widest=or_none(number)))
    ),
    "ended_by": or_none(text),
    "noise_floor": or_none(table_of(or_none(lambda value: text(value) or boolean(value) or number(value)))),
    "parent_peak_bytes": or_none(integer),
    "journal_sha256": or_none(text),
}
"""What a key of a manifest may hold."""


def wrong(manifest: Mapping[str, Any]) -> str:
    """In words, the first key that holds what it cannot; empty if there is none."""
    for key, check in CHECKS.items():
        if key in manifest and not check(manifest[key]):
            return f"{key} cannot be {shown(manifest[key])}"
    return ""


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
    for old in range(version, LATEST):
        value = steps[old](value)
    return value
