"""Published peaks of memory, from ``published_peaks.csv``: beside what ``predict`` says, and what is reserved beyond.

Each row of the file is a figure that others published, with its source, version and settings. Rows
whose settings ``predict`` knows have a ``backend``; others say in ``not_predicted`` what it lacks.
Sizes are in GiB, as published unless ``remark`` says how they were given.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bench.forecast.fit import FRAGMENTS
from bench.forecast.prediction import predict
from bench.plan.cell import Cell, Device, Precision
from bench.tabular import markdown_table
from studies import ROOT

FIGURES = "studies/published_peaks.csv"
GIB = 2**30
NUMBERS = {
    "world_size": int,
    "micro_batch": int,
    "sequence_length": int,
    "accumulate": int,
    "allocated_gib": float,
    "active_gib": float,
    "reserved_gib": float,
}
"""Columns that hold numbers; an empty one is None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedPeak:
    """A row of the file."""

    what: str
    model: str
    gpus: str
    backend: str
    """Empty if it is not predicted."""
    world_size: int
    micro_batch: int | None
    sequence_length: int | None
    accumulate: int | None
    precision: str
    parameters: str
    """``bf16`` where there are no fp32 masters."""
    checkpointing: str
    """``none``, ``selective`` or ``full``."""
    optimizer: str
    compiled: str
    """``yes`` or ``no``; predicted are blocks that are not."""
    allocated_gib: float | None
    """Peak of live tensors."""
    active_gib: float | None
    """Peak with freed blocks that another stream may still use; under FSDP2 there are none."""
    reserved_gib: float | None
    """Peak of what the allocator has taken from the device."""
    not_predicted: str
    remark: str
    source: str
    version: str

    @property
    def live_gib(self) -> float | None:
        """What a prediction is compared with."""
        if self.allocated_gib is not None:
            return self.allocated_gib
        return self.active_gib

    @property
    def reserved_share(self) -> float | None:
        """By which share more is reserved than is active."""
        if self.active_gib is None or self.reserved_gib is None:
            return None
        return self.reserved_gib / self.active_gib - 1

    @property
    def settings(self) -> str:
        """Ranks, micro-batch and the rest in words."""
        parts = [f"W = {self.world_size}"]
        if self.micro_batch is not None:
            parts.append(f"{self.micro_batch} x {self.sequence_length} tokens")
        if self.parameters == "bf16":
            parts.append("bf16 parameters")
        checkpointing = self.checkpointing
        if checkpointing == "none":
            checkpointing = "no"
        parts.append(f"{checkpointing} checkpointing")
        if self.compiled == "yes":
            parts.append("compiled")
        return ", ".join(parts)

    @property
    def predicted_gib(self) -> float | None:
        """The peak by ``predict``, of blocks that are not compiled; None where it knows too little."""
        if not self.backend:
            return None
        assert self.accumulate and self.micro_batch and self.sequence_length, self.what
        cell = Cell(
            backend="",
            model=self.model,
            accumulate=self.accumulate,
            world_size=self.world_size,
            global_batch_size=self.accumulate * self.micro_batch * self.world_size,
            sequence_length=self.sequence_length,
            precision=Precision(self.precision),
            optimizer=self.optimizer,
            device=Device.CUDA,
            activation_checkpointing=self.checkpointing != "none",
            selective_checkpointing=self.checkpointing == "selective",
        )
        is_bf16 = self.parameters == "bf16"
        (found,) = predict(cell, [self.backend], bf16_parameters=is_bf16)
        return found.memory.peak / GIB


def published_peaks() -> list[PublishedPeak]:
    """All rows of the file."""
    found = []
    with (ROOT / FIGURES).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            values: dict[str, Any] = dict(row)
            for name, read in NUMBERS.items():
                values[name] = read(values[name]) if values[name] else None
            assert set(values) == {field.name for field in fields(PublishedPeak)}, FIGURES
            found.append(PublishedPeak(**values))
    return found


def reserved_range(peaks: Sequence[PublishedPeak]) -> tuple[float, float]:
    """The smallest and the largest share that is reserved beyond active memory, outward to whole per cent."""
    shares = [peak.reserved_share for peak in peaks]
    known = [share for share in shares if share is not None]
    return math.floor(100 * min(known)) / 100, math.ceil(100 * max(known)) / 100


def section() -> list[str]:
    """The lines of the page on memory and bytes."""
    peaks = published_peaks()
    return [
        "## Predicted peaks against published ones",
        "",
        f"Figures that others published, with their settings and sources, are in [{FIGURES}](../{FIGURES}). *Live* is "
        "the published peak of allocated tensors, or of active blocks, which under FSDP2 are the same; *reserved* is "
        "what the allocator had taken from the device. The prediction is that of `predict` with the settings of the "
        "row, of blocks that are not compiled; nothing is fitted to these figures. They are of other implementations "
        "of the same models, in the versions of their days.",
        "",
        *markdown_table(
            (
                *("training", "settings", "live, GiB", "predicted, GiB", "error"),
                *("reserved, GiB", "reserved / predicted", "remark", "source"),
            ),
            list(_compared(peaks)),
        ),
        _within(peaks),
        "",
        *_reserved(peaks),
        "Published, and not predicted:",
        "",
        *markdown_table(
            ("training", "settings", "GiB", "why not", "source"),
            [
                (peak.what, peak.settings, _largest(peak), peak.not_predicted, _source(peak))
                for peak in peaks
                if peak.predicted_gib is None
            ],
        ),
    ]


def _within(peaks: Sequence[PublishedPeak]) -> str:
    """How many of the published reserved figures are as far above the prediction as the reserve reaches."""
    least, most = reserved_range(peaks)
    ratios = []
    for peak in peaks:
        predicted = peak.predicted_gib
        if predicted is not None and peak.reserved_gib is not None:
            ratios.append(peak.reserved_gib / predicted - 1)
    below, above = (sum(r < least for r in ratios), sum(r > most for r in ratios))
    return (
        f"Of {len(ratios)} reserved figures {len(ratios) - below - above} are {100 * least:.0f} to {100 * most:.0f} % "
        f"above the prediction, which is the reserve below; {below} are less and {above} more above it, where the "
        "remark says what that version keeps besides."
    )


def _compared(peaks: Sequence[PublishedPeak]) -> Iterator[tuple[str, ...]]:
    for peak in peaks:
        predicted = peak.predicted_gib
        if predicted is None:
            continue
        error = reserved = over = "-"
        if peak.live_gib is not None:
            error = f"{100 * (predicted / peak.live_gib - 1):+.1f} %"
        if peak.reserved_gib is not None:
            reserved, over = f"{peak.reserved_gib:.1f}", f"{peak.reserved_gib / predicted:.2f}"
        yield (
            *(peak.what, peak.settings, _gib(peak.live_gib), f"{predicted:.1f}", error),
            *(reserved, over, peak.remark or "-", _source(peak)),
        )


def _reserved(peaks: Sequence[PublishedPeak]) -> list[str]:
    least, most = reserved_range(peaks)
    rows = []
    for peak in peaks:
        share = peak.reserved_share
        if share is not None:
            both = (_gib(peak.active_gib), _gib(peak.reserved_gib), f"{100 * share:+.0f} %")
            rows.append((peak.what, peak.settings, *both, _source(peak)))
    return [
        "What the allocator reserves beyond the peak of active blocks, in all published trainings that report both: "
        f"{100 * least:.0f} to {100 * most:.0f} %, outward to whole per cent. `predict` keeps this range free: a peak "
        f"*fits* if {100 * FRAGMENTS.most:.0f} % of it fit beside it, with the CUDA context and NCCL; it is *tight* if "
        f"{100 * FRAGMENTS.least:.0f} % do, since the allocator then has to give back what it reserved, which costs "
        "time, or fails.",
        "",
        *markdown_table(
            ("training", "settings", "active, GiB", "reserved, GiB", "more", "source"), rows
        ),
    ]


def _gib(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:.1f}"


def _largest(peak: PublishedPeak) -> str:
    """The figure that is largest of those that a row has."""
    figures = (peak.reserved_gib, peak.active_gib, peak.allocated_gib)
    return _gib(next(number for number in figures if number is not None))


def _source(peak: PublishedPeak) -> str:
    return f"{peak.source} ({peak.version})"
