"""How a trial ended, from what its ranks wrote and what was seen from outside: damaged words included."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from bench.launch import outcome
from bench.launch.outcome import Ending, Outcome
from bench.plan.cell import Status

OK = {"status": "ok"}


def failure(
    status: str = "crashed", reason: str = "ValueError: no", time: float = 1.0
) -> dict[str, Any]:
    return {"status": status, "reason": reason, "traceback": "a\nb\nc\nd\ne\nf\n", "time": time}


def write(folder: Path, *results: Any) -> None:
    for rank, result in enumerate(results):
        if result is not None:
            text = result if isinstance(result, bytes) else json.dumps(result).encode()
            (folder / f"rank{rank}.json").write_bytes(text)


def judge(folder: Path, num_ranks: int, ending: Ending, wall_s: float) -> Outcome:
    """Judge what ranks wrote into a folder."""
    return outcome.judge(
        [outcome.read(folder / f"rank{rank}.json") for rank in range(num_ranks)], ending, wall_s
    )


@pytest.mark.parametrize(
    ("results", "status", "reason"),
    [
        ((OK, failure()), Status.CRASHED, "rank 1: ValueError: no"),
        ((failure(time=2.0), failure(reason="first")), Status.CRASHED, "rank 1: first"),
        ((failure(), failure("oom", "big", 9.0)), Status.OOM, "rank 1: big"),
        (
            (failure("unsupported", "cannot"), failure(time=0.5)),
            Status.UNSUPPORTED,
            "rank 0: cannot",
        ),
        ((failure(), None), Status.CRASHED, "rank 0: ValueError: no"),
    ],
)
def test_the_gravest_and_then_the_first_word_counts(
    tmp_path: Path, results: tuple[Any, ...], status: Status, reason: str
) -> None:
    write(tmp_path, *results)
    found = judge(tmp_path, 2, Ending(failure="rank 0 ended with exit code 1", rank=0), 1.0)
    assert (found.status, found.reason, found.ranks) == (status, reason, [])
    assert found.last_lines == ["a", "b", "c", "d", "e", "f"]


@pytest.mark.parametrize(
    "results", [(OK, OK), (OK, failure()), (failure("oom"), None), (None, None)]
)
def test_an_end_that_voids_what_was_handed_over(tmp_path: Path, results: tuple[Any, ...]) -> None:
    write(tmp_path, *results)
    ended = {"failure": "its ranks wrote too much", "status": Status.CRASHED}
    found = judge(tmp_path, 2, Ending(**ended, void=True), 1.0)
    assert (found.status, found.reason, found.ranks) == (
        Status.CRASHED,
        "its ranks wrote too much",
        [],
    )
    sound = judge(tmp_path, 2, Ending(**ended), 1.0)
    assert (sound.status is Status.OK) == (results == (OK, OK)), (
        "of others, what all handed over counts"
    )


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[]",
        b"{}",
        b"[" * 99_999,
        b'{"status":7}',
        b'{"status":"good"}',
        b'{"status":"timeout","reason":"","traceback":"","time":1}',
        b'{"status":"crashed","reason":1,"traceback":"","time":1}',
        b'{"status":"crashed","reason":"","traceback":"","time":NaN}',
    ],
    ids=lambda text: repr(text[:30]),
)
def test_a_damaged_result_is_a_crash_and_no_traceback(tmp_path: Path, damaged: bytes) -> None:
    write(tmp_path, OK, damaged)
    found = judge(tmp_path, 2, Ending(), 1.0)
    assert found.status is Status.CRASHED
    assert found.reason.startswith("rank 1: its result is damaged: ") and "\n" not in found.reason


@pytest.mark.parametrize("evidence", ["", "oom_kill of control group /a went from 0 to 1"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_sigkill_is_out_of_memory_only_if_the_kernel_counted_it(
    tmp_path: Path, evidence: str, number: signal.Signals
) -> None:
    ending = Ending(
        failure=f"rank 0 was ended by {number.name}",
        rank=0,
        signal=number,
        killed_for_memory=evidence,
    )
    found = judge(tmp_path, 1, ending, 1.0)
    if evidence and number == signal.SIGKILL:
        assert found.status is Status.OOM
        assert found.reason.startswith("rank 0 was ended by SIGKILL, ")
        assert found.reason.endswith(f" ({evidence})")
    else:
        assert (found.status, found.reason) == (
            Status.CRASHED,
            f"rank 0 was ended by {number.name}",
        )
