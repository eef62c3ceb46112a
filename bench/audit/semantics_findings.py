"""Findings about a scenario: their levels, and the phrases with which they count."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from bench.audit.decoded_scenario import DecodedUpdate, Use
from bench.formatting import plural

TOLERANCE = 1e-4
"""Relative. Coefficients are exact to 6e-8 (fp32); the smallest error that a backend makes here is 1e-2."""


class FindingLevel(IntEnum):
    """How much a finding matters; the verdict is the first finding of the highest level."""

    DETAIL = 0
    """As expected; the verdict is ``right`` all the same."""
    NOTE = 1
    """Every update is the full batch of some samples, but perhaps not of those that were meant."""
    WRONG = 2
    """An update is the full batch of no samples, or samples, steps or counters are not what they should be."""


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """One thing that happened in a scenario."""

    word: str
    """What happened, in a word or two; the same for every backend."""
    text: str
    """The same in a sentence, with numbers."""
    level: FindingLevel = FindingLevel.WRONG


RIGHT = AuditFinding("right", "every update equals that of one full batch over its window", FindingLevel.DETAIL)


def verdict(found: Iterable[AuditFinding]) -> AuditFinding:
    """The finding that names the outcome of a scenario; RIGHT if all are details."""
    above = [finding for finding in found if finding.level > FindingLevel.DETAIL]
    return max(above, key=lambda finding: finding.level, default=RIGHT)


def share_of_updates(some: Sequence[DecodedUpdate], every: Sequence[DecodedUpdate]) -> str:
    """``1 of 5 updates``, ``all 3 updates`` or ``the only update``."""
    if len(every) == 1:
        return "the only update"
    return f"all {len(every)} updates" if len(some) == len(every) else f"{len(some)} of {len(every)} updates"


def samples_text(some: Sequence[Use]) -> str:
    """``8 samples (2 micro-batches per rank)``."""
    return f"{plural(len(some), 'sample')} ({plural(len({use.fetch for use in some}), 'micro-batch')} per rank)"


def count_range(counts: Iterable[int]) -> str:
    """``4`` if all counts are equal, else ``2 to 4``."""
    ordered = sorted(counts)
    return f"{ordered[0]}" if ordered[0] == ordered[-1] else f"{ordered[0]} to {ordered[-1]}"


def is_near(value: float, wanted: float) -> bool:
    """Whether a value is the wanted one within TOLERANCE."""
    return math.isclose(value, wanted, rel_tol=TOLERANCE)
