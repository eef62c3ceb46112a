"""What the recorder writes of a rank: a line of JSON per event, and the values of sketches in a file of doubles.

Updates are numbered from 1. Several steps of optimizers with no backward between them are one update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BUCKETS = 64
"""Signed sums of a sketch: the squares of their differences estimate that of the tensors within some 20 %."""
COORDINATES = 64
"""Elements of a tensor that are kept as they are."""
WIDTH = 1 + BUCKETS + COORDINATES
"""Doubles of a sketch: the norm, the signed sums, the elements."""

START, GRADIENT, CLIPPED = "start", "gradient", "clipped gradient"
PARAMETER, BUFFER, COPY = "parameter", "buffer", "copy"
"""Kinds of state; any other is the name of an optimizer's state, such as ``exp_avg``."""


@dataclass
class MicroBatch:
    """A backward, and what came before it."""

    update: int
    loss: float | None = None
    """The value that backward was called on; None if it is no single number."""
    data: list[Any] = field(default_factory=list)
    """Per input of the model: rows, elements of a row, the sum of the rows' fingerprints and that of their squares."""
    samples: list[Any] = field(default_factory=list)
    """Pairs of a loader and the indices that it has handed out since the backward before."""
    batches: int = 0
    """How many batches loaders have handed out since then."""
    criteria: list[Any] = field(default_factory=list)
    """As in the records of an audit."""
    dtypes: list[str] = field(default_factory=list)
    """Floating-point dtypes of the graph."""
    drew: bool = False
    """Whether torch drew random numbers between the batch, or the backward before, and this backward."""
    dropout: bool = False
    """Whether the graph has a dropout."""
    contrasts: bool = False
    """Whether the loss has a product of two tensors that both depend on data."""
    leaves: Any = None
    """A hash of the parameters that the graph has; of the first update alone."""


@dataclass
class Sketches:
    """Sketches of all tensors of one kind; those of several events of one update and kind belong together."""

    update: int
    kind: str
    names: list[str]
    sizes: list[int]
    """Elements."""
    dtypes: list[str]
    hashes: Any
    """Of the bits."""
    first: int = 0
    """The row of the file of values where they begin."""
    replicated: list[bool] = field(default_factory=list)
    """Whether DistributedDataParallel holds the tensor, which promises that it is the same on all ranks."""


@dataclass
class Position:
    """Numbers that are to be the same in every split: of schedules, scalers and optimizers."""

    update: int
    values: dict[str, Any]


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


STATE_EVENTS: dict[str, Any] = {
    "microbatch": MicroBatch,
    "sketches": Sketches,
    "position": Position,
    "trainer": Trainer,
    "finish": Finish,
}
"""By the key of a line."""
