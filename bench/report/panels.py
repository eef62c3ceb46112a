"""What the figures of a run have in common: panels, titles, notes, cells and axes."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from bench.analysis.estimate import Estimate, step_times
from bench.cell import REFERENCE, REFERENCES, SGD, SHARDED_REFERENCE, Status
from bench.report import style
from bench.report.style import REFERENCE_COLOUR, Key, Words, safe
from bench.tables import Tables
from bench.words import plural

T = TypeVar("T")
CONTEXT = [
    "workload",
    "model",
    "device",
    "global_batch_size",
    "sequence_length",
    "optimizer",
    "clip_norm",
    "activation_checkpointing",
    "compiled",
    "accumulation_dtype",
    "world_size",
    "world",
    "precision",
    "corpus",
    "learning_rate",
    "seed",
]
"""Cells that differ in one of these are never in one panel."""
REFERENCE_KEYS = [
    "workload",
    "model",
    "sequence_length",
    "global_batch_size",
    "optimizer",
    "clip_norm",
    "device",
    "corpus",
    "learning_rate",
    "seed",
]
"""What a trial shares with its reference."""
CSV_COLUMNS = [
    "run_id",
    "cell_id",
    "repeat",
    "backend",
    "framework",
    "sharding",
    "sync",
    "accumulate",
    *CONTEXT,
    "status",
    "reason",
]
NAMES = {
    "accumulate": "N = {}",
    "world_size": "W = {}",
    "global_batch_size": "B = {}",
    "sequence_length": "{} tokens",
    "accumulation_dtype": "summed in {}",
    "clip_norm": "clipped to {:g}",
    "learning_rate": "lr {:g}",
}
"""How a value of a column is named in titles; others speak for themselves."""
NOT_CLIPPED = "not clipped"
REFERENCE_LABELS = {
    REFERENCE: "reference: one process, full batch",
    SHARDED_REFERENCE: "reference: all ranks, full batch",
}
VIRTUAL, REAL = "virtual world: no values, nothing is sent", "real ranks"
SHARED = "ranks share GPUs, over gloo: nothing is timed"
NOT_COMMUNICATION = "no bytes move between ranks: host overhead and memory policy, not communication"
ONE_GPU, ONE_PROCESS = f"one GPU, {NOT_COMMUNICATION}", f"one process, {NOT_COMMUNICATION}"
SWITCHES = {
    "activation_checkpointing": ("activations kept", "activations checkpointed"),
    "compiled": ("not compiled", "blocks compiled"),
}
"""Columns that are false or true, in words."""
LOSS_FLOOR = 1e-9
"""Where a loss equal to the reference's is drawn on a logarithmic axis."""
SPREAD = "Points are spread sideways at each N; small points are trials, large ones their cells ({})"
MOST_PAGES = 2
"""Figures of one kind: what a run of hundreds of cells has beyond these is in the tables and the CSV."""
COUNTED = "; 2\u2715 above a panel: two cells without a number at that N."
TITLE_SIZE = 8.0
"""Of a panel's title in points."""
LOG_ABOVE = 5.0
"""Ratio of the largest to the smallest value from which an axis is logarithmic."""
GIB_ABOVE = 4 * 2**30
MAX_DIRECT, MAX_DIRECT_WIDTH = 12, 2.3
"""Lines that get labels of their own at the right, and the inches that those may take."""
DODGE, DODGE_EACH = 0.32, 0.04
"""Octaves over which the backends are spread at one N: at most, and per backend."""
REASON_LENGTH = 220


@dataclass
class Drawing:
    """One figure before it is saved."""

    stem: str
    figure: Figure
    data: pd.DataFrame
    words: Words


@dataclass
class Panel:
    """The trials that share one pair of axes, and those of their reference."""

    title: str
    trials: pd.DataFrame
    reference: pd.DataFrame
    """Of one kind: of single processes, where there is one."""


class Run:
    """The trials in the order of drawing, and what all figures say about them."""

    def __init__(self, tables: Tables, manifest: dict[str, Any], remarks: Sequence[str] = ()) -> None:
        self.manifest, self.losses, self.remarks = manifest, tables.losses, remarks
        trials = tables.trials[tables.trials["twin"].fillna("") == ""].copy()  # a twin is its cell once more
        for column in ("framework", "sharding", "sync"):
            known = {name: about.get(column) for name, about in manifest.get("backends", {}).items()}
            trials[column] = trials[column].fillna(trials["backend"].map(known).astype("string")).fillna("")
        trials["reason"] = trials["reason"].fillna("")
        self.looks = style.looks(trials)
        trials["world"] = trials["virtual_world_size"].notna().map({True: VIRTUAL, False: REAL}).astype("string")
        trials.loc[trials["shared_gpu"].fillna(False).astype(bool), "world"] = SHARED
        order = {name: i for i, name in enumerate(self.looks)}
        ranks = trials["backend"].map(order)
        self.trials = trials.assign(_rank=ranks).sort_values(["_rank", "accumulate", "repeat"], kind="stable")
        self.others = without_reference(self.trials)

    @cached_property
    def times(self) -> dict[str, Estimate]:
        """The step time of each cell, by its id."""
        return step_times(self.trials)

    def words(self, title: str) -> Words:
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
        return Words(
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
        asked = [name for name in SWITCHES if self.others[name].any()]
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
        return [*notes, *([SHARED] if (self.trials["world"] == SHARED).any() else [])]

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


def reference_keys(panels: Sequence[Panel], value: str) -> list[Key]:
    """The legend's entries of the references that these panels draw."""
    drawn = {name for panel in panels for name in panel.reference.loc[panel.reference[value].notna(), "backend"]}
    line = Line2D([], [], color=REFERENCE_COLOUR, linestyle="--")
    return [(line, label) for name, label in REFERENCE_LABELS.items() if name in drawn]


def without_reference(trials: pd.DataFrame) -> pd.DataFrame:
    """All but the reference; the trials themselves if there is nothing else."""
    others = trials[~trials["backend"].isin(REFERENCES)]
    return trials if others.empty else others


def of_one_process(trials: pd.DataFrame) -> str:
    """What has to be said of all figures of a run whose real ranks are one; empty for others.

    Worlds that are pretended beside it change nothing: their ranks are not there either.
    """
    real = trials[trials["virtual_world_size"].isna()]
    if real.empty or not (real["world_size"] == 1).all():
        return ""
    return ONE_GPU if (real["device"] == "cuda").all() else ONE_PROCESS


def varying_columns(trials: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """Those of these columns in which the trials differ; a learning rate that goes with its optimizer says nothing."""
    found = [column for column in columns if trials[column].nunique(dropna=False) > 1]
    if "learning_rate" in found and (trials.groupby("optimizer")["learning_rate"].nunique() == 1).all():
        found.remove("learning_rate")
    return found


def _count(value: Any) -> str:
    if pd.isna(value):
        return "unknown number of"
    for size, unit in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return str(value)


def _name(column: str, value: Any) -> str:
    if pd.isna(value):
        return NAMES.get(column, "{}").replace(":g", "").format("unknown")
    if column in SWITCHES:
        return SWITCHES[column][bool(value)]
    return NOT_CLIPPED if column == "clip_norm" and not value else NAMES.get(column, "{}").format(value)


def _shorten(reason: str) -> str:
    return reason if len(reason) <= REASON_LENGTH else reason[: REASON_LENGTH - 4].rstrip() + " ..."


@dataclass
class Page:
    """The panels of one figure of several."""

    stem: str
    panels: list[Panel]
    left_out: list[str]
    """A sentence on the panels that no page has; none if there is nothing to be said."""


def paged(stem: str, items: list[Panel], size: int) -> Iterator[Page]:
    """Parts of at most this size, MOST_PAGES at most: of more panels those of the most ranks and the largest N.

    Where these would not hold half of the panels, there is one part alone.
    """
    most = MOST_PAGES if len(items) <= 2 * MOST_PAGES * size else 1
    shown = list(largest(items, most * size, _extent))
    every, drawn = (sum(panel.trials["cell_id"].nunique() for panel in some) for some in (items, shown))
    left_out = left_out_words(every, drawn, "cells")
    count = math.ceil(len(shown) / size)
    each = math.ceil(len(shown) / max(count, 1))
    for page in range(count):
        part = shown[page * each : (page + 1) * each]
        yield Page(stem if count == 1 else f"{stem}-{page + 1}", part, left_out)


def _extent(panel: Panel) -> tuple[int, int]:
    return int(panel.trials["world_size"].max()), int(panel.trials["accumulate"].max())


def largest(items: Sequence[T], most: int, extent: Callable[[T], tuple[int, int]]) -> Sequence[T]:
    """So many of the items, in their order: those of the most ranks and the largest N, which ``extent`` gives."""
    if len(items) <= most:
        return items
    chosen = sorted(range(len(items)), key=lambda place: extent(items[place]), reverse=True)[:most]
    return [items[place] for place in sorted(chosen)]


def left_out_words(every: int, shown: int, what: str) -> list[str]:
    """What a figure says of those for which it has no room; nothing if it has all."""
    if shown == every:
        return []
    return [
        f"{every - shown} of {every} {what} are left out of this picture, those with the fewest ranks and the smallest "
        "N; all are in the CSV beside it and in the report's tables."
    ]


def grid_shape(panels: list[Panel]) -> tuple[int, int]:
    """Columns and rows of a grid of panels, at most four columns for twelve."""
    columns = len(panels) if len(panels) <= 3 else math.ceil(math.sqrt(len(panels)))
    return columns, math.ceil(len(panels) / columns)


def panel_grid(figure: Figure, panels: Sequence[Panel], columns: int, beside: float = 0.9, **share: Any) -> list[Axes]:
    """One pair of axes per panel, row by row, none empty; the lowest of each column has the x axis's words.

    ``beside`` are the inches that the words at the left of all panels need.
    """
    rows = math.ceil(len(panels) / columns)
    axes = figure.subplots(rows, columns, squeeze=False, **share).ravel()
    for spare in axes[len(panels) :]:
        spare.remove()
    for i, panel in enumerate(panels):
        axes[i].set_title(title_lines(panel.title, (style.WIDTH - beside) / columns))
        if i + columns >= len(panels):
            axes[i].tick_params(labelbottom=True)
    return list(axes[: len(panels)])


def title_lines(title: str, room: float) -> str:
    """A panel's title, ready to be drawn, in as many lines as that many inches ask for."""
    width = style.text_width(title, TITLE_SIZE)
    lines = [title] if width <= room else textwrap.wrap(title, max(1, int(len(title) * room / width)))
    return "\n".join(safe(line) for line in lines)


def set_scale(axes: Axes, which: str, values: pd.Series) -> None:
    """Linear, or logarithmic with plain numbers where values differ much."""
    axis = getattr(axes, f"{which}axis")
    if len(values) and values.min() > 0 and values.max() / values.min() > LOG_ABOVE:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(5))
