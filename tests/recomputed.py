"""A run's numbers and verdicts, calculated from its journal by code that imports nothing of the bench.

The method is that of docs/method.md and docs/statistics.md.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

ROOT = Path(__file__).parents[1]
LEAST_TRIALS, LEAST_RUNS, IDLE, MARGIN = 5, 3, 0.1, 0.02
SHAPES = {"1b": (16, 2048)}
"""Layers and width of what is trained in bf16."""
BF16_FLOPS = {"NVIDIA H100 80GB HBM3": 989e12}
"""Dense, per second, from the datasheet."""
UNITS = {"MiB": 2**20, "GiB": 2**30}
SETTINGS = {
    "accumulate": r"\bN ?= ?(\d+)",
    "world_size": r"\bW ?= ?(\d+)",
    "global_batch_size": r"\bB ?= ?(\d+)",
    "optimizer": r"\b(adamw-foreach|adamw-fused|sgd)\b",
    "clip_norm": r"\b(?:clipped to ([\d.]*\d)|not clipped)",
}
Cell = dict[str, Any]
Groups = dict[str, str]
"""What a pattern matched in a text, by name."""


@dataclass(frozen=True)
class Interval:
    """A centre with its ends, as logarithms, and the p-value of the hypothesis that it is 0."""

    centre: float
    low: float = math.nan
    high: float = math.nan
    p: float = 1.0
    next_low: float = math.nan
    next_high: float = math.nan
    """Where the next run falls."""
    runs: tuple[float, ...] = ()
    """The centre in each of several runs."""
    error: float = math.nan
    """The standard error of the centre in one run."""
    num_values: int = 0


@cache
def interval(values: tuple[float, ...], least: int = LEAST_TRIALS) -> Interval:
    """Student's t of one sample."""
    n, centre = len(values), float(np.mean(values)) if values else math.nan
    if n < least:
        return Interval(centre)
    found = stats.ttest_1samp(values, 0.0)
    ends = found.confidence_interval(0.95)
    error = float(stats.sem(values))
    return Interval(
        centre, float(ends.low), float(ends.high), float(found.pvalue), error=error, num_values=n
    )


LEAST = 1e-300
"""The spread of a cell's ratio to itself, which is 1 in each run."""


def over_runs(alone: list[Interval]) -> Interval:
    """Of the mean over runs, m +- t s / sqrt(k), and of the next run, m +- t s sqrt(1 + 1 / k).

    s is the standard deviation of the runs, or the root mean square of their own errors, whichever
    makes the interval wider.
    """
    centres = tuple(each.centre for each in alone)
    k, centre = len(centres), float(np.mean(centres))
    if k < LEAST_RUNS:
        return Interval(centre, runs=centres)
    spreads = [(max(float(np.std(centres, ddof=1)), LEAST), k - 1.0)]
    known = [each for each in alone if each.num_values]
    if any(each.error for each in known):
        squares = [each.error**2 for each in known]
        fourth = sum(each.error**4 / (each.num_values - 1) for each in known)
        spreads.append((math.sqrt(float(np.mean(squares))), sum(squares) ** 2 / fourth))
    reaches = [float(stats.t.ppf(0.975, freedom)) * s for s, freedom in spreads]
    p = max(
        2 * float(stats.t.sf(abs(centre) * math.sqrt(k) / s, freedom)) for s, freedom in spreads
    )
    of_mean = max(reaches) / math.sqrt(k)
    of_next = max(reaches[0] * math.sqrt(1 + 1 / k), of_mean)
    return Interval(
        centre,
        centre - of_mean,
        centre + of_mean,
        p,
        next_low=centre - of_next,
        next_high=centre + of_next,
        runs=centres,
    )


ADDED = {"shared_nccl": False}
"""Axes that older runs lack, with what they are there."""


class Run:
    """A journal, and what follows from it; with others of the same cells, what follows from all of them."""

    def __init__(self, name: str, others: tuple[str, ...] = ()) -> None:
        self.others = [Run(other) for other in others]
        folder = ROOT / "results" / name
        manifest = (folder / "run.json").read_bytes()
        self.about = json.loads(manifest)
        journal = (folder / "trials.jsonl").read_bytes()
        sums = f"{hashlib.sha256(manifest).hexdigest()}  run.json\n"
        sums += f"{hashlib.sha256(journal).hexdigest()}  trials.jsonl\n"
        self.sha256 = hashlib.sha256(sums.encode()).hexdigest()
        latest: dict[tuple[str, int], dict[str, Any]] = {}
        for record in map(json.loads, journal.splitlines()):
            latest[record["cell_id"], record["repeat"]] = (
                record  # what was interrupted is run again
            )
        self.records = list(latest.values())
        self.trials: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.failed: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for record in self.records:
            ended_well = record["status"] == "ok"
            (self.trials if ended_well else self.failed)[record["cell_id"]].append(record)
        cells = {record["cell_id"]: record["cell"] for record in self.records}
        self.everything = [{**ADDED, **cell, "id": key} for key, cell in cells.items()]
        self.cells = [
            c for c in self.everything if not c["twin"] and "reference" not in c["backend"]
        ]
        self.timed = [c for c in self.cells if self.num_trials(c) > 1] or self.cells
        self.baseline, self.names = self.about["baseline"], {c["backend"] for c in self.everything}

    def num_trials(self, cell: Cell) -> int:
        return len(self.trials[cell["id"]]) + len(self.failed[cell["id"]])

    def times(self, cell: Cell) -> dict[int, float]:
        """The logarithm of each trial's median step, slowest rank, by block."""
        return self._times(cell["id"])

    @cache  # noqa: B019  # a run lives as long as the tests
    def _times(self, key: str) -> dict[int, float]:
        found = {
            r["repeat"]: np.max(r["time"]["rank_step_seconds"], axis=0) for r in self.trials[key]
        }
        return {block: float(np.log(np.median(seconds))) for block, seconds in found.items()}

    def time_alone(self, cell: Cell) -> Interval:
        """In this run alone."""
        return interval(tuple(self.times(cell).values()))

    def reference(self, cell: Cell) -> Cell:
        """That of the same work."""
        work = ("global_batch_size", "optimizer", "clip_norm")
        every = [c for c in self.everything if c["backend"] == "reference"]
        (found,) = [c for c in every if all(c[key] == cell[key] for key in work)]
        return found

    def time(self, cell: Cell) -> Interval:
        alone = self.time_alone(cell)
        if not self.others:
            return alone
        return over_runs([alone, *(run.time(cell) for run in self.others)])

    def first(self, cell: Cell, key: str) -> Any:
        """What only one trial of each cell measures."""
        return next(r[key] for r in self.trials[cell["id"]] if key in r)

    def allocated(self, cell: Cell, key: str = "allocated") -> int:
        """The largest peak of the CUDA allocator in a trial; 0 on the CPU."""
        every = [r["time"].get("cuda_memory") or {} for r in self.trials[cell["id"]]]
        return max((int(peaks.get(key, 0)) for peaks in every), default=0)

    def memory(self, cell: Cell) -> int:
        """The peak, on the CPU of the tensors that were tracked."""
        return self.allocated(cell) or int(self.first(cell, "memory")["peak"])

    def tokens(self, cell: Cell) -> float:
        """Tokens per second and rank."""
        per_step = self.trials[cell["id"]][0]["tokens_per_step"]
        return float(per_step / cell["world_size"] / math.exp(self.time(cell).centre))

    def mfu(self, cell: Cell) -> float:
        """The model's FLOPs per second over those of the datasheet, in the median trial."""
        times, found = self.times(cell), []
        for record in self.trials[cell["id"]]:
            peak = BF16_FLOPS[record["device_name"]] * cell["world_size"]
            found.append(record["flops_per_step"] / math.exp(times[record["repeat"]]) / peak)
        return float(np.median(found))

    def handed(self, cell: Cell) -> int:
        """Payload bytes of the collectives of a step."""
        return int(sum(row["payload_bytes"] for row in self.first(cell, "collectives")))

    def sync_pairs(self, where: str) -> list[tuple[Cell, Cell]]:
        """The deferred and the eager one of each family in a group, both correct."""
        good = {cell["backend"]: cell for cell in self.good(where)}
        found = []
        for name, cell in good.items():
            eager = name.replace("deferred", "eager")
            if eager != name and eager in good:
                found.append((cell, good[eager]))
        return found

    def is_correct(self, cell: Cell) -> bool:
        """Whether its update is right. One whose update was never compared is not."""
        errors = [r["update"]["error"] for r in self.trials[cell["id"]] if "update" in r]
        return bool(errors) and bool(errors[0] <= update_limit(cell))

    def outcome(self, cell: Cell) -> str:
        """How a table says that it ended."""
        good, bad = self.trials[cell["id"]], self.failed[cell["id"]]
        if not good:
            return str(bad[0]["status"])
        if not self.is_correct(cell):
            return "invalid"
        if bad:
            return f"{bad[0]['status']}, {len(good)} of {len(good) + len(bad)} ok"
        return "yes"

    def minutes(self) -> float:
        """Of all trials together."""
        return float(sum(record["wall_s"] for record in self.records)) / 60

    def taken(self, cell: Cell) -> float:
        """The share of the CPUs that others took, in the median trial."""
        hosts = [r["time"]["host"] for r in self.trials[cell["id"]]]
        return float(
            np.median([(h["foreign_cores"] + h["stolen_cores"]) / h["num_cpus"] for h in hosts])
        )

    def ratio(self, cell: Cell, base: Cell) -> Interval:
        """From the blocks that have both; of several runs from the ratio of each."""
        ours, theirs = self.times(cell), self.times(base)
        alone = interval(tuple(ours[block] - theirs[block] for block in ours if block in theirs))
        if not self.others:
            return alone
        return over_runs([alone, *(run.ratio(cell, base) for run in self.others)])

    @cached_property
    def control(self) -> Interval:
        """The A/A pair."""
        (twin,) = [c for c in self.everything if c["twin"]]
        return self.ratio(twin, self.partner({**twin, "twin": ""}, twin["backend"]))

    @property
    def is_suspect(self) -> bool:
        """Whether the A/A pair is off by more than the margin and its interval excludes 1."""
        apart = not self.control.low <= 0 <= self.control.high
        return apart and abs(self.control.centre) > math.log1p(MARGIN)

    def partner(self, cell: Cell, backend: str) -> Cell:
        """The cell that differs in the backend alone."""
        wanted = {**cell, "backend": backend, "id": ""}
        (found,) = [c for c in self.cells if {**c, "id": ""} == wanted]
        return found

    @cache  # noqa: B019
    def verdicts(self, baseline: str) -> dict[str, str]:
        """On every cell against that of the baseline, after Holm's correction over those that can be judged."""
        p_values, verdicts, corrected = {}, {}, 0.0
        for cell in (c for c in self.cells if c["backend"] != baseline):
            base = self.partner(cell, baseline)
            every = [(run, c) for run in (self, *self.others) for c in (cell, base)]
            barred = obstacle(every)
            time = self.ratio(cell, base)
            if not barred and not math.isnan(time.low):
                p_values[cell["id"]] = time.p
            found = (
                "slower"
                if time.low > 0
                else "faster"
                if time.high < 0
                else "ambiguous: wide interval"
            )
            verdicts[cell["id"]] = barred or found
        for rank, key in enumerate(sorted(p_values, key=lambda key: p_values[key])):
            corrected = max(corrected, p_values[key] * (len(p_values) - rank))
            if verdicts[key] in ("slower", "faster"):
                verdicts[key] = verdicts[key] if corrected < 0.05 else "ambiguous: many verdicts"
            if self.is_suspect:
                verdicts[key] = "ambiguous: A/A pair off"
        return verdicts

    @cache  # noqa: B019
    def num_judged(self, baseline: str) -> int:
        """Comparisons with a baseline that Holm's correction counts."""
        found = ((c, self.partner(c, baseline)) for c in self.cells if c["backend"] != baseline)
        return sum(all(self.outcome(each) == "yes" for each in pair) for pair in found)

    def may_differ(self, cell: Cell, base: Cell) -> bool:
        """Whether a verdict of faster or slower may be another one on another day."""
        time = self.ratio(cell, base)
        return (
            self.verdict(cell, base) in ("faster", "slower")
            and time.next_low <= 0 <= time.next_high
        )

    def verdict(self, cell: Cell, base: Cell) -> str:
        return self.verdicts(base["backend"])[cell["id"]]

    def widths(self) -> list[float]:
        """Of the intervals of all ratios to the baseline, as logarithms."""
        judged = {
            key
            for key, verdict in self.verdicts(self.baseline).items()
            if "not comparable" not in verdict
        }
        found = [
            self.ratio(c, self.partner(c, self.baseline)) for c in self.timed if c["id"] in judged
        ]
        return [interval.high - interval.low for interval in found]

    def select(self, text: str, cells: Collection[Cell]) -> list[Cell]:
        """Those with the settings that the text names first."""
        found = list(cells)
        for key, pattern in SETTINGS.items():
            if told := re.search(pattern, text):
                wanted = told[1] if key == "optimizer" else float(told[1] or 0)
                found = [c for c in found if c[key] == wanted]
        return found

    def find(self, text: str, where: str) -> Cell:
        """The cell that a text names, in the group that it or ``where`` names."""
        for cells in (
            self.select(text, self.cells),
            self.select(where, self.cells),
            self.select(where, self.timed),
        ):
            found = [c for c in cells if c["backend"] == text.split(maxsplit=1)[0]]
            if len(found) == 1:
                return found[0]
        raise LookupError(f"{text} does not name one cell")

    def good(self, where: str) -> list[Cell]:
        """The correct cells of a group, the fastest first."""
        good = [c for c in self.select(where, self.timed) if self.is_correct(c)]
        return sorted(good, key=lambda c: self.time(c).centre)

    def deviations(self) -> Any:
        """Of the trials from the geometric mean of their cell, in per cent."""
        logs = [np.array([*self.times(c).values()]) for c in self.timed if self.is_correct(c)]
        return np.abs(np.concatenate([100 * np.expm1(of - of.mean()) for of in logs]))


def update_limit(cell: Cell) -> float:
    """Of the relative error of an update: bf16 rounds at every operator, in each layer and over their width."""
    if cell["precision"] == "fp32":
        return 1e-5
    layers, width = SHAPES[cell["model"]]
    return max(3e-2, 4e-4 * math.sqrt(layers * width))


def obstacle(sides: Collection[tuple[Run, Cell]]) -> str:
    """The verdict where something forbids to compare these cells; else empty."""
    outcomes = [run.outcome(cell) for run, cell in sides]
    busy = any(run.trials[c["id"]] and run.taken(c) > IDLE for run, c in sides)
    if "invalid" in outcomes or busy:
        return "not comparable: gate"
    if not all(run.trials[cell["id"]] for run, cell in sides):
        return "not comparable: no trials"
    return "" if set(outcomes) == {"yes"} else "ambiguous: failed trials"


def reach_of_days() -> float:
    """How far apart the log ratios of two runs are in 95 of 100 cases, from all runs that are kept."""
    squares, freedom = 0.0, 0
    for name in ("cpu", "popular"):
        runs = [Run(name), *(Run(other) for other in pool_of(name))]
        cells = [
            c for c in runs[0].timed if c["backend"] != runs[0].baseline and runs[0].is_correct(c)
        ]
        centres = [
            [run.ratio(c, run.partner(c, run.baseline)).centre for c in cells] for run in runs
        ]
        squares += (len(runs) - 1) * float(np.var(centres, axis=0, ddof=1).mean())
        freedom += len(runs) - 1
    rows = [
        line.split(",")
        for line in (ROOT / "results/pool/older.csv").read_text(encoding="utf-8").splitlines()[1:]
    ]
    blocks: dict[tuple[str, str], dict[tuple[str, ...], float]] = defaultdict(dict)
    for run, backend, n, twin, block, seconds in rows:
        blocks[run, block][backend, n, twin] = math.log(float(seconds))
    full = {key: row for key, row in blocks.items() if len(row) == max(map(len, blocks.values()))}
    cells = [key for key in next(iter(full.values())) if key[0] != "ddp-deferred"]
    names = sorted({run for run, _ in full})
    means = [
        [
            np.mean(
                [
                    row[c] - row["ddp-deferred", c[1], ""]
                    for key, row in full.items()
                    if key[0] == run
                ]
            )
            for c in cells
        ]
        for run in names
    ]
    squares += (len(names) - 1) * float(np.var(means, axis=0, ddof=1).mean())
    freedom += len(names) - 1
    return float(stats.t.ppf(0.975, freedom)) * math.sqrt(2 * squares / freedom)


def pool_of(name: str) -> tuple[str, ...]:
    """The other runs of a matrix that are kept."""
    found = sorted((ROOT / "results" / "pool" / name).glob("*/run.json"))
    return tuple(str(path.parent.relative_to(ROOT / "results")) for path in found)


def shows(text: str, value: float, slack: float = 0.0) -> bool:
    """Whether the text is that value, rounded to as many digits as it has; true without a text."""
    mantissa, _, exponent = text.partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return not text or abs(float(text.replace(",", "")) - value) <= 0.5001 * unit + slack


def shows_size(text: str, size: float) -> bool:
    """Whether the text is that number of bytes, in its unit; true without a text."""
    amount, _, unit = text.partition(" ")
    return shows(amount, size / UNITS.get(unit, 1))


def shows_interval(of: Interval, m: Groups, trials: int) -> bool:
    """Whether the centre x, the ends low and high, and the number n are those; what is not there is right."""
    texts = (
        ("low", of.low),
        ("x", of.centre),
        ("high", of.high),
        ("nlow", of.next_low),
        ("nhigh", of.next_high),
    )
    return all(shows(m.get(key, ""), math.exp(log)) for key, log in texts) and m.get("n") in (
        None,
        "",
        str(trials),
    )
