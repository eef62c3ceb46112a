"""An audit as data, and as one screen."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from bench.audit.command.loss_scale import described
from bench.audit.command.training_audit import TrainingAudit, pattern
from bench.findings import Level

MARKS = {Level.ERROR: "x", Level.WARNING: "!", Level.GOOD: "-"}
MOST_RANKS = 3
"""Ranks whose weights are shown."""


def evidence(audit: TrainingAudit) -> dict[str, str]:
    """What was seen, by name."""
    facts = [f"{name} {fact}".strip() for name, fact in audit.first.facts.items()]
    shown = {"ranks": f"{len(audit.ranks)} of {audit.first.world}", "wrappers": ", ".join(facts) or "none"}
    if not audit.updates:
        return shown
    update = audit.updates[min(1, len(audit.updates) - 1)]  # the first may be a special one
    counts = pattern([update.count for update in audit.updates])
    shown["updates"] = f"{counts} micro-batches; events {update.events}; {update.optimizer}"
    shown["loss"] = described(update.micro_batches[0])
    if not audit.gradients:
        return shown
    gradient = min(audit.gradients, key=lambda gradient: (abs(gradient.update - 1), gradient.ranks))
    for rank in [*audit.ranks][:MOST_RANKS]:
        weights = [found for found in gradient.weights if found.rank == rank]
        row = [found.weight if found.loss_weight is None else found.loss_weight for found in weights]
        numbers = " ".join(f"{weight:.4f}" for weight in row) or "cannot be told apart"
        shown[f"rank {rank}"] = f"weights in update {gradient.update + 1} of rank {gradient.ranks[0]}: {numbers}"
    residual = max(gradient.residual for gradient in audit.gradients)
    shown["residual"] = f"{residual:.0e} of the gradients is not explained by weights"
    shown["held in"] = ", ".join(sorted(audit.held)) or "unknown"
    return shown


def lines(audit: TrainingAudit) -> list[str]:
    """The screen: the verdict first, then the evidence."""
    findings = [f"  {MARKS[found.level]} {found.topic}: {found.text}" for found in audit.findings]
    shown = [f"{name:9} {text}" for name, text in evidence(audit).items()]
    return [f"{'verdict':9} {audit.verdict}", *findings, *shown]


def document(audit: TrainingAudit, status: int) -> dict[str, Any]:
    """The same as data."""
    return {
        "verdict": audit.verdict,
        "findings": [found.to_dict() for found in audit.findings],
        "exit_status": status,
        "evidence": evidence(audit),
        "weights": [asdict(weight) for gradient in audit.gradients for weight in gradient.weights],
    }
