"""Names that stand for one thing. ``nox -s lint`` limits the complexity of functions, and what may import what."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from bench.backends.base import Backend
from studies import results
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
    classes = [
        node.name
        for tree in modules().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]
    assert repeated([name for name in classes if not name.startswith("_")]) == []


def test_names_say_what_they_name() -> None:
    found = []
    for path, tree in modules().items():
        for node in ast.walk(tree):
            name = getattr(node, "id", getattr(node, "arg", None))
            if name in SAY_NOTHING:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert found == []


@functools.cache
def floors() -> dict[str, int]:
    """The floor of each part of the package, by the import contract; the lowest is 0."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (
        each for each in settings["tool"]["importlinter"]["contracts"] if each["type"] == "layers"
    )
    floors = {}
    for floor, layer in enumerate(reversed(contract["layers"])):
        for part in layer.split("|"):
            floors[part.strip()] = floor
    return floors


def named_parts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The line and the part of the package of each module of the bench that a string names; docstrings do not count."""
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ):
            for part in re.findall(r"\bbench\.(\w+)", node.value):
                if part in floors():
                    yield node.lineno, part


def test_no_string_names_a_module_above_the_floor_of_its_own() -> None:
    """Import-linter cannot see an import by name: what knows both ends is above them."""
    seen, above = set(), []
    for path, tree in modules().items():
        place = path.relative_to(ROOT / "bench")
        own = place.with_suffix("").parts[0]
        for line, part in named_parts(tree):
            seen.add((own, part))
            if part != own and own in floors() and floors()[part] >= floors()[own]:
                above.append(f"{place}:{line}: bench.{part}")
    assert above == []
    assert {("launch", "measure"), ("cli", "commands")} <= seen, (
        "these are names, too, and downwards"
    )


def test_a_backend_has_few_class_variables() -> None:
    """What one reader asks for is that reader's to know."""
    variables = [
        name for name, kind in Backend.__annotations__.items() if kind.startswith("ClassVar")
    ]
    assert "name" in variables and len(variables) <= 16


def test_the_source_distribution_has_all_that_is_committed() -> None:
    """Results are ignored by git and hatchling, but for those that are named."""
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]
    named = set(built["build"]["targets"]["sdist"]["artifacts"])
    committed = {results.RECORDS, *(path for row in results.ROWS for path in row.paths)}
    for path in committed:
        top, _, rest = path.partition("/")
        if top in ("results", "plots"):
            assert f"/{top}/{rest.split('/')[0]}" in named, path
