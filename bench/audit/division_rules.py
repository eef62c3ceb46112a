"""Rules about a loss that was divided by N twice, and about clipping that hides a wrong scale."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bench.audit.decoded_scenario import DecodedScenario, DecodedUpdate
from bench.audit.scenario import Reduction
from bench.audit.semantics_findings import AuditFinding, FindingLevel, is_near, share_of_updates


def divided_twice(decoded: DecodedScenario) -> Iterator[AuditFinding]:
    """Whether every loss was divided by N twice."""
    if not all_divided_twice(decoded):
        return
    n, clip = max(decoded.scenario.accumulate), decoded.scenario.clip_norm
    text = f"the loss was divided by N = {n} twice: a micro-batch weighs 1/{n * n} in its update instead of 1/{n}"
    if n == decoded.scenario.world_size:
        text += f" (or it was divided by the number of ranks, also {n})"
    if clip:
        text += f"; clipping would start at a norm of {n} x {clip:g} instead of {clip:g}, and no update was clipped"
    yield AuditFinding("divided twice", text)


def all_divided_twice(decoded: DecodedScenario) -> bool:
    """Whether each micro-batch of each update has the factor 1/N^2, or 1/N of the right one in an incomplete window.

    Where losses are not means, sums are compared instead. An update at the clipping threshold tells nothing.
    """
    pairs = [(update, decoded.scenario.accumulate_in(update.epochs[-1])) for update in decoded.updates]
    if not pairs or max(n for _, n in pairs) == 1 or any(is_clipped(update) for update, _ in pairs):
        return False
    complete = any(update.num_losses == n for update, n in pairs)
    if decoded.scenario.reduction is Reduction.WINDOW:
        return complete and all(is_near(update.sum, 1 / n) for update, n in pairs)
    return all(
        is_near(factor, 1 / n**2) or (complete and is_near(factor, 1 / (n * update.num_losses)))
        for update, n in pairs
        for factor in update.factors.values()
    )


def is_clipped(update: DecodedUpdate) -> bool:
    """Whether an update has the norm at which clipping starts."""
    norm = math.sqrt(math.fsum(coefficient**2 for coefficient in update.coefficients.values()))
    return bool(update.clip_norm) and is_near(norm, update.clip_norm)


def hidden_by_clipping(decoded: DecodedScenario) -> Iterator[AuditFinding]:
    """Whether every update was clipped, and would have been too small without that."""
    free = decoded.unclipped
    if free is None or not decoded.updates or not all(is_clipped(update) for update in decoded.updates):
        return
    if wrong := [update for update in free.updates if not is_near(update.ratio, 1)]:
        n, clip = max(decoded.scenario.accumulate), decoded.scenario.clip_norm
        least, most = (f"{of(update.ratio for update in wrong):.3g}" for of in (min, max))
        weight = f"{least if least == most else f'{least} to {most}'} of the right weight"
        of_updates = share_of_updates(wrong, free.updates)
        text = f"clipping hides a wrong scale: without it, {of_updates} had {weight}"
        if all_divided_twice(free):
            text = (
                f"clipping hides that the loss was divided by N = {n} twice: without it, {of_updates} "
                f"had {weight}; only a right norm above {n} x {clip:g} is clipped, instead of {clip:g}"
            )
        yield AuditFinding("hidden by clipping", text, FindingLevel.NOTE)
