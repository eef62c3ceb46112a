"""The verdict of an audit as lines of text and as data."""

from __future__ import annotations

from typing import Any

from bench.audit.command.loss_scale import LossScale, described
from bench.audit.command.optimizer_audit import OptimizerAudit, pattern
from bench.audit.command.training_audit import NOT_JUDGED, TrainingAudit
from bench.findings import Level

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
    parts = []
    for optimizer in audit.optimizers[:MOST_OPTIMIZERS]:
        judged = len(optimizer.mine)
        total = audit.num_updates(optimizer.number)
        which = f"updates 1 to {judged}" if judged > 1 else "update 1"
        if total is None:
            which += " (how many there are is not known)"
        elif total > judged:
            which += f" of {total}"
        if len(audit.optimizers) > 1:
            which += f" of {optimizer.title()}"
        parts.append(which)
    return f"{audit.verdict}, in {' and '.join(parts)}"


def evidence(audit: TrainingAudit) -> dict[str, str]:
    """What was seen, by name."""
    facts = [f"{name} {fact}".strip() for name, fact in audit.first.facts.items()]
    shown = {
        "ranks": f"{len(audit.ranks)} of {audit.first.world}",
        "wrappers": ", ".join(facts) or "none",
    }
    for optimizer in audit.optimizers[:MOST_OPTIMIZERS]:
        name = "updates" if optimizer is audit.optimizers[0] else f"updates {optimizer.number + 1}"
        counts = pattern([update.count for update in optimizer.mine])
        update = optimizer.mine[:2][-1]  # the first may be a special one
        shown[name] = f"{counts} backwards; events {update.events}; {optimizer.title()}"
    if audit.optimizers:
        backward = audit.optimizers[0].mine[0].backwards[0]
        shown["loss"] = described(next(iter(backward.criteria), None))
    weighed = [optimizer for optimizer in audit.optimizers if optimizer.gradients]
    if weighed:
        shown |= _weights(audit, weighed[0])
    shown["sampled"] = f"{len(audit.first.leaves)} of {audit.first.num_leaves} parameters"
    shown["not seen"] = NOT_LOOKED_AT
    return shown


def _weights(audit: TrainingAudit, optimizer: OptimizerAudit) -> dict[str, str]:
    shown = {}
    gradient = min(
        optimizer.gradients,
        key=lambda found: (abs(found.update - 1), found.gradient_of, -len(found.leaves)),
    )
    place = f"update {gradient.update + 1} of rank {gradient.gradient_of[0]}"
    losses = loss_weights(optimizer.scale)
    for rank in [*audit.ranks][:MOST_RANKS]:
        row = []
        for found in gradient.weights:
            if found.rank == rank:
                weight = losses.get(
                    (gradient.update, gradient.gradient_of, rank, found.micro_batch)
                )
                row.append(found.weight if weight is None else weight)
        numbers = (
            " ".join(f"{weight:.4f}" for weight in row[:MOST_WEIGHTS]) or "cannot be told apart"
        )
        if len(row) > MOST_WEIGHTS:
            numbers += " ..."
        if rank in gradient.replicas:
            shown[f"rank {rank}"] = f"weights in {place}: {numbers}"
    residual = max(gradient.residual for gradient in optimizer.gradients)
    shown["residual"] = f"{residual:.0e} of the gradients is not explained by weights"
    shown["held in"] = ", ".join(sorted(optimizer.held)) or "unknown"
    return shown


def loss_weights(
    scale: LossScale | None,
) -> dict[tuple[int, tuple[int, ...], int, int], float | None]:
    """What the main loss of a micro-batch weighs, by update, gradient, rank and micro-batch."""
    found: dict[tuple[int, tuple[int, ...], int, int], float | None] = {}
    if scale is None:
        return found
    for weighed in scale.weighed:
        main = weighed.main
        for loss in weighed.losses:
            if loss.kind in main[:1]:
                found[weighed.gradient.update, weighed.gradient.gradient_of, *loss.place] = (
                    loss.weight
                )
    return found


def screen(audit: TrainingAudit) -> list[str]:
    """The screen: the verdict first, then the evidence."""
    findings = [f"  {MARKS[found.level]} {found.topic}: {found.text}" for found in audit.findings]
    if len(findings) > MOST_FINDINGS:
        findings = [
            *findings[:MOST_FINDINGS],
            f"  ... {len(findings) - MOST_FINDINGS} more with --json",
        ]
    shown = [f"{name:9} {text}" for name, text in evidence(audit).items()]
    return [f"{'verdict':9} {headline(audit)}", *findings, *shown]


def document(audit: TrainingAudit, status: int) -> dict[str, Any]:
    """The same as data."""
    rows = []
    for optimizer in audit.optimizers:
        losses = loss_weights(optimizer.scale)
        for gradient in optimizer.gradients:
            for found in gradient.weights:
                place = gradient.update, gradient.gradient_of, found.rank, found.micro_batch
                rows.append(
                    {
                        "optimizer": optimizer.title(),
                        "update": gradient.update,
                        "gradient_of": gradient.gradient_of,
                        "parameters": gradient.leaves,
                        **vars(found),
                        "loss_weight": losses.get(place),
                    }
                )
    return {
        "verdict": audit.verdict,
        "headline": headline(audit),
        "findings": [found.to_dict() for found in audit.findings],
        "exit_status": status,
        "evidence": evidence(audit),
        "weights": rows,
    }
