"""Builds tidy pandas tables from the journal: SI units, counts start with ``num_``, failed trials are included."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from bench.files import replacing
from bench.judge.columns import COLUMNS, dtypes
from bench.measure.dispatch import NUMBERS
from bench.plan.cell import Cell, Precision, Status
from bench.plan.world import World
from bench.run.links import all_reduce_rate, between
from bench.run.machine import peak_flops

EXPOSURE = ("collective_s", "exposed_s")
"""Columns of the exposure pass, which are times."""
ONCE = ("update", "memory", "accumulation", "dispatch", "exposure")
"""Passes that one trial of a cell measures for all."""
SOURCES = {name: column for name, column in COLUMNS["trials"].items() if column.source}


@dataclass
class Tables:
    """The tables of one run, by name (``NAMES``); each is also a parquet file in the run's folder."""

    trials: pd.DataFrame
    steps: pd.DataFrame
    losses: pd.DataFrame
    collectives: pd.DataFrame
    memory: pd.DataFrame
    failures: Mapping[tuple[str, int], tuple[str, ...]] = field(default_factory=dict)
    """What the gates found of each trial that failed one, by cell_id and repeat."""

    def write(self, folder: Path) -> list[Path]:
        """Write each table as a parquet file, atomically; return the paths."""
        paths = []
        for name in NAMES:
            path = folder / f"{name}.parquet"
            with replacing(path) as draft:
                getattr(self, name).to_parquet(draft, index=False)
            paths.append(path)
        return paths


NAMES = ("trials", "steps", "losses", "collectives", "memory")
"""Names of the tables that are built from the journal."""


def build(records: list[dict[str, Any]], manifest: dict[str, Any]) -> Tables:
    """The tables of the journal's records, not yet judged. Of several records of a cell and repeat, the last counts."""
    latest = {(record["cell_id"], record["repeat"]): record for record in records}
    once: dict[str, dict[str, Any]] = {}
    for (cell_id, _), record in latest.items():
        known = once.setdefault(cell_id, dict.fromkeys(ONCE))
        known |= {name: record[name] for name in ONCE if not known[name] and record.get(name)}
    cells = {record["cell_id"]: Cell.from_dict(record["cell"]) for record in latest.values()}
    trials = [_trial_row(record, cells[cell_id], manifest, once[cell_id]) for (cell_id, _), record in latest.items()]
    children: dict[str, list[dict[str, Any]]] = {name: [] for name in NAMES[1:]}
    for (cell_id, repeat), record in latest.items():
        for name, rows in _child_rows(record, cells[cell_id]).items():
            children[name].extend({"cell_id": cell_id, "repeat": repeat, **row} for row in rows)
    frames: dict[str, Any] = {name: frame_of(name, rows) for name, rows in ({"trials": trials} | children).items()}
    return Tables(**frames)


def frame_of(name: str, rows: pd.DataFrame | Sequence[Mapping[Any, Any]]) -> pd.DataFrame:
    """A frame with the columns and dtypes of the named table; missing values are NA."""
    columns = dtypes(name)
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def good_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """The ok trials of each cell, or all of a cell that has none, which is shown with its status."""
    fine = trials["status"] == Status.OK
    return trials[fine | ~fine.groupby(trials["cell_id"]).transform("any")]


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a frame as plain values, by column; missing values are None. ``to_dict`` takes four times as long."""
    names = list(map(str, frame))
    columns = (frame[name].to_numpy(object, na_value=None) for name in names)  # type: ignore[call-overload]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _trial_row(record: dict[str, Any], cell: Cell, manifest: dict[str, Any], once: Mapping[str, Any]) -> dict[str, Any]:
    """A row of the trials table; what is measured once per cell stands on all of its good trials."""
    good = record["status"] == Status.OK
    described = manifest["backends"].get(cell.backend, {})
    facts = {**record, **(once if good else dict.fromkeys(ONCE))}
    facts |= {"run_id": manifest["run_id"], "described": described}
    row = cell.to_dict() | {name: _at(facts, column.source) for name, column in SOURCES.items()}
    row["virtual_world_size"] = None if cell.world.has_all_ranks else cell.world_size
    row["micro_batch_size"] = cell.micro_batch_size
    row["optimizer_steps_expected"] = cell.windows if cell.world.computes else None
    row["num_passes"] = len(record.get("passes", ()))
    if record.get("training_s") is not None:
        row["overhead_s"] = record["wall_s"] - record["training_s"]
    if cell.precision is Precision.BF16:
        row["bf16_as"] = described.get("bf16_as")
    for name in NUMBERS:
        cost = _at(facts, f"dispatch.{name}")
        is_valid = cost is not None and (cell.world.is_timed or name != "cpu_s")
        row[f"{name}_per_micro_batch"] = cost / cell.accumulate if is_valid else None
    if not cell.world.is_timed:
        row |= dict.fromkeys(EXPOSURE)
    if facts["memory"] and "peak" in facts["memory"]:
        row |= {"peak_memory_bytes": facts["memory"]["peak"], "peak_memory_source": "tracked tensors"}
    if record.get("time"):
        row |= _timed_columns(record, cell, record["time"], manifest)
    return row


def _at(facts: Mapping[str, Any], path: str) -> Any:
    """The value at a path of keys; None if one is missing or empty."""
    value: Any = facts
    for key in path.split("."):
        value = None if value is None else value.get(key)
    return value


def world_of(trial: Any) -> World:
    """The world of a row of the trials table."""
    virtual = pd.notna(trial["virtual_world_size"])
    return World.of(virtual=virtual, fake_tensors=trial["fake_tensors"] is True, shared_gpu=trial["shared_gpu"] is True)


def step_time(cell: Cell, timed: Mapping[str, Any] | None) -> float | None:
    """The median of a trial's steps after warm-up in seconds, from its time pass; None if it has no such times."""
    if not timed or not timed["step_seconds"] or not cell.world.is_timed:
        return None
    return float(statistics.median(timed["step_seconds"][_unsettled(timed) :]))


def _timed_columns(
    record: dict[str, Any], cell: Cell, timed: dict[str, Any], manifest: dict[str, Any]
) -> dict[str, Any]:
    row: dict[str, Any] = {
        "micro_batches_per_update": ",".join(map(str, timed["micro_batches_per_update"])),
        "final_loss": timed["losses"][-1] if timed["losses"] else None,
    }
    if timed["reported"]:
        row["optimizer_steps_reported_by"], row["optimizer_steps_reported"] = next(iter(timed["reported"].items()))
    if record.get("gpus") and cell.world.is_timed:
        row |= _gpu_columns(record["gpus"]["gpus"], len(timed["step_seconds"]), record["tokens_per_step"])
    if (seconds := step_time(cell, timed)) is not None:
        row["num_warmup_steps"] = cell.warmup_windows + _unsettled(timed)
        row["step_time_s"] = seconds
    if "step_time_s" in row and cell.world.times_communication:
        row["tokens_per_s"] = record["tokens_per_step"] / row["step_time_s"]
        ranks = between(manifest, cell.world_size, cell.num_nodes)
        row["link_bytes_per_s"] = all_reduce_rate(ranks)
        if record["flops_per_step"]:
            rate = record["flops_per_step"] / row["step_time_s"]
            peak = peak_flops(record["device_name"], cell.precision)
            products = ranks and ranks["flops_per_s"].get(cell.precision)  # of each rank
            row["mfu"] = rate / (peak * cell.world_size) if peak else None
            row["mfu_of_matmul"] = rate / math.fsum(products) if products else None
    if timed.get("cuda_memory"):
        row |= {
            "peak_memory_bytes": timed["cuda_memory"]["allocated"],
            "peak_memory_source": "CUDA allocator, allocated",
        }
    return row


def _gpu_columns(gpus: list[dict[str, Any]], num_steps: int, tokens_per_step: float) -> dict[str, Any]:
    """NVML's values over all GPUs: lowest clock, top temperature, total power and energy; None if any is missing."""

    def over(name: str, join: Callable[[list[Any]], Any]) -> Any:
        values = [gpu[name] for gpu in gpus]
        return None if not values or None in values else join(values)

    shares: dict[str, float] = {}
    for gpu in gpus:
        for name in gpu["slowdowns"] or ():
            shares[name] = max(shares.get(name, 0.0), gpu["throttle"][name])
    energy = over("energy_j", sum)
    per_step = energy / num_steps if energy is not None and num_steps else None
    return {
        "sm_clock_mhz": over("sm_clock_mhz", min),
        "power_w": over("power_w", sum),
        "temperature_c": over("temperature_c", max),
        "energy_j_per_step": per_step,
        "energy_j_per_token": per_step / tokens_per_step if per_step is not None and tokens_per_step else None,
        "clock_slowdowns": over(
            "slowdowns", lambda _: ",".join(name for name in sorted(shares) if shares[name] >= 0.1)
        ),
        "foreign_gpu_processes": over("other_processes", sum),
    }


def _unsettled(timed: Mapping[str, Any]) -> int:
    """Number of timed steps that belong to the warm-up."""
    return int(timed["num_warmup"]) - len(timed["warmup_seconds"]) - 1


def _child_rows(record: dict[str, Any], cell: Cell) -> dict[str, list[dict[str, Any]]]:
    """The rows of all tables but the trials."""
    timed = record.get("time") or {}
    first = cell.warmup_windows
    settled = first + (_unsettled(timed) if timed else 0)
    memory = {f"tracked_{name}": size for name, size in (record.get("memory") or {}).items() if "retries" not in name}
    cuda = timed.get("cuda_memory") or {}
    memory |= {f"cuda_{name}": cuda[name] for name in ("allocated", "active", "reserved") if name in cuda}
    return {
        "steps": [
            {"step": step, "seconds": seconds, "kept": step >= settled}
            for step, seconds in enumerate(timed.get("step_seconds", ()) if cell.world.is_timed else (), start=first)
        ],
        "losses": [{"step": i, "loss": loss} for i, loss in enumerate(timed.get("losses", ()))],
        "collectives": record.get("collectives") or [],
        "memory": [{"category": name, "bytes": size} for name, size in memory.items()],
    }
