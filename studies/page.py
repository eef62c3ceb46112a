"""The study of the verdicts as a page: what was not met first, then the rates, real trials, and choices of method."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from scipy.stats import binom

from bench.formatting import digits, plural
from bench.judge.statistics import MIN_TRIALS
from bench.judge.verdicts import ALPHA, DIFFERENT, Verdict
from bench.plan.schedule import Ended
from bench.report.ranking import interval_text
from bench.tabular import markdown_table
from studies import choices, pairing_text, pools, study
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
    elsewhere: Sequence[pools.Elsewhere]
    """Runs on other machines."""
    pools: pd.DataFrame
    reports: int
    num_pools: int


def percent(value: Any) -> str:
    """A share in per cent with one decimal."""
    return f"{number(value)} %"


def number(value: Any) -> str:
    """The same without the sign, for tables that have it in their heading."""
    return f"{100 * value:.1f}"


def page(results: Results, command: str, known: Sequence[Known], planted: Sequence[Known]) -> str:
    """The page; ``known`` and ``planted`` are runs on a real machine whose right verdicts are known, by design."""
    missed = study.misses(results.rates) + pools.misses(results.pools)
    parts = [
        "# How far the verdicts can be trusted",
        "",
        f"Written by `{command}`; seeds {study.SEED} and, of other days, {pools.SEED}.",
        "",
        *(["All targets, which are of simulations, are met.", ""] if not missed else []),
        *(line for sentence in missed for line in (f"**Missed:** {sentence}", "")),
        *_other_days(results),
        *_elsewhere(results.elsewhere),
        *_rates(results),
        *_real(known, planted),
        *pairing_text.section(),
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
            number(row["false"]),
            number(row["coverage"]),
            number(row["next"]),
            number(row["width"]),
        )
        for row in results.pools.to_dict("records")
    ]
    head = (
        "runs",
        "any difference that other days lack, %",
        "true ratio, %",
        "next run, %",
        "median width, %",
    )
    return [
        "## On another day",
        "",
        f"{spread['runs']} runs on {spread['cpu']}, {spread['cores']} cores, are kept: {kept} (earlier runs of `cpu` "
        "with other cells, [older.csv](../results/pool/older.csv)). Between runs, a ratio has a standard deviation of "
        f"{100 * spread['of_ratios']:.1f} %, and the step time of a cell one of {100 * spread['of_times']:.0f} %. Of "
        f"{pairs} ratios that were measured again in another run, {percent(outside / pairs)} are outside the first "
        f"run's 95 % interval, and {percent(beyond / pairs)} are farther away than the report of a single run allows "
        "for other days.",
        "",
        f"Each row is {results.num_pools:,} pools of equally fast cells, simulated from these runs. What makes runs "
        "differ is normal, with their covariance, or resampled from them with a random sign. The interval of one run "
        "is over its blocks, that of several over runs, and the next run then has one of its own. *True ratio* and "
        "*next run* are the shares of intervals that contain it.",
        "",
        f"Targets: {'; '.join(pools.TARGETS)}.",
        "",
        *markdown_table(head, rows),
    ]


SHOWN_N = 8
"""The N whose ratios on other machines are in the table."""


def _elsewhere(runs: Sequence[pools.Elsewhere]) -> list[str]:
    """What runs on other classes of machines say of the same ratios; empty if there are none."""
    of_matrix: dict[str, list[pools.Elsewhere]] = {}
    for each in runs:
        of_matrix.setdefault(each.matrix, []).append(each)
    found: list[str] = []
    for matrix, same in of_matrix.items():
        found += [f"`{matrix}` ran on other processors. {_numbers(same[0])}", ""]
        head = ("run", "processor", "expected", "same verdict", "opposite", "ambiguous in one")
        found += markdown_table(head, [_agreement(each) for each in same])
        found += [_transfer(same), ""]
        found += [
            f"At N = {SHOWN_N}, deferred to eager sync and those outside, with 95 % intervals:",
            "",
        ]
        columns = ("step times", "kept runs", "next run", *(each.label for each in same))
        found += markdown_table(columns, _repeated(same))
    if found:
        found = ["## On other processors", "", *found]
    return found


def _numbers(other: pools.Elsewhere) -> str:
    return (
        f"Of {len(other.with_baseline)} ratios to the baseline and {len(other.of_syncs)} of deferred to eager sync, "
        "*expected* are where the kept runs expect a next one."
    )


def _transfer(runs: Sequence[pools.Elsewhere]) -> str:
    """Whether as many ratios are where the kept runs expect them as if it were another day."""
    ratios = [(*each.with_baseline, *each.of_syncs) for each in runs]
    due = round(0.95 * len(ratios[0]))
    fewer = sum(sum(ratio.is_expected for ratio in of_run) < due for of_run in ratios)
    told = f"Of a run on another day {due} of {len(ratios[0])} are due; {fewer} of these {len(runs)} runs have fewer"
    if not fewer:
        return f"{told}."
    return f"{told}, so the expected range is of one class of machines."


def _agreement(other: pools.Elsewhere) -> tuple[str, ...]:
    """A row: in how many ratios a run elsewhere says what the kept runs say."""
    expected = same = opposite = unsure = 0
    for each in (*other.with_baseline, *other.of_syncs):
        expected += each.is_expected
        verdicts = {each.kept.verdict, each.there.verdict}
        same += len(verdicts) == 1
        opposite += verdicts == DIFFERENT
        unsure += len(verdicts) > 1 and Verdict.AMBIGUOUS in verdicts
    name = f"[{other.label}](../results/elsewhere/{other.matrix}/{other.label}/run.json)"
    machine = other.run.manifest.machine
    processor = f"{machine.cpu}, {machine.cores} cores"
    return (name, processor, *map(str, (expected, same, opposite, unsure)))


def _repeated(runs: Sequence[pools.Elsewhere]) -> list[tuple[str, ...]]:
    """Rows: ratios over the kept runs, and in each run elsewhere."""
    rows = []
    for place in range(len(runs[0].with_baseline)):
        same = [each.with_baseline[place] for each in runs]
        if not all(each.is_expected for each in same):
            rows.append(same)
    rows += [list(same) for same in zip(*(each.of_syncs for each in runs), strict=True)]
    return [_repetition(same) for same in rows if same[0].kept.b.accumulate == SHOWN_N]


def _repetition(runs: Sequence[pools.Repetition]) -> tuple[str, ...]:
    """A row: the ratio over the kept runs, and in each run elsewhere."""
    kept = runs[0].kept
    ours = kept.time
    assert ours is not None, "both were timed"
    cells = []
    for each in runs:
        theirs = each.there.time
        assert theirs is not None, "both were timed"
        text = f"{digits(theirs.ratio)} ({interval_text(theirs.low, theirs.high)})"
        if not each.is_expected:
            text += ", outside"
        cells.append(text)
    return (
        f"{kept.b.backend} / {kept.a.backend}",
        f"{digits(ours.ratio)} ({interval_text(ours.low, ours.high)})",
        interval_text(ours.next_low, ours.next_high),
        *cells,
    )


def _rates(results: Results) -> list[str]:
    names = ("5 %", "10 %")
    own = results.rates.groupby("noise")["blocks"].first()
    rows = [
        (
            study.name(row),
            number(row["false"]),
            *(number(row[f"power {name}"]) for name in names),
            number(row["coverage"]),
            number(row["width"]),
        )
        for row in results.rates.to_dict("records")
        if row["blocks"] != study.SIZES[0] or own[row["noise"]] > study.SIZES[0]
    ]
    spread = ", ".join(f"{100 * noise.deviation:.2g} % in {noise.name}" for noise in results.noises)
    found = [f"{name} found, %" for name in names]
    head = ("noise", "any false difference, %", *found, "coverage, %", "median width, %")
    lost = max(
        (results.rates[f"t {name}"] - results.rates[f"power {name}"]).max() for name in names
    )
    return [
        "## Within one run",
        "",
        f"Each row is {results.reports} reports, made by resampling the blocks of committed runs, {BLOCKS} "
        "consecutive ones at a time with all their cells, so bursts, drift and two modes are as measured. "
        f"`noise` is one small cell on a noisy machine. The standard deviation of a block's log ratio is {spread}. "
        "The first row of each has the blocks of its run, or of the shortest of noise; the last row those of `quick`. "
        "Cells are equally fast, or all slower than the baseline by the same share.",
        "",
        "Where the A/A pair is off there is no [verdict](method.md), which costs at most "
        f"{max(0.0, 100 * lost):.1f} points of power. Of cells that differ by 1 %, at most "
        f"{percent(results.rates['same 1 %'].max())} are called the same. A share near 5 % has a standard error of "
        f"{100 * (0.05 * 0.95 / results.reports) ** 0.5:.1f} points.",
        "",
        f"Targets: {'; '.join(study.TARGETS)}.",
        "",
        *markdown_table(head, rows),
    ]


def _real(known: Sequence[Known], planted: Sequence[Known]) -> list[str]:
    """Runs of one small cell on one rank, and those of the published design."""
    machine = known[0].run.manifest.machine
    budget = known[0].run.manifest.settings
    late = sum(item.run.manifest.ended_by == Ended.BUDGET for item in known)
    return [
        "## On real trials",
        "",
        f"{len(known)} runs on {machine.cpu}, {machine.cores} cores ([trials](../results/noise/trials.csv)). Each "
        "holds `ddp-deferred` on one rank three times (itself, its A/A twin, and a third that is compared) and once "
        f"more with a sleep of {100 * DELAY:g} % per step, until intervals were narrower than "
        f"{100 * budget.precision:g} % or {budget.budget_s:g} s had passed, which ended {late} of them. It is one "
        "rank with one thread: with two threads, steps on two virtual cores had two modes, a factor of 1.5 apart, when "
        f"this design was chosen. {_found(known)}",
        "",
        *_published(planted),
        *_false_alarms([*known, *planted]),
    ]


def _false_alarms(runs: Sequence[Known]) -> list[str]:
    """How many runs called the cell different from itself, and how probable as many are if the rate is ALPHA."""
    count = sum(run.same.verdict in DIFFERENT for run in runs)
    if not count:
        return []
    as_many = float(binom.sf(count - 1, len(runs), ALPHA))
    return [
        f"In all, {count} of {len(runs)} runs called the cell faster or slower than itself. At the limit of "
        f"{100 * ALPHA:g} % per run, {count} or more come by chance in {100 * as_many:.0f} of 100 cases.",
        "",
    ]


def _published(planted: Sequence[Known]) -> list[str]:
    cell, settings = planted[0].slower.b, planted[0].run.manifest.settings
    return [
        f"The same in the published design, two ranks with the model and batch of `cpu`, N = {cell.accumulate} and "
        f"{cell.timed_windows} timed windows, {settings.budget_s:g} s each "
        f"([trials](../results/planted/trials.csv)): {plural(len(planted), 'run')}. {_found(planted)}",
        "",
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
        return f"Not measured: the machine was busy, so no times are compared.{real}"
    itself = [item.same.time.ratio for item in known if item.same.time is not None]
    ratios = [time.ratio for time in times]
    same = Counter(item.same.verdict for item in known)
    slower = Counter(item.slower.verdict for item in known)
    words = (
        "Compared with itself, the cell was called faster or slower in "
        f"{same[Verdict.FASTER] + same[Verdict.SLOWER]} of {len(known)} (ratios from {min(itself):.3f} to "
        f"{max(itself):.3f}). With the sleep it was called slower in {slower[Verdict.SLOWER]}, ambiguous in "
        f"{slower[Verdict.AMBIGUOUS]}, and faster or the same in {slower[Verdict.FASTER] + slower[Verdict.SAME]} "
        f"(ratios from {min(ratios):.3f} to {max(ratios):.3f}, geometric mean {statistics.geometric_mean(ratios):.3f})."
    )
    if not slept:
        return (
            f"{words} What was really slept was not recorded; {1 + DELAY:g} was asked for, and the cell may be slower "
            "after a sleep."
        )
    due = 1 + statistics.mean(slept)
    held = sum(
        time.low is not None and time.high is not None and time.low <= due <= time.high
        for time in times
    )
    return f"{words}{real} The interval contains {due:.3f} in {held}."


def _rivals(frame: pd.DataFrame) -> list[str]:
    names = [name for name in study.EFFECTS if name in frame and name != "1 %"]
    about = {rule.name: rule.about for rule in RULES}
    rows = [
        (row["rule"], about[row["rule"]], *(number(row[n]) for n in names))
        for row in frame.to_dict("records")
    ]
    return [
        "## The rules of other tools on the same noise",
        "",
        "How often, in per cent, each rule calls two cells different, by their true difference, with the noise of "
        "`cpu`; one comparison, interleaved as here. By default the tools run cells in sequence, so drift enters too.",
        "",
        *markdown_table(("tool", "rule", *names), rows),
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
            *(f"{number(held.loc[name, n])}, {number(widths.loc[name, n])}" for n in choices.SIZES),
        )
        for name in held.index
    ]
    return [
        "## Which interval",
        "",
        "Coverage and median width, in per cent, of 95 % intervals of a ratio that is 1: means over the kinds of "
        f"noise. The one in bold, of the mean logarithm, is used from {MIN_TRIALS} blocks on; the others are "
        "percentiles of bootstrapped means.",
        "",
        *markdown_table(("method", *(f"{n} blocks" for n in choices.SIZES)), rows),
    ]
