"""What every column of a run's frames is: dtype, unit and meaning. Empty values are NA."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a frame."""

    dtype: str
    """As pandas names it: its nullable ones."""
    unit: str
    """Empty for names and for what has none."""
    meaning: str


FRAMES = {
    "cells": "one row per cell: its step time with the interval, and its verdict against the baseline",
    "trials": "one row per trial, those that failed too",
    "steps": "one row per trial and timed optimizer step",
    "losses": "one row per trial and optimizer step",
    "collectives": "one row per trial, operation and dtype: counted between two updates",
    "memory": "one row per trial and category",
    "ratios": "one row per cell and baseline: the ratio of step times and what is said of it",
}
"""The frames in order, and what a row of each is."""

_KEY = {
    "cell_id": Column("string", "", "names the cell for ever: a hash of its content"),
    "repeat": Column("Int64", "", "number of the trial of its cell, and of the block in which it ran"),
}

_TRIALS: dict[str, Column] = {
    "run_id": Column("string", "", "names the run"),
    "cell_id": _KEY["cell_id"],
    "repeat": _KEY["repeat"],
    "twin": Column("string", "", "label of a cell that is another one once more (the A/A pair); empty for all others"),
    "slot": Column("Int64", "", "place in the order in which trials ran"),
    "backend": Column("string", "", "one way to accumulate gradients"),
    "framework": Column("string", "", "whose it is"),
    "sharding": Column("string", "", "what is split across ranks: none, optimizer, grads, params"),
    "sync": Column("string", "", "when gradients are reduced: none, eager, deferred"),
    "accumulate": Column("Int64", "micro-batches", "N: per window and rank"),
    "world_size": Column("Int64", "ranks", "W"),
    "virtual_world_size": Column("Int64", "ranks", "W of a virtual world; NA for a real one"),
    "fake_tensors": Column("boolean", "", "whether tensors have shapes and no values"),
    "shared_gpu": Column("boolean", "", "whether ranks shared a GPU, over gloo; nothing is timed then"),
    "micro_batch_size": Column("Int64", "samples", "that one forward sees on one rank"),
    "global_batch_size": Column("Int64", "samples", "per optimizer step over all ranks"),
    "sequence_length": Column("Int64", "tokens", "per sample"),
    "workload": Column("string", "", "what is trained"),
    "model": Column("string", "", "its size"),
    "num_parameters": Column("Int64", "parameters", "of the model"),
    "precision": Column("string", "", "dtype of forward and backward"),
    "bf16_as": Column("string", "", "how a bf16 cell computes"),
    "accumulation_dtype": Column("string", "", "in which gradients are to be summed"),
    "accumulated_in": Column("string", "", "in which they were found to be summed"),
    "corpus": Column("string", "", "where the tokens come from"),
    "optimizer": Column("string", "", "of the time pass"),
    "learning_rate": Column("Float64", "", "of the optimizer"),
    "clip_norm": Column("Float64", "L2 norm", "largest that a gradient may have; 0 for no clipping"),
    "activation_checkpointing": Column(
        "boolean", "", "whether blocks keep their input alone, and compute again in the backward"
    ),
    "compiled": Column("boolean", "", "whether blocks are compiled by torch.compile"),
    "seed": Column("Int64", "", "of the initial weights and of the tokens"),
    "device": Column("string", "", "cpu or cuda"),
    "device_name": Column("string", "", "of the first rank's device"),
    "status": Column(
        "string", "", "ok, or how it ended: oom, timeout, hang, crashed, unsupported, invalid, interrupted"
    ),
    "reason": Column("string", "", "why the status is not ok"),
    "num_warmup_steps": Column("Int64", "steps", "left out at the beginning"),
    "step_time_s": Column("Float64", "s", "median of the steps after warm-up, each the maximum over ranks"),
    "tokens_per_s": Column("Float64", "tokens/s", "over all ranks"),
    "mfu": Column("Float64", "1", "model FLOPs utilization against the datasheet's peak"),
    "mfu_of_matmul": Column(
        "Float64", "1", "the same against the rate of matrix products that was measured in the run"
    ),
    "energy_j_per_step": Column("Float64", "J", "of the GPUs that were used, per optimizer step"),
    "energy_j_per_token": Column("Float64", "J", "the same per predicted token"),
    "cpu_s_per_micro_batch": Column(
        "Float64", "s", "CPU time of one rank's process, the optimizer step's share included"
    ),
    "num_operators_per_micro_batch": Column(
        "Float64", "operators", "that torch dispatched, the optimizer step's share included"
    ),
    "num_launches_per_micro_batch": Column(
        "Float64", "launches", "of CUDA kernels, the optimizer step's share included"
    ),
    "other_work": Column(
        "string", "", "first operator of forward or backward that is not the plain model's; empty text if all are"
    ),
    "collective_s": Column("Float64", "s", "of one window in which NCCL's kernels ran"),
    "exposed_s": Column("Float64", "s", "of these in which nothing else ran"),
    "peak_memory_bytes": Column("Int64", "B", "maximum over ranks"),
    "peak_memory_source": Column("string", "", "who counted peak_memory_bytes"),
    "num_micro_batches": Column("Int64", "micro-batches", "used by one rank in the time pass"),
    "optimizer_steps_expected": Column("Int64", "steps", "that the data asks for"),
    "optimizer_steps_observed": Column("Int64", "steps", "seen at the inner optimizer"),
    "optimizer_steps_reported": Column("Int64", "steps", "that the framework says it took"),
    "optimizer_steps_reported_by": Column("string", "", "which of its counters says so"),
    "ranks_agree": Column("boolean", "", "whether all ranks took equally many steps and micro-batches"),
    "micro_batches_per_update": Column("string", "micro-batches", "the different numbers that were seen, with commas"),
    "final_loss": Column("Float64", "nat/token", "of the last step"),
    "max_loss_deviation": Column("Float64", "nat/token", "largest difference from the losses that the reference has"),
    "update_error": Column("Float64", "1", "relative L2 error of the update of one SGD window"),
    "update_scale": Column("Float64", "1", "how many times the reference's update it is"),
    "update_residual": Column("Float64", "1", "share of it that no scale explains"),
    "gradient_norm": Column("Float64", "L2 norm", "of the update pass, before clipping"),
    "unclipped_error": Column("Float64", "1", "update_error without clipping, for cells that clip"),
    "unclipped_scale": Column("Float64", "1", "update_scale without clipping, for cells that clip"),
    "entropy_floor": Column("Float64", "nat/token", "loss that no model of the corpus can go below"),
    "wall_s": Column("Float64", "s", "of the whole trial"),
    "training_s": Column("Float64", "s", "of its passes' training"),
    "overhead_s": Column("Float64", "s", "wall_s less training_s"),
    "num_passes": Column("Int64", "passes", "of the trial"),
    "num_cpus": Column("Int64", "CPUs", "that the machine has"),
    "foreign_cores": Column("Float64", "CPUs", "that other programs used, on average over the time pass"),
    "stolen_cores": Column("Float64", "CPUs", "that the hypervisor took"),
    "sm_clock_mhz": Column("Float64", "MHz", "lowest GPU's median over the timed steps"),
    "power_w": Column("Float64", "W", "of the GPUs that were used"),
    "temperature_c": Column("Float64", "degC", "of the hottest GPU"),
    "clock_slowdowns": Column(
        "string", "", "reasons that held clocks down in a tenth of the samples or more, with commas"
    ),
    "foreign_gpu_processes": Column("Int64", "processes", "on the GPUs that were not the bench's"),
}

_CELLS: dict[str, Column] = {
    "run_id": _TRIALS["run_id"],
    "cell_id": _TRIALS["cell_id"],
    "label": Column("string", "", "a short name for people"),
    **{
        name: _TRIALS[name]
        for name in (
            "twin",
            "backend",
            "framework",
            "sharding",
            "sync",
            "accumulate",
            "world_size",
            "micro_batch_size",
            "global_batch_size",
            "sequence_length",
            "workload",
            "model",
            "precision",
            "optimizer",
            "clip_norm",
            "activation_checkpointing",
            "compiled",
            "device",
        )
    },
    "status": Column("string", "", "that of the first trial that is not ok; ok if all are"),
    "reason": _TRIALS["reason"],
    "comparable": Column("boolean", "", "whether numbers of the cell may be held against others'"),
    "num_ok": Column("Int64", "trials", "that the numbers are of"),
    "num_trials": Column("Int64", "trials", "that were run"),
    "step_time_s": Column("Float64", "s", "20 % trimmed geometric mean of the trials' medians; NA if not comparable"),
    "step_time_low_s": Column("Float64", "s", "lower end of its 95 % interval over trials"),
    "step_time_high_s": Column("Float64", "s", "upper end"),
    "tokens_per_s": Column("Float64", "tokens/s", "at step_time_s"),
    "peak_memory_bytes": Column("Int64", "B", "largest of the good trials"),
    "peak_memory_source": _TRIALS["peak_memory_source"],
    "baseline": Column("string", "", "backend that the cell is compared with; NA if no cell of it is alike"),
    "ratio": Column("Float64", "1", "step time over the baseline's: above 1 the cell takes longer"),
    "ratio_low": Column("Float64", "1", "lower end of its 95 % interval"),
    "ratio_high": Column("Float64", "1", "upper end"),
    "verdict": Column("string", "", "faster, slower, same, ambiguous or not comparable"),
    "verdict_reason": Column("string", "", "why"),
    "caveats": Column("string", "", "what must be said with the numbers, with semicolons"),
    "citation": Column("string", "", "id to cite it by"),
}

COLUMNS: dict[str, dict[str, Column]] = {
    "cells": _CELLS,
    "trials": _TRIALS,
    "steps": {
        **_KEY,
        "step": Column("Int64", "", "number of the optimizer step, from 0 at the first"),
        "seconds": Column("Float64", "s", "from the update before to this one, maximum over ranks"),
        "kept": Column("boolean", "", "False for what was found to be warm-up still"),
    },
    "losses": {
        **_KEY,
        "step": Column("Int64", "", "number of the optimizer step, from 0 at the first"),
        "loss": Column("Float64", "nat/token", "mean over ranks and micro-batches"),
    },
    "collectives": {
        **_KEY,
        "op": Column("string", "", "collective operation"),
        "dtype": Column("string", "", "of the payload"),
        "calls": Column("Int64", "calls", "by rank 0 between two updates"),
        "payload_bytes": Column("Int64", "B", "given to them"),
        "expected_calls": Column("Int64", "calls", "by formula; NA where there is none"),
        "expected_payload_bytes": Column("Int64", "B", "by formula; NA where there is none"),
    },
    "memory": {
        **_KEY,
        "category": Column("string", "", "what holds it, and who counted"),
        "bytes": Column("Int64", "B", "of the rank that has most"),
        "expected_bytes": Column("Int64", "B", "by formula; NA where there is none"),
    },
    "ratios": {
        "cell": Column("string", "", "name of the pair"),
        "group": Column("string", "", "heading that it stands under"),
        "cell_id_a": Column("string", "", "the baseline's cell"),
        "cell_id_b": Column("string", "", "the cell that is compared with it"),
        "backend_a": Column("string", "", "the baseline"),
        "backend_b": Column("string", "", "the backend that is compared with it"),
        "verdict": Column("string", "", "on b: faster, slower, same, ambiguous or not comparable"),
        "reason": Column("string", "", "why"),
        "detail": Column("string", "", "the same with its numbers"),
        "next": Column("string", "", "what to do"),
        "forced": Column("boolean", "", "whether numbers are given although the two are not comparable"),
        "ratio": Column("Float64", "1", "step time of b over that of a"),
        "low": Column("Float64", "1", "lower end of its 95 % interval"),
        "high": Column("Float64", "1", "upper end"),
        "num_trials": Column("Int64", "trials", "of the side that has fewer, or blocks if paired"),
        "paired": Column("boolean", "", "whether trials of one block are held against each other"),
        "p_different": Column("Float64", "1", "p-value of no difference, after Holm's correction"),
        "p_same": Column("Float64", "1", "p-value of a difference beyond the margin, after Holm's correction"),
        "no_interval": Column("string", "", "why there is no interval"),
        "peak_memory_a_bytes": Column("Int64", "B", "of a"),
        "peak_memory_b_bytes": Column("Int64", "B", "of b"),
        "peak_memory_verdict": Column("string", "", "on b: equal, more, fewer or unknown"),
        "peak_memory_ratio": Column("Float64", "1", "of b over a"),
        "optimizer_steps_a": Column("Int64", "steps", "observed, of a"),
        "optimizer_steps_b": Column("Int64", "steps", "observed, of b"),
        "optimizer_steps_verdict": Column("string", "", "on b: equal, more, fewer or unknown"),
    },
}
"""Columns of each frame, in order.

Steps and losses count from 0 at the first update. Means over the time pass: the cores that others used and that
the hypervisor took. Measured once per cell: ``collective_s``, ``exposed_s``, ``*_per_micro_batch`` (a window of the
rank that has most, divided by N, so with the optimizer step's share) and ``other_work``. MFU is model FLOPs (PaLM,
arXiv:2204.02311, appendix B) per second. Times of training, power and energy are empty where ranks shared a
GPU. ``expected_*`` are filled by ``bench.judge.expected``.
"""


def dtypes(frame: str) -> dict[str, str]:
    """The dtype of each column of a frame, as pandas names it, in order."""
    return {name: column.dtype for name, column in COLUMNS[frame].items()}
