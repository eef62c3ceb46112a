"""What configs do not say: the size of the run, and the installed versions."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field

import packaging.specifiers
import packaging.version

from bench.audit.training_plan import TrainingPlan, ceil

Version = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """The size of the run, and the installed versions; None for what is not known."""

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
        """Note which of these a rule needs and does not know."""
        needed = {"--samples": samples, "--world-size": world_size, "--micro-batch": batch_size}
        self.wanted.update(option for option, number in needed.items() if number is None)

    def windows(
        self, accumulate: int, batch_size: int | None, world_size: int | None, *, drop_last: bool
    ) -> TrainingPlan | None:
        """The windows of an epoch; None if a number is not known, which is noted, or if ``drop_last`` leaves none."""
        self.want(self.samples, world_size, batch_size)
        if not (self.samples and world_size and batch_size):
            return None
        num_batches = batches_per_epoch(self.samples, batch_size, world_size, drop_last=drop_last)
        return windows_of(num_batches, accumulate) if num_batches else None


def batches_per_epoch(samples: int, batch_size: int, world_size: int, *, drop_last: bool) -> int:
    """NB, the micro-batches per epoch and rank; 0 if ``drop_last`` leaves none."""
    each = ceil(samples, world_size)
    return each // batch_size if drop_last else ceil(each, batch_size)


def windows_of(num_batches: int, accumulate: int) -> TrainingPlan:
    """The windows of an epoch with NB micro-batches, at least 1, of one sample each."""
    return TrainingPlan(samples=num_batches, batch_size=1, accumulate=(accumulate,))


def version(text: str) -> Version:
    """The release numbers of a version. Raises ValueError if it is none."""
    return packaging.version.Version(text).release


def installed(package: str) -> Version | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return version(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return None


def is_among(number: Version, versions: str) -> bool:
    """Whether a version is one of these, such as ``>=0.18.6,<0.19.0``."""
    return packaging.specifiers.SpecifierSet(versions).contains(written(number))


def written(number: Version | None) -> str:
    """A version as people write it."""
    return "of unknown version" if number is None else ".".join(map(str, number))
