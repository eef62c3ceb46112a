"""How a trial ended, by results of ranks, exit codes, signals and the kernel's counters, not logs.

A SIGKILL is attributed to the kernel if its counter of out-of-memory kills went up meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from typing_extensions import TypedDict

from bench import validation
from bench.files import end_of, portable
from bench.formatting import plain
from bench.plan.cell import Status
from bench.validation import Amount

RESULT_BYTES = 256 * 2**20
"""Size limit of a rank's result."""
LAST_LINES, LAST_BYTES = 20, 16_000
"""How much of a rank's log is kept with the trial if the rank reported nothing."""
MODULES = "Extension modules:"
"""Prefix of a long line of faulthandler's that is of no use."""
FAILURES = (Status.OOM, Status.UNSUPPORTED, Status.CRASHED)
"""Statuses that a failed rank may report, by precedence."""
RankJson = dict[str, Any]
"""What a rank wrote: a ``RankFailure``, or after a success what its task says."""


class RankFailure(TypedDict):
    """What a failed rank writes (``bench.launch.rank.failure``)."""

    status: Literal[Status.OOM, Status.UNSUPPORTED, Status.CRASHED]
    reason: str
    traceback: str
    time: Amount


@dataclass(kw_only=True)
class Outcome:
    """How a trial ended."""

    status: Status
    reason: str
    ranks: list[RankJson]
    """The result of each rank, rank 0 first; empty unless all of them succeeded."""
    wall_s: float
    traceback: str = ""
    last_lines: list[str] = field(default_factory=list)
    """Last lines of the traceback, or of the log of a rank that reported nothing."""
    cold: bool | None = None
    """Whether the ranks started in new interpreters instead of the fork server; None if no rank was
    started."""
    recordings: list[dict[str, Any] | None] = field(default_factory=list)
    """What telemetry recorded of each node's GPUs."""

    def limited_by(self, option: str) -> Outcome:
        """The same; if the trial took too long, the reason names the option that gives it more."""
        if self.status is Status.TIMEOUT:
            self.reason += f"; raise {option}"
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The end of a trial as seen from outside its ranks."""

    failure: str = ""
    """One line; empty after a success."""
    rank: int | None = None
    """The rank that failed first, if any."""
    signal: int = 0
    """The signal that ended it, if any."""
    status: Status | None = None
    """Status of a trial that the bench ended."""
    dump: bool = False
    """Whether the ranks dump their stacks before they are ended."""
    void: bool = False
    """Whether to ignore the results and reports of the ranks."""
    killed_for_memory: str = ""
    """The counter of out-of-memory kills that went up meanwhile, in words; empty if none did."""
    last_lines: Sequence[str] = ()
    """The last lines that this rank wrote to its standard error."""


def written(folder: Path, ranks: Iterable[int]) -> set[int]:
    """Those of the ranks that have written a result or a failure."""
    return {rank for rank in ranks if (folder / f"rank{rank}.json").exists()}


def judge(
    results: Sequence[RankJson | None],
    ending: Ending,
    wall_s: float,
    names: Sequence[str] = (),
) -> Outcome:
    """Judge a trial by what its ranks wrote, rank 0 first.

    ``ending`` counts only for ranks that wrote nothing. A rank that crashes after it wrote its
    result (gloo is known to abort at exit) does no harm. ``names`` are those of the ranks, if they
    are on several nodes.
    """
    if ending.void:
        results = [None] * len(results)
    done: list[RankJson] = []
    failed: dict[int, RankJson] = {}
    for rank, result in enumerate(results):
        if result is not None and result["status"] == Status.OK:
            done.append(result)
        elif result is not None:
            failed[rank] = result
    if len(done) == len(results):
        return Outcome(status=Status.OK, reason="", ranks=done, wall_s=wall_s)
    silent = ending.rank is not None and ending.rank < len(results) and results[ending.rank] is None
    if failed and not silent:
        return _of_failed(failed, wall_s, names)
    # A rank that died silently before causes the failures of the others.
    status, reason = Status.CRASHED, "a rank ended without a result"
    if ending.failure:
        reason = ending.failure
    if ending.status is not None:
        status = ending.status
    if ending.signal == signal.SIGKILL and ending.killed_for_memory:
        status = Status.OOM
        reason += f", by the kernel for want of memory ({ending.killed_for_memory})"
    last_lines = [portable(line) for line in ending.last_lines]
    return Outcome(status=status, reason=reason, ranks=[], wall_s=wall_s, last_lines=last_lines)


def _of_failed(failed: Mapping[int, RankJson], wall_s: float, names: Sequence[str]) -> Outcome:
    """The outcome by the failures that ranks wrote: the gravest, and of several the first."""

    def precedence(rank: int) -> tuple[int, float]:
        failure = failed[rank]
        return FAILURES.index(Status(failure["status"])), failure["time"]

    rank = min(failed, key=precedence)
    name = f"rank {rank}"
    if names:
        name = names[rank]
    failure = failed[rank]
    traceback = portable(failure["traceback"])
    return Outcome(
        status=Status(failure["status"]),
        reason=f"{name}: {plain(portable(failure['reason']))}",
        ranks=[],
        wall_s=wall_s,
        traceback=traceback,
        last_lines=traceback.strip().splitlines()[-LAST_LINES:],
    )


def read(path: Path) -> RankJson | None:
    """A rank's result; None if there is none. A damaged one counts as a crash of that rank."""
    try:
        if path.stat().st_size > RESULT_BYTES:
            return _damaged(f"it has more than {RESULT_BYTES // 2**20} MiB")
        value = json.loads(path.read_bytes().decode())
        if not (isinstance(value, dict) and value.get("status") == Status.OK):
            validation.read(RankFailure, value)
        return dict(value)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        return _damaged(str(error))


def _damaged(why: str) -> RankJson:
    return crash(f"its result is damaged: {' '.join(why.split())[:200]}")


def crash(reason: str) -> RankJson:
    """The failure of a rank that has not told it itself."""
    return {"status": Status.CRASHED, "reason": reason, "traceback": "", "time": math.inf}


def last_lines(folder: Path, local_rank: int) -> list[str]:
    """The last LAST_LINES lines of a rank's standard error; it counts from 0 on its node."""
    for path in folder.glob(f"*/attempt_*/{local_rank}/stderr.log"):
        with contextlib.suppress(OSError):
            told = []
            for line in end_of(path, LAST_BYTES).decode(errors="replace").strip().splitlines():
                if line and not line.startswith(MODULES):
                    told.append(line)
            return told[-LAST_LINES:]
    return []


CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
MACHINE = "the machine"


def counters() -> dict[str, int]:
    """Out-of-memory kills in this process's control groups (version 2 or 1).

    On the machine if none can be read.
    """
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
    if not found:
        count = _count(PROC / "vmstat")
        if count is not None:
            found[MACHINE] = count
    return found


def moved(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """The first counter that went up, in words; empty if none did."""
    for name, count in after.items():
        if count > before.get(name, count):
            return f"oom_kill of {name} went from {before[name]} to {count}"
    return ""


def _count(file: Path) -> int | None:
    """The value of ``oom_kill`` in a file of names and values."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        match line.split():
            case ["oom_kill", number]:
                return int(number)
    return None
