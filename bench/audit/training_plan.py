"""The numbers of a planned training, and what follows from them under every backend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, ConfigDict, Field

from bench.validation import Expect, Flag, MisfitError, Natural, Positive

LARGEST_ACCUMULATE = 1_000_000
"""The largest N; the pattern of steps per epoch, which is listed, may have N epochs."""
OR_ONE = BeforeValidator(lambda value: (value,) if isinstance(value, int) else value)
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
    """Whether the loader drops an incomplete last micro-batch. It never drops an incomplete window."""
    sampler_drop_last: Flag = False
    """Whether ``DistributedSampler`` drops samples, instead of repeating some, so that all ranks have as many."""
    limit_batches: Positive | None = None
    """Micro-batches of a rank after which an epoch ends, as Lightning's ``limit_train_batches``; None for no limit."""

    def __post_init__(self) -> None:
        """Raises InputError for values that do not go together."""
        if self.epochs is None and self.max_steps is None:
            raise MisfitError("epochs", ": missing, and so is max_steps; give one of them, or training has no end")
        if self.samples_per_rank == 0:
            few = f" is {self.samples}, fewer than the {self.world_size} ranks, so each drops its samples"
            raise MisfitError("samples", f"{few}; it must be at least as many, or leave out sampler_drop_last")
        if self.micro_batches_per_epoch == 0:
            few = f" is {self.batch_size}, but a rank has only {self.samples_per_rank} samples, which drop_last drops"
            raise MisfitError("batch_size", f"{few}; it must be at most {self.samples_per_rank}")

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
        """Samples of a rank per epoch; ``DistributedSampler`` repeats or drops some so that all ranks have as many."""
        return self.samples // self.world_size if self.sampler_drop_last else ceil(self.samples, self.world_size)

    @property
    def padding_per_epoch(self) -> int:
        """Samples that ``DistributedSampler`` repeats (torch/utils/data/distributed.py, ``__iter__``)."""
        return max(0, self.samples_per_rank * self.world_size - self.samples)

    @property
    def dropped_per_epoch(self) -> int:
        """Samples that the sampler's or the loader's ``drop_last`` leaves out on all ranks, including repeated ones."""
        by_sampler = max(0, self.samples - self.samples_per_rank * self.world_size)
        return by_sampler + (self.samples_per_rank % self.batch_size * self.world_size if self.drop_last else 0)

    @property
    def micro_batches_per_epoch(self) -> int:
        """Micro-batches of one rank: NB."""
        whole = self.samples_per_rank // self.batch_size
        offered = whole if self.drop_last else ceil(self.samples_per_rank, self.batch_size)
        return offered if self.limit_batches is None else min(offered, self.limit_batches)

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
    def phases(self) -> list[tuple[int, int | None]]:
        """N, and for how many epochs in a row it holds; None for no end."""
        every = self.accumulate[: self.epochs]
        last = None if self.epochs is None else self.epochs - len(every) + 1
        return [*((n, 1) for n in every[:-1]), (every[-1], last)]

    @property
    def naive_steps(self) -> int:
        """The usual formula: ceil(samples / effective batch) x epochs, at most ``max_steps``."""
        limits = [] if self.max_steps is None else [self.max_steps]
        if self.epochs is not None:
            of_micro_batches = self.batch_size * self.world_size
            limits.append(sum(ceil(self.samples, of_micro_batches * n) * (epochs or 0) for n, epochs in self.phases))
        return min(limits)

    def to_dict(self) -> dict[str, Any]:
        """The inputs, then what follows from them under every backend."""
        derived = (
            "effective_batch samples_per_rank padding_per_epoch dropped_per_epoch micro_batches_per_epoch "
            "last_micro_batch full_windows partial_window naive_steps"
        )
        factors = {"accumulate": self.n, "accumulate_later": self.accumulate[1:]}
        return dataclasses.asdict(self) | factors | {name: getattr(self, name) for name in derived.split()}
