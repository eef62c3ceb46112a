"""What no honest step can be: faster than its matrix products, or of another length than the kernel's clock has seen.

Limits are wide: they are for what cannot have happened, and not for what is fast.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.formatting import digits
from bench.judge.trial_columns import TrialRow

UTILISATION = 1.5
"""Largest share of the run's own rate of matrix products.

That rate is the median of a few large products on all ranks at once. It is measured once, for a fraction of a second,
so whoever used the machine just then made it too low for the whole run.
"""
CLOCK_S, CLOCK_SHARE = 0.1, 0.05
"""How far two clocks may be apart, in seconds and of the span: the kernel marks files with the time of its last tick,
10 ms at most, and a busy machine may hold up a process between reading one clock and the other."""


def impossible(row: TrialRow) -> Iterator[str]:
    """Why the times of a finished trial cannot be, each with its numbers; nothing if they can."""
    yield from _too_fast(row)
    yield from _other_clock(row)


def _too_fast(row: TrialRow) -> Iterator[str]:
    seconds, rate = row.step_time_s, row.matmul_flops_per_s
    if seconds is None or rate is None:
        return
    products = row.product_flops
    if row.mfu_of_matmul is not None and row.mfu_of_matmul > UTILISATION:
        share, what, flops = (
            row.mfu_of_matmul,
            "the model's FLOPs",
            row.mfu_of_matmul * rate * seconds,
        )
    elif products is not None and products > UTILISATION * rate * seconds:
        share, what, flops = products / (rate * seconds), "its matrix products alone", products
    else:
        return
    yield (
        f"a step of {digits(seconds)} s is impossible: {what} ({flops:.3g} FLOP on all ranks) would run at "
        f"{100 * share:.0f} % of the {rate:.3g} FLOP/s that matrix products reached in this run "
        f"(limit {100 * UTILISATION:.0f} %)"
    )


def _other_clock(row: TrialRow) -> Iterator[str]:
    told, seen = row.span_s, row.observed_span_s
    if told is None or seen is None:
        return
    if abs(told - seen) > CLOCK_S + CLOCK_SHARE * max(told, seen):
        yield (
            f"the time pass took {digits(seen)} s from its first fetch to its last step by the kernel's clock, and "
            f"{digits(told)} s by that of the rank: its step times are not those of a clock"
        )
    elif row.steps_s is not None and row.steps_s > seen + CLOCK_S + CLOCK_SHARE * seen:
        yield (
            f"its steps took {digits(row.steps_s)} s together, and the whole time pass {digits(seen)} s by the "
            "kernel's clock: they are not times of steps"
        )
