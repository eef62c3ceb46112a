"""The truth on disk: one folder per run with a manifest and an append-only journal of trials."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from bench.errors import InputError

SCHEMA_VERSION = 1
"""Of run.json and trials.jsonl together."""
MANIFEST = "run.json"
JOURNAL = "trials.jsonl"


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write ``run.json`` whole or not at all."""
    draft = folder / f"{MANIFEST}.tmp"
    draft.write_text(json.dumps(manifest, indent=2) + "\n")
    draft.replace(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run. Raises InputError if the folder holds no run, or one of another schema version."""
    path = folder / MANIFEST
    try:
        manifest: dict[str, Any] = json.loads(path.read_text())
    except OSError as error:
        raise InputError(
            f"{folder}: holds no run ({MANIFEST}: {error.strerror}); name a folder under results/"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: is not JSON ({error})") from error
    if manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version")
        raise InputError(f"{path}: schema_version is {found!r}; this bench reads {SCHEMA_VERSION}")
    return manifest


class Journal:
    """Trials as JSON lines. Each is one write, flushed to the disk before the next trial starts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL

    def append(self, record: dict[str, Any]) -> None:
        """Add one trial. After a torn last line (a crash in mid-write) a new line is begun first."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=True) + "\n"
        with self.path.open("ab") as file:
            if file.tell() and not self._ends_with_newline():
                line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All trials, in order of writing. Only a torn last line is forgiven.

        Raises InputError naming any other line that is not JSON.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_text().splitlines()
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                records.append(json.loads(line))
            except ValueError as error:
                if number == len(lines):
                    break
                raise InputError(
                    f"{self.path}:{number}: is not JSON ({error}); restore the line or the file"
                ) from error
        return records

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
