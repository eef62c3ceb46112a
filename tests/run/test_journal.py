"""The journal and the manifest: what is finished stays readable, and what is damaged is named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import InputError
from bench.run.journal import (
    JOURNAL,
    MANIFEST,
    OLDER_VERSION,
    SCHEMA_VERSION,
    UPGRADED,
    Journal,
    decode,
    encode,
    read_manifest,
    write_manifest,
)

GOLDEN = Path(__file__).parents[1] / "golden"
"""A run as each schema version wrote it: run.json and trials.jsonl. Never changed, only added to."""
VERSIONS = sorted(int(path.name) for path in GOLDEN.iterdir())
RECORDS = st.lists(
    st.dictionaries(
        st.text().filter(lambda key: key != "sha256"),
        st.one_of(st.text(), st.integers(), st.floats(allow_nan=False), st.none()),
    ),
    max_size=6,
)


@settings(max_examples=30, deadline=None)
@given(RECORDS)
def test_whatever_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, Any]]) -> None:
    journal = Journal(tmp_path_factory.mktemp("journal"))
    for record in records:
        journal.append(record)
    assert journal.read() == records


def test_an_append_is_on_the_disk_before_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[str, bytes]] = []

    def fsync(number: int) -> None:
        name = Path(f"/proc/self/fd/{number}").readlink().name
        synced.append((name, (tmp_path / JOURNAL).read_bytes()))

    monkeypatch.setattr("bench.run.journal.os.fsync", fsync)
    line = encode({"repeat": 0})
    Journal(tmp_path).append({"repeat": 0})
    assert synced == [(JOURNAL, line), (tmp_path.name, line)], "the first time also the folder, which has its name"
    Journal(tmp_path).append({"repeat": 0})
    assert synced[2:] == [(JOURNAL, line + line)]


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert aside.read_bytes() == torn if keep else not aside.exists()


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
                assert path.read_bytes() == bad, "nothing is taken away of what may be a finished trial"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_record_or_a_value_error(line: bytes) -> None:
    try:
        record = decode(line)
    except ValueError:
        return
    assert encode(record) == line + b"\n"


def test_manifest_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(tmp_path, {"schema_version": SCHEMA_VERSION})

    def fail(self: Path, target: Path) -> Path:
        raise OSError("the disk is gone")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="the disk is gone"):
        write_manifest(tmp_path, {"schema_version": SCHEMA_VERSION, "more": 1})
    assert read_manifest(tmp_path) == {"schema_version": SCHEMA_VERSION}
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST], "no draft is left"


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no run \(run.json: No such file or directory\); name a folder under"):
        read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(InputError, match=r"run.json: is not (JSON|a JSON object)"):
        read_manifest(tmp_path)


def golden(version: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The manifest and the records of a version's run, as today's bench reads them."""
    folder = GOLDEN / str(version)
    return read_manifest(folder), Journal(folder).read()


def test_there_is_a_golden_run_of_every_version() -> None:
    assert VERSIONS == [OLDER_VERSION, SCHEMA_VERSION]


@pytest.mark.parametrize("version", VERSIONS)
def test_runs_of_every_version_read_as_the_latest(version: int) -> None:
    manifest, records = golden(version)
    latest, expected = golden(SCHEMA_VERSION)
    assert manifest.pop(UPGRADED, SCHEMA_VERSION) == version
    assert manifest == latest | {"matrix": manifest["matrix"]}
    assert manifest["matrix"]["values"]["inactivity_s"] == (0 if version == 1 else 120)
    assert records == expected


def test_the_latest_golden_run_is_what_is_written_today(tmp_path: Path) -> None:
    manifest, records = golden(SCHEMA_VERSION)
    write_manifest(tmp_path, manifest)
    for record in records:
        Journal(tmp_path).append(record)
    for name in (MANIFEST, JOURNAL):
        assert (tmp_path / name).read_bytes() == (GOLDEN / str(SCHEMA_VERSION) / name).read_bytes()


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_runs_of_older_versions_are_only_read(tmp_path: Path, version: int) -> None:
    for path in (GOLDEN / str(version)).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(InputError, match=f"schema version {version}, which is only read"):
        write_manifest(tmp_path, read_manifest(tmp_path))
    with pytest.raises(InputError, match=f"schema version {version}, which is only read"):
        Journal(tmp_path).append({})
    for path in (GOLDEN / str(version)).iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
