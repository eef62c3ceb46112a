"""The study of the verdicts as a page: what was not met first, then the rates, real trials, and choices of method."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.formatting import plural
from bench.judge.statistics import MIN_TRIALS, Interval
from bench.judge.verdicts import Verdict
from bench.plan.schedule import Ended
from bench.tabular import markdown_table
from studies import choices, pairing, pools, study
from studies.realtrials import Known
from studies.rivals import RULES
from studies.trial_noise import BLOCKS, Noise
from tests.delayed import DELAY


@dataclass(frozen=True, slots=True)
class Results:
    noises: Sequence[Noise]
    rates: pd.DataFrame
    rivals: pd.DataFrame
    intervals: pd.DataFrame
    sets: Sequence[pools.RunSet]
    """The kept runs."""
    pools: pd.DataFrame
    reports: int
    num_pools: int


def percent(value: Any) -> str:
    """A share in per cent with one decimal."""
    return f"{100 * value:.1f} %"


def page(results: Results, command: str, known: Sequence[Known], planted: Sequence[Known]) -> str:
    """The page; ``known`` and ``planted`` are runs on a real machine whose right verdicts are known, by design."""
    missed = study.misses(results.rates) + pools.misses(results.pools)
    parts = [
        "# How far the verdicts can be trusted",
        "",
        f"Written by `{command}`; seed {study.SEED}.",
        "",
        *(["All targets are met.", ""] if not missed else []),
        *(line for sentence in missed for line in (f"**Missed:** {sentence}", "")),
        *_other_days(results),
        *_rates(results),
        *_real(known, planted),
        *pairing.section(),
        *_in_turns(),
        *_rivals(results.rivals),
        *_methods(results),
    ]
    return "\n".join(parts)


def _other_days(results: Results) -> list[str]:
    """What runs of different days differ by, and how often verdicts over several runs are right."""
    spread, repeated = pools.spread(results.sets), pools.repeated(results.sets)
    kept = ", ".join(f"{len(each.runs)} of {each.name}" for each in results.sets)
    pairs, outside = sum(each.pairs for each in repeated), sum(each.outside for each in repeated)
    beyond = sum(each.beyond for each in repeated)
    rows = [
        (
            f"{row['runs']} ({row['way']})",
            percent(row["false"]),
            percent(row["false faster"]),
            percent(row["coverage"]),
            percent(row["next"]),
            percent(row["width"]),
        )
        for row in results.pools.to_dict("records")
    ]
    head = (
        "runs",
        "any false difference",
        "any false faster",
        "true ratio",
        "next run",
        "median width",
    )
    return [
        "## On another day",
        "",
        f"Kept are {spread['runs']} runs on {spread['cpu']}, {spread['cores']} cores: {kept} (earlier runs of `cpu` "
        f"with other cells, in results/pool/older.csv). Between runs, a ratio has a standard deviation of "
        f"{100 * spread['of_ratios']:.1f} %, and the step time of a cell one of {100 * spread['of_times']:.0f} %: the "
        f"whole machine is faster on some days. Of {pairs} ratios that were measured again in another run, "
        f"{percent(outside / pairs)} are outside the first run's 95 % interval, and {percent(beyond / pairs)} farther "
        "away than the reports of a single run say of other days.",
        "",
        f"{results.num_pools:,} pools per row are simulated from these runs; all cells are equally fast. What makes "
        "runs differ is normal, with the covariance of the kept runs, or resampled from them, with a random sign. The "
        "interval of one run is over its blocks, which is too narrow for other days; of more runs it is over runs. "
        "*True ratio* and *next run* are the shares of intervals that contain it. From three runs on, the next run has "
        "an interval of its own.",
        "",
        f"Targets: {'; '.join(pools.TARGETS)}.",
        "",
        *markdown_table(head, rows),
    ]


def _in_turns() -> list[str]:
    """What the spreads of cells in turn consist of: the noise of a block, and its length."""
    idle = json.loads(pairing.RESULTS.read_text(encoding="utf-8"))["idle"]
    apart, turns = (
        statistics.mean(each["seconds"] for each in pairing._of(name, idle))
        for name in pairing.TIMED
    )
    noise = pairing._gain("turns", idle) * math.sqrt(apart / turns)
    return [
        "A spread counts what a block costs. On the idle machine, the standard deviation of a block's log ratio is "
        f"{noise:.2f} times as large in turns as apart, but a block takes {turns:.0f} s instead of {apart:.0f} s. Part "
        "of that time goes into starting a second process group for each cell.",
        "",
    ]


def _rates(results: Results) -> list[str]:
    names = ("5 %", "10 %")
    rows = [
        (
            study.name(row),
            percent(row["false"]),
            *(percent(row[f"power {name}"]) for name in names),
            percent(row["coverage"]),
            percent(row["same 1 %"]),
            percent(row["width"]),
        )
        for row in results.rates.to_dict("records")
    ]
    spread = ", ".join(f"{100 * noise.deviation:.2g} % in {noise.name}" for noise in results.noises)
    found = [f"{name} found" for name in names]
    head = ("noise", "any false difference", *found, "coverage", "same at 1 %", "median width")
    lost = max(
        (results.rates[f"t {name}"] - results.rates[f"power {name}"]).max() for name in names
    )
    return [
        "## Within one run",
        "",
        f"{results.reports} reports per row are made by resampling the blocks of committed runs, {BLOCKS} consecutive "
        "ones at a time, with all their cells: bursts, drift and two modes are in them as measured. `cpu` and "
        "`popular` are those runs, `noise` is one small cell on a noisy machine. A block's log ratio has a standard "
        f"deviation of {spread}. The first row of each has as many blocks as its run, or as the shortest of "
        "noise; the last row has those of `quick`.",
        "",
        f"Targets: {'; '.join(study.TARGETS)}. All cells of a report "
        "are equally fast, or all are slower than the baseline by the same share. A verdict is a paired t-test on "
        "logarithms with Holm's correction; where the A/A pair is off there is none. That "
        f"costs at most {max(0.0, 100 * lost):.1f} points of power. A share near 5 % has a standard error "
        f"of {100 * (0.05 * 0.95 / results.reports) ** 0.5:.1f} points.",
        "",
        *markdown_table(head, rows),
        "A verdict is faster or slower if the interval excludes 1 and Holm's adjusted p-value is below 5 %.",
        "",
    ]


def _real(known: Sequence[Known], planted: Sequence[Known]) -> list[str]:
    """Runs of one small cell on one rank, and those of the published design."""
    machine = known[0].run.manifest.machine
    budget = known[0].run.manifest.settings
    late = sum(item.run.manifest.ended_by == Ended.BUDGET for item in known)
    return [
        "## On real trials",
        "",
        f"{len(known)} runs on {machine.cpu}, {machine.cores} cores (results/noise). Each holds `ddp-deferred` on one "
        "rank three times, as itself, as its A/A twin and as a third that is compared, and once more with a sleep of "
        f"{100 * DELAY:g} % per step, until intervals were narrower than {100 * budget.precision:g} % or, as in "
        f"{late}, {budget.budget_s:g} s had passed. One rank was chosen because two ranks on two virtual cores have "
        f"two modes, a factor of 1.5 apart, for as long as a process lives. {_found(known)}",
        "",
        *_table(known),
        "### In the published design",
        "",
        *_published(planted),
    ]


def _published(planted: Sequence[Known]) -> list[str]:
    cell, settings = planted[0].slower.b, planted[0].run.manifest.settings
    shortest = f"; each had {settings.budget_s:g} s"
    return [
        f"The same with two ranks, the model and batch of the matrix `cpu`, N = {cell.accumulate} and "
        f"{cell.timed_windows} timed windows: {plural(len(planted), 'run')} (results/planted){shortest}. "
        f"{_found(planted)}",
        "",
        *_table(planted),
    ]


def _found(known: Sequence[Known]) -> str:
    """What the runs said of the cell against itself, and of that with the sleep."""
    slept = [item.slept for item in known if item.slept is not None]
    real = (
        f" Really slept was {100 * statistics.mean(slept):.2f} % of the time awake."
        if slept
        else ""
    )
    times = [item.slower.time for item in known if item.slower.time is not None]
    if not times:
        return f"The machine was busy, so no times of theirs are compared.{real} It is to be run again."
    same = Counter(item.same.verdict for item in known)
    slower = Counter(item.slower.verdict for item in known)
    words = (
        "Compared with itself, the cell was called faster or slower in "
        f"{same[Verdict.FASTER] + same[Verdict.SLOWER]} of {len(known)}. With the sleep it was called slower in "
        f"{slower[Verdict.SLOWER]}, ambiguous in {slower[Verdict.AMBIGUOUS]}, and faster or the same in "
        f"{slower[Verdict.FASTER] + slower[Verdict.SAME]}; the geometric mean of the ratios is "
        f"{statistics.geometric_mean(time.ratio for time in times):.3f}."
    )
    if not slept:
        return (
            f"{words} What was really slept was not recorded then, so {1 + DELAY:g} is what was asked for, and the "
            "cell may be slower after a sleep."
        )
    due = 1 + statistics.mean(slept)
    held = sum(
        time.low is not None and time.high is not None and time.low <= due <= time.high
        for time in times
    )
    return f"{words}{real} The interval contains {due:.3f} in {held}."


def _table(known: Sequence[Known]) -> list[str]:
    rows = [
        (
            item.run.name,
            str(item.run.tables.trials["repeat"].nunique()),
            _interval(item.same.time),
            _interval(item.slower.time),
        )
        for item in known
    ]
    header = ("run", "blocks", "itself", "with the sleep")
    return markdown_table(header, rows)


def _interval(found: Interval | None) -> str:
    if found is None or found.low is None:
        return "none"
    return f"{found.ratio:.4f} ({found.low:.4f} to {found.high:.4f})"


def _rivals(frame: pd.DataFrame) -> list[str]:
    names = [name for name in study.EFFECTS if name in frame]
    rows = [
        (row["rule"], str(row["trials"]), *(percent(row[n]) for n in names))
        for row in frame.to_dict("records")
    ]
    return [
        "## The rules of other tools on the same noise",
        "",
        "How often each calls two cells different, with the noise of `cpu` and its steps; one comparison, interleaved "
        "as here. The tools themselves run one cell after the other, so that drift enters too.",
        "",
        *markdown_table(("rule", "trials", *(f"true difference: {name}" for name in names)), rows),
        *(f"- {rule.name}: {rule.about}" for rule in RULES),
        "",
    ]


def _methods(results: Results) -> list[str]:
    frame = results.intervals
    held, widths = (
        frame.pivot_table(index="method", columns="blocks", values=value)
        for value in ("coverage", "width")
    )
    rows = [
        (
            f"**{name}**" if name == choices.OURS else str(name),
            *(
                f"{percent(held.loc[name, n])}, {percent(widths.loc[name, n])}"
                for n in choices.SIZES
            ),
        )
        for name in held.index
    ]
    return [
        "## Which interval",
        "",
        "Coverage and median width of 95 % intervals of a ratio that is 1, each the mean over the kinds of noise. The "
        f"bench uses the one in bold, Student's t of the mean logarithm; fewer than {MIN_TRIALS} blocks give no "
        "interval. The others are percentiles of bootstrapped means, and contain the true ratio less often than they "
        "say where blocks are few.",
        "",
        *markdown_table(("method", *(f"{n} blocks" for n in choices.SIZES)), rows),
    ]
