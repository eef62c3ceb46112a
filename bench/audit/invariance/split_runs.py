"""Runs a split with the recorder of states in its processes, and reads what they recorded."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.audit.command import audited_command
from bench.audit.command.foreground import run_in_foreground
from bench.audit.command.inside.records import Criterion
from bench.audit.invariance.inside.state_records import (
    PARAMETER,
    START,
    STATE_EVENTS,
    WIDTH,
    Finish,
    MicroBatch,
    Position,
    Sketches,
    Trainer,
)
from bench.audit.invariance.splits import TrainingSplit
from bench.errors import InputError

RECORDS = {"python": "python", "torch": "torch", "states": "jsonl"}
"""Endings of files, and what it means, in the words of an audit, that no file has one."""


@dataclass(frozen=True)
class TensorSketch:
    """A tensor of one rank after one update."""

    size: int
    """Elements."""
    dtype: str
    bits: int
    """A hash."""
    values: np.ndarray
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
    micro_batches: list[MicroBatch] = field(default_factory=list)
    tensors: dict[tuple[int, str], dict[str, TensorSketch]] = field(default_factory=dict)
    """By update and kind, then by name."""
    positions: dict[int, dict[str, float]] = field(default_factory=dict)
    """By update: numbers that are to be the same in every split."""
    finish: Finish | None = None

    @property
    def updates(self) -> int:
        """Updates whose state was recorded."""
        return max((update for update, kind in self.tensors if kind == PARAMETER), default=0)

    def of_update(self, update: int) -> list[MicroBatch]:
        return [found for found in self.micro_batches if found.update == update]


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


def run_split(split: TrainingSplit, number: int, updates: int, *, quiet: bool) -> SplitRun:
    """Run it and return what it recorded; ``quiet`` sends its output to stderr. Raises InputError."""
    command = split.numbered(number)
    before = _entries()
    try:
        folder = tempfile.TemporaryDirectory(prefix="bench-invariance-")
    except OSError as error:
        place = tempfile.tempdir or "TMPDIR"
        raise InputError(
            f"invariance: no folder for records in {place} (TMPDIR): {error.strerror}"
        ) from error
    with folder as name:
        environment = audited_command.environment(Path(name), updates)
        environment |= {"BENCH_AUDIT_FOR": "invariance"}
        output = sys.stderr if quiet else None
        try:
            status = run_in_foreground(command, environment, output)
        except OSError as error:
            raise InputError(f"invariance: {command[0]}: {error.strerror}") from error
        if status < 0:
            status = 128 - status
        nothing = ""
        for ending, key in RECORDS.items():
            if not any(Path(name).glob(f"*.{ending}")):
                nothing = audited_command.NOTHING[key]
                break
        ranks = read(Path(name))
    written = [entry for entry, time in _entries().items() if before.get(entry) != time]
    return SplitRun(split, status, ranks, nothing, sorted(written))


def align(first: SplitRun, other: SplitRun) -> None:
    """Give tensors of the other run the names that they have in the first, where only their names differ.

    Where a script holds several modules, the variable that names a tensor may be another one at that moment.
    """
    for number, rank in other.ranks.items():
        if number not in first.ranks:
            continue
        for place, found in rank.tensors.items():
            wanted = first.ranks[number].tensors.get(place, {})
            sizes = [tensor.size for tensor in wanted.values()]
            if wanted.keys() != found.keys() and sizes == [each.size for each in found.values()]:
                rank.tensors[place] = dict(zip(wanted, found.values(), strict=True))


def _entries() -> dict[str, int]:
    """Names in the current folder and when they were changed; empty where it cannot be read."""
    found = {}
    try:
        for entry in os.scandir():
            found[entry.name] = entry.stat(follow_symlinks=False).st_mtime_ns
    except OSError:
        return {}
    return found


def read(folder: Path) -> dict[int, RankState]:
    """The ranks of the training with the most updates; of equals the last."""
    trainings: dict[tuple[str, int], dict[int, RankState]] = defaultdict(dict)
    paths = sorted(folder.glob("*.states"), key=lambda path: path.stat().st_mtime)
    for path in paths:
        rank = _rank(path)
        if rank is not None:
            trainer = rank.trainer
            group = trainings[trainer.job, trainer.world]
            known = group.get(trainer.rank)
            if known is None or known.updates <= rank.updates:
                group[trainer.rank] = rank
    chosen: dict[int, RankState] = {}
    for ranks in trainings.values():
        if _updates(ranks) >= _updates(chosen):
            chosen = ranks
    return dict(sorted(chosen.items()))


def _updates(ranks: dict[int, RankState]) -> int:
    return sum(rank.updates for rank in ranks.values())


def _rank(path: Path) -> RankState | None:
    """What a process has recorded; None if nothing. A process that was killed may have cut off its last line."""
    data = path.with_suffix(".sketches")
    values = np.fromfile(data, dtype=np.float64) if data.exists() else np.zeros(0)
    table = values[: len(values) // WIDTH * WIDTH].reshape(-1, WIDTH)
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            ((name, fields),) = json.loads(line).items()
        except json.JSONDecodeError:
            break
        events.append(STATE_EVENTS[name](**fields))
    trainers = [event for event in events if isinstance(event, Trainer)]
    if not trainers:
        return None
    rank = RankState(trainers[-1])
    rank.trainer.obstacles = [text for trainer in trainers for text in trainer.obstacles]
    for event in events:
        _add(rank, event, table)
    return rank


def _add(rank: RankState, event: Any, table: np.ndarray) -> None:
    if isinstance(event, MicroBatch):
        event.criteria = [Criterion(**criterion) for criterion in event.criteria]
        rank.micro_batches.append(event)
    elif isinstance(event, Position):
        rank.positions.setdefault(event.update, {}).update(event.values)
    elif isinstance(event, Finish):
        rank.finish = event
    elif isinstance(event, Sketches) and event.first + len(event.names) <= len(table):
        _add_sketches(rank, event, table)


def _add_sketches(rank: RankState, event: Sketches, table: np.ndarray) -> None:
    update = 0 if event.kind == START else event.update
    kind = PARAMETER if event.kind == START else event.kind
    found = rank.tensors.setdefault((update, kind), {})
    here: dict[str, int] = {}
    for place, name in enumerate(event.names):
        here[name] = here.get(name, 0) + 1
        unique = name if here[name] == 1 else f"{name} #{here[name]}"
        found[unique] = TensorSketch(
            event.sizes[place],
            event.dtypes[place],
            event.hashes[place],
            table[event.first + place],
            event.replicated[place],
        )
