"""Starts or resumes a run: its folder, its manifest, and the disk space that it needs."""

from __future__ import annotations

import datetime
import errno
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.backends.base import Backend, register, registry
from bench.errors import InputError
from bench.files import existing, writing
from bench.formatting import plural
from bench.plan.cell import Cell
from bench.plan.expand import baseline
from bench.plan.matrix import Matrix, check_stored
from bench.plan.models import SIZES, describe_file, sources
from bench.plan.schedule import Schedule
from bench.run import machine
from bench.run.journal import JOURNAL, MANIFEST, SCHEMA_VERSION, read_manifest, write_manifest


def describe(backends: Mapping[str, type[Backend]]) -> dict[str, dict[str, str]]:
    """Descriptions of the backends for run.json."""
    return {
        name: {
            "framework": backend.framework,
            "sync": str(backend.sync),
            "sharding": str(backend.sharding),
            "bf16_as": backend.bf16_as,
            "defect": backend.defect,
            **(
                {} if backend.__module__.startswith("bench.") else {"class": f"{backend.__module__}:{backend.__name__}"}
            ),
        }
        for name, backend in backends.items()
    }


def create(
    folder: Path,
    matrix: Matrix,
    cells: Sequence[Cell],
    backends: Mapping[str, type[Backend]],
    *,
    cold: bool,
    once: Sequence[str] = (),
    skipped: Mapping[str, str] | None = None,
    peaks: Mapping[str, int] | None = None,
    nodes: Sequence[Mapping[str, Any]] = (),
    head: str = "",
    sharing: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Start a run: create its folder and write its manifest. Raises InputError if the folder cannot be used.

    By cell id: cells in ``once`` get a single trial, ``skipped`` has reasons not to run a cell, and ``peaks`` has the
    predicted peaks of memory in bytes. The predictions are stored with the time, to show that they were made before
    any measurement. ``nodes`` are the fingerprints of all nodes but this one, whose address is ``head``. ``sharing``
    says what ranks that share a GPU communicate ``over``, and the ``reason`` if that is not NCCL.
    """
    if (folder / MANIFEST).exists() or (folder / JOURNAL).exists():
        raise InputError(f"--out {folder}: holds a run already; name another folder, or go on with --resume {folder}")
    used = {cell.backend for cell in cells}
    manifest = {
        "schema_version": SCHEMA_VERSION,
        "run_id": folder.resolve().name,
        "started": now(),
        "command": ["python", "-m", "bench", *sys.argv[1:]],
        "matrix": matrix.to_dict(),
        "cells": [cell.to_dict() for cell in cells],
        "once": list(once),
        "skipped": dict(skipped or {}),
        "remarks": {cell.cell_id: text for cell in cells if (text := backends[cell.backend].remark(cell))},
        "predicted": {"made": now(), "peak_bytes": dict(peaks or {})},
        "backends": {name: about for name, about in describe(backends).items() if name in used},
        "baseline": baseline(matrix, backends),
        "cold": cold,
        "code": code(cells, backends),
        **({"sharing": dict(sharing)} if sharing else {}),
        "git": machine.git_state(),
        "distributions": machine.distributions(),
        **machine.fingerprint(),
        **({"nodes": list(nodes), machine.CONNECTION: machine.connection(head)} if nodes else {}),
    }
    with writing(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        write_manifest(folder, manifest)
    return manifest


def code(cells: Sequence[Cell], backends: Mapping[str, type[Backend]]) -> dict[str, str]:
    """SHA-256 of the code that these cells run, as from ``bench.run.machine.code``."""
    workloads = {cell.workload: sources(cell.workload) for cell in cells}
    return machine.code({cell.backend: backends[cell.backend] for cell in cells}, workloads)


def cells_of(folder: Path, manifest: Mapping[str, Any]) -> list[Cell]:
    """The cells of a run. Raises InputError if its manifest has none, or an unknown model."""
    cells = [Cell.from_dict(cell) for cell in manifest.get("cells", ())]
    if not cells:
        raise InputError(f"{folder / MANIFEST}: cells: there are none; restore the file")
    if unknown := {cell.model for cell in cells if cell.workload == "llama"} - SIZES.keys():
        raise InputError(f"{folder / MANIFEST}: cells: there is no model '{unknown.pop()}'; restore the file")
    return cells


def backends_of(folder: Path, manifest: Mapping[str, Any]) -> dict[str, type[Backend]]:
    """The backends of a run's cells; a class given as ``module:Class`` is loaded again. Raises InputError."""
    names = {cell.backend for cell in cells_of(folder, manifest)}
    described: Any = manifest.get("backends")
    for name in names - registry(names).keys() if isinstance(described, dict) else ():
        if named := described.get(name, {}).get("class"):
            register(named)
    return registry(names)


def reopen(
    folder: Path, backends: Mapping[str, type[Backend]], nodes: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """The manifest of a run to resume. Raises InputError if a machine, the software or the code has changed.

    Code is compared by content, not by commit: an installed package has no commit, and uncommitted changes count too.
    """
    manifest = read_manifest(folder)
    cells = cells_of(folder, manifest)
    check_stored(manifest, str(folder / MANIFEST))
    if lacking := [key for key in ("run_id", "cold", "backends") if key not in manifest]:
        raise InputError(f"{folder / MANIFEST}: has no key '{lacking[0]}'; restore it")
    try:
        Schedule(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder / MANIFEST}: its looks and repeats are not those of a run ({error}); restore the file"
        ) from error
    if unknown := {cell.backend for cell in cells} - backends.keys():
        raise InputError(f"--resume {folder}: backend '{unknown.pop()}' is not installed here any more")
    then, now = manifest.get("code"), code(cells, backends)
    if then != now:
        commit = (manifest.get("git") or {}).get("commit")
        back = f"go back to commit {commit[:12]}" if commit else "install that version again"
        raise InputError(
            f"--resume {folder}: the code of the bench, of a backend or of the workload is not what it was when the "
            f"run began; trials of both do not belong in one run, so {back}, or start a new one"
        )
    needed = len(manifest.get("nodes") or ())
    if needed != len(nodes):
        begun = plural(1 + needed, "node")
        raise InputError(f"--resume {folder}: was begun on {begun}, and this job has {1 + len(nodes)}; start as many")
    _require_alike(manifest, machine.fingerprint(), f"--resume {folder}: ")
    for number, node in enumerate(nodes, start=1):
        _require_alike(manifest["nodes"][number - 1], node, f"--resume {folder}: on node {number}, ")
    values, cell = manifest["matrix"]["values"], cells[0]
    if cell.corpus != "markov":
        found = describe_file(Path(values["workload.corpus"]), cell.sequence_length + 1, f"--resume {folder}: corpus")
        if found != cell.corpus:
            raise InputError(
                f"--resume {folder}: the corpus was {cell.corpus} and is {found}; restore it, or start a new run"
            )
    return manifest


def _require_alike(stored: Mapping[str, Any], found: Mapping[str, Any], place: str) -> None:
    """Raise InputError if the fingerprint of a node is not the one that was stored."""
    for change in machine.differences(stored, found, [part for part in found if part in stored]):
        raise InputError(
            f"{place}{change.key} was {change.a!r} and is {change.b!r}; timings of both do not belong in one run, so "
            "start a new one"
        )


def now() -> str:
    """The current time (UTC) as in manifests and records."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


RESERVE_BYTES = 16 * 2**20
"""Space that must be free before a trial starts: for logs, its record, and the tables and plots at the end."""
RECORD_BYTES, STEP_BYTES, RANK_STEP_BYTES = 6_000, 60, 14
"""Size of a trial's record: fixed part, per step, and per step and rank. Rounded up."""


def needed(cells: Sequence[Cell], repeats: int) -> int:
    """Rough number of bytes that a run will write, without the references of models that are not shipped."""
    total = RESERVE_BYTES
    for cell in cells:
        total += repeats * (RECORD_BYTES + cell.windows * (STEP_BYTES + RANK_STEP_BYTES * cell.world_size))
        if cell.is_reference and cell.workload == "llama":
            total += SIZES[cell.model].num_parameters * 4 * (2 if cell.clip_norm else 1)
    return total


def free(folder: Path) -> int:
    """Free bytes for a folder, which need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def require(folder: Path, cells: Sequence[Cell], repeats: int, place: str) -> None:
    """Raise InputError that names ``place`` if the folder has no room for such a run."""
    need, have = needed(cells, repeats), free(folder)
    if have < need:
        raise InputError(
            f"{place}: the run needs about {need / 2**20:,.0f} MiB, and {have / 2**20:,.0f} MiB are free; "
            "free some, or name another folder"
        )


def is_short(folder: Path) -> bool:
    """Whether there is too little free space for another trial."""
    return free(folder) < RESERVE_BYTES


def full(folder: Path) -> OSError:
    """The OSError of a write to a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
