"""The table of columns: name, dtype, unit, meaning and form of every column of a run's frames.

Parquet schemas, frames, tables on the page and in the terminal, figure titles and exports are all
derived from it. A field of a cell is an axis of a matrix; its ``axis`` says whether it belongs to
the work or to the way it is done. Missing values are NA.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from bench.grouping import grouped
from bench.judge.trial_columns import (
    CORRECTNESS,
    KEY,
    MEMORY,
    SPEED,
    TRIAL_COLUMNS,
    Axis,
    Column,
    count,
    flag,
    number,
    text,
)
from bench.plan.cell import Cell

FRAMES = {
    "cells": "one row per cell: its step time with the interval, "
    "and its verdict against the baseline",
    "trials": "one row per trial, including failed ones",
    "steps": "one row per trial and timed optimizer step",
    "losses": "one row per trial and optimizer step",
    "collectives": "one row per trial, operation, group and dtype, counted between two updates",
    "memory": "one row per trial and category",
    "ratios": "one row per cell and baseline: the ratio of step times and the verdict",
}
"""The frames in order, each with the meaning of a row."""

_time = partial(number, "s", form=".4g", section=SPEED)
_CELLS: dict[str, Column] = {
    "cell_id": TRIAL_COLUMNS["cell_id"],
    "label": text("a short readable name", title="cell"),
    **{name: about for name, about in TRIAL_COLUMNS.items() if about.is_of_each_cell},
    "status": text("invalid if a trial is; else of the first trial that is not ok; ok if all are"),
    "reason": text("why the status is not ok"),
    "outcome": text(
        "the status, with the number of ok trials if some failed: crashed, 12 of 13 ok",
        section=CORRECTNESS,
    ),
    "comparable": flag("whether the cell may be compared with others"),
    "num_ok": count("trials", "behind the numbers", title="n", section=SPEED),
    "num_trials": count("trials", "run"),
    "step_time_s": number(
        "s",
        "geometric mean of the trials' medians; NA if not comparable",
        title="s/step",
        form=".4g",
        section=SPEED,
    ),
    "step_time_low_s": _time("lower end of its 95 % interval over trials", title="95 % from"),
    "step_time_high_s": _time("upper end", title="to"),
    "fastest_s": _time("of the fastest ok trial", title="fastest trial"),
    "slowest_s": _time("of the slowest ok trial", title="slowest trial"),
    "tokens_per_s": number(
        "tokens/s", "at step_time_s", title="tokens/s", form=",.0f", section=SPEED
    ),
    "tokens_per_s_per_rank": number(
        "tokens/s", "of tokens_per_s", title="tokens/s per rank", form=",.0f", section=SPEED
    ),
    "peak_memory_bytes": count(
        "B", "largest among the trials that are ok", title="peak", section=MEMORY
    ),
    "peak_memory_source": text(
        "what measured peak_memory_bytes", title="measured by", section=MEMORY
    ),
    "peak_reserved_bytes": count(
        "B",
        "taken from the device by the CUDA allocator, largest among the trials",
        title="reserved",
        section=MEMORY,
    ),
    **{name: about for name, about in TRIAL_COLUMNS.items() if about.section},
    "others_percent": number(
        "%",
        "of the CPUs, used by others, median over trials",
        title="CPUs used by others (%)",
        form=".2g",
        section=SPEED,
    ),
    "baseline": text("backend that the cell is compared with; NA if it has no matching cell"),
    "ratio": number("1", "step time relative to the baseline's: above 1 the cell is slower"),
    "ratio_low": number("1", "lower end of its 95 % interval"),
    "ratio_high": number("1", "upper end"),
    "verdict": text("faster, slower, same, ambiguous or not comparable"),
    "verdict_reason": text("why"),
    "caveats": text("caveats of the numbers, semicolon-separated"),
    "citation": text("id to cite it by"),
}

COLUMNS: dict[str, dict[str, Column]] = {
    "cells": _CELLS,
    "trials": TRIAL_COLUMNS,
    "steps": {
        **KEY,
        "step": count("", "number of the optimizer step, from 0 at the first"),
        "seconds": number("s", "from the previous update to this one, maximum over ranks"),
    },
    "losses": {
        **KEY,
        "step": count("", "number of the optimizer step, from 0 at the first"),
        "loss": number("nat/token", "mean over ranks and micro-batches"),
    },
    "collectives": {
        **KEY,
        "op": text("collective operation"),
        "group": text("ranks that take part: world, or the shard or replicate group of rank 0"),
        "dtype": text("dtype of the payload"),
        "calls": count("calls", "by rank 0 between two updates"),
        "payload_bytes": count("B", "payload of these calls"),
        "expected_calls": count("calls", "by formula; NA if there is none"),
        "expected_payload_bytes": count("B", "by formula; NA if there is none"),
    },
    "memory": {
        **KEY,
        "category": text("what the memory holds, and what measured it"),
        "bytes": count("B", "maximum over ranks"),
        "expected_bytes": count("B", "by formula; NA if there is none"),
    },
    "ratios": {
        "cell": text("name of the pair"),
        "group": text("heading of its section"),
        "cell_id_a": text("cell of the baseline"),
        "cell_id_b": text("cell compared with it"),
        "backend_a": text("the baseline"),
        "backend_b": text("backend compared with it"),
        "verdict": text("on b: faster, slower, same, ambiguous or not comparable"),
        "reason": text("why"),
        "detail": text("the same with its numbers"),
        "next": text("what to do"),
        "ratio": number("1", "step time of b relative to a"),
        "low": number("1", "lower end of its 95 % interval"),
        "high": number("1", "upper end"),
        "num_trials": count(
            "trials", "of the side with fewer, or blocks if paired; runs if there are several"
        ),
        "paired": flag("whether trials of the same block are compared"),
        "p_different": number("1", "p-value of no difference, after Holm's correction"),
        "p_same": number("1", "p-value of a difference beyond the margin, after Holm's correction"),
        "num_runs": count("runs", "in which the cells are compared"),
        "next_low": number(
            "1", "lower end of where the ratio of the next run falls in 95 of 100; NA below 3 runs"
        ),
        "next_high": number("1", "upper end"),
        "no_interval": text("why there is no interval"),
        "peak_memory_a_bytes": count("B", "of a"),
        "peak_memory_b_bytes": count("B", "of b"),
        "peak_memory_ratio": number("1", "of b over a"),
        "optimizer_steps_a": count("steps", "observed, of a"),
        "optimizer_steps_b": count("steps", "observed, of b"),
    },
}
"""Columns of each frame, in order.

Steps and losses count from 0 at the first update. ``foreign_cores`` and ``stolen_cores`` are means
over the time pass. ``collective_s``, ``exposed_s``, ``*_per_micro_batch`` (one window of the rank
with the largest value, divided by N, including the optimizer step's share) and ``other_work`` are
measured once per cell. MFU is model FLOPs (PaLM, arXiv:2204.02311, appendix B) per second, relative
to a peak. Step times, power and energy are missing if ranks shared a GPU. ``expected_*`` are filled
by ``bench.judge.expected``.
"""


def dtypes(frame: str) -> dict[str, str]:
    """The pandas dtype of each column of a frame, in order."""
    return {name: column.dtype for name, column in COLUMNS[frame].items()}


AXES = {name: about for name, about in COLUMNS["trials"].items() if about.axis is not None}
"""The fields that distinguish cells."""


def axes(*kinds: Axis) -> tuple[str, ...]:
    """The names of the axes of these kinds, kind by kind."""
    found: list[str] = []
    for kind in kinds:
        for name, about in AXES.items():
            if about.axis is kind:
                found.append(name)
    return tuple(found)


WORK, WAYS = axes(Axis.WORK), axes(Axis.WORK, Axis.WAY)
"""Axes that are equal if two cells do the same work in a step; and axes shown where cells differ in
them."""


FOLLOWS = {"learning_rate": "optimizer", "replicate": "backend"}
"""Axes that usually follow another: a rate for each optimizer, replicas for HSDP alone."""


def differing(cells: Iterable[object], names: Iterable[str] = WAYS) -> list[str]:
    """The axes in which cells (or table rows with one attribute per column) differ.

    An axis that only follows another one is left out: FOLLOWS.
    """
    rows = list(cells)
    found: list[str] = []
    for name in names:
        values = {getattr(row, name) for row in rows}
        if len(values) > 1:
            found.append(name)
    for name in FOLLOWS.keys() & set(found):
        leaders = set()
        pairs = set()
        for row in rows:
            leader = getattr(row, FOLLOWS[name])
            leaders.add(leader)
            pairs.add((leader, getattr(row, name)))
        if len(pairs) == len(leaders):
            found.remove(name)
    return found


def labels(cells: Iterable[Cell]) -> dict[Cell, str]:
    """A unique label for each cell: its own, plus the axes in which cells of that label differ."""
    alike = grouped((cell.label, cell) for cell in cells)
    found: dict[Cell, str] = {}
    for label, some in alike.items():
        names = differing(some)
        for cell in some:
            found[cell] = " ".join([label, *phrases(cell, names)])
    return found


def phrases(cell: Cell, names: Iterable[str]) -> list[str]:
    """The values of these axes, as sentences show them."""
    return [AXES[name].phrase(getattr(cell, name)) for name in names]
