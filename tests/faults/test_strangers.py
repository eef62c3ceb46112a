"""A run folder from a stranger, and what accidents make of one: each kind of attack, with inputs of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

from bench import cli
from bench.backends.base import registry
from bench.errors import InputError
from bench.files import BusyError
from bench.judge.integrity import check
from bench.judge.loading import load
from bench.launch import surroundings
from bench.launch.channel import LostError, NodeChannel
from bench.launch.job_nodes import Place
from bench.launch.nodes import Nodes
from bench.plan import matrix as matrix_file
from bench.plan.expand import expand
from bench.run.journal import JOURNAL, MANIFEST, Journal, encode, run_sha256, write_document
from bench.run.manifest import parse_manifest
from tests.conftest import ROOT, until
from tests.factories import make_cell, make_manifest, make_record
from tests.faults.test_fuzz import limited

CELLS = [make_cell(backend=name) for name in ("reference", "ddp-eager")]


def records(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two blocks of the two cells, numbered as a runner does, some of them changed."""
    found = []
    for slot, (repeat, cell) in enumerate((repeat, cell) for repeat in range(2) for cell in CELLS):
        passes = {"passes": ["time"]} if repeat else {}
        found.append(json.loads(json.dumps(make_record(cell, repeat, slot=slot, **passes))))
    for record, change in zip(found, changes, strict=False):
        record.update(change)
    return found


def write_run(folder: Path, lines: Sequence[dict[str, Any]], **changes: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_document(folder, make_manifest(CELLS, **changes))
    (folder / JOURNAL).write_bytes(b"".join(map(encode, lines)))
    return folder


def bench(
    *arguments: str, folder: Path, timeout_s: float = 60, **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own, whose output is no terminal."""
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def errors_of(folder: Path) -> list[str]:
    return [
        finding.text
        for finding in check(folder)
        if finding.topic == "records" and finding.level == "error"
    ]


def test_two_writers_are_refused_whatever_became_of_the_lock_file(tmp_path: Path) -> None:
    first, second = Journal(tmp_path), Journal(tmp_path)
    with first.held("run"):
        first.append({"a": 1})
        with pytest.raises(BusyError, match="another process appends"), second.held("--resume run"):
            raise AssertionError("two writers")
        first.append({"a": 2})
    with second.held("run"):
        second.append({"a": 3})
    assert [record["a"] for record in first.read()] == [1, 2, 3]


@pytest.mark.parametrize("replaced", [True, False])
def test_a_journal_that_was_removed_meanwhile_is_not_begun_again(
    tmp_path: Path, replaced: bool
) -> None:
    journal = Journal(tmp_path)
    with journal.held("run"):
        journal.append({"a": 1})
        journal.path.unlink()
        if replaced:
            journal.path.write_bytes(b"")
        with pytest.raises(InputError, match="was removed or replaced"):
            journal.append({"a": 2})


def test_records_of_two_writers_are_an_error_of_check(tmp_path: Path) -> None:
    assert errors_of(write_run(tmp_path / "good", records())) == []
    lines = records()
    (twice,) = errors_of(
        write_run(tmp_path / "twice", [*lines[:3], lines[2] | {"slot": 3}, lines[3] | {"slot": 4}])
    )
    assert "again after a good record" in twice
    (slots,) = errors_of(write_run(tmp_path / "slots", [*lines[:2], lines[3], lines[2]]))
    assert "written as number" in slots
    again = [records({"status": "crashed"})[0], *lines[1:], lines[0] | {"slot": 4}]
    assert errors_of(write_run(tmp_path / "again", again)) == [], "a failed trial was run again"


@pytest.mark.parametrize(
    "change",
    [
        {"machine": {"cpu": "Another CPU", "cores": 2}},
        {"packages": {"torch": "9.9"}},
        {"git": {"commit": "0" * 40, "clean": True}},
        {"started": "2020-01-01T00:00:00+00:00"},
        {"environment": {"OMP_NUM_THREADS": "64"}},
        {"code": {"bench": "0" * 64}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_an_edited_manifest_contradicts_the_records(tmp_path: Path, change: dict[str, Any]) -> None:
    begun = parse_manifest(json.loads(json.dumps(make_manifest(CELLS))), "run.json").begun_sha256
    lines = [record | {"begun_sha256": begun} for record in records()]
    folder = write_run(tmp_path / "run", lines)
    before = run_sha256(folder)
    assert errors_of(folder) == []
    document = json.loads((folder / MANIFEST).read_text())
    write_document(folder, document | change)
    assert any("run.json was changed" in text and "4 records" in text for text in errors_of(folder))
    assert run_sha256(folder) != before


def test_the_hash_that_pins_a_run_is_one_that_any_shell_computes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", records())
    command = f"sha256sum {MANIFEST} {JOURNAL} | sha256sum"
    found = subprocess.run(
        command, shell=True, cwd=folder, capture_output=True, text=True, check=True
    ).stdout
    assert found.split()[0] == run_sha256(folder)


def test_a_manifest_that_lies_beside_the_records_is_an_error(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", records(), packages={"torch": "2.13.0"}, distributions={"torch": "2.12.0"}
    )
    (error,) = errors_of(folder)
    assert re.search(r"run\.json says torch 2\.13\.0 .* torch 2\.12\.0", error)
    assert load(folder).name


EVIL = "\x1b[2J\x1b[Hclean\x9b2J\r\n0 errors\u202egnp.exe\x07"
"""Clears the screen and goes on as if nothing were wrong."""
READERS = {
    "check run": 1,
    "report run": 1,
    "compare run other": 0,
    "compare run --backend ddp-eager --against reference": 0,
    f"cite run {CELLS[1].cell_id} --force": 0,
    "export run --table trials --head 4": 0,
}
"""Commands that show what a run says of itself, with their exit statuses."""


def hidden(text: str) -> set[str]:
    """The characters of a text that no terminal should get."""
    return {
        character for character in text if not character.isprintable() and character not in "\n\t"
    }


@pytest.mark.parametrize(("command", "status"), READERS.items())
def test_what_a_run_says_moves_no_cursor(tmp_path: Path, command: str, status: int) -> None:
    bad = {"status": "crashed", "reason": EVIL, "last_lines": [EVIL], "time": None}
    lines = records(bad, bad)
    machine = {"cpu": EVIL, "system": EVIL, "python": EVIL, "cores": 2}
    changes = {
        "machine": machine,
        "packages": {EVIL: EVIL},
        "git": {"commit": EVIL, "clean": True},
        "run_id": EVIL,
    }
    write_run(tmp_path / "run", lines, **changes)
    write_run(tmp_path / "other", records())
    done = bench(*command.split(), folder=tmp_path)
    assert done.returncode == status, done.stderr
    assert "gnp.exe" in done.stdout, "the harmless rest is shown"
    assert hidden(done.stdout + done.stderr) == set()
    assert "\n0 errors\u202e" not in done.stdout and "\n0 errorsgnp" not in done.stdout, (
        "a line of its own"
    )
    pages = [path.read_text() for path in (tmp_path / "run").glob("report.*")]
    assert len(pages) == 2 * command.startswith("report")
    for text in pages:
        assert "gnp.exe" in text and "\x1b" not in text and "\x9b" not in text


def test_an_error_says_what_is_wrong_without_control_characters(tmp_path: Path) -> None:
    write_run(tmp_path / "run", records(), cold=EVIL)
    done = bench("check", "run", folder=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert hidden(done.stderr) == set()


@pytest.mark.parametrize(
    "name", ["plots", "trials.parquet", "trials.parquet.tmp", "report.md", "run.lock", "plots/x"]
)
@pytest.mark.parametrize("dangling", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str, dangling: bool) -> None:
    folder = write_run(tmp_path / "run", records())
    outside = tmp_path / "outside"
    if name == "plots":
        outside.mkdir()
        (outside / "step_time.png").write_text("mine")
    elif not dangling:
        outside.write_text("mine")
    if name == "plots/x":
        (folder / "plots").mkdir()
        for kind in (
            "step_time",
            "memory_categories",
            "communication",
            "loss_curves",
            "noise",
            "memory_vs_time",
        ):
            for suffix in ("png", "csv", "png.tmp", "csv.tmp"):
                (folder / "plots" / f"{kind}.{suffix}").symlink_to(outside)
    else:
        (folder / name).symlink_to(outside)
    done = bench("report", "run", folder=tmp_path)
    assert done.returncode in {0, 1, 2}, done.stderr
    if name in {"plots", "run.lock"}:
        assert done.returncode == 2, done.stdout
    if name == "plots":
        assert [path.name for path in outside.iterdir()] == ["step_time.png"]
        assert (outside / "step_time.png").read_text() == "mine"
    elif dangling:
        assert not outside.exists()
    else:
        assert outside.read_text() == "mine"


def special(path: Path, kind: str) -> None:
    """Put something that is no regular file in a file's place."""
    path.unlink(missing_ok=True)
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "empty":
            path.write_bytes(b"")
        case "huge":
            path.touch()
            os.truncate(path, 2**40)
        case _:
            path.symlink_to(kind)


@pytest.mark.parametrize(
    "kind", ["fifo", "folder", "empty", "huge", "/dev/zero", "/dev/tty", "loop"]
)
@pytest.mark.parametrize("name", [MANIFEST, JOURNAL, "trials.parquet"])
def test_what_is_no_file_of_a_run_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    folder = write_run(tmp_path / "run", records())
    load(folder).tables.write(folder)
    special(folder / name, name if kind == "loop" else kind)
    if name == "trials.parquet":
        assert any(finding.level == "error" and name in finding.text for finding in check(folder))
        return
    with pytest.raises(InputError):
        check(folder)


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Nodes, tuple[str, int]]]:
    """Node 0 of two, on a free port, which waits for little time."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("STRANGER_S", "PING_S"):
        monkeypatch.setattr(f"bench.launch.nodes.{name}", 1.0)
    about = {"versions": {}, "gpus": []}
    with Nodes(Place(node=0, num_nodes=2, head="127.0.0.1", port=port), SECRET, about) as nodes:
        yield nodes, ("127.0.0.1", port)


SECRET = b"0123456789abcdef0123"


def join(address: tuple[str, int], secret: bytes) -> NodeChannel:
    """Say hello as node 1, prove the secret, and say what node 0 wants to know."""
    channel = NodeChannel(socket.create_connection(address, timeout=5))
    channel.send({"node": 1, "host": EVIL})
    channel.authenticate(secret, is_controller=False)
    channel.send({"num_nodes": 2, "versions": {}, "gpus": []})
    return channel


def test_strangers_cost_the_job_one_line(
    listening: tuple[Nodes, tuple[str, int]], capfd: pytest.CaptureFixture[str]
) -> None:
    nodes, address = listening
    num_threads = threading.active_count() + 4
    silent = [socket.create_connection(address, timeout=5) for _ in range(300)]
    for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02{}", b"\xff" * 64):
        with socket.create_connection(address, timeout=5) as link:
            link.sendall(words)
    for _ in range(20):
        with pytest.raises((AuthenticationError, LostError)):
            join(address, b"another secret than that").receive(5)
    node = join(address, SECRET)
    nodes.gather()
    assert [node.number for node in nodes.nodes] == [1]
    assert hidden(nodes.nodes[0].name) == set()
    assert len(list(Path("/proc/self/fd").iterdir())) < 300 + 2 * 64 + 64, (
        "the silent ones are this test's own"
    )
    until(lambda: threading.active_count() <= num_threads, seconds=10)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("bench: node 0 refused 127.0.0.1: "), lines
    for link in silent:
        link.close()
    node.close()


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        ({"PYTHONOPTIMIZE": "2"}, "python: leaves out docstrings"),
        ({"GLOO_SOCKET_IFNAME": "none7"}, "network: GLOO_SOCKET_IFNAME is 'none7'"),
    ],
    ids=["optimize", "interface"],
)
def test_what_would_break_every_trial_is_told_before_the_first(
    tmp_path: Path, broken: dict[str, str], expected: str
) -> None:
    done = bench("run", "--matrix", "smoke", "--out", "run", folder=tmp_path, **broken)
    assert done.returncode == 2 and done.stderr.startswith(f"bench: {expected}"), done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "run").exists()


def test_full_shared_memory_and_a_dead_loopback_are_told_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(surroundings.broken()) == []
    monkeypatch.setattr(surroundings, "shared_memory_bytes", lambda: 4096)
    monkeypatch.setattr(surroundings, "loopback_error", lambda: "Network is unreachable")
    assert [finding.text.split()[0] for finding in surroundings.broken()] == [
        "127.0.0.1",
        "/dev/shm",
    ]


@pytest.mark.parametrize(
    "arguments", [["run", "--out", ""], ["run", "--resume", " "], ["check", ""]], ids=" ".join
)
def test_an_empty_name_is_not_the_current_folder(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert "the name is empty" in capsys.readouterr().err


AXES: dict[str, list[Any]] = {"backend": ["ddp-eager"], "accumulate": [1], "world_size": [2]}


@pytest.mark.parametrize(
    "change",
    [
        {"axes": AXES | {"seed": list(range(100_000))}},
        {"axes": AXES | {"accumulate": list(range(1, 3001)), "world_size": list(range(1, 3001))}},
        {"axes": AXES, "groups": [{"axes.accumulate": [2]}] * 3000},
    ],
    ids=["seeds", "cells", "groups"],
)
def test_a_matrix_that_is_too_large_is_refused_at_once(change: dict[str, Any]) -> None:
    began = time.monotonic()
    workload = {"sequence_length": 8, "global_batch_size": 8}
    document = {"device": "cpu", "workload": workload, **change}
    with pytest.raises(InputError, match="at most"):
        expand(matrix_file.parse(document, name="m", source="m.toml"), registry(), 0)
    assert time.monotonic() - began < 1


@pytest.mark.parametrize("value", [0, 1e308, 1e-320, -1.0])
def test_times_that_no_clock_shows_are_named(tmp_path: Path, value: float) -> None:
    lines = records()
    lines[1]["time"]["step_seconds"][0] = value
    with pytest.raises(
        InputError, match=r"trial 2 was edited: .*step_seconds\[0\] is .*seconds, from 1e-9 to 1e9"
    ):
        check(write_run(tmp_path / "run", lines))


@pytest.mark.parametrize(
    "rates",
    [
        {"flops_per_s": {"fp32": [0.0]}},
        {"links": [{"op": "all_reduce", "bytes": 4, "seconds": 1e-320}]},
        {"links": [{"op": "broadcast", "bytes": 4, "seconds": 1.0}]},
    ],
    ids=["flops", "seconds", "op"],
)
def test_rates_that_nothing_reaches_are_named(tmp_path: Path, rates: dict[str, Any]) -> None:
    folder = write_run(tmp_path / "run", records(), matmul=[{"world_size": 2, **rates}])
    with pytest.raises(InputError, match=r"run\.json: matmul\[0\]"):
        check(folder)


def bomb(path: Path, expected: pd.DataFrame, kind: str) -> None:
    """A small file that is a table of far more bytes: many rows, one long list, or one text in each row."""
    match kind:
        case "rows":
            zeros = pa.array(np.zeros(1_000_000, np.int8))
            table = pa.table({"repeat": pa.chunked_array([zeros] * 800)})
        case "text":
            table = pa.table({"reason": pa.array(["a" * 200_000_000] * len(expected))})
        case _:
            values = pa.array(np.zeros(400_000_000, np.int8))
            ends = [0, *[len(values)] * len(expected)]
            table = pa.table(
                {"repeat": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)}
            )
    parquet.write_table(table, path, compression="zstd")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rows", "text", "lists"])
def test_a_table_that_would_fill_the_memory_is_not_unpacked(tmp_path: Path, kind: str) -> None:
    folder = write_run(tmp_path / "run", records())
    tables = load(folder).tables
    tables.write(folder)
    path = folder / "trials.parquet"
    bomb(path, tables.trials, kind)
    assert path.stat().st_size < 64 * 2**20
    with limited(2**30):
        found = [finding.text for finding in check(folder) if finding.topic == "tables"]
    told = [text for text in found if text.startswith("trials.parquet: ")]
    assert len(told) == 1 and "cannot be read" not in told[0], found


@pytest.mark.slow
def test_a_journal_of_very_many_trials_is_answered_in_time(tmp_path: Path) -> None:
    lines = records()
    last = lines[-1]
    more = [last | {"repeat": 2 + number, "slot": len(lines) + number} for number in range(20_000)]
    folder = write_run(tmp_path / "run", [*lines, *more])
    began = time.monotonic()
    with contextlib.suppress(InputError):
        list(check(folder))
    assert time.monotonic() - began < 30
