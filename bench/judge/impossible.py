"""What no honest step can be: faster than its matrix products, or as long as no clock has seen.

Limits are wide: they are for what cannot have happened, and not for what is fast.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.formatting import digits
from bench.judge.trial_columns import TrialRow

UTILISATION = 1.5
"""Largest share of the rate of large matrix products that the run measured on all ranks at once,
per second of CPU time: what the CPUs give if nobody else takes them. Sound cells of all committed
runs reach 0.8 of the rate per second; another program on a core's second thread may halve either
rate.
"""
CLOCK_S, CLOCK_SHARE = 0.1, 0.05
"""How far two clocks may be apart, in seconds and of the span, beside the time that marking took:
the kernel marks a file with the time of its last tick, of at most 10 ms. On a busy machine 20 ms
were seen."""


def impossible(row: TrialRow) -> Iterator[str]:
    """Why the times of a finished trial cannot be, each with its numbers; nothing if they can."""
    yield from _too_fast(row)
    yield from _other_clock(row)


def _too_fast(row: TrialRow) -> Iterator[str]:
    seconds, rate = row.step_time_s, row.facts.matmul_capacity
    if seconds is None or rate is None:
        return
    if row.facts.model_flops is not None:
        what, flops = "the model's FLOPs", row.facts.model_flops
    elif row.facts.product_flops is not None:
        what, flops = "its matrix products alone", row.facts.product_flops
    else:
        return
    share = flops / (rate * seconds)
    if share > UTILISATION:
        yield (
            f"a step of {digits(seconds)} s is impossible: {what} ({flops:.3g} FLOP on all ranks) "
            f"would run at {100 * share:.0f} % of the {rate:.3g} FLOP/s that matrix products can "
            f"reach here (limit {100 * UTILISATION:.0f} %)"
        )


def _other_clock(row: TrialRow) -> Iterator[str]:
    told, seen, steps = row.facts.span_s, row.facts.observed_span_s, row.facts.steps_s
    if told is None or seen is None:
        return
    slack = CLOCK_S + CLOCK_SHARE * seen + row.facts.marking_s
    if abs(told - seen) > slack:
        yield (
            f"the time pass took {digits(seen)} s from its first fetch to its last step by the "
            f"kernel's clock, and {digits(told)} s by that of the rank: "
            "its step times are not those of a clock"
        )
    elif steps is not None and steps > seen + slack:
        yield (
            f"its steps took {digits(steps)} s together, and the whole time pass {digits(seen)} s "
            "by the kernel's clock: they are not times of steps"
        )
