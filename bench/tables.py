"""From the journal to tidy pandas tables: SI units, counts start with ``num_``, failed trials stay in."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from bench.cell import Cell, Precision, Status
from bench.journal import Journal, read_manifest
from bench.probes.dispatch import NUMBERS, OTHER_WORK
from bench.probes.flops import peak_flops, products_rate
from bench.warmup import warmup

TRIAL_COLUMNS: dict[str, str] = {
    "run_id": "string",
    "cell_id": "string",
    "repeat": "Int64",
    "twin": "string",
    "slot": "Int64",
    "backend": "string",
    "framework": "string",
    "sharding": "string",
    "sync": "string",
    "accumulate": "Int64",
    "world_size": "Int64",
    "virtual_world_size": "Int64",
    "fake_tensors": "boolean",
    "shared_gpu": "boolean",
    "micro_batch_size": "Int64",
    "global_batch_size": "Int64",
    "sequence_length": "Int64",
    "workload": "string",
    "model": "string",
    "num_parameters": "Int64",
    "precision": "string",
    "bf16_as": "string",
    "accumulation_dtype": "string",
    "accumulated_in": "string",
    "corpus": "string",
    "optimizer": "string",
    "learning_rate": "Float64",
    "clip_norm": "Float64",
    "activation_checkpointing": "boolean",
    "compiled": "boolean",
    "seed": "Int64",
    "device": "string",
    "device_name": "string",
    "status": "string",
    "reason": "string",
    "num_warmup_steps": "Int64",
    "step_time_s": "Float64",
    "tokens_per_s": "Float64",
    "mfu": "Float64",
    "mfu_of_matmul": "Float64",
    "energy_j_per_step": "Float64",
    "energy_j_per_token": "Float64",
    "cpu_s_per_micro_batch": "Float64",
    "num_operators_per_micro_batch": "Float64",
    "num_launches_per_micro_batch": "Float64",
    "other_work": "string",
    "collective_s": "Float64",
    "exposed_s": "Float64",
    "peak_memory_bytes": "Int64",
    "peak_memory_source": "string",
    "num_micro_batches": "Int64",
    "optimizer_steps_expected": "Int64",
    "optimizer_steps_observed": "Int64",
    "optimizer_steps_reported": "Int64",
    "optimizer_steps_reported_by": "string",
    "ranks_agree": "boolean",
    "micro_batches_per_update": "string",
    "final_loss": "Float64",
    "max_loss_deviation": "Float64",
    "update_error": "Float64",
    "update_scale": "Float64",
    "update_residual": "Float64",
    "gradient_norm": "Float64",
    "unclipped_error": "Float64",
    "unclipped_scale": "Float64",
    "entropy_floor": "Float64",
    "wall_s": "Float64",
    "training_s": "Float64",
    "overhead_s": "Float64",
    "num_passes": "Int64",
    "num_cpus": "Int64",
    "foreign_cores": "Float64",
    "stolen_cores": "Float64",
    "sm_clock_mhz": "Float64",
    "power_w": "Float64",
    "temperature_c": "Float64",
    "clock_slowdowns": "string",
    "foreign_gpu_processes": "Int64",
}
"""Columns of trials.parquet with their dtypes. ``repeat`` is also the block, and ``slot`` the place in the order in
which trials ran. Step time is the median of the steps after the first ``num_warmup_steps`` of the maximum over ranks;
memory the maximum over ranks; ``update_*`` and the CPU's memory are measured once per cell and repeated on its good
trials; ``gradient_norm`` is that of the update pass before clipping, and ``unclipped_*`` the update's error and scale
without clipping, for cells that clip; ``micro_batches_per_update`` lists the different numbers that were seen;
``bf16_as`` says how a bf16 cell computes; gradients are to be summed in ``accumulation_dtype``, and were found to be in
``accumulated_in``; ``twin`` is the label of a cell that is another one once more; the cores that other programs used
and that the hypervisor took are means over the time pass, the SM clock is the lowest GPU's median over the timed steps,
power and energy are of all GPUs in use, and slowdowns those in a tenth of the samples or more; ``collective_s`` are the
seconds of one window in which NCCL's kernels ran, and ``exposed_s`` those of them in which nothing else did, measured
once per cell, as are ``*_per_micro_batch``, those of one window of the rank that has most, divided by N, so with the
optimizer step's share, and ``other_work``, the first operator of forward or backward that the plain model does not run
as often, empty text if there is none; MFU is model FLOPs (PaLM, arXiv:2204.02311, appendix B) per second over the peak
of the datasheet, and over the rate of matrix products that ``run.json`` has, of all ranks; all of these, ``energy_*``
and ``virtual_world_size`` are empty where they were not measured, and whatever is a time of training, a power or an
energy where ranks shared a GPU (``shared_gpu``)."""

CHILD_COLUMNS: dict[str, dict[str, str]] = {
    "steps": {"step": "Int64", "seconds": "Float64", "kept": "boolean"},
    "losses": {"step": "Int64", "loss": "Float64"},
    "collectives": {
        "op": "string",
        "dtype": "string",
        "calls": "Int64",
        "payload_bytes": "Int64",
        "expected_calls": "Int64",
        "expected_payload_bytes": "Int64",
    },
    "memory": {"category": "string", "bytes": "Int64", "expected_bytes": "Int64"},
}
"""Columns of the other tables after ``cell_id`` and ``repeat``. Steps and losses count from 0 at the first update;
steps that are not ``kept`` were found to be warm-up still, though the cell's warm-up windows were over;
``expected_*`` are filled by ``bench.analysis.expected``."""


@dataclass
class Tables:
    """The tables of one run, by name; each is also a parquet file in the run's folder."""

    trials: pd.DataFrame
    steps: pd.DataFrame
    losses: pd.DataFrame
    collectives: pd.DataFrame
    memory: pd.DataFrame

    def write(self, folder: Path) -> list[Path]:
        """Write each table as parquet; returns the paths."""
        paths = []
        for field in fields(self):
            path = folder / f"{field.name}.parquet"
            draft = path.with_suffix(".tmp")
            getattr(self, field.name).to_parquet(draft, index=False)
            draft.replace(path)
            paths.append(path)
        return paths


def load(folder: Path) -> Tables:
    """The tables of a run's folder, built from its journal; the gates have not judged them yet.

    Raises InputError if the folder holds no run.
    """
    manifest = read_manifest(folder)
    return build(Journal(folder).read(), manifest)


def build(records: list[dict[str, Any]], manifest: dict[str, Any]) -> Tables:
    """The tables of the journal's records. Of several records of one cell and repeat, the last counts."""
    latest = {(record["cell_id"], record["repeat"]): record for record in records}
    once: dict[tuple[str, str], Any] = {}
    for record in latest.values():
        for name in ("update", "memory", "accumulation", "dispatch", "exposure"):
            if record.get(name):
                once.setdefault((record["cell_id"], name), record[name])
    trials = [_trial_row(record, manifest, once) for record in latest.values()]
    children: dict[str, list[dict[str, Any]]] = {name: [] for name in CHILD_COLUMNS}
    for record in latest.values():
        key = {"cell_id": record["cell_id"], "repeat": record["repeat"]}
        for name, rows in _child_rows(record).items():
            children[name].extend({**key, **row} for row in rows)
    frames = {
        name: _frame(children[name], {"cell_id": "string", "repeat": "Int64", **columns})
        for name, columns in CHILD_COLUMNS.items()
    }
    return Tables(trials=_frame(trials, TRIAL_COLUMNS), **frames)


def _frame(rows: list[dict[str, Any]], columns: dict[str, str]) -> pd.DataFrame:
    """A frame with exactly these columns and dtypes, empty values as NA."""
    return pd.DataFrame(rows, columns=list(columns)).astype(columns)


def _trial_row(record: dict[str, Any], manifest: dict[str, Any], once: dict[tuple[str, str], Any]) -> dict[str, Any]:
    cell = Cell.from_dict(record["cell"])
    row: dict[str, Any] = {name: record["cell"].get(name) for name in TRIAL_COLUMNS if name in record["cell"]}
    described = manifest["backends"].get(cell.backend, {})
    row |= {name: described.get(name) for name in ("framework", "sharding", "sync")}
    row |= {
        name: record.get(name)
        for name in (
            "cell_id",
            "repeat",
            "slot",
            "status",
            "reason",
            "num_parameters",
            "entropy_floor",
            "device_name",
            "wall_s",
            "training_s",
        )
    }
    row["run_id"] = manifest["run_id"]
    # Older records have none of these.
    row |= {name: getattr(cell, name) for name in ("clip_norm", "twin", "activation_checkpointing", "compiled")}
    row["virtual_world_size"] = cell.world_size if cell.virtual else None
    row["micro_batch_size"] = cell.micro_batch_size
    row |= {"fake_tensors": cell.fake_tensors, "shared_gpu": cell.shared_gpu}
    row["optimizer_steps_expected"] = None if cell.fake_tensors else cell.windows
    row["num_passes"] = len(record.get("passes", ()))
    if record.get("training_s") is not None:
        row["overhead_s"] = record["wall_s"] - record["training_s"]
    if cell.precision is Precision.BF16:
        row["bf16_as"] = described.get("bf16_as")
    good = record["status"] == Status.OK
    update = once.get((record["cell_id"], "update"))
    if update and good:
        row |= {f"update_{name}": update[name] for name in ("error", "scale", "residual")}
        row |= {name: update.get(name) for name in ("gradient_norm", "unclipped_error", "unclipped_scale")}
    accumulation = once.get((record["cell_id"], "accumulation"))
    if accumulation and good:
        row["accumulated_in"] = accumulation["dtype"]
    dispatch = once.get((record["cell_id"], "dispatch"))
    if dispatch and good:
        row |= {f"{name}_per_micro_batch": _share(dispatch[name], cell.accumulate) for name in NUMBERS}
        row[OTHER_WORK] = dispatch.get(OTHER_WORK)
        if cell.shared_gpu:
            row["cpu_s_per_micro_batch"] = None
    exposure = once.get((record["cell_id"], "exposure"))
    if exposure and good:
        row |= {name: exposure[name] for name in ("collective_s", "exposed_s")}
    memory = once.get((record["cell_id"], "memory"))
    if memory and "peak" in memory and good:
        row |= {"peak_memory_bytes": memory["peak"], "peak_memory_source": "tracked tensors"}
    timed = record.get("time")
    if timed:
        row |= _timed_columns(record, cell, timed, manifest)
    return row


def step_time(cell: Cell, timed: Mapping[str, Any] | None) -> float | None:
    """A trial's step time: the median of its settled steps in seconds, from its record of the time pass, if any."""
    if not timed or not timed["step_seconds"] or cell.shared_gpu:
        return None
    return float(statistics.median(timed["step_seconds"][_unsettled(timed) :]))


def _share(value: float | None, parts: int) -> float | None:
    """One of so many equal parts of a number, if there is one."""
    return None if value is None else value / parts


def _timed_columns(
    record: dict[str, Any], cell: Cell, timed: dict[str, Any], manifest: dict[str, Any]
) -> dict[str, Any]:
    """The columns that come from the time pass."""
    row: dict[str, Any] = {
        "num_micro_batches": timed["num_micro_batches"],
        "optimizer_steps_observed": timed["num_updates"],
        "ranks_agree": timed["ranks_agree"],
        "micro_batches_per_update": ",".join(map(str, timed["micro_batches_per_update"])),
        "final_loss": timed["losses"][-1] if timed["losses"] else None,
    }
    if timed["reported"]:
        row["optimizer_steps_reported_by"], row["optimizer_steps_reported"] = next(iter(timed["reported"].items()))
    row |= {name: (timed.get("host") or {}).get(name) for name in ("num_cpus", "foreign_cores", "stolen_cores")}
    if record.get("gpus") and not cell.shared_gpu:
        row |= _gpu_columns(record["gpus"]["gpus"], len(timed["step_seconds"]), record["tokens_per_step"])
    if (seconds := step_time(cell, timed)) is not None:
        row["num_warmup_steps"] = cell.warmup_windows + _unsettled(timed)
        row["step_time_s"] = seconds
    if "step_time_s" in row and not cell.virtual:  # a virtual world's step time is that of computing alone
        row["tokens_per_s"] = record["tokens_per_step"] / row["step_time_s"]
        if record["flops_per_step"]:
            rate = record["flops_per_step"] / row["step_time_s"]
            peak = peak_flops(record["device_name"], cell.precision)
            products = products_rate(manifest.get("matmul") or (), cell.world_size, cell.precision)
            row["mfu"] = rate / (peak * cell.world_size) if peak else None
            row["mfu_of_matmul"] = rate / products if products else None
    if timed.get("cuda_memory"):
        row |= {
            "peak_memory_bytes": timed["cuda_memory"]["allocated"],
            "peak_memory_source": "CUDA allocator, allocated",
        }
    return row


def _gpu_columns(gpus: list[dict[str, Any]], num_steps: int, tokens_per_step: float) -> dict[str, Any]:
    """Of what NVML saw: the slowest clock, the hottest GPU, the power and energy of all; None if one does not tell."""

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
    """How many of the timed steps are warm-up still. Older records do not say; it follows from the steps."""
    if "num_warmup" in timed:
        return int(timed["num_warmup"]) - len(timed["warmup_seconds"]) - 1
    return warmup(timed["step_seconds"])


def _child_rows(record: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of the other tables."""
    timed = record.get("time") or {}
    first = record["cell"]["warmup_windows"]
    settled = first + (_unsettled(timed) if timed else 0)
    memory = {f"tracked_{name}": size for name, size in (record.get("memory") or {}).items() if "retries" not in name}
    cuda = timed.get("cuda_memory") or {}
    all_seconds = [] if record["cell"].get("shared_gpu") else timed.get("step_seconds", ())
    memory |= {f"cuda_{name}": cuda[name] for name in ("allocated", "active", "reserved") if name in cuda}
    return {
        "steps": [
            {"step": step, "seconds": seconds, "kept": step >= settled}
            for step, seconds in enumerate(all_seconds, start=first)
        ],
        "losses": [{"step": i, "loss": loss} for i, loss in enumerate(timed.get("losses", ()))],
        "collectives": record.get("collectives") or [],
        "memory": [{"category": name, "bytes": size} for name, size in memory.items()],
    }
