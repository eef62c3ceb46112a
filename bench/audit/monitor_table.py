"""The results of the grid over ThroughputMonitor's settings: table and findings."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import pandas as pd

from bench import files
from bench.audit.monitor import TOLERANCE
from bench.audit.monitor_grid import VALIDATION_S, Epoch, RateVerdict, Strategy
from bench.formatting import plural
from bench.screen import Screen
from bench.tabular import Table, TableColumn, TableRow, markdown_table

EPOCHS = {
    Epoch.WHOLE: "NB is a multiple of N",
    Epoch.PARTIAL: "NB = 2N + N/2: a partial last window",
    Epoch.SHORT: "NB = N/2 < N",
}
"""What they are, for people."""
STRATEGIES = {Strategy.DDP: "DDP", Strategy.DEEPSPEED: "DeepSpeed ZeRO-2"}
HEADER = (
    "epoch",
    "N",
    "window_size",
    "log_every_n_steps",
    "logs at",
    "reported/s",
    "true/s",
    "ratio",
    "verdict",
)
NUMBERS = {"N", "window_size", "reported/s", "true/s"}
"""Columns of numbers."""


class MonitorSettings(TypedDict):
    """What the numbers depend on."""

    lightning: str
    torch: str
    python: str
    clock: str
    micro_batch_s: float
    optimizer_s: float
    tolerance: float
    training: str
    """What differs from one rank without validation; empty if nothing does."""


def settings_of(arguments: argparse.Namespace) -> MonitorSettings:
    """The settings of the command, and the installed packages."""
    import lightning
    import torch

    training = []
    if arguments.world_size > 1 or arguments.strategy is not Strategy.DDP:
        ranks = plural(arguments.world_size, "rank")
        training.append(f"{ranks} with {STRATEGIES[arguments.strategy]}")
    if arguments.validate_every:
        every = f"every {arguments.validate_every} micro-batches"
        training.append(f"a validation of {VALIDATION_S:g} s {every}")
    return {
        "lightning": lightning.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "clock": "virtual",
        "micro_batch_s": arguments.micro_batch_time,
        "optimizer_s": arguments.optimizer_time,
        "tolerance": TOLERANCE,
        "training": ", ".join(training),
    }


def show_table(rows: pd.DataFrame, about: MonitorSettings) -> None:
    """Print the table, its settings and the findings."""
    columns = [TableColumn(name, name, is_number=name in NUMBERS) for name in HEADER]
    lines = []
    for values in summary(rows).itertuples(index=False):
        line = dict(zip(HEADER, values, strict=True))
        style = "red"
        if line["verdict"] == RateVerdict.RIGHT:
            style = ""
        lines.append(TableRow(line, dict.fromkeys(HEADER, style)))
    console = Screen()
    Table(columns=columns, rows=lines).show(console)
    for text in (settings(about), *findings(rows)):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def write_files(folder: Path, rows: pd.DataFrame, about: MonitorSettings) -> list[Path]:
    """Write table and page; their paths."""
    parquet, page = folder / "throughput.parquet", folder / "throughput.md"
    facts = {name: about[name] for name in ("lightning", "torch", "python", "clock")}
    with files.replacing(parquet) as draft:
        rows.assign(**facts).to_parquet(draft)
    files.write(page, markdown(rows, about))
    return [parquet, page]


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The printed table, as text.

    Points that differ only in ``log_every_n_steps``, with equal results, share a row.
    """
    records = rows.to_dict("records")
    told = pd.DataFrame(
        {
            "epoch": rows["epoch"],
            "N": rows["accumulate"],
            "window_size": rows["window_size"],
            "log_every_n_steps": rows["log_every_n_steps"].astype(str),
            "logs at": list(map(_logs_at, records)),
            "reported/s": rows["reported_samples_per_s"],
            "true/s": rows["true_samples_per_s"],
            "ratio": list(map(_ratio, records)),
            "verdict": rows["verdict"],
        }
    )
    same = ["epoch", "N", "window_size", "logs at", "ratio", "verdict"]
    equal = told.groupby(same, sort=False, as_index=False)
    found = equal.agg(
        {"log_every_n_steps": ", ".join, "reported/s": "median", "true/s": "median"},
    )
    for name in ("reported/s", "true/s"):
        found[name] = list(map(_one_decimal, found[name]))
    return found[list(HEADER)].astype(str)


def _one_decimal(value: float) -> str:
    """The number; ``-`` if there is none."""
    if pd.isna(value):
        return "-"
    return f"{value:.1f}"


def _logs_at(row: Mapping[Any, Any]) -> str:
    """The optimizer steps at which the monitor logged."""
    if not row["num_logs"]:
        return "-"
    every = row["log_every_n_steps"]
    multiples = range(every, row["num_updates"] + 1, every)
    if row["log_updates"] == ",".join(map(str, multiples)):
        return "its multiples"
    return str(row["log_updates"])


def _ratio(row: Mapping[Any, Any]) -> str:
    """Reported divided by true, from the smallest to the largest."""
    if pd.isna(row["ratio_min"]):
        return "-"
    low, high = f"{row['ratio_min']:.3f}", f"{row['ratio_max']:.3f}"
    if low == high:
        return low
    return f"{low} to {high}"


def markdown(rows: pd.DataFrame, about: MonitorSettings) -> str:
    """The page: settings, findings, the meaning of the columns, and the table."""
    measured = set(rows["epoch"])
    kinds = ", ".join(f"{epoch} ({title})" for epoch, title in EPOCHS.items() if epoch in measured)
    columns = (
        f"epoch: the number of micro-batches NB in an epoch, {kinds}. "
        "reported/s: the median of the logged samples/s; true/s: over the whole training except "
        "its first window. "
        "Their quotient is not the ratio, since each ratio compares one log with the windows "
        "that it covers: where all "
        "logs fall on the same place of an epoch, the monitor can be right about those windows "
        "and wrong overall."
    )
    lines = [f"# ThroughputMonitor of Lightning {about['lightning']}", "", settings(about), ""]
    for finding in findings(rows):
        lines.append(f"- {finding}")
    lines += ["", columns, "", *markdown_table(HEADER, summary(rows).itertuples(index=False))]
    return "\n".join(lines)


def settings(about: MonitorSettings) -> str:
    """How it was measured, in one paragraph."""
    training = ""
    if about["training"]:
        training = f"Training: {about['training']}. "
    return (
        f"Lightning {about['lightning']}, torch {about['torch']}, Python {about['python']}. A "
        "micro-batch takes "
        f"{about['micro_batch_s']:g} s and an optimizer step {about['optimizer_s']:g} s more, on "
        "a virtual clock. "
        f"{training}"
        "ratio: the samples/s that the monitor logged, divided by those measured at the "
        "optimizer over the "
        "accumulation windows that cover those of window_size; right: within "
        f"{100 * about['tolerance']:g} % of 1."
    )


def findings(rows: pd.DataFrame) -> list[str]:
    """The findings in words, from the rows alone."""
    counts = rows["verdict"].value_counts()
    told = [f"{counts[verdict]} {verdict}" for verdict in RateVerdict if verdict in counts]
    found = [f"{plural(len(rows), 'point')}: {', '.join(told)}"]
    for epoch, title in EPOCHS.items():
        for (n,), points in rows[rows["epoch"] == epoch].groupby(["accumulate"]):
            found.append(f"N = {n}, {title}: window_size {_sizes_by_verdict(points)}")
    if rows["log_every_n_steps"].nunique() > 1:
        found.append(_influence_of_logging(rows))
    for (error,), points in rows[rows["error"] != ""].groupby(["error"]):
        found.append(f"raised at {plural(len(points), 'point')}: {error}")
    return found


def _sizes_by_verdict(points: pd.DataFrame) -> str:
    """With which window sizes the monitor is right, wrong, or either by ``log_every_n_steps``."""
    right, wrong, mixed = [], [], []
    for size, verdicts in points.groupby("window_size")["verdict"]:
        are_right = verdicts == str(RateVerdict.RIGHT)
        if are_right.all():
            right.append(str(size))
        elif are_right.any():
            mixed.append(str(size))
        else:
            wrong.append(str(size))
    told = []
    by_verdict = {"right": right, "wrong": wrong, "right or wrong by log_every_n_steps": mixed}
    for name, sizes in by_verdict.items():
        if sizes:
            told.append(f"{name}: {', '.join(sizes)}")
    return "; ".join(told)


def _influence_of_logging(rows: pd.DataFrame) -> str:
    combinations = rows.groupby(["epoch", "accumulate", "window_size"])
    varies = combinations["verdict"].nunique().gt(1).sum()
    if not varies:
        return "log_every_n_steps changed no verdict"
    where = plural(varies, "combination")
    return f"log_every_n_steps changed the verdict at {where} of epoch, N and window_size"
