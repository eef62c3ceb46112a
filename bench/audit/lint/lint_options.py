"""What configs do not say: the size of the run, and the installed versions."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.version_facts import UsedVersion, used
from bench.audit.training_plan import TrainingPlan, ceil
from bench.formatting import plural


@dataclass(frozen=True, kw_only=True)
class LintOptions:
    """The size of the run, and the versions of frameworks; None for what is not known."""

    samples: int | None = None
    """Of the training set, over all ranks."""
    batch_size: int | None = None
    """Samples of a micro-batch on one rank; goes before the config's."""
    world_size: int | None = None
    """Ranks; goes before the config's."""
    deepspeed: UsedVersion = field(default_factory=lambda: used("deepspeed"))
    lightning: UsedVersion = field(default_factory=lambda: used("lightning"))
    wanted: set[str] = field(default_factory=set)
    """Options of the command that would have enabled more rules."""
    notes: list[str] = field(default_factory=list)
    """What was not judged, and why: one line each."""
    unknown: list[str] = field(default_factory=list)
    """Files of no kind that lint knows, and why: one line each."""
    composed: list[str] = field(default_factory=list)
    """Files that Hydra composes with others."""
    problems: list[str] = field(default_factory=list)
    """Files that could not be read, or have a wrong value: one line each."""

    def note(self, line: str) -> None:
        """Note what was not judged, once."""
        if line not in self.notes:
            self.notes.append(line)

    def note_if_unknown(self, place: ConfigPart) -> None:
        """Note that the rules of a value were not tried, if it is filled in elsewhere."""
        if place.unknown:
            self.note(
                f"{place.file}:{place.line}: {place.key} is filled in elsewhere, so its rules were "
                "not tried"
            )

    @property
    def how_composed(self) -> str:
        """What to lint in place of such files; empty if there are none."""
        if not self.composed:
            return ""
        more = ""
        if len(self.composed) > 1:
            more = f" and {plural(len(self.composed) - 1, 'more file')}"
        return (
            f"Hydra composes {self.composed[0]}{more} with others: lint the YAML that the program "
            "prints with --cfg job --resolve"
        )

    def want(self, samples: int | None, world_size: int | None, batch_size: int | None) -> None:
        """Note which of these a rule needs and does not know."""
        needed = {"--samples": samples, "--world-size": world_size, "--micro-batch": batch_size}
        self.wanted.update(option for option, number in needed.items() if number is None)

    def windows(
        self, accumulate: int, batch_size: int | None, world_size: int | None, *, drop_last: bool
    ) -> TrainingPlan | None:
        """The windows of an epoch.

        None if a number is not known, which is noted, or if ``drop_last`` leaves none.
        """
        self.want(self.samples, world_size, batch_size)
        if not (self.samples and world_size and batch_size):
            return None
        num_batches = batches_per_epoch(self.samples, batch_size, world_size, drop_last=drop_last)
        if num_batches:
            return windows_of(num_batches, accumulate)
        return None


def batches_per_epoch(samples: int, batch_size: int, world_size: int, *, drop_last: bool) -> int:
    """NB, the micro-batches per epoch and rank; 0 if ``drop_last`` leaves none."""
    each = ceil(samples, world_size)
    if drop_last:
        return each // batch_size
    return ceil(each, batch_size)


def windows_of(num_batches: int, accumulate: int) -> TrainingPlan:
    """The windows of an epoch with NB micro-batches, at least 1, of one sample each."""
    return TrainingPlan(samples=num_batches, batch_size=1, accumulate=(accumulate,))
