"""Compares what the ranks of a trial held after its training: with each other, and the reference.

It works on projections of tensors (``bench.measure.projection``), in the bench's own process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from typing_extensions import TypedDict

from bench import validation
from bench.errors import InputError
from bench.files import INPUT_BYTES, read_regular
from bench.measure.projection import (
    IN_FP32,
    PARAMETERS,
    TRAINED,
    UNCLIPPED,
    Part,
    Truth,
    Truths,
    added,
    distance,
    norm,
)

SMALL = 0.1
"""A tensor of less than this share of the root mean square of its kind is compared with that share.
The gradient of the bias of an attention's keys should be 0: its relative error would be one of
nothing."""
ROUNDING = 2.0**-23
"""Of an fp32 number, relative: what subtracting an update from a weight may leave, twice over."""
MOST_NAMED = 3
"""Tensors that a sentence names."""


class Worst(TypedDict):
    """The tensor of a kind that is furthest from what it should be."""

    error: float
    tensor: str


class Apart(Worst):
    """The tensor of which two ranks hold values that are furthest apart."""

    rank: int
    """The other one."""
    num_tensors: int
    """Tensors, or shards, that several ranks hold."""


def read_truths(path: Path) -> Truths | None:
    """What the reference held; None if there is no such file. Raises InputError if damaged."""
    try:
        content = json.loads(read_regular(path, INPUT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return validation.read(Truths, content, f"{path}: ")


def parts_of(result: Sequence[Mapping[str, Any]] | None) -> list[Part]:
    """The parts in a rank's result."""
    if result is None:
        return []
    return [Part(**part) for part in result]


def ranks_apart(ranks: Sequence[Sequence[Part]]) -> Apart | None:
    """How far replicas of a tensor, or of a shard, are apart; None if no two ranks hold the same.

    ``error`` is the distance from the first rank that holds the tensor, relative to its norm there;
    the worst of all.
    """
    first: dict[tuple[str, str, int, int], Part] = {}
    worst: Apart | None = None
    several: set[tuple[str, str, int, int]] = set()
    for rank, parts in enumerate(ranks):
        for part in parts:
            if not part.name or part.kind == TRAINED:
                continue
            place = (part.kind, part.name, part.start, part.count)
            if place not in first:
                first[place] = part
                continue
            several.add(place)
            error = _relative(part.projections, first[place].projections)
            if worst is None or error > worst["error"]:
                tensor = _named(part.kind, part.name)
                worst = Apart(error=error, tensor=tensor, rank=rank, num_tensors=0)
    if worst is not None:
        worst["num_tensors"] = len(several)
    return worst


def _named(kind: str, name: str) -> str:
    """A tensor in words."""
    if kind in (PARAMETERS, TRAINED):
        return name
    if kind in (UNCLIPPED, IN_FP32):
        return f"{name} {kind}"
    return f"{kind} of {name}"


def _relative(ours: Sequence[float], theirs: Sequence[float]) -> float:
    if list(ours) == list(theirs):
        return 0.0
    apart, size = distance(ours, theirs), norm(theirs)
    if not math.isfinite(apart) or not size:
        return math.inf
    return apart / size


def check_end(
    ranks: Sequence[Mapping[str, Any]], truths: Truths | None, windows: int
) -> dict[str, Any]:
    """What is recorded of the end of a training, as ``bench.run.trial_record.EndCheck`` has it."""
    parts = [parts_of(rank["parts"]) for rank in ranks]
    settings: list[str] = []
    steps: int | None = None
    for rank in ranks:
        settings += rank["settings"]
        if steps is None or (rank["steps"] is not None and rank["steps"] > steps):
            steps = rank["steps"]
    found: dict[str, Any] = {
        "settings": list(dict.fromkeys(settings)),
        "steps": steps,
        "rounded": [],
        "errors": {},
        "num_tensors": 0,
        "unchecked": "",
    }
    apart = ranks_apart(parts)
    if apart is not None:
        found["ranks"] = apart
    if truths is None:
        found["unchecked"] = "there is none of the reference"
        return found
    if truths.windows != windows:
        found["unchecked"] = f"the reference trains {truths.windows} of {windows} windows"
        return found
    found["rounded"] = list(_rounded(parts, truths))[:MOST_NAMED]
    found["errors"], missing = _errors(parts, truths, windows)
    found["num_tensors"] = sum(map(len, truths.tensors.values())) - len(missing)
    if missing and ranks[0]["whole"]:
        found["unchecked"] = (
            f"{missing[0]} and {len(missing) - 1} more tensors are not those of the reference"
        )
        if len(missing) == 1:
            found["unchecked"] = f"{missing[0]} is not that of the reference"
    return found


def _rounded(ranks: Sequence[Sequence[Part]], truths: Truths) -> Iterator[str]:
    """Tensors that a rank holds with no more digits than bf16, and the reference with more."""
    told = set()
    for rank, parts in enumerate(ranks):
        for part in parts:
            if not part.is_rounded:
                continue
            kind, name = part.kind, part.name
            if not name:
                name = "what the optimizer steps"
            what = _named(kind, name)
            if kind == PARAMETERS:
                kind = TRAINED
            right = truths.tensors.get(kind, {}).get(part.name)
            if right is None:
                is_wrong = not part.name  # of a name that the reference lacks nothing is known
            else:
                is_wrong = not right.is_rounded
            if not is_wrong or what in told:
                continue
            told.add(what)
            if rank:
                what = f"{what} on rank {rank}"
            yield what


def _errors(
    ranks: Sequence[Sequence[Part]], truths: Truths, windows: int
) -> tuple[dict[str, Worst], list[str]]:
    """The worst tensor of each kind, and those of the reference that the ranks lack in part."""
    shards: dict[tuple[str, str], dict[int, Part]] = {}
    for parts in ranks:
        for part in parts:
            shards.setdefault((part.kind, part.name), {}).setdefault(part.start, part)
    worst: dict[str, Worst] = {}
    missing: list[str] = []
    for kind, of_kind in truths.tensors.items():
        count, squares = 0, []
        for right in of_kind.values():
            count += right.count
            squares.append(right.scale**2)
        mean = math.sqrt(math.fsum(squares) / max(1, count))
        for name, right in of_kind.items():
            held = shards.get((kind, name), {})
            if sum(part.count for part in held.values()) != right.count:
                missing.append(_named(kind, name))
                continue
            error = _error(held, right, kind, mean, windows)
            if kind not in worst or error > worst[kind]["error"]:
                worst[kind] = Worst(error=error, tensor=name)
    return worst, missing


def _error(shards: Mapping[int, Part], right: Truth, kind: str, mean: float, windows: int) -> float:
    """The distance of a tensor from the reference's, relative to what training made of it there."""
    ours = added([shards[start].projections for start in sorted(shards)])
    apart = distance(ours, right.projections)
    if kind == TRAINED:  # each window rounds the weights once more
        apart = max(0.0, apart - ROUNDING * math.sqrt(windows) * right.size)
    scale = max(right.scale, SMALL * mean * math.sqrt(right.count))
    if not apart:
        return 0.0
    if not (scale and math.isfinite(apart)):
        return math.inf
    return apart / scale
