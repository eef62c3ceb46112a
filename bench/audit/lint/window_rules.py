"""Rules for what the end of an epoch, of a window and of the training does under Lightning, in numbers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint.arithmetic import CARRY, FLUSH, SPLIT, reaches, updates
from bench.audit.lint.deepspeed_config import DeepSpeedConfig
from bench.audit.lint.lightning_config import LightningConfig
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rules import ERROR, WARNING, Found, rule
from bench.audit.stepcount import Steps, Stops, calculate
from bench.audit.training_plan import TrainingPlan

KEEPS = 2
"""The ZeRO stage whose zero_grad does not clear the gradients of an open window."""
LOOP = "lightning/pytorch/loops/training_epoch_loop.py _should_accumulate"


@dataclass(frozen=True)
class LightningEpochs:
    """A training whose micro-batches per epoch are known. Lightning itself steps at the end of every epoch too."""

    training: LightningConfig
    plan: TrainingPlan

    @property
    def small(self) -> SmallRun:
        """A small training with the same structure."""
        return SmallRun.of(self.plan.accumulate, self.plan.micro_batches_per_epoch)

    def command(self, *backends: str, epochs: int = 2, max_steps: int | None = None) -> str:
        """The command that runs the small training."""
        names = backends or (self.training.backend,)
        return self.small.command(*names, epochs=epochs, max_steps=max_steps, drop_last=self.training.drop_last)

    @property
    def divisible(self) -> str:
        """How to end epochs with complete windows."""
        training, n, limit = self.training, self.plan.accumulate, self.training.limit
        batch, ranks = training.batch_size, training.world_size
        if not batch or not ranks:
            more = f", such as {limit.name}" if limit.given else ""
            return f"make the micro-batches per epoch{more} a multiple of {n}"
        size = f"{batch} x {n} x {ranks} = {batch * n * ranks}"
        return f"make the samples a multiple of {size}, or {limit.name} a multiple of {n}"

    @property
    def windows(self) -> str:
        """The windows of an epoch in words."""
        plan, batches = self.plan, f"{self.plan.micro_batches_per_epoch} micro-batches per epoch and rank"
        if not plan.full_windows:
            return f"{batches} are fewer than a window of {plan.accumulate}"
        return f"{batches} are {plan.full_windows} windows of {plan.accumulate}, and {plan.partial_window} left over"


@dataclass(frozen=True)
class EngineEpochs(LightningEpochs):
    """DeepSpeed continues a partial window in the next epoch; the trainer starts a new one."""

    engine: DeepSpeedConfig

    def end(self) -> Steps | None:
        """How the training ends; None if it never does."""
        training = self.training
        epochs = int(training.max_epochs) if math.isfinite(training.max_epochs) else None
        if epochs is None and training.max_steps is None:
            return None
        found = calculate(dataclasses.replace(self.plan, epochs=epochs, max_steps=training.max_steps), SPLIT)
        return None if found is None or found.stops is Stops.NEVER else found


def subjects(training: LightningConfig) -> Iterator[LightningEpochs]:
    """The epochs of a training, if their micro-batches are known."""
    plan = training.windows
    if plan is not None and training.max_epochs and training.max_steps != 0:
        engine = training.engine
        yield LightningEpochs(training, plan) if engine is None else EngineEpochs(training, plan, engine)


@rule("DEV01", WARNING, "fast_dev_run tries a partial window", "lightning/pytorch/trainer/setup.py")
def _dev_run(training: LightningConfig) -> Iterator[Found]:
    """A ``fast_dev_run`` is one epoch of so many micro-batches."""
    run, n = training.dev_run, training.accumulate
    full, rest = divmod(run, n)
    if not rest or training.schedule is not None:
        return
    happens = f"the last step has {rest}/{n} of the mean gradient"
    if training.engine:
        happens = f"DeepSpeed never steps with the last {rest}"
    yield Found(
        training.trainer.at("fast_dev_run"),
        f"fast_dev_run trains {run} micro-batches per rank, which are {full} x {n} + {rest}: {happens}",
        f"set fast_dev_run to {n}, or to a multiple of it",
        SmallRun.of(n, run).command(training.backend, epochs=1),
    )


@rule("TAIL01", WARNING, "partial window under-weighted", "Lightning #19987")
@rule("WIN01", WARNING, "fewer micro-batches per epoch than a window", "Lightning #21808")
def _partial(epochs: LightningEpochs) -> Iterator[Found]:
    tail, n, whole = epochs.plan.partial_window, epochs.plan.accumulate, epochs.plan.full_windows
    if n > 1 and tail:
        fewer = f"set accumulate_grad_batches to {epochs.plan.micro_batches_per_epoch} or less"
        yield Found(
            epochs.training.trainer.at("accumulate_grad_batches"),
            f"{epochs.windows}: Lightning steps after these {tail} but still divides by {n}, so "
            f"{'the last' if whole else 'each'} step of every epoch has {tail}/{n} of the mean gradient",
            epochs.divisible if whole else fewer,
            epochs.command(),
            code="TAIL01" if whole else "WIN01",
        )


@rule(
    "TAIL03",
    WARNING,
    "trainer and engine out of phase",
    "lightning tests/tests_pytorch/strategies/test_deepspeed.py:893",
)
@rule("TAIL04", ERROR, "micro-batches lost in every epoch", "deepspeed/runtime/zero/stage3.py zero_grad; see TAIL03")
@rule("TAIL05", WARNING, "last window of the training dropped", "DeepSpeed #7439")
@rule("WIN01")
def _partial_above_engine(run: EngineEpochs) -> Iterator[Found]:
    training, plan, small, end = run.training, run.plan, run.small, run.end()
    if plan.accumulate == 1 or not plan.partial_window:
        return
    place = training.trainer.at("accumulate_grad_batches")
    # After so many epochs, an epoch and a window of the engine begin together again.
    period = plan.accumulate // math.gcd(plan.accumulate, plan.micro_batches_per_epoch)
    seen = end or calculate(dataclasses.replace(plan, epochs=period), SPLIT)
    assert seen is not None
    made, counted = (seen.steps_reported[name] for name in ("engine.global_steps", "trainer.global_step"))
    epochs = f"{seen.epochs_begun} epoch{'s' if seen.epochs_begun > 1 else ''}"
    steps, total = f"{made} step{'s' if made > 1 else ''}", seen.micro_batches_consumed
    counts = (
        f"after {total} micro-batches per rank, in {epochs}, DeepSpeed has made {steps} while trainer.global_step is "
        f"{counted}"
    )
    if end is None:
        counts = f"in every {epochs} DeepSpeed makes {steps} while trainer.global_step grows by {counted}"
    if not plan.full_windows:
        yield Found(
            place,
            f"{run.windows}: {counts}: learning-rate schedules with interval step do not move, nothing is logged per "
            "step, and max_steps is never reached",
            f"set accumulate_grad_batches to {plan.micro_batches_per_epoch} or less",
            run.command(epochs=small.epochs_of_two_steps),
            ERROR,
            code="WIN01",
        )
    elif seen.epochs_begun > 1:
        estimated = min(plan.windows * training.max_epochs, training.max_steps or math.inf)
        yield Found(
            place,
            f"{run.windows}: DeepSpeed continues that window in the next epoch, Lightning starts a new one. "
            f"{counts[0].upper()}{counts[1:]}, which schedules, max_steps and logs follow; "
            f"estimated_stepping_batches is {'infinite' if math.isinf(estimated) else f'{estimated:.0f}'}",
            run.divisible,
            run.command(),
            code="TAIL03",
        )
    lost = seen.micro_batches_lost_in_mid_run + seen.micro_batches_left_open
    if run.engine.stage != KEEPS and seen.epochs_begun > 1 and lost:
        yield Found(
            place,
            "Lightning clears gradients where its own windows begin, which is in the middle of DeepSpeed's: with ZeRO-"
            f"{run.engine.stage}, {lost} of the {total} micro-batches of {epochs} ({lost / total:.1%}) reach no update",
            f"{run.divisible}, or use ZeRO-2, which keeps them",
            run.command("lightning-ddp", training.backend, epochs=small.epochs_of_two_steps),
            code="TAIL04",
        )
    if end is not None and (rest := end.micro_batches_left_open):
        yield Found(
            place,
            f"training ends after {total} micro-batches per rank, {made} windows of {plan.accumulate} and {rest} more: "
            f"DeepSpeed never steps with the last {rest}",
            run.divisible,
            SmallRun(small.accumulate, 2 * small.accumulate + 1).command(training.backend, epochs=1),
            code="TAIL05",
        )


@rule("STP01", WARNING, "max_steps reached early", LOOP)
@rule("STP03", WARNING, "max_steps never reached", "lightning/pytorch/loops/fit_loop.py done")
def _max_steps(epochs: LightningEpochs) -> Iterator[Found]:
    training, plan, small = epochs.training, epochs.plan, epochs.small
    wanted, place = training.max_steps or 0, training.trainer.at("max_steps")
    most = plan.windows * training.max_epochs
    consumed, full = reaches(plan, FLUSH, wanted) or 0, wanted * plan.accumulate
    if most < wanted:
        yield Found(
            place,
            f"max_epochs {training.max_epochs:g} ends training after {training.max_epochs:g} x {plan.windows} = "
            f"{most:g} steps; max_steps {wanted} is never reached",
            f"remove max_steps, or set max_epochs to -1 or to at least {-(-wanted // plan.windows)}",
            small.command(training.backend, max_steps=100),
            code="STP03",
        )
    # A limit at the end of an epoch was calculated with the partial windows.
    elif consumed < full and consumed % plan.micro_batches_per_epoch:
        yield Found(
            place,
            f"each epoch has {plan.windows} steps, the last one of {plan.partial_window} micro-batches: max_steps "
            f"{wanted} is reached after {consumed} micro-batches per rank, {full - consumed} fewer than {wanted} x "
            f"{plan.accumulate} = {full}, in epoch {-(-consumed // plan.micro_batches_per_epoch)}",
            f"{epochs.divisible}, or count {plan.windows} steps per epoch",
            epochs.command(max_steps=2 * small.num_batches // small.accumulate),
            code="STP01",
        )


@rule("STP02", WARNING, "max_steps reached late", LOOP)
@rule("STP03")
def _max_steps_above_engine(run: EngineEpochs) -> Iterator[Found]:
    """max_steps is compared with trainer.global_step, not with the engine's steps."""
    training, plan, small = run.training, run.plan, run.small
    wanted, place = training.max_steps or 0, training.trainer.at("max_steps")
    grows = f"trainer.global_step grows by {plan.full_windows} per epoch"
    consumed = reaches(plan, SPLIT, wanted) or 0
    made = consumed // plan.accumulate
    if (plan.full_windows * training.max_epochs if plan.full_windows else 0) < wanted:
        made = updates(plan, CARRY, plan.micro_batches_per_epoch * int(min(training.max_epochs, 1e9)))
        severity, fix = WARNING, run.divisible
        ended = f"max_epochs {training.max_epochs:g} ends training after {made} steps of the engine"
        if not plan.full_windows and math.isinf(training.max_epochs):
            severity, ended = ERROR, "training never ends"
            fix = "set max_epochs too, and accumulate_grad_batches to at most the micro-batches per epoch"
        yield Found(
            place,
            f"{grows} ({plan.micro_batches_per_epoch} // {plan.accumulate}), so max_steps {wanted} is never reached: "
            f"{ended}",
            fix,
            small.command(
                training.backend, max_steps=100 if plan.full_windows else 2, epochs=small.epochs_of_two_steps
            ),
            severity,
            code="STP03",
        )
    elif made > wanted:
        max_steps, epochs = small.first_divergence
        yield Found(
            place,
            f"{grows}, while DeepSpeed carries {plan.partial_window} micro-batches over: when max_steps {wanted} is "
            f"reached, after {consumed} micro-batches per rank, the engine has made {made} steps, {made - wanted} more",
            run.divisible,
            run.command(max_steps=max_steps, epochs=epochs),
            code="STP02",
        )
