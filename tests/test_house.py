"""Names that stand for one thing. ``nox -s lint`` limits the complexity of functions, and what may import what."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from pathlib import Path

from tests.conftest import ROOT

SAY_NOTHING = {"one", "own", "said", "due"}


@functools.cache
def modules() -> dict[Path, ast.Module]:
    """All modules of the package, parsed."""
    paths = sorted((ROOT / "bench").rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def repeated(names: list[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def test_no_two_modules_share_a_name() -> None:
    assert repeated([path.stem for path in modules() if not path.stem.startswith("__")]) == []


def test_no_two_public_classes_share_a_name() -> None:
    classes = [node.name for tree in modules().values() for node in tree.body if isinstance(node, ast.ClassDef)]
    assert repeated([name for name in classes if not name.startswith("_")]) == []


def test_names_say_what_they_name() -> None:
    found = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            name = getattr(node, "id", getattr(node, "arg", None))
            if name in SAY_NOTHING:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert found == []
