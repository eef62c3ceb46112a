"""The journal and the manifest: what is finished stays readable, and what is damaged is named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import InputError
from bench.journal import JOURNAL, MANIFEST, SCHEMA_VERSION, Journal, read_manifest, write_manifest

RECORDS = st.lists(
    st.dictionaries(st.text(), st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.none())), max_size=6
)


def test_append_and_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.read() == []
    records: list[dict[str, Any]] = [
        {"repeat": 0},
        {"text": "line\nbreak \u2028 \x85 \u00e9", "numbers": [1, 2.5, None]},
        {},
    ]
    for number, record in enumerate(records, start=1):
        journal.append(record)
        assert Journal(tmp_path).read() == records[:number]
    assert (tmp_path / JOURNAL).read_bytes().count(b"\n") == len(records)


@settings(max_examples=30, deadline=None)
@given(RECORDS)
def test_whatever_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]) -> None:
    journal = Journal(tmp_path_factory.mktemp("journal"))
    for record in records:
        journal.append(record)
    assert journal.read() == records


def test_nan_survives(tmp_path: Path) -> None:
    Journal(tmp_path).append({"losses": [math.nan, math.inf, 1.0]})
    nan, inf, one = Journal(tmp_path).read()[0]["losses"]
    assert math.isnan(nan) and inf == math.inf and one == 1.0


def test_an_append_is_on_the_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr("bench.journal.os.fsync", lambda fd: synced.append((tmp_path / JOURNAL).read_bytes()))
    Journal(tmp_path).append({"repeat": 0})
    assert synced == [b'{"repeat":0}\n']


def tear(folder: Path, keep: int) -> None:
    """Write two records and cut the second one after ``keep`` bytes."""
    journal = Journal(folder)
    journal.append({"repeat": 0})
    before = journal.path.stat().st_size
    journal.append({"repeat": 1, "reason": "a long one"})
    journal.path.write_bytes(journal.path.read_bytes()[: before + keep])


@pytest.mark.parametrize("keep", [0, 1, 12, 33])
def test_a_torn_last_line_is_forgiven(tmp_path: Path, keep: int) -> None:
    tear(tmp_path, keep)
    assert Journal(tmp_path).read() == [{"repeat": 0}]


@pytest.mark.parametrize("keep", [0, 1, 12, 33])
def test_trials_after_a_torn_line_lose_nothing(tmp_path: Path, keep: int) -> None:
    tear(tmp_path, keep)
    Journal(tmp_path).append({"repeat": 1})
    Journal(tmp_path).append({"repeat": 2})
    assert Journal(tmp_path).read() == [{"repeat": 0}, {"repeat": 1}, {"repeat": 2}]


def test_a_whole_record_without_its_newline_is_kept(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text('{"repeat":0}\n{"repeat":1}')
    assert Journal(tmp_path).read() == [{"repeat": 0}, {"repeat": 1}]
    Journal(tmp_path).append({"repeat": 2})
    assert Journal(tmp_path).read() == [{"repeat": 0}, {"repeat": 1}, {"repeat": 2}]


def test_a_corrupt_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / JOURNAL
    path.write_text('{"repeat":0}\n\n{"repeat":\n{"repeat":2}\n')
    with pytest.raises(
        InputError, match=f"^{re.escape(str(path))}:3: is not (JSON|a JSON object) .*restore the line or the file"
    ):
        Journal(tmp_path).read()


@pytest.mark.parametrize("line", [b"\xff\xfe", b"[1]", b"3"], ids=["not UTF-8", "a list", "a number"])
def test_a_line_that_is_no_record_is_named_by_its_number(tmp_path: Path, line: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(b'{"repeat":0}\n' + line + b'\n{"repeat":2}\n')
    with pytest.raises(InputError, match=f"{JOURNAL}:2: "):
        Journal(tmp_path).read()


def test_manifest_and_back(tmp_path: Path) -> None:
    manifest = {"schema_version": SCHEMA_VERSION, "run_id": "r", "cells": [{"backend": "x"}]}
    write_manifest(tmp_path, {"old": True})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST], "no draft is left"


def test_manifest_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(tmp_path, {"schema_version": SCHEMA_VERSION})

    def fail(self: Path, target: Path) -> Path:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_manifest(tmp_path, {"schema_version": SCHEMA_VERSION, "more": 1})
    assert read_manifest(tmp_path) == {"schema_version": SCHEMA_VERSION}


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_schema_version_is_refused(tmp_path: Path, version: Any) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps({"schema_version": version}))
    with pytest.raises(InputError, match=f"schema_version is {version!r}; this bench reads {SCHEMA_VERSION}"):
        read_manifest(tmp_path)


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no run \(run.json: No such file or directory\); name a folder under"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(InputError, match=r"run.json: is not (JSON|a JSON object)"):
        read_manifest(tmp_path)


def test_a_manifest_that_is_no_object(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[]")
    with pytest.raises(InputError, match=r"run.json"):
        read_manifest(tmp_path)
