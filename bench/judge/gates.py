"""Gates: the checks that make a trial ``invalid``. Facts come from the tables, limits from ``TOLERANCES``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from bench.judge import expected
from bench.judge.expected import Deviation, Losses
from bench.judge.tables import Tables, rows_of, world_of
from bench.plan.cell import SGD, Precision, Status
from bench.plan.models import SIZES
from bench.words import plural
from bench.workload.layout import Layout

SAME_FACTOR = 0.05
"""How near a scale must be to 1/N, N, 1/W or W to be called by that name. If several fit, all are named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Allowed differences from the fp32 reference."""

    update_error: float
    """Relative L2 error of the update of one SGD window."""
    first_loss: float
    """|loss - reference's loss| of the first step, before any update, in nats per token."""
    loss_deviation: float
    """Largest |loss - reference's loss| over the compared steps (``bench.judge.expected``), in nats per token."""
    reason: str


TOLERANCES: dict[str, Tolerance] = {
    Precision.FP32: Tolerance(
        update_error=1e-5,
        first_loss=1e-5,
        loss_deviation=1e-3,
        reason="only the order of fp32 sums differs: 4e-7 was seen for the update (the rounding of w - g) and 1e-5 for "
        "the loss after 15 steps of AdamW, which amplifies it; one sample lost in a thousand would be 1e-3",
    ),
    Precision.BF16: Tolerance(
        update_error=3e-2,
        first_loss=1e-2,
        loss_deviation=3e-2,
        reason="bf16 has 8 bits of mantissa, and forward and backward round at every operator. Seen on the CPU for the "
        "update: 8e-3 (tiny), 9e-3 to 1.4e-2 (135m, every sound backend alike), whatever N is, less with more tokens. "
        "For the loss: 4e-3 (tiny), 2e-3 (135m), 8e-3 of 64 tokens in 10 layers of 1b's width, and less of more. A "
        "loss divided by 2 too often would be 0.5, one of 32 samples lost 0.18 if they agree in nothing",
    ),
}
"""By precision of the cell. The reference is always fp32."""
BF16_ROUNDING = 2e-4
"""Upper bound of the error of a bf16 update divided by sqrt(layers x width).

Seen on the CPU, of the gradient alone: 8.9e-3, 1.25e-2 and 1.65e-2 in 2 layers of width 1024, 2048 and 4096; 1.8e-2 and
2.8e-2 in 4 and 10 layers of width 2048: 1.8e-4 to 2e-4 of the root. In the 30 layers of 135m it is half of that. This
predicts 3.6e-2 for 1b and 7.2e-2 for 8b. The limit is twice the prediction, since a GPU rounds at other places, and
never below that of small models.
"""
BF16_UNKNOWN = 0.15
"""Limit for a bf16 update of a model that is not shipped, whose layers and width are unknown; about that of 8b."""


def tolerance(precision: str, workload: str, model: str) -> Tolerance:
    """The tolerance of a precision, workload and model: bf16 rounding errors grow with width and depth."""
    found = TOLERANCES[precision]
    if precision != Precision.BF16:
        return found
    size = SIZES.get(model) if workload == "llama" else None
    limit = 2 * BF16_ROUNDING * math.sqrt(size.num_layers * size.hidden_size) if size else BF16_UNKNOWN
    return replace(found, update_error=max(found.update_error, round(limit, 3)))


def judge(
    tables: Tables, layouts: Mapping[str, Layout] | None = None, peaks: Mapping[str, int] | None = None
) -> Tables:
    """Fill in expected values, and set ``status`` and ``reason`` of trials that fail a gate. Returns new tables.

    By cell id: ``layouts`` of models that are not shipped (``expected.layouts_of``), and ``peaks``, the predicted peaks
    of memory in bytes.

    Trials that are not ``ok`` are left unchanged. A trial that cannot be checked, because its reference is missing or
    failed, is invalid too: unchecked numbers never count as good. A virtual world has no values, so only its steps are
    checked.
    """
    trials = tables.trials.copy()
    losses = Losses(tables)
    good = trials[trials["status"] == Status.OK]
    found: dict[Any, list[str]] = {}
    largest: dict[Any, float | None] = {}
    for index, row in zip(good.index, rows_of(good), strict=True):
        world = world_of(row)
        if world.has_values:
            deviation = losses.deviation(row)
            largest[index] = None if deviation is None else deviation.largest
            found[index] = findings(row, deviation)
        else:
            found[index] = _step_findings(row) if world.computes else []
    trials["max_loss_deviation"] = pd.Series(largest, dtype="Float64").reindex(trials.index)
    filled, wrong = expected.fill(replace(tables, trials=trials), layouts, peaks)
    for index, cell_id in good["cell_id"].items():
        if reasons := [*found[index], *wrong.get(cell_id, ())]:
            trials.loc[index, ["status", "reason"]] = [str(Status.INVALID), "; ".join(reasons)]
    return replace(filled, trials=trials)


def findings(row: Any, deviation: Deviation | None) -> list[str]:
    """The reasons why a finished trial fails its gates; empty if it passes all.

    ``row`` is a row of the trials table; ``deviation`` that of its losses, None if they cannot be compared.
    """
    limits = tolerance(row["precision"], row["workload"], row["model"])
    found = _step_findings(row)
    if pd.notna(row["other_work"]) and row["other_work"]:
        found.append(f"forward and backward are not those of the plain model: {row['other_work']}")
    update = _update_finding(row, limits)
    if deviation is None:
        found.append("losses could not be checked: the reference failed or is missing, or not every step has a loss")
    elif math.isfinite(deviation.largest) and deviation.first > limits.first_loss:
        found.append(
            f"the first loss, before any update, is off by {deviation.first:.2g} nats (limit {limits.first_loss:g} in "
            f"{row['precision']}): other weights, other samples, or another mean of them"
        )
    elif not deviation.largest <= limits.loss_deviation:
        finite = math.isfinite(deviation.largest)
        what = f"losses leave the reference's by {deviation.largest:.2g}" if finite else "a loss is not finite"
        what += f" (limit {limits.loss_deviation:g} nats in {row['precision']})"
        if deviation.num_steps < row["optimizer_steps_expected"]:
            what += f" in the first {plural(deviation.num_steps, 'step')}"
        if update and finite and _moves_losses(row):
            update += f"; so {what}"
        else:
            found.append(what)
    return [*found, update] if update else found


def _update_finding(row: Any, limits: Tolerance) -> str:
    """What is wrong with the update of one SGD window, with the cell's clipping; empty if it is right."""
    if pd.isna(row["update_error"]):
        return "no update to check: the update pass did not run, or the reference has none"
    scale, residual, clip = row["update_scale"], row["update_residual"], _clip(row)
    limit, rounding = f"(limit {limits.update_error:g} in {row['precision']})", max(SAME_FACTOR, limits.update_error)
    right_before = clip is not None and not row["unclipped_error"] > limits.update_error
    if row["update_error"] > limits.update_error:
        if clip and right_before:
            cause = explain_clipping(scale, residual, clip)
        else:
            cause = explain_update(scale, residual, row["accumulate"], row["world_size"], clip, rounding)
        return f"the update is off by {row['update_error']:.2g} {limit}: {cause}"
    if clip and not right_before:
        cause = explain_update(clip.unclipped_scale, residual, row["accumulate"], row["world_size"], None, rounding)
        return (
            f"the update is off by {row['unclipped_error']:.2g} {limit} before clipping, and right only as both were "
            f"clipped to norm {clip.norm:g}: {cause}"
        )
    return ""


def _moves_losses(row: Any) -> bool:
    """Whether the update has the wrong scale, nothing else is wrong with it, and the losses must deviate too.

    AdamW is invariant to the scale of gradients, unless they are clipped: its moments then weigh clipped and unclipped
    gradients wrongly.
    """
    scales = (scale for scale in (row["update_scale"], row["unclipped_scale"]) if pd.notna(scale) and scale > 0)
    multiple = any(row["update_residual"] <= min(SAME_FACTOR, abs(scale - 1)) for scale in scales)
    return bool(multiple and (row["optimizer"] == SGD or row["clip_norm"] > 0))


def _step_findings(row: Any) -> list[str]:
    found = []
    expected, observed = row["optimizer_steps_expected"], row["optimizer_steps_observed"]
    if observed != expected:
        found.append(f"{observed} optimizer steps were taken, {expected} were due")
    if row["num_micro_batches"] != expected * row["accumulate"]:
        found.append(f"{row['num_micro_batches']} micro-batches were used, {expected * row['accumulate']} were due")
    elif row["micro_batches_per_update"] != str(row["accumulate"]):
        found.append(f"updates used {row['micro_batches_per_update']} micro-batches each, {row['accumulate']} were due")
    summed = row["accumulated_in"]
    if pd.notna(summed) and summed not in {"not measured", row["accumulation_dtype"]}:
        found.append(f"gradients are summed in {summed}, {row['accumulation_dtype']} was due")
    if not row["ranks_agree"]:
        found.append("the ranks took different numbers of steps")
    return found


def _clip(row: Any) -> Clip | None:
    """The clipping of a row of the trials table; None if it does not clip, or a value is missing."""
    facts = [row["clip_norm"], row["gradient_norm"], row["unclipped_scale"]]
    known = all(pd.notna(fact) and math.isfinite(fact) and fact > 0 for fact in facts)
    return Clip(*facts) if known else None


@dataclass(frozen=True, slots=True)
class Clip:
    """What is known of a clipped update."""

    norm: float
    """The largest norm that an update may have."""
    gradient_norm: float
    """The backend's, before clipping."""
    unclipped_scale: float
    """How many times the reference's update the backend's is if neither clips."""

    @property
    def right_norm(self) -> float:
        """The norm of the reference's update, clipped."""
        return min(self.gradient_norm / self.unclipped_scale, self.norm)

    @property
    def due_scale(self) -> float:
        """How many times the reference's update the backend's should be, if both clip."""
        return min(self.gradient_norm, self.norm) / self.right_norm

    @property
    def scale_if_not_clipped(self) -> float:
        """How many times the reference's update the backend's would be, if only the reference clips."""
        return self.gradient_norm / self.right_norm


def explain_update(
    scale: float,
    residual: float,
    accumulate: int,
    world_size: int,
    clip: Clip | None = None,
    rounding: float = SAME_FACTOR,
) -> str:
    """The likeliest cause of a wrong update, from how it relates to the right one.

    ``scale`` is the least-squares factor between the two and ``residual`` what it leaves unexplained, of which as much
    as ``rounding`` may be the precision's. With ``clip``, both were clipped: what is f times a gradient of norm g
    should then be min(f g, c) / min(g, c) times the right update, c being the largest norm allowed, and the cause is
    read off f.
    """
    if pd.isna(scale):
        return "it is not finite"
    if scale == 0:
        return "the parameters did not change in the right direction at all"
    if residual > rounding or residual > abs(scale - 1):
        return (
            f"{scale:.3g} times the right one and {100 * residual:.2g}% of it pointing elsewhere: samples were lost, "
            "repeated or weighted unequally"
        )
    if clip:
        cause = explain_update(clip.unclipped_scale, residual, accumulate, world_size, None, rounding)
        how = "too short to be clipped" if clip.gradient_norm <= clip.norm else "clipped"
        due = "" if abs(scale / clip.due_scale - 1) < SAME_FACTOR else f" and not {clip.due_scale:.3g}"
        return f"before clipping {cause}; after, {scale:.3g} times{due} ({how} to {clip.norm:g})"
    causes = [
        (1 / accumulate, f"1/{accumulate} of the right one: the loss is divided by N = {accumulate} twice"),
        (accumulate, f"{accumulate} times the right one: the loss is not divided by N = {accumulate}"),
        (1 / world_size, f"1/{world_size} of the right one: averaged over the {world_size} ranks twice"),
        (world_size, f"{world_size} times the right one: summed over the {world_size} ranks, not averaged"),
    ]
    likely = [words for factor, words in causes if factor != 1 and abs(scale / factor - 1) < SAME_FACTOR]
    if likely:
        return ", or ".join(likely)
    return f"{scale:.3g} times the right one, in the {'same' if scale > 0 else 'opposite'} direction"


def explain_clipping(scale: float, residual: float, clip: Clip) -> str:
    """The likeliest cause of an update that is right before it is clipped and wrong after."""
    if pd.isna(scale):
        return "it is not finite"
    if residual > SAME_FACTOR or residual > abs(scale - 1):
        return f"right before it is clipped: its parts are clipped one by one, not the whole to norm {clip.norm:g}"
    if abs(scale / clip.scale_if_not_clipped - 1) < SAME_FACTOR:
        return f"right but for its length: it is not clipped to norm {clip.norm:g}"
    found = scale * clip.right_norm
    return f"right but for its length: it is clipped to norm {found:.3g}, not to {clip.norm:g}"
