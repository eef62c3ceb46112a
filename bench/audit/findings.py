"""What a finding is, and the words that findings share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from bench.audit.reading import ReadUpdate, Use
from bench.words import plural


class Gravity(IntEnum):
    """How much a finding matters; the verdict is the first finding of the highest level."""

    DETAIL = 0
    """As anybody would expect; the verdict is ``right`` all the same."""
    NOTE = 1
    """Every update is the big batch of something, but perhaps not of what one thinks."""
    WRONG = 2
    """Some update is not the big batch of any samples, or samples, steps or counts are not what they are said to be."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One thing that happened."""

    word: str
    """What happened, in a word or two; the same for every backend to which it happens."""
    text: str
    """The same in a sentence, with its numbers."""
    level: Gravity = Gravity.WRONG


RIGHT = Diagnosis("right", "every update is the big batch of its window", Gravity.DETAIL)


def verdict(found: Iterable[Diagnosis]) -> Diagnosis:
    """The finding that names the scenario's outcome; RIGHT if there is none above DETAIL."""
    grave = [finding for finding in found if finding.level > Gravity.DETAIL]
    return max(grave, key=lambda finding: finding.level, default=RIGHT)


SINGULAR = {"are": "is", "come": "comes", "make": "makes", "mix": "mixes", "reach": "reaches", "were": "was", "": ""}
"""Verbs of one, by those of several."""


def agreeing(count: int, verb: str) -> str:
    """The verb of so many, from that of several."""
    return SINGULAR[verb] if count == 1 else verb


def of(some: list[ReadUpdate], every: list[ReadUpdate], verb: str = "") -> str:
    """How many updates, with the verb of so many."""
    if len(every) == 1:
        return f"the only update {SINGULAR[verb]}".rstrip()
    count = f"all {len(every)}" if len(some) == len(every) else f"{len(some)} of {len(every)}"
    return f"{count} updates {agreeing(len(some), verb)}".rstrip()


def uses(some: list[Use], verb: str, where: str = "") -> str:
    """How many samples, in how many micro-batches of each rank, perhaps where, and the verb of so many."""
    fetches = micro_batches(len({use.fetch for use in some}))
    words = (plural(len(some), "sample"), f"(of {fetches} per rank)", where, agreeing(len(some), verb))
    return " ".join(filter(None, words))


def micro_batches(count: int, verb: str = "") -> str:
    """So many micro-batches, with the verb of so many."""
    return f"{plural(count, 'micro-batch', 'es')} {agreeing(count, verb)}".rstrip()


def count_range(counts: Iterable[int]) -> str:
    """One count, or the smallest and the largest."""
    ordered = sorted(counts)
    return f"{ordered[0]}" if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"
