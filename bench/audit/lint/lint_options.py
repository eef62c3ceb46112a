"""What a config does not say: the size of the run and the versions installed."""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import dataclass, field

Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """What is known beside the configs. None is not known."""

    samples: int | None = None
    """Of the training set, over all ranks."""
    batch_size: int | None = None
    """Samples of a micro-batch on one rank; goes before the config's."""
    world_size: int | None = None
    """Ranks; goes before the config's."""
    deepspeed: Version | None = None
    lightning: Version | None = None
    wanted: set[str] = field(default_factory=set)
    """Options of the command that would have enabled more rules."""

    def want(self, samples: int | None, world_size: int | None, batch_size: int | None) -> None:
        """Note which of these are not known, although a rule needs them."""
        needed = {"--samples": samples, "--world-size": world_size, "--micro-batch": batch_size}
        self.wanted.update(option for option, number in needed.items() if number is None)


def version(text: str) -> Version:
    """The release numbers of a version. Raises ValueError if it begins with no number."""
    match = re.match(r"\d+(\.\d+)*", text)
    if not match or len(text) > 40:
        raise ValueError(f"'{text[:40]}' is no version such as 0.18.2")
    return tuple(int(part) for part in match[0].split("."))


def installed(package: str) -> Version | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(importlib.metadata.version(package))
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


def written(number: Version | None) -> str:
    """A version as people write it."""
    return "of unknown version" if number is None else ".".join(map(str, number))
