"""What the bench changes in a framework to train with it, for notes of tables and citations.

Only what it patches, replaces or sizes otherwise; docs/settings.md has all settings, and what the
changes cost. It follows from a cell, not from a record, so runs of any age have it. A backend of
another package says the same in its ``remark``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from bench.backends.accelerate import AccelerateFSDP2
from bench.backends.base import Backend, built_in
from bench.backends.deepspeed import ZeroBackend, ZeroStage3
from bench.backends.hugging_face import HuggingFaceDDP, HuggingFaceFSDP2, HuggingFaceTrainer
from bench.backends.lightning import LightningBackend, LightningDeepSpeedZero2
from bench.backends.plain import DDPBackend
from bench.backends.torchtitan import TorchtitanEager
from bench.formatting import some
from bench.plan.cell import Cell, Device

AS_BENCHED = "as benched"
"""Introduces a change in findings, citations and notes."""


def as_benched(cell: Cell) -> tuple[str, ...]:
    """What is changed for a cell, each change in at most 12 words.

    Nothing is said of a backend that is not one of this package.
    """
    backend = built_in().get(cell.backend)
    if backend is None:
        return ()
    return tuple(_changes(backend, cell))


def _changes(backend: type[Backend], cell: Cell) -> Iterator[str]:
    is_on_cpu = cell.device is Device.CPU
    if issubclass(backend, LightningDeepSpeedZero2) and is_on_cpu:
        yield "a subclass of Lightning's DeepSpeedStrategy, without its check for CUDA"
    if issubclass(backend, LightningBackend) and backend.loss_factor != "1":
        yield "the loss multiplied by N: Lightning and DeepSpeed both divide it"
    if issubclass(backend, AccelerateFSDP2 | HuggingFaceFSDP2) and is_on_cpu:
        yield "a subclass of Accelerate's PartialState, which knows no FSDP on CPUs"
    if issubclass(backend, HuggingFaceTrainer):
        yield "a subclass of Trainer: the bench's loader instead of its own"
    if issubclass(backend, HuggingFaceDDP):
        yield "DDP without bucket views, unlike others: no argument of Trainer sets them"
    if issubclass(backend, TorchtitanEager):
        yield "torchtitan's Trainer without its constructor: its loop over the bench's parts"
    if issubclass(backend, ZeroBackend):
        yield from _changes_in_zero(backend, cell)
    if issubclass(backend, DDPBackend) and not is_on_cpu:
        yield "DDP's run-time statistics are off, for which the host would wait"


def _changes_in_zero(backend: type[ZeroBackend], cell: Cell) -> Iterator[str]:
    if not backend.own_defaults:
        yield "buckets and gathers sized like DDP's and FSDP2's, not DeepSpeed's defaults"
    if cell.optimizer.startswith("adamw"):
        yield "torch's AdamW, as in all backends, not DeepSpeed's own"
    if issubclass(backend, ZeroStage3) and cell.device is not Device.CPU:
        yield "gathers wait for the update, by a hook of the bench"


def notes_between(pairs: Iterable[tuple[Cell, Cell]]) -> list[str]:
    """What is changed where two backends are compared, each change with the backends that have it."""
    found: dict[str, dict[str, None]] = {}
    for pair in pairs:
        a, b = pair
        if a.backend == b.backend:
            continue
        for cell in pair:
            for words in as_benched(cell):
                found.setdefault(words, {})[cell.backend] = None
    return [f"{AS_BENCHED}, {some(list(names))}: {words}" for words, names in found.items()]
