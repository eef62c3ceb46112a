"""The numbers of a planned training, and what follows from them under every backend."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bench.errors import InputError

LARGEST_ACCUMULATE = 1_000_000
"""The largest N; the pattern of steps per epoch, which is listed, may have N epochs."""
LARGEST = 2**63 - 1
"""The largest of the other numbers: that of a framework's counters."""


def ceil(dividend: int, divisor: int) -> int:
    """The quotient rounded up, exact for integers of any size."""
    return -(-dividend // divisor)


def _option(field: str) -> str:
    """The option that sets a field of TrainingPlan."""
    return "--micro-batch" if field == "batch_size" else f"--{field.replace('_', '-')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """A planned training. Raises InputError for impossible numbers."""

    samples: int
    """Samples of the data set."""
    batch_size: int
    """Samples of a micro-batch on one rank."""
    accumulate: int = 1
    """N: micro-batches per window."""
    accumulate_later: tuple[int, ...] = ()
    """N of the second epoch and on, if it is another; the last one holds for all that follow."""
    world_size: int = 1
    """W: ranks."""
    epochs: int | None = 1
    """Epochs after which training ends; None for no limit, which needs ``max_steps``."""
    max_steps: int | None = None
    """Steps after which training ends, as Lightning's ``max_steps``; None for no limit."""
    drop_last: bool = False
    """Whether the loader drops an incomplete last micro-batch. It never drops an incomplete window."""
    sampler_drop_last: bool = False
    """Whether ``DistributedSampler`` drops samples, instead of repeating some, so that all ranks have as many."""
    limit_batches: int | None = None
    """Micro-batches of a rank after which an epoch ends, as Lightning's ``limit_train_batches``; None for no limit."""

    def __post_init__(self) -> None:
        for name in ("samples", "batch_size", "accumulate", "world_size", "epochs", "limit_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{_option(name)} is {value}; it must be an integer of at least 1")
        for name in ("samples", "batch_size", "world_size", "epochs", "max_steps"):
            if (getattr(self, name) or 0) > LARGEST:
                raise InputError(f"{_option(name)} is too large; it must be at most {LARGEST}")
        for n in self.accumulate_later:
            if n < 1:
                raise InputError(f"--accumulate has {n}; each must be an integer of at least 1")
        if (n := max(self.accumulate, *self.accumulate_later, 1)) > LARGEST_ACCUMULATE:
            raise InputError(f"--accumulate is {n}; it must be at most {LARGEST_ACCUMULATE}")
        if self.max_steps is not None and self.max_steps < 0:
            raise InputError(
                f"--max-steps is {self.max_steps}; it must be an integer of at least 0, or -1 for no limit"
            )
        if self.epochs is None and self.max_steps is None:
            raise InputError("--epochs: missing, and so is --max-steps; give one of them, or training has no end")
        if self.samples_per_rank == 0:
            raise InputError(
                f"--samples is {self.samples}, fewer than --world-size {self.world_size}, so with --sampler-drop-last "
                "no rank has one; it must be at least as many, or leave out --sampler-drop-last"
            )
        if self.micro_batches_per_epoch == 0:
            raise InputError(
                f"--micro-batch is {self.batch_size}, but a rank has only {self.samples_per_rank} samples "
                f"(--samples {self.samples}, --world-size {self.world_size}), so with --drop-last there is no "
                f"micro-batch; it must be at most {self.samples_per_rank}, or leave out --drop-last"
            )

    @property
    def effective_batch(self) -> int:
        """Samples of a complete window over all ranks."""
        return self.batch_size * self.accumulate * self.world_size

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
        return self.micro_batches_per_epoch // self.accumulate

    @property
    def partial_window(self) -> int:
        """Micro-batches left over after the full windows of an epoch."""
        return self.micro_batches_per_epoch % self.accumulate

    @property
    def windows(self) -> int:
        """Full and partial windows of an epoch: ceil(NB / N)."""
        return ceil(self.micro_batches_per_epoch, self.accumulate)

    @property
    def phases(self) -> list[tuple[int, int | None]]:
        """N, and for how many epochs in a row it holds; None for no end."""
        every = (self.accumulate, *self.accumulate_later)[: self.epochs]
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
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived.split()}
