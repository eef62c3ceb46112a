"""How a trial ended: told by what its ranks wrote, by exit codes and signals, and by the kernel; never by a log.

Evidence that a SIGKILL was the kernel's doing is how often it has ended a process for want of memory.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.plan.cell import Status

RESULT_BYTES = 256 * 2**20
"""The largest result of a rank that is read."""
LAST_LINES, LAST_BYTES = 20, 16_000
"""Of the log of a rank that left no word, what is kept with the trial."""
MODULES = "Extension modules:"
"""Beginning of a line of faulthandler's that is long and says nothing."""
WORDS = (Status.OOM, Status.UNSUPPORTED, Status.CRASHED)
"""Statuses of a rank that says why it failed (``bench.launch.rank.failure``); the gravest first."""


@dataclass(kw_only=True)
class Outcome:
    """How a trial ended."""

    status: Status
    reason: str
    ranks: list[dict[str, Any]]
    """What each rank wrote, rank 0 first; empty unless all of them succeeded."""
    wall_s: float
    traceback: str = ""
    last_lines: list[str] = field(default_factory=list)
    """Of the traceback, or of the log of a rank that left no word."""
    cold: bool | None = None
    """Whether its ranks started from new interpreters, not from the fork server; None if none was started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """What was seen of the end from outside."""

    failure: str = ""
    """In one line; empty if all ended well."""
    rank: int | None = None
    """Which rank failed first, if one did."""
    signal: int = 0
    """Which signal ended it, if one did."""
    status: Status | None = None
    """For a trial that was ended from outside: what it is to be called."""
    void: bool = False
    """Whether what the ranks handed over, or said, does not count."""
    killed_for_memory: str = ""
    """Where the kernel ended a process for want of memory in the meantime, in words."""


def written(folder: Path, world_size: int) -> set[int]:
    """The ranks that have handed over a result, or said why they failed."""
    return {rank for rank in range(world_size) if (folder / f"rank{rank}.json").exists()}


def judge(
    folder: Path, world_size: int, ending: Ending, wall_s: float, heard: Collection[int] | None = None
) -> Outcome:
    """Judge a trial by what its ranks wrote; what was seen from outside counts only for ranks that wrote nothing.

    A rank that crashes after it handed over its result (gloo is known to abort at exit) spoils nothing. ``heard`` are
    the ranks that had written when the trial was ended from outside: what others say later, that did.
    """
    if ending.void:
        heard = ()
    heard = range(world_size) if heard is None else heard
    results = [read(folder / f"rank{rank}.json") if rank in heard else None for rank in range(world_size)]
    done = [result for result in results if result is not None and result["status"] == Status.OK]
    if len(done) == world_size:
        return Outcome(status=Status.OK, reason="", ranks=done, wall_s=wall_s)
    failed = [(rank, result) for rank, result in enumerate(results) if result is not None and result not in done]
    silent = ending.rank is not None and ending.rank < world_size and results[ending.rank] is None
    if failed and not silent:  # a rank that died without a word, seen first, is the cause of all that others tell
        rank, result = min(failed, key=lambda item: (WORDS.index(Status(item[1]["status"])), item[1]["time"]))
        traceback = result["traceback"]
        return Outcome(
            status=Status(result["status"]),
            reason=f"rank {rank}: {result['reason']}",
            ranks=[],
            wall_s=wall_s,
            traceback=traceback,
            last_lines=traceback.strip().splitlines()[-LAST_LINES:],
        )
    status, reason = ending.status or Status.CRASHED, ending.failure or "a rank ended without a result"
    if ending.signal == signal.SIGKILL and ending.killed_for_memory:
        status, reason = Status.OOM, f"{reason}, by the kernel for want of memory ({ending.killed_for_memory})"
    return Outcome(
        status=status,
        reason=reason,
        ranks=[],
        wall_s=wall_s,
        last_lines=[] if ending.rank is None else _last_lines(folder, ending.rank),
    )


def read(path: Path) -> dict[str, Any] | None:
    """A rank's result; None if it left none. A damaged one is a crash of that rank."""
    try:
        if path.stat().st_size > RESULT_BYTES:
            return _damaged(f"it has more than {RESULT_BYTES // 2**20} MiB")
        value = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return _damaged(str(error))
    return value if isinstance(value, dict) and _is_result(value) else _damaged("it is not what a rank writes")


def _is_result(value: Mapping[str, Any]) -> bool:
    """Whether a rank's result says how it went; what a sound one holds is the task's to check."""
    status = value.get("status")
    if status == Status.OK:
        return True
    time = value.get("time")
    return (
        isinstance(status, str)
        and status in WORDS
        and isinstance(value.get("reason"), str)
        and isinstance(value.get("traceback"), str)
        and isinstance(time, int | float)
        and not math.isnan(time)
    )


def _damaged(why: str) -> dict[str, Any]:
    reason = f"its result is damaged: {' '.join(why.split())[:200]}"
    return {"status": Status.CRASHED, "reason": reason, "traceback": "", "time": math.inf}


def _last_lines(folder: Path, rank: int) -> list[str]:
    """The last lines of a rank's standard error."""
    for path in folder.glob(f"*/attempt_*/{rank}/stderr.log"):
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LAST_BYTES))
                lines = file.read().decode(errors="replace").strip().splitlines()
                return [line for line in lines if line and not line.startswith(MODULES)][-LAST_LINES:]
        except OSError:
            continue
    return []


CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
MACHINE = "the machine"


def counters() -> dict[str, int]:
    """The counters of this process's control groups (version 2 and 1), or of the machine if those cannot be read."""
    try:
        lines = (PROC / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    found = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            file = CGROUPS / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            file = CGROUPS / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        count = _count(file)
        if count is not None:
            found[f"control group {path}"] = count
    count = None if found else _count(PROC / "vmstat")
    return found if count is None else {MACHINE: count}


def moved(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Where the kernel killed in between, in words; empty if nowhere."""
    for name, count in after.items():
        if count > before.get(name, count):
            return f"oom_kill of {name} went from {before[name]} to {count}"
    return ""


def _count(file: Path) -> int | None:
    """The value of ``oom_kill`` in a file of names and values."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((int(line[1]) for line in lines if len(line) == 2 and line[0] == "oom_kill"), None)
