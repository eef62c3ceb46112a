"""What the recorder writes of a rank, a line of JSON per event, and ``bench audit`` reads.

Leaves are the parameters that autograd adds to; those that are sampled are numbered in the order in
which they are found. A list with one item per leaf may be shorter than the list of leaves, which
grows; None stands for no values.

Inside of the recorder values are tensors, since reading one may wait for its device. A record has
numbers. So the classes are generic: ``ValuesT`` is the samples of one leaf, one per coordinate, and
``NumberT`` a single number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar, Union

ValuesT = TypeVar("ValuesT")
NumberT = TypeVar("NumberT")
NOT_SCALAR = "backward does not begin at a scalar"
"""A doubt about a backward, as a stage of a pipeline has it."""
SAMPLES = ("added", "left", "used", "start", "end")
"""Fields of events that have values of leaves: a record has their sizes, and all of them joined."""


@dataclass
class Criterion(Generic[NumberT]):
    """A part of a loss: the first node seen from it that is given something other than scalars."""

    node: str
    """The name of the autograd node."""
    reduction: str | None
    """``mean``, ``sum``, ``terms`` if each of its terms is given a factor of its own, or None if
    it is not visible."""
    is_named: bool = False
    """Whether it is a loss function of torch; otherwise it is a mean, a sum or anything else."""
    terms: NumberT | None = None
    """How many terms are counted; None if that is not visible."""
    seed: NumberT | None = None
    """Its factor in the loss that backward was called with, or the sum of those of its terms."""
    is_even: NumberT | bool = True
    """Whether all terms that are counted have the same factor."""
    is_weighted: bool = False
    """Whether its classes have weights."""
    in_batch: NumberT | bool = False
    """Whether the right class of row i is i: rows of a batch are contrasted with each other."""

    @property
    def factor(self) -> NumberT | float:
        """The seed; 0 where backward has given it no gradient."""
        if self.seed is None:
            return 0.0
        return self.seed


@dataclass
class HookedGradient(Generic[ValuesT]):
    """A hook has seen a gradient, or made another of it; None where it is no dense tensor."""

    is_parameter: bool
    before: ValuesT | None
    after: ValuesT | None


@dataclass
class Backward(Generic[ValuesT, NumberT]):
    """A backward that is sampled, and what came before it."""

    number: int
    place: str = ""
    """File and line of the call, outside of torch and the frameworks."""
    criteria: list[Criterion[NumberT]] = field(default_factory=list)
    injected: list[Criterion[NumberT]] = field(default_factory=list)
    """Losses whose gradient a function within the graph makes."""
    covered: float = 1.0
    """The smallest share of rows with a gradient where rows are joined with others that have
    none."""
    data: list[ValuesT] = field(default_factory=list)
    """Values of the first inputs of the graph, which tell one micro-batch from another."""
    rows: int | None = None
    """The first dimension of the first of these inputs; None if there is none."""
    fetched: int = 0
    """Batches that data loaders have handed out until now."""
    added: list[ValuesT | None] = field(default_factory=list)
    """What it added to the gradient of each leaf."""
    left: list[ValuesT | None] = field(default_factory=list)
    """The gradient before the first backward that adds to a leaf after a step."""
    cleared: list[int] = field(default_factory=list)
    """Leaves that held a gradient after the backward before this one, and none when it began."""
    watched: list[int] = field(default_factory=list)
    """Leaves of which it is known whether the parameter has changed since the backward before."""
    moved: ValuesT | None = None
    """By these 1 if it has, else 0; None if there is none."""
    copies: list[ValuesT] = field(default_factory=list)
    """Values of copies of parameters, such as those of a moving average."""
    hooks: list[HookedGradient[ValuesT]] = field(default_factory=list)
    """What hooks have done to gradients."""
    reduced: dict[str, int] = field(default_factory=dict)
    """Bytes of gradients by collective, until the next backward or step."""
    held: dict[str, list[int]] = field(default_factory=dict)
    """By dtype the leaves whose sum of micro-gradients has it."""
    untrained: int = 0
    """Leaves of its graph that are no parameters, such as an input that is attacked."""
    inner_gradients: int = 0
    """Calls of autograd.grad since the step before whose result is differentiated again."""
    doubts: list[str] = field(default_factory=list)
    """Why it may be a part of a loss instead of a micro-batch."""


@dataclass
class Clipping(Generic[ValuesT, NumberT]):
    """Gradients are clipped."""

    factors: list[NumberT | None]
    """Per leaf by what its gradient was divided; None if it was not among them."""
    place: str = ""
    """File and line of the call."""
    loss_scale: NumberT | None = None
    """The factor of a loss scaler that has not unscaled any gradient of this update; None if
    there is none."""
    bound: float | None = None
    before_leaf: int = 0
    before: ValuesT | None = None
    """The gradient of that leaf before it was clipped."""


@dataclass
class Step(Generic[ValuesT]):
    """A step of an optimizer, at which the gradients are used."""

    optimizer: int
    """Optimizers are numbered by their first steps."""
    name: str
    place: str = ""
    """File and line of the call."""
    owned: list[int] = field(default_factory=list)
    """Leaves that it updates."""
    used: list[ValuesT | None] = field(default_factory=list)
    """Their gradients as they were before they were scaled and clipped; NaN where this rank has
    none."""
    start: list[ValuesT | None] = field(default_factory=list)
    """A few values of each parameter before the step."""
    backwards: int = 0
    """How many have run since its step before."""
    asked: int = 1
    """How many micro-batches a framework was asked for."""
    is_sampled: bool = True
    update: int = 0
    """The number of the update, from 1, where it is not sampled."""
    rates: list[float] = field(default_factory=list)
    """The learning rate at each backward since its step before; NaN where it is not known."""
    obstacles: list[str] = field(default_factory=list)
    """Why backwards are no micro-batches, or gradients no sums of them."""


@dataclass
class RateSchedule:
    """A learning-rate schedule that knows how many steps it has."""

    name: str
    length_name: str
    """What the length is called, such as ``total_steps``."""
    length: int
    position: int = 0
    """How many steps it had made by the last step of an optimizer, or by the end if it lives on."""


@dataclass
class End(Generic[ValuesT]):
    """The process ends by itself, or the recorder has failed."""

    failure: str = ""
    end: list[ValuesT | None] = field(default_factory=list)
    """A few values of each parameter."""
    backwards: int = 0
    """Since the last step of any optimizer."""
    updates: list[int] = field(default_factory=list)
    """By optimizer, all that were made."""
    all_backwards: int = 0
    is_end_of_data: bool = False
    """Whether the last backward followed the last batch of a data loader, as far as a schedule may
    end there."""
    schedules: list[RateSchedule] = field(default_factory=list)


Event = Union[  # noqa: UP007 - older Pythons
    Backward[ValuesT, NumberT], Clipping[ValuesT, NumberT], Step[ValuesT], End[ValuesT]
]


@dataclass
class Leaf(Generic[ValuesT]):
    """A parameter that is sampled."""

    name: str
    shape: tuple[int, ...] = ()
    start: ValuesT | None = None
    """Its values at the coordinates; None where they are not all on this rank."""
    part: str = ""
    """Where it is a part of a distributed tensor, which part."""
    is_own: bool = False
    """Whether other ranks may have another one under its name, as of experts."""


@dataclass
class Rank(Generic[ValuesT, NumberT]):
    """A process that trains."""

    job: str
    """Tells one training from another."""
    rank: int
    world: int
    facts: dict[str, str] = field(default_factory=dict)
    """What frameworks were asked for, by the name of a class."""
    versions: dict[str, str] = field(default_factory=dict)
    """Of frameworks that the process has imported, by the name of their distribution."""
    deepspeed: str | None = None
    """The config of DeepSpeed's engine as JSON; None if there is no engine."""
    leaves: list[Leaf[ValuesT]] = field(default_factory=list)
    gradient_bytes: dict[str, int] = field(default_factory=dict)
    """Of all leaves that a backward has reached, sampled or not, by dtype."""
    num_leaves: int = 0
    batch_norms: int = 0
    """Modules whose statistics are those of a micro-batch."""
    obstacles: list[str] = field(default_factory=list)
    """Why the training is not judged."""
    parallel: list[str] = field(default_factory=list)
    """Why ranks hold different parameters."""
    is_zero: bool = False
    """Whether ZeRO holds the gradients."""
    unseen: list[str] = field(default_factory=list)
    """What its version of torch does not show."""
    events: list[Event[ValuesT, NumberT]] = field(default_factory=list)
    """In order; a record has them in lines of their own."""
    is_cut: bool = False
    """Whether the record ends within a line."""

    @property
    def backwards(self) -> list[Backward[ValuesT, NumberT]]:
        """Those that are sampled."""
        return [event for event in self.events if isinstance(event, Backward)]

    @property
    def steps(self) -> list[Step[ValuesT]]:
        """Of all optimizers."""
        return [event for event in self.events if isinstance(event, Step)]

    @property
    def end(self) -> End[ValuesT] | None:
        """None if the process was killed."""
        found = None
        for event in self.events:
            if isinstance(event, End):
                found = event
        return found

    def leaf_number(self, name: str) -> int | None:
        """Of the parameter with this name; None if this rank does not sample it."""
        for number, leaf in enumerate(self.leaves):
            if leaf.name == name:
                return number
        return None
