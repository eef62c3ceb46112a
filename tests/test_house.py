"""How large the package is: figures that may only fall, and names that stand for one thing."""

from __future__ import annotations

import ast
import functools
from collections import Counter

import pytest

from tests.conftest import ROOT

WINGS = ("audit", "forecast")
SAY_NOTHING = ("one", "own", "said", "due")
AT_MOST = {
    "modules": 200,
    "lines": 32372,
    "lines of the core": 23194,
    "longest module": 348,
    "lines of tests": 27805,
    "names of several modules": 0,
    "names of several classes": 0,
    "locals that say nothing": 0,
}
"""What there is today. Lower them when they fall; docs are not counted."""


@functools.cache
def figures() -> dict[str, int]:
    paths = sorted((ROOT / "bench").rglob("*.py"))
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    files = Counter(path.stem for path in paths if not path.stem.startswith("__"))
    classes = Counter(
        node.name
        for path in paths
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    core = [path for path in paths if path.relative_to(ROOT / "bench").parts[0] not in WINGS]
    tests = list((ROOT / "tests").rglob("*.py"))
    nodes = (node for path in (*paths, *tests) for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    return {
        "modules": len(paths),
        "lines": sum(lines.values()),
        "lines of the core": sum(lines[path] for path in core),
        "longest module": max(lines.values()),
        "lines of tests": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in tests),
        "names of several modules": sum(count > 1 for count in files.values()),
        "names of several classes": sum(count > 1 for count in classes.values()),
        "locals that say nothing": sum(getattr(node, "id", getattr(node, "arg", "")) in SAY_NOTHING for node in nodes),
    }


@pytest.mark.parametrize("name", AT_MOST)
def test_the_code_only_gets_smaller(name: str) -> None:
    assert figures()[name] <= AT_MOST[name]
