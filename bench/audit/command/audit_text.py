"""An audit as one screen, and as JSON."""

from __future__ import annotations

from typing import Any

from bench.audit.command.weight_verdicts import TrainingAudit, pattern
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
    optimizer = update.steps[0]["optimizer"]
    text.append(f"  updates   {len(audit.updates)}, of {counts} micro-batches; events {update.events}; {optimizer}")
    text += [f"  reduced   {_reduced(audit)}", f"  loss      {audit.loss_line()}"]
    text += _weights(audit)
    return text


def _reduced(audit: TrainingAudit) -> str:
    sent = audit.sent()
    if not any(sent):
        return "one rank" if audit.world == 1 else "never"
    kinds = {kind for window in audit.big_reductions() for reductions in window for kind in reductions}
    places = ", ".join(str(place) for place, size in enumerate(sent, 1) if size)
    whats = "; ".join(f"{operation} of {dtype} over {ranks} ranks" for operation, dtype, ranks in sorted(kinds))
    return f"at backward {places} of {len(sent)}; {whats}"


def _weights(audit: TrainingAudit) -> list[str]:
    if not audit.weights.parts:
        return []
    part = min(audit.weights.parts, key=lambda part: (abs(part.update - 1), part.ranks))
    text = []
    for rank in [*audit.ranks][:MOST_RANKS]:
        row = [(c, audit.loss_weight(use, c)) for use, c in part.weights.items() if use[:2] == (rank, part.update)]
        numbers = " ".join(f"{c if weight is None else weight:.4f}" for c, weight in row)
        place = f"update {part.update + 1} of rank {part.ranks[0]}"
        text.append(f"  weights   of rank {rank}'s micro-batches in {place}: {numbers}")
    dtypes = {dtype for update in audit.updates for mb in update.micro_batches for dtype in mb.event.get("held", ())}
    held = f"; held in {'/'.join(sorted(dtypes))}" if dtypes else ""
    text.append(f"  residual  {audit.weights.residual:.0e} of the gradients is not explained by weights{held}")
    return text


def document(audit: TrainingAudit, status: int) -> dict[str, Any]:
    """All that the screen says, as data."""
    return {
        "verdict": verdict(audit),
        "findings": [{"level": str(f.level), "topic": f.topic, "text": f.text} for f in audit.findings],
        "exit_status": status,
        "ranks": [*audit.ranks],
        "world_size": audit.world,
        "facts": audit.facts,
        "micro_batches": [len(update.micro_batches) for update in audit.updates],
        "reduced_bytes": audit.sent(),
        "criterion": audit.loss_line(),
        "weights": [
            {
                "update": part.update,
                "ranks": list(part.ranks),
                "residual": part.residual,
                "micro_batches": [
                    {
                        "rank": use[0],
                        "update": use[1],
                        "number": use[2],
                        "gradient": c,
                        "loss": audit.loss_weight(use, c),
                    }
                    for use, c in part.weights.items()
                ],
            }
            for part in audit.weights.parts
        ],
    }
