"""The table of optimizer steps by rule, and the notes below it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bench.words import plural

if TYPE_CHECKING:
    from bench.audit.stepcount import StepRule, Steps
    from bench.audit.training import TrainingPlan

FEW = 4
"""Backends that are named in a sentence; with more, only their rules are named."""
SHOWN = 6
"""Epochs whose steps the table lists; ``--json`` has all."""


def differences_in_words(training: TrainingPlan, wrong: str, rows: list[dict[str, Any]]) -> list[str]:
    """One line per sentence, with the backends that it is about; none if nothing differs."""
    lines = [f"all: {note}" for note in notes_on(training)] + [f"naive: {wrong}"] * bool(wrong)
    said: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        for sentence in row["differences"]:
            said.setdefault(sentence, []).append(row)
    for sentence, those in said.items():
        names = [name for row in those for name in row["backends"]]
        lines.append(f"{', '.join(names if len(names) <= FEW else [row['name'] for row in those])}: {sentence}")
    return ["", *lines] if lines else []


def title_of(rule: StepRule) -> str:
    """A rule in a few words."""
    from bench.plan.cell import Stepping

    if rule.stepping is not Stepping.SPLIT:
        return str(rule.stepping)
    words = ["clearing"] * rule.clears + ["divided once"] * (not rule.twice)
    return f"split ({', '.join(words)})" if words else "split"


HEADER = (
    "rule",
    "updates",
    "per epoch",
    "micro-batches",
    "epochs",
    "ends by",
    "= max_steps",
    "scale",
    "used",
    "cleared",
    "left open",
    "dropped",
)


def row_of(rule: StepRule, steps: Steps | None) -> tuple[str, ...]:
    """A row of the table, by HEADER."""
    if steps is None:
        return (title_of(rule), *["unknown"], *["-"] * (len(HEADER) - 2))
    shown = steps.steps_per_epoch[:SHOWN]
    scales = [f"{scale:.4g}" for scale in steps.update_scales]
    return (
        title_of(rule),
        str(steps.optimizer_steps) + ("+" if steps.stops == "never" else ""),
        ",".join(map(str, shown)) + ("..." if len(shown) < len(steps.steps_per_epoch) else ""),
        str(steps.micro_batches_consumed),
        f"{steps.epochs_consumed:.4g}",
        str(steps.stops),
        "-" if steps.equal_max_steps is None else str(steps.equal_max_steps),
        "-" if not scales else scales[0] if len(scales) == 1 else f"{scales[-1]}-{scales[0]}",
        str(steps.samples_used),
        str(steps.samples_lost_in_mid_run),
        str(steps.samples_left_open),
        str(steps.samples_dropped),
    )


def notes_on(training: TrainingPlan) -> list[str]:
    """What holds for every backend."""
    notes = []
    if padding := training.padding_per_epoch:
        fate = "" if training.dropped_per_epoch == 0 else ", all of them among those that drop_last leaves out"
        notes.append(
            f"DistributedSampler repeats {plural(padding, 'sample')} per epoch, so that all ranks have as many{fate}"
        )
    by_sampler = max(0, training.samples - training.samples_per_rank * training.world_size)
    if by_sampler:
        notes.append(f"DistributedSampler leaves out {plural(by_sampler, 'sample')} in every epoch")
    if dropped := training.dropped_per_epoch - by_sampler:
        notes.append(
            f"drop_last leaves out {plural(dropped, 'sample')} in every epoch, the incomplete micro-batch of "
            f"{training.samples_per_rank % training.batch_size} on each rank; it never leaves out an incomplete window"
        )
    if training.last_micro_batch < training.batch_size:
        notes.append(
            f"the last micro-batch of an epoch has {training.last_micro_batch} of {training.batch_size} samples and "
            "weighs like a full one where losses are means over the micro-batch: each of its samples counts "
            f"{training.batch_size / training.last_micro_batch:.4g} times as much"
        )
    return notes
