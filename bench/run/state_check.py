"""Compares what the ranks of a trial held when a training was over: with each other, and with the reference.

It works on projections of tensors (``bench.measure.projection``), in the bench's own process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
"""A tensor of less than this share of the root mean square of its kind is compared with that share. The gradient of the
bias of an attention's keys should be 0: its relative error would be one of nothing."""
ROUNDING = 2.0**-23
"""Of an fp32 number, relative: what subtracting an update from a weight may leave, twice over."""
MOST_NAMED = 3
"""Tensors that a sentence names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The tensor of a kind that is furthest from what it should be."""

    error: float
    tensor: str
    rank: int | None = None


def read_truths(path: Path) -> Truths | None:
    """What the reference held; None if there is no such file. Raises InputError for a damaged one."""
    try:
        content = json.loads(read_regular(path, INPUT_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return validation.read(Truths, content, f"{path}: ")


def parts_of(result: Sequence[Mapping[str, Any]] | None) -> list[Part]:
    """The parts in a rank's result."""
    return [Part(**part) for part in result or ()]


def ranks_apart(ranks: Sequence[Sequence[Part]]) -> tuple[Worst | None, int]:
    """How far replicas of one tensor, or of one shard, are apart, and the number of tensors of which there are several.

    ``error`` is the distance from the first rank that holds the tensor, relative to its norm there; the worst of all.
    None if no two ranks hold the same.
    """
    first: dict[tuple[str, str, int, int], Part] = {}
    worst: Worst | None = None
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
            if worst is None or error > worst.error:
                worst = Worst(error=error, tensor=_named(part.kind, part.name), rank=rank)
    return worst, len(several)


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
    """What is to be recorded of the ends of a training on all ranks (``bench.run.trial_record.EndCheck``)."""
    parts = [parts_of(rank["parts"]) for rank in ranks]
    settings = dict.fromkeys(text for rank in ranks for text in rank["settings"])
    counted = [rank["steps"] for rank in ranks if rank["steps"] is not None]
    found: dict[str, Any] = {
        "settings": list(settings),
        "steps": max(counted, default=None),
        "rounded": [],
        "errors": {},
        "num_tensors": 0,
        "unchecked": "",
    }
    worst, several = ranks_apart(parts)
    if worst is not None:
        found["ranks"] = {
            "error": worst.error,
            "tensor": worst.tensor,
            "rank": worst.rank,
            "num_tensors": several,
        }
    if reason := _why_not(truths, windows):
        found["unchecked"] = reason
        return found
    assert truths is not None
    found["rounded"] = list(_rounded(parts, truths))[:MOST_NAMED]
    errors, missing = _errors(parts, truths, windows)
    found["errors"] = {
        kind: {"error": each.error, "tensor": each.tensor} for kind, each in errors.items()
    }
    found["num_tensors"] = sum(len(of_kind) for of_kind in truths.tensors.values()) - len(missing)
    if missing and ranks[0]["whole"]:
        found["unchecked"] = (
            f"{missing[0]} and {len(missing) - 1} more tensors are not those of the reference"
        )
        if len(missing) == 1:
            found["unchecked"] = f"{missing[0]} is not that of the reference"
    return found


def _why_not(truths: Truths | None, windows: int) -> str:
    if truths is None:
        return "there is none of the reference"
    if truths.windows != windows:
        return f"the reference trains {truths.windows} of {windows} windows"
    return ""


def _rounded(ranks: Sequence[Sequence[Part]], truths: Truths) -> Iterator[str]:
    """Tensors that a rank holds with no more digits than bf16, and the reference with more."""
    told = set()
    for rank, parts in enumerate(ranks):
        for part in parts:
            right = truths.tensors.get(part.kind, {}).get(part.name)
            if part.kind == PARAMETERS:
                right = truths.tensors.get(TRAINED, {}).get(part.name)
            is_finer_there = right is None or not right.is_rounded
            is_checked = right is not None or not part.name
            what = _named(part.kind, part.name or "what the optimizer steps")
            if part.is_rounded and is_finer_there and is_checked and what not in told:
                told.add(what)
                yield what if rank == 0 else f"{what} on rank {rank}"


def _errors(
    ranks: Sequence[Sequence[Part]], truths: Truths, windows: int
) -> tuple[dict[str, Worst], list[str]]:
    """The worst tensor of each kind, and the tensors of the reference that the ranks do not have in full."""
    shards: dict[tuple[str, str], dict[int, Part]] = {}
    for parts in ranks:
        for part in parts:
            shards.setdefault((part.kind, part.name), {}).setdefault(part.start, part)
    worst: dict[str, Worst] = {}
    missing: list[str] = []
    for kind, of_kind in truths.tensors.items():
        count = sum(right.count for right in of_kind.values())
        mean = math.sqrt(math.fsum(right.scale**2 for right in of_kind.values()) / max(1, count))
        for name, right in of_kind.items():
            held = shards.get((kind, name), {})
            if sum(part.count for part in held.values()) != right.count:
                missing.append(_named(kind, name))
                continue
            error = _error(held, right, kind, mean, windows)
            if kind not in worst or error > worst[kind].error:
                worst[kind] = Worst(error=error, tensor=name)
    return worst, missing


def _error(shards: Mapping[int, Part], right: Truth, kind: str, mean: float, windows: int) -> float:
    """The distance of a tensor from the reference's, relative to what training has made of it there."""
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
