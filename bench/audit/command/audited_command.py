"""Runs a command with the recorder in its Python processes, and reads what they recorded."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from bench.audit.command.foreground import run_in_foreground
from bench.audit.command.recorded_events import RecordedRank, parse_line
from bench.errors import InputError
from bench.files import python_path

SITE = Path(__file__).resolve().parent / "site"
NOTHING = {
    "python": "no Python process of the command loaded the recorder (python -I and -E ignore PYTHONPATH)",
    "torch": "no Python process of the command imported torch",
    "jsonl": "no process of the command ran a backward of torch",
}
"""What it means that no file has such an ending."""


def environment(folder: Path, updates: int) -> dict[str, str]:
    """The environment of processes that record their updates in ``folder``."""
    asked = {"BENCH_AUDIT_FOLDER": str(folder), "BENCH_AUDIT_UPDATES": str(updates)}
    return os.environ | {"PYTHONPATH": python_path(SITE)} | asked


def run(command: Sequence[str], folder: Path, updates: int, *, quiet: bool) -> int:
    """Run it and return its exit status, as a shell gives it; ``quiet`` sends its output to stderr."""
    output = sys.stderr if quiet else None
    try:
        status = run_in_foreground(command, environment(folder, updates), output)
    except OSError as error:
        raise InputError(f"audit: {command[0]}: {error.strerror}") from error
    return 128 - status if status < 0 else status


def why_nothing(folder: Path) -> str:
    """Why no process has recorded a backward; empty if one has."""
    for ending, text in NOTHING.items():
        if not any(folder.glob(f"*.{ending}")):
            return text
    return ""


def read(folder: Path) -> tuple[dict[int, RecordedRank], int]:
    """The ranks of the training with the most updates, and how many processes trained apart from it.

    A command may train several times, and a launcher may restart its ranks: the last of equals is taken.
    """
    paths = sorted(folder.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    ranks = []
    for path in paths:
        rank = _read_rank(path)
        if rank is not None:
            ranks.append(rank)
    trainings: dict[tuple[str, int], dict[int, RecordedRank]] = defaultdict(dict)
    for rank in sorted(ranks, key=_num_steps):
        trainings[rank.job, rank.world][rank.rank] = rank
    chosen = max(reversed(trainings.values()), key=_num_steps_of_all, default={})
    return dict(sorted(chosen.items())), len(paths) - len(chosen)


def _num_steps(rank: RecordedRank) -> int:
    return len(rank.steps)


def _num_steps_of_all(ranks: Mapping[int, RecordedRank]) -> int:
    return sum(map(_num_steps, ranks.values()))


def _read_rank(path: Path) -> RecordedRank | None:
    """What a process has recorded; None if nothing. A process that was killed may have cut off its last line."""
    rank: RecordedRank | None = None
    events = []
    is_cut = False
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = parse_line(text)
        except ValueError:
            is_cut = True
            continue
        rank = line.rank or rank
        event = line.backward or line.clipping or line.step or line.end
        if event is not None:
            events.append(event)
    if rank is not None:
        rank.events, rank.is_cut = events, is_cut
    return rank
