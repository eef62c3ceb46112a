"""Rules for what is logged: log_every_n_steps and Lightning's ThroughputMonitor."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bench.audit.lint import proof
from bench.audit.lint.arithmetic import Epochs
from bench.audit.lint.known import Options
from bench.audit.lint.proof import Small
from bench.audit.lint.rates import STEP, Rates
from bench.audit.lint.rules import LintFinding, Severity
from bench.audit.lint.section import ConfigPart
from bench.audit.lint.trainer import TrainerConfig, window_place
from bench.audit.monitor import TOLERANCE

INVERTED = (2, 2, 0)
"""The one version whose monitor refuses unless log_every_n_steps divides N."""
LONGEST = 4000
"""Micro-batches of a training that its proof repeats as it is: some seconds. A longer one becomes a small one."""


def check(training: TrainerConfig, options: Options) -> Iterator[LintFinding]:
    """Findings about logging under accumulation."""
    yield from _log_every(training)
    if training.monitor is not None:
        yield from _monitor(training, training.monitor, options)


def _last_step(training: TrainerConfig, run: Epochs) -> float:
    """Steps that Lightning counts over the training; infinite if nothing ends it."""
    per_epoch = run.whole if training.engine else run.flushed
    if not per_epoch:
        return 0
    return min(per_epoch * training.max_epochs, math.inf if training.max_steps is None else training.max_steps)


def _trains(training: TrainerConfig) -> bool:
    """Whether there is a step to log."""
    return bool(training.max_epochs) and training.max_steps != 0


def _log_every(training: TrainerConfig) -> Iterator[LintFinding]:
    place = training.trainer.at("log_every_n_steps")
    every, accumulate, run = training.log_every, training.accumulate, training.epochs
    if not every or not _trains(training):
        return
    if run is not None and accumulate > 1 and (last := _last_step(training, run)) < every:
        given = "" if place.given else " (the default)"
        yield place.finding(
            "LOG01",
            Severity.WARNING,
            f"Lightning counts {last:g} optimizer steps in the whole training"
            + ("" if run.whole or not training.engine else f", since an epoch has {run.num_batches} micro-batches")
            + f", and logs at every {every}th{given}: what training_step logs per step never arrives",
            _more_often(int(last)),
            _to_the_end(training, run, int(last)),
        )
    elif place.given and accumulate > 1 and every > 1 and every % accumulate == 0:
        small = Small.of(accumulate).accumulate
        yield place.finding(
            "LOG02",
            Severity.INFO,
            f"log_every_n_steps counts optimizer steps: {every} steps are {every * accumulate} micro-batches, and a "
            "value logged per step is that of the window's last micro-batch alone",
            f"if {every} micro-batches are meant, set it to {every // accumulate}",
            proof.throughput(small, every if every * small <= LONGEST // 10 else small, small + 1),
        )


def _more_often(last: int) -> str:
    return f"set log_every_n_steps to at most {last}" if last else "see WIN01"


def _monitor(training: TrainerConfig, monitor: ConfigPart, options: Options) -> Iterator[LintFinding]:
    place = window_place(monitor)
    window, accumulate, every = training.window, training.accumulate, training.log_every
    rates = _rates(training)
    if window < 2:
        yield place.finding(
            "THR04",
            Severity.ERROR,
            f"window_size {window} raises AssertionError: a rate needs two points",
            f"set window_size to {rates.period + 1} or another k x {rates.period} + 1",
            proof.stops("lightning/fabric/utilities/throughput.py Throughput.__init__"),
        )
        return
    if options.lightning == INVERTED and every and accumulate % every:
        yield monitor.finding(
            "THR03",
            Severity.ERROR,
            f"Lightning 2.2.0 raises ValueError: accumulate_grad_batches {accumulate} % log_every_n_steps {every} = "
            f"{accumulate % every} is not 0; the check is the wrong way round",
            "use Lightning 2.2.1 or newer",
            proof.stops("lightning 2.2.0 pytorch/callbacks/throughput_monitor.py setup"),
        )
    if training.schedule is not None or not _trains(training):
        return
    run = training.epochs
    last = math.inf if run is None else _last_step(training, run)
    most = math.inf  # micro-batches up to the last log
    if run is not None and every and math.isfinite(last):
        logged = int(last) // every * every
        most = 0 if not logged else _batches_at(training, run, logged)
        if most < window:
            yield _never(training, run, place, rates, logged, int(most))
            return
    if accumulate > 1 and every:
        yield from _off(training, place, rates, most)


def _batches_at(training: TrainerConfig, run: Epochs, step: int) -> int:
    """Micro-batches when Lightning has counted so many steps."""
    return (run.batches_at_whole_step(step) or 0) if training.engine else run.batches_at_flushed_step(step)


def _rates(training: TrainerConfig) -> Rates:
    """What is known of the steps between which the monitor measures.

    DeepSpeed steps after every N micro-batches, over the ends of epochs too: as if epochs were whole windows.
    """
    accumulate, run = training.accumulate, training.epochs
    if run is None or training.engine:
        return Rates(accumulate, accumulate)
    return Rates(accumulate, run.num_batches, max(training.log_every, 1), _last_step(training, run))


def _given(place: ConfigPart) -> str:
    return "" if place.given else " (the default)"


def _off(training: TrainerConfig, place: ConfigPart, rates: Rates, most: float) -> Iterator[LintFinding]:
    """Rates with more, or now more and now fewer, optimizer steps in their time than their micro-batches deserve."""
    window, spans = training.window, training.window - 1
    found = rates.ratios(window)
    if found is None or found.is_right:
        return
    sizes = [str(size) for size in rates.right(window, most)]
    fixes = [f"set window_size to {' or '.join(sizes)}: k x {rates.period} + 1"] if sizes else []
    if rates.tail:
        same = f"{found.low:.3f}" == f"{found.high:.3f}"
        what = (
            f"an epoch's {rates.num_batches} micro-batches are {rates.num_batches // rates.accumulate} windows of "
            f"{rates.accumulate} and a partial one of {rates.tail}, so the {spans} intervals between micro-batches of "
            f"window_size {window}{_given(place)} hold now more, now fewer optimizer steps: rates that are logged are "
            + ("" if same else f"{found.low:.3f} to ")
            + f"{found.high:.3f} of the truth where a step takes as long as {STEP:g} micro-batches, down to "
            f"{found.limit:.3f} where it takes longer. Of small windows none is right whenever it is logged; the error "
            "shrinks with window_size"
        )
        fixes = [f"{fix}, whole epochs" for fix in fixes]
        if rates.safe <= most:
            long = f"set window_size to at least {rates.safe}, from which on the error is {TOLERANCE:.0%} at most"
            fixes.insert(0 if rates.safe < rates.period else 1, long)
        fixes.append(
            f"make the micro-batches per epoch a multiple of {rates.accumulate}, and window_size k x "
            f"{rates.accumulate} + 1"
        )
    else:
        period = rates.period
        what = (
            f"window_size {window}{_given(place)} spans {spans} intervals between micro-batches with "
            f"{-(-spans // period)} optimizer steps in them, where {spans}/{period} = {spans / period:.4g} would be "
            f"right: rates are up to {1 - found.limit:.1%} too low, the more the longer a step takes "
            f"({1 - found.low:.1%} where it takes as long as {STEP:g} micro-batches)"
        )
        fixes = fixes or [f"train longer, and set window_size to {period + 1}: k x {period} + 1"]
    small, size = rates.shown(window)
    batches = None if small.num_batches == small.accumulate else small.num_batches
    shown = proof.throughput(small.accumulate, small.every, size, batches=batches)
    yield place.finding("THR01", Severity.WARNING, what, "; or ".join(fixes), shown)


def _never(
    training: TrainerConfig, run: Epochs, place: ConfigPart, rates: Rates, logged: int, most: int
) -> LintFinding:
    """No rate is ever logged: the window is not full at the last log, which comes after ``most`` micro-batches."""
    last = int(_last_step(training, run))
    fixes = []
    if logged:
        when = f"the last step that is logged, {logged}, comes after {most} micro-batches"
    else:
        when = "no step is logged at all" + (" (LOG01)" if training.accumulate > 1 else "")
        fixes = [_more_often(last)]
        most = _batches_at(training, run, last) if last else training.window
    if most < training.window:
        sizes = rates.right(most, most)
        if sizes:
            fixes.append(f"set window_size to {sizes[0]}, or another k x {rates.period} + 1 up to {most}")
        elif rates.safe <= most:
            fixes.append(f"set window_size to {rates.safe} to {most}")
        else:
            fixes.append(f"train longer, and set window_size to {rates.period + 1}: k x {rates.period} + 1")
    return place.finding(
        "THR02",
        Severity.WARNING,
        f"{when}, and rates are logged only once {training.window} micro-batches{_given(place)} have been seen: no "
        "rate is ever logged",
        ", and ".join(fixes),
        _to_the_end(training, run, last),
    )


def _to_the_end(training: TrainerConfig, run: Epochs, last: int) -> str:
    """A training of as many steps as Lightning counts, or of fewer, that logs as little."""
    accumulate, every = training.accumulate, max(training.log_every, 1)
    per_epoch = run.whole if training.engine else run.flushed
    if not per_epoch:
        small = Small.of(accumulate, run.num_batches)
        return small.command(training.backend, epochs=small.endless())
    window = max(training.window, 2) if training.monitor else accumulate + 1
    if last * min(accumulate, run.num_batches) > LONGEST:
        # Two steps, and the third would be logged; or both are, and the window is not full at the second.
        small = Small.of(accumulate)
        batches = small.accumulate * 2
        every, window = (1, batches + 1) if last >= every else (3, small.accumulate + 1)
        return proof.throughput(small.accumulate, every, window, batches=batches, epochs=1)
    # What Lightning above DeepSpeed does not count is left out.
    batches = run.whole * accumulate if training.engine else run.num_batches
    return proof.throughput(
        accumulate,
        every,
        window,
        batches=min(batches, (last + 1) * accumulate),
        epochs=-(-last // per_epoch),
        max_steps=last if last % per_epoch else None,
    )
