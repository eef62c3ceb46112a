"""How often the kernel ended a process for want of memory: the evidence that a SIGKILL was its doing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
