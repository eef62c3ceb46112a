"""What studies/pairing.py found, in Markdown: a section of docs/statistics.md."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from typing import Any

from scipy import stats

from bench.judge.statistics import MIN_TRIALS, Interval, Sample, ratio
from bench.judge.verdicts import ALPHA
from studies.pairing import BASELINE, MACHINES, PRODUCTS, RESULTS, TIMED


def interval(ratios: Sequence[float]) -> Interval:
    """As reports have it: of ratios by block to a baseline that is 1."""
    blocks = range(len(ratios))
    return ratio(Sample(ratios, blocks), Sample([1.0] * len(ratios), blocks))


def _ends(of: Interval) -> str:
    if of.low is None:
        return "no interval"
    return f"{of.low:.3f} to {of.high:.3f}"


def section() -> list[str]:
    """What was found, in Markdown."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    blocks = ", ".join(f"{len(_of('apart', found[machine]))} {machine}" for machine in MACHINES)
    gains = [_gains("turns", found[machine]) for machine in MACHINES]
    idle_blocks = len(_of("turns", found["idle"]))
    apart, turns = (
        statistics.mean(each["seconds"] for each in _of(design, found["idle"])) for design in TIMED
    )
    noise = statistics.geometric_mean(gains[0]) * math.sqrt(apart / turns)
    slowed = ratio(
        *(
            Sample([each["baseline_s"] for each in _of(design, found["idle"])])
            for design in ("turns", "apart")
        )
    )
    groups = [found["twins"][i : i + MIN_TRIALS] for i in range(0, len(found["twins"]), MIN_TRIALS)]
    twins = [interval(group) for group in groups if len(group) == MIN_TRIALS]
    hold = sum(each.low <= 1 <= each.high for each in twins if each.low and each.high)
    return [
        "## Cells in turn",
        "",
        f"Apart, each cell trains by itself, as in a run. In turns, it and the baseline's (`{BASELINE}`) train window "
        f"by window in two process groups that swap halfway. {found['cpu']}, {found['cores']} cores, N = 2; blocks in "
        f"either design: {blocks} "
        "([pairing.json](pairing.json)). The spread is the standard deviation of a block's log ratio times the root "
        "of its seconds, so it counts what a block costs.",
        "",
        f"By cell, the spread in turns is {_range(gains[0])} times that apart on the idle machine, and "
        f"{_range(gains[1])} beside two programs that never wait. Were ratios normal, the interval of one cell's would "
        f"span a factor of {_factor(idle_blocks):.1f} either way. Idle, the standard deviation is {noise:.2f} times as "
        f"large (geometric mean), but a block takes {turns:.0f} s instead of {apart:.0f} s, in part to start second "
        "process groups.",
        "",
        _of_load(
            *(
                [each["ratios"]["fsdp2-deferred"] for each in _of("turns", found[machine])]
                for machine in MACHINES
            )
        ),
        "",
        f"Idle, the step of `{BASELINE}` beside a cell that waits is {slowed.ratio:.3f} ({_ends(slowed)}) times that "
        f"alone. In turn with itself, {hold} of {len(twins)} intervals contain 1.",
        "",
        *_starts(**found["starts"]),
    ]


def _of_load(idle: Sequence[float], busy: Sequence[float]) -> str:
    """Whether a ratio to the baseline differs between the two machines."""
    changed = ratio(Sample(busy), Sample(idle))
    verdict = "Whether load changes the ratio itself is not shown"
    if changed.p_different is not None and changed.p_different < ALPHA:
        verdict = "Load changes the ratio itself"
    without, beside = interval(idle), interval(busy)
    return (
        f"{verdict}: in turns, `fsdp2-deferred` takes {beside.ratio:.2f} ({_ends(beside)}) times the step of "
        f"`{BASELINE}` beside these programs, and {without.ratio:.2f} ({_ends(without)}) without them; one ratio is "
        f"{changed.ratio:.2f} ({_ends(changed)}) times the other. No times from a busy machine are compared."
    )


def _of(design: str, blocks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in blocks if each["design"] == design]


def _spreads(blocks: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By cell, the standard deviation of its log ratio times the root of a block's seconds."""
    root = statistics.mean(each["seconds"] for each in blocks) ** 0.5
    names = sorted(blocks[0]["ratios"])
    return {
        name: root * statistics.stdev(math.log(each["ratios"][name]) for each in blocks)
        for name in names
    }


def _gains(design: str, blocks: Sequence[dict[str, Any]]) -> list[float]:
    """The spread of a design relative to that of cells apart, of each cell."""
    ours, apart = (_spreads(_of(name, blocks)) for name in (design, "apart"))
    return [ours[name] / apart[name] for name in ours]


def _range(gains: Sequence[float]) -> str:
    mean = statistics.geometric_mean(gains)
    return f"{min(gains):.2f} to {max(gains):.2f} (geometric mean {mean:.2f})"


def _factor(blocks: int) -> float:
    """By which two standard deviations of so many normal values differ in 95 of 100 cases, at most."""
    return math.sqrt(float(stats.f.ppf(0.975, blocks - 1, blocks - 1)))


def _starts(seconds: Sequence[float], products: Sequence[float]) -> list[str]:
    """Whether two starts of a cell differ by more than the machine does while nothing starts."""
    steps, machine = ([math.log(value) for value in values] for values in (seconds, products))
    around = [statistics.mean(pair) for pair in itertools.pairwise(machine)]
    found = stats.pearsonr(steps, around)
    return [
        f"Two starts of a cell differ: in another run, the step of `{BASELINE}`, started {len(steps)} times alone on "
        f"the idle machine (median {statistics.median(seconds):.4f} s), has a standard deviation of "
        f"{100 * statistics.stdev(steps):.1f} %. The time in which two lasting processes multiply {PRODUCTS} matrices, "
        f"before and after each start, has one of {100 * statistics.stdev(machine):.1f} %. Their correlation is "
        f"{found.statistic:.2f} (p = {found.pvalue:.2g}): the machine's speed explains "
        f"{100 * found.statistic**2:.0f} % of the variance.",
        "",
    ]
