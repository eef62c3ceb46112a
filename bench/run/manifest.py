"""The schema of run.json, which rejects edited or hostile files, and upgrades of older versions.

Missing keys are allowed, since older runs have fewer; code that needs a key checks for it. Files of an older version
are upgraded in memory, one version at a time, and never written: a run is resumed only by the code that started it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from typing_extensions import TypedDict

from bench.fields import Flag, Must, Natural, Number
from bench.plan.cell import Cell
from bench.plan.schedule import Look


class _Matrix(TypedDict, total=False):
    name: str
    source: str
    values: dict[str, Any]
    places: dict[str, str]


class _Git(TypedDict, total=False):
    commit: str | None
    clean: Flag | None


class _Gpu(TypedDict, total=False):
    name: str
    uuid: str
    mig: str
    driver: str
    index: Natural
    memory_bytes: Natural


class _Machine(TypedDict, total=False):
    cpu: str | None
    cores: Natural | None
    governor: str | None
    memory_bytes: Natural | None
    gpus: list[_Gpu]
    gpu_settings: list[dict[str, Any]]
    system: str | None
    python: str | None


class _Products(TypedDict, total=False):
    world_size: Natural
    threads: Natural
    flops_per_s: dict[str, list[Number]]
    reason: str


class _Predicted(TypedDict, total=False):
    made: str
    peak_bytes: dict[str, Natural]


class Manifest(TypedDict, total=False):
    """The content of run.json. Older runs have fewer keys."""

    run_id: str
    started: str
    finished: str | None
    command: list[str]
    matrix: _Matrix
    cells: list[Cell]
    skipped: dict[str, str] | None
    predicted: _Predicted | None
    remarks: dict[str, str]
    backends: dict[str, dict[str, str]]
    baseline: str
    cold: Flag
    code: dict[str, str]
    git: _Git | None
    machine: _Machine | None
    matmul: list[_Products]
    packages: dict[str, str] | None
    distributions: dict[str, str] | None
    torch_build: dict[str, str | None] | None
    environment: dict[str, str] | None
    once: list[str]
    looks: list[Look] | None
    ended_by: str | None
    noise_floor: dict[str, Annotated[str | Flag | Number | None, Must("a string, a number, true or false")]] | None
    parent_peak_bytes: Natural | None
    journal_sha256: str | None


LATEST = 2

Upgrade = Callable[[dict[str, Any]], dict[str, Any]]
"""Converts one version to the next."""


def _manifest_from_1(manifest: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no limit of inactivity."""
    matrix = manifest.get("matrix")
    if isinstance(matrix, dict) and isinstance(matrix.get("values"), dict):
        matrix = matrix | {"values": {**matrix["values"], "inactivity_s": 0}}
        manifest = manifest | {"matrix": matrix}
    return manifest | {"schema_version": 2}


def _record_from_1(record: dict[str, Any]) -> dict[str, Any]:
    """Version 1 had no checksums; its records are the same."""
    return record


MANIFEST: Mapping[int, Upgrade] = {1: _manifest_from_1}
"""Upgrades of run.json, by the version that they convert."""
RECORD: Mapping[int, Upgrade] = {1: _record_from_1}
"""Upgrades of journal records, by the version that they convert."""


def apply(steps: Mapping[int, Upgrade], value: dict[str, Any], version: int) -> dict[str, Any]:
    """Upgrade a value from the given version to the latest."""
    for old in range(version, LATEST):
        value = steps[old](value)
    return value
