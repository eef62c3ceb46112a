"""One semantic scenario: a data set, a way of accumulating, and something that goes wrong; and the shipped suite."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from bench import files, validation
from bench.audit.training_plan import OR_ONE, TrainingPlan
from bench.errors import InputError, shown
from bench.formatting import plural
from bench.validation import Amount, Expect, Flag, MisfitError, Natural, Positive

SUITE = Path(__file__).parent / "scenarios.toml"
"""The shipped scenarios, in the order in which they are shown."""
LARGEST = 100_000
"""Samples trained over all ranks and epochs: there is one weight for each use, and each is drawn."""
MOST_RANKS = 64
"""Each is a process."""


RESTART = "R"
"""The letter of a restart from a checkpoint among the recorded events, before all that writing and loading it do."""


class Fault(StrEnum):
    """What happens in the middle of a window, or at an epoch's end."""

    NONE = "none"
    EXCEPTION = "exception"
    """A loss raises after its forward; then training is called again."""
    CHECKPOINT = "checkpoint"
    """Training is saved by the framework's means and stopped, and resumed from that by a fresh build."""
    ZERO_GRAD = "zero_grad"
    """The framework's gradients are cleared."""
    VALIDATION = "validation"
    """The model is evaluated, every ``at`` micro-batches."""


WHEN = {
    Fault.EXCEPTION: "micro-batch {} raises",
    Fault.CHECKPOINT: "checkpoint after micro-batch {}",
    Fault.ZERO_GRAD: "zero_grad after micro-batch {}",
    Fault.VALIDATION: "validation every {} micro-batches",
}
"""When a fault happens, by ``at``."""


class Reduction(StrEnum):
    """What the loss of a micro-batch is, when samples have different numbers of tokens."""

    MEAN = "mean"
    """The mean over the tokens of the micro-batch, as most models return it."""
    WINDOW = "window"
    """N x W times the sum over its tokens, over the number of tokens in its window on all ranks.

    That is what frameworks that divide by N and average over W need, if all windows are whole.
    """
    COUNTED = "counted"
    """The sum over its tokens, over those of the window that the framework counts; ``mean`` where it counts none."""
    COUNTED_PER_RANK = "counted-per-rank"
    """As ``counted``, where the framework counts the window's tokens on each rank alone, and averages the ranks."""


class Split(StrEnum):
    """Who splits the samples among the ranks."""

    GIVEN = "given"
    """The loader comes with a DistributedSampler that does not shuffle."""
    FRAMEWORK = "framework"
    """A framework that can do it is given the loader of all samples, in order; the others split as above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario(TrainingPlan):
    """What is trained on, and what happens meanwhile. Ranks share the samples as DistributedSampler deals them."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$"), Expect("letters, digits, '.', '_' and '-'")] = (
        "scenario"
    )
    """Part of file names."""
    title: str = ""
    """One line for people."""
    world_size: Annotated[Positive, Field(le=MOST_RANKS), Expect(f"an integer from 1 to {MOST_RANKS}")] = 2
    max_steps: Positive | None = None
    engine_accumulate: Positive | None = None
    """N in the configuration of an engine under the loop, DeepSpeed's gradient_accumulation_steps, if it is another."""
    split: Annotated[Split, Expect(f"one of {', '.join(Split)}")] = Split.GIVEN
    own_loader: Flag = False
    """Whether Accelerate's loop goes over the loader as it is, instead of one that Accelerate has prepared."""
    prepared_scheduler: Flag = False
    """Whether Accelerate's loop has a scheduler, one that Accelerate has prepared."""
    token_weights: Annotated[tuple[Positive, ...], OR_ONE, Expect("a list of integers of at least 1")] = ()
    """Tokens of samples 0, 1, 2 ..., over and over; empty if all are equal."""
    reduction: Annotated[Reduction, Expect(f"one of {', '.join(Reduction)}")] = Reduction.MEAN
    clip_norm: Annotated[Amount, Expect("a positive number, or 0 for none")] = 0.0
    """The framework's limit for the gradient's L2 norm; 0 for none."""
    fault: Annotated[Fault, Expect(f"one of {', '.join(Fault)}")] = Fault.NONE
    at: Natural = 0
    """The micro-batch of the training, counted from 1, after which (or in which, if it raises) the fault happens.

    A checkpoint after the last one of an epoch is written where the framework writes that of an epoch.
    """

    def __post_init__(self) -> None:
        """Raises InputError for values that do not go together."""
        TrainingPlan.__post_init__(self)  # super() knows only the class without slots
        whole = self.samples % (self.accumulate[0] * self.batch_size * self.world_size) == 0
        if self.reduction is Reduction.WINDOW and not (whole and len(self.accumulate) == 1):
            raise MisfitError(
                "reduction",
                " is window; it needs whole windows and one N for all epochs, so that the share of a micro-batch is "
                "known; make samples a multiple of accumulate x batch_size x world_size",
            )
        if self.reduction is Reduction.WINDOW and self.split is Split.FRAMEWORK:
            raise MisfitError("reduction", " is window; it needs windows of known samples; leave out split = framework")
        if self.sampler_drop_last and self.split is Split.FRAMEWORK:
            raise MisfitError("sampler_drop_last", " is that of the given sampler; leave out split = framework")
        if (self.fault is not Fault.NONE) != bool(self.at):
            raise MisfitError("at", ": goes with a fault, and a fault with it")
        if self.fault is not Fault.NONE:
            self._check_fault()
        if (trained := self.slots_per_rank * self.world_size) > LARGEST:
            key = "samples" if self.max_steps is None else "max_steps"
            raise MisfitError(
                key,
                f" is {getattr(self, key)}; {trained} samples could be trained in all, with those of other epochs and "
                f"ranks; at most {LARGEST} may be",
            )

    def _check_fault(self) -> None:
        if self.epochs is None or self.max_steps is not None:
            raise MisfitError("fault", f" is {self.fault}; it happens in a number of epochs; leave out max_steps")
        if len(self.accumulate) > 1:
            raise MisfitError("fault", f" is {self.fault}; it happens in a training with one N; give one")
        if self.split is Split.FRAMEWORK:
            raise MisfitError(
                "fault", f" is {self.fault}; it needs the given order of samples; leave out split = framework"
            )
        if self.at >= (number := self.micro_batches_per_epoch * self.epochs):
            every = plural(number, "micro-batch")
            raise MisfitError("at", f" is {self.at}; it must be less than the training's {every}")

    @property
    def setting(self) -> str:
        """The numbers of the training in words, and what happens in it."""
        weights = [str(tokens) for tokens in self.token_weights]
        told = {
            plural(self.samples, "sample"): True,
            f"samples of {', '.join(weights)} tokens": weights,
            plural(self.world_size, "rank"): True,
            f"{plural(self.micro_batches_per_epoch, 'micro-batch')} of {self.batch_size} per epoch": True,
            f"N = {', then '.join(map(str, self.accumulate))}": True,
            f"DeepSpeed's N = {self.engine_accumulate}": self.engine_accumulate,
            plural(self.epochs or 0, "epoch"): self.epochs,
            f"max_steps = {self.max_steps}": self.max_steps,
            "drop_last": self.drop_last,
            "DistributedSampler(drop_last=True)": self.sampler_drop_last,
            "Accelerate does not prepare the loader": self.own_loader,
            "Accelerate prepares the scheduler": self.prepared_scheduler,
            f"limit_train_batches = {self.limit_batches}": self.limit_batches,
            f"clipped to norm {self.clip_norm:g}": self.clip_norm,
            WHEN.get(self.fault, "").format(self.at): self.at,
            "the framework may split the samples": self.split is Split.FRAMEWORK,
        }
        return ", ".join(text for text, is_told in told.items() if is_told)

    @property
    def largest_batch(self) -> int:
        """Samples of the largest micro-batch on one rank."""
        return min(self.batch_size, self.samples_per_rank)

    @property
    def slots_per_rank(self) -> int:
        """Uses of samples that each rank may come to, those of an incomplete micro-batch counted as of a whole one."""
        return self.bound * self.largest_batch

    def offered(self, rank: int) -> list[list[int]]:
        """The samples of each micro-batch that a rank's loader offers in an epoch, in the given order.

        Every W-th sample from the rank's own number on; the samples are padded from their beginning to a multiple of W
        (torch.utils.data.DistributedSampler without shuffling).
        """
        of_rank = [
            position % self.samples
            for position in range(rank, self.samples_per_rank * self.world_size, self.world_size)
        ]
        starts = range(0, self.micro_batches_per_epoch * self.batch_size, self.batch_size)
        return [of_rank[start : start + self.batch_size] for start in starts]

    @property
    def offered_by_all(self) -> list[int]:
        """The samples of all ranks' loaders in one epoch; padding is in it twice."""
        return [sample for rank in range(self.world_size) for batch in self.offered(rank) for sample in batch]

    @property
    def bound(self) -> int:
        """Micro-batches on each rank after which a training that has not ended never will.

        Without a number of epochs that is four times what ``max_steps`` updates of N micro-batches need, and an epoch.
        """
        if self.epochs is not None:
            return self.micro_batches_per_epoch * (self.epochs + (self.fault in {Fault.EXCEPTION, Fault.CHECKPOINT}))
        assert self.max_steps is not None
        return 4 * (self.max_steps * max(self.accumulate) + self.micro_batches_per_epoch)

    def accumulate_in(self, epoch: int) -> int:
        """N of an epoch, counted from 0."""
        return self.accumulate[min(epoch, len(self.accumulate) - 1)]

    def tokens(self, sample: int) -> int:
        return self.token_weights[sample % len(self.token_weights)] if self.token_weights else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``from_dict`` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], place: str = "", name: Callable[[str], str] = str) -> Scenario:
        """The scenario of plain values, as JSON or TOML have them.

        Raises InputError for an unknown key or a value that cannot be, as ``validation.read``.
        """
        return validation.read(cls, values, place, name)


def load(path: Path = SUITE) -> list[Scenario]:
    """The scenarios of a TOML file, one table each, named by it. Raises InputError that names the file and the place.

    ``epochs = 0`` stands for no end, since TOML has no null.
    """
    content = files.read(path, str(path), "name a TOML file of scenarios")
    try:
        tables = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # the second: nested too deeply
        raise InputError(f"{path}: {error}; it must be TOML") from error
    if not tables:
        raise InputError(f"{path}: holds no scenario; write a [name] table with samples, batch_size and accumulate")
    return [_scenario(name, table, str(path)) for name, table in tables.items()]


def _scenario(name: str, table: Any, source: str) -> Scenario:
    if not isinstance(table, dict):
        raise InputError(f"{source}: {name} is {shown(table)}; it must be a table of a scenario, [{name}]")
    if "name" in table:
        raise InputError(f"{source}: [{name}] name is that of the table; leave it out")
    if table.get("epochs") == 0 and "max_steps" not in table:
        raise InputError(f"{source}: [{name}] epochs is 0; there is no end without max_steps")
    values = {**table, "name": name, **({"epochs": None} if table.get("epochs") == 0 else {})}
    return Scenario.from_dict(values, f"{source}: [{name}] ")
