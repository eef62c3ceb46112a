"""The journal and the manifest: what is finished stays readable, and what is damaged is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import InputError
from bench.plan.cell import ADDED_FIELDS
from bench.run.journal import (
    JOURNAL,
    MANIFEST,
    Journal,
    encode,
    read_document,
    read_manifest,
    write_document,
)
from bench.run.manifest import SCHEMA_VERSION
from studies import results
from tests.conftest import ROOT
from tests.factories import make_cell, make_manifest

RECORDS = st.lists(
    st.dictionaries(
        st.text().filter(lambda key: key != "sha256"),
        st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.none()),
    ),
    max_size=6,
)


@settings(max_examples=30)
@given(RECORDS)
def test_whatever_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]
) -> None:
    journal = Journal(tmp_path_factory.mktemp("journal"))
    for record in records:
        journal.append(record)
    assert journal.read() == records


def test_an_append_is_on_the_disk_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, bytes]] = []

    def fsync(number: int) -> None:
        name = Path(f"/proc/self/fd/{number}").readlink().name
        synced.append((name, (tmp_path / JOURNAL).read_bytes()))

    monkeypatch.setattr("bench.run.journal.os.fsync", fsync)
    line = encode({"repeat": 0})
    Journal(tmp_path).append({"repeat": 0})
    assert synced == [(JOURNAL, line), (tmp_path.name, line)], (
        "the first time also the folder, which has its name"
    )
    Journal(tmp_path).append({"repeat": 0})
    assert synced[2:] == [(JOURNAL, line + line)]


def test_a_full_disk_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal(tmp_path).append({"repeat": 0})
    before = (tmp_path / JOURNAL).read_bytes()
    write = os.write

    def full(number: int, line: bytes) -> int:
        if len(line) < 20:
            raise OSError(28, "No space left on device")
        return write(number, line[:20])

    monkeypatch.setattr("bench.run.journal.os.write", full)
    with pytest.raises(OSError, match="No space left"):
        Journal(tmp_path).append({"repeat": 1, "reason": "a long one"})
    assert (tmp_path / JOURNAL).read_bytes() == before


def tear(folder: Path, keep: int) -> bytes:
    """Write two records and cut the second one after ``keep`` bytes; what is kept of it."""
    journal = Journal(folder)
    journal.append({"repeat": 0})
    before = journal.path.stat().st_size
    journal.append({"repeat": 1, "reason": "a long one"})
    whole = journal.path.read_bytes()
    journal.path.write_bytes(whole[: before + keep])
    return whole[before : before + keep]


LAST = encode({"repeat": 1, "reason": "a long one"})


@pytest.mark.parametrize("keep", range(len(LAST) - 1))
def test_a_torn_last_line_is_forgiven_and_moved_aside(tmp_path: Path, keep: int) -> None:
    torn = tear(tmp_path, keep)
    assert Journal(tmp_path).read() == [{"repeat": 0}]
    assert Journal(tmp_path).is_torn() == (keep > 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [JOURNAL], "reading changes nothing"
    Journal(tmp_path).append({"repeat": 1})
    Journal(tmp_path).append({"repeat": 2})
    assert Journal(tmp_path).read() == [{"repeat": 0}, {"repeat": 1}, {"repeat": 2}]
    aside = tmp_path / "trials.torn-1"
    if keep:
        assert aside.read_bytes() == torn
    else:
        assert not aside.exists()


def test_every_flipped_bit_is_found_and_its_line_named(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    for repeat in range(3):
        Journal(tmp_path).append({"repeat": repeat, "reason": "why *J"})
    good = path.read_bytes()
    length = len(good) // 3
    for place in range(len(good)):
        for bit in range(8):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            path.write_bytes(bad)
            line = place // length + 1
            with pytest.raises(InputError, match=f"{JOURNAL}:{line}: "):
                Journal(tmp_path).read()
            if line == 3 and place == len(good) - 1:
                with pytest.raises(InputError, match=f"{JOURNAL}:3: "):
                    Journal(tmp_path).mend()
                assert path.read_bytes() == bad, (
                    "nothing is taken away of what may be a finished trial"
                )


def test_manifest_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_document(tmp_path, {"schema_version": SCHEMA_VERSION})

    def fail(self: Path, target: Path) -> Path:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_document(tmp_path, {"schema_version": SCHEMA_VERSION, "more": 1})
    assert read_document(tmp_path) == {"schema_version": SCHEMA_VERSION}
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST], "no draft is left"


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1, "2", True, None])
def test_a_run_of_another_schema_version_is_refused_in_one_line(
    tmp_path: Path, version: Any
) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"schema_version": version}))
    with pytest.raises(InputError) as found:
        read_document(tmp_path)
    text = str(found.value)
    assert text.startswith(f"{tmp_path / MANIFEST}: schema_version is {version!r}; ")
    assert f"reads {SCHEMA_VERSION}, " in text and "\n" not in text


def committed() -> list[Path]:
    """The manifests of runs that are committed, and none of a reader's own."""
    found = set()
    for row in results.ROWS:
        for path in row.paths:
            found |= set((ROOT / path).rglob(MANIFEST))
    return sorted(found)


@pytest.mark.parametrize("path", committed(), ids=lambda path: path.parent.name)
def test_a_committed_manifest_is_read_and_written_without_loss(path: Path) -> None:
    stored = read_document(path.parent)
    written = json.loads(json.dumps(read_manifest(path.parent).to_dict()))
    # Fields that were added later have their defaults.
    stored["cells"] = [ADDED_FIELDS | cell for cell in stored["cells"]]
    stored["matmul"] = [{"capacity": {}} | rates for rates in stored["matmul"]]
    assert written == stored


@pytest.mark.parametrize("key", ["run_id", "matrix", "cells", "backends", "cold"])
def test_a_manifest_without_what_a_run_needs_is_refused_at_the_door(
    tmp_path: Path, key: str
) -> None:
    document = make_manifest([make_cell()])
    del document[key]
    write_document(tmp_path, document)
    with pytest.raises(InputError, match=rf"{MANIFEST}: has no key '{key}'; restore it"):
        read_manifest(tmp_path)
