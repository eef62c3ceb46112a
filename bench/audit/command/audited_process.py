"""Runs the audited command with the recorder in its Python processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.errors import InputError

SITE = Path(__file__).resolve().parent / "site"
LEFT = {
    "python": "no Python process of the command loaded the recorder (python -I and -E ignore PYTHONPATH)",
    "torch": "no Python process of the command imported torch",
    "jsonl": "no process of the command ran a backward of torch",
}
"""What it means that no process has left a file with such an ending."""


def environment(folder: Path, updates: int) -> dict[str, str]:
    """The environment of processes that record their events in ``folder``."""
    path = os.pathsep.join(filter(None, [str(SITE), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path, "BENCH_AUDIT_FOLDER": str(folder), "BENCH_AUDIT_UPDATES": str(updates)}


def run(command: Sequence[str], folder: Path, updates: int, *, quiet: bool) -> int:
    """Run it and return its exit status, as a shell gives it; ``quiet`` sends its output to stderr."""
    output = sys.stderr if quiet else None
    try:
        status = subprocess.run(command, env=environment(folder, updates), stdout=output, check=False).returncode
    except OSError as error:
        raise InputError(f"audit: {command[0]}: {error.strerror}") from error
    return 128 - status if status < 0 else status


def why_nothing(folder: Path) -> str:
    """Why no process of the command has recorded a backward; empty if one has."""
    return next((text for ending, text in LEFT.items() if not any(folder.glob(f"*.{ending}"))), "")
