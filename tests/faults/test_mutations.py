"""Any file of a committed run in any state, and any JSON value replaced by any other: a result, or one line."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.errors import BAD, GOOD, UNCHECKED, WRONG
from bench.report import canvas, figures
from bench.run.journal import JOURNAL, MANIFEST, Journal, encode, write_document
from tests.conftest import ROOT
from tests.faults.form import FORM
from tests.faults.sandbox import Call, call
from tests.faults.test_fuzz import ANY, COUNTS, count, limited, put
from tests.faults.test_strangers import EVIL, hidden

pytestmark = pytest.mark.timeout(7200)
RUNS = ("bytes-8b", "h100-bf16", "curves")
"""Committed runs: without times, on a GPU, and on CPUs."""
ROW = "a committed run of which a file or a value was changed"
READERS: list[list[str]] = [
    ["check", "run"],
    ["check", "run", "--json"],
    ["report", "run"],
    ["report", "run", "--rebuild"],
    ["compare", "run", "other"],
    ["export", "run", "--format", "csv", "--out", "out"],
    ["predict", "--from-run", "run"],
]
LIMIT_S, WAIT_S = 10, 90
"""How long a command may compute, and how long it may take on a machine that others use."""
TARGETS = (
    "/dev/zero",
    "/dev/full",
    "/dev/tty",
    "/etc/passwd",
    "../outside",
    ".",
    "run.json",
    "trials.jsonl",
)
NUMBERS = st.sampled_from(
    [0, -1, 1, 1e308, -1e308, 1e-320, 10**18, 2**63, 10**400, float("nan"), float("inf")]
)
VALUES = ANY | NUMBERS | st.just(EVIL) | st.lists(NUMBERS, max_size=4)
Change = Callable[[Path], object]


def truncate(share: float, path: Path) -> None:
    os.truncate(path, int(share * path.stat().st_size))


def swap(kind: str, path: Path) -> None:
    """Put something that is no regular file in its place."""
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(kind)


@st.composite
def of_files(draw: st.DrawFn) -> Callable[[Path], None]:
    """Another state of one file, or of one that a command writes."""
    number = draw(st.integers(0, 30))
    how: Callable[[Path], None] = draw(
        st.floats(0, 1).map(lambda share: partial(truncate, share))
        | st.sampled_from(["folder", "fifo", *TARGETS]).map(lambda kind: partial(swap, kind))
    )

    def change(folder: Path) -> None:
        written = [
            folder / name
            for name in ("report.md", "report.html", "run.lock", "plots", "ratios.parquet")
        ]
        for path in written:
            if not path.exists():
                path.touch()
        paths = sorted(path for path in folder.iterdir() if path.is_file())
        how(paths[number % len(paths)])

    return change


@st.composite
def of_values(draw: st.DrawFn) -> Callable[[Path], None]:
    """Another value somewhere in the manifest or in a record."""
    step = draw(st.lists(st.integers(0, 60), min_size=1, max_size=6))
    new, line = draw(VALUES), draw(st.integers(-1, 200))

    def change(folder: Path) -> None:
        if line < 100:
            write_document(folder, put(json.loads((folder / MANIFEST).read_text()), step, new))
            return
        records = Journal(folder).read()
        at = line % len(records)
        changed: Any = put(records[at], step, new)
        texts = [
            encode(changed if number == at else record) for number, record in enumerate(records)
        ]
        (folder / JOURNAL).write_bytes(b"".join(texts))

    return change


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    """End what takes longer than WAIT_S, and refuse what computes for more than LIMIT_S."""

    def late(*_: object) -> None:
        raise BaseException(f"took more than {WAIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(WAIT_S)
    began = time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - began < LIMIT_S


def require_sound(ended: Call, arguments: list[str]) -> None:
    assert ended.status in {GOOD, BAD, WRONG, UNCHECKED}, f"{arguments}: {ended.err}"
    assert ended.outside == [], arguments
    assert hidden(ended.out + ended.err) == set(), arguments
    if ended.status == WRONG:
        assert ended.err.startswith("bench: ") and ended.err.count("\n") == 1, ended.err


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("kind", ["files", "values"])
def test_no_mutation_of_a_committed_run_fails(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = tmp_path / "template"
    for copy in ("run", "other"):
        shutil.copytree(ROOT / "results" / name, template / copy)
    (tmp_path / "outside").write_text("mine")
    monkeypatch.setattr(figures, "draw", lambda *_: [])
    monkeypatch.setattr(canvas, "save", lambda figure, stem, words, source="": stem)
    monkeypatch.setattr("sys.dont_write_bytecode", True)
    strategy = of_files() if kind == "files" else of_values()

    @FORM.examples(6, 10_000 // 6 + 1)
    @given(change=strategy, arguments=st.sampled_from(READERS))
    def mutate(change: Change, arguments: list[str]) -> None:
        count(ROW)
        with in_time():
            ended = call(
                arguments,
                tmp_path / "place",
                template,
                change=lambda folder: change(folder / "run"),
            )
        require_sound(ended, arguments)

    with limited(2 * 2**30):
        mutate()
    assert (tmp_path / "outside").read_text() == "mine"
    assert COUNTS[ROW]
