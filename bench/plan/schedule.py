"""The order of a run's trials in blocks, and when intervals are checked to see if more are needed.

A block is one trial of each open cell. A run starts with all cells and ``repeats`` initial blocks.
Then it looks at the intervals and continues with the cells whose intervals are too wide, until none
is, or a limit is reached. Looks are stored, so a resumed run has the same blocks.

The first block contains everything that is done once: the extra passes of every cell, and the cells
that run a single trial. So a budget can end the run after any block.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from bench.errors import InputError
from bench.plan.cell import Cell
from bench.plan.matrix import MatrixFile
from bench.validation import Natural, Number

GROWTH = 1.2
"""Minimum growth of the number of blocks from one look to the next, as simulated in
docs/statistics.md."""

MOST_TRIALS = 1_000_000
"""Maximum number of trials of one run: days for the bench's own overhead alone."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One execution of a cell."""

    cell: Cell
    repeat: int
    extra: bool = False
    """Whether it also runs the extra passes."""

    @property
    def key(self) -> tuple[str, int]:
        return self.cell.cell_id, self.repeat


@dataclass(frozen=True, slots=True)
class Cost:
    """The estimated cost of a cell."""

    seconds: float | None
    """Per trial; None if unknown."""
    memory_bytes: int | None
    """Peak of one rank; None if unknown."""
    once_s: float = 0.0
    """Seconds that the extra passes add to one trial of the cell, if they are expensive."""

    def total(self, repeats: int) -> float:
        """Seconds of this many trials, one of them with the extra passes; 0 if unknown."""
        if self.seconds is None:
            return 0.0
        return self.seconds * repeats + self.once_s


class Ended(StrEnum):
    """Why a run ended."""

    PRECISION = "precision"
    """Every relevant interval is narrow enough."""
    MAX_REPEATS = "max-repeats"
    """The maximum number of repeats was reached."""
    BUDGET = "budget"
    """The time budget is used up."""
    NOTHING_TO_COMPARE = "nothing to compare"
    """Nothing can be compared: too few cells, or every comparison was refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InterimAnalysis:
    """The decision after a number of blocks."""

    repeats: Natural
    """Blocks completed at this look."""
    open: tuple[str, ...]
    """Ids of the cells to continue with; empty at the end."""
    widest: Number | None = None
    """Relative width of the widest relevant interval; None if there is none yet."""
    wanted: Natural = 0
    """Estimated number of blocks at which that width is narrow enough; an earlier look would be
    wasted."""
    refused: str = ""
    """Why nothing can be compared; empty if something can."""

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON."""
        return asdict(self)


def block(cells: Sequence[Cell], repeat: int, seed: str) -> list[Trial]:
    """One trial of each cell: references first, the others in a seeded shuffle.

    Every second block reverses that. With the order A B C, C B A, a drift that is linear in time
    affects all cells of two blocks equally.
    """
    references, others = [], []
    for cell in cells:
        if cell.is_reference:
            references.append(cell)
        else:
            others.append(cell)
    random.Random(f"{seed}/{repeat // 2}").shuffle(others)
    if repeat % 2:
        others.reverse()
    return [Trial(cell, repeat, extra=repeat == 0) for cell in [*references, *others]]


def next_look(repeats: int, wanted: int = 0) -> int:
    """The number of blocks at the next look, at least ``wanted``; even: blocks come in pairs."""
    while True:
        grown = max(repeats + 1, math.ceil(GROWTH * repeats - 1e-9))
        repeats = grown + grown % 2
        if repeats >= wanted:
            return repeats


class Schedule:
    """The blocks of one run, as far as they are decided."""

    def __init__(
        self,
        cells: Sequence[Cell],
        settings: MatrixFile,
        *,
        once: Collection[str] = (),
        looks: Sequence[InterimAnalysis] = (),
        begun: str = "",
    ) -> None:
        """``once``: ids of cells with a single trial; ``looks``: those of a run that goes on.

        ``begun``, which run it is and when it began, makes its order differ from that of other
        runs of the same seed: what the trial before does to a cell then averages out over a pool.
        """
        self.cells = list(cells)
        self.repeats = settings.repeats
        self.max_repeats = max(settings.repeats, settings.max_repeats)
        self.seed = f"{settings.training.seed}/{begun}"
        self._once = {*once, *(cell.cell_id for cell in self.cells if not cell.world.computes)}
        """Ids of cells with a single trial; those on fake tensors give the same every time."""
        self.looks = list(looks)
        if self.known * len(self.cells) > MOST_TRIALS:
            raise InputError(
                f"{self.known:,} repeats of {len(self.cells)} cells are more than {MOST_TRIALS:,} "
                "trials; ask for fewer"
            )

    @property
    def ended(self) -> bool:
        """Whether the known blocks are all there will be."""
        return bool(self.looks) and not self.looks[-1].open

    @property
    def known(self) -> int:
        """Number of decided blocks: up to the next look, or the end."""
        if not self.looks:
            return self.repeats
        last = self.looks[-1]
        if last.open:
            return min(self.max_repeats, next_look(last.repeats, last.wanted))
        return last.repeats

    def block(self, repeat: int) -> list[Trial]:
        assert repeat < self.known, "the block is not decided yet"
        chosen = {cell.cell_id for cell in self.cells}
        for look in self.looks:
            if look.repeats <= repeat:
                chosen = set(look.open)
        if repeat:
            chosen -= self._once
        return block([cell for cell in self.cells if cell.cell_id in chosen], repeat, self.seed)

    def trials(self) -> Iterator[Trial]:
        for repeat in range(self.known):
            yield from self.block(repeat)
