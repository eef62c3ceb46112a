"""What the semantics suite found where an epoch ends within a window, which no timed trial shows.

The findings are bundled with the package: ``python -m bench.audit.bundle`` writes them from results/semantics.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("epoch_end.json")
PAGE = Path(__file__).parents[2] / "docs" / "semantics.md"
"""Has all scenarios of the suite; in a checkout."""
HEADER = ("backend", "what becomes of the incomplete window", "updates due", "taken", "reported")
COUNTERS = ("trainer.global_step", "engine.global_steps")
"""What a framework reports as its number of steps: the first that it has."""


@cache
def bundled() -> Mapping[str, Any]:
    """``packages`` that were measured, ``scenario`` in words, ``due`` updates, and by backend what was found."""
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def rows_of(backends: list[str]) -> list[tuple[str, ...]]:
    """What was found of these backends, under HEADER; those that were not measured are left out."""
    found: list[tuple[str, ...]] = []
    known = bundled()["backends"]
    for name in backends:
        if name in known:
            one = known[name]
            reported = next((str(one["reported"][key]) for key in COUNTERS if key in one["reported"]), "-")
            found.append((name, str(one["finding"]), str(bundled()["due"]), str(one["taken"]), reported))
    return found


def about(packages: Mapping[str, str]) -> str:
    """What was measured, with which versions, and whether a run with these packages has others."""
    theirs: Mapping[str, str] = bundled()["packages"]
    said = ", ".join(f"{name} {version}" for name, version in theirs.items())
    other = [
        f"{name} {version}"
        for name, version in packages.items()
        if name in theirs and _release(version) != _release(theirs[name])
    ]
    more = f"; this run has {', '.join(other)}, which may differ" if other else ""
    return f"{bundled()['scenario']}; measured by the semantics suite with {said}{more}"


def _release(version: str) -> str:
    """Without what it was built for: 2.13.0 of 2.13.0+cpu."""
    return version.partition("+")[0]
