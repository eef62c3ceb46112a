"""The schema of run.json, which rejects edited or hostile files."""

from __future__ import annotations

from typing import Any

from typing_extensions import TypedDict

from bench.plan.cell import Cell
from bench.plan.schedule import InterimAnalysis
from bench.run.links import TimedCollective
from bench.validation import Flag, Natural, Number


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
    num_nodes: Natural
    links: list[TimedCollective]
    threads: Natural
    flops_per_s: dict[str, list[Number]]
    reason: str


class _Node(TypedDict, total=False):
    machine: _Machine | None
    packages: dict[str, str] | None
    torch_build: dict[str, str | None] | None
    environment: dict[str, str] | None
    connection: dict[str, Any]


class _Predicted(TypedDict, total=False):
    made: str
    peak_bytes: dict[str, Natural]


class Manifest(_Node, total=False):
    """The content of run.json. Code that needs a key checks for it."""

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
    nodes: list[_Node]
    matmul: list[_Products]
    distributions: dict[str, str] | None
    once: list[str]
    looks: list[InterimAnalysis] | None
    ended_by: str | None
    parent_peak_bytes: Natural | None
    journal_sha256: str | None
