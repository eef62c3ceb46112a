"""Rules for what is logged: log_every_n_steps, and the rates of Lightning's ThroughputMonitor.

At the end of an optimizer step the monitor divides the samples of the last ``window_size - 1``
micro-batches by their time. That is right if as many optimizer steps fall into that time as these
micro-batches deserve. The truth is, as in ``bench.audit.monitor``, the rate over the fewest whole
windows that cover them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from bench.audit.lint import proof
from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.lightning_config import LightningConfig, window_place
from bench.audit.lint.lint_options import windows_of
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rules import Found, rule, says
from bench.audit.lint.version_facts import is_known_bad
from bench.audit.monitor import TOLERANCE
from bench.audit.monitor_grid import MICRO_BATCH_S, OPTIMIZER_S
from bench.audit.stepcount import calculate
from bench.audit.training_plan import TrainingPlan
from bench.findings import Level

STEP = OPTIMIZER_S / MICRO_BATCH_S
"""Duration of an optimizer step in micro-batches, as the command measures by default."""
MAX_LOGS = 5000
"""Logs that are looked at."""


class Ratios(NamedTuple):
    """Logged rates divided by the true ones; none is above 1."""

    low: float
    high: float
    limit: float
    """The lowest, however long a step takes."""

    @property
    def is_right(self) -> bool:
        """Whether ``bench throughput`` calls them right."""
        return 1 - self.low <= TOLERANCE


@dataclass(frozen=True)
class Rates:
    """The logs of a training whose optimizer steps at the end of each window and epoch."""

    accumulate: int
    """N."""
    num_batches: int
    """NB; N, or a multiple of it, if it is unknown."""
    every: int = 1
    """``log_every_n_steps``."""
    last: float = math.inf
    """Steps of the whole training."""

    @cached_property
    def plan(self) -> TrainingPlan:
        return windows_of(self.num_batches, self.accumulate)

    @property
    def tail(self) -> int:
        """Micro-batches of a partial window after complete ones; 0 if there is none."""
        if self.plan.full_windows:
            return self.plan.partial_window
        return 0

    @property
    def period(self) -> int:
        """Micro-batches after which the steps repeat.

        A ``window_size`` of k x period + 1 is exact.
        """
        if self.tail:
            return self.num_batches
        return min(self.accumulate, self.num_batches)

    @property
    def safe(self) -> int:
        """A ``window_size`` from which on rates are within tolerance, however long a step takes.

        A span of s micro-batches lacks at most N - 1 to complete windows, so the ratio is at least
        s / (s + N - 1).
        """
        return math.ceil((1 - TOLERANCE) / TOLERANCE * (self.accumulate - 1)) + 1

    def ratios(self, window: int) -> Ratios | None:
        """The rates logged with this ``window_size``; None if there are none."""
        spans, windows = window - 1, self.plan.windows
        found: set[tuple[int, int]] = set()
        first = max(spans // self.num_batches * windows // self.every, 1)
        for log in range(first, first + MAX_LOGS):
            if log * self.every > self.last:
                break
            epochs, steps = divmod(log * self.every - 1, windows)
            end = epochs * self.num_batches + min((steps + 1) * self.accumulate, self.num_batches)
            if end >= window:
                epochs, rest = divmod(end - spans, self.num_batches)
                steps_before = epochs * windows + rest // self.accumulate
                # Complete windows begin at the end of the step before.
                found.add((spans + rest % self.accumulate, log * self.every - steps_before))
        ratios = [spans * (whole + n * STEP) / (whole * (spans + n * STEP)) for whole, n in found]
        if ratios:
            return Ratios(min(ratios), max(ratios), min((spans / whole for whole, _ in found)))
        return None

    def right(self, window: int, most: float) -> list[int]:
        """The nearest values of ``window_size`` up to ``most`` that are exact."""
        k = (window - 1) // self.period
        found = []
        for periods in (k, k + 1):
            size = periods * self.period + 1
            if periods and size <= most:
                found.append(size)
        return found

    def shortened(self, window: int) -> Rates:
        """A shorter training that logs every step, and is wrong with the same ``window_size``."""
        if not self.tail:
            return Rates(self.accumulate, self.period)
        # Of an epoch longer than the window, only the remainder matters.
        spans = window - 1
        batches = spans + self.accumulate + (self.num_batches - spans) % self.accumulate
        return Rates(self.accumulate, min(self.num_batches, batches))


LONGEST = 400
"""Micro-batches between two logs of a training that is its own proof, some seconds."""
LOGGER = "lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py"
INVERTED_MONITOR = "lightning-throughput-log-every"
"""The advisory of THR03."""
INVERTED_CHECK = (
    "lightning 2.2.0 pytorch/callbacks/throughput_monitor.py setup; Lightning #19461, fixed "
    "in 2.2.1 by #19470"
)
THROUGHPUT = "lightning/fabric/utilities/throughput.py Throughput"


def _rates_of(training: LightningConfig) -> Rates:
    """What is known of the steps between which the monitor measures.

    DeepSpeed steps after every N micro-batches, across epochs too, as if all windows were complete.
    """
    plan, n = training.windows, training.accumulate
    if plan is None or training.engine:
        return Rates(n, n)
    return Rates(n, plan.micro_batches_per_epoch, max(training.log_every, 1), _last_step(training))


def _last_step(training: LightningConfig) -> float:
    """Steps that the trainer counts over the whole training; infinite if nothing ends it."""
    if training.end is None:
        return math.inf
    return training.end.steps_reported["trainer.global_step"]


def _micro_batches(training: LightningConfig, plan: TrainingPlan, steps: int) -> int:
    """Micro-batches until the trainer has counted so many steps."""
    if not steps:
        return 0
    found = calculate(dataclasses.replace(plan, epochs=None, max_steps=steps), training.rule)
    if found:
        return found.micro_batches_consumed
    return 0


def _default(place: ConfigPart) -> str:
    if place.given:
        return ""
    return " (the default)"


def _log_more_often(last: int) -> str:
    if last:
        return f"set log_every_n_steps to at most {last}"
    return "see WIN01"


def _silent(training: LightningConfig, plan: TrainingPlan, *, is_logged: bool) -> str:
    """A small training that logs as little: no step, or one before the monitor's window is full."""
    if training.engine and not plan.full_windows:
        small = SmallRun.of(plan.n, plan.micro_batches_per_epoch)
        return small.command(training.backend, epochs=small.epochs_of_two_steps)
    n = SmallRun.of(training.accumulate).accumulate
    every, window = 3, n + 1
    if is_logged:
        every, window = 1, 2 * n + 1
    return proof.throughput(n, every, max(window, 2), 2 * n, " --epochs 1")


@rule(LightningConfig, "LOG01", "lightning: {max_epochs: 2, log_every_n_steps: null}, samples: 32")
@says(Level.WARNING, "training ends before the first logged step", LOGGER)
@rule(LightningConfig, "LOG02", "lightning: {log_every_n_steps: 8}")
@says(Level.NOTE, "log_every_n_steps counts optimizer steps", LOGGER)
def _log_every(training: LightningConfig) -> Iterator[Found]:
    place, every = training.trainer.at("log_every_n_steps"), training.log_every
    plan = training.windows
    n = training.accumulate
    if not every or not training.trains or n == 1:
        return
    if plan is not None and (last := _last_step(training)) < every:
        what = (
            f"Lightning counts {last:g} optimizer steps in the whole training and logs every "
            f"{every}"
        )
        what += f"{_default(place)}: no value that is logged per step reaches the logger"
        yield Found(
            place,
            what,
            _log_more_often(int(last)),
            _silent(training, plan, is_logged=False),
            code="LOG01",
        )
    elif place.given and every > 1 and every % n == 0:
        small = SmallRun.of(n).accumulate
        shown = small
        if every * small <= LONGEST:
            shown = every
        yield Found(
            place,
            f"{every} optimizer steps are {every * n} micro-batches, and a value logged per step "
            "is that of the "
            "window's last micro-batch alone",
            f"if {every} micro-batches are meant, set it to {every // n}",
            proof.throughput(small, shown, small + 1),
            code="LOG02",
        )


@rule(
    LightningConfig,
    "THR03",
    "lightning: {log_every_n_steps: 8, callbacks: ThroughputMonitor}, lightning_version: [2, 2, 0]",
)
@says(Level.ERROR, "ThroughputMonitor's check is inverted", INVERTED_CHECK, stops=True)
@rule(
    LightningConfig,
    "THR04",
    "lightning: {callbacks: [{class_path: ThroughputMonitor, init_args: {window_size: 1}}]}",
)
@says(Level.ERROR, "ThroughputMonitor's window is too short", f"{THROUGHPUT}.__init__", stops=True)
def _refused(training: LightningConfig) -> Iterator[Found]:
    window, n, every = training.window, training.accumulate, training.log_every
    if training.monitor is None or window is None:
        return
    if window < 2:
        period = _rates_of(training).period
        what = f"window_size {window} raises AssertionError: a rate needs two points"
        fix = f"set window_size to {period + 1}, or another k x {period} + 1"
        yield Found(window_place(training.monitor), what, fix, code="THR04")
    elif is_known_bad(INVERTED_MONITOR, training.options.lightning) and every and n % every:
        what = (
            f"Lightning 2.2.0 raises ValueError unless log_every_n_steps {every} divides "
            f"accumulate_grad_batches {n}"
        )
        yield Found(training.monitor, what, "use Lightning 2.2.1 or newer", code="THR03")


@rule(
    LightningConfig,
    "THR01",
    "lightning: {accumulate_grad_batches: 8, callbacks: [{class_path: ThroughputMonitor}]}",
)
@says(Level.WARNING, "ThroughputMonitor's rates are biased", f"{THROUGHPUT}.compute")
@rule(
    LightningConfig,
    "THR02",
    "lightning: {callbacks: ThroughputMonitor, max_epochs: 1}, samples: 32",
)
@says(Level.WARNING, "ThroughputMonitor never logs a rate", f"{THROUGHPUT}.compute")
def _rates(training: LightningConfig) -> Iterator[Found]:
    window, every, plan = training.window, training.log_every, training.windows
    if training.monitor is None or window is None or window < 2 or not training.trains:
        return
    if training.schedule is not None or not training.knows_accumulate:
        return
    rates, place = _rates_of(training), window_place(training.monitor)
    last = _last_step(training)
    most = math.inf  # micro-batches up to the last log
    if plan is not None and every and math.isfinite(last):
        logged = int(last) // every * every
        most = _micro_batches(training, plan, logged)
        if most < window:
            yield _never_logged(training, plan, place, rates, logged, most, window)
            return
    found = rates.ratios(window)
    if training.accumulate == 1 or not every or found is None or found.is_right:
        return
    span = (
        f"the {window - 1} intervals between micro-batches of window_size {window}{_default(place)}"
    )
    low = f"{found.low:.3f} to "
    if f"{found.low:.3f}" == f"{found.high:.3f}":
        low = ""
    fixes = _better_windows(rates, window, most)
    small = rates.shortened(window)
    batches = None
    if small.num_batches != small.accumulate:
        batches = small.num_batches
    yield Found(
        place,
        f"{span} do not have their share of optimizer steps: logged rates are "
        f"{low}{found.high:.3f} of the truth where "
        f"a step takes as long as {STEP:g} micro-batches, down to {found.limit:.3f} where it "
        "takes longer",
        "; or ".join(fixes),
        proof.throughput(small.accumulate, 1, window, batches),
        code="THR01",
    )


def _better_windows(rates: Rates, window: int, most: float) -> list[str]:
    """How to have rates that are right, or nearly so."""
    fixes = []
    if sizes := rates.right(window, most):
        fixes.append(f"set window_size to {' or '.join(map(str, sizes))}: k x {rates.period} + 1")
    if rates.tail and rates.safe <= most:
        fixes.append(f"set window_size to at least {rates.safe}, where the error is small")
    if not fixes:
        fixes.append(
            f"train longer, and set window_size to {rates.period + 1}: k x {rates.period} + 1"
        )
    return fixes


def _never_logged(
    training: LightningConfig,
    plan: TrainingPlan,
    place: ConfigPart,
    rates: Rates,
    logged: int,
    most: int,
    window: int,
) -> Found:
    """The window is not full at the last log, which comes after ``most`` micro-batches."""
    last, fixes = int(_last_step(training)), []
    if logged:
        when = f"the last logged step, {logged}, comes after {most} micro-batches"
    else:
        when = "no step is logged"
        if training.accumulate > 1:
            when += " (LOG01)"
        fixes = [_log_more_often(last)]
        most = window
        if last:
            most = _micro_batches(training, plan, last)
    if most < window:
        if sizes := rates.right(most, most):
            fixes.append(
                f"set window_size to {sizes[0]}, or another k x {rates.period} + 1 up to {most}"
            )
        elif rates.safe <= most:
            fixes.append(f"set window_size to {rates.safe} to {most}")
        else:
            fixes.append(
                f"train longer, and set window_size to {rates.period + 1}: k x {rates.period} + 1"
            )
    what = (
        f"{when}, but a rate needs {window} micro-batches{_default(place)}: no rate is ever logged"
    )
    return Found(
        place,
        what,
        ", and ".join(fixes),
        _silent(training, plan, is_logged=bool(logged)),
        code="THR02",
    )
