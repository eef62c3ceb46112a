"""Published peaks of memory, from ``published_peaks.csv``: beside what ``predict`` says, and what is reserved beyond.

Each row of the file is a figure that others published, with its source, version and settings. Rows
whose settings ``predict`` knows have a ``backend``; others say in ``not_predicted`` what it lacks.
Sizes are in GiB, as published unless ``remark`` says how they were given.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from bench.forecast.fit import FRAGMENTS
from bench.forecast.lora import LoRA
from bench.forecast.prediction import predict
from bench.plan.cell import Cell, Device, Precision
from bench.tabular import markdown_table
from studies import ROOT

FIGURES = "studies/published_peaks.csv"
COMPARED = "results/published_peaks.csv"
"""Each predicted row beside its prediction."""
GIB = 2**30
NUMBERS = {
    "world_size": int,
    "micro_batch": int,
    "sequence_length": int,
    "accumulate": int,
    "allocated_gib": float,
    "active_gib": float,
    "reserved_gib": float,
    "lora_rank": int,
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
    lora_rank: int | None
    """None where all weights are trained."""
    lora_targets: str
    """Separated by spaces; empty if they are not given."""
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
        if self.lora is not None:
            parts.append(str(self.lora))
        checkpointing = self.checkpointing
        if checkpointing == "none":
            checkpointing = "no"
        parts.append(f"{checkpointing} checkpointing")
        if self.compiled == "yes":
            parts.append("compiled")
        return ", ".join(parts)

    @property
    def lora(self) -> LoRA | None:
        """What is trained beside frozen weights."""
        if self.lora_rank is None:
            return None
        return LoRA(self.lora_rank, tuple(self.lora_targets.split()))

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
        (found,) = predict(cell, [self.backend], bf16_parameters=is_bf16, lora=self.lora)
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
    predicted = {peak: peak.predicted_gib for peak in peaks}
    others = sum(size is None for size in predicted.values())
    low = [
        1 - size / peak.live_gib
        for peak, size in predicted.items()
        if size is not None and peak.live_gib is not None and peak.lora is not None
    ]
    return [
        "## Predicted peaks against published ones",
        "",
        f"[{FIGURES}](../{FIGURES}) has {len(peaks)} peaks that others published, of other implementations of these "
        "models, with settings, sources, versions and remarks. *Live* is the peak of allocated tensors or of active "
        "blocks, which are the same under FSDP2. Predictions are without compilation, and nothing is fitted to these "
        "figures.",
        "",
        *markdown_table(
            ("training", "live, GiB", "predicted, GiB", "error"),
            [
                (
                    f"{peak.what}, {peak.settings}",
                    _gib(peak.live_gib),
                    _gib(size),
                    _error(peak, size),
                )
                for peak, size in predicted.items()
                if size is not None and peak.live_gib is not None and peak.lora is None
            ],
        ),
        "torchtitan's Llama 7B keeps its logits in fp32 during the backward, 1.95 GiB for 8 samples, which is not "
        "predicted. llama-recipes is FSDP1, whose freed blocks stay active, and rounds to whole GiB. With LoRA the "
        f"predictions of {len(low)} peaks ([each](../{COMPARED}); 7B to 13B, W = 1) are {100 * min(low):.0f} to "
        f"{100 * max(low):.0f} % low: litgpt drops out what LoRA's matrices read, and fms-acceleration has these in "
        f"fp32 and a loss that copies its logits. {others} other rows have settings that `predict` does not know "
        "(`not_predicted`).",
        "",
        *_reserved(predicted),
    ]


def _error(peak: PublishedPeak, predicted: float) -> str:
    """How far the prediction is from the published live peak, in per cent."""
    if peak.live_gib is None:
        return ""
    return f"{100 * (predicted / peak.live_gib - 1):+.1f} %"


def compared() -> str:
    """The rows that are predicted, live and reserved, beside the prediction, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        (
            *("training", "settings", "live_gib", "predicted_gib", "error", "reserved_gib"),
            *("reserved_of_predicted", "source", "version"),
        )
    )
    for peak in published_peaks():
        size = peak.predicted_gib
        if size is None:
            continue
        over = "" if peak.reserved_gib is None else f"{peak.reserved_gib / size:.2f}"
        reserved = "" if peak.reserved_gib is None else _gib(peak.reserved_gib)
        live = "" if peak.live_gib is None else _gib(peak.live_gib)
        of_peak = (live, _gib(size), _error(peak, size), reserved, over)
        writer.writerow((peak.what, peak.settings, *of_peak, peak.source, peak.version))
    return text.getvalue()


def _reserved(predicted: Mapping[PublishedPeak, float | None]) -> list[str]:
    """What is reserved beyond active blocks, and how many reserved figures are as far above the prediction."""
    least, most = reserved_range([*predicted])
    known = sum(peak.reserved_share is not None for peak in predicted)
    shares = []
    for peak, size in predicted.items():
        if size is not None and peak.reserved_gib is not None:
            shares.append(peak.reserved_gib / size - 1)
    below, above = sum(share < least for share in shares), sum(share > most for share in shares)
    ratios = [1 + share for share in shares]
    return [
        f"In the {known} published trainings that report both, the allocator reserved {100 * least:.0f} to "
        f"{100 * most:.0f} % more than the peak of active blocks. By `predict`, a peak *fits* if "
        f"{100 * FRAGMENTS.most:.0f} % of it fit beside it, with the CUDA context and NCCL. It is *tight* if "
        f"{100 * FRAGMENTS.least:.0f} % do: the allocator then has to give back what it reserved, which costs time, "
        f"or fails. [Of {len(shares)} reserved figures](../{COMPARED}), {min(ratios):.2f} to {max(ratios):.2f} times "
        f"as large as predicted, {len(shares) - below - above} are within this range, {below} below and {above} beyond "
        "it, for which the remarks name a reason.",
        "",
    ]


def _gib(number: float) -> str:
    return f"{number:.1f}"
