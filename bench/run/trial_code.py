"""The modules that a trial depends on, found by their imports: a change of them ends a run.

They are what the runner imports, and what it names for other processes
(``"bench.measure.trial:work"``). What serves everybody (files, words of messages) is not among
them: it reads, writes and words, but neither trains nor measures.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ENTRIES = ("bench.run.runner", "bench.launch.follower")
"""What runs the trials of a run, and what other nodes run of them."""
STAGES = ("plan", "workload", "backends", "measure", "launch", "run")
"""Folders of what trains and measures."""
NAMED = re.compile(r"(bench(?:\.\w+)+)(?::\w+)?")
"""A module, or a function of one, as a string."""


@cache
def modules(package: Path = PACKAGE) -> tuple[Path, ...]:
    """The files of these modules in the folder of the package, sorted, with all backends."""
    found: dict[str, Path] = {}
    backends = [_name(path, package) for path in (package / "backends").glob("*.py")]
    waiting = [*ENTRIES, *backends]
    while waiting:
        name = waiting.pop()
        path = _path(name, package)
        if name in found or path is None:
            continue
        found[name] = path
        waiting.extend(_mentioned(ast.parse(path.read_bytes())))
    return tuple(sorted(found.values()))


def _name(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def _path(name: str, package: Path) -> Path | None:
    """The file of a module of STAGES; None for every other."""
    first, *rest = name.split(".")
    if first != package.name or not rest or rest[0] not in STAGES:
        return None
    place = package.joinpath(*rest)
    if place.is_dir():
        return place / "__init__.py"
    file = place.with_suffix(".py")
    return file if file.exists() else None


def _mentioned(tree: ast.AST) -> Iterator[str]:
    """Names that may be modules: those that are imported when it runs, and those in strings."""
    for node in ast.iter_child_nodes(tree):
        if _is_for_types(node):
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            match = NAMED.fullmatch(node.value)
            if match is not None:
                yield match[1]
        yield from _mentioned(node)


def _is_for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )
