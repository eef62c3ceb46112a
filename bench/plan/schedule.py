"""Which trials a run consists of, block by block, and when it looks whether more are needed.

A block is one trial of each cell that is still open. A run starts with all cells and ``repeats`` initial blocks. Then
it looks at the intervals, and goes on with the cells whose intervals are too wide, until none is, or a limit is
reached. The looks are stored, so that a resumed run has the same blocks.

The last initial block has all that is done once: the extra passes of every cell, and the cells that are to have one
trial. A budget that is used up earlier makes the next block the last initial one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Self

from bench.errors import InputError
from bench.fields import Natural, Number
from bench.plan.cell import Cell

GROWTH = 1.2
"""Least ratio of the blocks at one look to those at the look before: as docs/statistics.md simulates it."""

MOST_TRIALS = 1_000_000
"""Of one run: days of work for the bench alone."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One cell, run once."""

    cell: Cell
    repeat: int
    extra: bool = False
    """Whether it has the extra passes too."""

    @property
    def key(self) -> tuple[str, int]:
        """What names the trial within its run."""
        return self.cell.cell_id, self.repeat


class Ended(StrEnum):
    """What ended a run."""

    PRECISION = "precision"
    """Every interval of interest is narrow enough."""
    MAX_REPEATS = "max-repeats"
    """As many repeats as were allowed."""
    BUDGET = "budget"
    """The time that was given is used up."""
    NOTHING_TO_COMPARE = "nothing to compare"
    """No cell could be compared with another: too few cells, or every comparison was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """What was decided after a number of blocks."""

    repeats: Natural
    """Blocks that were there to look at."""
    open: tuple[str, ...]
    """Ids of the cells to go on with; empty at the end."""
    widest: Number | None = None
    """Width of the widest interval of interest, relative; None if there is none yet."""
    wanted: Natural = 0
    """Blocks at which that width may be narrow enough; looking sooner would be in vain."""
    refused: str = ""
    """Why nothing at all can be compared; empty if something can."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**values, "open": tuple(values["open"])})


def block(cells: Sequence[Cell], repeat: int, seed: int, *, extra: bool = False) -> list[Trial]:
    """One trial of each cell: a seeded shuffle, and in every second block the same backwards (A B C, C B A).

    So no cell's trials stand in a row, and a drift that is linear in time hits all cells of two blocks alike. The
    references come first, since the others are checked against them.
    """
    references = [cell for cell in cells if cell.is_reference]
    others = [cell for cell in cells if not cell.is_reference]
    random.Random(f"{seed}/{repeat // 2}").shuffle(others)
    if repeat % 2:
        others.reverse()
    return [Trial(cell, repeat, extra) for cell in [*references, *others]]


def next_look(repeats: int, wanted: int = 0) -> int:
    """The number of blocks at the next look, at least ``wanted``: even, since blocks come in pairs, one backwards."""
    while True:
        grown = max(repeats + 1, math.ceil(GROWTH * repeats - 1e-9))
        repeats = grown + grown % 2
        if repeats >= wanted:
            return repeats


class Schedule:
    """The blocks of one run as far as they are decided."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        values = manifest["matrix"]["values"]
        self.cells = [Cell.from_dict(cell) for cell in manifest["cells"]]
        self.repeats = int(values["repeats"])
        self.max_repeats = max(self.repeats, int(values.get("max_repeats", 0)))
        self.seed = int(values["training.seed"])
        self._once = {*(manifest.get("once") or ()), *(cell.cell_id for cell in self.cells if not cell.world.computes)}
        """Ids of cells of one trial; so are those of fake tensors, which have shapes, the same every time."""
        self.looks = [Look.from_dict(look) for look in manifest.get("looks") or ()]
        if self.known * len(self.cells) > MOST_TRIALS:
            raise InputError(
                f"{self.known:,} repeats of {len(self.cells)} cells are more than {MOST_TRIALS:,} trials; ask for fewer"
            )

    @property
    def ended(self) -> bool:
        """Whether no block comes after the known ones."""
        return bool(self.looks) and not self.looks[-1].open

    @property
    def known(self) -> int:
        """Blocks that are decided: up to the next look, or the end."""
        if not self.looks:
            return self.repeats
        last = self.looks[-1]
        return min(self.max_repeats, next_look(last.repeats, last.wanted)) if last.open else last.repeats

    @property
    def initial(self) -> int:
        """Blocks of all cells: as many as were asked for, or as the budget reached for."""
        return min([self.repeats, *(look.repeats for look in self.looks[:1])])

    def block(self, repeat: int) -> list[Trial]:
        """The trials of a known block, in order."""
        assert repeat < self.known, "a block is asked for before it is decided"
        chosen = {cell.cell_id for cell in self.cells}
        for look in self.looks:
            if look.repeats <= repeat:
                chosen = set(look.open)
        last = repeat == self.initial - 1
        chosen -= set() if last else self._once
        return block([cell for cell in self.cells if cell.cell_id in chosen], repeat, self.seed, extra=last)

    def trials(self) -> Iterator[Trial]:
        """The trials of all known blocks."""
        for repeat in range(self.known):
            yield from self.block(repeat)

    def add(self, look: Look) -> None:
        """Go by one more look."""
        self.looks.append(look)

    def stored(self) -> list[dict[str, Any]]:
        """The looks as plain values, for run.json."""
        return [asdict(look) for look in self.looks]
