"""A run on disk: a folder with a manifest, ``run.json``, and a journal of trials, ``trials.jsonl``.

A line of the journal is the JSON of a record with a last key ``sha256``: the first 16 hex digits of
the SHA-256 of the line's JSON without that key, exactly as written. So an edited line is detected
and reported by its number.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

from bench.errors import InputError
from bench.files import BusyError, open_regular, read_regular, replacing, sync
from bench.formatting import size
from bench.run.manifest import SCHEMA_VERSION, Manifest, parse_manifest

MANIFEST = "run.json"
JOURNAL = "trials.jsonl"
TORN = "trials.torn-"
"""Prefix of files that keep torn lines, which a crash during a write left behind."""
DIGITS = 16
"""Hex digits of a line's checksum."""
MANIFEST_BYTES = 32 * 2**20
"""Largest run.json that is read: 50,000 cells have half of it."""
JOURNAL_BYTES, LINE_BYTES = 512 * 2**20, 16 * 2**20
"""The same of the journal, of which a trial of 64 ranks and 1,000 steps takes 1 MB, and of one
line."""
_CHECKSUM = re.compile(rb'"sha256":"([0-9a-f]{%d})"}' % DIGITS)
_CHECKSUM_BYTES = len('"sha256":""}') + DIGITS


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``run.json`` atomically and durably."""
    write_document(folder, manifest.to_dict())


def write_document(folder: Path, document: Mapping[str, object]) -> None:
    """The same of the JSON of a manifest."""
    with replacing(folder / MANIFEST, durable=True) as draft:
        draft.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a run. Raises InputError if there is none, or one of another schema."""
    return parse_manifest(read_document(folder), str(folder / MANIFEST))


def read_document(folder: Path) -> dict[str, Any]:
    """The JSON of a manifest; only its schema version is checked. Raises as ``read_manifest``."""
    path = folder / MANIFEST
    try:
        document = _object(read_regular(path, MANIFEST_BYTES))
    except OSError as error:
        raise InputError(
            f"{folder}: holds no run ({MANIFEST}: {error.strerror}); name a folder under results/"
        ) from error
    except ValueError as error:
        raise InputError(f"{path}: is not a JSON object ({error})") from error
    version = document.get("schema_version")
    if type(version) is not int or version != SCHEMA_VERSION:
        raise InputError(
            f"{path}: schema_version is {version!r}; this version of the bench reads "
            f"{SCHEMA_VERSION}, so measure again"
        )
    return document


def run_sha256(folder: Path) -> str:
    """SHA-256 that pins both files of a run, in hex.

    It is that of ``sha256sum run.json trials.jsonl | sha256sum`` in its folder.
    Raises InputError if one cannot be read.
    """
    lines = ""
    for name in (MANIFEST, JOURNAL):
        try:
            with open_regular(folder / name, JOURNAL_BYTES) as file:
                lines += f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n"
        except OSError as error:
            raise InputError(
                f"{folder / name}: cannot be read ({error.strerror}); restore the file"
            ) from error
    return hashlib.sha256(lines.encode()).hexdigest()


def encode(record: dict[str, Any]) -> bytes:
    """A record as a line of the journal, with its checksum and a newline."""
    assert "sha256" not in record, "the key is the line's own"
    text = json.dumps(record, separators=(",", ":"), allow_nan=True).encode()
    return b'%b%b"sha256":"%b"}\n' % (text[:-1], b"," if record else b"", _checksum(text))


def decode(line: bytes) -> dict[str, Any]:
    """The record in a line without its newline. Raises ValueError, with the reason, if changed."""
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


_APPENDING = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def _lock(number: int, place: str, advice: str) -> None:
    """Lock an open file, without waiting."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        words = "another process appends to its journal; wait for it, or name another folder"
        raise BusyError(f"{place}: is in use: {words}") from error
    except OSError as error:
        raise InputError(
            f"{place}: {JOURNAL} cannot be locked ({error.strerror}); {advice}"
        ) from error


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


class Journal:
    """Trials as JSON lines. Each line is synced to the disk before the next trial starts."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._folder = folder
        self._held: tuple[int, int] | None = None
        """Which file is locked."""

    @contextlib.contextmanager
    def held(self, place: str) -> Iterator[None]:
        """Hold the kernel's lock of the file, which is created if missing: one process appends.

        Unlike the folder's lock, of which a name is all that others see, no one can remove it
        without the journal. Raises BusyError that begins with ``place`` if another process holds
        it, and InputError if it cannot be locked.
        """
        advice = "use a folder that can be written, on a file system that has locks"
        try:
            number = os.open(self.path, _APPENDING, 0o644)
        except OSError as error:
            raise InputError(
                f"{place}: {JOURNAL} cannot be opened ({error.strerror}); {advice}"
            ) from error
        try:
            _lock(number, place, advice)
            self._held = _identity(os.fstat(number))
            yield
        finally:
            self._held = None
            os.close(number)

    def append(self, record: dict[str, Any]) -> None:
        """Append one trial, after moving a torn last line aside.

        Raises OSError if the write fails, and leaves the journal unchanged. Raises InputError if
        this process holds the lock of another file, since someone has removed or replaced it.
        """
        line = encode(record)
        self._require_held()
        self.mend()
        new = not self.path.exists()
        number = os.open(self.path, _APPENDING, 0o644)
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
            sync(self._folder)

    def _require_held(self) -> None:
        if self._held is None:
            return
        found = None
        with contextlib.suppress(FileNotFoundError):
            found = _identity(self.path.lstat())
        if found != self._held:
            raise InputError(
                f"{self.path}: was removed or replaced while the run went on; put it back, and "
                "resume"
            )

    def read(self) -> list[dict[str, Any]]:
        """All trials, in the order of writing, without a torn last line.

        Raises InputError naming any other damaged line.
        """
        records: list[dict[str, Any]] = []
        for number, line in enumerate(self._lines(), start=1):
            text = line.removesuffix(b"\n")
            try:
                records.append(decode(text))
            except ValueError as error:
                if text == line and self._is_torn(text):
                    break
                raise self._damaged(number, error) from error
        return records

    def _lines(self) -> Iterator[bytes]:
        """The lines of the file; the last may lack its newline. InputError if one is too long."""
        if not os.path.lexists(self.path):
            return
        with self._opened() as file:
            for number in itertools.count(1):
                line = file.readline(LINE_BYTES)
                if len(line) == LINE_BYTES:
                    raise InputError(
                        f"{self.path}:{number}: is longer than {size(LINE_BYTES)}; restore the file"
                    )
                if not line:
                    return
                yield line

    @contextlib.contextmanager
    def _opened(self, flags: int = os.O_RDONLY) -> Iterator[BufferedReader]:
        """The file. Raises InputError if it is not a regular one, or too large for a run's."""
        try:
            file = open_regular(self.path, JOURNAL_BYTES, flags)
        except OSError as error:
            raise InputError(
                f"{self.path}: cannot be read ({error.strerror}); restore the file"
            ) from error
        with file:
            yield file

    def is_torn(self) -> bool:
        """Whether a crash during a write left part of a line at the end."""
        end = self._end()
        return bool(end) and self._is_torn(end)

    def mend(self) -> Path | None:
        """Make the journal end with a newline: complete a whole last line, or move a torn one away.

        Returns the file to which it was moved. Raises InputError if the last line is neither.
        """
        end = self._end()
        if not end:
            return None
        aside = None
        with self._opened(os.O_RDWR | os.O_NOFOLLOW) as file:
            if self._is_torn(end):
                aside = self._keep(end)
                file.truncate(file.seek(0, os.SEEK_END) - len(end))
            else:
                try:
                    decode(end)
                except ValueError as error:
                    raise self._damaged(self._num_lines(), error) from error
                file.seek(0, os.SEEK_END)
                file.write(b"\n")
            file.flush()
            os.fsync(file.fileno())
        return aside

    def digest(self) -> str:
        """SHA-256 of the file, in hex."""
        with self._opened() as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _end(self) -> bytes:
        """The bytes after the last newline."""
        last = b""
        if not os.path.lexists(self.path):
            return last
        with self._opened() as file:
            length = file.seek(0, os.SEEK_END)
            file.seek(max(0, length - LINE_BYTES))
            last = file.read()
        return last.rpartition(b"\n")[2]

    def _num_lines(self) -> int:
        return sum(1 for _ in self._lines())

    def _is_torn(self, end: bytes) -> bool:
        """Whether the end of the file is part of a record, not a whole one and at most a byte."""
        for text in (end, end[:-1]):
            with contextlib.suppress(ValueError):
                decode(text)
                return False
        return True

    def _keep(self, torn: bytes) -> Path:
        """Write a torn line to a new file, durably."""
        number = 1
        while os.path.lexists(self._folder / f"{TORN}{number}"):
            number += 1
        path = self._folder / f"{TORN}{number}"
        with path.open("xb") as file:
            file.write(torn)
        sync(path)
        sync(self._folder)
        return path

    def _damaged(self, number: int, error: ValueError) -> InputError:
        return InputError(
            f"{self.path}:{number}: is not a JSON object as it was written ({error}); restore the "
            "line or the file"
        )
