"""How to accumulate a global batch: micro-batch, N, backend and checkpointing, by time and memory.

Of all combinations those are worth a thought that no other one beats: by memory, by the overlapped
step and by the serial one. They are the front. All compute at the same rate, whatever their
micro-batch: a GPU that small micro-batches leave partly idle is not in these estimates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.forecast.choice import Question
from bench.forecast.prediction import Prediction, TimeEstimate
from bench.plan.cell import Cell

CHECKPOINTING = {"none": (False, False), "selective": (True, True), "full": (True, False)}
"""What is recomputed, with the fields ``activation_checkpointing`` and ``selective_checkpointing``
of a cell."""
MOST_SAMPLES = 64
"""Samples of the largest micro-batch that is considered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Combination:
    """One way to train the global batch."""

    prediction: Prediction
    checkpointing: str
    """A key of CHECKPOINTING."""
    step: TimeEstimate
    fits: bool
    may_fit: bool

    @property
    def cell(self) -> Cell:
        return self.prediction.cell

    @property
    def peak(self) -> int:
        return self.prediction.memory.peak

    def beats(self, other: Combination) -> bool:
        """Whether this is at least as good in everything, and better in something."""
        ours = (self.peak, self.step.overlapped, self.step.serial)
        theirs = (other.peak, other.step.overlapped, other.step.serial)
        if ours == theirs:
            return False
        return all(a <= b for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Search:
    """All combinations, and the front of those that fit, the least memory first."""

    combinations: tuple[Combination, ...]
    front: tuple[Combination, ...]
    is_tight: bool
    """Whether the front fits only if less is reserved beside its peaks than the most that was
    published."""

    def to_json(self, question: Question) -> list[dict[str, Any]]:
        """Plain values, one per combination; ``on_front``: whether nothing beats it."""
        rows = []
        for each in self.combinations:
            row = combination_json(question, each)
            row["on_front"] = each in self.front
            rows.append(row)
        return rows


def search(question: Question, batch: int, backends: Sequence[str]) -> Search:
    """Every combination that gives ``batch`` samples per optimizer step on the question's ranks.

    The question's cell says the rest: model, W, sequence, precision. Backends that are known to be
    wrong, or that a combination is refused for or not predicted of, are left out, and so are those that
    offload: what they copy, and the update on the host, are in no estimate of a step.
    """
    combinations = []
    for each in _combinations(question, batch, backends):
        if not each.prediction.offloads:
            combinations.append(each)
    able = [combination for combination in combinations if combination.fits]
    is_tight = not able
    if is_tight:
        able = [combination for combination in combinations if combination.may_fit]
    front: dict[tuple[float, ...], Combination] = {}
    for combination in able:
        if not any(other.beats(combination) for other in able):
            step = combination.step
            front.setdefault((combination.peak, step.overlapped, step.serial), combination)
    ordered = sorted(front.values(), key=lambda each: (each.peak, each.step.serial))
    return Search(combinations=tuple(combinations), front=tuple(ordered), is_tight=is_tight)


def _combinations(question: Question, batch: int, backends: Sequence[str]) -> Iterator[Combination]:
    samples = batch // question.cell.world_size
    for micro_batch in range(1, min(samples, MOST_SAMPLES) + 1):
        if samples % micro_batch:
            continue
        for checkpointing, (is_on, is_selective) in CHECKPOINTING.items():
            cell = dataclasses.replace(
                question.cell,
                global_batch_size=batch,
                accumulate=samples // micro_batch,
                activation_checkpointing=is_on,
                selective_checkpointing=is_selective,
            )
            for prediction in question.predict(cell, backends):
                if prediction.is_missing or prediction.defect:
                    continue
                if is_on and prediction.backend.refuses.checkpointed:
                    continue
                yield Combination(
                    prediction=prediction,
                    checkpointing=checkpointing,
                    step=question.step(prediction),
                    fits=question.fits(prediction),
                    may_fit=question.may_fit(prediction),
                )


def combination_json(question: Question, combination: Combination) -> dict[str, Any]:
    """A combination as plain values; sizes in bytes, times in seconds.

    ``mfu`` is null where the peak is unknown.
    """
    cell, step = combination.cell, combination.step
    return {
        "backend": combination.prediction.name,
        "micro_batch": cell.micro_batch_size,
        "accumulate": cell.accumulate,
        "checkpointing": combination.checkpointing,
        "peak_memory_bytes": combination.peak,
        "fits": combination.fits,
        "may_fit": combination.may_fit,
        "overlapped_s": step.overlapped,
        "serial_s": step.serial,
        **dataclasses.asdict(question.rates(cell, step)),
    }
