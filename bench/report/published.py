"""Figures that others published of the training that a run measures, beside what it measured."""

from __future__ import annotations

from bench.formatting import size
from bench.judge.analysis import Analysis
from bench.judge.tables import rows_of
from bench.report.sections import PageSection
from bench.tabular import Table

HEADER = ("what", "how", "tokens/s per GPU", "memory of a GPU")


def published(data: Analysis) -> PageSection | None:
    """The matrix's published figures above the cells of the run; None if it has none."""
    figures = data.run.manifest["matrix"]["values"].get("published")
    if not figures:
        return None
    rows = [
        (
            f"published: {figure['what']}",
            figure["conditions"],
            f"{figure['tokens_per_s_per_gpu']:,.0f}",
            size(figure["memory_gib"] * 2**30),
        )
        for figure in figures
    ]
    devices = {record["cell_id"]: record.get("device_name") for record in data.run.records}
    known = data.contestants[data.contestants["tokens_per_s"].notna()]
    for row in rows_of(known.sort_values("tokens_per_s", ascending=False, kind="stable")):
        cell = data.run.cells[row["cell_id"]]
        speed = row["tokens_per_s"] / cell.world_size
        device = f"{cell.world_size} x {devices[cell.cell_id]}"
        rows.append((row["label"], device, f"{speed:,.0f}", size(row["peak_memory_bytes"])))
    sources = dict.fromkeys(figure["source"] for figure in figures)
    return PageSection(
        key="published",
        title="What have others published about this training?",
        sentences=(
            f"The published figures are from {'; '.join(sources)}.",
            "They come from another machine and other versions, so a difference has several causes.",
        ),
        plots=(),
        table=Table.from_rows(HEADER, rows, (2, 3), "Published figures, and what this run measured"),
    )
