"""A run as JSON of pytest-benchmark, for ``pytest-benchmark compare`` and for dashboards that read that.

A round is a trial: statistics are over the medians of trials, since steps of one trial are no replicates. What is not
comparable, has no good trial or is of a virtual world is no benchmark, since those readers show a number without what
must be said with it. It is listed under ``left_out``, which they ignore.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from bench.analysis.frames import Frames
from bench.analysis.gates import tolerance
from bench.cell import Cell

VERSION = "5.3.1"
"""Of the pytest-benchmark whose format this is."""
SPREAD = 1.5
"""Of Tukey's fences, in interquartile ranges."""
GATES = (
    "optimizer_steps_expected",
    "optimizer_steps_observed",
    "update_error",
    "update_scale",
    "max_loss_deviation",
    "accumulated_in",
)
"""Columns of the trials that gates look at."""
GPU = ("name", "memory_bytes", "driver")
"""What is told of a GPU."""
FACTS = (
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "num_ok",
    "num_trials",
    "tokens_per_s",
    "peak_memory_bytes",
    "peak_memory_source",
    "baseline",
    "ratio",
    "ratio_low",
    "ratio_high",
    "verdict",
    "verdict_reason",
    "caveats",
    "citation",
)
"""Columns of the cells that are told beside the statistics."""


def document(frames: Frames) -> dict[str, Any]:
    """The JSON document."""
    manifest, cells = frames.manifest, frames.run.cells
    trials = {str(key): rows for key, rows in frames.trials.groupby("cell_id", sort=False)}
    benchmarks, left_out = [], []
    labels = [cell.label for cell in cells.values()]
    rows: Iterable[Any] = frames.cells.to_dict("records")
    for row in rows:
        cell = cells[row["cell_id"]]
        name = cell.label if labels.count(cell.label) == 1 else f"{cell.label} {row['cell_id']}"
        if not row["comparable"] or pd.isna(row["step_time_s"]) or cell.virtual:
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
    """Equal for equal cells of all runs and machines, so that their histories are."""
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
            "timer": "bench.probes.clock",
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
    """What pytest-benchmark calculates from its rounds; at least one value."""
    data = sorted(values)
    low, high = _lower_quartile(data), _lower_quartile(data[::-1])
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


def _lower_quartile(data: Sequence[float]) -> float:
    """As pytest-benchmark has it, of sorted values; of reversed ones the upper quartile.

    Of evenly many, the median of the first half; of oddly many, between two values, a quarter from one of them.
    """
    n, k = len(data), len(data) // 4
    if n == 1:
        return data[0]
    if n % 2 == 0:
        return statistics.median(data[: n // 2])
    return 0.25 * data[k - 1] + 0.75 * data[k] if n % 4 == 1 else 0.75 * data[k] + 0.25 * data[k + 1]


def _machine(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """As far as a run stores it: no host name, and no compiler."""
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
