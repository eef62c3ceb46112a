"""The figures of memory by category, of made and of odd runs."""

from __future__ import annotations

from typing import Any

import matplotlib.style
import pytest

from bench.judge import tables
from bench.plan.categories import HELD, PEAK, Category
from bench.report import bars, style
from bench.report.figure_data import FigureData
from bench.report.sheet import Drawing
from tests import legible
from tests.factories import make_cell, make_failure, make_manifest, make_record

BACKENDS = (
    "ddp-eager", "ddp-deferred", "fsdp2-eager", "fsdp2-deferred", "fsdp2-zero2-eager", "fsdp2-deferred-resident",
    "deepspeed-zero2-eager", "deepspeed-zero3-deferred", "lightning-fsdp2", "lightning-deepspeed-zero2-corrected",
)  # fmt: skip
MIB = 2**20


def made(total: str, scale: int) -> dict[str, int]:
    """A total with parts of 1, 2, 3 ... MiB, times a factor."""
    parts = {f"{total}_{category}": (i + 1) * scale * MIB for i, category in enumerate(Category)}
    return {total: sum(parts.values()), **parts}


def tables_of(names: tuple[str, ...], ns: tuple[int, ...], worlds: tuple[int, ...]) -> tuple[tables.Tables, Any]:
    cells = [
        make_cell(backend=name, accumulate=n, world_size=world, global_batch_size=64)
        for world in worlds
        for n in ns
        for name in names
    ]
    records = []
    for i, cell in enumerate(cells):
        if cell.backend == "fsdp2-zero2-eager" and cell.accumulate == 4:
            records.append(make_failure(cell))
            continue
        held = made(HELD, 1 + i % len(names)) if cell.accumulate > 1 else {}
        records.append(make_record(cell, memory={**made(PEAK, 2 + i % len(names)), **held}))
        records.append(make_record(cell, repeat=1, memory=None))
    manifest = make_manifest(cells)
    return tables.build(records, manifest), manifest


def draw(names: tuple[str, ...], ns: tuple[int, ...], worlds: tuple[int, ...]) -> list[Drawing]:
    with matplotlib.style.context(list(style.BASE)):
        return bars.draw_memory_categories(FigureData(*tables_of(names, ns, worlds)))


@pytest.mark.parametrize(
    ("names", "ns", "worlds"),
    [
        (BACKENDS[:2], (2,), (2,)),
        (BACKENDS, (1, 2, 4), (2, 4)),
        (BACKENDS, (2, 4, 8, 16), (1, 2, 4)),
        (BACKENDS[2:4], (1, 2, 4, 8), (2,)),
    ],
    ids=["two", "six panels", "twelve panels", "pair"],
)
def test_nothing_overlaps_and_no_panel_is_empty(
    names: tuple[str, ...], ns: tuple[int, ...], worlds: tuple[int, ...]
) -> None:
    drawings = draw(names, ns, worlds)
    assert drawings
    for drawing in drawings:
        with matplotlib.style.context(list(style.BASE)):
            legible.assert_legible(drawing.figure, style.MAX_HEIGHT)
        assert all(axes.patches for axes in drawing.figure.axes)


def test_a_bar_is_as_long_as_the_peak_and_has_every_category() -> None:
    (drawing,) = draw(("fsdp2-eager",), (2,), (2,))
    (axes,) = drawing.figure.axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
    assert len(ends) == len(Category)
    assert max(ends) == pytest.approx(2 * sum(range(1, 10)))
    assert drawing.data["live_bytes"].tolist() == [90 * MIB]
