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
from typing import Any

from bench.forecast.fit import ReservedBytes, reserve
from bench.forecast.lora import LoRA
from bench.forecast.prediction import (
    Link,
    Prediction,
    TimeEstimate,
    communication,
    compute_seconds,
    grouped_with,
    model_flops,
    predict,
    sent_bytes,
    tokens_per_s,
)
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST
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

    def rates(self, cell: Cell, step: TimeEstimate) -> dict[str, list[float] | None]:
        """``tokens_per_s`` and ``mfu`` of a rank, each in a serial and in an overlapped step.

        MFU is None where the peak of the device is unknown.
        """
        tokens = [tokens_per_s(cell, step.serial), tokens_per_s(cell, step.overlapped)]
        mfu = None
        if self.peak_flops is not None:
            least_s = model_flops(cell, self.lora) / self.peak_flops
            mfu = [least_s / step.serial, least_s / step.overlapped]
        return {"tokens_per_s": tokens, "mfu": mfu}

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


def answer(
    question: Question, backends: Sequence[str], *, grouped: bool
) -> tuple[list[dict[str, Any]], Choices]:
    """The predictions, one per backend, as plain values for JSON; and what is the best.

    ``grouped``: wrappers that equal a mechanism are not considered beside it. Nothing is the best
    if times are not estimated. The keys, null where nothing is known:

    - ``backend``, ``framework``, ``sharding``, ``sync``; ``equals``: the mechanism with which a
      wrapper is grouped; ``refusal``: why it does not run this, ``not_predicted``: why there is no
      prediction although it does, ``defect``: what is known to be wrong with its updates; all four
      may be empty;
    - ``memory``: bytes of a rank at its peak by category (bench.forecast.footprint), which add up
      to ``peak_memory_bytes``; ``peak_at``: the moment; ``held``: bytes between micro-batches by
      category, exact; with --exact ``exact_peak_bytes``, that of rank 0 on fake tensors; ``fits``:
      whether the peak is within the limit with the most that was published to be reserved beside
      such a peak, ``may_fit``: with the least;
    - of a backend that offloads from a device, ``host``: bytes of a rank on the host at the update
      by category, which add up to ``host_bytes``; ``pinned_bytes``: those of them that are pinned;
      ``copied_to_device``, ``copied_to_host``: bytes that one optimizer step copies;
    - ``collectives``: per operation and dtype of one optimizer step ``op``, ``dtype``, ``calls``,
      ``payload_bytes`` and ``wire_bytes`` (derived: what a rank sends in ring algorithms);
      ``num_calls`` and ``wire_bytes``: their sums; ``intra_bytes``, ``inter_bytes``: what of it
      stays within a node, or goes to other nodes;
    - ``communication_s``, ``compute_s``, ``overlapped_s``, ``serial_s``: see
      bench.forecast.prediction; ``tokens_per_s`` and ``mfu``: of a rank, in a serial and in an
      overlapped step;
    - ``recommended``: whether it is the best, or leads where it is undecided; ``best``: whether it
      is clearly the best; ``may_be_fastest``: whether it may be faster than what leads;
      ``best_at``: the [N, W] of the table at which it is clearly the best, or as good.
    """
    predictions = question.predict(question.cell, backends)
    equal = {}
    if grouped:
        equal = grouped_with(predictions)
    choices: Choices = {}
    if question.link is not None and question.compute_s is not None:
        choices = question.table([p for p in predictions if p.name not in equal])
    rows = []
    for prediction in predictions:
        row = _as_json(question, prediction, choices)
        row["equals"] = equal.get(prediction.name, "")
        rows.append(row)
    return rows, choices


UNKNOWN = (
    *("peak_memory_bytes", "peak_at", "fits", "may_fit", "num_calls", "wire_bytes"),
    *("host_bytes", "pinned_bytes", COPIED_TO_DEVICE, COPIED_TO_HOST),
    *("communication_s", "intra_bytes", "inter_bytes", "overlapped_s", "serial_s"),
    *("tokens_per_s", "mfu"),
    *("best", "recommended", "may_be_fastest", "best_at"),
)
"""The keys of a prediction that may stay null."""


def _as_json(question: Question, prediction: Prediction, choices: Choices) -> dict[str, Any]:
    backend = prediction.backend
    values: dict[str, Any] = {
        "backend": prediction.name,
        "framework": backend.framework,
        "sharding": str(backend.sharding),
        "sync": str(backend.sync),
        "refusal": prediction.refusal,
        "not_predicted": prediction.not_predicted,
        "defect": prediction.defect,
        "memory": {},
        "host": {},
        "held": {},
        "collectives": [],
        "compute_s": question.compute_s,
        **dict.fromkeys(UNKNOWN),
    }
    if choices:
        values |= _place_among(choices, prediction)
    if prediction.is_missing:
        return values
    values |= _memory_and_traffic(prediction)
    if question.memory_bytes is not None:
        values["fits"] = question.fits(prediction)
        values["may_fit"] = question.may_fit(prediction)
    if question.link is not None:
        values["communication_s"] = communication(prediction.traffic, question.link).serial
        if question.link.node_size > 1:
            values |= {"intra_bytes": 0.0, "inter_bytes": 0.0}
            for part in prediction.traffic:
                intra, inter = part.levels(question.link.node_size)
                values["intra_bytes"] += intra
                values["inter_bytes"] += inter
    if choices and not prediction.offloads:
        step = question.step(prediction)
        values |= {"overlapped_s": step.overlapped, "serial_s": step.serial}
        values |= question.rates(prediction.cell, step)
    if (host := prediction.host) is not None:
        values |= {
            "host": host.parts,
            "host_bytes": host.peak,
            "pinned_bytes": host.pinned,
            COPIED_TO_DEVICE: host.to_device,
            COPIED_TO_HOST: host.to_host,
        }
    return values


def _place_among(choices: Choices, prediction: Prediction) -> dict[str, Any]:
    """Whether a backend is the best here, and where it clearly is."""
    name = prediction.name
    here = choices[prediction.cell.accumulate, prediction.cell.world_size]
    best_at = []
    for at, choice in choices.items():
        if not choice.rivals and name in (choice.best, *choice.equal):
            best_at.append(list(at))
    is_recommended = name in (here.best, *here.equal)
    return {
        "recommended": is_recommended,
        "best": is_recommended and not here.rivals,
        "may_be_fastest": name in here.rivals,
        "best_at": best_at,
    }


def _memory_and_traffic(prediction: Prediction) -> dict[str, Any]:
    """What a backend holds and sends."""
    cell, rows, num_calls = prediction.cell, [], 0
    for row in prediction.expectation.collectives:
        wire_bytes = sent_bytes(row.op, row.payload_bytes, cell.group_size(row.group), cell.device)
        rows.append(dataclasses.asdict(row) | {"wire_bytes": wire_bytes})
        num_calls += row.calls
    return {
        "memory": prediction.memory.parts,
        "peak_memory_bytes": prediction.memory.peak,
        "peak_at": prediction.memory.moment,
        "held": prediction.expectation.held,
        "collectives": rows,
        "num_calls": num_calls,
        "wire_bytes": prediction.wire_bytes,
    }


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
