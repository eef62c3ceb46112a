"""Several runs of the same cells on machines of one class, of which each counts once in a ratio.

A folder of runs may stand for the runs in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bench.errors import InputError
from bench.formatting import some
from bench.judge.loading import Run, load
from bench.plan.cell import Cell
from bench.run.journal import MANIFEST
from bench.run.machine import FRAMEWORKS
from bench.run.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Pool:
    """At least one run."""

    runs: tuple[Run, ...]
    """The first is the one whose bytes, gates and trials are shown."""

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def is_single(self) -> bool:
        return len(self.runs) == 1

    @cached_property
    def titles(self) -> tuple[str, ...]:
        """What to call each run: its name, if others have it too with the time at which it started."""
        names = [run.name for run in self.runs]
        if len(set(names)) == len(names):
            return tuple(names)
        return tuple(f"{run.name} of {run.manifest.started[:16]}" for run in self.runs)

    @property
    def digests(self) -> tuple[str, ...]:
        """Of the journals."""
        return tuple(run.digest for run in self.runs)

    @property
    def pins(self) -> tuple[str, ...]:
        """Of journal and run.json of each run."""
        return tuple(run.pin for run in self.runs)

    def has(self, *cells: Cell) -> bool:
        """Whether every run has these cells."""
        return all(cell.cell_id in run.cells for cell in cells for run in self.runs)

    @property
    def notes(self) -> list[str]:
        """What the runs do not have in common although they are pooled, in sentences without their full stop."""
        found = []
        commits = dict.fromkeys((run.manifest.git.commit or "unknown")[:12] for run in self.runs)
        if len(commits) > 1:
            found.append(f"the runs are of different commits of the bench: {', '.join(commits)}")
        every = {cell_id: run.labels[cell_id] for run in self.runs for cell_id in run.cells}
        if alone := [
            label
            for cell_id, label in every.items()
            if any(cell_id not in run.cells for run in self.runs)
        ]:
            found.append(f"left out, since not all runs have them: {some(alone)}")
        return found


def load_pool(places: Sequence[Path]) -> Pool:
    """The runs in these folders. Raises InputError, naming the folder, if one is no run or is unlike the first."""
    folders = [folder for place in places for folder in folders_of(place)]
    runs: dict[Path, Run] = {}
    for folder in folders:
        run = load(folder)
        for other, known in runs.items():
            if known.digest == run.digest:
                raise InputError(f"{folder}: is the same run as {other}; name each run once")
        if runs:
            first = next(iter(runs))
            if difference := _difference(runs[first], run):
                raise InputError(f"{folder}: cannot be pooled with {first}: {difference}")
        runs[folder] = run
    return Pool(runs=tuple(runs.values()))


def folders_of(place: Path) -> list[Path]:
    """The run in a folder, or the runs in its folders, the oldest name first. Raises InputError if there is none."""
    if (place / MANIFEST).exists() or not place.is_dir():
        return [place]
    if found := sorted(path.parent for path in place.glob(f"*/{MANIFEST}")):
        return found
    return [place]  # loading it says that it holds no run


def _difference(a: Run, b: Run) -> str:
    """The first thing that keeps two runs from being pooled; empty if there is none."""
    for what, of in CLASS.items():
        ours, theirs = of(a.manifest), of(b.manifest)
        if ours != theirs:
            return f"its {what} is {theirs or 'unknown'}, and the first one's {ours or 'unknown'}"
    for run, other, where in ((a, b, "it has no cell"), (b, a, "the first one has no cell")):
        lacking = [
            run.labels[key]
            for key, cell in run.cells.items()
            if not cell.twin and key not in other.cells
        ]
        if lacking:
            return f"{where} {lacking[0]}"
    return ""


def _gpus(manifest: Manifest) -> str:
    names = [gpu.name for gpu in manifest.machine.gpus]
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _frameworks(manifest: Manifest) -> str:
    return ", ".join(
        f"{name} {version}" for name, version in manifest.packages.items() if name in FRAMEWORKS
    )


CLASS: dict[str, Callable[[Manifest], object]] = {
    "CPU": lambda manifest: manifest.machine.cpu,
    "number of cores": lambda manifest: manifest.machine.cores,
    "set of GPUs": _gpus,
    "number of nodes": lambda manifest: 1 + len(manifest.nodes),
    "set of frameworks": _frameworks,
    "baseline": lambda manifest: manifest.baseline,
}
"""What must be equal in runs that are pooled, beside their cells."""
