"""The results of the grid over ThroughputMonitor's settings: table and findings."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from bench.audit.monitor import TOLERANCE
from bench.audit.monitor_grid import VALIDATION_S, Epoch, RateVerdict, Strategy
from bench.formatting import plural
from bench.tabular import Table, TableColumn, TableRow, markdown_table

EPOCHS = {
    Epoch.WHOLE: "NB is a multiple of N",
    Epoch.PARTIAL: "NB = 2N + N/2: a partial last window",
    Epoch.SHORT: "NB = N/2 < N",
}
"""What they are, for people."""
HEADER = ["epoch", "N", "window_size", "log_every_n_steps", "logs at", "reported/s", "true/s", "ratio", "verdict"]


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on; ``training``: what differs from one rank without validation."""
    import lightning
    import torch

    strategy = {Strategy.DDP: "DDP", Strategy.DEEPSPEED: "DeepSpeed ZeRO-2"}[arguments.strategy]
    training = []
    if arguments.world_size > 1 or arguments.strategy is not Strategy.DDP:
        training.append(f"{plural(arguments.world_size, 'rank')} with {strategy}")
    if arguments.validate_every:
        training.append(f"a validation of {VALIDATION_S:g} s every {arguments.validate_every} micro-batches")
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


def show_table(rows: pd.DataFrame, about: dict[str, Any]) -> None:
    """Print the table, its settings and the findings."""
    numbers = {"N", "window_size", "reported/s", "true/s"}
    columns = [TableColumn(name, name, is_number=name in numbers) for name in HEADER]
    lines = []
    for line in summary(rows).to_dict("records"):
        style = "" if line["verdict"] == RateVerdict.RIGHT else "red"
        lines.append(TableRow({str(name): text for name, text in line.items()}, dict.fromkeys(HEADER, style)))
    console = Console()
    Table(columns=columns, rows=lines).show(console)
    for text in (settings(about), *findings(rows)):
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def write_files(folder: Path, rows: pd.DataFrame, about: dict[str, Any]) -> list[Path]:
    """Write table and page; their paths."""
    parquet, page = folder / "throughput.parquet", folder / "throughput.md"
    rows.assign(**{name: about[name] for name in ("lightning", "torch", "python", "clock")}).to_parquet(parquet)
    page.write_text(markdown(rows, about), encoding="utf-8")
    return [parquet, page]


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """The printed table, as text: points that differ only in ``log_every_n_steps``, with equal results, share a row."""
    told = pd.DataFrame(
        {
            "epoch": rows["epoch"],
            "N": rows["accumulate"],
            "window_size": rows["window_size"],
            "log_every_n_steps": rows["log_every_n_steps"].astype(str),
            "logs at": [_logs_at(row) for row in rows.to_dict("records")],
            "reported/s": rows["reported_samples_per_s"],
            "true/s": rows["true_samples_per_s"],
            "ratio": [_ratio(row) for row in rows.to_dict("records")],
            "verdict": rows["verdict"],
        }
    )
    equal = told.groupby(["epoch", "N", "window_size", "logs at", "ratio", "verdict"], sort=False, as_index=False)
    found = equal.agg({"log_every_n_steps": ", ".join, "reported/s": "median", "true/s": "median"})
    for name in ("reported/s", "true/s"):
        found[name] = ["-" if pd.isna(value) else f"{value:.1f}" for value in found[name]]
    return found[HEADER].astype(str)


def _logs_at(row: Any) -> str:
    """The optimizer steps at which the monitor logged."""
    if not row["num_logs"]:
        return "-"
    every = row["log_every_n_steps"]
    multiples = [str(every * (i + 1)) for i in range(row["num_updates"] // every)]
    return "its multiples" if row["log_updates"] == ",".join(multiples) else str(row["log_updates"])


def _ratio(row: Any) -> str:
    """Reported divided by true, from the smallest to the largest."""
    if pd.isna(row["ratio_min"]):
        return "-"
    low, high = f"{row['ratio_min']:.3f}", f"{row['ratio_max']:.3f}"
    return low if low == high else f"{low} to {high}"


def markdown(rows: pd.DataFrame, about: dict[str, Any]) -> str:
    """The page: settings, findings, the meaning of the columns, and the table."""
    kinds = ", ".join(f"{epoch} ({title})" for epoch, title in EPOCHS.items() if (rows["epoch"] == epoch).any())
    columns = (
        f"epoch: the number of micro-batches NB in an epoch, {kinds}. "
        "reported/s: the median of the logged samples/s; true/s: over the whole training except its first window. "
        "Their quotient is not the ratio, since each ratio compares one log with the windows that it covers: where all "
        "logs fall on the same place of an epoch, the monitor can be right about those windows and wrong overall."
    )
    lines = [f"# ThroughputMonitor of Lightning {about['lightning']}", "", settings(about), ""]
    lines += [f"- {finding}" for finding in findings(rows)]
    return "\n".join([*lines, "", columns, "", *markdown_table(HEADER, summary(rows).itertuples(index=False))])


def settings(about: dict[str, Any]) -> str:
    """How it was measured, in one paragraph."""
    training = f"Training: {about['training']}. " if about["training"] else ""
    return (
        f"Lightning {about['lightning']}, torch {about['torch']}, Python {about['python']}. A micro-batch takes "
        f"{about['micro_batch_s']:g} s and an optimizer step {about['optimizer_s']:g} s more, on a virtual clock. "
        f"{training}"
        "ratio: the samples/s that the monitor logged, divided by those measured at the optimizer over the "
        f"accumulation windows that cover those of window_size; right: within {100 * about['tolerance']:g} % of 1."
    )


def findings(rows: pd.DataFrame) -> list[str]:
    """The findings in words, from the rows alone."""
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
