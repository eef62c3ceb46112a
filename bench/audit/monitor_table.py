"""What the grid over ThroughputMonitor's settings came to: table, words and heat map."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.patches import Rectangle
from rich import box
from rich.table import Table
from rich.text import Text

from bench.audit.monitor_grid import Epoch, RateVerdict
from bench.report import sheet, style
from bench.report.panels import Drawing
from bench.report.sheet import FigureWords
from bench.report.style import SMALL
from bench.words import plural


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    import platform

    import lightning
    import torch

    return {
        "lightning": lightning.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "clock": "real" if arguments.real_time else "virtual",
        "micro_batch_s": arguments.micro_batch_time,
        "optimizer_s": arguments.optimizer_time,
        "tolerance": arguments.tolerance,
    }


def show_table(rows: pd.DataFrame, about: dict[str, Any]) -> None:
    """Print the table, its settings and what was found."""
    from rich.console import Console

    console = Console(width=max(120, Console().width))  # better wrapped by the terminal than cut off
    console.print(table(rows))
    console.print(settings(about), highlight=False, soft_wrap=True)
    for finding in findings(rows):
        console.print(finding, highlight=False, markup=False, soft_wrap=True)


def write_files(folder: Path, rows: pd.DataFrame, about: dict[str, Any]) -> list[Path]:
    """Table, page and plot."""
    import matplotlib.style

    from bench.report import sheet, style

    parquet, page = folder / "throughput.parquet", folder / "throughput.md"
    rows.assign(**{name: about[name] for name in ("lightning", "torch", "python", "clock")}).to_parquet(parquet)
    page.write_text(markdown(rows, about), encoding="utf-8")
    drawing = draw(rows, about)
    with matplotlib.style.context(list(style.BASE)):
        return [parquet, page, *sheet.save(drawing.figure, folder / drawing.stem, drawing.words)]


EPOCHS = {
    Epoch.WHOLE: "NB is a multiple of N",
    Epoch.PARTIAL: "NB = 2N + N/2: a partial last window",
    Epoch.SHORT: "NB = N/2 < N",
}
"""Titles of the panels."""
HEADER = ("epoch", "N", "window_size", "log_every_n_steps", "logs at", "reported/s", "true/s", "ratio", "verdict")
NO_RATIO = (RateVerdict.UNRATED, RateVerdict.SILENT, RateVerdict.RAISED)
COLOUR_LIMIT = 4.0
"""Ratios beyond 1/4 and 4 have the darkest colours."""
DARK = 2.2
"""Ratios beyond 1/2.2 and 2.2 are written in white."""


def lines(rows: pd.DataFrame) -> list[tuple[str, ...]]:
    """The rows of the printed table: points that differ in ``log_every_n_steps`` alone, and came out alike, in one."""
    alike = rows.assign(
        low=rows["ratio_min"].round(3).fillna(-1),
        high=rows["ratio_max"].round(3).fillna(-1),
        at=[_logs_at(row) for row in rows.to_dict("records")],
    )
    keys = ["epoch", "accumulate", "window_size", "verdict", "low", "high", "at"]
    found: list[tuple[str, ...]] = []
    for _, group in alike.groupby(keys, sort=False):
        row = group.iloc[0]
        found.append(
            (
                row["epoch"],
                str(row["accumulate"]),
                str(row["window_size"]),
                ", ".join(map(str, group["log_every_n_steps"])),
                row["at"],
                _number(group["reported_samples_per_s"].median()),
                _number(group["true_samples_per_s"].median()),
                ratio(row),
                row["verdict"],
            )
        )
    return found


def _logs_at(row: Any) -> str:
    """The optimizer steps at which the monitor logged."""
    if not row["num_logs"]:
        return "-"
    every = row["log_every_n_steps"]
    multiples = [str(every * (i + 1)) for i in range(row["num_updates"] // every)]
    if row["log_updates"] == ",".join(multiples):
        return "its multiples"
    return str(row["log_updates"])


def _number(value: Any) -> str:
    return "-" if pd.isna(value) else f"{value:.1f}"


def ratio(row: Any) -> str:
    """Reported to true, from the smallest to the largest."""
    if pd.isna(row["ratio_min"]):
        return "-"
    low, high = f"{row['ratio_min']:.3f}", f"{row['ratio_max']:.3f}"
    return low if low == high else f"{low} to {high}"


def table(rows: pd.DataFrame) -> Table:
    """The table in the terminal."""
    found = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in HEADER:
        found.add_column(name, justify="right" if name in {"N", "window_size", "reported/s", "true/s"} else "left")
    for line in lines(rows):
        found.add_row(*map(Text, line), style=None if line[-1] == RateVerdict.RIGHT else "red")
    return found


def markdown(rows: pd.DataFrame, about: dict[str, Any]) -> str:
    """The same table, with the words around it, as a page."""
    head = [f"# ThroughputMonitor of Lightning {about['lightning']}", "", settings(about), ""]
    head += [f"- {finding}" for finding in findings(rows)]
    head += ["", columns(rows), "", f"| {' | '.join(HEADER)} |", "|" + " --- |" * len(HEADER)]
    return "\n".join([*head, *(f"| {' | '.join(line)} |" for line in lines(rows)), ""])


def settings(about: dict[str, Any]) -> str:
    """How it was measured, in one paragraph."""
    clock = (
        "a virtual clock that the workload moves on" if about["clock"] == "virtual" else "the real clock, by sleeping"
    )
    return (
        f"Lightning {about['lightning']}, torch {about['torch']}, Python {about['python']}. A micro-batch takes "
        f"{about['micro_batch_s']:g} s and an optimizer step {about['optimizer_s']:g} s more, on {clock}. "
        "ratio: samples/s that the monitor logged, to what the tap on the optimizer has over the whole windows that "
        f"cover the monitor's; right: within {100 * about['tolerance']:g} % of 1."
    )


def columns(rows: pd.DataFrame) -> str:
    """What the columns of the table say, in one paragraph."""
    kinds = ", ".join(f"{epoch} ({title})" for epoch, title in EPOCHS.items() if (rows["epoch"] == epoch).any())
    return (
        (f"epoch: how many micro-batches NB it has, {kinds}. " if kinds else "")
        + "reported/s: samples, the median of what was logged; true/s: over the whole training but for its first "
        "window. Their quotient is not the ratio: each ratio is of one log, to the windows that it covers. Where all "
        "logs fall at the same place of an epoch, as at the end of each, the monitor can be right of those windows and "
        "far from the whole."
    )


def findings(rows: pd.DataFrame) -> list[str]:
    """What was found, in words: by the rows alone."""
    counts = rows["verdict"].value_counts()
    found = [f"{plural(len(rows), 'point')}: " + ", ".join(f"{counts[v]} {v}" for v in RateVerdict if v in counts)]
    for epoch, title in EPOCHS.items():
        for (n,), points in rows[rows["epoch"] == epoch].groupby(["accumulate"]):
            by_size = points.groupby("window_size")["verdict"].agg(set)
            right = [str(size) for size, verdicts in by_size.items() if verdicts == {str(RateVerdict.RIGHT)}]
            wrong = [str(size) for size, verdicts in by_size.items() if str(RateVerdict.RIGHT) not in verdicts]
            mixed = [str(size) for size in by_size.index if str(size) not in right + wrong]
            parts = [("right", right), ("wrong", wrong), ("right or wrong by log_every_n_steps", mixed)]
            words = "; ".join(f"{name}: {', '.join(sizes)}" for name, sizes in parts if sizes)
            found.append(f"N = {n}, {title}: window_size {words}")
    varies = rows.groupby(["epoch", "accumulate", "window_size"])["verdict"].nunique().gt(1).sum()
    if rows["log_every_n_steps"].nunique() > 1:
        found.append(
            "log_every_n_steps changed no verdict"
            if not varies
            else f"log_every_n_steps changed the verdict at {plural(varies, 'combination')} of epoch, N and window_size"
        )
    for (error,), points in rows[rows["error"] != ""].groupby(["error"]):
        found.append(f"raised at {plural(len(points), 'point')}: {error}")
    return found


def draw(rows: pd.DataFrame, about: dict[str, Any]) -> Drawing:
    """One heat map per kind of epoch: the ratio that is furthest from 1, by window size and N."""
    with matplotlib.style.context(list(style.BASE)):
        epochs = [epoch for epoch in EPOCHS if (rows["epoch"] == epoch).any()]
        words = FigureWords(
            "Samples per second by ThroughputMonitor, as a ratio to the truth",
            settings(about),
            f"In each field the ratio furthest from 1 over log_every_n_steps {_values(rows, 'log_every_n_steps')}; "
            "framed: right at all of them.",
        )
        heights = [max(1, rows[rows["epoch"] == epoch]["accumulate"].nunique()) for epoch in epochs]
        inches = sum(heights) * 0.3 + len(epochs) * 0.5 + 0.2
        figure = sheet.sheet(words, [], inches, inches)
        panels = figure.subplots(len(epochs), 1, squeeze=False, gridspec_kw={"height_ratios": heights}).ravel()
        for axes, epoch in zip(panels, epochs, strict=True):
            _heat_map(axes, rows[rows["epoch"] == epoch], EPOCHS[epoch])
        panels[-1].set_xlabel("window_size in micro-batches")
    return Drawing("throughput", figure, rows, words)


def _values(rows: pd.DataFrame, column: str) -> str:
    return ", ".join(map(str, sorted(rows[column].unique())))


def worst(points: pd.DataFrame) -> tuple[float, str, bool]:
    """The ratio furthest from 1 (NaN if there is none), what is written in its field, and whether all are right."""
    all_right = bool((points["verdict"] == RateVerdict.RIGHT).all())
    ratios = [float(value) for name in ("ratio_min", "ratio_max") for value in points[name].dropna()]
    without: Sequence[str] = [v for v in NO_RATIO if (points["verdict"] == v).any()]
    if without:
        return float("nan"), str(without[-1]), all_right
    furthest = max(ratios, key=lambda value: abs(np.log(value)))
    return furthest, f"{furthest:.3f}", all_right


def _heat_map(axes: Axes, rows: pd.DataFrame, title: str) -> None:
    sizes, factors = (sorted(rows[name].unique()) for name in ("window_size", "accumulate"))
    fields = {
        (factors.index(n), sizes.index(size)): worst(points)
        for (n, size), points in rows.groupby(["accumulate", "window_size"])
    }
    ratios = np.full((len(factors), len(sizes)), np.nan)
    for place, (value, _, _) in fields.items():
        ratios[place] = value
    colours = colormaps["RdBu"].with_extremes(bad="#dddddd")
    axes.imshow(ratios, cmap=colours, norm=LogNorm(1 / COLOUR_LIMIT, COLOUR_LIMIT), aspect="auto")
    for (row, column), (value, text, right) in fields.items():
        dark = value > DARK or value < 1 / DARK
        axes.text(column, row, text, ha="center", va="center", size=SMALL, color="white" if dark else "black")
        if right:
            corner = (column - 0.46, row - 0.44)
            axes.add_patch(Rectangle(corner, 0.92, 0.88, fill=False, edgecolor="black", linewidth=1.1))
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_yticks(range(len(factors)), [str(n) for n in factors])
    axes.set_ylabel("N")
    axes.set_title(title)
    axes.grid(visible=False)
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
