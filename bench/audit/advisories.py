"""Versions of frameworks known to accumulate otherwise than they say, each with a reproducer.

``advisories.toml`` has them. Packages and settings are compared with it by ``matching``, which
needs no framework. docs/known-bad.md is written from it.
"""

from __future__ import annotations

import datetime
import functools
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bench.errors import InputError
from bench.findings import Level
from bench.validation import read

FILE = Path(__file__).with_name("advisories.toml")
PAGE = "docs/known-bad.md"
AUTO_VALUE = "auto"
"""What a framework replaces by a value of its own."""
SEPARATOR = "."
"""Between the keys of a fact, such as ``deepspeed.zero_optimization.stage``."""


def _specifier(text: str) -> str:
    try:
        SpecifierSet(text)
    except InvalidSpecifier:
        raise ValueError(f"'{text}' is no range of versions, such as '>=0.15.2,<0.19.0'") from None
    return text


Versions = Annotated[str, AfterValidator(_specifier)]
"""A range of versions as PEP 440 has it; empty for all."""


class Wanted(BaseModel):
    """What the value of a fact must be; one of the ways is enough."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    values: tuple[str | int | float | bool, ...] = ()
    least: float | None = None
    """The value may be a number of at least this."""
    unset: bool = False
    """The value may be missing, or null."""
    present: bool = False
    """The value may be any but null, false and 'none'."""

    def holds(self, value: object) -> bool:
        """Whether a value, None where there is none, is wanted."""
        if value is None:
            return self.unset
        if self.present and value is not False and value != "none":
            return True
        if self.least is not None and isinstance(value, (int, float)) and value >= self.least:
            return True
        return any(type(value) is type(wanted) and value == wanted for wanted in self.values)


class Measured(BaseModel):
    """Versions in which the reproducer gave the same result."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    versions: tuple[str, ...] = Field(min_length=1)
    result: str
    """The weight of each micro-batch, or what else the reproducer prints."""
    date: datetime.date


class Advisory(BaseModel):
    """One defect of one package."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    id: str = Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    title: str
    """What goes wrong, in a sentence without a full stop."""
    package: str
    affected: Versions
    beside: dict[str, Versions] = {}
    """Other packages that must be installed too, and their versions."""
    level: Level
    """``error`` if the update is silently wrong, ``warning`` if a program is stopped or
    misinformed, else ``note``."""
    condition: dict[str, Wanted]
    """Facts of a training, all of which must be as they are wanted; see ``facts_of``."""
    effect: str
    """What is computed instead of what, for the settings of the reproducer."""
    right: str
    """What the reproducer would print without the defect."""
    bad: tuple[Measured, ...] = Field(min_length=1)
    """Affected versions that were measured."""
    good: tuple[Measured, ...] = ()
    """Others that were measured."""
    reproducer: str = Field(pattern=r"^studies/known_bad/\w+\.py$")
    case: str
    """Which of the reproducer's cases shows it."""
    ranks: int = Field(default=1, ge=1)
    """With which it is started."""
    cause: str
    """File and function of the package, or the change that brought it."""
    issue: str = ""
    """Address of the report; empty if none was found."""
    fix: str = ""
    """Address of the change that mends it; empty if there is none."""
    fixed_in: str = ""
    """First version without it; empty if the newest that was measured has it."""
    remedy: str
    """What a user can do."""

    @model_validator(mode="after")
    def _agrees(self) -> Advisory:
        affected = self.affected
        outside = [found for found in _versions(self.bad) if not _within(found, affected)]
        inside = [found for found in _versions(self.good) if _within(found, affected)]
        if outside:
            raise ValueError(f"{self.id}: {', '.join(outside)} are bad, but not in '{affected}'")
        if inside:
            raise ValueError(f"{self.id}: {', '.join(inside)} are good, but in '{affected}'")
        if self.fixed_in and _within(self.fixed_in, self.affected):
            raise ValueError(
                f"{self.id}: fixed_in is {self.fixed_in}, but that is in '{self.affected}'"
            )
        return self

    @property
    def link(self) -> str:
        """Its section of the page."""
        return f"{PAGE}#{self.id}"

    @property
    def end(self) -> str:
        """Which version has it no more, in words."""
        if not self.fixed_in:
            return "in the newest version measured"
        return f"fixed in {self.fixed_in}"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    advisory: tuple[Advisory, ...]

    @model_validator(mode="after")
    def _names(self) -> _File:
        ids = Counter(advisory.id for advisory in self.advisory)
        for name, count in sorted(ids.items()):
            if count > 1:
                raise ValueError(f"{name} stands there {count} times")
        return self


@dataclass(frozen=True)
class TrainingFacts:
    """What is known of a training."""

    values: Mapping[str, object] = field(default_factory=dict)
    """Values by dotted key."""
    complete: frozenset[str] = frozenset()
    """First parts of keys of which everything is known: what ``values`` lacks of them is not
    set."""

    def knows(self, key: str) -> bool:
        """Whether it is known what a key is set to, or that it is not set."""
        if key in self.values:
            return self.values[key] != AUTO_VALUE
        return key.split(SEPARATOR, maxsplit=1)[0] in self.complete


UNKNOWN_TRAINING = TrainingFacts()


@dataclass(frozen=True)
class KnownBad:
    """An advisory that holds for installed packages, and for a training as far as it is known."""

    advisory: Advisory
    version: str
    """Of the advisory's package."""
    unknown: tuple[str, ...]
    """Keys of conditions of which nothing is known; without any the advisory applies."""

    @property
    def is_certain(self) -> bool:
        return not self.unknown

    @property
    def sentence(self) -> str:
        """The defect in one line, for a finding; begins with the version of its package."""
        advisory = self.advisory
        return f"{self.version}: {advisory.title} ({advisory.end}; {advisory.link})"


def facts_of(
    configs: Mapping[str, Mapping[str, object]] | None = None, /, **values: object
) -> TrainingFacts:
    """Facts from whole configs by name, such as ``{"deepspeed": {...}}``, and single ``values``.

    Single values that are None are unknown, and so is 'auto' in a config. Advisories ask for:
    ``framework``, which owns the loop (deepspeed, lightning, accelerate, transformers, trl or
    torch); ``strategy`` (single, ddp, fsdp, fsdp2 or deepspeed); ``accumulate`` (N);
    ``world_size``; ``uneven``, whether an epoch ends with an incomplete window; keys of the configs
    ``deepspeed``, ``transformers`` and ``trl``; and, under ``loop``, what only the program itself
    says.
    """
    found = {key: value for key, value in values.items() if value is not None}
    if configs is None:
        return TrainingFacts(found)
    for name, config in configs.items():
        found.update(_flat(name, config))
    return TrainingFacts(found, frozenset(configs))


def _flat(prefix: str, config: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        name = f"{prefix}{SEPARATOR}{key}"
        if isinstance(value, Mapping):
            yield from _flat(name, value)
        else:
            yield name, value


@functools.cache
def load(path: Path = FILE) -> tuple[Advisory, ...]:
    """All advisories. Raises InputError naming file, key and value of what is wrong."""
    try:
        stored = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{path.name}: {error}") from error
    return read(_File, stored, f"{path.name}: ").advisory


def matching(
    versions: Mapping[str, str], facts: TrainingFacts = UNKNOWN_TRAINING
) -> list[KnownBad]:
    """The advisories that hold for ``versions`` by package, and that nothing known excludes."""
    installed = {str(canonicalize_name(name)): version for name, version in versions.items()}
    found = []
    for advisory in load():
        unknown = _unknown(advisory, facts)
        if unknown is not None and _is_installed(advisory, installed):
            found.append(KnownBad(advisory, installed[advisory.package], unknown))
    return found


def _is_installed(advisory: Advisory, installed: Mapping[str, str]) -> bool:
    """Whether packages have versions that the advisory is about."""
    needed = {advisory.package: advisory.affected, **advisory.beside}
    for name, specifier in needed.items():
        if name not in installed or not _within(installed[name], specifier):
            return False
    return True


def _unknown(advisory: Advisory, facts: TrainingFacts) -> tuple[str, ...] | None:
    """Keys of its conditions of which nothing is known; None if one is known not to hold."""
    unknown = []
    for key, wanted in advisory.condition.items():
        if not facts.knows(key):
            unknown.append(key)
        elif not wanted.holds(facts.values.get(key)):
            return None
    return tuple(unknown)


def _versions(measured: Iterable[Measured]) -> Iterator[str]:
    return chain.from_iterable(row.versions for row in measured)


def _within(version: str, specifier: str) -> bool:
    """Whether a version, without its local part, is in a range.

    False for one that cannot be compared.
    """
    try:
        public = Version(version).public
    except InvalidVersion:
        return False
    return SpecifierSet(specifier).contains(public, prereleases=True)
