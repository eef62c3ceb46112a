"""The table of columns: name, dtype, unit, meaning and formatting of every column of a run's frames.

Parquet schemas, frames, tables on the page and in the terminal, figure titles and exports are all derived from it. A
field of a cell is an axis of a matrix; its ``axis`` says whether it belongs to the work or to the way it is done.
Missing values are NA.
"""

from __future__ import annotations

from functools import partial

from bench.plan.column import Axis, Column, Over

_text, _flag = partial(Column, "string", ""), partial(Column, "boolean", "")
_number, _count = partial(Column, "Float64"), partial(Column, "Int64")
FIRST, MEDIAN, MAX = Over
SPEED, MEMORY, COMMUNICATION, CORRECTNESS, SEMANTICS = "speed", "memory", "communication", "correctness", "semantics"
"""Keys of the page's sections."""

FRAMES = {
    "cells": "one row per cell: its step time with the interval, and its verdict against the baseline",
    "trials": "one row per trial, including failed ones",
    "steps": "one row per trial and timed optimizer step",
    "losses": "one row per trial and optimizer step",
    "collectives": "one row per trial, operation, group and dtype, counted between two updates",
    "memory": "one row per trial and category",
    "ratios": "one row per cell and baseline: the ratio of step times and the verdict",
}
"""The frames in order, each with the meaning of a row."""

_KEY = {
    "cell_id": _text("id of the cell: a hash of its content"),
    "repeat": _count("", "index of the trial among its cell's, and of the block in which it ran"),
}

_TRIALS: dict[str, Column] = {
    "run_id": _text("id of the run", over=FIRST),
    **_KEY,
    "twin": _text("label of the A/A copy of a cell; empty for all others", over=FIRST),
    "slot": _count("", "position in the order of execution"),
    "backend": _text("one way to accumulate gradients", axis=Axis.NAME),
    "framework": _text("framework of the backend", over=FIRST),
    "sharding": _text("what is split across ranks: none, optimizer, grads, params", over=FIRST),
    "sync": _text("when gradients are reduced: none, eager, deferred-all-reduce, deferred", over=FIRST),
    "accumulate": _count("micro-batches", "N, per window and rank", axis=Axis.NAME, title="N", phrasing=("N = {}",)),
    "world_size": _count("ranks", "W", axis=Axis.NAME, title="W", phrasing=("W = {}",)),
    "replicate": _count(
        "replicas", "of HSDP; 0 for other backends", axis=Axis.WAY, title="R", phrasing=("no replicas", "{} replicas")
    ),
    "virtual_world_size": _count("ranks", "W of a virtual world; NA for a real one"),
    "fake_tensors": _flag("whether tensors have shapes but no values"),
    "shared_gpu": _flag("whether ranks shared a GPU over gloo; nothing is timed then"),
    "micro_batch_size": _count("samples", "per forward on one rank", over=FIRST),
    "global_batch_size": _count(
        "samples", "per optimizer step over all ranks", axis=Axis.WORK, title="B", phrasing=("B = {}",)
    ),
    "sequence_length": _count("tokens", "per sample", axis=Axis.WORK, title="tokens", phrasing=("{} tokens",)),
    "workload": _text("what is trained", axis=Axis.WORK),
    "model": _text("size of the model", axis=Axis.WORK),
    "num_parameters": _count("parameters", "of the model", over=FIRST),
    "precision": _text("dtype of forward and backward", axis=Axis.NAME, title="dtype"),
    "bf16_as": _text("how a bf16 cell computes"),
    "accumulation_dtype": _text(
        "dtype in which gradients should be summed", axis=Axis.WAY, title="summed in", phrasing=("summed in {}",)
    ),
    "accumulated_in": _text(
        "dtype in which they were measured to be summed", title="gradients summed in", over=FIRST, section=CORRECTNESS
    ),
    "corpus": _text("where the tokens come from", axis=Axis.WORK),
    "optimizer": _text("optimizer of the time pass", axis=Axis.WORK),
    "learning_rate": _number("", "of the optimizer", axis=Axis.WORK, title="lr", phrasing=("lr {:g}",)),
    "clip_norm": _number(
        "L2 norm",
        "maximum norm of the gradient; 0 for no clipping",
        axis=Axis.WORK,
        title="clip",
        phrasing=("not clipped", "clipped to {:g}"),
    ),
    "activation_checkpointing": _flag(
        "whether blocks keep only their input and recompute in the backward",
        axis=Axis.WAY,
        title="checkpointed",
        phrasing=("activations kept", "activations checkpointed"),
    ),
    "compiled": _flag("whether blocks are compiled", axis=Axis.WAY, phrasing=("not compiled", "blocks compiled")),
    "ranks_per_node": _count("ranks", "0 if all are on one node", axis=Axis.WAY, phrasing=("one node", "{} per node")),
    "seed": _count("", "of the initial weights and of the tokens", axis=Axis.WORK, phrasing=("seed {}",)),
    "device": _text("cpu or cuda", axis=Axis.WORK),
    "device_name": _text("device of the first rank"),
    "status": _text("ok, or how the trial ended: oom, timeout, hang, crashed, unsupported, invalid, interrupted"),
    "reason": _text("why the status is not ok"),
    "failed_gates": _text("gates that the trial failed, comma-separated", over=FIRST),
    "update_causes": _text("likely causes of an update of the wrong scale, comma-separated", over=FIRST),
    "num_warmup_steps": _count(
        "steps", "excluded at the beginning", title="warm-up steps left out, at most", over=MAX, section=SPEED
    ),
    "step_time_s": _number(
        "s", "median of the steps after warm-up, each the maximum over ranks", title="s/step", form=".4g"
    ),
    "tokens_per_s": _number("tokens/s", "over all ranks", title="tokens/s", form=",.0f"),
    "mfu": _number(
        "1", "model FLOPs utilization against the datasheet's peak", title="MFU", form=".3g", over=MEDIAN, section=SPEED
    ),
    "mfu_of_matmul": _number(
        "1",
        "the same against the matrix-product rate measured in the run",
        title="MFU of matmul",
        form=".3g",
        over=MEDIAN,
        section=SPEED,
    ),
    "link_bytes_per_s": _number("B/s", "bus bandwidth of all-reduces, measured in the run", title="link", form=".3g"),
    "energy_j_per_step": _number(
        "J", "of the GPUs in use, per optimizer step", title="J/step", form=".3g", over=MEDIAN, section=SPEED
    ),
    "energy_j_per_token": _number(
        "J", "the same per predicted token", title="J/token", form=".3g", over=MEDIAN, section=SPEED
    ),
    "cpu_s_per_micro_batch": _number(
        "s",
        "CPU time of one rank, including the optimizer step's share",
        title="CPU s/micro-batch",
        form=".3g",
        over=MEDIAN,
        section=SPEED,
    ),
    "num_operators_per_micro_batch": _number(
        "operators",
        "dispatched, including the optimizer step's share",
        title="operators/micro-batch",
        form=",.0f",
        over=MEDIAN,
        section=SPEED,
    ),
    "num_launches_per_micro_batch": _number(
        "launches",
        "of CUDA kernels, including the optimizer step's share",
        title="launches/micro-batch",
        form=",.0f",
        over=MEDIAN,
        section=SPEED,
    ),
    "other_work": _text("first operator of forward or backward that differs from the plain model; empty if none does"),
    "collective_s": _number(
        "s",
        "time in one window during which NCCL kernels ran",
        title="s in collectives",
        form=".3g",
        over=MEDIAN,
        section=COMMUNICATION,
    ),
    "exposed_s": _number(
        "s",
        "part of it during which nothing else ran",
        title="s exposed",
        form=".3g",
        over=MEDIAN,
        section=COMMUNICATION,
    ),
    "peak_memory_bytes": _count("B", "maximum over ranks"),
    "peak_memory_source": _text("what measured peak_memory_bytes", title="measured by"),
    "num_micro_batches": _count("micro-batches", "consumed by one rank in the time pass"),
    "optimizer_steps_expected": _count("steps", "required by the data", title="due", over=FIRST, section=SEMANTICS),
    "optimizer_steps_observed": _count(
        "steps", "observed at the inner optimizer", title="taken", over=FIRST, section=SEMANTICS
    ),
    "optimizer_steps_reported": _count(
        "steps", "reported by the framework", title="reported", over=FIRST, section=SEMANTICS
    ),
    "optimizer_steps_reported_by": _text(
        "the framework's counter that reports them", title="reported by", over=FIRST, section=SEMANTICS
    ),
    "ranks_agree": _flag(
        "whether all ranks took equally many steps and micro-batches",
        title="ranks agree",
        over=FIRST,
        section=SEMANTICS,
    ),
    "micro_batches_per_update": Column(
        "string",
        "micro-batches",
        "the distinct numbers observed, comma-separated",
        title="micro-batches per update",
        over=FIRST,
    ),
    "final_loss": _number(
        "nat/token", "of the last step", title="final loss", form=".4f", over=MEDIAN, section=CORRECTNESS
    ),
    "max_loss_deviation": _number(
        "nat/token",
        "largest difference from the reference's losses",
        title="loss off by (nats)",
        form=".1e",
        over=MAX,
        section=CORRECTNESS,
    ),
    "update_error": _number(
        "1",
        "relative L2 error of the update of one SGD window",
        title="update error",
        form=".1e",
        over=MAX,
        section=CORRECTNESS,
    ),
    "update_scale": _number(
        "1",
        "least-squares factor from the reference's update to this one",
        title="update / reference's",
        form=".4g",
        over=MEDIAN,
        section=CORRECTNESS,
    ),
    "update_residual": _number("1", "relative error that remains after removing update_scale"),
    "gradient_norm": _number("L2 norm", "gradient norm of the update pass, before clipping"),
    "unclipped_error": _number("1", "update_error without clipping, for cells that clip"),
    "unclipped_scale": _number("1", "update_scale without clipping, for cells that clip"),
    "entropy_floor": _number("nat/token", "lowest expected loss that a model of the corpus can reach", over=FIRST),
    "wall_s": _number("s", "of the whole trial"),
    "training_s": _number("s", "of the training in its passes"),
    "overhead_s": _number("s", "wall_s minus training_s"),
    "num_passes": _count("passes", "of the trial"),
    "num_cpus": _count("CPUs", "of the machine"),
    "foreign_cores": _number("CPUs", "used by other programs, mean over the time pass"),
    "stolen_cores": _number("CPUs", "taken by the hypervisor, mean over the time pass"),
    "sm_clock_mhz": _number("MHz", "median over the timed steps, lowest of the GPUs"),
    "power_w": _number("W", "of the GPUs in use"),
    "temperature_c": _number("degC", "of the hottest GPU"),
    "clock_slowdowns": _text("reasons for reduced clocks in at least 10 % of the samples, comma-separated"),
    "foreign_gpu_processes": _count("processes", "of other programs on the GPUs"),
}

_time = partial(_number, "s", form=".4g", section=SPEED)
_CELLS: dict[str, Column] = {
    "cell_id": _TRIALS["cell_id"],
    "label": _text("a short readable name", title="cell"),
    **{name: about for name, about in _TRIALS.items() if about.aggregation and not about.section},
    "status": _text("invalid if a trial is; else of the first trial that is not ok; ok if all are"),
    "reason": _text("why the status is not ok"),
    "outcome": _text(
        "the status, with the number of ok trials if some failed: crashed, 12 of 13 ok", section=CORRECTNESS
    ),
    "comparable": _flag("whether the cell may be compared with others"),
    "num_ok": _count("trials", "behind the numbers", title="n", section=SPEED),
    "num_trials": _count("trials", "run"),
    "step_time_s": _number(
        "s",
        "20 % trimmed geometric mean of the trials' medians; NA if not comparable",
        title="s/step",
        form=".4g",
        section=SPEED,
    ),
    "step_time_low_s": _time("lower end of its 95 % interval over trials", title="95 % from"),
    "step_time_high_s": _time("upper end", title="to"),
    "fastest_s": _time("of the fastest ok trial", title="fastest trial"),
    "slowest_s": _time("of the slowest ok trial", title="slowest trial"),
    "tokens_per_s": _number("tokens/s", "at step_time_s", title="tokens/s", form=",.0f", section=SPEED),
    "peak_memory_bytes": _count("B", "largest among the trials that are ok", title="peak", section=MEMORY),
    "peak_memory_source": _text("what measured peak_memory_bytes", title="measured by", section=MEMORY),
    **{name: about for name, about in _TRIALS.items() if about.section},
    "others_percent": _number(
        "%",
        "of the CPUs, used by others, median over trials",
        title="CPUs used by others (%)",
        form=".2g",
        section=SPEED,
    ),
    "baseline": _text("backend that the cell is compared with; NA if it has no matching cell"),
    "ratio": _number("1", "step time relative to the baseline's: above 1 the cell is slower"),
    "ratio_low": _number("1", "lower end of its 95 % interval"),
    "ratio_high": _number("1", "upper end"),
    "verdict": _text("faster, slower, same, ambiguous or not comparable"),
    "verdict_reason": _text("why"),
    "caveats": _text("caveats of the numbers, semicolon-separated"),
    "citation": _text("id to cite it by"),
}

COLUMNS: dict[str, dict[str, Column]] = {
    "cells": _CELLS,
    "trials": _TRIALS,
    "steps": {
        **_KEY,
        "step": _count("", "number of the optimizer step, from 0 at the first"),
        "seconds": _number("s", "from the previous update to this one, maximum over ranks"),
        "kept": _flag("false for steps detected as warm-up"),
    },
    "losses": {
        **_KEY,
        "step": _count("", "number of the optimizer step, from 0 at the first"),
        "loss": _number("nat/token", "mean over ranks and micro-batches"),
    },
    "collectives": {
        **_KEY,
        "op": _text("collective operation"),
        "group": _text("ranks that take part: world, or the shard or replicate group of rank 0"),
        "dtype": _text("dtype of the payload"),
        "calls": _count("calls", "by rank 0 between two updates"),
        "payload_bytes": _count("B", "payload of these calls"),
        "expected_calls": _count("calls", "by formula; NA if there is none"),
        "expected_payload_bytes": _count("B", "by formula; NA if there is none"),
    },
    "memory": {
        **_KEY,
        "category": _text("what the memory holds, and what measured it"),
        "bytes": _count("B", "maximum over ranks"),
        "expected_bytes": _count("B", "by formula; NA if there is none"),
    },
    "ratios": {
        "cell": _text("name of the pair"),
        "group": _text("heading of its section"),
        "cell_id_a": _text("cell of the baseline"),
        "cell_id_b": _text("cell compared with it"),
        "backend_a": _text("the baseline"),
        "backend_b": _text("backend compared with it"),
        "verdict": _text("on b: faster, slower, same, ambiguous or not comparable"),
        "reason": _text("why"),
        "detail": _text("the same with its numbers"),
        "next": _text("what to do"),
        "forced": _flag("whether numbers are shown although the two are not comparable"),
        "ratio": _number("1", "step time of b relative to a"),
        "low": _number("1", "lower end of its 95 % interval"),
        "high": _number("1", "upper end"),
        "num_trials": _count("trials", "of the side with fewer, or blocks if paired"),
        "paired": _flag("whether trials of the same block are compared"),
        "p_different": _number("1", "p-value of no difference, after Holm's correction"),
        "p_same": _number("1", "p-value of a difference beyond the margin, after Holm's correction"),
        "no_interval": _text("why there is no interval"),
        "peak_memory_a_bytes": _count("B", "of a"),
        "peak_memory_b_bytes": _count("B", "of b"),
        "peak_memory_verdict": _text("on b: equal, more, fewer or unknown"),
        "peak_memory_ratio": _number("1", "of b over a"),
        "optimizer_steps_a": _count("steps", "observed, of a"),
        "optimizer_steps_b": _count("steps", "observed, of b"),
        "optimizer_steps_verdict": _text("on b: equal, more, fewer or unknown"),
    },
}
"""Columns of each frame, in order.

Steps and losses count from 0 at the first update. ``foreign_cores`` and ``stolen_cores`` are means over the time pass.
``collective_s``, ``exposed_s``, ``*_per_micro_batch`` (one window of the rank with the largest value, divided by N,
including the optimizer step's share) and ``other_work`` are measured once per cell. MFU is model FLOPs (PaLM,
arXiv:2204.02311, appendix B) per second, relative to a peak. Step times, power and energy are missing if ranks shared a
GPU. ``expected_*`` are filled by ``bench.judge.expected``.
"""


def dtypes(frame: str) -> dict[str, str]:
    """The pandas dtype of each column of a frame, in order."""
    return {name: column.dtype for name, column in COLUMNS[frame].items()}
