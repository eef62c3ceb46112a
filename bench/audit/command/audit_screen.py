"""The verdict of an audit as lines of text and as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from bench.audit.command.gradient_weights import (
    ExplainedGradient,
    Place,
    Weight,
    largest_residual,
)
from bench.audit.command.loss_scale import described
from bench.audit.command.optimizer_audit import OptimizerAudit, pattern
from bench.audit.command.training_audit import NOT_JUDGED, TrainingAudit
from bench.audit.command.update_windows import counts_of
from bench.findings import Finding, Level

MARKS = {Level.ERROR: "x", Level.WARNING: "!", Level.NOTE: "-", Level.GOOD: "-"}
MOST_RANKS = 3
"""Ranks whose weights are shown."""
MOST_FINDINGS = 10
MOST_OPTIMIZERS = 2
MOST_WEIGHTS = 8
NOT_LOOKED_AT = (
    "data order, what a factor of the loss is meant to be, averages in tensors of their own, "
    "code outside of torch"
)


def headline(audit: TrainingAudit) -> str:
    """The verdict, and of which updates it is."""
    if audit.verdict == NOT_JUDGED or not audit.optimizers:
        return audit.verdict
    judged = map(partial(_judged, audit), audit.optimizers[:MOST_OPTIMIZERS])
    shown = f"{audit.verdict}, in {' and '.join(judged)}"
    if audit.is_right and audit.warnings:
        shown += f"; see also: {', '.join(audit.warnings)}"
    return shown


def _judged(audit: TrainingAudit, optimizer: OptimizerAudit) -> str:
    """Which updates of an optimizer are judged."""
    judged = len(optimizer.mine)
    total = audit.num_updates(optimizer.number)
    which = "update 1"
    if judged > 1:
        which = f"updates 1 to {judged}"
    if total is None:
        which += " (how many there are is not known)"
    elif total > judged:
        which += f" of {total}"
    if len(audit.optimizers) > 1:
        which += f" of {optimizer.title()}"
    return which


def evidence(audit: TrainingAudit) -> dict[str, str]:
    """What was seen, by name."""
    shown = {
        "ranks": f"{len(audit.ranks)} of {audit.first.world}",
        "wrappers": wrappers(audit.first.facts),
    }
    for optimizer in audit.optimizers[:MOST_OPTIMIZERS]:
        name = "updates"
        if optimizer is not audit.optimizers[0]:
            name += f" {optimizer.number + 1}"
        counts = pattern(counts_of(optimizer.mine))
        update = optimizer.mine[:2][-1]  # the first may be a special one
        shown[name] = f"{counts} backwards; events {update.events}; {optimizer.title()}"
    if audit.optimizers:
        backward = audit.optimizers[0].mine[0].backwards[0]
        shown["loss"] = described(next(iter(backward.criteria), None))
    for optimizer in audit.optimizers:
        if optimizer.gradients:
            shown |= _weights(audit, optimizer)
            break
    shown["sampled"] = f"{len(audit.first.leaves)} of {audit.first.num_leaves} parameters"
    shown["not seen"] = ", ".join([NOT_LOOKED_AT, *audit.first.unseen])
    return shown


def wrappers(facts: Mapping[str, str]) -> str:
    """Wrappers and engines, with what each was asked for."""
    if not facts:
        return "none"
    shown = [f"{name} {fact}".strip() for name, fact in facts.items()]
    return ", ".join(shown)


def _weights(audit: TrainingAudit, optimizer: OptimizerAudit) -> dict[str, str]:
    """What micro-batches weigh in one gradient, and how well that is known."""
    gradient = min(
        optimizer.gradients,
        key=lambda found: (abs(found.update - 1), found.gradient_of, -len(found.leaves)),
    )
    place = f"update {gradient.update + 1} of rank {gradient.gradient_of[0]}"
    losses = _loss_weights(optimizer, gradient)
    shown = {}
    for rank in list(audit.ranks)[:MOST_RANKS]:
        if rank in gradient.replicas:
            numbers = _numbers(gradient.of_rank(rank), losses)
            shown[f"rank {rank}"] = f"weights in {place}: {numbers}"
    residual = largest_residual(optimizer.gradients)
    shown["residual"] = f"{residual:.0e} of the gradients is not explained by weights"
    shown["held in"] = "unknown"
    if optimizer.held:
        shown["held in"] = ", ".join(sorted(optimizer.held))
    return shown


def _numbers(weights: list[Weight], losses: Mapping[Place, float | None]) -> str:
    """The weights of the first micro-batches of a rank: of their losses, if these are known."""
    if not weights:
        return "cannot be told apart"
    numbers = []
    for found in weights[:MOST_WEIGHTS]:
        weight = losses.get(found.place)
        if weight is None:
            weight = found.weight
        numbers.append(f"{weight:.4f}")
    if len(weights) > MOST_WEIGHTS:
        numbers.append("...")
    return " ".join(numbers)


def _loss_weights(
    optimizer: OptimizerAudit, gradient: ExplainedGradient
) -> dict[Place, float | None]:
    """What the main loss of a micro-batch weighs in a gradient, by rank and micro-batch.

    Empty if not known.
    """
    found: dict[Place, float | None] = {}
    if optimizer.scale is None:
        return found
    for weighed in optimizer.scale.weighed:
        main = weighed.main
        same = weighed.gradient
        if main and (same.update, same.gradient_of) == (gradient.update, gradient.gradient_of):
            for loss in weighed.of_kind(main[0]):
                found[loss.place] = loss.weight
    return found


def screen(audit: TrainingAudit) -> list[str]:
    """The screen: the verdict first, then the evidence."""
    return lines_of(headline(audit), audit.findings, evidence(audit), MOST_FINDINGS)


def lines_of(
    verdict: str, findings: Sequence[Finding], shown: Mapping[str, str], most: int
) -> list[str]:
    """A verdict, at most so many of its findings, and the evidence."""
    lines = [f"{'verdict':9} {verdict}"]
    for found in findings[:most]:
        lines.append(f"  {MARKS[found.level]} {found.topic}: {found.text}")
    if len(findings) > most:
        lines.append(f"  ... {len(findings) - most} more with --json")
    for name, text in shown.items():
        lines.append(f"{name:9} {text}")
    return lines


@dataclass(frozen=True)
class WeightRow:
    """The weight of one micro-batch in one gradient, as ``--json`` prints it."""

    optimizer: str
    update: int
    gradient_of: tuple[int, ...]
    parameters: list[str]
    rank: int
    micro_batch: int
    weight: float
    is_present: bool
    loss_weight: float | None


def weight_rows(audit: TrainingAudit) -> list[WeightRow]:
    """All weights that are known."""
    rows = []
    for optimizer in audit.optimizers:
        for gradient in optimizer.gradients:
            losses = _loss_weights(optimizer, gradient)
            for found in gradient.weights:
                rows.append(
                    WeightRow(
                        optimizer.title(),
                        gradient.update,
                        gradient.gradient_of,
                        gradient.leaves,
                        found.rank,
                        found.micro_batch,
                        found.weight,
                        found.is_present,
                        losses.get(found.place),
                    )
                )
    return rows


def document(audit: TrainingAudit, status: int) -> dict[str, object]:
    """The same as data."""
    return {
        "verdict": audit.verdict,
        "headline": headline(audit),
        "findings": [found.to_dict() for found in audit.findings],
        "exit_status": status,
        "evidence": evidence(audit),
        "weights": list(map(asdict, weight_rows(audit))),
    }
