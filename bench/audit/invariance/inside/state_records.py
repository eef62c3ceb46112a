"""What the recorder writes of a rank: a line of JSON per event, and sketches in a file of doubles.

Updates are numbered from 1. Several steps of optimizers with no backward between them are one
update. Inside of the recorder numbers are tensors, since reading one may wait for its device; a
record has numbers. So some classes are generic, as those of an audit: ``NumberT`` is either.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic

from ...command.inside.records import Criterion, NumberT

BUCKETS = 64
"""Signed sums of a sketch: the squares of their differences estimate the squared norm of the
tensors' difference within some 20 %."""
COORDINATES = 64
"""Elements of a tensor that are kept as they are."""
WIDTH = 1 + BUCKETS + COORDINATES
"""Doubles of a sketch: the norm, the signed sums, the elements."""

START, GRADIENT, CLIPPED = "start", "gradient", "clipped gradient"
PARAMETER, BUFFER, COPY = "parameter", "buffer", "copy"
"""Kinds of state; any other is the name of an optimizer's state, such as ``exp_avg``."""


@dataclass
class InputRows(Generic[NumberT]):
    """The rows that an input of the model is given, each with a number as its fingerprint."""

    rows: int
    width: int
    """Elements of a row."""
    total: NumberT
    """The sum of the fingerprints."""
    squares: NumberT
    """The sum of their squares."""


@dataclass
class DrawnSamples:
    """The samples of a batch that a loader has handed out."""

    loader: int
    """Loaders are numbered by their data sets."""
    indices: list[int]


@dataclass
class MicroBatch(Generic[NumberT]):
    """A backward, and what came before it."""

    update: int
    loss: NumberT | None = None
    """The value that backward was called on; None if it is no single number."""
    data: list[InputRows[NumberT]] = field(default_factory=list)
    """By input of the model, in the order of its graph."""
    samples: list[DrawnSamples] = field(default_factory=list)
    """What loaders have handed out since the backward before, if they show it."""
    batches: int = 0
    """How many batches loaders have handed out since then."""
    criteria: list[Criterion[NumberT]] = field(default_factory=list)
    """As in the records of an audit."""
    dtypes: list[str] = field(default_factory=list)
    """Floating-point dtypes of the graph."""
    drew: bool = False
    """Whether torch drew random numbers between this backward and the batch or backward before."""
    dropout: bool = False
    """Whether the graph has a dropout."""
    quantizes: bool = False
    """Whether the graph has a function that quantizes, whose scales follow from the micro-batch."""
    contrasts: bool = False
    """Whether the loss has a product of two tensors that both depend on data."""
    normalizes: bool = False
    """Whether the graph has a batch norm that is trained."""
    leaves: NumberT | int | None = None
    """A hash of the parameters that the graph has; of the first update alone."""


@dataclass
class Sketches:
    """Sketches of all tensors of a kind; several events of an update and kind belong together."""

    update: int
    kind: str
    names: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Elements."""
    dtypes: list[str] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Of the bits."""
    first: int = 0
    """The row of the file of values where they begin."""
    replicated: list[bool] = field(default_factory=list)
    """Whether DistributedDataParallel holds the tensor, and so promises the same on all ranks."""


@dataclass
class Position(Generic[NumberT]):
    """Numbers that are to be the same in every split: of schedules, scalers and optimizers."""

    update: int
    values: dict[str, NumberT]


@dataclass
class Trainer:
    """A process that trains."""

    job: str
    """Tells one training from another."""
    rank: int
    world: int
    facts: dict[str, str] = field(default_factory=dict)
    """What frameworks were asked for, by the name of a class."""
    batch_norms: int = 0
    """Modules that normalize with the statistics of the micro-batch that they are given."""
    moving: list[str] = field(default_factory=list)
    """Kinds of modules whose state moves at each forward, other than those."""
    dropouts: int = 0
    """Modules that drop elements at random."""
    obstacles: list[str] = field(default_factory=list)
    """Why updates cannot be compared."""


@dataclass
class Finish:
    """Sampling is over, the process ends, or the recorder has failed."""

    updates: int = 0
    failure: str = ""
    seconds: float = 0.0
    """What the recorder took."""
