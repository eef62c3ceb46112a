"""Rules for what the end of an epoch, of the windows and of the training does under Lightning, in numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bench.audit.lint.arithmetic import MAX_EPOCHS, Epochs
from bench.audit.lint.proof import Small
from bench.audit.lint.rules import LintFinding, Severity
from bench.audit.lint.trainer import TrainerConfig

KEEPS = 2
"""The ZeRO stage whose zero_grad leaves the gradients of an open window alone."""


def check(training: TrainerConfig) -> Iterator[LintFinding]:
    """Findings about partial windows and max_steps; none if NB is not known."""
    run = training.epochs
    if run is None or not training.max_epochs:
        return
    if training.accumulate > 1 and run.tail:
        yield from _split(training, run) if training.engine else _flushed(training, run)
    if training.max_steps:
        yield from _steps_above_engine(training, run) if training.engine else _steps(training, run)


def _small(run: Epochs) -> Small:
    return Small.of(run.accumulate, run.num_batches)


def _divisible(training: TrainerConfig) -> str:
    size = (training.batch_size or 1) * training.accumulate * (training.world_size or 1)
    if not training.batch_size or not training.world_size:
        return f"make the micro-batches per epoch a multiple of {training.accumulate}"
    return (
        f"make the samples a multiple of {training.batch_size} x {training.accumulate} x {training.world_size} = {size}"
        f", or limit_train_batches a multiple of {training.accumulate}"
    )


def _left(run: Epochs) -> str:
    if not run.whole:
        return f"{run.num_batches} micro-batches per epoch and rank are fewer than a window of {run.accumulate}"
    return (
        f"{run.num_batches} micro-batches per epoch and rank are {run.whole} windows of {run.accumulate}, and "
        f"{run.tail} left over"
    )


def _flushed(training: TrainerConfig, run: Epochs) -> Iterator[LintFinding]:
    yield training.trainer.at("accumulate_grad_batches").finding(
        "TAIL01" if run.whole else "WIN01",
        Severity.WARNING,
        f"{_left(run)}: Lightning steps with these {run.tail} and still divides by {run.accumulate}, so "
        f"{'the last' if run.whole else 'each'} step of every epoch has {run.tail}/{run.accumulate} of the mean "
        "gradient",
        _divisible(training) if run.whole else f"set accumulate_grad_batches to {run.num_batches} or less",
        _small(run).command(training.backend, drop_last=training.drop_last),
    )


def _consumed(training: TrainerConfig, run: Epochs) -> int | None:
    """Micro-batches of the whole training under DeepSpeed; None if it has no end."""
    ends = []
    if math.isfinite(training.max_epochs):
        ends.append(run.num_batches * int(training.max_epochs))
    if training.max_steps and (reached := run.batches_at_whole_step(training.max_steps)):
        ends.append(reached)
    return min(ends, default=None)


def _split(training: TrainerConfig, run: Epochs) -> Iterator[LintFinding]:
    """The trainer counts micro-batches anew in every epoch, the engine counts on."""
    assert training.engine is not None
    small = _small(run)
    place = training.trainer.at("accumulate_grad_batches")
    consumed = _consumed(training, run)
    epochs = min(training.max_epochs, MAX_EPOCHS)
    if consumed is not None:
        epochs = min(epochs, -(-consumed // run.num_batches))
    num_epochs = int(epochs)
    backend, drop_last = training.backend, training.drop_last
    if not run.whole:
        yield place.finding(
            "WIN01",
            Severity.ERROR,
            f"{_left(run)}: after {num_epochs} epochs DeepSpeed has made {run.carried(num_epochs)} steps and "
            "trainer.global_step is 0: learning-rate schedules of interval step do not move, nothing is logged per "
            "step, and max_steps is never reached",
            f"set accumulate_grad_batches to {run.num_batches} or less",
            small.command(backend, epochs=small.endless(), drop_last=drop_last),
        )
    elif num_epochs > 1:
        yield place.finding(
            "TAIL03",
            Severity.WARNING,
            f"{_left(run)}: DeepSpeed counts on, Lightning anew in every epoch. After {num_epochs} epochs the engine "
            f"has made {run.carried(num_epochs)} steps, trainer.global_step is {run.whole * num_epochs} (schedules, "
            f"max_steps and logs follow it), and estimated_stepping_batches says {run.flushed * num_epochs}",
            _divisible(training),
            small.command(backend, drop_last=drop_last),
        )
    if training.engine.stage != KEEPS and num_epochs > 1:
        lost, total = run.lost(num_epochs), run.num_batches * num_epochs
        yield place.finding(
            "TAIL04",
            Severity.ERROR,
            f"Lightning zeroes gradients where its own windows begin, in the middle of DeepSpeed's: with ZeRO-"
            f"{training.engine.stage}, {lost} of the {total} micro-batches of {num_epochs} epochs ({lost / total:.1%}) "
            "reach no update",
            f"{_divisible(training)}, or use ZeRO-2, which keeps them",
            small.command("lightning-ddp", backend, drop_last=drop_last, epochs=max(2, small.endless())),
        )
    if consumed is not None and consumed % run.accumulate:
        rest = consumed % run.accumulate
        yield place.finding(
            "TAIL05",
            Severity.WARNING,
            f"the training ends after {consumed} micro-batches per rank, {consumed // run.accumulate} windows of "
            f"{run.accumulate} and {rest} more: DeepSpeed never steps with the last {rest}",
            _divisible(training),
            Small(small.accumulate, 2 * small.accumulate + 1).command(backend, epochs=1),
        )


def _steps(training: TrainerConfig, run: Epochs) -> Iterator[LintFinding]:
    """max_steps where Lightning itself steps, at the end of every epoch too."""
    wanted = training.max_steps or 0
    place = training.trainer.at("max_steps")
    if run.flushed * training.max_epochs < wanted:
        yield place.finding(
            "STP03",
            Severity.INFO,
            f"max_epochs {training.max_epochs:g} ends the training after {training.max_epochs:g} x {run.flushed} = "
            f"{run.flushed * training.max_epochs:g} steps; max_steps {wanted} is never reached",
            f"take max_steps out, or set max_epochs: -1, or at least {-(-wanted // run.flushed)}",
            _small(run).command(training.backend, max_steps=100),
        )
        return
    consumed = run.batches_at_flushed_step(wanted)
    missing = wanted * run.accumulate - consumed
    # Where it ends with an epoch, somebody has counted the partial windows.
    if missing > 0 and consumed % run.num_batches:
        small = _small(run)
        yield place.finding(
            "STP01",
            Severity.WARNING,
            f"each epoch has {run.flushed} steps, the last with {run.tail} micro-batches: max_steps {wanted} is "
            f"reached after {consumed} micro-batches per rank, {missing} fewer than {wanted} x {run.accumulate} = "
            f"{wanted * run.accumulate}, and in epoch {-(-consumed // run.num_batches)}",
            f"{_divisible(training)}, or count {run.flushed} steps per epoch",
            small.command(
                training.backend, max_steps=2 * small.num_batches // small.accumulate, drop_last=training.drop_last
            ),
        )


def _steps_above_engine(training: TrainerConfig, run: Epochs) -> Iterator[LintFinding]:
    """max_steps counts trainer.global_step, not the engine's steps."""
    wanted = training.max_steps or 0
    place = training.trainer.at("max_steps")
    small = _small(run)
    last = run.whole * training.max_epochs if run.whole else 0
    if last < wanted:
        endless = not run.whole and math.isinf(training.max_epochs)
        ended = "the training never ends" if endless else f"max_epochs {training.max_epochs:g} ends the training"
        made = "" if endless else f" after {run.carried(int(training.max_epochs))} steps of the engine"
        severity = Severity.ERROR if endless else Severity.WARNING
        yield place.finding(
            "STP03",
            severity if endless or run.carried(int(training.max_epochs)) >= wanted else Severity.INFO,
            f"trainer.global_step grows by {run.whole} per epoch ({run.num_batches} // {run.accumulate}), so max_steps "
            f"{wanted} is never reached: {ended}{made}",
            "set max_epochs too, and accumulate_grad_batches to at most the micro-batches per epoch"
            if endless
            else _divisible(training),
            small.command(training.backend, max_steps=100 if run.whole else 2, epochs=max(2, small.endless())),
        )
        return
    consumed = run.batches_at_whole_step(wanted) or 0
    made_steps = consumed // run.accumulate
    if made_steps > wanted:
        max_steps, epochs = small.late()
        yield place.finding(
            "STP02",
            Severity.WARNING,
            f"trainer.global_step grows by {run.whole} per epoch, DeepSpeed carries {run.tail} micro-batches over: "
            f"when max_steps {wanted} is reached, after {consumed} micro-batches per rank, the engine has "
            f"made {made_steps} steps, {made_steps - wanted} more",
            _divisible(training),
            small.command(training.backend, max_steps=max_steps, epochs=epochs, drop_last=training.drop_last),
        )
