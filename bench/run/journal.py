"""A run on disk: one folder with a manifest and an append-only journal of trials.

A line of the journal is the JSON of a record with a last key ``sha256``: the first 16 hex digits of the SHA-256 of the
line's JSON without that key, exactly as written. So an edited line is detected and reported by its number.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import statistics
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard

from bench import fields
from bench.errors import InputError
from bench.run import manifest as run_manifest
from bench.run.manifest import Manifest

SCHEMA_VERSION = run_manifest.LATEST
"""Version of run.json and trials.jsonl together. Older versions can be read (``bench.run.manifest``), not written."""
MANIFEST = "run.json"
JOURNAL = "trials.jsonl"
TORN = "trials.torn-"
"""Prefix of files that keep torn lines, which a crash during a write left behind."""
UPGRADED = "upgraded_from"
"""Key of a manifest in memory whose file has an older version; never written."""
DIGITS = 16
"""Hex digits of a line's checksum."""
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{%d})"}' % DIGITS)
_CHECKSUM_BYTES = len('"sha256":""}') + DIGITS


def earlier_walls(results: Path) -> dict[str, float]:
    """Median wall time of good trials in seconds, by cell id, over all runs under ``results``."""
    walls: dict[str, list[float]] = defaultdict(list)
    for path in results.glob(f"*/{JOURNAL}"):
        for line in path.read_bytes().splitlines():
            try:
                record = json.loads(line)
                if record["status"] == "ok":
                    walls[record["cell_id"]].append(float(record["wall_s"]))
            except (ValueError, KeyError, TypeError):
                continue  # the estimate is only less precise
    return {cell_id: statistics.median(seconds) for cell_id, seconds in walls.items() if seconds}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write ``run.json`` atomically and durably.

    Raises InputError if it was read from an older version: such a run is read-only.
    """
    if UPGRADED in manifest:
        raise InputError(f"{folder / MANIFEST}: is of schema version {manifest[UPGRADED]}, which is only read")
    draft = folder / f"{MANIFEST}.tmp"
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / MANIFEST)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    _sync_folder(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run, upgraded to the latest schema version; ``UPGRADED`` names an older one.

    Raises InputError if the folder holds no run, or one of an unknown version.
    """
    path = folder / MANIFEST
    try:
        manifest = _object(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"{folder}: holds no run ({MANIFEST}: {error.strerror}); name a folder under results/"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: is not a JSON object ({error})") from error
    version = manifest.get("schema_version")
    if not _is_known(version):
        raise InputError(
            f"{path}: schema_version is {version!r}; this bench reads {SCHEMA_VERSION} and, from before, "
            f"{', '.join(map(str, sorted(run_manifest.MANIFEST)))}"
        )
    if version != SCHEMA_VERSION:
        manifest = run_manifest.apply(run_manifest.MANIFEST, manifest, version) | {UPGRADED: version}
    fields.read(Manifest, manifest, f"{path}: ")
    return manifest


def encode(record: dict[str, Any]) -> bytes:
    """A record as a line of the journal, with its checksum and a newline."""
    assert "sha256" not in record, "the key is the line's own"
    text = json.dumps(record, separators=(",", ":"), allow_nan=True).encode()
    return b'%b%b"sha256":"%b"}\n' % (text[:-1], b"," if record else b"", _checksum(text))


def decode(line: bytes) -> dict[str, Any]:
    """The record in a line without its newline. Raises ValueError, with the reason, if the line was changed."""
    found = _CHECKSUM.fullmatch(line[-_CHECKSUM_BYTES:])
    if found is None:
        _object(line)
        raise ValueError("it has no checksum at its end")
    text = line[:-_CHECKSUM_BYTES].removesuffix(b",") + b"}"
    if _checksum(text) != found[1]:
        _object(line)
        raise ValueError("its checksum does not match")
    record = _object(line)
    del record["sha256"]
    return record


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:DIGITS].encode()


def _object(text: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError for anything else."""
    try:
        value = json.loads(text.decode())
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}")
    return value


def _is_known(version: Any) -> TypeGuard[int]:
    return type(version) is int and (version == SCHEMA_VERSION or version in run_manifest.MANIFEST)


class Journal:
    """Trials as JSON lines. Each line is synced to the disk before the next trial starts.

    If the run's manifest has an older schema version, the journal is read in that version.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._folder = folder

    @cached_property
    def version(self) -> int:
        """The schema version in the run's manifest; the latest if there is no valid manifest."""
        try:
            version = _object((self._folder / MANIFEST).read_bytes()).get("schema_version")
        except (OSError, ValueError):
            return SCHEMA_VERSION
        return version if _is_known(version) else SCHEMA_VERSION

    def append(self, record: dict[str, Any]) -> None:
        """Append one trial, after moving a torn last line aside.

        Raises OSError if the write fails, and leaves the journal unchanged.
        """
        if self.version != SCHEMA_VERSION:
            raise InputError(f"{self.path}: is of schema version {self.version}, which is only read")
        line = encode(record)
        self.mend()
        new = not self.path.exists()
        number = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(number).st_size
            try:
                written = 0
                while written < len(line):  # a full disk may accept only a part
                    written += os.write(number, line[written:])
                os.fsync(number)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(number, size)
                raise
        finally:
            os.close(number)
        if new:
            _sync_folder(self._folder)

    def read(self) -> list[dict[str, Any]]:
        """All trials, in the order of writing, without a torn last line.

        Raises InputError naming any other damaged line.
        """
        if not self.path.exists():
            return []
        records: list[dict[str, Any]] = []
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                text = line.removesuffix(b"\n")
                if not text and self.version == 1:  # which ignored empty lines
                    continue
                try:
                    records.append(self._decode(text))
                except ValueError as error:
                    if text == line and self._is_torn(text):
                        break
                    raise self._damaged(number, error) from error
        return records

    def is_torn(self) -> bool:
        """Whether a crash during a write left part of a line at the end."""
        end = self._end()
        return bool(end) and self._is_torn(end)

    def mend(self) -> Path | None:
        """Make the journal end with a newline: complete a whole last line, or move a torn one to a file; return that.

        Raises InputError if the last line is neither.
        """
        end = self._end()
        if not end:
            return None
        aside = None
        with self.path.open("r+b") as file:
            if self._is_torn(end):
                aside = self._keep(end)
                file.truncate(self.path.stat().st_size - len(end))
            else:
                try:
                    self._decode(end)
                except ValueError as error:
                    raise self._damaged(self.path.read_bytes().count(b"\n") + 1, error) from error
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
        return aside

    def digest(self) -> str:
        """SHA-256 of the file, in hex."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _decode(self, text: bytes) -> dict[str, Any]:
        """The record in a line, upgraded to the latest version. Raises ValueError."""
        if self.version == SCHEMA_VERSION:
            return decode(text)
        return run_manifest.apply(run_manifest.RECORD, _object(text), self.version)

    def _end(self) -> bytes:
        """The bytes after the last newline."""
        if not self.path.exists() or self.path.stat().st_size == 0:
            return b""
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) == b"\n":
                return b""
            file.seek(0)
            return file.read().rpartition(b"\n")[2]

    def _is_torn(self, end: bytes) -> bool:
        """Whether the end of the file is an incomplete record, not a whole one with at most one more byte."""
        for text in (end, end[:-1]):
            with contextlib.suppress(ValueError):
                self._decode(text)
                return False
        return True

    def _keep(self, torn: bytes) -> Path:
        """Write a torn line to a new file, durably."""
        number = 1
        while (path := self._folder / f"{TORN}{number}").exists():
            number += 1
        with path.open("xb") as file:
            file.write(torn)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(self._folder)
        return path

    def _damaged(self, number: int, error: ValueError) -> InputError:
        return InputError(
            f"{self.path}:{number}: is not a JSON object as it was written ({error}); restore the line or the file"
        )


def _sync_folder(folder: Path) -> None:
    """Sync a folder, so that the names of new files are on the disk."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    finally:
        os.close(number)
