"""A semantic scenario: data, a way of accumulating, and what goes wrong; and the shipped suite."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from pathlib import Path
from typing import Annotated

from pydantic import Field

from bench import files, validation
from bench.audit.training_plan import OR_ONE, TrainingPlan
from bench.errors import InputError, shown
from bench.formatting import plural
from bench.validation import Amount, Expect, Flag, MisfitError, Natural, Positive

SUITE = Path(__file__).parent / "scenarios.toml"
"""The shipped scenarios, in the order in which they are shown."""
LARGEST = 100_000
"""Samples trained over all ranks and epochs: each use has one weight, and each is drawn."""
MOST_RANKS = 64
"""Each is a process."""


RESTART = "R"
"""The letter of a restart from a checkpoint among the recorded events, before all that writing and
loading it do."""


class Fault(StrEnum):
    """What happens in the middle of a window, or at an epoch's end."""

    NONE = "none"
    EXCEPTION = "exception"
    """A loss raises after its forward; then training is called again."""
    CHECKPOINT = "checkpoint"
    """Training is saved by the framework's means and stopped, and resumed from that by a fresh
    build."""
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
    """The sum over its tokens, over those of the window that the framework counts; ``mean`` where
    it counts none."""
    COUNTED_PER_RANK = "counted-per-rank"
    """As ``counted``, where the framework counts the window's tokens on each rank alone, and
    averages the ranks."""


class Split(StrEnum):
    """Who splits the samples among the ranks."""

    GIVEN = "given"
    """The loader comes with a DistributedSampler that does not shuffle."""
    FRAMEWORK = "framework"
    """A framework that can do it is given the loader of all samples, in order; the others split as
    above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario(TrainingPlan):
    """What is trained on, and what happens meanwhile.

    Ranks share the samples as DistributedSampler deals them.
    """

    name: Annotated[
        str,
        Field(pattern="^[A-Za-z0-9][A-Za-z0-9._-]*$"),
        Expect("letters, digits, '.', '_' and '-'"),
    ] = "scenario"
    """Part of file names."""
    title: str = ""
    """One line for people."""
    world_size: Annotated[
        Positive,
        Field(le=MOST_RANKS),
        Expect(f"an integer from 1 to {MOST_RANKS}"),
    ] = 2
    max_steps: Positive | None = None
    engine_accumulate: Positive | None = None
    """N in the configuration of an engine under the loop, if it is another.

    That is DeepSpeed's gradient_accumulation_steps.
    """
    split: Annotated[Split, Expect(f"one of {', '.join(Split)}")] = Split.GIVEN
    own_loader: Flag = False
    """Whether Accelerate's loop goes over the loader as it is, instead of one that Accelerate has
    prepared."""
    prepared_scheduler: Flag = False
    """Whether Accelerate's loop has a scheduler, one that Accelerate has prepared."""
    token_weights: Annotated[
        tuple[Positive, ...],
        OR_ONE,
        Expect("a list of integers of at least 1"),
    ] = ()
    """Tokens of samples 0, 1, 2 ..., over and over; empty if all are equal."""
    reduction: Annotated[Reduction, Expect(f"one of {', '.join(Reduction)}")] = Reduction.MEAN
    clip_norm: Annotated[Amount, Expect("a positive number, or 0 for none")] = 0.0
    """The framework's limit for the gradient's L2 norm; 0 for none."""
    fault: Annotated[Fault, Expect(f"one of {', '.join(Fault)}")] = Fault.NONE
    at: Natural = 0
    """The micro-batch of the training, counted from 1, after which (or in which, if it raises) the
    fault happens.

    A checkpoint after the last one of an epoch is written where the framework writes that of an
    epoch.
    """

    def __post_init__(self) -> None:
        """Raises InputError for values that do not go together."""
        TrainingPlan.__post_init__(self)  # super() knows only the class without slots
        if self.reduction is Reduction.WINDOW:
            self._check_windows()
        if self.sampler_drop_last and self.split is Split.FRAMEWORK:
            why = " is that of the given sampler; leave out split = framework"
            raise MisfitError("sampler_drop_last", why)
        if (self.fault is not Fault.NONE) != bool(self.at):
            raise MisfitError("at", ": goes with a fault, and a fault with it")
        if self.fault is not Fault.NONE:
            self._check_fault()
        trained = self.slots_per_rank * self.world_size
        if trained > LARGEST:
            key, value = "samples", self.samples
            if self.max_steps is not None:
                key, value = "max_steps", self.max_steps
            raise MisfitError(
                key,
                f" is {value}; {trained} samples could be trained in all, with those of other "
                "epochs and "
                f"ranks; at most {LARGEST} may be",
            )

    def _check_windows(self) -> None:
        """Raises MisfitError unless the share of each micro-batch in its window is known."""
        num_left_over = self.samples % (self.accumulate[0] * self.batch_size * self.world_size)
        if num_left_over or len(self.accumulate) > 1:
            raise MisfitError(
                "reduction",
                " is window; it needs whole windows and one N for all epochs, so that the share "
                "of a micro-batch is "
                "known; make samples a multiple of accumulate x batch_size x world_size",
            )
        if self.split is Split.FRAMEWORK:
            why = " is window; it needs windows of known samples; leave out split = framework"
            raise MisfitError("reduction", why)

    def _check_fault(self) -> None:
        """Raises MisfitError unless the fault can happen, and at the micro-batch that is given."""
        if self.epochs is None or self.max_steps is not None:
            why = "it happens in a number of epochs; leave out max_steps"
            raise MisfitError("fault", f" is {self.fault}; {why}")
        if len(self.accumulate) > 1:
            why = "it happens in a training with one N; give one"
            raise MisfitError("fault", f" is {self.fault}; {why}")
        if self.split is Split.FRAMEWORK:
            why = "it needs the given order of samples; leave out split = framework"
            raise MisfitError("fault", f" is {self.fault}; {why}")
        number = self.micro_batches_per_epoch * self.epochs
        if self.at >= number:
            every = plural(number, "micro-batch")
            raise MisfitError("at", f" is {self.at}; it must be less than the training's {every}")

    @property
    def heading(self) -> str:
        """Its title; its name where it has none."""
        if not self.title:
            return self.name
        return self.title

    @property
    def setting(self) -> str:
        """The numbers of the training in words, and what happens in it."""
        return ", ".join([*self._numbers(), *self._options()])

    def _numbers(self) -> Iterator[str]:
        yield plural(self.samples, "sample")
        if self.token_weights:
            yield f"samples of {', '.join(map(str, self.token_weights))} tokens"
        yield plural(self.world_size, "rank")
        batches = plural(self.micro_batches_per_epoch, "micro-batch")
        yield f"{batches} of {self.batch_size} per epoch"
        yield f"N = {', then '.join(map(str, self.accumulate))}"
        if self.engine_accumulate:
            yield f"DeepSpeed's N = {self.engine_accumulate}"
        if self.epochs:
            yield plural(self.epochs, "epoch")
        if self.max_steps:
            yield f"max_steps = {self.max_steps}"

    def _options(self) -> Iterator[str]:
        if self.drop_last:
            yield "drop_last"
        if self.sampler_drop_last:
            yield "DistributedSampler(drop_last=True)"
        if self.own_loader:
            yield "Accelerate does not prepare the loader"
        if self.prepared_scheduler:
            yield "Accelerate prepares the scheduler"
        if self.limit_batches:
            yield f"limit_train_batches = {self.limit_batches}"
        if self.clip_norm:
            yield f"clipped to norm {self.clip_norm:g}"
        if self.fault is not Fault.NONE:
            yield WHEN[self.fault].format(self.at)
        if self.split is Split.FRAMEWORK:
            yield "the framework may split the samples"

    @property
    def largest_batch(self) -> int:
        """Samples of the largest micro-batch on one rank."""
        return min(self.batch_size, self.samples_per_rank)

    @property
    def slots_per_rank(self) -> int:
        """Uses of samples that each rank may come to.

        An incomplete micro-batch counts as a whole one.
        """
        return self.bound * self.largest_batch

    def offered(self, rank: int) -> list[list[int]]:
        """The samples of each micro-batch that a rank's loader offers in an epoch, in order.

        Every W-th sample from the rank's own number on; the samples are padded from their beginning
        to a multiple of W (torch.utils.data.DistributedSampler without shuffling).
        """
        positions = range(rank, self.samples_per_rank * self.world_size, self.world_size)
        of_rank = [position % self.samples for position in positions]
        starts = range(0, self.micro_batches_per_epoch * self.batch_size, self.batch_size)
        return [of_rank[start : start + self.batch_size] for start in starts]

    @property
    def offered_by_all(self) -> list[int]:
        """The samples of all ranks' loaders in one epoch; padding is in it twice."""
        found: list[int] = []
        for rank in range(self.world_size):
            found += chain(*self.offered(rank))
        return found

    @property
    def bound(self) -> int:
        """Micro-batches on each rank after which a training that has not ended never will.

        Without a number of epochs that is four times what ``max_steps`` updates of N micro-batches
        need, and an epoch.
        """
        if self.epochs is not None:
            epochs = self.epochs
            if self.fault in {
                Fault.EXCEPTION,
                Fault.CHECKPOINT,
            }:  # one is trained again, at least in part
                epochs += 1
            return self.micro_batches_per_epoch * epochs
        assert self.max_steps is not None
        return 4 * (self.max_steps * max(self.accumulate) + self.micro_batches_per_epoch)

    def accumulate_in(self, epoch: int) -> int:
        """N of an epoch, counted from 0."""
        return self.accumulate[min(epoch, len(self.accumulate) - 1)]

    def tokens(self, sample: int) -> int:
        if not self.token_weights:
            return 1
        return self.token_weights[sample % len(self.token_weights)]

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; ``from_dict`` is the inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(
        cls, values: Mapping[str, object], place: str = "", name: Callable[[str], str] = str
    ) -> Scenario:
        """The scenario of plain values, as JSON or TOML have them.

        Raises InputError for an unknown key or a value that cannot be, as ``validation.read``.
        """
        return validation.read(cls, values, place, name)


def load(path: Path = SUITE) -> list[Scenario]:
    """The scenarios of a TOML file, one table each, named by it.

    Raises InputError that names the file and the place.

    ``epochs = 0`` stands for no end, since TOML has no null.
    """
    content = files.read(path, str(path), "name a TOML file of scenarios")
    try:
        tables = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # the second: nested too deeply
        raise InputError(f"{path}: {error}; it must be TOML") from error
    if not tables:
        missing = "write a [name] table with samples, batch_size and accumulate"
        raise InputError(f"{path}: holds no scenario; {missing}")
    return [_scenario(name, table, str(path)) for name, table in tables.items()]


def _scenario(name: str, table: object, source: str) -> Scenario:
    if not isinstance(table, dict):
        what = f"it must be a table of a scenario, [{name}]"
        raise InputError(f"{source}: {name} is {shown(table)}; {what}")
    if "name" in table:
        raise InputError(f"{source}: [{name}] name is that of the table; leave it out")
    values = {**table, "name": name}
    if table.get("epochs") == 0:
        if "max_steps" not in table:
            raise InputError(f"{source}: [{name}] epochs is 0; there is no end without max_steps")
        values["epochs"] = None
    return Scenario.from_dict(values, f"{source}: [{name}] ")
