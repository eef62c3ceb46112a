"""Runs whose right verdicts are known, and what was said of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.errors import InputError
from bench.judge.loading import Run, load
from bench.judge.pairs import ComparedPair
from bench.judge.standing import Floor, noise_floor, standing
from tests.delayed import Delayed

THIRD = "third"
"""Label of the cell that is compared with itself; the noise floor is from another twin, as in any run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """One run, and what it said of what is known."""

    run: Run
    floor: Floor
    same: ComparedPair
    """The cell against itself, which must not be called faster or slower."""
    slower: ComparedPair
    """Against itself with the sleep, which must be called slower."""


def read(folder: Path) -> Iterator[Known]:
    """The runs that were measured. Raises InputError if one is not of this kind."""
    paths = sorted(folder.glob("run-*"), key=lambda path: (len(path.name), path.name))
    for path in paths:
        run = load(path)
        floor = noise_floor(run)
        rows = standing(run).rows
        same = [row for row in rows if row.pair.b.twin == THIRD]
        slower = [row for row in rows if row.pair.b.backend == Delayed.name]
        if floor is None or len(same) != 1 or len(slower) != 1:
            raise InputError(f"{path}: is not a run of the study; measure it again")
        yield Known(run=run, floor=floor, same=same[0], slower=slower[0])
