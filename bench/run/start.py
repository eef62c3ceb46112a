"""Starts or resumes a run: its folder, its manifest, and the disk space that it needs."""

from __future__ import annotations

import datetime
import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from bench.backends.base import Backend, register, registry
from bench.errors import InputError
from bench.files import existing, writing
from bench.formatting import plural
from bench.plan.cell import Cell
from bench.plan.expand import baseline
from bench.plan.matrix import Matrix
from bench.plan.models import HUGGING_FACE, SIZES, describe_file, name_config, sources
from bench.run import machine
from bench.run.journal import JOURNAL, MANIFEST, read_manifest, write_manifest
from bench.run.manifest import (
    CONNECTION,
    Git,
    GpuSharing,
    Manifest,
    NodeFacts,
    Predicted,
    StoredMatrix,
)


@dataclass(frozen=True)
class Planned:
    """What a run will train: the matrix with all options applied, and what follows from it here."""

    matrix: Matrix
    backends: dict[str, type[Backend]]
    cells: list[Cell]
    """Without the references that are too large for the GPUs."""
    once: list[str] = field(default_factory=list)
    """Ids of the cells with a single trial."""
    gpus: Sequence[Mapping[str, Any]] = ()
    """Those that the cells run on, as ``bench.launch.gpus`` has them; none on the CPU."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Why cells are skipped, by id: too large for a GPU, or a model that the backend cannot
    train."""


def describe(backends: Mapping[str, type[Backend]]) -> dict[str, dict[str, str]]:
    """Descriptions of the backends for run.json."""
    found = {}
    for name, backend in backends.items():
        found[name] = {
            "framework": backend.framework,
            "sync": str(backend.sync),
            "sharding": str(backend.sharding),
            "bf16_as": backend.bf16_as,
            "defect": backend.defect,
        }
        if not backend.__module__.startswith("bench."):
            found[name]["class"] = f"{backend.__module__}:{backend.__name__}"
    return found


def create(
    folder: Path,
    plan: Planned,
    *,
    cold: bool,
    peaks: Mapping[str, int] = MappingProxyType({}),
    nodes: Sequence[Mapping[str, object]] = (),
    head: str = "",
    sharing: GpuSharing | None = None,
) -> Manifest:
    """Start a run: create its folder and write its manifest.

    ``peaks`` has the predicted peaks of memory in bytes, by cell id; they are stored with the time,
    to show that they were made before any measurement. ``nodes`` are the fingerprints of all nodes
    but this one, whose address is ``head``. ``sharing`` says how ranks that share a GPU
    communicate. Raises InputError if the folder cannot be used.
    """
    if (folder / MANIFEST).exists() or (folder / JOURNAL).exists():
        raise InputError(
            f"--out {folder}: holds a run already; name another folder, or go on with --resume "
            f"{folder}"
        )
    cells, backends = plan.cells, plan.backends
    used = {cell.backend for cell in cells}
    remarks, lossy = {}, {}
    for cell in cells:
        backend = backends[cell.backend]
        if remark := backend.remark(cell):
            remarks[cell.cell_id] = remark
        lost = backend.lossy(cell)
        if lost is not None:
            lossy[cell.cell_id] = lost
    fingerprint = machine.fingerprint()
    if nodes:
        fingerprint[CONNECTION] = machine.connection(head)
    manifest = Manifest(
        run_id=folder.resolve().name,
        started=now(),
        command=("python", "-m", "bench", *sys.argv[1:]),
        matrix=StoredMatrix(**plan.matrix.to_dict()),
        settings=plan.matrix.settings,
        cells=tuple(cells),
        once=tuple(plan.once),
        skipped=plan.skipped,
        remarks=remarks,
        lossy=lossy,
        predicted=Predicted(made=now(), peak_bytes=dict(peaks)),
        backends=describe({name: backend for name, backend in backends.items() if name in used}),
        baseline=baseline(plan.matrix, backends),
        cold=cold,
        code=code(cells, backends),
        sharing=sharing,
        git=Git(**machine.git_state()),
        distributions=machine.distributions(),
        node=NodeFacts.of(fingerprint),
        nodes=tuple(map(NodeFacts.of, nodes)),
    )
    with writing(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, manifest)
    return manifest


def code(cells: Sequence[Cell], backends: Mapping[str, type[Backend]]) -> dict[str, str]:
    """SHA-256 of the code that these cells run, as from ``bench.run.machine.code``."""
    used, workloads = {}, {}
    for cell in cells:
        used[cell.backend] = backends[cell.backend]
        workloads[cell.workload] = sources(cell.workload)
    return machine.code(used, workloads)


def cells_of(folder: Path, manifest: Manifest) -> tuple[Cell, ...]:
    """The cells of a run. Raises InputError if its manifest has none, or an unknown model."""
    if not manifest.cells:
        raise InputError(f"{folder / MANIFEST}: cells: there are none; restore the file")
    models = {cell.model for cell in manifest.cells if cell.workload == "llama"}
    if unknown := models - SIZES.keys():
        raise InputError(
            f"{folder / MANIFEST}: cells: there is no model '{unknown.pop()}'; restore the file"
        )
    return manifest.cells


def backends_of(folder: Path, manifest: Manifest) -> dict[str, type[Backend]]:
    """The backends of a run's cells; a class given as ``module:Class`` is loaded again.

    Raises InputError.
    """
    names = {cell.backend for cell in cells_of(folder, manifest)}
    for name in names - registry(names).keys():
        if named := manifest.backends.get(name, {}).get("class"):
            register(named)
    return registry(names)


def reopen(
    folder: Path, backends: Mapping[str, type[Backend]], nodes: Sequence[Mapping[str, object]] = ()
) -> Manifest:
    """The manifest of a run to resume.

    Code is compared by content, not by commit: an installed package has no commit, and uncommitted
    changes count too. Raises InputError if a machine, the software or the code has changed.
    """
    manifest = read_manifest(folder)
    cells = cells_of(folder, manifest)
    try:
        manifest.schedule()
    except InputError as error:
        raise InputError(
            f"{folder / MANIFEST}: its looks and repeats are not those of a run ({error}); restore "
            "the file"
        ) from error
    if unknown := {cell.backend for cell in cells} - backends.keys():
        raise InputError(
            f"--resume {folder}: backend '{unknown.pop()}' is not installed here any more"
        )
    _find_configs(folder, manifest, cells)
    if manifest.code != code(cells, backends):
        back = "install that version again"
        if manifest.git.commit:
            back = f"go back to commit {manifest.git.commit[:12]}"
        raise InputError(
            f"--resume {folder}: the code of the bench, of a backend or of the workload is not "
            f"what it was when the run began; trials of both do not belong in one run, so {back}, "
            "or start a new one"
        )
    needed = len(manifest.nodes)
    if needed != len(nodes):
        begun = plural(1 + needed, "node")
        raise InputError(
            f"--resume {folder}: was begun on {begun}, and this job has {1 + len(nodes)}; start as "
            "many"
        )
    _require_alike(manifest.node, machine.fingerprint(), f"--resume {folder}: ")
    for number, (stored, node) in enumerate(zip(manifest.nodes, nodes, strict=True), start=1):
        _require_alike(stored, node, f"--resume {folder}: on node {number}, ")
    cell, corpus = cells[0], Path(manifest.settings.workload.corpus)
    if cell.corpus != "markov":
        found = describe_file(corpus, cell.sequence_length + 1, f"--resume {folder}: corpus")
        if found != cell.corpus:
            raise InputError(
                f"--resume {folder}: the corpus was {cell.corpus} and is {found}; restore it, or "
                "start a new run"
            )
    return manifest


def _find_configs(folder: Path, manifest: Manifest, cells: Sequence[Cell]) -> None:
    """Find the files of the configs that the cells name. Raises InputError if one has changed."""
    settings = manifest.settings
    asked = [settings.workload.workload]
    for group in settings.groups:
        asked.append(str(group.get("workload.workload", "")))
    known = {name_config(name) for name in asked if name.startswith(HUGGING_FACE)}
    for cell in cells:
        workload = cell.workload
        if known and workload.startswith(HUGGING_FACE) and workload not in known:
            raise InputError(
                f"--resume {folder}: the workload was {workload}, and the config is now "
                f"{', '.join(sorted(known))}; restore it, or start a new run"
            )


def _require_alike(stored: NodeFacts, found: Mapping[str, object], place: str) -> None:
    """Raise InputError if the fingerprint of a node is not the one that was stored."""
    parts = [part for part in found if part in stored.fingerprint]
    for change in machine.differences(stored.fingerprint, found, parts):
        raise InputError(
            f"{place}{change.key} was {change.a!r} and is {change.b!r}; timings of both do not "
            "belong in one run, so start a new one"
        )


def now() -> str:
    """The current time (UTC) as in manifests and records."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


RESERVE_BYTES = 16 * 2**20
"""Space that must be free before a trial starts: for logs, its record, and the tables and plots at
the end."""
RECORD_BYTES, STEP_BYTES, RANK_STEP_BYTES = 6_000, 60, 14
"""Size of a trial's record: fixed part, per step, and per step and rank. Rounded up."""


def needed(cells: Sequence[Cell], repeats: int) -> int:
    """Rough number of bytes that a run will write, without references of models not shipped."""
    total = RESERVE_BYTES
    for cell in cells:
        step_bytes = STEP_BYTES + RANK_STEP_BYTES * cell.world_size
        total += repeats * (RECORD_BYTES + cell.windows * step_bytes)
        if cell.is_reference and cell.workload == "llama":
            reference_bytes = SIZES[cell.model].num_parameters * 4
            total += reference_bytes
            if cell.clip_norm:
                total += reference_bytes
    return total


def free(folder: Path) -> int:
    """Free bytes for a folder, which need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def require(folder: Path, plan: Planned, place: str) -> None:
    """Raise InputError that names ``place`` if the folder has no room for such a run."""
    need, have = needed(plan.cells, plan.matrix["repeats"]), free(folder)
    if have < need:
        raise InputError(
            f"{place}: the run needs about {need / 2**20:,.0f} MiB, and {have / 2**20:,.0f} MiB "
            "are free; free some, or name another folder"
        )


def is_short(folder: Path) -> bool:
    """Whether there is too little free space for another trial."""
    return free(folder) < RESERVE_BYTES


def full(folder: Path) -> OSError:
    """The OSError of a write to a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
