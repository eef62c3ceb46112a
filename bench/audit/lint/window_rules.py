"""Rules for what the end of an epoch, a window and the training does under Lightning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint.lightning_config import LightningConfig
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rules import Found, rule, says
from bench.audit.stepcount import Steps, Stops, calculate
from bench.audit.training_plan import TrainingPlan
from bench.findings import Level
from bench.formatting import plural

KEEPS = 2
"""The ZeRO stage whose zero_grad does not clear the gradients of an open window."""
MOST_EPOCHS = 1000
"""Of a training that is longer than its config says."""
LOOP = "lightning/pytorch/loops/training_epoch_loop.py _should_accumulate"


@dataclass(frozen=True)
class LightningEpochs:
    """A training whose micro-batches per epoch are known.

    At the end of an epoch Lightning steps; DeepSpeed continues a partial window in the next epoch,
    although the trainer starts a new one.
    """

    training: LightningConfig
    plan: TrainingPlan

    @property
    def small(self) -> SmallRun:
        return SmallRun.of(self.plan.n, self.plan.micro_batches_per_epoch)

    def command(self, *backends: str, epochs: int = 2, max_steps: int | None = None) -> str:
        if not backends:
            backends = (self.training.backend,)
        return self.small.command(
            *backends, epochs=epochs, max_steps=max_steps, drop_last=self.training.drop_last
        )

    def epochs_until(self, steps: int) -> int | None:
        """Epochs after which trainer.global_step is so large.

        None if it never is, or only after very many.
        """
        for epochs in range(1, MOST_EPOCHS + 1):
            seen = calculate(dataclasses.replace(self.plan, epochs=epochs), self.training.rule)
            if seen is not None and seen.steps_reported["trainer.global_step"] >= steps:
                return epochs
        return None

    def until_in_phase(self) -> Steps:
        """The steps until an epoch and a window of the engine begin together again."""
        period = self.plan.n // math.gcd(self.plan.n, self.plan.micro_batches_per_epoch)
        found = calculate(dataclasses.replace(self.plan, epochs=period), self.training.rule)
        assert found is not None
        return found

    @property
    def estimated_steps(self) -> str:
        """Lightning's estimated_stepping_batches, as text."""
        estimated = self.plan.windows * self.training.max_epochs
        if self.training.max_steps is not None:
            estimated = min(estimated, self.training.max_steps)
        if math.isinf(estimated):
            return "infinite"
        return f"{estimated:.0f}"

    @property
    def divisible(self) -> str:
        """How to end epochs with complete windows."""
        training, n, limit = self.training, self.plan.n, self.training.limit
        batch, ranks = training.batch_size, training.world_size
        if not batch or not ranks:
            more = ""
            if limit.given:
                more = f", such as {limit.name}"
            return f"make the micro-batches per epoch{more} a multiple of {n}"
        return (
            f"make the samples a multiple of {batch * n * ranks}, or {limit.name} a multiple of {n}"
        )

    @property
    def windows(self) -> str:
        plan, batches = (
            self.plan,
            f"{self.plan.micro_batches_per_epoch} micro-batches per epoch and rank",
        )
        if not plan.full_windows:
            return f"{batches} are fewer than a window of {plan.n}"
        return (
            f"{batches} are {plan.full_windows} windows of {plan.n}, and {plan.partial_window} "
            "left over"
        )


def subjects(training: LightningConfig) -> Iterator[LightningEpochs]:
    """The epochs of a training, if their micro-batches are known."""
    plan = training.windows
    if plan is not None and training.trains:
        yield LightningEpochs(training, plan)


@rule(LightningConfig, "DEV01", "lightning: {fast_dev_run: 6}")
@says(Level.WARNING, "fast_dev_run tries a partial window", "lightning/pytorch/trainer/setup.py")
def _dev_run(training: LightningConfig) -> Iterator[Found]:
    """A ``fast_dev_run`` is one epoch of so many micro-batches."""
    batches, n = training.dev_run, training.accumulate
    if not batches % n or training.schedule is not None or not training.knows_accumulate:
        return
    rest = batches % n
    happens = f"the last step has {rest}/{n} of the mean gradient"
    if training.engine:
        happens = f"DeepSpeed never steps with the last {rest}"
    what = f"fast_dev_run trains {plural(batches, 'micro-batch')} per rank, with N = {n}: {happens}"
    same = SmallRun.of(n, batches).command(training.backend, epochs=1)
    yield Found(
        training.trainer.at("fast_dev_run"),
        what,
        f"set fast_dev_run to {n}, or to a multiple of it",
        same,
    )


@rule(LightningEpochs, "TAIL01", "lightning: {max_epochs: 2}, samples: 40")
@says(Level.WARNING, "partial window under-weighted", "Lightning #19987")
@rule(LightningEpochs, "WIN01", "lightning: {max_epochs: 2}, samples: 12")
@says(Level.WARNING, "fewer micro-batches per epoch than a window", "Lightning #21808")
def _partial(run: LightningEpochs) -> Iterator[Found]:
    tail, n, whole = run.plan.partial_window, run.plan.n, run.plan.full_windows
    if tail and run.training.engine is None:
        code, which, fix = "TAIL01", "the last", run.divisible
        if not whole:
            code, which = "WIN01", "each"
            fix = f"set accumulate_grad_batches to {run.plan.micro_batches_per_epoch} or less"
        yield Found(
            run.training.trainer.at("accumulate_grad_batches"),
            f"{run.windows}: Lightning steps after these {tail} but still divides by {n}, so "
            f"{which} step of every epoch has {tail}/{n} of the mean gradient",
            fix,
            run.command(),
            code=code,
        )


OUT_OF_PHASE = "lightning tests/tests_pytorch/strategies/test_deepspeed.py:893"


@rule(
    LightningEpochs,
    "TAIL03",
    "lightning: {strategy: deepspeed_stage_2, max_epochs: 2}, samples: 40",
    "DBL01",
)
@says(Level.WARNING, "trainer and engine out of phase", OUT_OF_PHASE)
@rule(
    LightningEpochs,
    "TAIL04",
    "lightning: {strategy: deepspeed_stage_3, max_epochs: 2}, samples: 40",
    "DBL01",
    "TAIL03",
)
@says(
    Level.ERROR,
    "micro-batches lost in every epoch",
    "deepspeed/runtime/zero/stage3.py zero_grad; see TAIL03",
)
@rule(
    LightningEpochs,
    "TAIL05",
    "lightning: {strategy: deepspeed_stage_2, max_epochs: 1}, samples: 40",
    "DBL01",
)
@says(Level.WARNING, "last window of the training dropped", "DeepSpeed #7439")
@rule(
    LightningEpochs,
    "WIN01",
    "lightning: {strategy: deepspeed_stage_2, overfit_batches: 3, max_epochs: 2}",
    "DBL01",
    "LOG01",
    "TAIL05",
)
def _partial_above_engine(run: LightningEpochs) -> Iterator[Found]:
    training, plan, small, engine = run.training, run.plan, run.small, run.training.engine
    if engine is None or not plan.partial_window:
        return
    place = training.trainer.at("accumulate_grad_batches")
    end = training.end
    if end is not None and end.stops is Stops.NEVER:
        end = None
    seen = end
    if seen is None:
        seen = run.until_in_phase()
    made, counted = (
        seen.steps_reported[name] for name in ("engine.global_steps", "trainer.global_step")
    )
    epochs, steps, total = (
        plural(seen.epochs_begun, "epoch"),
        plural(made, "step"),
        seen.micro_batches_consumed,
    )
    counts = f"in {epochs} DeepSpeed has made {steps} while trainer.global_step is {counted}"
    if end is None:
        counts = (
            f"in every {epochs} DeepSpeed makes {steps} while trainer.global_step grows by "
            f"{counted}"
        )
    if not plan.full_windows:
        what = (
            f"{run.windows}: {counts}, so neither schedules nor logs per step move, and "
            "max_steps is not reached"
        )
        fix = f"set accumulate_grad_batches to {plan.micro_batches_per_epoch} or less"
        yield Found(
            place,
            what,
            fix,
            run.command(epochs=small.epochs_of_two_steps),
            Level.ERROR,
            code="WIN01",
        )
    elif seen.epochs_begun > 1:
        what = (
            f"{run.windows}, which DeepSpeed carries into the next epoch: {counts}. Schedules, "
            "max_steps and logs "
            "follow trainer.global_step"
        )
        if training.knows_end:
            what += f"; estimated_stepping_batches is {run.estimated_steps}"
        yield Found(place, what, run.divisible, run.command(), code="TAIL03")
    lost = seen.micro_batches_lost_in_mid_run + seen.micro_batches_left_open
    if engine.stage != KEEPS and seen.epochs_begun > 1 and lost:
        yield Found(
            place,
            "Lightning clears gradients in the middle of DeepSpeed's windows: with "
            f"ZeRO-{engine.stage}, {lost} of the "
            f"{total} micro-batches of {epochs} ({lost / total:.1%}) reach no update",
            f"{run.divisible}, or use ZeRO-2, which keeps them",
            run.command("lightning-ddp", training.backend, epochs=small.epochs_of_two_steps),
            code="TAIL04",
        )
    if end is not None and (rest := end.micro_batches_left_open):
        what = (
            f"training ends after {total} micro-batches per rank: DeepSpeed never steps with the "
            f"last {rest}"
        )
        proof = SmallRun(small.accumulate, 2 * small.accumulate + 1).command(
            training.backend, epochs=1
        )
        yield Found(place, what, run.divisible, proof, code="TAIL05")


@rule(LightningEpochs, "STP01", "lightning: {max_steps: 5}, samples: 40", "TAIL01")
@says(Level.WARNING, "max_steps reached early", LOOP)
@rule(
    LightningEpochs,
    "STP02",
    "lightning: {strategy: deepspeed_stage_2, max_steps: 5}, samples: 40",
    "DBL01",
    "TAIL03",
)
@says(Level.WARNING, "max_steps reached late", LOOP)
@rule(LightningEpochs, "STP03", "lightning: {max_steps: 8, max_epochs: 2}, samples: 32")
@says(Level.WARNING, "max_steps never reached", "lightning/pytorch/loops/fit_loop.py done")
def _max_steps(run: LightningEpochs) -> Iterator[Found]:
    """max_steps is compared with trainer.global_step, not with the engine's steps."""
    training, plan, small, end = run.training, run.plan, run.small, run.training.end
    wanted, place = training.max_steps, training.trainer.at("max_steps")
    if not wanted or end is None:
        return
    made, consumed, full = end.optimizer_steps, end.micro_batches_consumed, wanted * plan.n
    never = small.command(training.backend, max_steps=100, epochs=small.epochs_of_two_steps)
    if end.stops is Stops.NEVER:
        what = (
            f"training never ends: {run.windows}, so trainer.global_step stays 0 and never "
            f"reaches max_steps {wanted}"
        )
        fix = (
            "set max_epochs too, and accumulate_grad_batches to at most the micro-batches per epoch"
        )
        yield Found(place, what, fix, never, Level.ERROR, code="STP03")
    elif end.stops is Stops.EPOCHS:
        counted = end.steps_reported["trainer.global_step"]
        ends = (
            f"max_epochs {training.max_epochs:g} ends training when trainer.global_step is "
            f"{counted}"
        )
        fix = "remove max_steps, or raise max_epochs"
        if needed := run.epochs_until(wanted):
            fix += f" to {needed}"
        yield Found(place, f"{ends}; max_steps {wanted} is never reached", fix, never, code="STP03")
    elif training.engine and made > wanted:
        max_steps, epochs = small.first_divergence
        yield Found(
            place,
            f"DeepSpeed carries {plan.partial_window} micro-batches into the next epoch: when "
            f"max_steps {wanted} is "
            f"reached, after {consumed} micro-batches per rank, the engine has made {made} "
            f"steps, {made - wanted} more",
            run.divisible,
            run.command(max_steps=max_steps, epochs=epochs),
            code="STP02",
        )
    # A limit at the end of an epoch was calculated with the partial windows.
    elif not training.engine and consumed < full and consumed % plan.micro_batches_per_epoch:
        yield Found(
            place,
            f"the last of {plan.windows} steps per epoch has {plan.partial_window} "
            "micro-batches: max_steps "
            f"{wanted} is reached after {consumed} micro-batches per rank, {full - consumed} "
            f"fewer than {wanted} x "
            f"{plan.n} = {full}",
            f"{run.divisible}, or count {plan.windows} steps per epoch",
            run.command(max_steps=2 * small.num_batches // small.accumulate),
            code="STP01",
        )
