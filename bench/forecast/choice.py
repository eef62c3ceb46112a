"""Which of the predicted backends is the best, at the N and W that were asked for and at others.

A backend may win if it fits, can run the cell and is not known to be wrong. It is clearly the best
if its serial step is at most the margin longer than the overlapped steps of all others: whatever
they hide, none is faster by more. Of several such backends the one with the least peak memory is
the best. If there is none, it is undecided; what leads then has the shortest serial step. Backends
with the same estimates do not make each other uncertain. One that offloads cannot win: what it
copies, and the update on the host, are in no estimate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.forecast.prediction import (
    Link,
    Prediction,
    TimeEstimate,
    communication,
    grouped_with,
    predict,
    sent_bytes,
)
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST
from bench.plan.cell import Cell

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


Choices = Mapping[tuple[int, int], Choice]
"""By N and W, among them those that were asked for; empty if times are not estimated."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The cell, and the limits of the machine. Times are estimated if both ``link`` and ``compute_s`` are known."""

    cell: Cell
    """With an empty backend."""
    link: Link | None = None
    compute_s: float | None = None
    """Seconds of compute per optimizer step, on a rank."""
    compute_from: str = "as given"
    memory_bytes: int | None = None
    """Of a device; None for no limit."""
    reserve_bytes: int = 0
    """What of it predictions may not fill."""

    def step(self, prediction: Prediction) -> TimeEstimate:
        """The estimates of a step; compute grows with N."""
        assert self.link is not None and self.compute_s is not None
        compute = self.compute_s * prediction.cell.accumulate / self.cell.accumulate
        return communication(prediction.traffic, self.link).beside(compute)

    def fits(self, prediction: Prediction) -> bool:
        return (
            self.memory_bytes is None
            or prediction.memory.peak <= self.memory_bytes - self.reserve_bytes
        )

    def choose(self, predictions: Sequence[Prediction]) -> Choice:
        """The best backend; see the docstring of the module."""
        able = {p.name: p for p in predictions if self._may_win(p)}
        if not able:
            return Choice("")
        steps = {name: self.step(prediction) for name, prediction in able.items()}
        rivals = {name: _rivals(step, steps) for name, step in steps.items()}
        least = min(step.serial for step in steps.values())
        leading = [name for name in steps if not rivals[name]]
        if not leading:
            leading = [name for name, step in steps.items() if step.serial == least]

        def rank(name: str) -> tuple[int, float, float]:
            return able[name].memory.peak, steps[name].serial, steps[name].overlapped

        best, *others = sorted(leading, key=rank)
        return Choice(
            best, tuple(name for name in others if rank(name) == rank(best)), rivals[best]
        )

    def _may_win(self, prediction: Prediction) -> bool:
        is_able = not prediction.is_missing and not prediction.defect
        return is_able and not prediction.offloads and self.fits(prediction)

    def table(self, predictions: Sequence[Prediction]) -> Choices:
        """The best at this and other N and W. Nodes are whole, and HSDP's shards stay as large as they are."""
        assert self.link is not None
        found = {}
        for accumulate in sorted({*OTHER_N, self.cell.accumulate}):
            for times in OTHER_W:
                ranks = self.cell.world_size * times
                if ranks < 1 or ranks % self.link.node_size:
                    continue
                scaled = [
                    p.scaled(accumulate, int(ranks))
                    for p in predictions
                    if p.shards_fit(int(ranks))
                ]
                found[accumulate, int(ranks)] = self.choose(scaled)
        return found


def _rivals(step: TimeEstimate, steps: Mapping[str, TimeEstimate]) -> tuple[str, ...]:
    """The backends of those with these steps that may be faster than this one by more than the margin."""
    rivals = []
    for name, other in steps.items():
        if other != step and other.overlapped * (1 + MARGIN) < step.serial:
            rivals.append(name)
    return tuple(rivals)


def answer(
    question: Question, backends: Sequence[str], *, grouped: bool
) -> tuple[list[dict[str, Any]], Choices]:
    """The predictions as plain values for JSON, one per backend, and if times are estimated what is the best.

    ``grouped``: wrappers that equal a mechanism are not considered beside it. The keys, null where
    nothing is known:

    - ``backend``, ``framework``, ``sharding``, ``sync``; ``equals``: the mechanism with which a
      wrapper is grouped; ``refusal``: why it does not run this, ``not_predicted``: why there is no
      prediction although it does, ``defect``: what is known to be wrong with its updates; all four
      may be empty;
    - ``memory``: bytes of a rank at its peak by category (bench.forecast.footprint), which add up
      to ``peak_memory_bytes``; ``peak_at``: the moment; ``held``: bytes between micro-batches by
      category, exact; with --exact ``exact_peak_bytes``, that of rank 0 on fake tensors; ``fits``:
      whether the peak is within the limit;
    - of a backend that offloads from a device, ``host``: bytes of a rank on the host at the update
      by category, which add up to ``host_bytes``; ``pinned_bytes``: those of them that are pinned;
      ``copied_to_device``, ``copied_to_host``: bytes that one optimizer step copies;
    - ``collectives``: per operation and dtype of one optimizer step ``op``, ``dtype``, ``calls``,
      ``payload_bytes`` and ``wire_bytes`` (derived: what a rank sends in ring algorithms);
      ``num_calls`` and ``wire_bytes``: their sums; ``intra_bytes``, ``inter_bytes``: what of it
      stays within a node, or goes to other nodes;
    - ``communication_s``, ``compute_s``, ``overlapped_s``, ``serial_s``: see
      bench.forecast.prediction;
    - ``recommended``: whether it is the best, or leads where it is undecided; ``best``: whether it
      is clearly the best; ``may_be_fastest``: whether it may be faster than what leads;
      ``best_at``: the [N, W] of the table at which it is clearly the best, or as good.
    """
    predictions = predict(question.cell, backends)
    equal = {}
    if grouped:
        equal = grouped_with(predictions)
    choices: Choices = {}
    if question.link is not None and question.compute_s is not None:
        choices = question.table([p for p in predictions if p.name not in equal])
    return [
        _as_json(question, p, choices) | {"equals": equal.get(p.name, "")} for p in predictions
    ], choices


UNKNOWN = (
    *("peak_memory_bytes", "peak_at", "fits", "num_calls", "wire_bytes", "communication_s"),
    *("host_bytes", "pinned_bytes", COPIED_TO_DEVICE, COPIED_TO_HOST),
    *("intra_bytes", "inter_bytes", "overlapped_s", "serial_s"),
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
    cell, rows = prediction.cell, []
    for row in prediction.expectation.collectives:
        wire_bytes = sent_bytes(row.op, row.payload_bytes, cell.group_size(row.group), cell.device)
        rows.append(dataclasses.asdict(row) | {"wire_bytes": wire_bytes})
    return {
        "memory": prediction.memory.parts,
        "peak_memory_bytes": prediction.memory.peak,
        "peak_at": prediction.memory.moment,
        "held": prediction.expectation.held,
        "collectives": rows,
        "num_calls": sum(row["calls"] for row in rows),
        "wire_bytes": prediction.wire_bytes,
    }
