"""Rules for what the end of an epoch, of a window and of the training does under Lightning, in numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from bench.audit.lint.arithmetic import CARRY, FLUSH, SPLIT
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rules import LintFinding, Severity
from bench.audit.lint.trainer import TrainerConfig
from bench.audit.stepcount import Steps, Stops, calculate, reaches, updates
from bench.audit.training import TrainingPlan

KEEPS = 2
"""The ZeRO stage whose zero_grad does not clear the gradients of an open window."""


def check(training: TrainerConfig) -> Iterator[LintFinding]:
    """Findings about partial windows and max_steps; none if NB is unknown."""
    plan = training.windows
    if training.dev_run and training.schedule is None:
        yield from _dev_run(training)
    if plan is None or not training.max_epochs or training.max_steps == 0:
        return
    if training.accumulate > 1 and plan.partial_window:
        yield from _partial_above_engine(training, plan) if training.engine else _partial(training, plan)
    if training.max_steps:
        yield from _steps_above_engine(training, plan) if training.engine else _steps(training, plan)


def small_run(plan: TrainingPlan) -> SmallRun:
    """A small training with the same structure."""
    return SmallRun.of(plan.accumulate, plan.micro_batches_per_epoch)


def _divisible(training: TrainerConfig) -> str:
    n, batch, ranks = training.accumulate, training.batch_size, training.world_size
    if not batch or not ranks:
        more = f", such as {training.limit.path[-1]}" if training.limit.given else ""
        return f"make the micro-batches per epoch{more} a multiple of {n}"
    size = f"{batch} x {n} x {ranks} = {batch * n * ranks}"
    return f"make the samples a multiple of {size}, or {training.limit.path[-1]} a multiple of {n}"


def _windows(plan: TrainingPlan) -> str:
    batches = f"{plan.micro_batches_per_epoch} micro-batches per epoch and rank"
    if not plan.full_windows:
        return f"{batches} are fewer than a window of {plan.accumulate}"
    return f"{batches} are {plan.full_windows} windows of {plan.accumulate}, and {plan.partial_window} left over"


def _partial(training: TrainerConfig, plan: TrainingPlan) -> Iterator[LintFinding]:
    """Lightning itself steps at the end of every epoch."""
    tail, n, whole = plan.partial_window, plan.accumulate, plan.full_windows
    yield training.trainer.at("accumulate_grad_batches").finding(
        "TAIL01" if whole else "WIN01",
        f"{_windows(plan)}: Lightning steps after these {tail} but still divides by {n}, so "
        f"{'the last' if whole else 'each'} step of every epoch has {tail}/{n} of the mean gradient",
        _divisible(training) if whole else f"set accumulate_grad_batches to {plan.micro_batches_per_epoch} or less",
        small_run(plan).command(training.backend, drop_last=training.drop_last),
    )


def _end(training: TrainerConfig, plan: TrainingPlan) -> Steps | None:
    """How a training under DeepSpeed ends; None if it never does."""
    epochs = int(training.max_epochs) if math.isfinite(training.max_epochs) else None
    if epochs is None and training.max_steps is None:
        return None
    found = calculate(dataclasses.replace(plan, epochs=epochs, max_steps=training.max_steps), SPLIT)
    return None if found is None or found.stops is Stops.NEVER else found


def _partial_above_engine(training: TrainerConfig, plan: TrainingPlan) -> Iterator[LintFinding]:
    """DeepSpeed continues the window in the next epoch; the trainer starts a new one."""
    assert training.engine is not None
    place, small = training.trainer.at("accumulate_grad_batches"), small_run(plan)
    end = _end(training, plan)
    # After so many epochs, an epoch and a window of the engine begin together again.
    period = plan.accumulate // math.gcd(plan.accumulate, plan.micro_batches_per_epoch)
    seen = end or calculate(dataclasses.replace(plan, epochs=period), SPLIT)
    assert seen is not None
    made, counted = (seen.steps_reported[name] for name in ("engine.global_steps", "trainer.global_step"))
    epochs = f"{seen.epochs_begun} epoch{'s' if seen.epochs_begun > 1 else ''}"
    steps = f"{made} step{'s' if made > 1 else ''}"
    if end is None:
        when = f"in every {epochs}"
        made_so = f"DeepSpeed makes {steps} while trainer.global_step grows by {counted}"
    else:
        when = f"after {seen.micro_batches_consumed} micro-batches per rank, in {epochs},"
        made_so = f"DeepSpeed has made {steps} while trainer.global_step is {counted}"
    if not plan.full_windows:
        yield place.finding(
            "WIN01",
            f"{_windows(plan)}: {when} {made_so}: learning-rate schedules with interval step do not move, nothing is "
            "logged per step, and max_steps is never reached",
            f"set accumulate_grad_batches to {plan.micro_batches_per_epoch} or less",
            small.command(training.backend, epochs=small.epochs_of_two_steps, drop_last=training.drop_last),
            Severity.ERROR,
        )
    elif seen.epochs_begun > 1:
        estimated = min(plan.windows * training.max_epochs, math.inf if not training.max_steps else training.max_steps)
        yield place.finding(
            "TAIL03",
            f"{_windows(plan)}: DeepSpeed continues that window in the next epoch, Lightning starts a new one. "
            f"{when[0].upper()}{when[1:]} {made_so}, which schedules, max_steps and logs follow; "
            f"estimated_stepping_batches is {'infinite' if math.isinf(estimated) else f'{estimated:.0f}'}",
            _divisible(training),
            small.command(training.backend, drop_last=training.drop_last),
        )
    lost = seen.micro_batches_lost_in_mid_run + seen.micro_batches_left_open
    if training.engine.stage != KEEPS and seen.epochs_begun > 1 and lost:
        total = seen.micro_batches_consumed
        yield place.finding(
            "TAIL04",
            "Lightning clears gradients where its own windows begin, which is in the middle of DeepSpeed's: with ZeRO-"
            f"{training.engine.stage}, {lost} of the {total} micro-batches of {epochs} ({lost / total:.1%}) "
            "reach no update",
            f"{_divisible(training)}, or use ZeRO-2, which keeps them",
            small.command(
                "lightning-ddp", training.backend, drop_last=training.drop_last, epochs=small.epochs_of_two_steps
            ),
        )
    if end is not None and (rest := end.micro_batches_left_open):
        yield place.finding(
            "TAIL05",
            f"training ends after {end.micro_batches_consumed} micro-batches per rank, {made} windows of "
            f"{plan.accumulate} and {rest} more: DeepSpeed never steps with the last {rest}",
            _divisible(training),
            SmallRun(small.accumulate, 2 * small.accumulate + 1).command(training.backend, epochs=1),
        )


def _dev_run(training: TrainerConfig) -> Iterator[LintFinding]:
    """A ``fast_dev_run`` is one epoch of so many micro-batches."""
    run, n = training.dev_run, training.accumulate
    full, rest = divmod(run, n)
    if not rest:
        return
    if training.engine:
        happens = f"DeepSpeed never steps with the last {rest}"
    else:
        happens = f"the last step has {rest}/{n} of the mean gradient"
    yield training.trainer.at("fast_dev_run").finding(
        "DEV01",
        f"fast_dev_run trains {run} micro-batches per rank, which are {full} x {n} + {rest}: {happens}",
        f"set fast_dev_run to {n}, or to a multiple of it",
        SmallRun.of(n, run).command(training.backend, epochs=1),
    )


def _steps(training: TrainerConfig, plan: TrainingPlan) -> Iterator[LintFinding]:
    """max_steps where Lightning itself steps, at the end of every epoch too."""
    wanted, place, small = training.max_steps or 0, training.trainer.at("max_steps"), small_run(plan)
    most = plan.windows * training.max_epochs
    if most < wanted:
        yield place.finding(
            "STP03",
            f"max_epochs {training.max_epochs:g} ends training after {training.max_epochs:g} x {plan.windows} = "
            f"{most:g} steps; max_steps {wanted} is never reached",
            f"remove max_steps, or set max_epochs to -1 or to at least {-(-wanted // plan.windows)}",
            small.command(training.backend, max_steps=100),
        )
        return
    consumed = reaches(plan, FLUSH, wanted) or 0
    full = wanted * plan.accumulate
    # A limit at the end of an epoch was calculated with the partial windows.
    if consumed < full and consumed % plan.micro_batches_per_epoch:
        yield place.finding(
            "STP01",
            f"each epoch has {plan.windows} steps, the last one of {plan.partial_window} micro-batches: max_steps "
            f"{wanted} is reached after {consumed} micro-batches per rank, {full - consumed} fewer than {wanted} x "
            f"{plan.accumulate} = {full}, in epoch {-(-consumed // plan.micro_batches_per_epoch)}",
            f"{_divisible(training)}, or count {plan.windows} steps per epoch",
            small.command(
                training.backend, max_steps=2 * small.num_batches // small.accumulate, drop_last=training.drop_last
            ),
        )


def _steps_above_engine(training: TrainerConfig, plan: TrainingPlan) -> Iterator[LintFinding]:
    """max_steps is compared with trainer.global_step, not with the engine's steps."""
    wanted, place, small = training.max_steps or 0, training.trainer.at("max_steps"), small_run(plan)
    grows = f"trainer.global_step grows by {plan.full_windows} per epoch"
    if (plan.full_windows * training.max_epochs if plan.full_windows else 0) < wanted:
        fix = _divisible(training)
        if not plan.full_windows and math.isinf(training.max_epochs):
            severity, ended = Severity.ERROR, "training never ends"
            fix = "set max_epochs too, and accumulate_grad_batches to at most the micro-batches per epoch"
        else:
            made = updates(plan, CARRY, plan.micro_batches_per_epoch * int(training.max_epochs))
            severity = Severity.WARNING
            ended = f"max_epochs {training.max_epochs:g} ends training after {made} steps of the engine"
        yield place.finding(
            "STP03",
            f"{grows} ({plan.micro_batches_per_epoch} // {plan.accumulate}), so max_steps {wanted} is never reached: "
            f"{ended}",
            fix,
            small.command(
                training.backend, max_steps=100 if plan.full_windows else 2, epochs=small.epochs_of_two_steps
            ),
            severity,
        )
        return
    consumed = reaches(plan, SPLIT, wanted) or 0
    made = consumed // plan.accumulate
    if made > wanted:
        max_steps, epochs = small.first_divergence
        yield place.finding(
            "STP02",
            f"{grows}, while DeepSpeed carries {plan.partial_window} micro-batches over: when max_steps {wanted} is "
            f"reached, after {consumed} micro-batches per rank, the engine has made {made} steps, {made - wanted} more",
            _divisible(training),
            small.command(training.backend, max_steps=max_steps, epochs=epochs, drop_last=training.drop_last),
        )
