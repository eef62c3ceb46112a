"""What holds in some versions of a framework only.

Defects are in ``advisories.toml``, all else is in ``versions.toml``.
"""

from __future__ import annotations

import importlib.metadata
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import packaging.specifiers
import packaging.version

from bench.audit import advisories
from bench.audit.advisories import Advisory

Version = tuple[int, ...]
PACKAGES = ("deepspeed", "lightning")
"""Packages on whose versions rules depend."""


@dataclass(frozen=True)
class UsedVersion:
    """The version of a package for which a config is judged."""

    number: Version
    is_assumed: bool = False
    """Whether it is neither given nor installed, but the newest that lint knows."""

    def __str__(self) -> str:
        return written(self.number)


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parent / "versions.toml").read_text())


def holds(fact: str, used: UsedVersion) -> bool:
    """Whether a fact of versions.toml holds in this version of its package."""
    return packaging.specifiers.SpecifierSet(_tables()["facts"][fact]["versions"]).contains(
        str(used)
    )


def is_known_bad(name: str, used: UsedVersion) -> bool:
    """Whether a version has an advisory's defect, or is newer than the newest that has it."""
    advisory, number = _advisory(name), packaging.version.Version(str(used))
    if packaging.specifiers.SpecifierSet(advisory.affected).contains(number):
        return True
    newest = max(packaging.version.Version(text) for row in advisory.bad for text in row.versions)
    return not advisory.fixed_in and number > newest


def page_of(name: str) -> str:
    """Where an advisory is described."""
    return _advisory(name).link


def _advisory(name: str) -> Advisory:
    return next(each for each in advisories.load() if each.id == name)


def source(fact: str) -> str:
    """Where a fact can be checked."""
    return str(_tables()["facts"][fact]["source"])


def version(text: str) -> Version:
    """The release numbers of a version. Raises ValueError if it is none."""
    return packaging.version.Version(text).release


def used(package: str, given: Version | None = None) -> UsedVersion:
    """The version that is given, or else installed, or else the newest that lint knows."""
    if given is not None:
        return UsedVersion(given)
    try:
        return UsedVersion(version(importlib.metadata.version(package)))
    except importlib.metadata.PackageNotFoundError:
        return UsedVersion(version(_tables()["newest"][package]), is_assumed=True)


def written(number: Version) -> str:
    """A version as people write it."""
    return ".".join(map(str, number))
