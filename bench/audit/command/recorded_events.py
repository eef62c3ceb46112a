"""What the recorder wrote, as the judge takes it.

Values are arrays, and each line is checked where it is read.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainValidator, TypeAdapter

from bench.audit.command.inside.records import (
    SAMPLES,
    Backward,
    Clipping,
    Criterion,
    End,
    HookedGradient,
    Leaf,
    Rank,
    Step,
)


def _vector(stored: object) -> NDArray[np.float64]:
    """Values are stored as a list, or as base64 of doubles in the byte order of the machine."""
    if isinstance(stored, np.ndarray):
        return stored
    if isinstance(stored, str):
        return np.frombuffer(base64.b64decode(stored), dtype=np.float64)
    return np.array(stored, dtype=np.float64).reshape(-1)


Vector: TypeAlias = Annotated[NDArray[np.float64], PlainValidator(_vector)]
"""The samples of a leaf, [coordinate]."""
RecordedCriterion: TypeAlias = Criterion[float]
RecordedHook: TypeAlias = HookedGradient[Vector]
RecordedBackward: TypeAlias = Backward[Vector, float]
RecordedClipping: TypeAlias = Clipping[Vector, float]
RecordedStep: TypeAlias = Step[Vector]
RecordedLeaf: TypeAlias = Leaf[Vector]
RecordedRank: TypeAlias = Rank[Vector, float]


@dataclass
class RecordedLine:
    """A line of a record: one of these."""

    rank: RecordedRank | None = None
    backward: RecordedBackward | None = None
    clipping: RecordedClipping | None = None
    step: RecordedStep | None = None
    end: End[Vector] | None = None


_LINE = TypeAdapter(RecordedLine)


def parse_line(line: str) -> RecordedLine:
    """Raises ValueError for a line that was cut off."""
    found = json.loads(line)
    for fields in found.values():
        for name in SAMPLES:
            if isinstance(fields.get(name), dict):
                fields[name] = _apart(**fields[name])
    return _LINE.validate_python(found)


def _apart(sizes: Sequence[int | None], joined: str | None) -> list[Vector | None]:
    """The values of each leaf; ``joined`` is None if no leaf has any."""
    if joined is None:
        return [None] * len(sizes)
    values = _vector(joined)
    samples: list[Vector | None] = []
    start = 0
    for size in sizes:
        if size is None:
            samples.append(None)
        else:
            samples.append(values[start : start + size])
            start += size
    return samples
