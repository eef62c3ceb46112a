"""A run's frames as files for other programs: CSV, parquet, and JSON of pytest-benchmark.

No cell of a CSV file can be taken for a formula by a spreadsheet. In pytest-benchmark's JSON a round is a trial:
statistics are over the medians of trials, since steps of one trial are no replicates. What is not comparable, has no
good trial or is of a virtual world is no benchmark, since readers of that file show a number without what must be said
with it; it is listed under ``left_out``, which they ignore.
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from bench.judge.frames import Frames
from bench.judge.gates import tolerance
from bench.judge.tables import rows_of
from bench.plan.cell import Cell
from bench.plan.columns import COLUMNS, FRAMES
from bench.words import plain

FORMULA = tuple("=+-@\uff1d\uff0b\uff0d\uff20\t\r\n")
"""What spreadsheets read as the beginning of a formula, in wide forms too, or skip to find one: OWASP, "CSV
Injection"."""


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Write a table without its index."""
    harmless(frame).to_csv(path, index=False, lineterminator="\n")


def harmless(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with text in one line, and with an apostrophe before what would be a formula; numbers as they are."""
    found = frame.copy()
    for name in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[name].dtype):
            texts = frame[name].astype("string")
            harmed = {text: shown for text in texts.dropna().unique() if (shown := guarded(plain(text))) != text}
            found[name] = texts.replace(harmed) if harmed else texts
    return found


def guarded(text: str) -> str:
    """The same text, with an apostrophe before it if it begins as a formula does."""
    return f"'{text}" if text.startswith(FORMULA) else text


COLUMNS_FILE = "columns.csv"
"""Beside the frames: of every column its dtype, unit and meaning."""


def write_csv(frames: Mapping[str, pd.DataFrame], folder: Path) -> list[Path]:
    """One file per frame, UTF-8 with a header, and COLUMNS_FILE; empty values are empty. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name in FRAMES:
        paths.append(folder / f"{name}.csv")
        write_frame(frames[name], paths[-1])
    paths.append(folder / COLUMNS_FILE)
    with paths[-1].open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("frame", "column", "dtype", "unit", "meaning"))
        for name, columns in COLUMNS.items():
            writer.writerows((name, key, about.dtype, about.unit, about.meaning) for key, about in columns.items())
    return paths


def write_parquet(frames: Mapping[str, pd.DataFrame], folder: Path, run_id: str) -> list[Path]:
    """One file per frame; each field's metadata has its ``unit`` and ``meaning``. Returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, about in FRAMES.items():
        table = pa.Table.from_pandas(frames[name], preserve_index=False)
        fields = [
            field.with_metadata({"unit": COLUMNS[name][field.name].unit, "meaning": COLUMNS[name][field.name].meaning})
            for field in table.schema
        ]
        notes = {**(table.schema.metadata or {}), b"run_id": run_id.encode(), b"rows": about.encode()}
        paths.append(folder / f"{name}.parquet")
        parquet.write_table(table.cast(pa.schema(fields, metadata=notes)), paths[-1])
    return paths


VERSION = "5.3.1"
"""The version of pytest-benchmark whose format this is."""
SPREAD = 1.5
"""Interquartile ranges from the quartiles to Tukey's fences."""
GATES = (
    "optimizer_steps_expected",
    "optimizer_steps_observed",
    "update_error",
    "update_scale",
    "max_loss_deviation",
    "accumulated_in",
)
"""Columns of the trials that the gates check."""
GPU = ("name", "memory_bytes", "driver")
"""Keys of a GPU."""
FACTS = tuple(itertools.dropwhile(lambda name: name != "num_ok", COLUMNS["cells"]))
"""Columns of the cells that stand beside the statistics."""


def document(frames: Frames) -> dict[str, Any]:
    """The JSON document."""
    manifest, cells = frames.manifest, frames.run.cells
    trials = {str(key): rows for key, rows in frames.trials.groupby("cell_id", sort=False)}
    benchmarks, left_out = [], []
    labels = [cell.label for cell in cells.values()]
    rows: Iterable[Any] = rows_of(frames.cells)
    for row in rows:
        cell = cells[row["cell_id"]]
        name = cell.label if labels.count(cell.label) == 1 else f"{cell.label} {row['cell_id']}"
        if not row["comparable"] or pd.isna(row["step_time_s"]) or not cell.world.times_communication:
            said = {"name": name, "fullname": _fullname(cell, name), "status": row["status"], "why": row["caveats"]}
            left_out.append(said | {"citation": row["citation"]})
            continue
        benchmarks.append(_benchmark(cell, name, row, trials[row["cell_id"]].sort_values("repeat")))
    return {
        "machine_info": _machine(manifest),
        "commit_info": _commit(manifest),
        "benchmarks": benchmarks,
        "datetime": str(manifest.get("finished") or manifest.get("started") or ""),
        "version": VERSION,
        "left_out": left_out,
    }


def _fullname(cell: Cell, name: str) -> str:
    """The same for equal cells of all runs and machines, so that they have one history."""
    return f"accumulation-bench/{cell.cell_id}::{name}"


def _benchmark(cell: Cell, name: str, row: Mapping[str, Any], trials: pd.DataFrame) -> dict[str, Any]:
    medians = trials.loc[trials["status"] == "ok", "step_time_s"].astype(float).tolist()
    seen = {gate: [_plain(value) for value in trials[gate].dropna().unique()] for gate in GATES}
    limits = tolerance(cell.precision, cell.workload, cell.model)
    return {
        "group": f"N={cell.accumulate} W={cell.world_size} {cell.precision}",
        "name": name,
        "fullname": _fullname(cell, name),
        "params": cell.to_dict(),
        "param": name,
        "extra_info": {
            "unit": "seconds per optimizer step",
            "round": "one trial: the median of its steps after warm-up, the maximum over ranks",
            "status": str(row["status"]),
            **{fact: _plain(row[fact]) for fact in FACTS},
            "gates": {
                "seen": seen,
                "limits": {"update_error": limits.update_error, "max_loss_deviation": limits.loss_deviation},
            },
        },
        "options": {
            "disable_gc": False,
            "timer": "bench.measure.taps",
            "min_rounds": len(medians),
            "max_time": None,
            "min_time": None,
            "warmup": cell.warmup_windows > 0,
        },
        "stats": stats(medians),
    }


def _plain(value: Any) -> Any:
    """A value of a frame as one of JSON."""
    if pd.isna(value):
        return None
    return value.item() if hasattr(value, "item") else value


def stats(values: Sequence[float]) -> dict[str, Any]:
    """What pytest-benchmark calculates from its rounds, at least one; quartiles are interpolated linearly."""
    data = sorted(values)
    low, _, high = statistics.quantiles(data, n=4, method="inclusive") if len(data) > 1 else data * 3
    mean, spread = statistics.mean(data), statistics.stdev(data) if len(data) > 1 else 0
    fences = low - SPREAD * (high - low), high + SPREAD * (high - low)
    beyond_deviation = sum(not mean - spread <= value <= mean + spread for value in data)
    beyond_fences = sum(not fences[0] <= value <= fences[1] for value in data)
    return {
        "min": data[0],
        "max": data[-1],
        "mean": mean,
        "stddev": spread,
        "rounds": len(data),
        "median": statistics.median(data),
        "iqr": high - low,
        "q1": low,
        "q3": high,
        "iqr_outliers": beyond_fences,
        "stddev_outliers": beyond_deviation,
        "outliers": f"{beyond_deviation};{beyond_fences}",
        "ld15iqr": next(value for value in data if value >= fences[0]),
        "hd15iqr": next(value for value in reversed(data) if value <= fences[1]),
        "ops": len(data) / sum(data),
        "total": sum(data),
        "data": list(values),
        "iterations": 1,
    }


def _machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a run stores of it: neither host name nor compiler."""
    machine = manifest.get("machine") or {}
    system, _, rest = str(machine.get("system") or "").partition(" ")
    release, _, architecture = rest.rpartition(" ")
    return {
        "node": "",
        "processor": architecture,
        "machine": architecture,
        "python_compiler": "",
        "python_implementation": "",
        "python_implementation_version": str(machine.get("python") or ""),
        "python_version": str(machine.get("python") or ""),
        "python_build": ["", ""],
        "release": release,
        "system": system,
        "cpu": {
            "brand_raw": str(machine.get("cpu") or ""),
            "count": machine.get("cores"),
            "arch_string_raw": architecture,
        },
        "gpus": [{key: gpu.get(key) for key in GPU} for gpu in machine.get("gpus") or []],
        "packages": dict(manifest.get("packages") or {}),
    }


def _commit(manifest: Mapping[str, Any]) -> dict[str, Any]:
    git = manifest.get("git") or {}
    return {
        "id": git.get("commit") or "unversioned",
        "time": None,
        "author_time": None,
        "dirty": not git.get("clean") if git.get("commit") else False,
        "project": "accumulation-bench",
        "branch": "(unknown)",
    }
