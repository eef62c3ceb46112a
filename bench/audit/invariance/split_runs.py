"""Runs a split with the recorder of states in its processes, and reads what they recorded."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from bench.audit.command import audited_command
from bench.audit.invariance.inside.state_records import (
    PARAMETER,
    START,
    WIDTH,
    Finish,
    MicroBatch,
    Position,
    Sketches,
    Trainer,
)
from bench.audit.invariance.splits import TrainingSplit

Values: TypeAlias = NDArray[np.float64]
RecordedMicroBatch: TypeAlias = MicroBatch[float]


@dataclass(frozen=True)
class TensorSketch:
    """A tensor of one rank after one update."""

    size: int
    """Elements."""
    dtype: str
    bits: int
    """A hash."""
    values: Values
    """WIDTH doubles."""
    replicated: bool = False

    @property
    def norm(self) -> float:
        return float(self.values[0])

    def is_bitwise(self, other: TensorSketch) -> bool:
        """Whether both have the same bits, as far as a hash tells."""
        return self.bits == other.bits and np.array_equal(self.values, other.values, equal_nan=True)


@dataclass
class RankState:
    """What a rank recorded."""

    trainer: Trainer
    micro_batches: list[RecordedMicroBatch] = field(default_factory=list)
    tensors: dict[tuple[int, str], dict[str, TensorSketch]] = field(default_factory=dict)
    """By update and kind, then by name. Before the first update there are parameters alone."""
    positions: dict[int, dict[str, float]] = field(default_factory=dict)
    """By update: numbers that are to be the same in every split."""
    finish: Finish | None = None

    @property
    def updates(self) -> int:
        """Updates whose state was recorded."""
        last = 0
        for update, kind in self.tensors:
            if kind == PARAMETER:
                last = max(last, update)
        return last

    def of_update(self, update: int) -> list[RecordedMicroBatch]:
        return [found for found in self.micro_batches if found.update == update]

    def state(self, update: int, kind: str) -> dict[str, TensorSketch]:
        """Tensors of a kind after an update, by name; empty if there are none."""
        return self.tensors.get((update, kind), {})

    def add(self, line: StateLine, table: Values) -> None:
        """What one line says; ``table`` has the values of sketches: [row, WIDTH]."""
        if line.microbatch is not None:
            self.micro_batches.append(line.microbatch)
        if line.position is not None:
            self.positions.setdefault(line.position.update, {}).update(line.position.values)
        if line.finish is not None:
            self.finish = line.finish
        if line.sketches is not None:
            self._add_sketches(line.sketches, table)

    def _add_sketches(self, event: Sketches, table: Values) -> None:
        if event.first + len(event.names) > len(table):
            return
        kind = event.kind
        if kind == START:
            kind = PARAMETER
        tensors = self.tensors.setdefault((event.update, kind), {})
        here: dict[str, int] = {}
        for place, name in enumerate(event.names):
            here[name] = here.get(name, 0) + 1
            unique = name
            if here[name] > 1:
                unique += f" #{here[name]}"
            tensors[unique] = TensorSketch(
                event.sizes[place],
                event.dtypes[place],
                event.hashes[place],
                table[event.first + place],
                event.replicated[place],
            )


@dataclass
class SplitRun:
    """One run of a split."""

    split: TrainingSplit
    status: int
    """Of the command, as a shell gives it."""
    ranks: dict[int, RankState]
    nothing: str = ""
    """Why nothing was recorded; empty if something was."""
    written: list[str] = field(default_factory=list)
    """What the command has left in the current folder."""

    @property
    def updates(self) -> int:
        """Updates that all ranks recorded."""
        return min((rank.updates for rank in self.ranks.values()), default=0)

    def trainers(self) -> list[Trainer]:
        return [rank.trainer for rank in self.ranks.values()]

    def micro_batches(self) -> Iterator[RecordedMicroBatch]:
        """Of all ranks."""
        for rank in self.ranks.values():
            yield from rank.micro_batches

    def of_update(self, update: int) -> Iterator[RecordedMicroBatch]:
        """The micro-batches of an update, of all ranks."""
        for rank in self.ranks.values():
            yield from rank.of_update(update)


def run_split(split: TrainingSplit, number: int, updates: int, *, quiet: bool) -> SplitRun:
    """Run it and return what it recorded; ``quiet`` sends its output to stderr.

    Raises InputError.
    """
    command = split.numbered(number)
    before = _entries()
    with audited_command.records_folder("invariance") as name:
        folder = Path(name)
        status = audited_command.run(command, folder, updates, quiet=quiet, asked="invariance")
        nothing = audited_command.why_nothing(folder, "invariance")
        ranks = read(folder)
    written = []
    for entry, time in _entries().items():
        if before.get(entry) != time:
            written.append(entry)
    return SplitRun(split, status, ranks, nothing, sorted(written))


def align(first: SplitRun, other: SplitRun) -> None:
    """Give tensors of the other run the names of the first, where names alone differ.

    Where a script holds several modules, the variable that names a tensor may be another one at
    that moment.
    """
    for number, rank in other.ranks.items():
        if number not in first.ranks:
            continue
        for (update, kind), found in rank.tensors.items():
            wanted = first.ranks[number].state(update, kind)
            if wanted.keys() != found.keys() and _sizes(wanted) == _sizes(found):
                renamed = dict(zip(wanted, found.values(), strict=True))
                rank.tensors[update, kind] = renamed


def _sizes(tensors: dict[str, TensorSketch]) -> list[int]:
    return [tensor.size for tensor in tensors.values()]


def _entries() -> dict[str, int]:
    """Names in the current folder and when they were changed; empty where it cannot be read."""
    found = {}
    try:
        for entry in os.scandir():
            found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        return {}
    return found


# Records


@dataclass
class StateLine:
    """A line of a record: one of these."""

    microbatch: RecordedMicroBatch | None = None
    sketches: Sketches | None = None
    position: Position[float] | None = None
    trainer: Trainer | None = None
    finish: Finish | None = None


_LINE = TypeAdapter(StateLine)


def read(folder: Path) -> dict[int, RankState]:
    """The ranks of the training with the most updates; of equals the last."""
    trainings: dict[tuple[str, int], dict[int, RankState]] = defaultdict(dict)
    for path in sorted(folder.glob("*.states"), key=lambda path: path.stat().st_mtime):
        rank = _read_rank(path)
        if rank is None:
            continue
        trainer = rank.trainer
        group = trainings[trainer.job, trainer.world]
        known = group.get(trainer.rank)
        if known is None or known.updates <= rank.updates:
            group[trainer.rank] = rank
    chosen: dict[int, RankState] = {}
    for ranks in trainings.values():
        if _num_updates(ranks) >= _num_updates(chosen):
            chosen = ranks
    return dict(sorted(chosen.items()))


def _num_updates(ranks: dict[int, RankState]) -> int:
    """Of all of them together."""
    return sum(rank.updates for rank in ranks.values())


def _read_rank(path: Path) -> RankState | None:
    """What a process has recorded; None if nothing."""
    lines = _read_lines(path)
    trainers = [line.trainer for line in lines if line.trainer is not None]
    if not trainers:
        return None
    obstacles = []
    for trainer in trainers:
        obstacles += trainer.obstacles
    rank = RankState(trainers[-1])
    rank.trainer.obstacles = obstacles
    table = _read_values(path.with_suffix(".sketches"))
    for line in lines:
        rank.add(line, table)
    return rank


def _read_lines(path: Path) -> list[StateLine]:
    """Until one is cut off, as that of a process which was killed may be."""
    lines = []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found = json.loads(text)
        except json.JSONDecodeError:
            break
        lines.append(_LINE.validate_python(found))
    return lines


def _read_values(path: Path) -> Values:
    """The rows of a file of values: [row, WIDTH]."""
    if not path.exists():
        return np.zeros((0, WIDTH))
    values = np.fromfile(path, dtype=np.float64)
    return values[: len(values) // WIDTH * WIDTH].reshape(-1, WIDTH)
