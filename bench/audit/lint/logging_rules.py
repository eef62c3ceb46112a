"""Rules for what is logged: log_every_n_steps and Lightning's ThroughputMonitor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import proof
from bench.audit.lint.arithmetic import reaches
from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.lightning_config import LightningConfig, window_place
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rates import STEP, Rates, Ratios
from bench.audit.lint.rules import ERROR, INFO, WARNING, Found, rule
from bench.audit.monitor import TOLERANCE
from bench.audit.training import TrainingPlan

INVERTED = (2, 2, 0)
"""The one version whose monitor refuses unless log_every_n_steps divides N."""
LONGEST = 4000
"""Micro-batches of the longest training that is its own proof, some seconds. For a longer one a small one stands in."""


LOGGER = "lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py"
THROUGHPUT = "lightning/fabric/utilities/throughput.py Throughput"


@dataclass(frozen=True)
class Monitored:
    """A training with a ThroughputMonitor."""

    training: LightningConfig
    monitor: ConfigPart

    @property
    def rates(self) -> Rates:
        """What is known of the steps between which the monitor measures.

        DeepSpeed steps after every N micro-batches, across epochs too, as if all windows were complete.
        """
        training, plan = self.training, self.training.windows
        n = training.accumulate
        if plan is None or training.engine:
            return Rates(n, n)
        return Rates(n, plan.micro_batches_per_epoch, max(training.log_every, 1), _last_step(training, plan))


def _last_step(training: LightningConfig, plan: TrainingPlan) -> float:
    """Steps that the trainer counts over the whole training; infinite if nothing ends it."""
    per_epoch = training.steps_per_epoch(plan)
    if not per_epoch:
        return 0
    return min(per_epoch * training.max_epochs, math.inf if training.max_steps is None else training.max_steps)


def _default(place: ConfigPart) -> str:
    return "" if place.given else " (the default)"


def _log_more_often(last: int) -> str:
    return f"set log_every_n_steps to at most {last}" if last else "see WIN01"


@rule("LOG01", WARNING, "training ends before the first logged step", LOGGER)
@rule("LOG02", INFO, "log_every_n_steps counts optimizer steps", LOGGER)
def _log_every(training: LightningConfig) -> Iterator[Found]:
    place, every, plan = training.trainer.at("log_every_n_steps"), training.log_every, training.windows
    n = training.accumulate
    if not every or not training.trains or n == 1:
        return
    if plan is not None and (last := _last_step(training, plan)) < every:
        why = f", since an epoch has only {plan.micro_batches_per_epoch} micro-batches"
        yield Found(
            place,
            f"Lightning counts {last:g} optimizer steps in the whole training"
            f"{why if training.engine and not plan.full_windows else ''}, and logs every {every}{_default(place)}: "
            "no value that training_step logs per step reaches the logger",
            _log_more_often(int(last)),
            _whole_training(training, plan, int(last)),
            code="LOG01",
        )
    elif place.given and every > 1 and every % n == 0:
        small = SmallRun.of(n).accumulate
        yield Found(
            place,
            f"log_every_n_steps counts optimizer steps: {every} steps are {every * n} micro-batches, and a value "
            "logged per step is that of the window's last micro-batch alone",
            f"if {every} micro-batches are meant, set it to {every // n}",
            proof.throughput(small, every if every * small <= LONGEST // 10 else small, small + 1),
            code="LOG02",
        )


@rule("THR03", ERROR, "ThroughputMonitor's check is inverted", "Lightning #19461, fixed in 2.2.1 by #19470")
@rule("THR04", ERROR, "ThroughputMonitor's window is too short", THROUGHPUT)
def _refused(monitored: Monitored) -> Iterator[Found]:
    training, period = monitored.training, monitored.rates.period
    window, n, every = training.window, training.accumulate, training.log_every
    if window < 2:
        yield Found(
            window_place(monitored.monitor),
            f"window_size {window} raises AssertionError: a rate needs two points",
            f"set window_size to {period + 1}, or another k x {period} + 1",
            proof.stops("lightning/fabric/utilities/throughput.py Throughput.__init__"),
            code="THR04",
        )
    elif training.options.lightning == INVERTED and every and n % every:
        yield Found(
            monitored.monitor,
            f"Lightning 2.2.0 raises ValueError: accumulate_grad_batches {n} % log_every_n_steps {every} = {n % every} "
            "is not 0; the check is inverted",
            "use Lightning 2.2.1 or newer",
            proof.stops("lightning 2.2.0 pytorch/callbacks/throughput_monitor.py setup"),
            code="THR03",
        )


@rule("THR01", WARNING, "ThroughputMonitor's rates are biased", f"{THROUGHPUT}.compute")
@rule("THR02", WARNING, "ThroughputMonitor never logs a rate", f"{THROUGHPUT}.compute")
def _rates(monitored: Monitored) -> Iterator[Found]:
    training, rates, place = monitored.training, monitored.rates, window_place(monitored.monitor)
    window, every, plan = training.window, training.log_every, training.windows
    if window < 2 or training.schedule is not None or not training.trains:
        return
    last = math.inf if plan is None else _last_step(training, plan)
    most = math.inf  # micro-batches up to the last log
    if plan is not None and every and math.isfinite(last):
        logged = int(last) // every * every
        most = (reaches(plan, training.rule, logged) or 0) if logged else 0
        if most < window:
            yield _never_logged(training, plan, place, rates, logged, int(most))
            return
    found = rates.ratios(window)
    if training.accumulate > 1 and every and found is not None and not found.is_right:
        small = rates.shortened(window)
        batches = None if small.num_batches == small.accumulate else small.num_batches
        shown = proof.throughput(small.accumulate, small.every, window, batches=batches)
        yield (_unsteady if rates.tail else _biased)(place, window, rates, found, most, shown)


def _biased(place: ConfigPart, window: int, rates: Rates, found: Ratios, most: float, shown: str) -> Found:
    """More optimizer steps than their micro-batches deserve fall into the time of every rate."""
    spans, period = window - 1, rates.period
    what = (
        f"window_size {window}{_default(place)} spans {spans} intervals between micro-batches with "
        f"{-(-spans // period)} optimizer steps in them, where {spans}/{period} = {spans / period:.4g} would be "
        f"right: rates are up to {1 - found.limit:.1%} too low, the more the longer a step takes "
        f"({1 - found.low:.1%} where it takes as long as {STEP:g} micro-batches)"
    )
    sizes = " or ".join(map(str, rates.right(window, most)))
    fix = f"set window_size to {sizes or period + 1}: k x {period} + 1"
    return Found(place, what, fix if sizes else f"train longer, and {fix}", shown, code="THR01")


def _unsteady(place: ConfigPart, window: int, rates: Rates, found: Ratios, most: float, shown: str) -> Found:
    """Because of a partial window, sometimes more and sometimes fewer steps fall into that time."""
    n, batches = rates.accumulate, rates.num_batches
    low = "" if f"{found.low:.3f}" == f"{found.high:.3f}" else f"{found.low:.3f} to "
    what = (
        f"an epoch's {batches} micro-batches are {batches // n} windows of {n} and a partial one of {rates.tail}, so "
        f"the {window - 1} intervals between micro-batches of window_size {window}{_default(place)} contain sometimes "
        f"more, sometimes fewer optimizer steps: logged rates are {low}{found.high:.3f} of the truth where a step "
        f"takes as long as {STEP:g} micro-batches, down to {found.limit:.3f} where it takes longer. No small window is "
        "always right; the error shrinks with window_size"
    )
    fixes = []
    if sizes := rates.right(window, most):
        fixes.append(f"set window_size to {' or '.join(map(str, sizes))}: k x {rates.period} + 1, whole epochs")
    if rates.safe <= most:
        large = f"set window_size to at least {rates.safe}, where the error is at most {TOLERANCE:.0%}"
        fixes.insert(0 if rates.safe < rates.period else 1, large)
    fixes.append(f"make the micro-batches per epoch a multiple of {n}, and window_size k x {n} + 1")
    return Found(place, what, "; or ".join(fixes), shown, code="THR01")


def _never_logged(
    training: LightningConfig, plan: TrainingPlan, place: ConfigPart, rates: Rates, logged: int, most: int
) -> Found:
    """The window is not full at the last log, which comes after ``most`` micro-batches."""
    last, fixes = int(_last_step(training, plan)), []
    if logged:
        when = f"the last logged step, {logged}, comes after {most} micro-batches"
    else:
        when = "no step is logged" + (" (LOG01)" if training.accumulate > 1 else "")
        fixes = [_log_more_often(last)]
        most = (reaches(plan, training.rule, last) or 0) if last else training.window
    if most < training.window:
        if sizes := rates.right(most, most):
            fixes.append(f"set window_size to {sizes[0]}, or another k x {rates.period} + 1 up to {most}")
        elif rates.safe <= most:
            fixes.append(f"set window_size to {rates.safe} to {most}")
        else:
            fixes.append(f"train longer, and set window_size to {rates.period + 1}: k x {rates.period} + 1")
    what = f"{when}, but a rate needs {training.window} micro-batches{_default(place)}: no rate is ever logged"
    return Found(place, what, ", and ".join(fixes), _whole_training(training, plan, last), code="THR02")


def _whole_training(training: LightningConfig, plan: TrainingPlan, last: int) -> str:
    """A training of as many steps as Lightning counts, or a shorter one that logs as little."""
    n, every, per_epoch = training.accumulate, max(training.log_every, 1), training.steps_per_epoch(plan)
    if not per_epoch:
        small = SmallRun.of(plan.accumulate, plan.micro_batches_per_epoch)
        return small.command(training.backend, epochs=small.epochs_of_two_steps)
    window = max(training.window, 2) if training.monitor else n + 1
    if last * min(n, plan.micro_batches_per_epoch) > LONGEST:
        # Two steps, of which none is logged, or both are before the window is full.
        small = SmallRun.of(n)
        batches = small.accumulate * 2
        every, window = (1, batches + 1) if last >= every else (3, small.accumulate + 1)
        return proof.throughput(small.accumulate, every, window, batches=batches, epochs=1)
    # Above DeepSpeed, Lightning does not count the partial window.
    batches = plan.full_windows * n if training.engine else plan.micro_batches_per_epoch
    return proof.throughput(
        n,
        every,
        window,
        batches=min(batches, (last + 1) * n),
        epochs=-(-last // per_epoch),
        max_steps=last if last % per_epoch else None,
    )
