"""What must not change while the package is rearranged. ``python -m tests.house`` writes it anew: then read the diff.

``cells.json`` holds the ids of all cells of the committed runs and of the matrices for the CPU, ``check/`` what the
command of that name says of each committed run. ``cited/`` is never written again: it holds citations of these runs in
all formats as they were once printed, single cells and ratios, some of them not comparable.
"""

from __future__ import annotations

import ast
import functools
import json
import subprocess
from collections import Counter
from pathlib import Path

from bench.backends.base import registry
from bench.judge.integrity import check
from bench.plan import matrix as matrix_file
from bench.plan.cell import Device
from bench.plan.expand import expand
from bench.run.journal import JOURNAL
from tests.conftest import ROOT

FOLDER = Path(__file__).parent / "house"
CELLS = FOLDER / "cells.json"
COMMITTED = subprocess.run(
    ["git", "ls-files", f"results/**/{JOURNAL}"], cwd=ROOT, capture_output=True, text=True, check=True
).stdout.splitlines()
RUNS = sorted(str(Path(path).parent) for path in COMMITTED)
"""Runs of the reader's own beside them are not looked at."""


def cells() -> dict[str, list[str]]:
    """Ids of cells, sorted, by run or matrix."""
    found = {}
    for run in RUNS:
        lines = (ROOT / run / JOURNAL).read_text(encoding="utf-8").splitlines()
        found[run] = sorted({json.loads(line)["cell_id"] for line in lines})
    backends = registry()
    for name in matrix_file.names():
        chosen = matrix_file.load(name)
        if chosen["device"] == Device.CPU:
            found[name] = sorted(cell.cell_id for cell in expand(chosen, backends, 0))
    return found


def checked(run: str) -> str:
    """What ``check`` says of a committed run; called in ROOT, as it names paths."""
    return "".join(f"{one.level}  {one.topic}  {one.text}\n" for one in check(Path(run)))


def check_file(run: str) -> Path:
    """Where it is kept what ``check`` says of a run."""
    return FOLDER / "check" / f"{run.removeprefix('results/').replace('/', '-')}.txt"


@functools.cache
def figures() -> dict[str, int]:
    """How large the package is: modules, lines, lines of the longest module, names that stand for more than one."""
    paths = sorted((ROOT / "bench").rglob("*.py"))
    lines = [len(path.read_text(encoding="utf-8").splitlines()) for path in paths]
    files = Counter(path.stem for path in paths if not path.stem.startswith("__"))
    classes = Counter(
        node.name
        for path in paths
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {
        "modules": len(paths),
        "lines": sum(lines),
        "longest module": max(lines),
        "names of several modules": sum(count > 1 for count in files.values()),
        "names of several classes": sum(count > 1 for count in classes.values()),
    }


if __name__ == "__main__":
    CELLS.write_text(json.dumps(cells(), indent=1) + "\n", encoding="utf-8")
    for run in RUNS:
        check_file(run).write_text(checked(run), encoding="utf-8")
    print(figures())
