"""What runs of different days differ by, and how often the verdicts on several runs are right.

Kept are the runs of results/cpu, results/popular and results/pool, those of other machines in results/elsewhere, and in
results/pool/older.csv the trials of earlier runs of this repository, which had other cells.
``python -m studies.pools --older`` reads these from its history, and ``--add`` measures one more run.

A simulated run is made of a kept one that is drawn at random: its blocks, drawn with replacement, less their mean, and
what makes runs differ, in all ratios at once. That is either normal with the covariance that the kept runs have, or the
drawn run's own difference from the mean of its set with a random sign (wild bootstrap, Wu, Annals of Statistics 14,
1986). So the true ratio of any two cells is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.errors import InputError
from bench.judge import run_spread
from bench.judge.analysis import Analysis
from bench.judge.baseline import baseline_of
from bench.judge.loading import Run, load
from bench.judge.pairs import ComparedPair
from bench.judge.pool import CLASS, load_pool
from bench.judge.statistics import MARGIN, MIN_RUNS, Array, Interval, LogMean, wider, within_runs
from bench.judge.verdicts import ALPHA, DIFFERENT, Comparison, Verdict, judge_all
from bench.plan.cell import Status
from bench.report.descriptions import eager_and_deferred
from bench.run.journal import JOURNAL, MANIFEST
from studies import ROOT

RESULTS = ROOT / "results"
POOL = RESULTS / "pool"
ELSEWHERE = RESULTS / "elsewhere"
"""Runs of the same matrices on another class of machines, which are not pooled with the kept ones."""
OLDER = POOL / "older.csv"
SETS = ("cpu", "popular")
"""Matrices of which several runs are kept."""
WANTED = {"cpu": 5, "popular": 3}
"""Runs of different days that the pool should have at least."""
COMMITS = ("65ca37b1", "92d7ac52", "56603562", "b427dcdb")
"""Where the older runs of results/cpu are: of 12 timed windows, at N = 1, 2 and 8."""
OLDER_BASELINE = "ddp-deferred"
NORMAL, RESAMPLED = "normal", "resampled"
"""What makes simulated runs differ."""
SIZES = ((1, NORMAL), (3, NORMAL), (3, RESAMPLED), (5, NORMAL), (5, RESAMPLED))
"""Runs of a simulated pool, and what makes them differ."""
TARGETS_OF: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "false": (f"at most {100 * ALPHA:g} %", lambda rate: rate <= ALPHA),
    "next": ("94 to 97 %", lambda rate: 0.94 <= rate <= 0.97),
}
"""What the rates of several runs must be, in words, and whether they are."""
TARGETS = tuple(
    f"{words}, {TARGETS_OF[column][0]}"
    for column, words in (
        ("false", "pools of several runs with any false difference"),
        ("next", "next runs within their interval"),
    )
)
POOLS = 10_000
SEED = 5


@dataclass(frozen=True)
class RunSet:
    """Runs of equal cells: of each the logarithms of trials' seconds, blocks x cells."""

    name: str
    runs: tuple[Array, ...]
    base: tuple[int, ...]
    """The column of each cell's baseline; of a baseline's cell its own."""
    control: int
    """The column of the A/A twin."""

    @cached_property
    def compared(self) -> list[int]:
        """Columns of the cells that are compared with a baseline; the twin comes first."""
        others = [cell for cell, base in enumerate(self.base) if cell not in (base, self.control)]
        return [self.control, *others]

    def ratios(self, run: Array) -> Array:
        """The log ratios of a run: blocks x comparisons."""
        bases = [self.base[cell] for cell in self.compared]
        return np.asarray(run[:, self.compared] - run[:, bases])

    @cached_property
    def centres(self) -> Array:
        """The log ratio of each run: runs x comparisons."""
        return np.array([self.ratios(run).mean(axis=0) for run in self.runs])

    @cached_property
    def times(self) -> Array:
        """The logarithm of each cell's step time: runs x cells."""
        return np.array([run.mean(axis=0) for run in self.runs])

    @cached_property
    def within(self) -> Array:
        """The variance of each run's log ratio that its own trials explain: runs x comparisons."""
        found = [self.ratios(run) for run in self.runs]
        return np.array([ratios.var(axis=0, ddof=1) / len(ratios) for ratios in found])

    @cached_property
    def residuals(self) -> Array:
        """How the runs differ from their mean, with the variance between runs: runs x comparisons.

        What their own trials explain is taken out as a share of all comparisons.
        """
        total = self.centres.var(axis=0, ddof=1).mean()
        between = max(0.0, 1 - float(self.within.mean() / total))
        k = len(self.runs)
        return (self.centres - self.centres.mean(axis=0)) * math.sqrt(k / (k - 1) * between)


def measured(run: Run) -> tuple[Array, tuple[int, ...], int]:
    """The blocks of a run in which all timed cells are good, and the columns that ``RunSet`` needs."""
    trials = run.tables.trials
    known = trials[trials["status"] == Status.OK]
    wide = known.pivot_table(index="repeat", columns="cell_id", values="step_time_s").astype(float)
    cells = [cell for cell in run.cells.values() if not cell.is_reference and cell.cell_id in wide]
    cells = [cell for cell in cells if wide[cell.cell_id].notna().sum() > 1]
    cells.sort(key=lambda cell: cell.cell_id)  # each run has an order of trials of its own
    baseline = baseline_of(run.manifest)
    places = {cell: place for place, cell in enumerate(cells)}
    base = tuple(
        places.get(dataclasses.replace(cell, twin="", backend=baseline, replicate=0), places[cell])
        for cell in cells
    )
    (control,) = [place for place, cell in enumerate(cells) if cell.twin]
    logs = np.log(wide[[cell.cell_id for cell in cells]].dropna().to_numpy())
    return logs, base, control


def kept() -> list[RunSet]:
    """All sets of kept runs."""
    found = []
    for name in SETS:
        pool = load_pool(folders(name))
        parts = [measured(run) for run in pool.runs]
        (columns,) = {(base, control) for _, base, control in parts}
        found.append(RunSet(name, tuple(logs for logs, *_ in parts), *columns))
    return [*found, older()]


def folders(name: str) -> list[Path]:
    """The runs of a matrix that are kept: the one of README or a report first."""
    return [RESULTS / name, POOL / name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Repetition:
    """A comparison over the kept runs, and the same in a run on another class of machines."""

    kept: ComparedPair
    there: ComparedPair

    @property
    def is_expected(self) -> bool:
        """Whether the ratio is one that the kept runs expect of a next run on their own machines."""
        ours, theirs = self.kept.time, self.there.time
        assert ours is not None and theirs is not None, "both were timed"
        assert ours.next_low is not None and ours.next_high is not None, "there are enough runs"
        return ours.next_low <= theirs.ratio <= ours.next_high


@dataclass(frozen=True, kw_only=True, slots=True)
class Elsewhere:
    """One run of a matrix on a class of machines that is not that of the kept runs."""

    matrix: str
    label: str
    """The name of its folder: the day, and the minute if there are several of one day."""
    run: Run
    with_baseline: Sequence[Repetition]
    """Of each timed cell with the baseline."""
    of_syncs: Sequence[Repetition]
    """Of each deferred backend with the eager one of its framework and sharding."""


def elsewhere() -> list[Elsewhere]:
    """The runs in results/elsewhere, in the order of matrices and names."""
    found = []
    for name in SETS:
        kept_runs = Analysis.of(load_pool(folders(name)), RESULTS / name)
        for folder in sorted((ELSEWHERE / name).glob("*")):
            there = Analysis(run=load(folder), folder=folder)
            found.append(
                Elsewhere(
                    matrix=name,
                    label=folder.name,
                    run=there.run,
                    with_baseline=_repetitions(kept_runs.verdicts, there),
                    of_syncs=_repetitions(_sync_pairs(kept_runs), there),
                )
            )
    return found


def _sync_pairs(data: Analysis) -> list[ComparedPair]:
    """The deferred cells against the eager ones."""
    found = []
    for eager, deferred in eager_and_deferred(data.run.manifest.backends):
        for pair in data.against(eager).values():
            if pair.b.backend == deferred:
                found.append(pair)
    return found


def _repetitions(pairs: Sequence[ComparedPair], there: Analysis) -> list[Repetition]:
    """Those of the pairs that both have timed."""
    found = []
    for pair in pairs:
        again = there.compared(pair.b.cell_id, pair.a.cell_id)
        if pair.time is not None and again is not None and again.time is not None:
            found.append(Repetition(kept=pair, there=again))
    return found


def older() -> RunSet:
    """The runs in older.csv."""
    trials = pd.read_csv(OLDER, keep_default_na=False)
    names = trials[["backend", "accumulate", "twin"]].drop_duplicates().itertuples(index=False)
    cells = [(row.backend, row.accumulate, row.twin) for row in names]
    base = tuple(cells.index((OLDER_BASELINE, n, "")) for _, n, _ in cells)
    control = next(place for place, (*_, twin) in enumerate(cells) if twin)
    runs = []
    for _, rows in trials.groupby("run", sort=False):
        wide = rows.pivot_table(
            index="block", columns=["backend", "accumulate", "twin"], values="seconds"
        )
        runs.append(np.log(wide[cells].dropna().to_numpy()))
    return RunSet("older", tuple(runs), base, control)


def spread(sets: Sequence[RunSet]) -> dict[str, Any]:
    """What bench/judge/run_spread.json holds of the class of machines of the kept runs."""
    machine = load_pool(folders(SETS[0])).first.manifest.machine
    freedom = [len(each.runs) - 1 for each in sets]

    def deviation(values: Sequence[Array]) -> float:
        variances = [each.var(axis=0, ddof=1).mean() for each in values]
        return math.sqrt(float(np.average(variances, weights=freedom)))

    return {
        "cpu": machine.cpu,
        "cores": machine.cores,
        "gpus": [gpu.name for gpu in machine.gpus],
        "runs": sum(len(each.runs) for each in sets),
        "freedom": sum(freedom),
        "of_ratios": round(deviation([each.centres[:, 1:] for each in sets]), 4),
        "of_times": round(deviation([each.times for each in sets]), 4),
    }


def simulated(source: RunSet, runs: int, way: str, rng: np.random.Generator) -> list[Array]:
    """The log ratios of so many runs of one pool: each blocks x comparisons."""
    found, k = [], len(source.runs)
    for place in rng.integers(k, size=runs):
        noise = source.ratios(source.runs[place])
        drawn = noise[rng.integers(len(noise), size=len(noise))] - noise.mean(axis=0)
        weights = rng.choice((-1.0, 1.0)) * np.eye(k)[place]
        if way == NORMAL:
            weights = rng.normal(size=k) / math.sqrt(k)
        found.append(drawn + weights @ source.residuals)
    return found


def rates(sets: Sequence[RunSet], runs: int, way: str, pools: int) -> dict[str, Any]:
    """How often intervals and verdicts of pools of so many runs are right, of each set of enough runs in turn."""
    rng = np.random.default_rng([SEED, runs])
    sources = [source for source in sets if len(source.runs) >= MIN_RUNS]
    held, following, widths, called = [], [], [], []
    for number in range(pools):
        *every, after = simulated(sources[number % len(sources)], runs + 1, way, rng)
        control, *times = _intervals(every)
        found = judge_all(Comparison(time=time, control=control) for time in times)
        called.append({comparison.verdict for comparison in found})
        ratios = np.exp(after.mean(axis=0))[1:].tolist()
        for time, ratio in zip(times, ratios, strict=True):
            assert time.low is not None and time.high is not None, "there are enough runs or blocks"
            held.append(time.low <= 1 <= time.high)
            widths.append(time.width)
            low, high = (time.low, time.high) if runs == 1 else (time.next_low, time.next_high)
            assert low is not None and high is not None, "there are enough runs"
            following.append(low <= ratio <= high)
    return {
        "runs": runs,
        "way": way,
        "false faster": float(np.mean([Verdict.FASTER in verdicts for verdicts in called])),
        "false": float(np.mean([bool(DIFFERENT & verdicts) for verdicts in called])),
        "coverage": float(np.mean(held)),
        "next": float(np.mean(following)),
        "width": float(np.median(widths)),
    }


def _intervals(runs: Sequence[Array]) -> list[Interval]:
    """Of each comparison: of one run as the bench has it, of several over them."""
    centres = np.array([run.mean(axis=0) for run in runs])
    every = [LogMean.of(runs[0].T if len(runs) == 1 else centres.T)]
    if len(runs) > 1:  # as in ``over_runs``
        errors = np.array([LogMean.of(run.T).error for run in runs])
        freedom = np.array([len(run) - 1 for run in runs])
        every.append(within_runs(every[0].centre, errors, freedom, len(runs)))
    columns = (
        every[0].centre,
        *wider(every),
        np.max([found.p_different() for found in every], axis=0),
        np.max([found.p_same(MARGIN) for found in every], axis=0),
        *wider([every[0].of_next(len(runs)), *every]),
    )
    intervals = []
    for number, (centre, low, high, p_different, p_same, next_low, next_high) in enumerate(
        zip(*columns, strict=True)
    ):
        interval = Interval(
            ratio=math.exp(centre),
            low=math.exp(low),
            high=math.exp(high),
            p_different=float(p_different),
            p_same=float(p_same),
            num_trials=len(runs[0]),
            paired=True,
        )
        if len(runs) > 1:
            each = tuple(np.exp(centres[:, number]).tolist())
            interval = replace(
                interval, runs=each, next_low=math.exp(next_low), next_high=math.exp(next_high)
            )
        intervals.append(interval)
    return intervals


def convert() -> None:
    """Write older.csv from the history of this repository."""
    rows = []
    for commit in COMMITS:
        for line in _shown(commit, "trials.jsonl").splitlines():
            record = json.loads(line)
            cell, timed = record["cell"], record.get("time")
            if record["status"] == "ok" and timed and cell["backend"] != "reference":
                seconds = f"{np.median(timed['step_seconds']):.9g}"
                rows.append(
                    (
                        commit,
                        cell["backend"],
                        cell["accumulate"],
                        cell["twin"],
                        record["repeat"],
                        seconds,
                    )
                )
    columns = ["run", "backend", "accumulate", "twin", "block", "seconds"]
    pd.DataFrame(rows, columns=columns).to_csv(OLDER, index=False)


def _shown(commit: str, name: str) -> str:
    command = ["git", "show", f"{commit}:results/cpu/{name}"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def misses(found: pd.DataFrame) -> list[str]:
    """The targets that are not met by pools of several runs, each as a sentence."""
    rows = [row for row in found.to_dict("records") if row["runs"] >= MIN_RUNS]
    told = []
    for column, words, target, met in (
        (
            "false",
            "of simulated pools of several runs name a false difference",
            *TARGETS_OF["false"],
        ),
        ("next", "of next runs fall into their interval", *TARGETS_OF["next"]),
    ):
        if bad := [row for row in rows if not met(row[column])]:
            rates = [row[column] for row in bad]
            names = ", ".join(f"{row['runs']} runs ({row['way']})" for row in bad)
            shown = [f"{100 * rate:.1f}" for rate in (min(rates), max(rates))]
            ends = " to ".join(dict.fromkeys(shown))
            told.append(f"{ends} % {words}, for pools of {names}; the target is {target}.")
    return told


def study(sets: Sequence[RunSet], pools: int = POOLS) -> pd.DataFrame:
    """``rates`` of all sizes."""
    return pd.DataFrame([rates(sets, runs, way, pools) for runs, way in SIZES])


@dataclass(frozen=True, kw_only=True, slots=True)
class Repeated:
    """How the kept runs of a set repeat one another: pairs of one run's ratio with the same of another."""

    name: str
    pairs: int
    outside: int
    """Those where the other's is outside the 95 % interval of the one."""
    beyond: int
    """Those that are farther apart than is said of other days."""


def repeated(sets: Sequence[RunSet]) -> list[Repeated]:
    """Of each set."""
    reach = run_spread.RunSpread(**{**spread(sets), "gpus": ()}).reach
    found = []
    for each in sets:
        others = each.centres[None, :, 1:]
        low, high = (
            np.array([ends[1:] for ends in side])[:, None]
            for side in zip(
                *(LogMean.of(each.ratios(run).T).interval() for run in each.runs), strict=True
            )
        )
        pairs = ~np.eye(len(each.runs), dtype=bool)
        outside = ((others < low) | (others > high))[pairs]
        beyond = (abs(others - each.centres[:, None, 1:]) > reach)[pairs]
        found.append(
            Repeated(
                name=each.name,
                pairs=outside.size,
                outside=int(outside.sum()),
                beyond=int(beyond.sum()),
            )
        )
    return found


def add() -> None:
    """Measure a run of the matrix that lacks most, and keep its manifest and its journal. Removes no run.

    On another class of machines than that of the kept runs, it goes to results/elsewhere.
    """
    name = min(WANTED, key=lambda name: len(load_pool(folders(name)).runs) / WANTED[name])
    now = datetime.datetime.now(datetime.UTC)
    label = f"{now:%Y-%m-%d}"
    if any((place / name / label).exists() for place in (POOL, ELSEWHERE)):
        label = f"{now:%Y-%m-%dT%H%M}"
    out = POOL / name / label
    subprocess.run(
        [
            sys.executable,
            "-m",
            "bench",
            "run",
            "--matrix",
            name,
            "--out",
            str(out.relative_to(ROOT)),
        ],
        cwd=ROOT,
        check=False,
    )
    run = load(out)
    if run.manifest.finished is None:
        raise InputError(f"{out}: is not finished; go on with: python -m bench run --resume {out}")
    for path in out.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (MANIFEST, JOURNAL):
            path.unlink()
    first = load_pool(folders(name)[:1]).first
    if any(of(run.manifest) != of(first.manifest) for of in CLASS.values()):
        place = ELSEWHERE / name / out.name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(out, place)
        print(f"kept in {place.relative_to(ROOT)}: it cannot be pooled with {RESULTS / name}")


def main(argv: Sequence[str] | None = None) -> int:
    """Add a run, or read the older ones again."""
    parser = argparse.ArgumentParser(
        prog="python -m studies.pools", description=str(__doc__).partition("\n\n")[0]
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--add", action="store_true", help="measure one more run, on an idle machine")
    what.add_argument(
        "--older", action="store_true", help="write older.csv from the history of this repository"
    )
    if parser.parse_args(argv).add:
        add()
    else:
        convert()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
