"""The table of columns: what every column of a run's frames is, and how it is shown. Empty values are NA.

Parquet files, frames, tables on the page and in the terminal, titles of figures and exports follow from it. A field of
a cell is an axis of a matrix: cells are told apart by it, and it says whether two of them do the same work.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any

DASH = "-"
"""What is not known, or does not apply."""


class Axis(IntEnum):
    """What a field of a cell stands for, in the order in which titles name them."""

    WORK = 1
    """What is trained in a step: equal in cells that are compared, and in a cell and its reference."""
    WAY = 2
    """How a backend is told to train it."""
    NAME = 3
    """Stands in the name of every cell."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a frame."""

    dtype: str
    """As pandas names it: its nullable ones."""
    unit: str
    """Empty for names and for what has none."""
    meaning: str
    axis: Axis | None = None
    """None if it is no field of a cell."""
    title: str = ""
    """Above the column of a table for people; empty if its name will do."""
    form: str = ""
    """How a table shows a number, as ``format`` takes it."""
    named: tuple[str, ...] = ("{}",)
    """How a title or a sentence names a value: the first is for false and 0, the last for all others."""

    @property
    def is_number(self) -> bool:
        """Whether values are sorted as numbers."""
        return self.dtype in {"Int64", "Float64"}

    def shown(self, value: Any) -> str:
        """A value in a table; None is not known."""
        if value is None:
            return DASH
        if self.dtype == "boolean":
            return "yes" if value else "no"
        if self.is_number:
            return format(int(value), self.form) if self.dtype == "Int64" else format(float(value), self.form or "g")
        return str(value) or DASH

    def says(self, value: Any) -> str:
        """A value in a title or a sentence; None is not known."""
        return "unknown" if value is None else self.named[-1 if value else 0].format(value)


_text, _flag = partial(Column, "string", ""), partial(Column, "boolean", "")
_number, _count = partial(Column, "Float64"), partial(Column, "Int64")

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
    "cell_id": _text("names the cell for ever: a hash of its content"),
    "repeat": _count("", "number of the trial of its cell, and of the block in which it ran"),
}

_TRIALS: dict[str, Column] = {
    "run_id": _text("names the run"),
    "cell_id": _KEY["cell_id"],
    "repeat": _KEY["repeat"],
    "twin": _text("label of a cell that is another one once more (the A/A pair); empty for all others"),
    "slot": _count("", "place in the order in which trials ran"),
    "backend": _text("one way to accumulate gradients", axis=Axis.NAME),
    "framework": _text("whose it is"),
    "sharding": _text("what is split across ranks: none, optimizer, grads, params"),
    "sync": _text("when gradients are reduced: none, eager, deferred"),
    "accumulate": _count("micro-batches", "N: per window and rank", axis=Axis.NAME, title="N", named=("N = {}",)),
    "world_size": _count("ranks", "W", axis=Axis.NAME, title="W", named=("W = {}",)),
    "virtual_world_size": _count("ranks", "W of a virtual world; NA for a real one"),
    "fake_tensors": _flag("whether tensors have shapes and no values"),
    "shared_gpu": _flag("whether ranks shared a GPU, over gloo; nothing is timed then"),
    "micro_batch_size": _count("samples", "that one forward sees on one rank"),
    "global_batch_size": _count(
        "samples", "per optimizer step over all ranks", axis=Axis.WORK, title="B", named=("B = {}",)
    ),
    "sequence_length": _count("tokens", "per sample", axis=Axis.WORK, title="tokens", named=("{} tokens",)),
    "workload": _text("what is trained", axis=Axis.WORK),
    "model": _text("its size", axis=Axis.WORK),
    "num_parameters": _count("parameters", "of the model"),
    "precision": _text("dtype of forward and backward", axis=Axis.NAME, title="dtype"),
    "bf16_as": _text("how a bf16 cell computes"),
    "accumulation_dtype": _text(
        "in which gradients are to be summed", axis=Axis.WAY, title="summed in", named=("summed in {}",)
    ),
    "accumulated_in": _text("in which they were found to be summed", title="gradients summed in"),
    "corpus": _text("where the tokens come from", axis=Axis.WORK),
    "optimizer": _text("of the time pass", axis=Axis.WORK),
    "learning_rate": _number("", "of the optimizer", axis=Axis.WORK, title="lr", named=("lr {:g}",)),
    "clip_norm": _number(
        "L2 norm",
        "largest that a gradient may have; 0 for no clipping",
        axis=Axis.WORK,
        title="clip",
        named=("not clipped", "clipped to {:g}"),
    ),
    "activation_checkpointing": _flag(
        "whether blocks keep their input alone, and compute again in the backward",
        axis=Axis.WAY,
        title="checkpointed",
        named=("activations kept", "activations checkpointed"),
    ),
    "compiled": _flag(
        "whether blocks are compiled by torch.compile", axis=Axis.WAY, named=("not compiled", "blocks compiled")
    ),
    "seed": _count("", "of the initial weights and of the tokens", axis=Axis.WORK, named=("seed {}",)),
    "device": _text("cpu or cuda", axis=Axis.WORK),
    "device_name": _text("of the first rank's device"),
    "status": _text("ok, or how it ended: oom, timeout, hang, crashed, unsupported, invalid, interrupted"),
    "reason": _text("why the status is not ok"),
    "num_warmup_steps": _count("steps", "left out at the beginning"),
    "step_time_s": _number(
        "s", "median of the steps after warm-up, each the maximum over ranks", title="s/step", form=".4g"
    ),
    "tokens_per_s": _number("tokens/s", "over all ranks", title="tokens/s", form=",.0f"),
    "mfu": _number("1", "model FLOPs utilization against the datasheet's peak", title="MFU", form=".3g"),
    "mfu_of_matmul": _number(
        "1",
        "the same against the rate of matrix products that was measured in the run",
        title="MFU of matmul",
        form=".3g",
    ),
    "energy_j_per_step": _number("J", "of the GPUs that were used, per optimizer step", title="J/step", form=".3g"),
    "energy_j_per_token": _number("J", "the same per predicted token", title="J/token", form=".3g"),
    "cpu_s_per_micro_batch": _number(
        "s",
        "CPU time of one rank's process, the optimizer step's share included",
        title="CPU s/micro-batch",
        form=".3g",
    ),
    "num_operators_per_micro_batch": _number(
        "operators",
        "that torch dispatched, the optimizer step's share included",
        title="operators/micro-batch",
        form=",.0f",
    ),
    "num_launches_per_micro_batch": _number(
        "launches", "of CUDA kernels, the optimizer step's share included", title="launches/micro-batch", form=",.0f"
    ),
    "other_work": _text("first operator of forward or backward that is not the plain model's; empty text if all are"),
    "collective_s": _number("s", "of one window in which NCCL's kernels ran", title="s in collectives", form=".3g"),
    "exposed_s": _number("s", "of these in which nothing else ran", title="s exposed", form=".3g"),
    "peak_memory_bytes": _count("B", "maximum over ranks"),
    "peak_memory_source": _text("who counted peak_memory_bytes", title="measured by"),
    "num_micro_batches": _count("micro-batches", "used by one rank in the time pass"),
    "optimizer_steps_expected": _count("steps", "that the data asks for", title="due"),
    "optimizer_steps_observed": _count("steps", "seen at the inner optimizer", title="taken"),
    "optimizer_steps_reported": _count("steps", "that the framework says it took", title="reported"),
    "optimizer_steps_reported_by": _text("which of its counters says so", title="reported by"),
    "ranks_agree": _flag("whether all ranks took equally many steps and micro-batches", title="ranks agree"),
    "micro_batches_per_update": Column(
        "string", "micro-batches", "the different numbers that were seen, with commas", title="micro-batches per update"
    ),
    "final_loss": _number("nat/token", "of the last step", title="final loss", form=".4f"),
    "max_loss_deviation": _number(
        "nat/token", "largest difference from the losses that the reference has", title="loss off by (nats)", form=".1e"
    ),
    "update_error": _number("1", "relative L2 error of the update of one SGD window", title="update error", form=".1e"),
    "update_scale": _number(
        "1", "how many times the reference's update it is", title="update / reference's", form=".4g"
    ),
    "update_residual": _number("1", "share of it that no scale explains"),
    "gradient_norm": _number("L2 norm", "of the update pass, before clipping"),
    "unclipped_error": _number("1", "update_error without clipping, for cells that clip"),
    "unclipped_scale": _number("1", "update_scale without clipping, for cells that clip"),
    "entropy_floor": _number("nat/token", "loss that no model of the corpus can go below"),
    "wall_s": _number("s", "of the whole trial"),
    "training_s": _number("s", "of its passes' training"),
    "overhead_s": _number("s", "wall_s less training_s"),
    "num_passes": _count("passes", "of the trial"),
    "num_cpus": _count("CPUs", "that the machine has"),
    "foreign_cores": _number("CPUs", "that other programs used, on average over the time pass"),
    "stolen_cores": _number("CPUs", "that the hypervisor took"),
    "sm_clock_mhz": _number("MHz", "lowest GPU's median over the timed steps"),
    "power_w": _number("W", "of the GPUs that were used"),
    "temperature_c": _number("degC", "of the hottest GPU"),
    "clock_slowdowns": _text("reasons that held clocks down in a tenth of the samples or more, with commas"),
    "foreign_gpu_processes": _count("processes", "on the GPUs that were not the bench's"),
}

AXES = {name: about for name, about in _TRIALS.items() if about.axis is not None}
"""The fields of cells by which they are told apart."""


def axes(*kinds: Axis) -> tuple[str, ...]:
    """The axes of these kinds, kind by kind."""
    return tuple(name for kind in kinds for name, about in AXES.items() if about.axis is kind)


WORK, WAYS = axes(Axis.WORK), axes(Axis.WORK, Axis.WAY)
"""Axes that are equal if two cells do the same work in a step; and those that are shown where cells differ in them."""


def differing(cells: Iterable[Any], names: Iterable[str] = WAYS) -> list[str]:
    """Those of these axes in which cells differ, or rows of a table that have one attribute per column.

    A learning rate that goes with its optimizer says nothing.
    """
    rows = list(cells)
    found = [name for name in names if len({getattr(row, name) for row in rows}) > 1]
    rates = {(row.optimizer, row.learning_rate) for row in rows} if "learning_rate" in found else set()
    if rates and len(rates) == len({optimizer for optimizer, _ in rates}):
        found.remove("learning_rate")
    return found


def labels(cells: Iterable[Any]) -> dict[Any, str]:
    """A label for each cell of a run: its own, with the axes in which it differs from others of the same label."""
    alike: dict[str, list[Any]] = {}
    for cell in cells:
        alike.setdefault(cell.label, []).append(cell)
    return {cell: " ".join([label, *says(cell, differing(some))]) for label, some in alike.items() for cell in some}


def says(cell: Any, names: Iterable[str]) -> list[str]:
    """The values of these axes, as sentences name a cell by them."""
    return [AXES[name].says(getattr(cell, name)) for name in names]


_CELLS: dict[str, Column] = {
    "run_id": _TRIALS["run_id"],
    "cell_id": _TRIALS["cell_id"],
    "label": _text("a short name for people"),
    **{
        name: about
        for name, about in _TRIALS.items()
        if name in AXES or name in {"twin", "framework", "sharding", "sync", "micro_batch_size"}
    },
    "status": _text("that of the first trial that is not ok; ok if all are"),
    "reason": _TRIALS["reason"],
    "comparable": _flag("whether numbers of the cell may be held against others'"),
    "num_ok": _count("trials", "that the numbers are of"),
    "num_trials": _count("trials", "that were run"),
    "step_time_s": _number("s", "20 % trimmed geometric mean of the trials' medians; NA if not comparable"),
    "step_time_low_s": _number("s", "lower end of its 95 % interval over trials"),
    "step_time_high_s": _number("s", "upper end"),
    "tokens_per_s": _number("tokens/s", "at step_time_s"),
    "peak_memory_bytes": _count("B", "largest of the good trials"),
    "peak_memory_source": _TRIALS["peak_memory_source"],
    "baseline": _text("backend that the cell is compared with; NA if no cell of it is alike"),
    "ratio": _number("1", "step time over the baseline's: above 1 the cell takes longer"),
    "ratio_low": _number("1", "lower end of its 95 % interval"),
    "ratio_high": _number("1", "upper end"),
    "verdict": _text("faster, slower, same, ambiguous or not comparable"),
    "verdict_reason": _text("why"),
    "caveats": _text("what must be said with the numbers, with semicolons"),
    "citation": _text("id to cite it by"),
}

COLUMNS: dict[str, dict[str, Column]] = {
    "cells": _CELLS,
    "trials": _TRIALS,
    "steps": {
        **_KEY,
        "step": _count("", "number of the optimizer step, from 0 at the first"),
        "seconds": _number("s", "from the update before to this one, maximum over ranks"),
        "kept": _flag("False for what was found to be warm-up still"),
    },
    "losses": {
        **_KEY,
        "step": _count("", "number of the optimizer step, from 0 at the first"),
        "loss": _number("nat/token", "mean over ranks and micro-batches"),
    },
    "collectives": {
        **_KEY,
        "op": _text("collective operation"),
        "dtype": _text("of the payload"),
        "calls": _count("calls", "by rank 0 between two updates"),
        "payload_bytes": _count("B", "given to them"),
        "expected_calls": _count("calls", "by formula; NA where there is none"),
        "expected_payload_bytes": _count("B", "by formula; NA where there is none"),
    },
    "memory": {
        **_KEY,
        "category": _text("what holds it, and who counted"),
        "bytes": _count("B", "of the rank that has most"),
        "expected_bytes": _count("B", "by formula; NA where there is none"),
    },
    "ratios": {
        "cell": _text("name of the pair"),
        "group": _text("heading that it stands under"),
        "cell_id_a": _text("the baseline's cell"),
        "cell_id_b": _text("the cell that is compared with it"),
        "backend_a": _text("the baseline"),
        "backend_b": _text("the backend that is compared with it"),
        "verdict": _text("on b: faster, slower, same, ambiguous or not comparable"),
        "reason": _text("why"),
        "detail": _text("the same with its numbers"),
        "next": _text("what to do"),
        "forced": _flag("whether numbers are given although the two are not comparable"),
        "ratio": _number("1", "step time of b over that of a"),
        "low": _number("1", "lower end of its 95 % interval"),
        "high": _number("1", "upper end"),
        "num_trials": _count("trials", "of the side that has fewer, or blocks if paired"),
        "paired": _flag("whether trials of one block are held against each other"),
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

Steps and losses count from 0 at the first update. Means over the time pass: the cores that others used and that
the hypervisor took. Measured once per cell: ``collective_s``, ``exposed_s``, ``*_per_micro_batch`` (a window of the
rank that has most, divided by N, so with the optimizer step's share) and ``other_work``. MFU is model FLOPs (PaLM,
arXiv:2204.02311, appendix B) per second. Times of training, power and energy are empty where ranks shared a
GPU. ``expected_*`` are filled by ``bench.judge.expected``.
"""


def dtypes(frame: str) -> dict[str, str]:
    """The dtype of each column of a frame, as pandas names it, in order."""
    return {name: column.dtype for name, column in COLUMNS[frame].items()}
