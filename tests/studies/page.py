"""The study of the statistics as a page with a plot of the verdicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib.style
import pandas as pd
from matplotlib.patches import Patch

from bench.judge.statistics import MARGIN, MAX_REPEATS, MIN_REPEATS, MIN_TRIALS, PRECISION, SAME_WIDTH, Interval
from bench.judge.verdicts import Verdict
from bench.plan.schedule import Ended
from bench.report import canvas, style
from bench.report.canvas import Drawing, FigureWords
from tests.delayed import DELAY
from tests.studies import choices, markdown, rivals, simulation, study
from tests.studies.realtrials import Known
from tests.studies.study import BENCH, COMPARISONS, PLAIN, TARGETS

COLOURS = {
    Verdict.FASTER: "#0072B2",
    Verdict.SLOWER: "#D55E00",
    Verdict.SAME: "#009E73",
    Verdict.AMBIGUOUS: "#cccccc",
}
RATES = (
    "A/A called different",
    "5 % found",
    "1 % called same",
    "intervals hold the truth",
    "2 % called same",
    "trials per cell",
)


@dataclass(frozen=True, slots=True)
class Results:
    """All tables of the study."""

    outcome: study.Outcome
    precisions: pd.DataFrame
    limits: pd.DataFrame
    sizes: pd.DataFrame
    intervals: pd.DataFrame
    warmup: pd.DataFrame
    reports: int


def percent(value: Any) -> str:
    """A share in per cent with one decimal."""
    return "-" if pd.isna(value) else f"{100 * value:.1f} %"


def _trials(row: Any) -> str:
    numbers = [round(row[f"trials {effect}"]) for effect in ("A/A", "1 %", "5 %")]
    return str(numbers[0]) if len(set(numbers)) == 1 else " / ".join(map(str, numbers))


def _line(row: Any) -> tuple[str, ...]:
    rates = [percent(row[name]) for name in ("false_different", "found", "same", "coverage", "same_at_margin")]
    return (*rates, _trials(row))


def misses(outcome: study.Outcome) -> list[str]:
    """Targets that this bench does not meet, in words."""
    ours = outcome.rates[outcome.rates["rule"] == BENCH]
    return [
        f"{row['noise']}: {target.words}: {percent(row[target.column])}, not {_range(target)}"
        for row in ours.to_dict("records")
        for target in TARGETS
        if not target.met(row[target.column])
    ]


def _range(target: study.Target) -> str:
    if target.low <= 0:
        return f"at most {100 * target.high:g} %"
    if target.high >= 1:
        return f"at least {100 * target.low:g} %"
    return f"{100 * target.low:g} to {100 * target.high:g} %"


def page(results: Results, command: str, picture: str, known: Sequence[Known]) -> str:
    """The page; ``picture`` is the plot's file name beside it, ``known`` the runs on a real machine."""
    number = results.reports * COMPARISONS
    found = misses(results.outcome)
    errors = [100 * (0.95 * 0.05 / n) ** 0.5 for n in (number, results.reports)]
    head = [
        "# How far the verdicts can be trusted",
        "",
        f"Written by `{command}`; seed {study.SEED}. Nothing here is edited by hand.",
        "",
        f"{results.reports} reports of {COMPARISONS} comparisons, {number} comparisons per row, are simulated and go "
        "through the whole pipeline: warm-up, interleaved blocks with a baseline and its A/A twin, repeats until the "
        f"intervals are narrower than {100 * PRECISION:g} % from end to end (at least {MIN_REPEATS}, at most "
        f"{MAX_REPEATS}), the noise floor, intervals, verdicts with a margin of {100 * MARGIN:g} %, Holm's correction. "
        f"Comparisons of a report share the baseline, so a rate near 95 % has a standard error between {errors[0]:.1f} "
        f"and {errors[1]:.1f} points.",
        "",
        "## Targets",
        "",
    ]
    ours = results.outcome.rates[results.outcome.rates["rule"] == BENCH].to_dict("records")
    head += markdown.table(
        ("", "target", *(row["noise"] for row in ours)),
        [
            (
                t.words,
                _range(t),
                *(percent(row[t.column]) + ("" if t.met(row[t.column]) else " (missed)") for row in ours),
            )
            for t in TARGETS
        ],
    )
    head += ["All targets are met." if not found else "Missed: " + "; ".join(found) + ".", ""]
    parts = [*_real(known), *_rules(results, picture), *_costs(results), *_methods(results), *_noises()]
    return "\n".join([*head, *parts])


def _real(known: Sequence[Known]) -> list[str]:
    """The runs on a real machine."""
    rows = [
        (
            one.run.name,
            str(one.run.tables.trials["repeat"].nunique()),
            str(one.run.manifest.get("ended_by")),
            _interval(one.floor.interval),
            _interval(one.same.time),
            str(one.same.judgement.verdict),
            _interval(one.slower.time),
            str(one.slower.judgement.verdict),
        )
        for one in known
    ]
    same = Counter(one.same.judgement.verdict for one in known)
    slower = Counter(one.slower.judgement.verdict for one in known)
    late = sum(one.run.manifest.get("ended_by") == Ended.BUDGET for one in known)
    machine, values = known[0].run.manifest["machine"], known[0].run.manifest["matrix"]["values"]
    taken = [t.tables.trials["foreign_cores"].dropna().median() for t in (one.run for one in known)]
    return [
        "## On real trials",
        "",
        f"{len(known)} runs on {machine['cpu']}, {machine['cores']} cores, kept in results/noise and measured with "
        "`nox -s results -- noise`. Each holds `ddp-deferred` on one rank three times, as itself, as the twin of "
        f"the noise floor and as a third that is compared, and once more with a sleep of {100 * DELAY:g} % per step, "
        f"until the intervals were narrower than {100 * values['precision']:g} % or {values['budget_s']:g} s had "
        f"passed, as they had in {late} of the runs. Of {len(known)} comparisons of a cell with itself "
        f"{same[Verdict.FASTER] + same[Verdict.SLOWER]} were called different and {same[Verdict.AMBIGUOUS]} ambiguous. "
        f"The sleep was called slower {slower[Verdict.SLOWER]} times, ambiguous {slower[Verdict.AMBIGUOUS]} times, and "
        f"faster or the same {slower[Verdict.FASTER] + slower[Verdict.SAME]} times. Other programs took "
        f"{min(taken):.2f} to {max(taken):.2f} cores meanwhile.",
        "",
        *markdown.table(
            ("run", "repeats", "ended by", "noise floor", "itself", "verdict", "with the sleep", "verdict"), rows
        ),
    ]


def _interval(found: Interval | None) -> str:
    if found is None or found.low is None:
        return "none"
    return f"{found.ratio:.4f} ({found.low:.4f} - {found.high:.4f})"


def _rules(results: Results, picture: str) -> list[str]:
    about = [f"- {rule.name}: {rule.about}" for rule in rivals.RULES]
    return [
        "## The same data by other tools' rules",
        "",
        f"![How often each verdict comes up]({picture})",
        "",
        *markdown.table(
            ("noise", "rule", *RATES),
            [(row["noise"], row["rule"], *_line(row)) for row in results.outcome.rates.to_dict("records")],
        ),
        "Trials per cell: the median number of blocks under A/A, with a true difference of 1 %, and of 5 %. The other "
        "tools have no verdict of sameness; whatever they do not call different counts as the same here. 2 % called "
        'same: the difference equals the margin, where a wrong "same" is likeliest; a test at the 5 % level may say so '
        "in 5 % of the cases. The other rules see interleaved trials too. Their tools would run one cell after the "
        "other, and drift would hurt them more. hyperfine's interval is the scatter of single runs, and so is wider "
        "than an interval of the mean; asv's runs from the lowest to the highest ratio of the ends of two 99 % "
        "intervals.",
        "",
        *about,
        "",
    ]


def _costs(results: Results) -> list[str]:
    return [
        "## What it costs",
        "",
        "In the fitted noise, without the extension. The width of the intervals decides how many trials are needed, "
        "and a 5 % difference has to stand out from a noise floor as wide as the interval. That is why the precision "
        "is the width from end to end: if it were half the width, 2 % would be the row 4 %, which finds too little. "
        "The simulated runner looks after 10, 12, 16, 20, 24 ... blocks, and so runs up to a fifth more than it must. "
        f'The trials are those of the table above, whose row "{PLAIN}" is that of {100 * PRECISION:g} %.',
        "",
        *markdown.table(
            ("precision", *RATES),
            [(percent(row["precision"]), *_line(row)) for row in results.precisions.to_dict("records")],
        ),
        f'"Same" for a true 1 % with a margin of {100 * MARGIN:g} % needs more: the interval must fit between 1 % and '
        f"{100 * MARGIN:g} %. A comparison that is ambiguous at the precision is therefore extended once, until its "
        f"interval is narrower than {SAME_WIDTH:g} of the margin; the rows here are without that. Only the width "
        "decides, not where the interval lies, so the runner cannot wait for a verdict that somebody wants.",
        "",
        "With a limit on the repeats, still in the fitted noise, verdicts become ambiguous, not wrong:",
        "",
        *markdown.table(
            ("at most", *RATES),
            [(f"{row['limit']} repeats", *_line(row)) for row in results.limits.to_dict("records")],
        ),
        "Reports with fewer and with more comparisons: Holm's correction makes verdicts rarer, and waiting for the "
        "widest interval makes all others narrower.",
        "",
        *markdown.table(
            ("comparisons per report", *RATES),
            [(str(row["comparisons"]), *_line(row)) for row in results.sizes.to_dict("records")],
        ),
    ]


def _methods(results: Results) -> list[str]:
    frame = results.intervals
    wide = frame.pivot_table(index="method", columns="blocks", values=["coverage", "width"])
    least = frame.pivot_table(index="method", columns="blocks", values="coverage", aggfunc=["min", "max"])
    rows = [
        (
            f"**{name}**" if name == choices.OURS else str(name),
            *(percent(wide.loc[name, ("coverage", n)]) for n in choices.SIZES),
            f"{percent(least.loc[name, 'min'].min())} to {percent(least.loc[name, 'max'].max())}",
            percent(wide.loc[name, ("width", choices.SIZES[-1])]),
        )
        for name in wide.index
    ]
    header = ("method", *(f"{n} blocks" for n in choices.SIZES), "all", f"width at {choices.SIZES[-1]}")
    return [
        "## Which interval",
        "",
        "Coverage of 95 % intervals for a fixed number of blocks: the mean over four kinds of noise, and the least and "
        "the most of any (all). The bench uses the one in bold: `scipy.stats.bootstrap` on the trimmed mean of paired "
        "logarithms of trial medians, percentiles expanded for few trials (Hesterberg 2015). Fewer than "
        f"{MIN_TRIALS} blocks give no interval. Plain percentiles and BCa cover too little below 20 trials. Resampling "
        "the steps within trials too makes plain percentiles wide enough in this noise only by accident: a trial's "
        "median already has the noise of its steps, which is then counted twice, so the width depends on the number of "
        "steps.",
        "",
        *markdown.table(header, rows),
        *_warmup(results.warmup),
    ]


def _warmup(frame: pd.DataFrame) -> list[str]:
    rows = [
        (
            str(group["steps"].iloc[0]),
            str(group["transient"].iloc[0]),
            *(f"{row['bias']:+.2f} / {row['error']:.2f}" for row in group.to_dict("records")),
        )
        for _, group in frame.groupby(["steps", "transient"], sort=False)
    ]
    return [
        "## Which warm-up rule",
        "",
        "Bias and root mean square error of a trial's median in per cent, in the fitted noise between steps. The bench "
        "uses MSER with safeguards. No rule finds a warm-up that is as long as the trial: each cell has warm-up "
        "windows before the first recorded step, and this rule only catches what those leave. The remaining bias "
        "cancels in a ratio of cells that warm up alike.",
        "",
        *markdown.table(("steps", "transient", *choices.WARMUP_RULES), rows),
    ]


def _noises() -> list[str]:
    def shown(value: float) -> str:
        return "-" if not value or value == float("inf") else f"{value:.3g}"

    names = ("step", "step_freedom", "trial", "trial_freedom", "drift", "memory", "trend", "slow_share")
    names += ("slow_by", "warm")
    return [
        "## The noise",
        "",
        "Standard deviations of logarithms: the fields of `tests.studies.simulation.Noise`, whose `fit` fits them.",
        "",
        *markdown.table(
            ("noise", *names),
            [(n.name, *(shown(getattr(n, name)) for name in names)) for n in simulation.FAMILIES],
        ),
        *(f"- {n.name}: {n.about}" for n in simulation.FAMILIES),
        "",
    ]


def draw(results: Results, noise: str) -> Drawing:
    """How often each verdict comes up, by rule and true difference, in one kind of noise."""
    counts = results.outcome.counts
    counts = counts[(counts["noise"] == noise) & (counts["rule"] != PLAIN)]
    effects = {"A/A": "no difference (A/A)", "1 %": "1 % slower", "5 %": "5 % slower"}
    rules = list(dict.fromkeys(counts["rule"]))
    with matplotlib.style.context(list(style.BASE)):
        words = FigureWords(
            "How often each verdict comes up on the same simulated trials",
            f"{results.reports * COMPARISONS} comparisons per bar; noise fitted to the run {noise}, see the page",
            "Right: same without a difference; same or slower for 1 % (the margin is 2 %); slower for 5 %. What "
            "other tools do not call different is drawn as same, a verdict that they do not have.",
        )
        keys: list[style.Key] = [(Patch(color=colour), str(verdict)) for verdict, colour in COLOURS.items()]
        inches = 0.26 * len(rules) + 0.6
        figure = canvas.new_figure(words, keys, inches)
        panels = figure.subplots(1, len(effects), sharey=True)
        for axes, (effect, title) in zip(panels, effects.items(), strict=True):
            shares = counts[counts["effect"] == effect].pivot_table(index="rule", columns="verdict", values="share")
            left = pd.Series(0.0, index=rules)
            for verdict, colour in COLOURS.items():
                share = shares.reindex(rules).get(str(verdict), left * 0).fillna(0.0)
                axes.barh(rules, 100 * share, left=100 * left, color=colour, height=0.72)
                left = left + share
            axes.set_title(title)
            axes.set_xlim(0, 100)
            axes.set_xticks(range(0, 100, 20))
            axes.grid(visible=False, axis="y")
            axes.tick_params(axis="y", length=0)
        panels[0].invert_yaxis()
        panels[1].set_xlabel("per cent of the comparisons")
    return Drawing("statistics", figure, counts, words)
