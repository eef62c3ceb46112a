"""What is predicted of each backend, for the table and the JSON of ``predict``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.forecast.choice import Choices, Question, StepRates
from bench.forecast.prediction import (
    Prediction,
    TimeEstimate,
    communication,
    grouped_with,
    sent_bytes,
)
from bench.judge.formulas import Collective


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent(Collective):
    """The calls of one operation on one dtype in an optimizer step, and what they send."""

    wire_bytes: float
    """Derived: what a rank sends in ring algorithms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What a backend is among those that were asked for."""

    recommended: bool
    """Whether it is the best, or leads where that is undecided."""
    best: bool
    """Whether it is clearly the best."""
    may_be_fastest: bool
    """Whether it may be faster than what leads."""
    best_at: tuple[tuple[int, int], ...]
    """The N and W of the table at which it is clearly the best, or as good."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Levels:
    """What a rank sends in an optimizer step over a link of two levels."""

    intra_bytes: float
    """Within its node."""
    inter_bytes: float
    """To other nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendForecast:
    """One backend, as an answer to a question. What is None is unknown."""

    prediction: Prediction
    """Its memory and traffic may be read unless it is missing."""
    equals: str = ""
    """The mechanism with which a wrapper is grouped; empty for none."""
    fits: bool | None = None
    """Whether the peak is within the limit, with the most that was published to be reserved beside
    such a peak."""
    may_fit: bool | None = None
    """Whether it is with the least."""
    exact_peak_bytes: int | None = None
    """The peak of rank 0 on fake tensors."""
    sent: tuple[Sent, ...] = ()
    levels: Levels | None = None
    communication_s: float | None = None
    step: TimeEstimate | None = None
    rates: StepRates | None = None
    standing: Standing | None = None
    """None if times are not estimated."""

    @property
    def name(self) -> str:
        return self.prediction.name

    @property
    def peak(self) -> int:
        """Bytes of a rank at its peak; may not be asked of what is missing."""
        return self.prediction.memory.peak

    @property
    def is_predicted(self) -> bool:
        return not self.prediction.is_missing

    @property
    def offloads(self) -> bool:
        """Whether it is predicted and holds something on the host."""
        return self.is_predicted and self.prediction.host is not None

    @property
    def reason(self) -> str:
        """Why it is refused, not predicted or wrong; empty if it is not."""
        prediction = self.prediction
        return prediction.refusal or prediction.not_predicted or prediction.defect


def answer(
    question: Question, backends: Sequence[str], *, grouped: bool
) -> tuple[list[BackendForecast], Choices]:
    """The predictions, one per backend, and what is the best.

    ``grouped``: wrappers that equal a mechanism are not considered beside it. Nothing is the best
    if times are not estimated.
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
        row = _forecast(question, prediction, choices)
        rows.append(dataclasses.replace(row, equals=equal.get(prediction.name, "")))
    return rows, choices


def _forecast(question: Question, prediction: Prediction, choices: Choices) -> BackendForecast:
    standing = None
    if choices:
        standing = _standing(choices, prediction)
    if prediction.is_missing:
        return BackendForecast(prediction=prediction, standing=standing)
    fits = may_fit = communication_s = levels = step = rates = None
    if question.memory_bytes is not None:
        fits, may_fit = question.fits(prediction), question.may_fit(prediction)
    if question.link is not None:
        communication_s = communication(prediction.traffic, question.link).serial
        levels = _levels(prediction, question.link.node_size)
    if choices and not prediction.offloads:
        step = question.step(prediction)
        rates = question.rates(prediction.cell, step)
    return BackendForecast(
        prediction=prediction,
        fits=fits,
        may_fit=may_fit,
        sent=_sent(prediction),
        levels=levels,
        communication_s=communication_s,
        step=step,
        rates=rates,
        standing=standing,
    )


def _standing(choices: Choices, prediction: Prediction) -> Standing:
    name = prediction.name
    here = choices[prediction.cell.accumulate, prediction.cell.world_size]
    best_at = []
    for at, choice in choices.items():
        if not choice.rivals and name in (choice.best, *choice.equal):
            best_at.append(at)
    is_recommended = name in (here.best, *here.equal)
    return Standing(
        recommended=is_recommended,
        best=is_recommended and not here.rivals,
        may_be_fastest=name in here.rivals,
        best_at=tuple(best_at),
    )


def _sent(prediction: Prediction) -> tuple[Sent, ...]:
    cell = prediction.cell
    found = []
    for row in prediction.expectation.collectives:
        wire_bytes = sent_bytes(row.op, row.payload_bytes, cell.group_size(row.group), cell.device)
        found.append(Sent(**dataclasses.asdict(row), wire_bytes=wire_bytes))
    return tuple(found)


def _levels(prediction: Prediction, node_size: int) -> Levels | None:
    """What goes over each level of a link; None if it has one level."""
    if node_size == 1:
        return None
    intra_bytes = inter_bytes = 0.0
    for part in prediction.traffic:
        intra, inter = part.levels(node_size)
        intra_bytes += intra
        inter_bytes += inter
    return Levels(intra_bytes=intra_bytes, inter_bytes=inter_bytes)


UNKNOWN = (
    *("peak_memory_bytes", "peak_at", "fits", "may_fit", "num_calls", "wire_bytes"),
    *("host_bytes", "pinned_bytes", "copied_to_device", "copied_to_host"),
    *("communication_s", "intra_bytes", "inter_bytes", "overlapped_s", "serial_s"),
    *("tokens_per_s", "mfu"),
    *("best", "recommended", "may_be_fastest", "best_at"),
)
"""The keys of the JSON that may be null."""


def forecast_json(question: Question, row: BackendForecast) -> dict[str, Any]:
    """A row as plain values, null where nothing is known.

    The keys:

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
    - ``collectives``: per operation and dtype of one optimizer step ``op``, ``group``, ``dtype``,
      ``calls``, ``payload_bytes`` and ``wire_bytes`` (derived: what a rank sends in ring
      algorithms); ``num_calls`` and ``wire_bytes``: their sums; ``intra_bytes``, ``inter_bytes``:
      what of it stays within a node, or goes to other nodes;
    - ``communication_s``, ``compute_s``, ``overlapped_s``, ``serial_s``: see
      bench.forecast.prediction; ``tokens_per_s`` and ``mfu``: of a rank, in a serial and in an
      overlapped step;
    - ``recommended``, ``best``, ``may_be_fastest``, ``best_at``: see Standing.
    """
    prediction = row.prediction
    values: dict[str, Any] = {
        "backend": row.name,
        "framework": prediction.backend.framework,
        "sharding": str(prediction.backend.sharding),
        "sync": str(prediction.backend.sync),
        "equals": row.equals,
        "refusal": prediction.refusal,
        "not_predicted": prediction.not_predicted,
        "defect": prediction.defect,
        "memory": {},
        "host": {},
        "held": {},
        "collectives": [dataclasses.asdict(sent) for sent in row.sent],
        "compute_s": question.compute_s,
        **dict.fromkeys(UNKNOWN),
    }
    if row.standing is not None:
        values |= dataclasses.asdict(row.standing)
    if prediction.is_missing:
        return values
    values |= {
        "memory": prediction.memory.parts,
        "peak_memory_bytes": prediction.memory.peak,
        "peak_at": prediction.memory.moment,
        "held": prediction.expectation.held,
        "fits": row.fits,
        "may_fit": row.may_fit,
        "num_calls": sum(sent.calls for sent in row.sent),
        "wire_bytes": prediction.wire_bytes,
        "communication_s": row.communication_s,
    }
    if row.exact_peak_bytes is not None:
        values["exact_peak_bytes"] = row.exact_peak_bytes
    if row.levels is not None:
        values |= dataclasses.asdict(row.levels)
    if row.step is not None:
        values |= {"overlapped_s": row.step.overlapped, "serial_s": row.step.serial}
    if row.rates is not None:
        values |= dataclasses.asdict(row.rates)
    if prediction.host is not None:
        host = prediction.host
        values |= {
            "host": host.parts,
            "host_bytes": host.peak,
            "pinned_bytes": host.pinned,
            "copied_to_device": host.to_device,
            "copied_to_host": host.to_host,
        }
    return values
