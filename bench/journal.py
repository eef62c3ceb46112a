"""The truth on disk: one folder per run with a manifest and an append-only journal of trials."""

from __future__ import annotations

import hashlib
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
        manifest: dict[str, Any] = _object(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{folder}: holds no run ({MANIFEST}: {error.strerror}); name a folder under results/"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: is not a JSON object ({error})") from error
    if manifest.get("schema_version") != SCHEMA_VERSION:
        found = manifest.get("schema_version")
        raise InputError(f"{path}: schema_version is {found!r}; this bench reads {SCHEMA_VERSION}")
    return manifest


def _object(text: bytes) -> dict[str, Any]:
    """The JSON object that a text is. Raises ValueError if it is none."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}")
    return value


class Journal:
    """Trials as JSON lines. Each is one write, flushed to the disk before the next trial starts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL

    def append(self, record: dict[str, Any]) -> None:
        """Add one trial. What a crash in mid-write left of the last line never counted, and is cut off first."""
        line = json.dumps(record, separators=(",", ":"), allow_nan=True) + "\n"
        self._mend()
        with self.path.open("ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[dict[str, Any]]:
        """All trials, in order of writing. Only a torn last line, without its newline, is forgiven.

        Raises InputError naming any other line that is no record.
        """
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                records.append(_object(line))
            except ValueError as error:
                if number == len(lines):
                    break
                raise InputError(
                    f"{self.path}:{number}: is not a JSON object ({error}); restore the line or the file"
                ) from error
        return records

    def digest(self) -> str:
        """SHA-256 of the file, in hex."""
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    def _mend(self) -> None:
        """Make the file end with a newline: end a whole last line, cut off a torn one."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        with self.path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) == b"\n":
                return
            file.seek(0)
            content = file.read()
            start = content.rfind(b"\n") + 1
            try:
                _object(content[start:])
            except ValueError:
                file.truncate(start)
            else:
                file.write(b"\n")
