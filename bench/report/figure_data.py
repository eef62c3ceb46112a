"""What the figures of a run share: its cells in order, their panels, and the words around them."""

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
from bench.judge.caveats import GLOO_SCATTERS, link_words, scatters_over_gloo
from bench.judge.columns import AXES, FOLLOWS, WAYS, differing
from bench.judge.statistics import Array
from bench.judge.tables import Value, rows_of
from bench.plan.cell import Status, Sync
from bench.report import style
from bench.report.canvas import FigureWords, PointName
from bench.report.descriptions import (
    eager_and_deferred,
    machine_words,
    parameters,
    without_sync,
)

Item = TypeVar("Item")
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
        self.analysis = analysis
        self.manifest = analysis.run.manifest
        self.tables = analysis.run.tables
        self.looks = style.looks(analysis.cells)
        worlds = {cell_id: cell.world for cell_id, cell in analysis.run.cells.items()}
        self._worlds = pd.Series(worlds, dtype=object)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The trials of the cells, with their ``world``."""
        every = self.tables.trials
        trials = every[every["cell_id"].isin(self.analysis.cells.index)]
        worlds = self._worlds.reindex(trials["cell_id"])
        return trials.assign(world=worlds.set_axis(trials.index))

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The frame of cells in the order in which they are drawn, with their ``world``.

        A cell has the step time and the peak that the table shows of it: none if it is wrong.
        """
        found = self.analysis.cells.assign(world=self._worlds)
        timed = found["world"].map(lambda world: world.times_communication)
        for name in TIMES:
            found[name] = found[name].where(timed)
        places = {backend: place for place, backend in enumerate(self.looks)}
        found = found.assign(_rank=found["backend"].map(places))
        return found.sort_values(["_rank", "accumulate"], kind="stable")

    @cached_property
    def contestants(self) -> pd.DataFrame:
        """The cells without the reference; all if there is nothing else."""
        return self.cells[self.cells["cell_id"].isin(self.analysis.contestants.index)]

    @cached_property
    def timed(self) -> pd.DataFrame:
        """The cells that run for their times.

        With all ranks, and not just once beside others that are repeated.
        """
        is_timed = [world.times_communication for world in self.contestants["world"]]
        found = self.contestants[is_timed]
        repeated = found[~found["cell_id"].isin(self.manifest.once)]
        if repeated.empty:
            return found
        return repeated

    def untimed(self) -> list[str]:
        """A sentence on the cells that run once beside timed ones; none without such cells."""
        once = self.contestants[self.contestants["cell_id"].isin(self.manifest.once)]
        once = once[~once["cell_id"].isin(self.timed["cell_id"])]
        names = []
        for backend, outcome in zip(once["backend"], once["outcome"], strict=True):
            why = outcome_label(outcome, good="run once")
            names.append(f"{backend} ({why})")
        if not names:
            return []
        return [f"Not timed: {some(list(dict.fromkeys(names)))}."]

    def without_time(self) -> list[str]:
        """A sentence on the timed cells without a step time; none if all have one."""
        missing = self.timed[self.timed["step_time_s"].isna()]
        names = []
        for row in rows_of(missing[["backend", "accumulate", "outcome"]]):
            why = outcome_label(str(row["outcome"]), good="not measured")
            names.append(f"{row['backend']} at N = {row['accumulate']} ({why})")
        if not names:
            return []
        return [f"Without a value: {some(names)}."]

    @property
    def footer(self) -> str:
        """The run, its machine, and its version of torch."""
        text = f"run {self.manifest.run_id}; machine: {self._machine_text()}"
        torch = self.manifest.packages.get("torch")
        if torch:
            text += f"; torch {torch}"
        return text

    def _machine_text(self) -> str:
        """The machine, or those of several nodes."""
        if not self.manifest.nodes:
            return machine_words(self.manifest.node.machine)
        machines = [node.machine for node in (self.manifest.node, *self.manifest.nodes)]
        texts = []
        for words, count in Counter(map(machine_words, machines)).items():
            text = f"{plural(count, 'node')} of {words}"
            if count > 1:
                text += " each"
            texts.append(text)
        return "; ".join(texts)

    def _remarks(self, *, timed: bool, ratios: bool) -> list[str]:
        remarks = self.analysis.remarks_on_cells
        if timed or ratios:
            remarks = self.analysis.doubts + remarks
        if ratios:
            remarks = self.analysis.suspicion + remarks
        return remarks

    def figure_words(
        self,
        title: str,
        *,
        timed: bool = False,
        ratios: bool = False,
        of_first: bool = False,
    ) -> FigureWords:
        """The words around a figure.

        One of times shows no virtual worlds, and has no caveat on them; its times are means over
        all runs, unless it is of the first alone. One of ratios says whether the A/A pair is off.
        Both say which verdicts are other ones beside its copy.
        """
        worlds = self.contestants["world"].unique()
        kinds = {world.label for world in worlds}
        notes = []
        if timed:
            notes += self.untimed()
        notes += [f"{text}." for text in self._remarks(timed=timed, ratios=ratios)]
        num_runs = len(self.analysis.pool.runs)
        if of_first and num_runs > 1:
            notes.append(f"The trials are those of the first of {num_runs} runs.")
        elif timed and num_runs > 1:
            notes.append(f"Times are means over {num_runs} runs.")
            if not ratios:
                notes.append(
                    "Their intervals include how the machines of the runs differ; verdicts are on "
                    "ratios within a run."
                )
        if timed and not ratios and not of_first:
            notes += self._cost_of_gloo()
        if not timed:
            for world in worlds:
                text = world.caveat
                if text:
                    notes.append(f"{text[0].upper()}{text[1:]}.")
        if kinds == {"virtual"}:
            title += " (virtual world)"
        return FigureWords(title, self._work_text(), self.footer, notes)

    def _cost_of_gloo(self) -> list[str]:
        """A sentence on the backends of both syncs whose eager one reduce-scatters over gloo."""
        names = []
        for eager, _ in sync_pairs(self.timed):
            if scatters_over_gloo(self.analysis.run, eager):
                names.append(without_sync(self.analysis.rows[eager].backend))
        if not names:
            return []
        return [f"{some(names)}: {GLOO_SCATTERS}."]

    def _work_text(self) -> str:
        """Model, batch, precision and optimizer; the link too, if every cell has one rank."""
        model = f"model {', '.join(self._models())}"
        work = (
            f"B = {self._values('global_batch_size')} samples of "
            f"{self._values('sequence_length')} tokens per optimizer step, "
            f"N = {self._values('accumulate')}, W = {self._values('world_size')}, "
            f"{self._values('precision')} (summed in {self._values('accumulation_dtype')}), "
            f"{', '.join(self._optimizers())}, {self._values('device')}"
        )
        texts = [model, ", ".join([work, *self._ways()])]
        cells = [self.analysis.run.cells[cell_id] for cell_id in self.contestants.index]
        if all(cell.world_size == 1 and cell.world.has_all_ranks for cell in cells):
            texts.append(link_words(cells))
        return "; ".join(texts)

    def _values(self, column: str) -> str:
        return ", ".join(map(str, sorted(self.contestants[column].dropna().unique())))

    def _models(self) -> list[str]:
        """The models with their sizes, in the order of the cells."""
        sizes = self.cells.groupby("model")["num_parameters"].max()
        names = self.contestants["model"].unique()
        return [f"{name} ({parameters(sizes[name])})" for name in names]

    def _optimizers(self) -> list[str]:
        """The optimizers with their learning rates."""
        kinds = self.contestants[["optimizer", "learning_rate"]].drop_duplicates()
        kinds = kinds.sort_values(["optimizer", "learning_rate"])
        texts = []
        for name, rate in zip(kinds["optimizer"], kinds["learning_rate"], strict=True):
            text = f"{name} (lr {rate:g})"
            texts.append(text)
        return texts

    def _ways(self) -> list[str]:
        """Of each other setting that some cell has, its values: ``clipped to 1.5``."""
        texts = []
        for name in WAYS:
            if len(AXES[name].phrasing) > 1 and self.contestants[name].any():
                values = sorted(self.contestants[name].unique())
                texts.append(" or ".join([_name(name, value) for value in values]))
        return texts

    def panels(
        self,
        rows: pd.DataFrame,
        by: list[str],
        most: int,
    ) -> tuple[list[Panel], list[str]]:
        """Rows about cells, split by these columns.

        The second list has a sentence on the panels for which there is no room, if any.
        """
        varying = self.varying(by)
        every = []
        for _, part in rows.groupby(self.splitting(by), dropna=False, sort=True):
            first = part.iloc[0]
            titles = [_name(column, first[column]) for column in varying]
            title = ", ".join(titles)
            every.append(Panel(title, part))
        found = largest(every, most, lambda panel: panel.extent)
        return found, left_out_note(_num_cells(every), _num_cells(found), "cells")

    def splitting(self, by: list[str]) -> list[str]:
        """Those of these columns that split cells: one that follows from another does not."""
        following = FOLLOWS.keys() - set(self.varying(by))
        return [name for name in by if name not in following]

    def setting_of(self, cell: pd.Series) -> str:
        """The setting of a cell's panel in a title: ``At N = 4 with W = 2``."""
        setting = f"At N = {cell['accumulate']}"
        others = ", ".join([_name(name, cell[name]) for name in self.varying(CONTEXT)])
        if others:
            setting += f" with {others}"
        return setting

    def varying(self, by: list[str]) -> list[str]:
        """Which of these columns differ between the cells."""
        kinds = self.contestants[list({*by, *FOLLOWS, *FOLLOWS.values()})].drop_duplicates()
        return differing(kinds.itertuples(index=False), by)

    def point_name(
        self,
        backend: str,
        outcome: str,
        point: tuple[float, float],
        more: str = "",
    ) -> PointName:
        """What to write beside a point: the backend, and how its cell failed."""
        text = backend
        if failure := outcome_label(outcome):
            text += f" ({failure})"
        return PointName(style.cut(text + more), point, self.looks[backend].colour)

    def backends_in(self, rows: pd.DataFrame) -> list[str]:
        """The backends of these rows, in the order in which they are drawn."""
        found = set(rows["backend"])
        return [backend for backend in self.looks if backend in found]


def rows_of_panels(panels: Sequence[Panel]) -> pd.DataFrame:
    """The cells of all panels."""
    return pd.concat([panel.rows for panel in panels])


def _num_cells(panels: Sequence[Panel]) -> int:
    num_cells = 0
    for panel in panels:
        num_cells += panel.rows["cell_id"].nunique()
    return num_cells


def largest(
    items: Sequence[Item],
    most: int,
    extent: Callable[[Item], tuple[int, int]],
) -> list[Item]:
    """At most so many of the items, in their order.

    Those of the most ranks are chosen, then those of the largest N: that is their ``extent``.
    """
    places = sorted(range(len(items)), key=lambda place: extent(items[place]), reverse=True)
    return [items[place] for place in sorted(places[:most])]


def left_out_note(every: int, shown: int, what: str) -> list[str]:
    """A sentence on what a figure has no room for; none if it shows all."""
    if shown == every:
        return []
    return [
        f"{every - shown} of {every} {what} are left out, first those with the fewest ranks and "
        "the smallest N: the tables of the run have all."
    ]


def outcome_label(outcome: str, good: str = "") -> str:
    """How a cell failed, to be written beside it; ``good`` for one that has not."""
    if outcome == Status.OK:
        return good
    return outcome


def sync_pairs(cells: pd.DataFrame, how: Sync = Sync.DEFERRED) -> list[tuple[str, str]]:
    """The ids of each pair of ``eager_and_deferred`` backends among good cells at one N."""
    good = cells[cells["status"] == Status.OK]
    rows = {str(row["backend"]): row for row in rows_of(good)}
    found = []
    for eager, deferred in eager_and_deferred(rows, how):
        ids = str(rows[eager]["cell_id"]), str(rows[deferred]["cell_id"])
        found.append(ids)
    return found


def floats(values: pd.Series) -> Array:
    """The values as an array; missing ones are NaN."""
    return values.to_numpy(dtype=float, na_value=np.nan)


def _name(column: str, value: Value) -> str:
    """A value of a column in the words of its axis."""
    if column not in AXES:
        return str(value)
    if pd.isna(value):
        value = None
    return AXES[column].phrase(value)
