"""What an optimizer step takes on a backend, by prediction: memory, collectives, and bounds of its time.

Memory comes from ``bench.forecast.footprint``, collectives from ``bench.judge.formulas``. The rest is arithmetic:

- communication in seconds = sum over the collectives of (latency + wire bytes / link); wire bytes are those of ring
  algorithms, derived and not measured (``bench.judge.formulas.wire_bytes``), and 0 at W = 1;
- lower bound of a step = max(compute, communication), as if every collective could run beside every kernel; upper
  bound = compute + communication, with nothing hidden.

Every rank has a link of the same speed to itself, and compute takes the same time on every backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from bench.backends.base import Backend
from bench.backends.deepspeed import DeepSpeedZero2Deferred
from bench.forecast.footprint import Footprint, declined, footprint
from bench.judge.formulas import BUILT_IN, Expectation, expect, layout_of, wire_bytes
from bench.plan.cell import REFERENCES, Cell, Precision
from bench.plan.models import SIZES
from bench.workload.layout import Layout

NOT_PREDICTED = "not predicted"
"""How a refusal begins if the backend would run the cell."""
COUNTED_N = 8
"""Collectives are counted up to this N; from N = 4 on, each further micro-batch adds the same."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """What connects the ranks."""

    bytes_per_s: float
    """What a rank can send, while it receives as much."""
    latency_s: float = 0.0
    """Seconds per collective call, whatever its size."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a rank sends in one optimizer step."""

    calls: float
    wire_bytes: float
    """Derived for ring algorithms."""

    def seconds(self, link: Link) -> float:
        """Seconds of the communication alone."""
        return self.calls * link.latency_s + self.wire_bytes / link.bytes_per_s


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of an optimizer step's time, in seconds."""

    lower: float
    upper: float


@dataclass(frozen=True)
class Prediction:
    """One backend, asked for one cell."""

    cell: Cell
    backend: type[Backend]
    layout: Layout
    activation_bytes: int | None = None
    """Activations of one micro-batch, if they are known and not to be estimated."""

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def refusal(self) -> str:
        """Why the backend does not run this cell, or why it is not predicted; empty otherwise."""
        if issubclass(self.backend, DeepSpeedZero2Deferred) and self.cell.precision is Precision.BF16:
            return "coalesce_grad_reduction sums gradients in bf16, all others in fp32, so the backend refuses bf16"
        reason = declined(self.cell, self.backend)
        return f"{NOT_PREDICTED}: {reason}" if reason else ""

    def defect(self, accumulate: int) -> str:
        """What is known to be wrong with the backend's updates at this N; empty if nothing is."""
        return self.backend.defect if accumulate > 1 else ""

    @cached_property
    def _expectations(self) -> dict[int, Expectation]:
        return {}

    def expectation(self, accumulate: int) -> Expectation:
        """Collectives and held bytes at this N."""
        if accumulate not in self._expectations:
            found = expect(at(self.cell, accumulate), self.layout)
            assert found is not None, "callers ask for no backend with a refusal"
            self._expectations[accumulate] = found
        return self._expectations[accumulate]

    @cached_property
    def _traffic(self) -> dict[int, Traffic]:
        return {}

    def traffic(self, accumulate: int) -> Traffic:
        """What a rank sends at this N."""
        if accumulate > COUNTED_N:
            half, most = self.traffic(COUNTED_N // 2), self.traffic(COUNTED_N)
            further = (accumulate - COUNTED_N) / (COUNTED_N - COUNTED_N // 2)
            return Traffic(
                most.calls + further * (most.calls - half.calls),
                most.wire_bytes + further * (most.wire_bytes - half.wire_bytes),
            )
        if accumulate not in self._traffic:
            rows = self.expectation(accumulate).collectives if self.cell.world_size > 1 else ()
            wire = sum(wire_bytes(row.op, row.payload_bytes, self.cell.group_size(row.group)) for row in rows)
            self._traffic[accumulate] = Traffic(sum(row.calls for row in rows), wire)
        return self._traffic[accumulate]

    @cached_property
    def _footprints(self) -> dict[int, Footprint]:
        return {}

    def memory(self, accumulate: int) -> Footprint:
        """A rank's memory at its peak, which is the same from N = 2 on."""
        n = min(accumulate, 2)
        if n not in self._footprints:
            held = self.expectation(n).held
            cell = at(self.cell, n)
            self._footprints[n] = footprint(cell, self.layout, self.backend, held, self.activation_bytes)
        return self._footprints[n]


def at(cell: Cell, accumulate: int) -> Cell:
    """The cell with another N and the same micro-batch."""
    samples = accumulate * cell.micro_batch_size * cell.world_size
    return dataclasses.replace(cell, accumulate=accumulate, global_batch_size=samples)


def predict(cell: Cell, backends: Sequence[str], activation_bytes: int | None = None) -> list[Prediction]:
    """One prediction per backend, references left out: they do not accumulate."""
    layout = layout_of(cell)
    assert layout is not None, "the command checks the model's name"
    names = [name for name in backends if name in BUILT_IN and name not in REFERENCES]
    return [
        Prediction(dataclasses.replace(cell, backend=name, replicate=one.replicate), one, layout, activation_bytes)
        for name, one in ((name, BUILT_IN[name]) for name in names)
    ]


def compute_seconds(cell: Cell, flops_per_s: float) -> tuple[float, str]:
    """Seconds of an optimizer step's compute on a rank at this rate, and its FLOP in words."""
    size = SIZES[cell.model]
    tokens = cell.accumulate * cell.micro_batch_size * cell.sequence_length
    flops = size.flops_per_token(cell.sequence_length) * tokens
    again = size.recomputed_flops_per_token(cell.sequence_length) * tokens * cell.activation_checkpointing
    recomputed = f" and {again:.3g} recomputed" * cell.activation_checkpointing
    return (flops + again) / flops_per_s, f"{flops:.3g} FLOP{recomputed}"


def record(one: Prediction, link: Link | None, compute_s: float | None, bounds: Bounds | None) -> dict[str, Any]:
    """One backend as plain values for JSON, without an answer; for the keys see ``bench.forecast.best.records``."""
    n = one.cell.accumulate
    values: dict[str, Any] = {
        "backend": one.name,
        "framework": one.backend.framework,
        "sharding": str(one.backend.sharding),
        "sync": str(one.backend.sync),
        "refusal": one.refusal,
        "defect": one.defect(n),
        "memory": {},
        "held": {},
        "collectives": [],
        "compute_s": compute_s,
        **dict.fromkeys(("peak_memory_bytes", "peak_at", "num_calls", "wire_bytes", "communication_s")),
        **dict.fromkeys(("lower_s", "upper_s", "fits", "best", "recommended", "may_be_fastest", "best_where")),
    }
    if one.refusal:
        return values
    memory, traffic = one.memory(n), one.traffic(n)
    rows = [
        dataclasses.asdict(row) | {"wire_bytes": wire_bytes(row.op, row.payload_bytes, one.cell.group_size(row.group))}
        for row in one.expectation(n).collectives
    ]
    values |= {
        "memory": memory.parts,
        "peak_memory_bytes": memory.peak,
        "peak_at": memory.moment,
        "held": one.expectation(n).held,
        "collectives": rows,
        "num_calls": sum(row["calls"] for row in rows),
        "wire_bytes": traffic.wire_bytes,
        "communication_s": None if link is None else traffic.seconds(link),
    }
    if bounds is not None:
        values |= {"lower_s": bounds.lower, "upper_s": bounds.upper}
    return values
