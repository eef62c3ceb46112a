"""Which of the predicted backends is the best, at the N and W that were asked for and at others.

A backend may win if it fits, can run the cell and is not known to be wrong. It fits if the peak and
the most that was published to be reserved beside such a peak do; if none does, those may win that
fit beside the least. It is clearly the best if its serial step is at most the margin longer than
the overlapped steps of all others: whatever they hide, none is faster by more. Of several such
backends the one with the least peak memory is the best. If there is none, it is undecided; what
leads then has the shortest serial step. Backends with the same estimates do not make each other
uncertain. One that offloads cannot win: what it copies, and the update on the host, are in no
estimate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.forecast.fit import ReservedBytes, reserve
from bench.forecast.lora import LoRA
from bench.forecast.prediction import (
    Link,
    Prediction,
    TimeEstimate,
    communication,
    compute_seconds,
    model_flops,
    predict,
    tokens_per_s,
)
from bench.plan.cell import Cell, Device

MARGIN = 0.02
"""Times this near to each other are the same, as ``compare`` calls it."""
OTHER_N = (1, 4, 16, 64, 256)
"""The rows of the table over N and W, beside the N that is asked for."""
OTHER_W = (0.25, 0.5, 1, 2, 4)
"""Its columns, as multiples of the W that is asked for."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The best backend in one cell, or none."""

    best: str
    """Name of the best, or of what leads; empty if no backend may win."""
    equal: tuple[str, ...] = ()
    """Further backends with the same estimates and the same memory."""
    rivals: tuple[str, ...] = ()
    """What may be faster by more than the margin, so that it is undecided."""
    is_tight: bool = False
    """Whether it fits only if less is reserved beside its peak than the most that was published."""


Choices = Mapping[tuple[int, int], Choice]
"""By N and W, among them those that were asked for; empty if times are not estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRates:
    """What a rank gets done, each in a serial and in an overlapped step."""

    tokens_per_s: tuple[float, float]
    mfu: tuple[float, float] | None
    """Shares of 1; None where the peak of the device is unknown."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The cell, and the limits of the machine.

    Times are estimated if both ``link`` and ``compute_s`` are known.
    """

    cell: Cell
    """With an empty backend."""
    link: Link | None = None
    compute_s: float | None = None
    """Seconds of compute per optimizer step, on a rank."""
    compute_from: str = "as given"
    peak_flops: float | None = None
    """FLOP/s of a rank's device by its datasheet, for MFU; None if unknown."""
    memory_bytes: int | None = None
    """Of a device; None for no limit."""
    reserve_bytes: int | None = None
    """What of it predictions may not fill; None for what was published (``bench.forecast.fit``), on
    a GPU."""
    bf16_parameters: bool = False
    """Whether parameters, gradients and moments are bf16, without fp32 masters."""
    lora: LoRA | None = None
    """What is trained, if the model's own weights are frozen."""

    def predict(self, cell: Cell, backends: Sequence[str]) -> list[Prediction]:
        """The predictions of a cell with what is asked of its parameters."""
        return predict(cell, backends, bf16_parameters=self.bf16_parameters, lora=self.lora)

    @property
    def flops_per_s(self) -> float:
        """The rate at which a rank computes, recomputation included."""
        assert self.compute_s is not None
        seconds_at_one, _ = compute_seconds(self.cell, 1.0, self.lora)
        return seconds_at_one / self.compute_s

    def step(self, prediction: Prediction) -> TimeEstimate:
        """The estimates of a step; its FLOP are computed at the rate of the cell asked for."""
        assert self.link is not None
        compute, _ = compute_seconds(prediction.cell, self.flops_per_s, self.lora)
        return communication(prediction.traffic, self.link).beside(compute)

    def rates(self, cell: Cell, step: TimeEstimate) -> StepRates:
        """What this step is in tokens and in use of the device."""
        tokens = (tokens_per_s(cell, step.serial), tokens_per_s(cell, step.overlapped))
        mfu = None
        if self.peak_flops is not None:
            least_s = model_flops(cell, self.lora) / self.peak_flops
            mfu = (least_s / step.serial, least_s / step.overlapped)
        return StepRates(tokens_per_s=tokens, mfu=mfu)

    def reserved(self, prediction: Prediction) -> ReservedBytes:
        """What must be free beside a peak: what is given, or on a GPU what was published."""
        if self.reserve_bytes is not None:
            return ReservedBytes(self.reserve_bytes, self.reserve_bytes)
        if self.cell.device is not Device.CUDA:
            return ReservedBytes(0, 0)
        return reserve(prediction.memory.peak, nccl=prediction.cell.world_size > 1)

    def fits(self, prediction: Prediction) -> bool:
        """Whether it fits with the most that was published to be reserved beside a peak."""
        needed = prediction.memory.peak + self.reserved(prediction).most
        return self.memory_bytes is None or needed <= self.memory_bytes

    def may_fit(self, prediction: Prediction) -> bool:
        """Whether it fits with the least."""
        needed = prediction.memory.peak + self.reserved(prediction).least
        return self.memory_bytes is None or needed <= self.memory_bytes

    def choose(self, predictions: Sequence[Prediction]) -> Choice:
        """The best backend; see the docstring of the module."""
        sound = []
        for prediction in predictions:
            if not (prediction.is_missing or prediction.defect or prediction.offloads):
                sound.append(prediction)
        fitting = [p for p in sound if self.fits(p)]
        is_tight = not fitting
        if is_tight:
            fitting = [p for p in sound if self.may_fit(p)]
        if not fitting:
            return Choice("")
        able, steps = {}, {}
        for prediction in fitting:
            able[prediction.name] = prediction
            steps[prediction.name] = self.step(prediction)
        rivals, leading = {}, []
        for name, step in steps.items():
            rivals[name] = _rivals(step, steps)
            if not rivals[name]:
                leading.append(name)
        if not leading:
            least = min(step.serial for step in steps.values())
            leading = [name for name, step in steps.items() if step.serial == least]

        def rank(name: str) -> tuple[int, float, float]:
            return able[name].memory.peak, steps[name].serial, steps[name].overlapped

        best, *others = sorted(leading, key=rank)
        equal = tuple(name for name in others if rank(name) == rank(best))
        return Choice(best, equal, rivals[best], is_tight)

    def table(self, predictions: Sequence[Prediction]) -> Choices:
        """The best at this and other N and W.

        Nodes are whole, or the ranks a part of one, and HSDP's shards stay as large as they are.
        """
        assert self.link is not None
        found = {}
        for accumulate in sorted({*OTHER_N, self.cell.accumulate}):
            for times in OTHER_W:
                ranks = self.cell.world_size * times
                if ranks < 1:
                    continue
                if ranks > self.link.node_size and ranks % self.link.node_size:
                    continue
                scaled = []
                for prediction in predictions:
                    if prediction.shards_fit(int(ranks)):
                        scaled.append(prediction.scaled(accumulate, int(ranks)))
                found[accumulate, int(ranks)] = self.choose(scaled)
        return found


def _rivals(step: TimeEstimate, steps: Mapping[str, TimeEstimate]) -> tuple[str, ...]:
    """Which of these steps may be shorter than this one by more than the margin, by backend."""
    rivals = []
    for name, other in steps.items():
        if other != step and other.overlapped * (1 + MARGIN) < step.serial:
            rivals.append(name)
    return tuple(rivals)


LESS_MEMORY = 0.1
"""By which share a peak must be smaller, for a trade to be worth a sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trade:
    """A backend that needs less memory than the best, for more time, within the best's interval."""

    name: str
    freed_bytes: int
    """By which its peak is smaller."""
    longer: tuple[float, float]
    """By which shares its steps are longer, of overlapped steps and of serial ones; the smaller
    first."""
    interval: float
    """By which share the serial step of the best is longer than its overlapped one."""
    larger: Prediction | None = None
    """The same with as large micro-batches as the freed memory holds; None if it holds none twice
    as large."""
    larger_step: TimeEstimate | None = None


def trade(question: Question, backends: Sequence[str], best: str) -> Trade | None:
    """What needs the least memory for a time within the interval of the best; None if nothing does.

    Backends that offload are left out, since the times of their copies are not estimated. Larger
    micro-batches keep the global batch, so that there are fewer of them. They fit where a
    limit of memory is given, and without one where the best needs as much.
    """
    predictions = question.predict(question.cell, backends)
    by_name = {}
    for prediction in predictions:
        if not (prediction.is_missing or prediction.defect or prediction.offloads):
            by_name[prediction.name] = prediction
    peak, step = by_name[best].memory.peak, question.step(by_name[best])
    found: Trade | None = None
    for name, other in by_name.items():
        freed, theirs = peak - other.memory.peak, question.step(other)
        is_close = theirs.serial - step.serial <= step.serial - step.overlapped
        if freed < LESS_MEMORY * peak or not is_close or (found and freed <= found.freed_bytes):
            continue
        shares = (theirs.overlapped / step.overlapped - 1, theirs.serial / step.serial - 1)
        larger, larger_step = _with_larger_micro_batches(question, other, peak), None
        if larger is not None:
            larger_step = question.step(larger)
        found = Trade(
            name=name,
            freed_bytes=freed,
            longer=(min(shares), max(shares)),
            interval=step.serial / step.overlapped - 1,
            larger=larger,
            larger_step=larger_step,
        )
    return found


def _with_larger_micro_batches(
    question: Question, prediction: Prediction, peak: int
) -> Prediction | None:
    """The same backend with the largest micro-batches that fit, by powers of two.

    None if twice as large ones do not fit.
    """
    cell, found = prediction.cell, None
    accumulate = cell.accumulate
    while accumulate % 2 == 0:
        accumulate //= 2
        larger = dataclasses.replace(
            prediction, cell=dataclasses.replace(cell, accumulate=accumulate)
        )
        holds = question.fits(larger)
        if question.memory_bytes is None:
            holds = larger.memory.peak <= peak
        if not holds:
            break
        found = larger
    return found
