"""Which of the predicted backends is the best, at the N and W that were asked for and at others.

A backend may win if it fits, can run the cell and is not known to be wrong. It is certainly the best if its upper bound
of a step's time is at most the margin above the lower bounds of all others: whatever they hide, none is faster by more.
Of several such backends the one with the least peak memory is the best. If there is none, the bounds overlap and the
answer is undecided; what leads then has the smallest upper bound. Backends with the same bounds send the same, and do
not make each other uncertain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.forecast.fit import reserve_bytes
from bench.forecast.prediction import Bounds, Link, Prediction, communication, predict, sent_bytes, wrapped
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
    """Further backends with the same bounds and the same memory."""
    rivals: tuple[str, ...] = ()
    """What may be faster by more than the margin, so that it is undecided."""


Choices = Mapping[tuple[int, int], Choice]
"""By N and W, among them those that were asked for; empty if times are not bounded."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The cell, and the limits of the machine. Times are bounded if both ``link`` and ``compute_s`` are known."""

    cell: Cell
    """With an empty backend."""
    link: Link | None = None
    compute_s: float | None = None
    """Seconds of compute per optimizer step, on a rank."""
    compute_from: str = "as given"
    memory_bytes: int | None = None
    """Of a device; None for no limit."""
    given_reserve_bytes: int | None = None
    """What of it is kept free, by default ``bench.forecast.fit.reserve_bytes``."""
    activation_bytes: int | None = None
    """Activations of one micro-batch, if they are known."""
    margin: float = MARGIN

    @property
    def reserve_bytes(self) -> int:
        """What of a device's memory predictions may not fill."""
        if self.given_reserve_bytes is not None or self.memory_bytes is None or self.cell.device is Device.CPU:
            return self.given_reserve_bytes or 0
        return reserve_bytes(self.memory_bytes, nccl=self.cell.world_size > 1)

    def bounds(self, one: Prediction) -> Bounds:
        """The bounds of a step's time; compute grows with N."""
        assert self.link is not None and self.compute_s is not None
        compute = self.compute_s * one.cell.accumulate / self.cell.accumulate
        sent = communication(one.traffic, self.link)
        return Bounds(max(compute, sent.lower), compute + sent.upper)

    def fits(self, one: Prediction) -> bool:
        """Whether a rank's peak is within the limit."""
        return self.memory_bytes is None or one.memory.peak <= self.memory_bytes - self.reserve_bytes

    def choose(self, predictions: Sequence[Prediction]) -> Choice:
        """The best backend; see the docstring of the module."""
        able = [one for one in predictions if not one.refusal and not one.defect and self.fits(one)]
        if not able:
            return Choice("")
        bounds, peaks = {one.name: self.bounds(one) for one in able}, {one.name: one.memory.peak for one in able}

        def faster(name: str) -> tuple[str, ...]:
            upper = bounds[name].upper
            return tuple(
                other
                for other in bounds
                if bounds[other] != bounds[name] and bounds[other].lower * (1 + self.margin) < upper
            )

        least = min(one.upper for one in bounds.values())
        chosen = [name for name in bounds if not faster(name)] or [n for n in bounds if bounds[n].upper == least]
        ranks = {name: (peaks[name], bounds[name].upper, bounds[name].lower) for name in chosen}
        best = min(ranks, key=lambda name: ranks[name])
        return Choice(best, tuple(n for n in ranks if n != best and ranks[n] == ranks[best]), faster(best))

    def table(self, predictions: Sequence[Prediction]) -> Choices:
        """The best at this and other N and W. Nodes are whole, and HSDP's shards stay as large as they are."""
        assert self.link is not None
        asked, node_size = self.cell.world_size, self.link.node_size
        sizes = [int(asked * times) for times in OTHER_W if (asked * times) % node_size == 0 and asked * times >= 1]
        found = {}
        for accumulate in sorted({*OTHER_N, self.cell.accumulate}):
            for world_size in sizes:
                moved = [one.at(accumulate, world_size) for one in predictions if one.shards_fit(world_size)]
                found[accumulate, world_size] = self.choose(moved)
        return found


def ask(question: Question, backends: Sequence[str], *, grouped: bool) -> tuple[list[dict[str, Any]], Choices]:
    """The predictions as plain values for JSON, one per backend, and if times are bounded what is the best.

    ``grouped``: wrappers that equal a mechanism are not considered beside it. The keys:

    - ``backend``, ``framework``, ``sharding``, ``sync``; ``equals``: the mechanism with which a wrapper is grouped;
      ``refusal``: why it does not run this (all numbers are then null or empty), ``defect``: what is known to be wrong
      with its updates (such a backend never wins); or empty;
    - ``memory``: bytes of a rank at its peak by category (bench.forecast.footprint), which add up to
      ``peak_memory_bytes``; ``peak_at``: the moment; ``held``: bytes between micro-batches by category, exact; with
      --exact ``exact_peak_bytes``, that of rank 0 on fake tensors;
    - ``collectives``: per operation and dtype of one optimizer step ``op``, ``dtype``, ``calls``, ``payload_bytes`` and
      ``wire_bytes`` (derived: what a rank sends in ring algorithms); ``num_calls`` and ``wire_bytes``: their sums;
      ``intra_bytes``, ``inter_bytes``: what of it stays within a node, or goes to other nodes; null with one level;
    - ``communication_s``: null without a link; ``compute_s``, ``lower_s``, ``upper_s``: null without a time of compute;
    - ``fits``: null without a limit of memory; ``best``: whether it is certainly the best here; ``recommended``:
      whether it is that, or leads where it is undecided; ``may_be_fastest``: whether it may then be faster than what
      leads; ``best_at``: the [N, W] of the table at which it is certainly the best, or as good. The last four are null
      without bounds.
    """
    predictions = predict(question.cell, backends, question.activation_bytes)
    equal = wrapped(predictions) if grouped else {}
    choices: Choices = {}
    if question.link is not None and question.compute_s is not None:
        distinct = [one for one in predictions if one.name not in equal]
        choices = question.table(distinct)
    return [_record(question, one, choices) | {"equals": equal.get(one.name, "")} for one in predictions], choices


def _record(question: Question, one: Prediction, choices: Choices) -> dict[str, Any]:
    link, name = question.link, one.name
    values: dict[str, Any] = {
        "backend": name,
        "framework": one.backend.framework,
        "sharding": str(one.backend.sharding),
        "sync": str(one.backend.sync),
        "refusal": one.refusal,
        "defect": one.defect,
        "memory": {},
        "held": {},
        "collectives": [],
        "compute_s": question.compute_s,
        **dict.fromkeys(("peak_memory_bytes", "peak_at", "num_calls", "wire_bytes", "communication_s")),
        **dict.fromkeys(("intra_bytes", "inter_bytes", "lower_s", "upper_s")),
        **dict.fromkeys(("fits", "best", "recommended", "may_be_fastest", "best_at")),
    }
    if choices:
        here = choices[one.cell.accumulate, one.cell.world_size]
        values["recommended"] = name in (here.best, *here.equal)
        values["best"] = values["recommended"] and not here.rivals
        values["may_be_fastest"] = name in here.rivals
        certain = {at: choice for at, choice in choices.items() if not choice.rivals}
        values["best_at"] = [list(at) for at, choice in certain.items() if name in (choice.best, *choice.equal)]
    if one.refusal:
        return values
    rows = [
        dataclasses.asdict(row)
        | {"wire_bytes": sent_bytes(row.op, row.payload_bytes, one.cell.group_size(row.group), one.cell.device)}
        for row in one.expectation.collectives
    ]
    values |= {
        "memory": one.memory.parts,
        "peak_memory_bytes": one.memory.peak,
        "peak_at": one.memory.moment,
        "held": one.expectation.held,
        "collectives": rows,
        "num_calls": sum(row["calls"] for row in rows),
        "wire_bytes": sum(part.wire_bytes for part in one.traffic),
        "communication_s": None if link is None else communication(one.traffic, link).upper,
        "fits": None if question.memory_bytes is None else question.fits(one),
    }
    if link is not None and link.node_size > 1:
        levels = [part.levels(link.node_size) for part in one.traffic]
        values |= {"intra_bytes": sum(intra for intra, _ in levels), "inter_bytes": sum(inter for _, inter in levels)}
    if choices:
        bounds = question.bounds(one)
        values |= {"lower_s": bounds.lower, "upper_s": bounds.upper}
    return values
