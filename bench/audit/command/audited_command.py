"""Runs a command with the recorder in its Python processes, and reads what they recorded."""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.audit.command.foreground import run_in_foreground
from bench.audit.command.recorded_events import RecordedRank, parse_line
from bench.errors import InputError
from bench.files import python_path

SITE = Path(__file__).resolve().parent / "site"
RECORDS = {"audit": "jsonl", "invariance": "states"}
"""By the command that asks, the ending of the files that its recorder writes."""
NO_RECORD = "no process could write its record: is TMPDIR full?"


def records_folder(asked: str) -> TemporaryDirectory[str]:
    """Where processes write their records. Raises InputError if there can be none."""
    try:
        return TemporaryDirectory(prefix=f"bench-{asked}-")
    except OSError as error:
        place = tempfile.tempdir
        if place is None:
            place = "TMPDIR"
        text = f"{asked}: no folder for records in {place} (TMPDIR): {error.strerror}"
        raise InputError(text) from error


def environment(folder: Path, updates: int, asked: str = "audit") -> dict[str, str]:
    """The environment of processes that record updates in ``folder``, for a command of ours."""
    return os.environ | {
        "PYTHONPATH": python_path(SITE),
        "BENCH_AUDIT_FOLDER": str(folder),
        "BENCH_AUDIT_UPDATES": str(updates),
        "BENCH_AUDIT_FOR": asked,
    }


def run(
    command: Sequence[str], folder: Path, updates: int, *, quiet: bool, asked: str = "audit"
) -> int:
    """Run it and return its exit status, as a shell gives it; ``quiet`` sends its output to stderr.

    ``asked`` is the command of ours that asks for records. Raises InputError.
    """
    output = None
    if quiet:
        output = sys.stderr
    try:
        status = run_in_foreground(command, environment(folder, updates, asked), output)
    except OSError as error:
        wrong = f"{command[0]}: {error.strerror}"
        if command[0].endswith(".py"):
            wrong += f"; start it with python, as in: -- python {command[0]}"
        raise InputError(f"{asked}: {wrong}") from error
    if status < 0:
        return 128 - status
    return status


def why_nothing(folder: Path, asked: str = "audit") -> str:
    """Why no process has written a record; empty if one has."""
    reasons = {
        "python": "no Python process of the command loaded the recorder "
        "(python -I and -E ignore PYTHONPATH)",
        "torch": "no Python process of the command imported torch",
        RECORDS[asked]: "no process of the command ran a backward of torch",
    }
    for ending, text in reasons.items():
        if not any(folder.glob(f"*.{ending}")):
            return text
    return ""


def read(folder: Path) -> tuple[dict[int, RecordedRank], int]:
    """The ranks of the training with most updates, and how many processes trained apart from it.

    A command may train several times, and a launcher may restart its ranks: the last of equals is
    taken.
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
    """What a process has recorded; None if nothing.

    A process that was killed may have cut off its last line.
    """
    rank: RecordedRank | None = None
    events = []
    is_cut = False
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = parse_line(text)
        except ValueError:
            is_cut = True
            continue
        if line.rank is not None:
            rank = line.rank
        for event in (line.backward, line.clipping, line.step, line.end):
            if event is not None:
                events.append(event)
    if rank is not None:
        rank.events, rank.is_cut = events, is_cut
    return rank
