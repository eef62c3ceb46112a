"""An audit as one screen, and as JSON."""

from __future__ import annotations

from typing import Any

from bench.audit.command.training_audit import TrainingAudit, pattern
from bench.findings import Level

MARKS = {Level.ERROR: "x", Level.WARNING: "!", Level.GOOD: "-"}
MOST_RANKS = 3
"""Ranks whose weights are shown."""


def verdict(audit: TrainingAudit) -> str:
    """The faults, or how far the training was judged."""
    faults = [found.topic for found in audit.findings if found.level is Level.ERROR]
    judged = any(found.topic == "scale 1" for found in audit.findings)
    return ", ".join(faults) or ("right" if judged else "nothing wrong seen, not all judged")


def lines(audit: TrainingAudit) -> list[str]:
    """The screen: the verdict first, then the evidence."""
    text = [f"verdict   {verdict(audit)}"]
    text += [f"  {MARKS[found.level]} {found.topic}: {found.text}" for found in audit.findings]
    facts = ", ".join(name if fact is True else f"{name} {fact}" for name, fact in audit.facts.items())
    text.append(f"evidence  {len(audit.ranks)} of {audit.world} ranks; {facts or 'no wrapper'}")
    if not audit.updates:
        return text
    counts = pattern([len(update.micro_batches) for update in audit.updates])
    update = audit.updates[min(1, len(audit.updates) - 1)]
    text.append(f"  updates   {counts} micro-batches; events {update.shown()}; {update.steps[0]['optimizer']}")
    criterion = audit.scale.line((next(iter(audit.ranks)), 0, 0))
    return [*text, f"  loss      {criterion}", *_weights(audit)]


def _weights(audit: TrainingAudit) -> list[str]:
    if not audit.parts:
        return []
    # The first update may be a special one.
    part = min(audit.parts, key=lambda part: (abs(part.update - 1), part.ranks))
    text = []
    for rank in [*audit.ranks][:MOST_RANKS]:
        row = [(c, audit.scale.weight(use, c)) for use, c in part.weights.items() if use[0] == rank]
        numbers = " ".join(f"{c if weight is None else weight:.4f}" for c, weight in row) or "cannot be told apart"
        where = f"update {part.update + 1} of rank {part.ranks[0]}"
        text.append(f"  weights   of rank {rank}'s micro-batches in {where}: {numbers}")
    residual = max(part.residual for part in audit.parts)
    held = f"; held in {'/'.join(sorted(audit.held))}" if audit.held else ""
    return [*text, f"  residual  {residual:.0e} of the gradients is not explained by weights{held}"]


def document(audit: TrainingAudit, status: int) -> dict[str, Any]:
    """The verdict and the evidence as data."""
    weights = [
        {
            "update": part.update,
            "gradient_of": part.ranks,
            "rank": use[0],
            "micro_batch": use[2],
            "weight": weight,
            "loss_weight": audit.scale.weight(use, weight),
        }
        for part in audit.parts
        for use, weight in part.weights.items()
    ]
    return {
        "verdict": verdict(audit),
        "findings": [finding.to_dict() for finding in audit.findings],
        "exit_status": status,
        "ranks": [*audit.ranks],
        "world_size": audit.world,
        "facts": audit.facts,
        "micro_batches": [len(update.micro_batches) for update in audit.updates],
        "reduced_bytes": [found.total() for found in audit.reductions()],
        "weights": weights,
    }
