"""Keys that a framework does not know. Most frameworks stop there, but DeepSpeed silently ignores them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.audit.lint import proof
from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.rules import ERROR, INFO, WARNING, Found, rule

SIMILAR = 0.9
"""Similarity (``difflib``) from which on an unknown key is taken for a misspelt one."""
SOURCE = "bench/audit/lint/keys.toml"


@cache
def known_keys() -> dict[str, list[str]]:
    """The keys of each part of a config, by the names that keys.toml gives to the parts."""
    tables = tomllib.loads((Path(__file__).parent / "keys.toml").read_text())
    return {name: keys.split() for name, keys in tables.items()}


@dataclass(frozen=True)
class Keys:
    """The keys of a part of a config."""

    part: ConfigPart
    table: str
    """The list of keys.toml that has them."""
    reader: str
    """Who ignores an unknown key, or with what error it is refused."""
    refused: bool = False
    shared: bool = False
    """Whether other programs may have keys here, so that only a misspelt one is told."""

    def unknown(self) -> Iterator[tuple[ConfigPart, str, str]]:
        """Each unknown key, the known key that it resembles, if any, and what to do."""
        names = known_keys()[self.table]
        for key in self.part.value if isinstance(self.part.value, dict) else ():
            if key not in names:
                near = "".join(difflib.get_close_matches(key, names, n=1, cutoff=SIMILAR))
                yield self.part.under(key), near, f"write {near}" if near else "remove it"


@rule("KEY01", ERROR, "unknown key", SOURCE)
def _refused(keys: Keys) -> Iterator[Found]:
    for place, _, fix in keys.unknown() if keys.refused else ():
        yield Found(place, f"{keys.reader}: {place.name} is unknown", fix, proof.stops(keys.reader))


@rule("KEY02", WARNING, "unknown key that is ignored", SOURCE)
def _ignored(keys: Keys) -> Iterator[Found]:
    for place, near, fix in keys.unknown() if not keys.refused else ():
        what = f"{keys.reader} ignores {place.name}, which it does not know"
        if keys.shared:
            what = f"{keys.reader} does not know {place.name}: it is refused or ignored"
        if near or not keys.shared:
            same = f"rename the key to anything else: {keys.reader} does the same"
            yield Found(place, what, fix, same, WARNING if near else INFO)
