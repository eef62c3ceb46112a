"""Findings about a scenario: the verdict, phrases that count, and rules about divisors.

These are rules on a loss that was divided by N twice, and on clipping that hides a wrong scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from bench.audit.decoded_scenario import DecodedScenario, DecodedUpdate, Use
from bench.audit.scenario import Reduction
from bench.findings import Finding, Level, error, good, note
from bench.formatting import plural

TOLERANCE = 1e-4
"""Relative. Coefficients are exact to 6e-8 (fp32); the smallest error that a backend makes here is
1e-2."""


RIGHT = good("right", "every update equals that of one full batch over its window")


def verdict(found: Iterable[Finding]) -> Finding:
    """The finding that names the outcome of a scenario: the first of the gravest.

    RIGHT if all are good.

    An error is an update that is the full batch of no samples, or samples, steps or counters that
    are not what they should be. With a note every update is the full batch of some samples, but
    perhaps not of those that were meant. What is good is as expected.
    """
    grave = [finding for finding in found if finding.level is not Level.GOOD]
    return min(grave, key=lambda finding: finding.level.rank, default=RIGHT)


def share_of_updates(some: Sequence[DecodedUpdate], every: Sequence[DecodedUpdate]) -> str:
    """``1 of 5 updates``, ``all 3 updates`` or ``the only update``."""
    if len(every) == 1:
        return "the only update"
    if len(some) == len(every):
        return f"all {len(every)} updates"
    return f"{len(some)} of {len(every)} updates"


def samples_text(some: Sequence[Use]) -> str:
    """``8 samples (2 micro-batches per rank)``."""
    fetches = {use.fetch for use in some}
    return f"{plural(len(some), 'sample')} ({plural(len(fetches), 'micro-batch')} per rank)"


def count_range(counts: Iterable[int]) -> str:
    """``4`` if all counts are equal, else ``2 to 4``."""
    ordered = sorted(counts)
    return span(str(ordered[0]), str(ordered[-1]))


def span(least: str, most: str) -> str:
    """``4`` if both are equal, else ``2 to 4``."""
    if least == most:
        return least
    return f"{least} to {most}"


def is_near(value: float, wanted: float) -> bool:
    """Whether a value is the wanted one within TOLERANCE."""
    return math.isclose(value, wanted, rel_tol=TOLERANCE)


def divided_twice(decoded: DecodedScenario) -> Iterator[Finding]:
    """Whether every loss was divided by N twice."""
    if not all_divided_twice(decoded):
        return
    n, clip = max(decoded.scenario.accumulate), decoded.scenario.clip_norm
    text = f"the loss was divided by N = {n} twice: a micro-batch weighs 1/{n * n} in its update "
    text += f"instead of 1/{n}"
    if n == decoded.scenario.world_size:
        text += f" (or it was divided by the number of ranks, also {n})"
    if clip:
        text += f"; clipping would start at a norm of {n} x {clip:g} instead of {clip:g}, "
        text += "and no update was clipped"
    yield error("divided twice", text)


def all_divided_twice(decoded: DecodedScenario) -> bool:
    """Whether all micro-batches weigh 1/N^2, or 1/N of the right weight in a short window.

    Where losses are not means, sums are compared instead. An update at the clipping threshold tells
    nothing.
    """
    updates = decoded.updates
    lengths = [decoded.accumulate_of(update) for update in updates]
    if max(lengths, default=1) == 1 or any(map(is_clipped, updates)):
        return False
    any_complete = False
    for update, n in zip(updates, lengths, strict=True):
        if update.num_losses == n:
            any_complete = True
    if decoded.scenario.reduction is Reduction.WINDOW and not any_complete:
        return False
    for update, n in zip(updates, lengths, strict=True):
        if decoded.scenario.reduction is Reduction.WINDOW:
            is_divided = is_near(update.sum, 1 / n)
        else:
            is_divided = _factors_are_divided_twice(update, n, may_be_incomplete=any_complete)
        if not is_divided:
            return False
    return True


def _factors_are_divided_twice(update: DecodedUpdate, n: int, *, may_be_incomplete: bool) -> bool:
    """Whether each micro-batch of an update has such a factor.

    Of an incomplete window if that may be.
    """
    for factor in update.factors.values():
        if is_near(factor, 1 / n**2):
            continue
        if not may_be_incomplete or not is_near(factor, 1 / (n * update.num_losses)):
            return False
    return True


def is_clipped(update: DecodedUpdate) -> bool:
    """Whether an update has the norm at which clipping starts."""
    if not update.clip_norm:
        return False
    return is_near(math.hypot(*update.coefficients.values()), update.clip_norm)


def hidden_by_clipping(decoded: DecodedScenario) -> Iterator[Finding]:
    """Whether every update was clipped, and would have been too small without that."""
    free = decoded.unclipped
    if free is None or not decoded.updates or not all(map(is_clipped, decoded.updates)):
        return
    wrong = [update for update in free.updates if not is_near(update.ratio, 1)]
    if not wrong:
        return
    ratios = [update.ratio for update in wrong]
    weight = f"{span(f'{min(ratios):.3g}', f'{max(ratios):.3g}')} of the right weight"
    of_updates = share_of_updates(wrong, free.updates)
    text = f"clipping hides a wrong scale: without it, {of_updates} had {weight}"
    if all_divided_twice(free):
        n, clip = max(decoded.scenario.accumulate), decoded.scenario.clip_norm
        text = (
            f"clipping hides that the loss was divided by N = {n} twice: without it, {of_updates} "
            f"had {weight}; only a right norm above {n} x {clip:g} is clipped, instead of {clip:g}"
        )
    yield note("hidden by clipping", text)
