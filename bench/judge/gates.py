"""Gates: the checks that make a trial ``invalid``, from facts in the tables and ``TOLERANCES``.

What failed is data: the gate, and the causes of a wrong update. The sentences beside it are for
people alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from bench.backends.base import Lossy
from bench.formatting import beyond, plural
from bench.judge import expected
from bench.judge.expected import COMPARED_STEPS, Deviation, Losses
from bench.judge.impossible import impossible
from bench.judge.tables import Tables, known
from bench.judge.trial_columns import TrialRow
from bench.judge.update_causes import (
    SAME_FACTOR,
    Cause,
    Clip,
    Explanation,
    explain_clipping,
    explain_update,
)
from bench.plan.cell import SGD, Cell, Precision, Status
from bench.plan.models import SIZES
from bench.run.manifest import Manifest
from bench.run.trial_record import TrialRecord


class Gate(StrEnum):
    """What is checked."""

    STEPS = "steps"
    """Numbers of optimizer steps and micro-batches, equal on all ranks."""
    ACCUMULATION = "accumulation dtype"
    """The dtype in which gradients are summed."""
    WORK = "work"
    """The operators of forward and backward."""
    LOSS = "loss"
    """Losses, against the reference's."""
    UPDATE = "update"
    """The update of one SGD window, against the reference's."""
    STATE = "state at the end"
    """Weights and optimizer state after the last timed window, against the reference's."""
    RANKS = "ranks"
    """What several ranks hold of the same tensor."""
    TIME = "time"
    """Times that cannot be: see ``bench.judge.impossible``."""
    DEVICE = "device"
    """A small model's update and losses on the device of the run, against the CPU's."""
    BYTES = "bytes"
    """Collectives and memory held between micro-batches, against their formulas."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A gate that a trial failed; of several of one gate, each has a clause."""

    gate: Gate
    text: str
    """What was found, for people."""
    causes: tuple[Cause, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """Allowed differences from the fp32 reference."""

    update_error: float
    """Relative L2 error of the update of one SGD window."""
    tensor_error: float
    """That of each parameter (``bench.measure.update``)."""
    first_loss: float
    """|loss - reference's loss| of the first step, before any update, relative to the size of the
    losses."""
    loss_deviation: float
    """Largest |loss - reference's loss| over the compared steps, relative to the size of the
    losses, or to LOSS_SPREADS times their spread if that is smaller."""
    end_weights: float
    """Distance of a parameter after the last window from the reference's, relative to its change
    (``bench.run.state_check``)."""
    end_state: float
    """That of a tensor of the optimizer's state, relative to its norm."""
    reason: str

    def loss_limit(self, deviation: Deviation) -> float:
        """The largest deviation of the losses, in their unit."""
        moved = min(deviation.size, LOSS_SPREADS * deviation.spread)
        return max(self.first_loss * deviation.size, self.loss_deviation * moved)


LOSS_SPREADS = 30.0
"""A loss with a large constant in it, which hides what is learnt, moves less than its size divided
by this."""


TOLERANCES: dict[str, Tolerance] = {
    Precision.FP32: Tolerance(
        update_error=1e-5,
        tensor_error=1e-4,
        first_loss=2e-6,
        loss_deviation=2e-4,
        end_weights=2e-3,
        end_state=1e-3,
        reason="only the order of fp32 sums differs: 4e-7 was seen for the update (the rounding "
        "of w - g), 2e-7 for that of a parameter beyond that rounding, and 1e-5 for a "
        "loss of 5.5 after 15 steps of AdamW, which amplifies it; one sample lost in a "
        "thousand would be 1e-3. After 6 to 49 windows of AdamW: 3e-6 for a tensor of "
        "its state and 7e-6 for a parameter (Llama, GPT-2, Qwen2), 2e-5 and 1e-4 where "
        "tokens choose experts. Norms that nothing decays would be 1e-2 off",
    ),
    Precision.BF16: Tolerance(
        update_error=3e-2,
        tensor_error=0.3,
        first_loss=2e-3,
        loss_deviation=6e-3,
        end_weights=1.5,
        end_state=0.3,
        reason="bf16 has 8 bits of mantissa, and forward and backward round at every operator. "
        "Seen on the CPU for the update: 8e-3 (tiny), 9e-3 to 1.4e-2 (135m, every sound "
        "backend alike), whatever N is, less with more tokens. For a loss of 5 to 10: "
        "4e-3 (tiny), 2e-3 (135m), 8e-3 of 64 tokens in 10 layers of 1b's width, less of "
        "more. A loss divided by 2 too often would be 0.5, one of 32 samples lost 0.18 "
        "if they agree in nothing. Of one parameter, the update was up to 1e-2 off, and "
        "after 12 to 49 windows 9e-2, a tensor of AdamW's state 3e-2; 0.1, 0.2 and 0.14 "
        "where tokens choose experts. One that is not trained is 1 off. AdamW makes full "
        "steps of gradients that bf16 has lost, so weights are held to more than that",
    ),
}
"""By precision of the cell. The reference is always fp32."""
BF16_ROUNDING = 2e-4
"""Upper bound of the error of a bf16 update divided by sqrt(layers x width).

Seen on the CPU, of the gradient alone: 8.9e-3, 1.25e-2 and 1.65e-2 in 2 layers of width 1024, 2048
and 4096; 1.8e-2 and 2.8e-2 in 4 and 10 layers of width 2048: 1.8e-4 to 2e-4 of the root. In the 30
layers of 135m it is half of that. This predicts 3.6e-2 for 1b and 7.2e-2 for 8b. The limit is twice
the prediction, since a GPU rounds at other places, and never below that of small models.
"""
MOST_OF_TENSOR = 0.5
"""Limit in bf16 for single tensors of large or unknown models; 1 is that of a tensor which is not
trained."""
BF16_UNKNOWN = 0.15
"""Limit for a bf16 update of a model that is not shipped, whose layers and width are unknown; about
that of 8b."""


def tolerance(precision: str, workload: str, model: str) -> Tolerance:
    """The tolerance of a precision, workload and model: bf16's errors grow with width and depth."""
    found, limit = TOLERANCES[precision], BF16_UNKNOWN
    if precision != Precision.BF16:
        return found
    if workload == "llama" and (size := SIZES.get(model)):
        limit = 2 * BF16_ROUNDING * math.sqrt(size.num_layers * size.hidden_size)
    limit = max(found.update_error, round(limit, 3))
    of_tensor = min(MOST_OF_TENSOR, 10 * limit)
    return replace(found, update_error=limit, tensor_error=of_tensor, end_state=of_tensor)


def allowed(cell: Cell, lossy: Lossy | None) -> Tolerance:
    """The tolerance of a cell, with what its backend declares to lose on purpose.

    Other limits then follow from that of the update as they do in bf16, up to those of bf16.
    """
    found = tolerance(cell.precision, cell.workload, cell.model)
    if lossy is None:
        return found
    bf16 = TOLERANCES[Precision.BF16]
    share = lossy.tolerance / bf16.update_error

    def at_least(name: str) -> float:
        rounded: float = getattr(bf16, name)
        return max(float(getattr(found, name)), min(1.0, share) * rounded)

    return replace(
        found,
        update_error=max(found.update_error, lossy.tolerance),
        tensor_error=at_least("tensor_error"),
        loss_deviation=at_least("loss_deviation"),
        end_weights=at_least("end_weights"),
        end_state=at_least("end_state"),
        reason=f"{lossy.why}; {found.reason}",
    )


RANKS_APART = 1e-5
"""Largest distance between what two ranks hold of one tensor, relative to its norm. In sound
backends it is 0: every rank applies the same update to the same reduced gradient. Sums that each
rank makes in an order of its own would be some 1e-6 apart."""
MOSTLY = 5.0
"""How many times the error of all parameters that of one must be, to be named beside it."""
LOSS_SIZE = 5.0
"""Of a small model's losses in records that lack it: a vocabulary of 256 begins at 5.5."""
DEVICE_ERROR = 1e-4
"""Largest relative L2 error of a small model's update on the device, against the CPU's. Both
compute in fp32.

Another order of sums gives 2e-7 in it; products in TF32, with 10 bits of mantissa, 5e-4; heads of
keys in the wrong order 1.2. Its losses have the limit of fp32: there TF32 gives 8e-5 of 5.5, wrong
heads 0.04. bf16 needs no limit of its own: the fp32 reference on the same device, to which bf16
cells are compared, is what is checked here.
"""


def judge(
    tables: Tables,
    records: Sequence[TrialRecord] = (),
    peaks: Mapping[str, int] = MappingProxyType({}),
) -> Tables:
    """Fill in expected values, and set ``status`` and ``reason`` of trials that fail a gate.

    Returns new tables. What is expected depends on layouts of models and settings of backends,
    which are in ``records``; ``peaks`` are the predicted peaks of memory in bytes, by cell id.

    Trials that are not ``ok`` are left unchanged. A trial that cannot be checked, because its
    reference is missing or failed, is invalid too: unchecked numbers never count as good. A virtual
    world has no values, so only its steps are checked.
    """
    rows = [replace(row) for row in tables.trial_rows]
    losses = Losses(tables)
    wrong_device = _wrong_device(rows)
    good = [row for row in rows if row.status is Status.OK]
    found: dict[tuple[str, int], list[Failure]] = {}
    for row in good:
        if row.cell.world.has_values:
            deviation = losses.deviation(row)
            if deviation is not None:
                row.max_loss_deviation = known(deviation.largest)
            if row.cell.windows > COMPARED_STEPS and row.end_weights_error is not None:
                grown = f"rounding grows over {row.cell.windows} windows"
                row.leave_unchecked(f"the state at the end: {grown}")
            found[row.key] = failures(row, deviation) + wrong_device
        elif row.cell.world.computes:
            found[row.key] = _step_failures(row)
    filled, wrong = expected.fill(replace(tables, trial_rows=rows), records, peaks)
    told: dict[tuple[str, int], tuple[str, ...]] = {}
    for row in good:
        failed = found.get(row.key, [])
        for text in wrong.get(row.cell.cell_id, ()):
            failed.append(Failure(Gate.BYTES, text))
        if failed:
            told[row.key] = _invalidate(row, failed)
    return replace(filled, failures=told)


def _wrong_device(rows: Sequence[TrialRow]) -> list[Failure]:
    """That of the first reference whose device computes otherwise: it is one of all rows."""
    for row in rows:
        failure = _device_failure(row)
        if failure is not None:
            return [failure]
    return []


def _invalidate(row: TrialRow, failed: Sequence[Failure]) -> tuple[str, ...]:
    """Make a trial invalid, and return what was found."""
    texts: list[str] = []
    gates: dict[Gate, None] = {}
    causes: list[Cause] = []
    for failure in failed:
        texts.append(failure.text)
        gates[failure.gate] = None
        causes += failure.causes
    row.status = Status.INVALID
    row.reason = "; ".join(texts)
    row.failed_gates = ",".join(gates)
    row.update_causes = ",".join(causes)
    return tuple(texts)


DEFECT = Cause.DIVIDED_TWICE
"""What the documented defects of frameworks do to the update (``Backend.defect``)."""
EXPECTED = "a documented defect of the framework, which was expected"
"""Introduces the description of the defect."""


def known_defect(
    manifest: Manifest,
    backend: str,
    status: str,
    failed_gates: str | None,
    update_causes: str | None,
) -> str:
    """The documented defect of a backend, if it alone makes a trial or cell invalid; else empty."""
    if status != Status.INVALID or failed_gates != Gate.UPDATE or update_causes is None:
        return ""
    if DEFECT not in update_causes.split(","):
        return ""
    return _defect_of_backend(manifest, backend)


def defect_of_trial(manifest: Manifest, row: TrialRow) -> str:
    """The same for a judged trial."""
    return known_defect(manifest, row.cell.backend, row.status, row.failed_gates, row.update_causes)


def defect_of_record(manifest: Manifest | None, record: TrialRecord) -> str:
    """The same for the record of a trial that has just ended, if its own update shows it."""
    cell, update = record.cell, record.update
    if manifest is None or update is None or record.status is not Status.OK:
        return ""
    scale = update.unclipped_scale
    if scale is None:  # the cell does not clip
        scale = update.scale
    found = explain_update(known(scale), known(update.residual), cell.accumulate, cell.world_size)
    if DEFECT not in found.causes:
        return ""
    return _defect_of_backend(manifest, cell.backend)


def _defect_of_backend(manifest: Manifest, backend: str) -> str:
    return manifest.backends.get(backend, {}).get("defect", "")


def failures(row: TrialRow, deviation: Deviation | None) -> list[Failure]:
    """The gates that a finished trial failed; empty if it passes all.

    ``deviation`` is that of the losses of the row, None if they cannot be compared.
    """
    limits = allowed(row.cell, row.facts.lossy)
    found = _step_failures(row)
    for text in impossible(row):
        found.append(Failure(Gate.TIME, text))
    if row.other_work:
        text = f"forward and backward are not those of the plain model: {row.other_work}"
        found.append(Failure(Gate.WORK, text))
    found += _optimizer_failures(row)
    update = _update_failures(row, limits)
    if not update:
        update = _tensor_failures(row, limits)
    loss = _loss_failure(row, deviation, limits)
    follows = bool(update) and deviation is not None and _explains(row, deviation, limits)
    if loss is not None and not follows:
        found.append(loss)
    found += update
    if loss is not None and follows:
        found.append(Failure(Gate.UPDATE, f"so {loss.text}"))
    end = _end_failure(row, limits)
    if end is not None and update:
        found.append(Failure(Gate.UPDATE, f"so {end.text}"))
    elif end is not None:
        found.append(end)
    return found


def _tensor_failures(row: TrialRow, limits: Tolerance) -> list[Failure]:
    """What is wrong with the update of single parameters, where all together are right."""
    exact = allowed(replace(row.cell, precision=Precision.FP32), row.facts.lossy)
    error = row.fp32_update_error
    if error is not None and error > exact.update_error:
        off = beyond(error, exact.update_error)
        text = f"computed in fp32, the update is off by {off} (limit {exact.update_error:g})"
        text += _mostly(error, row.fp32_tensor_error, row.fp32_tensor)
        return [Failure(Gate.UPDATE, text)]
    error, limit = row.update_tensor_error, limits.tensor_error
    if error is not None and error > limit:
        text = _of_tensor(row.update_tensor, error, limit, row.cell.precision)
        text += ", that of all parameters together is not"
        return [Failure(Gate.UPDATE, text)]
    error, limit = row.fp32_tensor_error, exact.tensor_error
    if error is not None and error > limit:
        text = _of_tensor(row.fp32_tensor, error, limit, Precision.FP32)
        return [Failure(Gate.UPDATE, f"computed in fp32, {text}")]
    return []


def _of_tensor(tensor: str | None, error: float, limit: float, precision: Precision) -> str:
    off = beyond(error, limit)
    return f"the update of {tensor} is off by {off} (limit {limit:g} in {precision})"


def _mostly(error: float, of_tensor: float | None, tensor: str | None) -> str:
    """Which parameter an error is of, if it is mostly one's; empty otherwise."""
    if of_tensor is None or of_tensor < MOSTLY * error:
        return ""
    return f", most in {tensor}, which is off by {of_tensor:.2g}"


def _optimizer_failures(row: TrialRow) -> list[Failure]:
    """What ranks hold that is wrong by itself, or not the same on all of them.

    Settings, counted steps, and lost digits of the optimizer.
    """
    found = []
    if row.other_settings:
        text = f"parameters were stepped with other settings: {row.other_settings}"
        found.append(Failure(Gate.STATE, text))
    counted = row.optimizer_steps_counted
    if counted is not None and counted > row.cell.windows:
        text = f"the state of the optimizer counts {counted} steps, {row.cell.windows} were due"
        found.append(Failure(Gate.STATE, text))
    if row.rounded_to_bf16:
        text = f"after the last window no digits are left that bf16 has not: {row.rounded_to_bf16}"
        found.append(Failure(Gate.STATE, text))
    if row.ranks_apart is not None and row.ranks_apart > RANKS_APART:
        off = beyond(row.ranks_apart, RANKS_APART)
        text = (
            f"the ranks hold different values: {row.ranks_apart_tensor} is off by {off} (limit "
            f"{RANKS_APART:g})"
        )
        found.append(Failure(Gate.RANKS, text))
    return found


def _end_failure(row: TrialRow, limits: Tolerance) -> Failure | None:
    """What is wrong with the weights and the state of the optimizer after the last window."""
    if row.cell.windows > COMPARED_STEPS:
        return None
    pairs = (
        (row.end_state_error, row.end_state_tensor, limits.end_state, "norm"),
        (row.end_weights_error, row.end_weights_tensor, limits.end_weights, "change"),
    )
    for error, tensor, limit, whole in pairs:
        if error is not None and error > limit:
            text = (
                f"after the last window {tensor} is off by {beyond(error, limit)} of its {whole} "
                f"(limit {limit:g} in {row.cell.precision})"
            )
            return Failure(Gate.STATE, text)
    return None


def _explains(row: TrialRow, deviation: Deviation, limits: Tolerance) -> bool:
    """Whether a wrong update alone explains losses that deviate after it."""
    return (
        math.isfinite(deviation.largest)
        and deviation.first <= limits.first_loss * deviation.size
        and _moves_losses(row)
    )


def _loss_failure(row: TrialRow, deviation: Deviation | None, limits: Tolerance) -> Failure | None:
    """What is wrong with the losses; None if nothing is."""
    if deviation is None:
        text = (
            "losses could not be checked: the reference failed or is missing, "
            "or not every step has a loss"
        )
        return Failure(Gate.LOSS, text)
    is_finite, precision = math.isfinite(deviation.largest), row.cell.precision
    first, limit = limits.first_loss * deviation.size, limits.loss_limit(deviation)
    if is_finite and deviation.first > first:
        off = beyond(deviation.first, first)
        text = (
            f"the first loss, before any update, is off by {off} (limit {first:.2g} in "
            f"{precision}): other weights, other samples, or another mean of them"
        )
        return Failure(Gate.LOSS, text)
    if deviation.largest <= limit:
        return None
    what = "a loss is not finite"
    if is_finite:
        what = f"losses deviate from the reference by {beyond(deviation.largest, limit)}"
    what += f" (limit {limit:.2g} in {precision})"
    if deviation.num_steps < row.cell.windows:
        what += f" in the first {plural(deviation.num_steps, 'step')}"
    return Failure(Gate.LOSS, what)


def _device_failure(row: TrialRow) -> Failure | None:
    """Why no value of the run counts: the row is of a reference whose device computes otherwise."""
    error, deviation = row.device_error, row.device_loss_deviation
    if error is None:
        return None
    size = row.device_loss_size
    if size is None:
        size = LOSS_SIZE
    limit = TOLERANCES[Precision.FP32].loss_deviation * size
    if deviation is None:
        deviation = math.nan
    if error <= DEVICE_ERROR and deviation <= limit:
        return None
    off, losses_off = beyond(error, DEVICE_ERROR), beyond(deviation, limit)
    text = (
        f"{row.cell.device} computes otherwise than the CPU: in fp32 a small model's update is off "
        f"by {off} (limit {DEVICE_ERROR:g}) and its losses by {losses_off} (limit {limit:.2g}), "
        "from the same weights and samples"
    )
    return Failure(Gate.DEVICE, text)


def _update_failures(row: TrialRow, limits: Tolerance) -> list[Failure]:
    """What is wrong with the update of one SGD window, with the cell's clipping; empty if right."""
    if row.update_error is None:
        text = "no update to check: the update pass did not run, or the reference has none"
        return [Failure(Gate.UPDATE, text)]
    scale, residual, clip, cell = row.update_scale, row.update_residual, _clip(row), row.cell
    limit = _limit(limits.update_error, row)
    rounding = max(SAME_FACTOR, limits.update_error)
    before = row.unclipped_error
    is_wrong_before = before is not None and before > limits.update_error
    if row.update_error > limits.update_error:
        if clip is not None and not is_wrong_before:
            cause = Explanation(explain_clipping(scale, residual, clip))
        else:
            cause = explain_update(
                scale, residual, cell.accumulate, cell.world_size, clip, rounding
            )
        off = beyond(row.update_error, limits.update_error)
        what = f"the update is off by {off} {limit}"
        what += _mostly(row.update_error, row.update_tensor_error, row.update_tensor)
    elif clip is not None and before is not None and is_wrong_before:
        cause = explain_update(
            clip.unclipped_scale, residual, cell.accumulate, cell.world_size, None, rounding
        )
        off = beyond(before, limits.update_error)
        what = (
            f"the update is off by {off} {limit} before clipping, "
            f"and right only as both were clipped to norm {clip.norm:g}"
        )
    else:
        return []
    found = [Failure(Gate.UPDATE, f"{what}: {cause.text}", cause.causes)]
    if cause.after:
        found.append(Failure(Gate.UPDATE, cause.after))
    return found


def _limit(limit: float, row: TrialRow) -> str:
    """A limit with where it comes from, in brackets."""
    if row.facts.lossy is not None and limit == row.facts.lossy.tolerance:
        return f"(limit {limit:g}, as its backend declares)"
    return f"(limit {limit:g} in {row.cell.precision})"


def _moves_losses(row: TrialRow) -> bool:
    """Whether the update has the wrong scale alone, so that the losses must deviate too.

    AdamW is invariant to the scale of gradients, unless they are clipped: its moments then weigh
    clipped and unclipped gradients wrongly.
    """
    residual = row.update_residual
    if residual is None or not (row.cell.optimizer == SGD or row.cell.clip_norm > 0):
        return False
    for scale in (row.update_scale, row.unclipped_scale):
        if scale is not None and scale > 0 and residual <= min(SAME_FACTOR, abs(scale - 1)):
            return True
    return False


def _step_failures(row: TrialRow) -> list[Failure]:
    found: list[Failure] = []
    cell, taken, used = row.cell, row.optimizer_steps_observed, row.micro_batches_per_update
    if taken != cell.windows:
        text = f"{taken} optimizer steps were taken, {cell.windows} were due"
        found.append(Failure(Gate.STEPS, text))
    num_due = cell.windows * cell.accumulate
    if row.num_micro_batches != num_due:
        text = f"{row.num_micro_batches} micro-batches were used, {num_due} were due"
        found.append(Failure(Gate.STEPS, text))
    elif used != str(cell.accumulate):
        text = f"updates used {used} micro-batches each, {cell.accumulate} were due"
        found.append(Failure(Gate.STEPS, text))
    if not row.ranks_agree:
        found.append(Failure(Gate.STEPS, "the ranks took different numbers of steps"))
    summed = row.accumulated_in
    if summed is not None and summed not in {"not measured", cell.accumulation_dtype}:
        text = f"gradients are summed in {summed}, {cell.accumulation_dtype} was due"
        found.append(Failure(Gate.ACCUMULATION, text))
    elif row.stepped_in not in {None, cell.accumulation_dtype, _declared_dtype(row)}:
        text = (
            f"gradients reach the optimizer in {row.stepped_in}, {cell.accumulation_dtype} was due"
        )
        found.append(Failure(Gate.ACCUMULATION, text))
    return found


def _declared_dtype(row: TrialRow) -> str | None:
    """The dtype in which the backend declares to reduce gradients; None if it declares none."""
    if row.facts.lossy is None:
        return None
    return row.facts.lossy.reduce_dtype


def _clip(row: TrialRow) -> Clip | None:
    """The clipping of a row of trials; None if it does not clip, or a value is missing."""
    norm, gradient_norm, scale = row.cell.clip_norm, row.gradient_norm, row.unclipped_scale
    if gradient_norm is None or scale is None:
        return None
    for fact in (norm, gradient_norm, scale):
        if not (math.isfinite(fact) and fact > 0):
            return None
    return Clip(norm, gradient_norm, scale)
