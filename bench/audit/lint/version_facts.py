"""What holds in some versions of a framework only: versions.toml, the one table that all rules ask."""

from __future__ import annotations

import importlib.metadata
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import packaging.specifiers
import packaging.version

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
