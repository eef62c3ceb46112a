"""A journal that is cut or has a bit flipped: what was finished is read, and what is damaged is named by its line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.errors import WRONG, InputError
from bench.run.journal import JOURNAL, Journal, write_manifest
from tests.factories import make_cell, make_failure, make_manifest, make_record
from tests.faults.form import FORM, rng

CELLS = [make_cell(backend=name) for name in ("reference", "ddp-eager", "ddp-deferred")]
RECORDS: list[dict[str, Any]] = [
    make_record(CELLS[0]),
    make_failure(CELLS[1], reason='rank 1: ValueError: a "reason"\nwith \\ and é'),
    make_record(CELLS[1]),
    make_record(CELLS[2]),
]


def written(folder: Path) -> bytes:
    """A run of four trials; its journal."""
    write_manifest(folder, make_manifest(CELLS))
    for record in RECORDS:
        Journal(folder).append(record)
    return (folder / JOURNAL).read_bytes()


def plain(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records as they were given to the journal."""
    return [{key: value for key, value in record.items() if key != "sha256"} for record in records]


def read(folder: Path, content: bytes) -> list[dict[str, Any]]:
    (folder / JOURNAL).write_bytes(content)
    return plain(Journal(folder).read())


def test_the_journal_cut_at_every_byte_of_its_last_line(tmp_path: Path) -> None:
    whole = written(tmp_path)
    start, size = whole.rstrip(b"\n").rfind(b"\n") + 1, len(whole)
    wrong = []
    for length in range(start, size + 1):
        found = read(tmp_path, whole[:length])
        # Without its newline alone, the last record is whole, and may be told from a torn one.
        good = [RECORDS] if length == size else [RECORDS[:-1], RECORDS] if length == size - 1 else [RECORDS[:-1]]
        wrong += [length - start] if found not in good else []
    lengths = {start, start + 1, size - 2, size - 1, size} | set(rng("cuts").sample(range(start, size), 20))
    for length in sorted(lengths):
        good = goes_on(tmp_path, whole[:length], whole[start:length], complete=length >= size - 1)
        wrong += [] if good else [length - start]
    FORM.note(
        "damage",
        "cuts",
        what="cut at every byte of its last line",
        must="every whole line is read; when the run goes on, what is torn is moved aside, not deleted",
        count=size - start + 1,
        wrong=len(set(wrong)),
        more=f"{len(lengths)} of them went on",
    )
    assert wrong == []


def goes_on(folder: Path, content: bytes, torn: bytes, *, complete: bool) -> bool:
    """Whether a journal that was cut within its last line is added to with nothing lost."""
    for path in folder.glob("trials.torn-*"):
        path.unlink()
    (folder / JOURNAL).write_bytes(content)
    Journal(folder).append(RECORDS[1])
    aside = b"".join(path.read_bytes() for path in folder.glob("trials.torn-*"))
    after = plain(Journal(folder).read())
    if complete and after == [*RECORDS, RECORDS[1]]:
        return not aside
    return after == [*RECORDS[:-1], RECORDS[1]] and aside.rstrip(b"\n") == torn


def test_every_flipped_bit_is_found_and_its_line_named(tmp_path: Path) -> None:
    whole = written(tmp_path)
    # The last newline is left out: without it, the last line is as good as torn.
    places = [(offset, bit) for offset in range(len(whole) - 1) for bit in range(8)]
    chosen = FORM.choose(rng("flips").sample(places, 1500), places)
    missed, unnamed = [], []
    for offset, bit in chosen:
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << bit
        try:
            read(tmp_path, bytes(damaged))
            missed.append((offset, bit))
        except InputError as error:
            named = re.match(re.escape(f"{tmp_path / JOURNAL}:") + r"(\d+): ", str(error))
            # A newline that is none any more makes one line of two: the first is the one that is wrong.
            if named is None or int(named[1]) != whole[:offset].count(b"\n") + 1:
                unnamed.append((offset, bit, str(error)))
    FORM.note(
        "damage",
        "flips",
        what=FORM.choose("bits flipped, chosen at random", "every bit flipped, but for those of the last newline"),
        must="an error names the line",
        count=len(chosen),
        wrong=len(missed) + len(unnamed),
        more=f"{len(missed)} not found, {len(unnamed)} without the right line",
    )
    assert missed == []
    assert unnamed == []


def test_a_command_names_the_damaged_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = bytearray(written(tmp_path))
    whole[whole.index(b"\n") + 20] ^= 1
    (tmp_path / JOURNAL).write_bytes(bytes(whole))
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    assert main(["report", str(tmp_path)]) == WRONG
    assert f"{JOURNAL}:2: " in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before, "nothing that is damaged is written over"
