"""Keys that a framework does not know. Most frameworks stop there, but DeepSpeed silently ignores them."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.rules import ERROR, INFO, WARNING, Found, rule, says

SIMILAR = 0.9
"""Similarity (``difflib``) from which on an unknown key is taken for a misspelt one."""
SOURCE = "keys that the framework knows: bench/audit/lint/keys.toml"


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


@rule("KEY01", "deepspeed: {bf16: {enable: true}}")
@says(ERROR, "unknown key", SOURCE, stops=True)
@rule("KEY02", "deepspeed: {gradient_accumulation_step: 4}")
@says(WARNING, "unknown key that is ignored", SOURCE)
def _unknown(keys: Keys) -> Iterator[Found]:
    names = known_keys()[keys.table]
    for key in keys.part.value if isinstance(keys.part.value, dict) else ():
        near = "".join(difflib.get_close_matches(key, names, n=1, cutoff=SIMILAR))
        if key in names or (keys.shared and not near):
            continue
        place, fix = keys.part.under(key), f"write {near}" if near else "remove it"
        if keys.refused:
            yield Found(place, f"{keys.reader}: {key} is unknown", fix, code="KEY01")
        else:
            does = "refuses or ignores" if keys.shared else "ignores"
            what = f"{keys.reader} {does} {key}, which it does not know"
            same = f"rename {key} to anything: the same happens"
            yield Found(place, what, fix, same, WARNING if near else INFO, code="KEY02")
