"""Data and text that the figures of a run share: its cells in order, their panels, and the words around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import pandas as pd

from bench.formatting import plural, some
from bench.judge.analysis import Analysis
from bench.judge.caveats import link_words
from bench.judge.columns import AXES, FOLLOWS, WAYS, differing
from bench.judge.samples import step_times
from bench.judge.statistics import Array
from bench.judge.tables import Value, good_trials, rows_of
from bench.plan.cell import Status, Sync
from bench.report import style
from bench.report.canvas import FigureWords, PointName
from bench.report.descriptions import eager_and_deferred, machine_words, parameters

T = TypeVar("T")
CONTEXT = [*WAYS, "world_size", "world", "precision"]
"""Cells that differ in one of these are never in one panel."""
FACTS = ["run_id", "cell_id", "backend", "framework", "sharding", "sync", "accumulate", *CONTEXT]
FACTS += ["status", "num_ok", "num_trials", "outcome"]
"""Columns of every figure's data."""
TIMES = ["step_time_s", "step_time_low_s", "step_time_high_s"]
"""The step time that is cited of a cell, and the ends of its 95 % interval."""
MEMORY = ["peak_memory_bytes", "peak_memory_source"]


@dataclass
class Panel:
    """The cells that are drawn on one pair of axes."""

    title: str
    rows: pd.DataFrame

    @property
    def extent(self) -> tuple[int, int]:
        """The most ranks, and the largest N."""
        return int(self.rows["world_size"].max()), int(self.rows["accumulate"].max())


class FigureData:
    """The cells in the order in which they are drawn, and what all figures say about them."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis, self.manifest, self.tables = analysis, analysis.run.manifest, analysis.run.tables
        self.looks = style.looks(analysis.cells)
        self._worlds = pd.Series({key: cell.world for key, cell in analysis.run.cells.items()}, dtype=object)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The trials of the cells, with their ``world``."""
        trials = self.tables.trials[self.tables.trials["cell_id"].isin(self.analysis.cells.index)]
        return trials.assign(world=self._worlds.reindex(trials["cell_id"]).set_axis(trials.index))

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The frame of cells in the order in which they are drawn, with their ``world``.

        Cells that failed also have the times and peaks that were measured: they are drawn as wrong.
        """
        found = self.analysis.cells.assign(world=self._worlds)
        failed = found["status"] != Status.OK
        timed = found["world"].map(lambda world: world.times_communication)
        estimates = step_times(self.trials)
        for name, end in zip(TIMES, ("seconds", "low", "high"), strict=True):
            measured = pd.Series({key: getattr(estimate, end) for key, estimate in estimates.items()}, dtype="Float64")
            shown = measured.reindex(found.index).where(failed)
            found[name] = found[name].fillna(shown).where(timed)
        peaks = good_trials(self.trials).groupby("cell_id")[MEMORY].max()
        found[MEMORY] = found[MEMORY].fillna(peaks.reindex(found.index).where(failed))
        rank = found["backend"].map({name: place for place, name in enumerate(self.looks)})
        return found.assign(_rank=rank).sort_values(["_rank", "accumulate"], kind="stable")

    @cached_property
    def contestants(self) -> pd.DataFrame:
        """The cells without the reference; all if there is nothing else."""
        return self.cells[self.cells["cell_id"].isin(self.analysis.contestants.index)]

    @cached_property
    def timed(self) -> pd.DataFrame:
        """The cells that run for their times: with all ranks, and not just once beside others that are repeated."""
        found = self.contestants[[world.times_communication for world in self.contestants["world"]]]
        repeated = found[~found["cell_id"].isin(self.manifest.once)]
        return found if repeated.empty else repeated

    def untimed(self) -> list[str]:
        """A sentence on the cells that run once beside timed ones; none without such cells."""
        once = self.contestants[self.contestants["cell_id"].isin(self.manifest.once)]
        once = once[~once["cell_id"].isin(self.timed["cell_id"])]
        each = zip(once["backend"], once["outcome"], strict=True)
        names = dict.fromkeys(f"{backend} ({failure_label(outcome) or 'run once'})" for backend, outcome in each)
        return [f"Not timed: {some(list(names))}."] if names else []

    def without_time(self) -> list[str]:
        """A sentence on the timed cells without a step time; none if all have one."""
        missing = self.timed[self.timed["step_time_s"].isna()]
        rows = zip(missing["backend"], missing["accumulate"], missing["outcome"], strict=True)
        named = [f"{backend} at N = {n} ({failure_label(outcome) or 'not measured'})" for backend, n, outcome in rows]
        return [f"Without a value: {some(named)}."] if named else []

    @property
    def footer(self) -> str:
        """The run, its machine, and its version of torch."""
        torch = self.manifest.packages.get("torch")
        nodes = Counter(machine_words(node.machine) for node in (self.manifest.node, *self.manifest.nodes))
        each = [f"{plural(count, 'node')} of {words}" + " each" * (count > 1) for words, count in nodes.items()]
        machine = "; ".join(each if nodes.total() > 1 else nodes)
        text = f"run {self.manifest.run_id}; machine: {machine}"
        return text + (f"; torch {torch}" if torch else "")

    def figure_words(self, title: str, *, timed: bool = False, ratios: bool = False) -> FigureWords:
        """The words around a figure; one of times shows no virtual worlds, and has no caveat on them.

        One of ratios says whether the A/A pair is off.
        """
        kinds = [world.label for world in self.contestants["world"]] or [""]
        is_virtual = set(kinds) == {"virtual"}
        caveats = filter(None, (world.caveat for world in self.contestants["world"].unique() if not timed))
        remarks = self.analysis.suspicion * ratios + self.analysis.remarks_on_cells
        notes = [*(self.untimed() if timed else []), *(f"{text}." for text in remarks)]
        if timed and not self.analysis.pool.is_single:
            notes.append(f"Times are means over {len(self.analysis.pool.runs)} runs.")
        return FigureWords(
            f"{title} (virtual world)" if is_virtual else title,
            self._work_text(),
            self.footer,
            notes + [f"{text[0].upper()}{text[1:]}." for text in caveats],
        )

    def _work_text(self) -> str:
        """Model, batch, precision and optimizer; the link too, if every cell has one rank."""

        def values(column: str) -> str:
            return ", ".join(str(value) for value in sorted(self.contestants[column].dropna().unique()))

        sizes = self.cells.groupby("model")["num_parameters"].max()
        models = ", ".join(f"{name} ({parameters(sizes[name])})" for name in self.contestants["model"].unique())
        asked = [name for name in WAYS if len(AXES[name].phrasing) > 1 and self.contestants[name].any()]
        ways = [" or ".join(_name(name, value) for value in sorted(self.contestants[name].unique())) for name in asked]
        rates = sorted({*zip(self.contestants["optimizer"], self.contestants["learning_rate"], strict=True)})
        optimizers = ", ".join(f"{name} (lr {rate:g})" for name, rate in rates)
        work = (
            f"B = {values('global_batch_size')} samples of {values('sequence_length')} tokens per optimizer step, "
            f"N = {values('accumulate')}, W = {values('world_size')}, {values('precision')} "
            f"(summed in {values('accumulation_dtype')}), {optimizers}, "
            f"{values('device')}"
        )
        cells = [self.analysis.run.cells[cell_id] for cell_id in self.contestants.index]
        alone = all(cell.world_size == 1 and cell.world.has_all_ranks for cell in cells)
        return "; ".join([f"model {models}", ", ".join([work, *ways]), *([link_words(cells)] if alone else [])])

    def panels(self, rows: pd.DataFrame, by: list[str], most: int) -> tuple[list[Panel], list[str]]:
        """Rows about cells, split by these columns, and a sentence on the panels for which there is no room, if any."""
        varying = self.varying(by)
        apart = [name for name in by if name in varying or name not in FOLLOWS]
        groups = [part for _, part in rows.groupby(apart, dropna=False, sort=True)]
        every = [Panel(", ".join(_name(c, part.iloc[0][c]) for c in varying), part) for part in groups]
        found = largest(every, most, lambda panel: panel.extent)
        count, shown = (sum(panel.rows["cell_id"].nunique() for panel in some) for some in (every, found))
        return found, left_out_note(count, shown, "cells")

    def setting_of(self, cell: pd.Series) -> str:
        """The setting of a cell's panel in a title: ``At N = 4 with W = 2``."""
        others = ", ".join(_name(name, cell[name]) for name in self.varying(CONTEXT))
        return " with ".join(filter(None, [f"At N = {cell['accumulate']}", others]))

    def varying(self, by: list[str]) -> list[str]:
        """Which of these columns differ between the cells."""
        kinds = self.contestants[list({*by, *FOLLOWS, *FOLLOWS.values()})].drop_duplicates()
        return differing(kinds.itertuples(index=False), by)

    def point_name(self, backend: str, outcome: str, point: tuple[float, float], more: str = "") -> PointName:
        """What to write beside a point: the backend, and how its cell failed."""
        word = failure_label(outcome)
        text = f"{backend} ({word})" if word else backend
        return PointName(style.cut(text + more), point, self.looks[backend].colour)

    def backends_in(self, rows: pd.DataFrame) -> list[str]:
        """The backends of these rows, in the order in which they are drawn."""
        found = set(rows["backend"])
        return [backend for backend in self.looks if backend in found]


def largest(items: Sequence[T], most: int, extent: Callable[[T], tuple[int, int]]) -> list[T]:
    """At most so many of the items, in their order: those of the most ranks, then of the largest N (``extent``)."""
    chosen = sorted(range(len(items)), key=lambda place: extent(items[place]), reverse=True)[:most]
    return [items[place] for place in sorted(chosen)]


def left_out_note(every: int, shown: int, what: str) -> list[str]:
    """A sentence on what a figure has no room for; none if it shows all."""
    if shown == every:
        return []
    return [
        f"{every - shown} of {every} {what} are left out, first those with the fewest ranks and the smallest N: the "
        "tables of the run have all."
    ]


def failure_label(outcome: str) -> str:
    """How a cell failed, to be written beside it; empty for a good one."""
    return "" if outcome == Status.OK else outcome


def sync_pairs(cells: pd.DataFrame, how: Sync = Sync.DEFERRED) -> list[tuple[str, str]]:
    """The ids of each pair of ``eager_and_deferred`` backends among good cells at one N."""
    rows = {str(row["backend"]): row for row in rows_of(cells[cells["status"] == Status.OK])}
    pairs = eager_and_deferred(rows, how)
    return [(str(rows[eager]["cell_id"]), str(rows[deferred]["cell_id"])) for eager, deferred in pairs]


def floats(values: pd.Series) -> Array:
    """The values as an array; missing ones are NaN."""
    return values.to_numpy(dtype=float, na_value=np.nan)


def _name(column: str, value: Value) -> str:
    if column not in AXES:
        return str(value)
    return AXES[column].phrase(None if pd.isna(value) else value)
