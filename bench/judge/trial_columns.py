"""The columns of the trials table, what a column is, and a typed row of that table.

A column has a dtype, a unit and a meaning, says how a cell's value comes from its trials, and who
shows it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from functools import partial

from bench.backends.base import Lossy
from bench.formatting import size
from bench.plan.cell import Cell, Status

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
    over: Over | None = None
    """How a cell's value comes from its trials', beside that of an axis, which all share."""
    section: str = ""
    """Key of the page's section whose table of cells has the column; empty if none has."""
    title: str = ""
    """Column heading in tables; empty to use the name."""
    form: str = ""
    """Format specification for numbers in tables."""
    phrasing: tuple[str, ...] = ("{}",)
    """Templates for a value in a title or sentence: the first for false and 0, the last for
    everything else."""

    @property
    def is_number(self) -> bool:
        return self.dtype in {"Int64", "Float64"}

    @property
    def aggregation(self) -> Over | None:
        """How a cell's value comes from its trials'.

        None if cells have no such column, or calculate it otherwise.
        """
        if self.over is None and self.axis is not None:
            return Over.FIRST
        return self.over

    @property
    def is_of_each_cell(self) -> bool:
        """Whether cells have it, outside the sections of a table."""
        return self.aggregation is not None and not self.section

    def shown(self, value: object) -> str:
        """A value as a table shows it; None is unknown."""
        if value is None or value == "":
            return DASH
        if self.dtype == "boolean":
            return "yes" if value else "no"
        if isinstance(value, str):
            return value
        assert isinstance(value, int | float), "other columns hold numbers"
        if self.unit == "B":
            return size(float(value))
        if self.dtype == "Int64":
            return format(int(value), self.form)
        return format(float(value), self.form)

    def phrase(self, value: object) -> str:
        """A value as a title or sentence shows it; None is unknown."""
        if value is None:
            return "unknown"
        words = self.phrasing[0]
        if value:
            words = self.phrasing[-1]
        return words.format(value)


SPEED, MEMORY, COMMUNICATION, CORRECTNESS, SEMANTICS = (
    "speed",
    "memory",
    "communication",
    "correctness",
    "semantics",
)
"""Keys of the page's sections."""
text, flag = partial(Column, "string", ""), partial(Column, "boolean", "")
number, count = partial(Column, "Float64", form="g"), partial(Column, "Int64")
_SHARE = ", including the optimizer step's share"
_cost = partial(number, form=".3g", over=Over.MEDIAN, section=SPEED)
_exposure = partial(number, "s", form=".3g", over=Over.MEDIAN, section=COMMUNICATION)
_checked = partial(number, section=CORRECTNESS)
_steps = partial(count, "steps", over=Over.FIRST, section=SEMANTICS)

KEY = {
    "cell_id": text("id of the cell: a hash of its content"),
    "repeat": count("", "index of the trial among its cell's, and of the block in which it ran"),
}
"""What identifies a trial within its run."""

TRIAL_COLUMNS: dict[str, Column] = {
    "run_id": text("id of the run", over=Over.FIRST),
    **KEY,
    "label": text("a short readable name of the cell, another one for its A/A copy"),
    "twin": text("label of the A/A copy of a cell; empty for all others", over=Over.FIRST),
    "slot": count("", "position in the order of execution"),
    "backend": text("one way to accumulate gradients", axis=Axis.NAME),
    "framework": text("framework of the backend", over=Over.FIRST),
    "sharding": text("what is split across ranks: none, optimizer, grads, params", over=Over.FIRST),
    "sync": text(
        "when gradients are reduced: none, eager, deferred-all-reduce, deferred", over=Over.FIRST
    ),
    "accumulate": count(
        "micro-batches", "N, per window and rank", axis=Axis.NAME, title="N", phrasing=("N = {}",)
    ),
    "world_size": count("ranks", "W", axis=Axis.NAME, title="W", phrasing=("W = {}",)),
    "replicate": count(
        "replicas",
        "of HSDP; 0 for other backends",
        axis=Axis.WAY,
        title="R",
        phrasing=("no replicas", "{} replicas"),
    ),
    "virtual_world_size": count("ranks", "W of a virtual world; NA for a real one"),
    "fake_tensors": flag("whether tensors have shapes but no values"),
    "shared_gpu": flag("whether ranks shared a GPU; nothing is timed then"),
    "micro_batch_size": count("samples", "per forward on one rank", over=Over.FIRST),
    "global_batch_size": count(
        "samples",
        "per optimizer step over all ranks",
        axis=Axis.WORK,
        title="B",
        phrasing=("B = {}",),
    ),
    "sequence_length": count(
        "tokens", "per sample", axis=Axis.WORK, title="tokens", phrasing=("{} tokens",)
    ),
    "workload": text("what is trained", axis=Axis.WORK),
    "model": text("size of the model", axis=Axis.WORK),
    "num_parameters": count("parameters", "of the model", over=Over.FIRST),
    "precision": text("dtype of forward and backward", axis=Axis.NAME, title="dtype"),
    "bf16_as": text("how a bf16 cell computes"),
    "accumulation_dtype": text(
        "dtype in which gradients should be summed",
        axis=Axis.WAY,
        title="summed in",
        phrasing=("summed in {}",),
    ),
    "accumulated_in": text(
        "dtype in which they were measured to be summed",
        title="gradients summed in",
        over=Over.FIRST,
        section=CORRECTNESS,
    ),
    "stepped_in": text(
        "dtype in which they were measured to reach the optimizer, from the second window on",
        over=Over.FIRST,
    ),
    "corpus": text("where the tokens come from", axis=Axis.WORK),
    "optimizer": text("optimizer of the time pass", axis=Axis.WORK),
    "learning_rate": number(
        "", "of the optimizer", axis=Axis.WORK, title="lr", phrasing=("lr {:g}",)
    ),
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
    "compiled": flag(
        "whether blocks are compiled", axis=Axis.WAY, phrasing=("not compiled", "blocks compiled")
    ),
    "ranks_per_node": count(
        "ranks", "0 if all are on one node", axis=Axis.WAY, phrasing=("one node", "{} per node")
    ),
    "seed": count(
        "", "of the initial weights and of the tokens", axis=Axis.WORK, phrasing=("seed {}",)
    ),
    "device": text("cpu or cuda", axis=Axis.WORK),
    "device_name": text("device of the first rank"),
    "status": text(
        "ok, or how the trial ended: oom, timeout, hang, crashed, unsupported, invalid, interrupted"
    ),
    "reason": text("why the status is not ok"),
    "failed_gates": text("gates that the trial failed, comma-separated", over=Over.FIRST),
    "update_causes": text(
        "likely causes of an update of the wrong scale, comma-separated", over=Over.FIRST
    ),
    "num_warmup_steps": count(
        "steps",
        "excluded at the beginning",
        title="warm-up steps left out, at most",
        over=Over.MAX,
        section=SPEED,
    ),
    "step_time_s": number(
        "s",
        "median of the steps after warm-up, each the maximum over ranks",
        title="s/step",
        form=".4g",
    ),
    "tokens_per_s": number("tokens/s", "over all ranks", title="tokens/s", form=",.0f"),
    "mfu": _cost("1", "model FLOPs utilization against the datasheet's peak", title="MFU"),
    "mfu_of_matmul": _cost(
        "1", "the same against the matrix-product rate measured in the run", title="MFU of matmul"
    ),
    "link_bytes_per_s": number(
        "B/s", "bus bandwidth of all-reduces, measured in the run", title="link", form=".3g"
    ),
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
        "first operator of forward or backward that differs from the plain model; "
        "empty if none does",
    ),
    "collective_s": _exposure(
        "time in one window during which NCCL kernels ran", title="s in collectives"
    ),
    "exposed_s": _exposure("part of it during which nothing else ran", title="s exposed"),
    "peak_memory_bytes": count("B", "maximum over ranks"),
    "peak_memory_source": text("what measured peak_memory_bytes", title="measured by"),
    "num_micro_batches": count("micro-batches", "consumed by one rank in the time pass"),
    "optimizer_steps_expected": _steps("required by the data", title="due"),
    "optimizer_steps_observed": _steps("observed at the inner optimizer", title="taken"),
    "optimizer_steps_reported": _steps("reported by the framework", title="reported"),
    "optimizer_steps_reported_by": text(
        "the framework's counter that reports them",
        title="reported by",
        over=Over.FIRST,
        section=SEMANTICS,
    ),
    "ranks_agree": flag(
        "whether all ranks took the same number of steps and micro-batches",
        title="ranks agree",
        over=Over.FIRST,
        section=SEMANTICS,
    ),
    "micro_batches_per_update": Column(
        "string", "micro-batches", "the distinct numbers observed, comma-separated", over=Over.FIRST
    ),
    "final_loss": _checked(
        "nat/token", "of the last step", title="final loss", form=".4f", over=Over.MEDIAN
    ),
    "max_loss_deviation": _checked(
        "nat/token",
        "largest difference from the reference's losses",
        title="loss off by (nats)",
        form=".1e",
        over=Over.MAX,
    ),
    "update_error": _checked(
        "1",
        "relative L2 error of the update of one SGD window",
        title="update error",
        form=".1e",
        over=Over.MAX,
    ),
    "update_scale": _checked(
        "1",
        "least-squares factor from the reference's update",
        title="update / reference's",
        form=".4g",
        over=Over.MEDIAN,
    ),
    "update_residual": number("1", "relative error that remains after removing update_scale"),
    "update_tensor_error": number(
        "1", "relative L2 error of the parameter that is furthest off in that update", over=Over.MAX
    ),
    "update_tensor": text("that parameter", over=Over.FIRST),
    "fp32_update_error": number(
        "1", "update_error of a bf16 cell, computed in fp32", over=Over.MAX
    ),
    "fp32_tensor_error": number(
        "1", "update_tensor_error of a bf16 cell, computed in fp32", over=Over.MAX
    ),
    "fp32_tensor": text("the parameter that is furthest off in it", over=Over.FIRST),
    "end_weights_error": _checked(
        "1",
        "distance of the parameter that is furthest from the reference's "
        "after the last window, relative to its change",
        title="weights at the end off by",
        form=".1e",
        over=Over.MAX,
    ),
    "end_weights_tensor": text("that parameter", over=Over.FIRST),
    "end_state_error": _checked(
        "1",
        "the same of the tensors of the optimizer's state, relative to their norm",
        title="optimizer state off by",
        form=".1e",
        over=Over.MAX,
    ),
    "end_state_tensor": text("that tensor", over=Over.FIRST),
    "ranks_apart": _checked(
        "1",
        "largest distance between two ranks' values of one tensor "
        "after the update or the last window, relative to its norm",
        title="ranks apart by",
        form=".1e",
        over=Over.MAX,
    ),
    "ranks_apart_tensor": text("that tensor, and the rank", over=Over.FIRST),
    "optimizer_steps_counted": count(
        "steps", "the most that the state of the optimizer counts", over=Over.FIRST
    ),
    "other_settings": text(
        "settings of the optimizer that are not those that were due", over=Over.FIRST
    ),
    "rounded_to_bf16": text(
        "tensors with no more digits than bf16 after the last window", over=Over.FIRST
    ),
    "unchecked": text(
        "what of the end of the training was not compared with the reference's, and why",
        over=Over.FIRST,
    ),
    "gradient_norm": number("L2 norm", "gradient norm of the update pass, before clipping"),
    "unclipped_error": number("1", "update_error without clipping, for cells that clip"),
    "unclipped_scale": number("1", "update_scale without clipping, for cells that clip"),
    "device_error": number(
        "1",
        "relative L2 error of a small model's update on the device, "
        "against the CPU's; of references",
    ),
    "device_loss_deviation": number("nat/token", "largest difference of its losses from the CPU's"),
    "device_loss_size": number("nat/token", "largest of its losses"),
    "entropy_floor": number(
        "nat/token", "lowest expected loss that a model of the corpus can reach", over=Over.FIRST
    ),
    "wall_s": number("s", "of the whole trial"),
    "training_s": number("s", "of the training in its passes"),
    "overhead_s": number("s", "wall_s minus training_s"),
    "num_passes": count("passes", "of the trial"),
    "num_cpus": count("CPUs", "of the machine"),
    "foreign_cores": number("CPUs", "used by other programs, mean over the time pass"),
    "stolen_cores": number("CPUs", "taken by the hypervisor, mean over the time pass"),
    "sm_clock_mhz": number("MHz", "median over the timed steps, lowest of the GPUs"),
    "power_w": number("W", "of the GPUs in use"),
    "temperature_c": number("degC", "of the hottest GPU"),
    "clock_slowdowns": text(
        "reasons for reduced clocks in at least 10 % of the samples, comma-separated"
    ),
    "foreign_gpu_processes": count("processes", "of other programs on the GPUs"),
}


@dataclass(kw_only=True, slots=True)
class GateFacts:
    """What gates read of a trial beside the columns of its row; None is unknown."""

    lossy: Lossy | None = None
    """What its backend declares to lose on purpose."""
    matmul_capacity: float | None = None
    """FLOP/s of large matrix products on all ranks at once, measured in the run, had nobody else
    taken the CPUs."""
    model_flops: float | None = None
    """Of a step on all ranks, as MFU counts them."""
    product_flops: float | None = None
    """Of the matrix products of a step on all ranks, counted in the plain model."""
    span_s: float | None = None
    """From the first fetch to the last step of the time pass, by the rank's clock."""
    marking_s: float = 0.0
    """What the kernel's clock may tell more."""
    observed_span_s: float | None = None
    """The same by the kernel's clock."""
    steps_s: float | None = None
    """Steps of the rank whose own take the least together, since ranks need not begin at once."""


@dataclass(kw_only=True, slots=True)
class TrialRow:
    """A row of the trials table: its cell, the columns that are not the cell's, facts for gates.

    None is unknown. NaN is unknown too, so what a check reads is either a number or None.
    """

    cell: Cell
    label: str
    run_id: str
    repeat: int
    status: Status
    reason: str
    wall_s: float
    num_passes: int
    slot: int | None = None
    framework: str | None = None
    sharding: str | None = None
    sync: str | None = None
    num_parameters: int | None = None
    bf16_as: str | None = None
    accumulated_in: str | None = None
    stepped_in: str | None = None
    device_name: str | None = None
    failed_gates: str | None = None
    update_causes: str | None = None
    num_warmup_steps: int | None = None
    step_time_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None
    mfu_of_matmul: float | None = None
    link_bytes_per_s: float | None = None
    energy_j_per_step: float | None = None
    energy_j_per_token: float | None = None
    cpu_s_per_micro_batch: float | None = None
    num_operators_per_micro_batch: float | None = None
    num_launches_per_micro_batch: float | None = None
    other_work: str | None = None
    collective_s: float | None = None
    exposed_s: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_source: str | None = None
    num_micro_batches: int | None = None
    optimizer_steps_observed: int | None = None
    optimizer_steps_reported: int | None = None
    optimizer_steps_reported_by: str | None = None
    ranks_agree: bool | None = None
    micro_batches_per_update: str | None = None
    final_loss: float | None = None
    max_loss_deviation: float | None = None
    update_error: float | None = None
    update_scale: float | None = None
    update_residual: float | None = None
    update_tensor_error: float | None = None
    update_tensor: str | None = None
    fp32_update_error: float | None = None
    fp32_tensor_error: float | None = None
    fp32_tensor: str | None = None
    end_weights_error: float | None = None
    end_weights_tensor: str | None = None
    end_state_error: float | None = None
    end_state_tensor: str | None = None
    ranks_apart: float | None = None
    ranks_apart_tensor: str | None = None
    optimizer_steps_counted: int | None = None
    other_settings: str | None = None
    rounded_to_bf16: str | None = None
    unchecked: str | None = None
    gradient_norm: float | None = None
    unclipped_error: float | None = None
    unclipped_scale: float | None = None
    device_error: float | None = None
    device_loss_deviation: float | None = None
    device_loss_size: float | None = None
    entropy_floor: float | None = None
    training_s: float | None = None
    overhead_s: float | None = None
    num_cpus: int | None = None
    foreign_cores: float | None = None
    stolen_cores: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_slowdowns: str | None = None
    foreign_gpu_processes: int | None = None
    facts: GateFacts = field(default_factory=GateFacts)

    @property
    def key(self) -> tuple[str, int]:
        """What identifies the trial within its run."""
        return self.cell.cell_id, self.repeat

    def leave_unchecked(self, what: str) -> None:
        """Note what could not be compared with the reference, after what is noted already."""
        if self.unchecked:
            what = f"{self.unchecked}; {what}"
        self.unchecked = what

    @property
    def slowdown_reasons(self) -> frozenset[str]:
        """The reasons in ``clock_slowdowns``; none if they are unknown."""
        if not self.clock_slowdowns:
            return frozenset()
        return frozenset(self.clock_slowdowns.split(","))

    @property
    def virtual_world_size(self) -> int | None:
        if self.cell.world.has_all_ranks:
            return None
        return self.cell.world_size

    @property
    def optimizer_steps_expected(self) -> int | None:
        if not self.cell.world.computes:
            return None
        return self.cell.windows

    def values(self) -> dict[str, object]:
        """The value of each column, by name."""
        found: dict[str, object] = {}
        for name in TRIAL_COLUMNS:
            owner = self if hasattr(self, name) else self.cell
            value = getattr(owner, name)
            if isinstance(value, StrEnum):
                value = value.value
            found[name] = value
        return found
