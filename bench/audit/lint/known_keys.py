"""Keys that a framework does not know.

Most frameworks stop there, but DeepSpeed silently ignores them.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bench.audit.lint.config_file import CONFIGS, ConfigPart
from bench.audit.lint.rules import STOPS, Found, rule, says
from bench.findings import Level

SIMILAR = 0.9
"""Similarity (``difflib``) from which on an unknown key is taken for a misspelt one."""
REPEATED = "deepspeed/runtime/config_utils.py dict_raise_error_on_duplicate_keys"
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
    ignored: frozenset[str] = frozenset()
    """Keys that are no mistakes in the versions used."""


@rule(Keys, "KEY01", "deepspeed: {bf16: {enable: true}}")
@says(Level.ERROR, "unknown key", SOURCE, stops=True)
@rule(Keys, "KEY02", "deepspeed: {gradient_accumulation_step: 4}")
@says(Level.WARNING, "unknown key that is ignored", SOURCE)
def _unknown(keys: Keys) -> Iterator[Found]:
    names = known_keys()[keys.table]
    for key in keys.part.names_here:
        if key in names or key in keys.ignored:
            continue
        near = "".join(difflib.get_close_matches(key, names, n=1, cutoff=SIMILAR))
        if keys.shared and (not near or near in keys.part.names_here or near[-1].isdigit()):
            continue  # adam_betas is no misspelt adam_beta1
        if keys.shared and near and {*near.split("_")} < {*key.split("_")}:
            continue  # one word more is a key of the program's own, and no slip
        if keys.shared and _is_option(keys.part) and _num_that_begin_with(key, names) == 1:
            continue  # argparse takes --max_step for --max_steps
        place = keys.part.under(key)
        fix = "remove it"
        if near:
            fix = f"write {near}"
        if keys.refused:
            yield Found(place, f"{keys.reader}: {key} is unknown", fix, code="KEY01")
            continue
        does = "ignores"
        if keys.shared:
            does = "refuses or ignores"
        what = f"{keys.reader} {does} {key}, which it does not know"
        same = f"rename {key} to anything: the same happens"
        level = Level.NOTE
        if near:
            level = Level.WARNING
        yield Found(place, what, fix, same, level, code="KEY02")


def _is_option(part: ConfigPart) -> bool:
    """Whether keys are options of a command in a script."""
    return Path(part.file).suffix[1:].lower() not in CONFIGS


def _num_that_begin_with(key: str, names: Iterable[str]) -> int:
    return sum(name.startswith(key) for name in names)


@dataclass(frozen=True)
class RepeatedKey:
    """A key that a mapping has twice."""

    part: ConfigPart
    first_line: int
    is_same: bool
    """Whether both values are the same."""
    is_refused: bool | None
    """Whether DeepSpeed itself reads the file, which refuses it; None if it may.

    Other readers take the last value, among them the programs that hand DeepSpeed what they read.
    """


@rule(
    RepeatedKey, "KEY03", "hugging_face: {}, text: {hugging_face: 'gradient_accumulation_steps: 8'}"
)
@says(Level.WARNING, "key given twice", f"yaml/constructor.py construct_mapping; {REPEATED}")
def _repeated(key: RepeatedKey) -> Iterator[Found]:
    place, first = key.part, key.first_line
    if key.is_refused:
        what = f"DeepSpeed raises ValueError: {place.name} is there twice, first in line {first}"
        yield Found(place, what, "remove one of the two", f"{STOPS}: {REPEATED}", Level.ERROR)
        return
    what = f"line {place.line} is what counts: {place.name} of line {first} is ignored"
    if key.is_refused is None:
        what += "; where DeepSpeed reads the file itself, it raises ValueError"
    level = Level.WARNING
    if key.is_same:
        level = Level.NOTE
    proof = "read the file with PyYAML or json.load: the last value of a key is kept"
    yield Found(place, what, "remove one of the two", proof, level)


def repeated_keys(part: ConfigPart, *, is_refused: bool | None = False) -> Iterator[RepeatedKey]:
    """The keys that a part of a file gives twice."""
    for each in part.repeated:
        if each.path[: len(part.path)] == part.path:
            place = ConfigPart(part.file, {}, {each.path: each.line}, each.path)
            yield RepeatedKey(place, each.first_line, each.is_same, is_refused)
