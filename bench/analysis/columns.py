"""What every column of a run's frames is: dtype, unit and meaning. Empty values are NA."""

from __future__ import annotations

from dataclasses import dataclass

from bench.tables import CHILD_COLUMNS, TRIAL_COLUMNS


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
    "cell_id": ("", "names the cell for ever: a hash of its content"),
    "repeat": ("", "number of the trial of its cell, and of the block in which it ran"),
}
_SHARED: dict[str, tuple[str, str]] = {
    "run_id": ("", "names the run"),
    "twin": ("", "label of a cell that is another one once more (the A/A pair); empty for all others"),
    "backend": ("", "one way to accumulate gradients"),
    "framework": ("", "whose it is"),
    "sharding": ("", "what is split across ranks: none, optimizer, grads, params"),
    "sync": ("", "when gradients are reduced: none, eager, deferred"),
    "accumulate": ("micro-batches", "N: per window and rank"),
    "world_size": ("ranks", "W"),
    "micro_batch_size": ("samples", "that one forward sees on one rank"),
    "global_batch_size": ("samples", "per optimizer step over all ranks"),
    "sequence_length": ("tokens", "per sample"),
    "workload": ("", "what is trained"),
    "model": ("", "its size"),
    "precision": ("", "dtype of forward and backward"),
    "optimizer": ("", "of the time pass"),
    "clip_norm": ("L2 norm", "largest that a gradient may have; 0 for no clipping"),
    "activation_checkpointing": ("", "whether blocks keep their input alone, and compute again in the backward"),
    "compiled": ("", "whether blocks are compiled by torch.compile"),
    "device": ("", "cpu or cuda"),
    "status": ("", "ok, or how it ended: oom, timeout, hang, crashed, unsupported, invalid, interrupted"),
    "reason": ("", "why the status is not ok"),
    "peak_memory_source": ("", "who counted peak_memory_bytes"),
}
_TRIALS: dict[str, tuple[str, str]] = {
    **_KEY,
    **_SHARED,
    "slot": ("", "place in the order in which trials ran"),
    "virtual_world_size": ("ranks", "W of a virtual world; NA for a real one"),
    "fake_tensors": ("", "whether tensors have shapes and no values"),
    "shared_gpu": ("", "whether ranks shared a GPU, over gloo; nothing is timed then"),
    "num_parameters": ("parameters", "of the model"),
    "bf16_as": ("", "how a bf16 cell computes"),
    "accumulation_dtype": ("", "in which gradients are to be summed"),
    "accumulated_in": ("", "in which they were found to be summed"),
    "corpus": ("", "where the tokens come from"),
    "learning_rate": ("", "of the optimizer"),
    "seed": ("", "of the initial weights and of the tokens"),
    "device_name": ("", "of the first rank's device"),
    "num_warmup_steps": ("steps", "left out at the beginning"),
    "step_time_s": ("s", "median of the steps after warm-up, each the maximum over ranks"),
    "tokens_per_s": ("tokens/s", "over all ranks"),
    "mfu": ("1", "model FLOPs utilization against the datasheet's peak"),
    "mfu_of_matmul": ("1", "the same against the rate of matrix products that was measured in the run"),
    "energy_j_per_step": ("J", "of the GPUs that were used, per optimizer step"),
    "energy_j_per_token": ("J", "the same per predicted token"),
    "peak_memory_bytes": ("B", "maximum over ranks"),
    "num_micro_batches": ("micro-batches", "used by one rank in the time pass"),
    "optimizer_steps_expected": ("steps", "that the data asks for"),
    "optimizer_steps_observed": ("steps", "seen at the inner optimizer"),
    "optimizer_steps_reported": ("steps", "that the framework says it took"),
    "optimizer_steps_reported_by": ("", "which of its counters says so"),
    "ranks_agree": ("", "whether all ranks took equally many steps and micro-batches"),
    "micro_batches_per_update": ("micro-batches", "the different numbers that were seen, with commas"),
    "final_loss": ("nat/token", "of the last step"),
    "max_loss_deviation": ("nat/token", "largest difference from the losses that the reference has"),
    "update_error": ("1", "relative L2 error of the update of one SGD window"),
    "update_scale": ("1", "how many times the reference's update it is"),
    "update_residual": ("1", "share of it that no scale explains"),
    "gradient_norm": ("L2 norm", "of the update pass, before clipping"),
    "unclipped_error": ("1", "update_error without clipping, for cells that clip"),
    "unclipped_scale": ("1", "update_scale without clipping, for cells that clip"),
    "entropy_floor": ("nat/token", "loss that no model of the corpus can go below"),
    "wall_s": ("s", "of the whole trial"),
    "training_s": ("s", "of its passes' training"),
    "overhead_s": ("s", "wall_s less training_s"),
    "cpu_s_per_micro_batch": ("s", "CPU time of one rank's process, the optimizer step's share included"),
    "num_operators_per_micro_batch": ("operators", "that torch dispatched, the optimizer step's share included"),
    "num_launches_per_micro_batch": ("launches", "of CUDA kernels, the optimizer step's share included"),
    "other_work": ("", "first operator of forward or backward that is not the plain model's; empty text if all are"),
    "collective_s": ("s", "of one window in which NCCL's kernels ran"),
    "exposed_s": ("s", "of these in which nothing else ran"),
    "num_passes": ("passes", "of the trial"),
    "num_cpus": ("CPUs", "that the machine has"),
    "foreign_cores": ("CPUs", "that other programs used, on average over the time pass"),
    "stolen_cores": ("CPUs", "that the hypervisor took"),
    "sm_clock_mhz": ("MHz", "lowest GPU's median over the timed steps"),
    "power_w": ("W", "of the GPUs that were used"),
    "temperature_c": ("degC", "of the hottest GPU"),
    "clock_slowdowns": ("", "reasons that held clocks down in a tenth of the samples or more, with commas"),
    "foreign_gpu_processes": ("processes", "on the GPUs that were not the bench's"),
}
_CHILDREN: dict[str, dict[str, tuple[str, str]]] = {
    "steps": {
        "step": ("", "number of the optimizer step, from 0 at the first"),
        "seconds": ("s", "from the update before to this one, maximum over ranks"),
        "kept": ("", "False for what was found to be warm-up still"),
    },
    "losses": {
        "step": ("", "number of the optimizer step, from 0 at the first"),
        "loss": ("nat/token", "mean over ranks and micro-batches"),
    },
    "collectives": {
        "op": ("", "collective operation"),
        "dtype": ("", "of the payload"),
        "calls": ("calls", "by rank 0 between two updates"),
        "payload_bytes": ("B", "given to them"),
        "expected_calls": ("calls", "by formula; NA where there is none"),
        "expected_payload_bytes": ("B", "by formula; NA where there is none"),
    },
    "memory": {
        "category": ("", "what holds it, and who counted"),
        "bytes": ("B", "of the rank that has most"),
        "expected_bytes": ("B", "by formula; NA where there is none"),
    },
}
_CELLS: dict[str, tuple[str, str, str]] = {
    "run_id": ("string", *_SHARED["run_id"]),
    "cell_id": ("string", *_KEY["cell_id"]),
    "label": ("string", "", "a short name for people"),
    **{
        name: (TRIAL_COLUMNS[name], *_SHARED[name])
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
    "status": ("string", "", "that of the first trial that is not ok; ok if all are"),
    "reason": ("string", *_SHARED["reason"]),
    "comparable": ("boolean", "", "whether numbers of the cell may be held against others'"),
    "num_ok": ("Int64", "trials", "that the numbers are of"),
    "num_trials": ("Int64", "trials", "that were run"),
    "step_time_s": ("Float64", "s", "20 % trimmed geometric mean of the trials' medians; NA if not comparable"),
    "step_time_low_s": ("Float64", "s", "lower end of its 95 % interval over trials"),
    "step_time_high_s": ("Float64", "s", "upper end"),
    "tokens_per_s": ("Float64", "tokens/s", "at step_time_s"),
    "peak_memory_bytes": ("Int64", "B", "largest of the good trials"),
    "peak_memory_source": ("string", *_SHARED["peak_memory_source"]),
    "baseline": ("string", "", "backend that the cell is compared with; NA if no cell of it is alike"),
    "ratio": ("Float64", "1", "step time over the baseline's: above 1 the cell takes longer"),
    "ratio_low": ("Float64", "1", "lower end of its 95 % interval"),
    "ratio_high": ("Float64", "1", "upper end"),
    "verdict": ("string", "", "faster, slower, same, ambiguous or not comparable"),
    "verdict_reason": ("string", "", "why"),
    "caveats": ("string", "", "what must be said with the numbers, with semicolons"),
    "citation": ("string", "", "id to cite it by"),
}
_RATIOS: dict[str, tuple[str, str, str]] = {
    "cell": ("string", "", "name of the pair"),
    "group": ("string", "", "heading that it stands under"),
    "cell_id_a": ("string", "", "the baseline's cell"),
    "cell_id_b": ("string", "", "the cell that is compared with it"),
    "backend_a": ("string", "", "the baseline"),
    "backend_b": ("string", "", "the backend that is compared with it"),
    "verdict": ("string", "", "on b: faster, slower, same, ambiguous or not comparable"),
    "reason": ("string", "", "why"),
    "detail": ("string", "", "the same with its numbers"),
    "next": ("string", "", "what to do"),
    "forced": ("boolean", "", "whether numbers are given although the two are not comparable"),
    "ratio": ("Float64", "1", "step time of b over that of a"),
    "low": ("Float64", "1", "lower end of its 95 % interval"),
    "high": ("Float64", "1", "upper end"),
    "num_trials": ("Int64", "trials", "of the side that has fewer, or blocks if paired"),
    "paired": ("boolean", "", "whether trials of one block are held against each other"),
    "p_different": ("Float64", "1", "p-value of no difference, after Holm's correction"),
    "p_same": ("Float64", "1", "p-value of a difference beyond the margin, after Holm's correction"),
    "no_interval": ("string", "", "why there is no interval"),
    "peak_memory_a_bytes": ("Int64", "B", "of a"),
    "peak_memory_b_bytes": ("Int64", "B", "of b"),
    "peak_memory_verdict": ("string", "", "on b: equal, more, fewer or unknown"),
    "peak_memory_ratio": ("Float64", "1", "of b over a"),
    "optimizer_steps_a": ("Int64", "steps", "observed, of a"),
    "optimizer_steps_b": ("Int64", "steps", "observed, of b"),
    "optimizer_steps_verdict": ("string", "", "on b: equal, more, fewer or unknown"),
}


def _documented(dtypes: dict[str, str], words: dict[str, tuple[str, str]]) -> dict[str, Column]:
    return {name: Column(dtype, *words[name]) for name, dtype in dtypes.items()}


COLUMNS: dict[str, dict[str, Column]] = {
    "cells": {name: Column(*about) for name, about in _CELLS.items()},
    "trials": _documented(TRIAL_COLUMNS, _TRIALS),
    **{
        name: _documented({"cell_id": "string", "repeat": "Int64", **dtypes}, {**_KEY, **_CHILDREN[name]})
        for name, dtypes in CHILD_COLUMNS.items()
    },
    "ratios": {name: Column(*about) for name, about in _RATIOS.items()},
}
"""Columns of each frame, in order."""
