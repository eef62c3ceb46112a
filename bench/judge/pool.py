"""Several runs of the same cells on machines of one class, of which each counts once in a ratio.

A folder of runs may stand for the runs in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
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
        """What to call each run: its name, with its start or its number if others have it too."""
        names = [run.name for run in self.runs]
        if len(set(names)) == len(names):
            return tuple(names)
        dated = [f"{run.name} of {run.manifest.started[:16]}" for run in self.runs]
        if len(set(dated)) == len(dated):
            return tuple(dated)
        return tuple(f"{name}, run {number}" for number, name in enumerate(dated, 1))

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
        for run in self.runs:
            for cell in cells:
                if cell.cell_id not in run.cells:
                    return False
        return True

    @property
    def notes(self) -> list[str]:
        """What the runs do not share although they are pooled, in sentences without a full stop."""
        found = []
        commits = dict.fromkeys(_commit(run) for run in self.runs)
        if len(commits) > 1:
            found.append(f"the runs are of different commits of the bench: {', '.join(commits)}")
        alone: dict[str, str] = {}
        for run in self.runs:
            for cell_id, cell in run.cells.items():
                if not self.has(cell):
                    alone[cell_id] = run.labels[cell_id]
        if alone:
            text = f"left out, since not all runs have them: {some(list(alone.values()))}"
            found.append(text)
        return found


def _commit(run: Run) -> str:
    """The beginning of the commit of the bench."""
    commit = run.manifest.git.commit
    if commit is None:
        return "unknown"
    return commit[:12]


def load_pool(places: Sequence[Path]) -> Pool:
    """The runs in these folders.

    Raises InputError, naming the folder, if one is no run or is unlike the first.
    """
    runs: dict[Path, Run] = {}
    for folder in folders_of(places):
        run = load(folder)
        for other, known in runs.items():
            if known.digest == run.digest:
                raise InputError(f"{folder}: is the same run as {other}; name each run once")
        if runs:
            first = next(iter(runs))
            difference = _difference(runs[first], run)
            if difference:
                raise InputError(f"{folder}: cannot be pooled with {first}: {difference}")
        runs[folder] = run
    return Pool(runs=tuple(runs.values()))


def folders_of(places: Iterable[Path]) -> list[Path]:
    """The folders of runs: each of these, or the runs in it, the oldest name first.

    A folder that holds none stands for itself: loading it says what is wrong.
    """
    found: list[Path] = []
    for place in places:
        inside: list[Path] = []
        if place.is_dir() and not (place / MANIFEST).exists():
            inside = sorted(path.parent for path in place.glob(f"*/{MANIFEST}"))
        if inside:
            found += inside
        else:
            found.append(place)
    return found


def _difference(a: Run, b: Run) -> str:
    """The first thing that keeps two runs from being pooled; empty if there is none."""
    for what, of in CLASS.items():
        ours, theirs = of(a.manifest), of(b.manifest)
        if ours != theirs:
            return f"its {what} is {_in_words(theirs)}, and the first one's {_in_words(ours)}"
    missing = _lacking(a, b)
    if missing:
        return f"it has no cell {missing}"
    added = _lacking(b, a)
    if added:
        return f"the first one has no cell {added}"
    return ""


def _in_words(value: object) -> str:
    """A value of CLASS, which a run may not have stored."""
    if value is None or value == "":
        return "unknown"
    return str(value)


def _lacking(run: Run, other: Run) -> str:
    """The first cell of a run that the other has not, by its label; empty if there is none."""
    for cell_id, cell in run.cells.items():
        if not cell.twin and cell_id not in other.cells:
            return run.labels[cell_id]
    return ""


def _gpus(manifest: Manifest) -> str:
    if not manifest.machine.gpus:
        return "none"
    counts = Counter(gpu.name for gpu in manifest.machine.gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _frameworks(manifest: Manifest) -> str:
    found = []
    for name, version in manifest.packages.items():
        if name in FRAMEWORKS:
            found.append(f"{name} {version}")
    return ", ".join(found)


CLASS: dict[str, Callable[[Manifest], object]] = {
    "CPU": lambda manifest: manifest.machine.cpu,
    "number of cores": lambda manifest: manifest.machine.cores,
    "set of GPUs": _gpus,
    "number of nodes": lambda manifest: 1 + len(manifest.nodes),
    "set of frameworks": _frameworks,
    "baseline": lambda manifest: manifest.baseline,
}
"""What must be equal in runs that are pooled, beside their cells."""
