"""Two stored timings side by side. Machines are shared and noisy, so this is a table to look at and no verdict."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FOLDER = Path("results/overhead")
STATISTICS = ("median", "min")
"""That are shown: the least is what disturbances touch least."""
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


def last_committed(folder: Path = FOLDER) -> tuple[str, dict[str, Any]] | None:
    """Name and content of the newest timings in git, by name; None without one, or outside a checkout."""
    listed = _git("ls-tree", "--name-only", "HEAD", f"{folder.as_posix()}/")
    names = sorted(name for name in (listed or "").splitlines() if name.endswith(".json"))
    text = _git("show", f"HEAD:{names[-1]}") if names else None
    return None if text is None else (Path(names[-1]).stem, json.loads(text))


def _git(*arguments: str) -> str | None:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def table(then: Mapping[str, Any] | None, now: Mapping[str, Any], named: str = "then") -> list[str]:
    """Lines: each hot path then and now, and how many times as long it takes."""
    before = {one["fullname"]: one["stats"] for one in (then or {"benchmarks": []})["benchmarks"]}
    header = ["hot path"]
    for name in STATISTICS:
        header += [f"{name} {named}", f"{name} now", "now / then"]
    rows = [header]
    for one in now["benchmarks"]:
        old, row = before.pop(one["fullname"], None), [str(one["name"]).removeprefix("test_").replace("_", " ")]
        for name in STATISTICS:
            new = one["stats"][name]
            row += [
                "-" if old is None else _time(old[name]),
                _time(new),
                "-" if old is None else f"{new / old[name]:.2f}",
            ]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines += [f"gone since {named}: {name.rpartition('::')[2]}" for name in before]
    return lines + differences(then, now)


def differences(then: Mapping[str, Any] | None, now: Mapping[str, Any]) -> list[str]:
    """What makes the two hard to compare, and that they are no verdict."""
    if then is None:
        return [f"nothing to compare with: no timings are committed under {FOLDER}"]
    facts = ["cpu", "python_version", "system", "release"]
    unlike = [name for name in facts if then["machine_info"].get(name) != now["machine_info"].get(name)]
    words = (
        [f"DIFFERENT MACHINES OR SOFTWARE: {', '.join(unlike)}: the ratios say nothing of the code"] if unlike else []
    )
    return [*words, "two times, one process each, on a machine that others may have used: look, and measure again"]


def _time(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in UNITS if seconds >= size), UNITS[-1])
    return f"{seconds / size:.3g} {unit}"
