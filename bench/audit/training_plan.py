"""The numbers of a planned training, and what follows from them under every backend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

from pydantic import BeforeValidator, ConfigDict, Field

from bench.validation import Expect, Flag, MisfitError, Natural, Positive

LARGEST_ACCUMULATE = 1_000_000
"""The largest N; the pattern of steps per epoch, which is listed, may have N epochs."""


def _in_tuple(value: object) -> object:
    if isinstance(value, int):
        return (value,)
    return value


OR_ONE = BeforeValidator(_in_tuple)
"""Of a tuple: one integer will do too."""
Factors = Annotated[
    tuple[Annotated[Positive, Field(le=LARGEST_ACCUMULATE)], ...],
    OR_ONE,
    Field(min_length=1),
    Expect(f"an integer from 1 to {LARGEST_ACCUMULATE}, or a list of them"),
]


def ceil(dividend: int, divisor: int) -> int:
    """The quotient rounded up, exact for integers of any size."""
    return -(-dividend // divisor)


class Phase(NamedTuple):
    """Epochs in a row with one N."""

    n: int
    epochs: int | None
    """None for no end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """A planned training. Counts are of micro-batches and samples, never of updates."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    samples: Positive
    """Samples of the data set."""
    batch_size: Positive
    """Samples of a micro-batch on one rank."""
    accumulate: Factors = (1,)
    """N, micro-batches per window, of each epoch; the last one holds for all that follow."""
    world_size: Positive = 1
    """W: ranks."""
    epochs: Positive | None = 1
    """Epochs after which training ends; None if only ``max_steps`` is to end it."""
    max_steps: Natural | None = None
    """Steps after which training ends, as Lightning's ``max_steps``; None for no limit."""
    drop_last: Flag = False
    """Whether the loader drops an incomplete last micro-batch. It never drops an incomplete window.
    """
    sampler_drop_last: Flag = False
    """Whether ``DistributedSampler`` drops samples so that all ranks have as many, instead of
    repeating some."""
    limit_batches: Positive | None = None
    """Micro-batches of a rank after which an epoch ends; None for no limit. Lightning's
    ``limit_train_batches``."""

    def __post_init__(self) -> None:
        """Raises InputError for values that do not go together."""
        if self.epochs is None and self.max_steps is None:
            both = ": missing, and so is max_steps; give one of them, or training has no end"
            raise MisfitError("epochs", both)
        if self.samples_per_rank == 0:
            few = (
                f" is {self.samples}, fewer than the {self.world_size} ranks, so each drops its "
                "samples"
            )
            remedy = "it must be at least as many, or leave out sampler_drop_last"
            raise MisfitError("samples", f"{few}; {remedy}")
        if self.micro_batches_per_epoch == 0:
            of_rank = self.samples_per_rank
            few = (
                f" is {self.batch_size}, but a rank has only {of_rank} samples, which drop_last "
                "drops"
            )
            raise MisfitError("batch_size", f"{few}; it must be at most {of_rank}")

    @property
    def n(self) -> int:
        """N of the first epoch."""
        return self.accumulate[0]

    @property
    def effective_batch(self) -> int:
        """Samples of a complete window over all ranks."""
        return self.batch_size * self.n * self.world_size

    @property
    def samples_per_rank(self) -> int:
        """Samples of a rank per epoch, as many on all ranks.

        ``DistributedSampler`` repeats or drops some.
        """
        if self.sampler_drop_last:
            return self.samples // self.world_size
        return ceil(self.samples, self.world_size)

    @property
    def padding_per_epoch(self) -> int:
        """Samples that ``DistributedSampler`` repeats (torch/utils/data/distributed.py)."""
        return max(0, self.samples_per_rank * self.world_size - self.samples)

    @property
    def dropped_per_epoch(self) -> int:
        """Samples that the sampler's or the loader's ``drop_last`` leaves out on all ranks.

        Repeated ones too.
        """
        dropped = max(0, self.samples - self.samples_per_rank * self.world_size)
        if self.drop_last:
            dropped += self.samples_per_rank % self.batch_size * self.world_size
        return dropped

    @property
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches of one rank: NB."""
        if self.drop_last:
            offered = self.samples_per_rank // self.batch_size
        else:
            offered = ceil(self.samples_per_rank, self.batch_size)
        if self.limit_batches is None:
            return offered
        return min(offered, self.limit_batches)

    @property
    def last_micro_batch(self) -> int:
        """Samples of the last micro-batch of an epoch on one rank."""
        left = self.samples_per_rank - (self.micro_batches_per_epoch - 1) * self.batch_size
        return min(self.batch_size, left)

    @property
    def full_windows(self) -> int:
        """Windows of N micro-batches in an epoch: floor(NB / N)."""
        return self.micro_batches_per_epoch // self.n

    @property
    def partial_window(self) -> int:
        """Micro-batches left over after the full windows of an epoch."""
        return self.micro_batches_per_epoch % self.n

    @property
    def windows(self) -> int:
        """Full and partial windows of an epoch: ceil(NB / N)."""
        return ceil(self.micro_batches_per_epoch, self.n)

    @property
    def phases(self) -> list[Phase]:
        """The epochs by their N, in order."""
        *others, last = self.accumulate[: self.epochs]
        found = [Phase(n, 1) for n in others]
        left = None
        if self.epochs is not None:
            left = self.epochs - len(others)
        return [*found, Phase(last, left)]

    @property
    def naive_steps(self) -> int:
        """The usual formula: ceil(samples / effective batch) x epochs, at most ``max_steps``."""
        limits = []
        if self.max_steps is not None:
            limits.append(self.max_steps)
        if self.epochs is not None:
            of_epochs = 0
            for n, epochs in self.phases:
                assert epochs is not None, "only without a number of epochs"
                of_epochs += ceil(self.samples, self.batch_size * self.world_size * n) * epochs
            limits.append(of_epochs)
        return min(limits)

    def to_dict(self) -> dict[str, object]:
        """The inputs, then what follows from them under every backend."""
        return dataclasses.asdict(self) | {
            "accumulate": self.n,
            "accumulate_later": self.accumulate[1:],
            "effective_batch": self.effective_batch,
            "samples_per_rank": self.samples_per_rank,
            "padding_per_epoch": self.padding_per_epoch,
            "dropped_per_epoch": self.dropped_per_epoch,
            "micro_batches_per_epoch": self.micro_batches_per_epoch,
            "last_micro_batch": self.last_micro_batch,
            "full_windows": self.full_windows,
            "partial_window": self.partial_window,
            "naive_steps": self.naive_steps,
        }
