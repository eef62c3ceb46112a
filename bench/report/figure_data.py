"""What the figures of a run draw and have in common: the trials in order, panels, titles, notes, and numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from bench.judge.samples import NAME, Estimate, step_times, tokens_per_step
from bench.judge.tables import Tables, worlds
from bench.plan.cell import REFERENCE, REFERENCES, SGD, SHARDED_REFERENCE, Status
from bench.plan.columns import AXES, Axis, axes
from bench.report import style
from bench.report.panels import (
    CONTEXT,
    CSV_COLUMNS,
    REASON_LENGTH,
    REFERENCE_KEYS,
    Panel,
    of_one_process,
    varying_columns,
)
from bench.report.sheet import FigureWords
from bench.report.style import Key
from bench.words import plural


class FigureData:
    """The trials in the order of drawing, and what all figures say about them."""

    def __init__(self, tables: Tables, manifest: dict[str, Any], remarks: Sequence[str] = ()) -> None:
        self.manifest, self.losses, self.remarks = manifest, tables.losses, remarks
        trials = tables.trials[tables.trials["twin"].fillna("") == ""].copy()  # a twin is its cell once more
        for column in ("framework", "sharding", "sync"):
            known = {name: about.get(column) for name, about in manifest.get("backends", {}).items()}
            trials[column] = trials[column].fillna(trials["backend"].map(known).astype("string")).fillna("")
        trials["reason"] = trials["reason"].fillna("")
        self.looks = style.looks(trials)
        trials["world"] = worlds(trials)
        order = {name: i for i, name in enumerate(self.looks)}
        ranks = trials["backend"].map(order)
        self.trials = trials.assign(_rank=ranks).sort_values(["_rank", "accumulate", "repeat"], kind="stable")
        self.others = without_reference(self.trials)

    @cached_property
    def times(self) -> dict[str, Estimate]:
        """The step time of each cell, by its id."""
        return step_times(self.trials)

    def words(self, title: str) -> FigureWords:
        """The words around a figure."""
        alone = of_one_process(self.others)
        subtitle = f"{self._models()}; {self._batch()}"
        machine = self.manifest.get("machine") or {}
        gpus = [str(gpu.get("name", "GPU")) for gpu in machine.get("gpus") or []]
        parts = [str(machine.get("cpu") or "unknown CPU")]
        if machine.get("cores"):
            parts.append(plural(machine["cores"], "core"))
        parts += [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)] or ["no GPU"]
        torch = (self.manifest.get("packages") or {}).get("torch")
        footer = f"run {self.manifest.get('run_id', 'unnamed')}; machine: {', '.join(parts)}"
        return FigureWords(
            f"{title} ({alone})" if alone else title,
            subtitle,
            footer + (f"; torch {torch}" if torch else ""),
            self._notes(),
        )

    def _models(self) -> str:
        sizes = self.trials.groupby("model")["num_parameters"].max()
        models = [f"{name} ({_count(sizes[name])} parameters)" for name in self.others["model"].unique()]
        return f"model {', '.join(models)}"

    def _batch(self) -> str:
        def values(column: str) -> str:
            return ", ".join(str(v) for v in sorted(self.others[column].dropna().unique()))

        return (
            f"B = {values('global_batch_size')} samples of {values('sequence_length')} tokens per optimizer step, "
            f"N = {values('accumulate')}, W = {values('world_size')}, {values('precision')} "
            f"(summed in {values('accumulation_dtype')}), {values('device')}{self._blocks()}{self._training()}"
        )

    def _blocks(self) -> str:
        """What was done to the model's blocks, if anything was."""
        asked = [name for name in axes(Axis.WAY) if AXES[name].dtype == "boolean" and self.others[name].any()]
        found = [" and ".join(_name(name, v) for v in sorted(self.others[name].unique())) for name in asked]
        return "".join(f", {words}" for words in found)

    def _training(self) -> str:
        """Optimizers and clipping, where they are not the one AdamW without clipping that a run has if unasked."""
        rates = self.others[["optimizer", "learning_rate"]].drop_duplicates().sort_values("optimizer")
        adamw = len(rates) == 1 and not (rates["optimizer"] == SGD).any()
        if adamw and not (self.others["clip_norm"] > 0).any():
            return ""
        optimizers = [f"{row.optimizer} ({_name('learning_rate', row.learning_rate)})" for row in rates.itertuples()]
        clips = [_name("clip_norm", value) for value in sorted(self.others["clip_norm"].unique())]
        return f"; {', '.join(optimizers)}; gradients {', '.join(clips)}"

    def _notes(self) -> list[str]:
        """The remarks, and what is wrong with which cells: those of equal status and reason, numbers aside, in one."""
        varying = varying_columns(self.others, CONTEXT)
        size = self.trials.groupby("cell_id").size()
        groups: dict[tuple[bool, str, str], dict[str, list[str]]] = {}
        reasons: dict[tuple[bool, str, str], list[str]] = {}
        bad = self.trials[self.trials["status"] != Status.OK]
        for cell_id, rows in bad.groupby("cell_id", sort=False):
            for status, alike in rows.groupby("status"):
                first = alike.iloc[0]
                key = (status == Status.INVALID, str(status), re.sub(r"[-+]?\d[\d.e+-]*", "#", first["reason"]))
                some = "" if len(alike) == size[cell_id] else f" ({len(alike)} of {plural(size[cell_id], 'trial')})"
                where = " ".join([str(first["backend"]), *(_name(c, first[c]).replace(" = ", "=") for c in varying)])
                groups.setdefault(key, {}).setdefault(where, []).append(f"{first['accumulate']}{some}")
                reasons.setdefault(key, []).append(str(first["reason"]))
        notes = [f"{text}." for text in self.remarks]
        for key in sorted(groups, key=lambda k: k[:2]):
            cells = "; ".join(f"{where} N={', '.join(ns)}" for where, ns in groups[key].items())
            reason = _shorten(reasons[key][0]) or "no reason was recorded"
            alike_only = " (numbers of the first)" if len(set(reasons[key])) > 1 else ""
            notes.append(f"{key[1]}: {cells}: {reason}{alike_only}")
        return [*notes, *filter(None, (world.caveat for world in self.trials["world"].unique()))]

    def panels(self, trials: pd.DataFrame, by: list[str], values: list[str]) -> list[Panel]:
        """The trials of all but the reference, split by these columns; parts without any value are left out."""
        others = without_reference(trials)
        varying = varying_columns(others, by)
        references = trials[trials["backend"].isin(REFERENCES)] if others is not trials else trials.iloc[:0]
        found = []
        for _, rows in others.groupby(by, dropna=False, sort=True):
            first = rows.iloc[0]
            same = (references[REFERENCE_KEYS] == first[REFERENCE_KEYS]).all(axis=1)
            if "peak_memory_source" in by:
                same &= references["peak_memory_source"] == first["peak_memory_source"]
            own = references[same]
            own = own[own["backend"] == (REFERENCE if (own["backend"] == REFERENCE).any() else SHARDED_REFERENCE)]
            if rows[values].notna().all(axis=1).any():
                found.append(Panel(", ".join(_name(c, first[c]) for c in varying), rows, own))
        return found

    def shown(self, panels: Sequence[Panel], *, reference: bool = False) -> list[str]:
        """The backends of these panels, in the order of drawing."""
        frames = [frame for p in panels for frame in ([p.trials, p.reference] if reference else [p.trials])]
        found = {backend for frame in frames for backend in frame["backend"]}
        return [backend for backend in self.looks if backend in found]

    def keys(self, backends: Sequence[str], *, line: bool) -> list[Key]:
        return [style.backend_key(name, self.looks[name], line=line) for name in backends]

    def signs(self, trials: pd.DataFrame) -> list[Key]:
        return style.sync_keys(trials, invalid=bool((trials["status"] != Status.OK).any()))


def without_reference(trials: pd.DataFrame) -> pd.DataFrame:
    """All but the reference; the trials themselves if there is nothing else."""
    others = trials[~trials["backend"].isin(REFERENCES)]
    return trials if others.empty else others


def _count(value: Any) -> str:
    if pd.isna(value):
        return "unknown number of"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def _name(column: str, value: Any) -> str:
    return AXES[column].phrase(None if pd.isna(value) else value) if column in AXES else str(value)


def _shorten(reason: str) -> str:
    return reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 4].rstrip() + " ..."


TIMES = ("step_time_s", "tokens_per_s")
"""Values with an interval."""
SAID_OF_CELLS = dict.fromkeys(TIMES, f"{NAME}, a line for its 95 % interval")
"""Which number a cell has in a figure, in words."""
LARGEST = "the largest of its trials"
"""The same of other values."""


def with_cells(run: FigureData, trials: pd.DataFrame, *values: str) -> pd.DataFrame:
    """With ``<value>_cell``, the number that is said of a cell, and ``valid``: all that was measured of it is ok.

    Of step times the estimate that is cited, with the ends of its interval, ``_low`` and ``_high``; of tokens per
    second the tokens over these; of bytes the largest. Over the ok trials, or over all if none is.
    """
    trials = trials[[*CSV_COLUMNS, "peak_memory_source", *values]].copy()  # frames of all columns are slow
    for value in values:
        trials[value] = trials[value].where(np.isfinite(trials[value].to_numpy(dtype=float, na_value=np.nan)))
    fine, cells = trials["status"] == Status.OK, trials["cell_id"]
    trials["valid"] = (fine | trials[list(values)].isna().any(axis=1)).groupby(cells).transform("all")
    for value in values:
        if value in TIMES:
            trials = trials.assign(**_times(run, trials, value))
        else:
            good = trials[value].where(fine).groupby(cells).transform("max")
            trials[f"{value}_cell"] = good.fillna(trials[value].groupby(cells).transform("max"))
    return trials


def _times(run: FigureData, trials: pd.DataFrame, value: str) -> dict[str, pd.Series]:
    """A cell's step time, or its rate, and the ends of its interval."""
    cells, ends = trials["cell_id"], ("cell", "low", "high")
    found = {
        end: cells.map({name: getattr(one, field) for name, one in run.times.items()}).astype("Float64")
        for end, field in zip(ends, ("seconds", "low", "high"), strict=True)
    }
    if value == "tokens_per_s":
        tokens = cells.map(tokens_per_step(run.trials)).astype("Float64")
        found = {end: tokens / found[of] for end, of in zip(ends, ("cell", "high", "low"), strict=True)}
    return {f"{value}_{end}": series for end, series in found.items()}


def cells_with(trials: pd.DataFrame, value: str) -> pd.DataFrame:
    """One row per cell that has a number."""
    return trials[trials[f"{value}_cell"].notna()].drop_duplicates("cell_id").sort_values("accumulate")


def interval_line(cells: pd.DataFrame, value: str, unit: float = 1.0) -> tuple[Any, Any]:
    """One line through the intervals of cells, with gaps between them: index of the cell in ``cells``, and value.

    Both are arrays of three numbers per cell: the two ends, and a gap.
    """
    ends = [cells[f"{value}_{end}"].to_numpy(dtype=float, na_value=np.nan) / unit for end in ("low", "high")]
    return np.repeat(np.arange(len(cells)), 3), np.stack([*ends, np.full(len(cells), np.nan)], axis=1).ravel()
