"""The columns of the trials table, and what a column is.

It has a dtype, a unit and a meaning, says where its value is and how a cell's comes from its trials, and who shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import partial
from typing import Any

from bench.formatting import size

DASH = "-"
"""Shown for a value that is unknown or does not apply."""


class Axis(IntEnum):
    """The role of a cell's field, in the order in which titles list them."""

    WORK = 1
    """What a step trains: equal in cells that are compared, and in a cell and its reference."""
    WAY = 2
    """An option of how the backend trains it."""
    NAME = 3
    """Part of every cell's label."""


class Over(StrEnum):
    """How the value of a cell comes from those of its trials."""

    FIRST = "first"
    """All trials have the same: the first that is known."""
    MEDIAN = "median"
    """The median of the good trials, or of all if none is good."""
    MAX = "max"
    """The largest of all trials."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a frame."""

    dtype: str
    """Nullable pandas dtype."""
    unit: str
    """Empty if the column has none."""
    meaning: str
    axis: Axis | None = None
    """None if the column is not a field of a cell."""
    source: str = ""
    """Where a trial's value is in its record, key by key; empty if it is a field of the cell, or calculated."""
    over: Over | None = None
    """How a cell's value comes from its trials', beside that of an axis, which all share."""
    section: str = ""
    """Key of the page's section whose table of cells has the column; empty if none has."""
    title: str = ""
    """Column heading in tables; empty to use the name."""
    form: str = ""
    """Format specification for numbers in tables."""
    phrasing: tuple[str, ...] = ("{}",)
    """Templates for a value in a title or sentence: the first for false and 0, the last for everything else."""

    @property
    def is_number(self) -> bool:
        return self.dtype in {"Int64", "Float64"}

    @property
    def aggregation(self) -> Over | None:
        """How a cell's value comes from its trials'; None if cells have no such column, or calculate it otherwise."""
        return self.over or (None if self.axis is None else Over.FIRST)

    def shown(self, value: Any) -> str:
        """A value as a table shows it; None is unknown."""
        if value is None:
            return DASH
        if self.dtype == "boolean":
            return "yes" if value else "no"
        if self.unit == "B":
            return size(float(value))
        if self.is_number:
            return format(int(value), self.form) if self.dtype == "Int64" else format(float(value), self.form or "g")
        return str(value) or DASH

    def phrase(self, value: Any) -> str:
        """A value as a title or sentence shows it; None is unknown."""
        return "unknown" if value is None else self.phrasing[-1 if value else 0].format(value)


FIRST, MEDIAN, MAX = Over
SPEED, MEMORY, COMMUNICATION, CORRECTNESS, SEMANTICS = "speed", "memory", "communication", "correctness", "semantics"
"""Keys of the page's sections."""
text, flag = partial(Column, "string", ""), partial(Column, "boolean", "")
number, count = partial(Column, "Float64"), partial(Column, "Int64")
_SHARE = ", including the optimizer step's share"
_cost = partial(number, form=".3g", over=MEDIAN, section=SPEED)
_exposure = partial(number, "s", form=".3g", over=MEDIAN, section=COMMUNICATION)
_checked = partial(number, section=CORRECTNESS)
_steps = partial(count, "steps", over=FIRST, section=SEMANTICS)

KEY = {
    "cell_id": text("id of the cell: a hash of its content", source="cell_id"),
    "repeat": count("", "index of the trial among its cell's, and of the block in which it ran", source="repeat"),
}
"""What identifies a trial within its run."""

TRIAL_COLUMNS: dict[str, Column] = {
    "run_id": text("id of the run", over=FIRST, source="run_id"),
    **KEY,
    "twin": text("label of the A/A copy of a cell; empty for all others", over=FIRST),
    "slot": count("", "position in the order of execution", source="slot"),
    "backend": text("one way to accumulate gradients", axis=Axis.NAME),
    "framework": text("framework of the backend", over=FIRST, source="described.framework"),
    "sharding": text(
        "what is split across ranks: none, optimizer, grads, params", over=FIRST, source="described.sharding"
    ),
    "sync": text(
        "when gradients are reduced: none, eager, deferred-all-reduce, deferred", over=FIRST, source="described.sync"
    ),
    "accumulate": count("micro-batches", "N, per window and rank", axis=Axis.NAME, title="N", phrasing=("N = {}",)),
    "world_size": count("ranks", "W", axis=Axis.NAME, title="W", phrasing=("W = {}",)),
    "replicate": count(
        "replicas", "of HSDP; 0 for other backends", axis=Axis.WAY, title="R", phrasing=("no replicas", "{} replicas")
    ),
    "virtual_world_size": count("ranks", "W of a virtual world; NA for a real one"),
    "fake_tensors": flag("whether tensors have shapes but no values"),
    "shared_gpu": flag("whether ranks shared a GPU; nothing is timed then"),
    "micro_batch_size": count("samples", "per forward on one rank", over=FIRST),
    "global_batch_size": count(
        "samples", "per optimizer step over all ranks", axis=Axis.WORK, title="B", phrasing=("B = {}",)
    ),
    "sequence_length": count("tokens", "per sample", axis=Axis.WORK, title="tokens", phrasing=("{} tokens",)),
    "workload": text("what is trained", axis=Axis.WORK),
    "model": text("size of the model", axis=Axis.WORK),
    "num_parameters": count("parameters", "of the model", over=FIRST, source="num_parameters"),
    "precision": text("dtype of forward and backward", axis=Axis.NAME, title="dtype"),
    "bf16_as": text("how a bf16 cell computes"),
    "accumulation_dtype": text(
        "dtype in which gradients should be summed", axis=Axis.WAY, title="summed in", phrasing=("summed in {}",)
    ),
    "accumulated_in": text(
        "dtype in which they were measured to be summed",
        title="gradients summed in",
        over=FIRST,
        section=CORRECTNESS,
        source="accumulation.dtype",
    ),
    "corpus": text("where the tokens come from", axis=Axis.WORK),
    "optimizer": text("optimizer of the time pass", axis=Axis.WORK),
    "learning_rate": number("", "of the optimizer", axis=Axis.WORK, title="lr", phrasing=("lr {:g}",)),
    "clip_norm": number(
        "L2 norm",
        "maximum norm of the gradient; 0 for no clipping",
        axis=Axis.WORK,
        title="clip",
        phrasing=("not clipped", "clipped to {:g}"),
    ),
    "activation_checkpointing": flag(
        "whether blocks keep only their input and recompute in the backward",
        axis=Axis.WAY,
        title="checkpointed",
        phrasing=("activations kept", "activations checkpointed"),
    ),
    "selective_checkpointing": flag(
        "whether checkpointed blocks also keep what is expensive to compute",
        axis=Axis.WAY,
        title="selectively",
        phrasing=("all of a block recomputed", "checkpointed selectively"),
    ),
    "compiled": flag("whether blocks are compiled", axis=Axis.WAY, phrasing=("not compiled", "blocks compiled")),
    "ranks_per_node": count("ranks", "0 if all are on one node", axis=Axis.WAY, phrasing=("one node", "{} per node")),
    "seed": count("", "of the initial weights and of the tokens", axis=Axis.WORK, phrasing=("seed {}",)),
    "device": text("cpu or cuda", axis=Axis.WORK),
    "device_name": text("device of the first rank", source="device_name"),
    "status": text(
        "ok, or how the trial ended: oom, timeout, hang, crashed, unsupported, invalid, interrupted", source="status"
    ),
    "reason": text("why the status is not ok", source="reason"),
    "failed_gates": text("gates that the trial failed, comma-separated", over=Over.FIRST),
    "update_causes": text("likely causes of an update of the wrong scale, comma-separated", over=Over.FIRST),
    "num_warmup_steps": count(
        "steps", "excluded at the beginning", title="warm-up steps left out, at most", over=MAX, section=SPEED
    ),
    "step_time_s": number(
        "s", "median of the steps after warm-up, each the maximum over ranks", title="s/step", form=".4g"
    ),
    "tokens_per_s": number("tokens/s", "over all ranks", title="tokens/s", form=",.0f"),
    "mfu": _cost("1", "model FLOPs utilization against the datasheet's peak", title="MFU"),
    "mfu_of_matmul": _cost("1", "the same against the matrix-product rate measured in the run", title="MFU of matmul"),
    "link_bytes_per_s": number("B/s", "bus bandwidth of all-reduces, measured in the run", title="link", form=".3g"),
    "energy_j_per_step": _cost("J", "of the GPUs in use, per optimizer step", title="J/step"),
    "energy_j_per_token": _cost("J", "the same per predicted token", title="J/token"),
    "cpu_s_per_micro_batch": _cost("s", f"CPU time of one rank{_SHARE}", title="CPU s/micro-batch"),
    "num_operators_per_micro_batch": _cost(
        "operators", f"dispatched{_SHARE}", title="operators/micro-batch", form=",.0f"
    ),
    "num_launches_per_micro_batch": _cost(
        "launches", f"of CUDA kernels{_SHARE}", title="launches/micro-batch", form=",.0f"
    ),
    "other_work": text(
        "first operator of forward or backward that differs from the plain model; empty if none does",
        source="dispatch.other_work",
    ),
    "collective_s": _exposure(
        "time in one window during which NCCL kernels ran", title="s in collectives", source="exposure.collective_s"
    ),
    "exposed_s": _exposure("part of it during which nothing else ran", title="s exposed", source="exposure.exposed_s"),
    "peak_memory_bytes": count("B", "maximum over ranks"),
    "peak_memory_source": text("what measured peak_memory_bytes", title="measured by"),
    "num_micro_batches": count(
        "micro-batches", "consumed by one rank in the time pass", source="time.num_micro_batches"
    ),
    "optimizer_steps_expected": _steps("required by the data", title="due"),
    "optimizer_steps_observed": _steps("observed at the inner optimizer", title="taken", source="time.num_updates"),
    "optimizer_steps_reported": _steps("reported by the framework", title="reported"),
    "optimizer_steps_reported_by": text(
        "the framework's counter that reports them", title="reported by", over=FIRST, section=SEMANTICS
    ),
    "ranks_agree": flag(
        "whether all ranks took the same number of steps and micro-batches",
        title="ranks agree",
        over=FIRST,
        section=SEMANTICS,
        source="time.ranks_agree",
    ),
    "micro_batches_per_update": Column(
        "string", "micro-batches", "the distinct numbers observed, comma-separated", over=FIRST
    ),
    "final_loss": _checked("nat/token", "of the last step", title="final loss", form=".4f", over=MEDIAN),
    "max_loss_deviation": _checked(
        "nat/token", "largest difference from the reference's losses", title="loss off by (nats)", form=".1e", over=MAX
    ),
    "update_error": _checked(
        "1",
        "relative L2 error of the update of one SGD window",
        title="update error",
        form=".1e",
        over=MAX,
        source="update.error",
    ),
    "update_scale": _checked(
        "1",
        "least-squares factor from the reference's update",
        title="update / reference's",
        form=".4g",
        over=MEDIAN,
        source="update.scale",
    ),
    "update_residual": number("1", "relative error that remains after removing update_scale", source="update.residual"),
    "gradient_norm": number(
        "L2 norm", "gradient norm of the update pass, before clipping", source="update.gradient_norm"
    ),
    "unclipped_error": number(
        "1", "update_error without clipping, for cells that clip", source="update.unclipped_error"
    ),
    "unclipped_scale": number(
        "1", "update_scale without clipping, for cells that clip", source="update.unclipped_scale"
    ),
    "device_error": number(
        "1",
        "relative L2 error of a small model's update on the device, against the CPU's; of references",
        source="update.device_error",
    ),
    "device_loss_deviation": number(
        "nat/token", "largest difference of its losses from the CPU's", source="update.device_loss_deviation"
    ),
    "entropy_floor": number(
        "nat/token", "lowest expected loss that a model of the corpus can reach", over=FIRST, source="entropy_floor"
    ),
    "wall_s": number("s", "of the whole trial", source="wall_s"),
    "training_s": number("s", "of the training in its passes", source="training_s"),
    "overhead_s": number("s", "wall_s minus training_s"),
    "num_passes": count("passes", "of the trial"),
    "num_cpus": count("CPUs", "of the machine", source="time.host.num_cpus"),
    "foreign_cores": number(
        "CPUs", "used by other programs, mean over the time pass", source="time.host.foreign_cores"
    ),
    "stolen_cores": number("CPUs", "taken by the hypervisor, mean over the time pass", source="time.host.stolen_cores"),
    "sm_clock_mhz": number("MHz", "median over the timed steps, lowest of the GPUs"),
    "power_w": number("W", "of the GPUs in use"),
    "temperature_c": number("degC", "of the hottest GPU"),
    "clock_slowdowns": text("reasons for reduced clocks in at least 10 % of the samples, comma-separated"),
    "foreign_gpu_processes": count("processes", "of other programs on the GPUs"),
}
