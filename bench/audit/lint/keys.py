"""Keys that a framework does not know. Most frameworks stop there, but DeepSpeed silently ignores them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from bench.audit.lint import proof
from bench.audit.lint.rules import LintFinding, Severity
from bench.audit.lint.section import ConfigPart

SIMILAR = 0.9
"""Similarity (``difflib``) from which on an unknown key is taken for a misspelt one."""


@cache
def known() -> dict[str, list[str]]:
    """The keys of each part of a config, by the names that keys.toml gives to the parts."""
    return tomllib.loads((Path(__file__).parent / "keys.toml").read_text())


def refused(part: ConfigPart, table: str, error: str) -> Iterator[LintFinding]:
    """Unknown keys of a part with which the framework stops; ``error`` says how."""
    for place, near in _unknown(part, table):
        yield place.finding("KEY01", f"{error}: {place.path[-1]} is unknown", _fix(near), proof.stops(error))


def ignored(part: ConfigPart, table: str, reader: str) -> Iterator[LintFinding]:
    """Unknown keys of a part that its reader ignores: a misspelt key is a warning, another one an info."""
    for place, near in _unknown(part, table):
        yield place.finding(
            "KEY02",
            f"{reader} ignores {place.path[-1]}, which it does not know",
            _fix(near),
            f"rename the key to anything else: {reader} does the same",
            Severity.WARNING if near else Severity.INFO,
        )


def misspelt(part: ConfigPart, table: str, reader: str) -> Iterator[LintFinding]:
    """Misspelt keys of a part that may have the keys of other programs too."""
    for place, near in _unknown(part, table):
        if near:
            yield place.finding(
                "KEY02",
                f"{reader} does not know {place.path[-1]}: it is refused or ignored",
                _fix(near),
                f"rename the key to anything else: {reader} does the same",
                Severity.WARNING,
            )


def _fix(near: str) -> str:
    return f"write {near}" if near else "remove it"


def _unknown(part: ConfigPart, table: str) -> Iterator[tuple[ConfigPart, str]]:
    """Each unknown key of a mapping, and the known key that it resembles, or nothing."""
    names = known()[table]
    for key in part.value if isinstance(part.value, dict) else ():
        # Keys with a dot are not addressed by ConfigPart.at.
        if key not in names:
            near = difflib.get_close_matches(key, names, n=1, cutoff=SIMILAR)
            yield ConfigPart(part.document, (*part.path, key)), (near or [""])[0]
