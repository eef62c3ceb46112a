"""Rules for what is logged: log_every_n_steps and Lightning's ThroughputMonitor."""

from __future__ import annotations

import math
from collections.abc import Iterator

from bench.lint import proof
from bench.lint.arithmetic import Epochs
from bench.lint.findings import Finding, Severity
from bench.lint.options import Options
from bench.lint.section import Section
from bench.lint.trainer import Training, window_place

INVERTED = (2, 2, 0)
"""The one version whose monitor refuses unless log_every_n_steps divides N."""
LARGEST_SHOWN = 64
"""An N up to here is kept in the proof."""


def check(training: Training, options: Options) -> Iterator[Finding]:
    """Findings about logging under accumulation."""
    yield from _log_every(training)
    if training.monitor is not None:
        yield from _monitor(training, training.monitor, options)


def _last_step(training: Training, run: Epochs) -> float:
    """Steps that Lightning counts over the training; infinite if nothing ends it."""
    per_epoch = run.whole if training.engine else run.flushed
    if not per_epoch:
        return 0
    return min(per_epoch * training.max_epochs, training.max_steps or math.inf)


def _log_every(training: Training) -> Iterator[Finding]:
    place = training.trainer.at("log_every_n_steps")
    every, accumulate, run = training.log_every, training.accumulate, training.epochs
    if not every:
        return
    if run is not None and accumulate > 1 and (last := _last_step(training, run)) < every:
        given = "" if place.given else " (the default)"
        yield place.finding(
            "LOG01",
            Severity.WARNING,
            f"Lightning counts {last:g} optimizer steps in the whole training"
            + ("" if run.whole or not training.engine else f", since an epoch has {run.num_batches} micro-batches")
            + f", and logs at every {every}th{given}: what training_step logs per step never arrives",
            f"set log_every_n_steps to at most {last:g}" if last else "see WIN01",
            _proof(training),
        )
    elif place.given and accumulate > 1 and every > 1 and every % accumulate == 0:
        yield place.finding(
            "LOG02",
            Severity.INFO,
            f"log_every_n_steps counts optimizer steps: {every} steps are {every * accumulate} micro-batches, and a "
            "value logged per step is that of the window's last micro-batch alone",
            f"if {every} micro-batches are meant, set it to {every // accumulate}",
            _proof(training),
        )


def _monitor(training: Training, monitor: Section, options: Options) -> Iterator[Finding]:
    place = window_place(monitor)
    window, accumulate, every = training.window, training.accumulate, training.log_every
    if window < 2:
        yield place.finding(
            "THR04",
            Severity.ERROR,
            f"window_size {window} raises AssertionError: a rate needs two points",
            f"set window_size to {accumulate + 1} or another k x {accumulate} + 1",
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
    if training.schedule is not None:
        return
    given = "" if place.given else " (the default)"
    if accumulate > 1 and (window - 1) % accumulate:
        spans = window - 1
        updates = -(-spans // accumulate)
        below = max(spans // accumulate, 1) * accumulate + 1
        yield place.finding(
            "THR01",
            Severity.WARNING,
            f"window_size {window}{given} spans {spans} intervals between micro-batches with {updates} optimizer steps "
            f"in them, where {spans}/{accumulate} = {spans / accumulate:.4g} would be right: rates are up to "
            f"{1 - spans / accumulate / updates:.1%} too low, the more the longer a step takes",
            f"set window_size to {below} or {(spans // accumulate + 1) * accumulate + 1}: k x {accumulate} + 1",
            _proof(training),
        )
    run = training.epochs
    if run is None or not every:
        return
    last = _last_step(training, run)
    if math.isinf(last):
        return
    logged = int(last) // every * every
    if not logged:
        at, when = 0, "no step is logged at all (LOG01)" if accumulate > 1 else "no step is logged at all"
    else:
        at = (run.batches_at_whole_step(logged) or 0) if training.engine else run.batches_at_flushed_step(logged)
        when = f"the last step that is logged, {logged}, comes after {at} micro-batches"
    if at < window:
        yield place.finding(
            "THR02",
            Severity.WARNING,
            f"{when}, and rates are logged only once {window} micro-batches{given} have been seen: no rate is ever "
            "logged",
            f"set window_size to k x {accumulate} + 1 below {at}" if at > accumulate else "set log_every_n_steps lower",
            _proof(training),
        )


def _proof(training: Training) -> str:
    """The audit of the monitor, with the config's numbers, or with smaller ones of the same remainder's share."""
    accumulate, window = training.accumulate, training.window
    if accumulate > LARGEST_SHOWN:
        whole, rest = divmod(window - 1, accumulate)
        accumulate = 8
        window = min(whole, 12) * accumulate + 1 + max(rest * accumulate // training.accumulate, int(rest > 0))
    return proof.throughput(accumulate, max(training.log_every, 1), max(window, 2))
