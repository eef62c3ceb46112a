"""What ``run.json`` holds, typed: read where a run is opened; ``Manifest.to_dict`` writes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from bench import validation
from bench.backends.base import Lossy
from bench.errors import InputError, shown
from bench.plan.cell import Cell
from bench.plan.matrix import MatrixFile, settings_of_stored
from bench.plan.schedule import InterimAnalysis, Schedule
from bench.run.links import MeasuredRates
from bench.validation import Flag, Natural

SCHEMA_VERSION = 2
"""Version of run.json and trials.jsonl together; no other is read."""
REQUIRED = ("run_id", "matrix", "cells", "backends", "cold")
"""Keys without which nothing can be said of a run."""
FINGERPRINT = ("machine", "packages", "torch_build", "environment")
"""Parts of a node that must be equal in two runs for their times to be comparable."""
LATER = ("matmul", "looks", "ended_by", "parent_peak_bytes", "journal_sha256", "finished")
"""Keys that a run adds while it goes on."""
CONNECTION = "connection"
"""Another part, of runs on several nodes: what connects a node to the others."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU of a node, as ``bench.launch.gpus`` found it."""

    name: str = "GPU"
    uuid: str = ""
    mig: str = ""
    driver: str = ""
    index: Natural | None = None
    memory_bytes: Natural | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The hardware and the operating system of a node; None is unknown."""

    cpu: str | None = None
    cores: Natural | None = None
    governor: str | None = None
    memory_bytes: Natural | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_settings: tuple[Mapping[str, object], ...] = ()
    system: str | None = None
    python: str | None = None


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """A node of a run."""

    machine: Machine = Machine()
    packages: Mapping[str, str] = field(default_factory=dict)
    torch_build: Mapping[str, str | None] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    connection: Mapping[str, object] = field(default_factory=dict)
    fingerprint: Mapping[str, object] = field(default_factory=dict)
    """The parts in FINGERPRINT, and CONNECTION, as they were stored: two runs are compared in all
    of their keys."""

    @classmethod
    def of(cls, fingerprint: Mapping[str, object]) -> NodeFacts:
        """A node from the parts of its fingerprint."""
        return validation.read(cls, _with_fingerprint(fingerprint))


@dataclass(frozen=True, kw_only=True)
class StoredMatrix:
    """The matrix as it was run; ``Manifest.settings`` has its validated values."""

    name: str = ""
    source: str = ""
    values: Mapping[str, object] = field(default_factory=dict)
    """By table.key."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The command-line option of each key that one overrode."""


@dataclass(frozen=True, kw_only=True)
class Git:
    """The checkout of the bench; None if it was none."""

    commit: str | None = None
    clean: Flag | None = None


@dataclass(frozen=True, kw_only=True)
class GpuSharing:
    """How ranks that share a GPU communicate."""

    over: str
    """NCCL or gloo."""
    reason: str = ""
    """Why it is not NCCL."""

    @property
    def sentence(self) -> str:
        """What is said of it before the first trial."""
        found = f"ranks that share a GPU communicate over {self.over}"
        if self.reason:
            found += f", since NCCL does not work between them: {self.reason}"
        return found


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What was predicted before the first trial."""

    made: str = ""
    peak_bytes: Mapping[str, Natural] = field(default_factory=dict)
    """Peak memory of a rank by cell id."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of run.json."""

    run_id: str
    matrix: StoredMatrix
    settings: MatrixFile
    """The values of the matrix."""
    cells: tuple[Cell, ...]
    backends: Mapping[str, Mapping[str, str]]
    """By name, as ``bench.run.start.describe`` describes them."""
    cold: Flag
    started: str = ""
    command: tuple[str, ...] = ()
    once: tuple[str, ...] = ()
    """Ids of the cells that run only one trial."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Why cells are not run, by id."""
    remarks: Mapping[str, str] = field(default_factory=dict)
    """Of backends on cells, by id."""
    lossy: Mapping[str, Lossy] = field(default_factory=dict)
    """What backends declare to lose on purpose, by the id of the cell."""
    predicted: Predicted = Predicted()
    baseline: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the code that is run, by name (``bench.run.machine.code``)."""
    sharing: GpuSharing | None = None
    """None if no ranks share a GPU."""
    git: Git = Git()
    distributions: Mapping[str, str] = field(default_factory=dict)
    """Versions of all installed packages."""
    node: NodeFacts = NodeFacts()
    """Node 0."""
    nodes: tuple[NodeFacts, ...] = ()
    """The others."""
    matmul: tuple[MeasuredRates, ...] | None = None
    """None before they were measured."""
    looks: tuple[InterimAnalysis, ...] = ()
    ended_by: str | None = None
    parent_peak_bytes: Natural | None = None
    journal_sha256: str | None = None
    """Of the journal when the run ended."""
    finished: str | None = None
    """When the run ended; None while it goes on."""
    stored: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)
    """The JSON from which it was read, if it was."""

    @property
    def begun_sha256(self) -> str:
        """SHA-256 of all that run.json says from the beginning, in hex.

        Each record of the journal repeats it. It is of the JSON with sorted keys and without
        spaces, without the keys of ``LATER``.
        """
        every = self.stored
        if not every:
            every = self.to_dict()
        begun = {key: value for key, value in every.items() if key not in LATER}
        text = json.dumps(begun, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def machine(self) -> Machine:
        """The machine of node 0."""
        return self.node.machine

    @property
    def packages(self) -> Mapping[str, str]:
        """The packages of node 0."""
        return self.node.packages

    def schedule(self) -> Schedule:
        """The blocks of the run. Raises InputError if they have too many trials."""
        begun = f"{self.run_id} {self.started}"
        return Schedule(self.cells, self.settings, once=self.once, looks=self.looks, begun=begun)

    def rates(self, world_size: int, num_nodes: int) -> MeasuredRates | None:
        """The rates of so many ranks on so many nodes; None if they were not measured."""
        if self.matmul is None:
            return None
        for measured in self.matmul:
            if (measured.world_size, measured.num_nodes) == (world_size, num_nodes):
                return measured
        return None

    def to_dict(self) -> dict[str, object]:
        """The content of run.json; ``parse_manifest`` is the inverse."""
        found: dict[str, object] = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.run_id,
            "started": self.started,
            "command": list(self.command),
            "matrix": dict(vars(self.matrix)),
            "cells": [cell.to_dict() for cell in self.cells],
            "once": list(self.once),
            "skipped": dict(self.skipped),
            "remarks": dict(self.remarks),
            "predicted": dict(vars(self.predicted)),
            "backends": dict(self.backends),
            "baseline": self.baseline,
            "cold": self.cold,
            "code": dict(self.code),
            "git": dict(vars(self.git)),
            "distributions": dict(self.distributions),
            **self.node.fingerprint,
        }
        if self.lossy:
            found["lossy"] = {cell_id: asdict(lossy) for cell_id, lossy in self.lossy.items()}
        if self.sharing is not None:
            found["sharing"] = dict(vars(self.sharing))
        if self.nodes:
            found["nodes"] = [dict(node.fingerprint) for node in self.nodes]
        if self.matmul is not None:
            found["matmul"] = [dict(vars(measured)) for measured in self.matmul]
        if self.looks:
            found["looks"] = [look.to_dict() for look in self.looks]
            found["ended_by"] = self.ended_by
        for name in ("parent_peak_bytes", "journal_sha256", "finished"):
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        return found


def parse_manifest(document: Mapping[str, object], place: str) -> Manifest:
    """The manifest in the JSON of a run.json. A key whose value is null counts as missing.

    Raises InputError that begins with ``place`` and names the key, its value and what would be
    right.
    """
    given = {key: value for key, value in document.items() if value is not None}
    for key in REQUIRED:
        if key not in given:
            raise InputError(f"{place}: has no key '{key}'; restore it")
    if not isinstance(given["matrix"], dict):
        raise InputError(f"{place}: matrix is {shown(given['matrix'])}; it must be a table")
    matrix = validation.read(
        StoredMatrix, given["matrix"], f"{place}: ", lambda key: f"matrix.{key}"
    )
    given |= {
        "stored": document,
        "matrix": matrix,
        "settings": settings_of_stored(matrix.values, place),
    }
    given["node"] = _with_fingerprint(given)
    nodes = given.get("nodes")
    if isinstance(nodes, list):
        given["nodes"] = [_with_fingerprint(node) for node in nodes]
    return validation.read(Manifest, given, f"{place}: ", lambda key: key.removeprefix("node."))


def _with_fingerprint(stored: object) -> object:
    """A node as it is stored, with its fingerprint beside what is read of it."""
    if not isinstance(stored, Mapping):
        return stored
    parts, known = {}, {}
    for part in (*FINGERPRINT, CONNECTION):
        if part in stored:
            parts[part] = stored[part]
            if stored[part] is not None:
                known[part] = stored[part]
    return {**known, "fingerprint": parts}
