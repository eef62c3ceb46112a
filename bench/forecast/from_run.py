"""The link that a run measured before its first trial, and its step times beside those that follow from that link.

A collective for which a rank sends s bytes takes latency + s / rate: the alpha-beta model (Hockney, Parallel Computing
20 (1994) 389; for rings: Thakur et al., Int. J. High Perform. Comput. Appl. 19 (2005) 49). Latency and rate are fitted
to the collectives of all kinds and sizes that ``bench.run.links`` timed: the least squares of relative errors, neither
of the two below 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from scipy.optimize import nnls

from bench.forecast.prediction import Bounds, Link, Prediction, communication, sent_bytes
from bench.formatting import plural
from bench.judge.formulas import BUILT_IN, expect, layout_of
from bench.plan.cell import Cell, Device
from bench.plan.column import DASH
from bench.report.report_data import ReportData
from bench.report.sections import PageSection
from bench.report.tabular import Table
from bench.run.links import between, ranks_of

HEADER = ("cell", "s/step", "compute", "communication", "lower bound", "upper bound", "off the upper bound (%)")
"""Of the table in the report; times in seconds."""


def measured_link(manifest: Mapping[str, Any], cell: Cell | None = None) -> Link | None:
    """The link between the ranks of a cell, by default between the most ranks on the most nodes; None if not measured.

    A node's rate to others is shared by its ranks.
    """
    if cell is None:
        timed = (one for one in manifest.get("matmul") or () if one.get("links"))
        entry = max(timed, key=lambda one: (one.get("num_nodes", 1), one["world_size"]), default=None)
    else:
        entry = between(manifest, cell.world_size, cell.num_nodes)
    if entry is None or not entry.get("links"):
        return None
    device = Cell.from_dict(manifest["cells"][0]).device
    num_nodes = entry.get("num_nodes", 1)
    share = entry["world_size"] // num_nodes if num_nodes > 1 else 1
    outer = _fit(entry, device)
    inner = _fit(between(manifest, share, 1) or {}, device) if share > 1 else (math.inf, 0.0)
    if outer is None or inner is None:
        return None
    (rate, latency_s), (intra, _) = outer, inner
    source = (
        f"fitted to the collectives that {manifest['run_id']} timed between {ranks_of(entry)}, by the alpha-beta model"
    )
    return Link(bytes_per_s=rate / share, latency_s=latency_s, intra_bytes_per_s=intra, node_size=share, source=source)


def _fit(entry: Mapping[str, Any], device: Device) -> tuple[float, float] | None:
    """Bytes per second that a rank sends, and seconds per call, from an entry of run.json's ``matmul``."""
    rows = entry.get("links", ())
    seconds = np.array([row["seconds"] for row in rows])
    sent = np.array([sent_bytes(row["op"], row["bytes"], entry["world_size"], device) for row in rows])
    latency_s, per_byte = (
        nnls(np.column_stack([1 / seconds, sent / seconds]), np.ones(len(rows)))[0] if rows else (0, 0)
    )
    return (1 / float(per_byte), float(latency_s)) if per_byte else None


def predicted_communication(cell: Cell, link: Link) -> Bounds | None:
    """Bounds of the seconds that a cell communicates per step; None if it does not, or has no formula."""
    backend, layout = BUILT_IN.get(cell.backend), layout_of(cell)
    if cell.is_reference or backend is None or layout is None or expect(cell, layout) is None:
        return None
    traffic = Prediction(cell, backend, layout).traffic
    return communication(traffic, link) if traffic else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """A measured step beside its prediction, in seconds."""

    cell: Cell
    measured: float
    compute: float
    communication: Bounds

    @property
    def bounds(self) -> Bounds:
        """If all that can be hidden is hidden, and if nothing is."""
        return Bounds(max(self.compute, self.communication.lower), self.compute + self.communication.upper)

    @property
    def deviation(self) -> float:
        """By which share the step takes longer than if nothing were hidden."""
        return self.measured / self.bounds.upper - 1

    @property
    def is_bound(self) -> bool:
        """Whether communication should take longer than compute."""
        return self.communication.upper > self.compute


def beside(seconds: Mapping[Cell, float], manifest: Mapping[str, Any]) -> list[list[Predicted]]:
    """The steps of a run beside their predictions: groups with equal work, of which the first communicates least.

    Compute, which takes the same time on every backend, is the step of the first less its communication.
    """
    groups: dict[Cell, list[Predicted]] = {}
    for cell, measured in seconds.items():
        link = measured_link(manifest, cell)
        sent = predicted_communication(cell, link) if link else None
        if sent is not None:
            one = Predicted(cell=cell, measured=measured, compute=0.0, communication=sent)
            groups.setdefault(dataclasses.replace(cell, backend="", replicate=0), []).append(one)
    found_groups = []
    for group in groups.values():
        group.sort(key=lambda one: (one.communication.upper, one.measured))
        compute = max(0.0, group[0].measured - group[0].communication.upper)
        found_groups.append([dataclasses.replace(one, compute=compute) for one in group])
    return [group for group in found_groups if len(group) > 1]


def section(data: ReportData) -> PageSection | None:
    """Measured steps against predicted ones, as a section of the report; None if nothing is predicted."""
    labels = {data.run.cells[cell_id]: data.run.labels[cell_id] for cell_id in data.cells.index}
    times = {data.run.cells[row["cell_id"]]: row["step_time_s"] for row in data.rows.values()}
    groups = beside({cell: seconds for cell, seconds in times.items() if seconds is not None}, data.run.manifest)
    if not groups:
        return None
    rows, sentences = [], []
    for group in groups:
        link = measured_link(data.run.manifest, group[0].cell)
        assert link is not None, "without a link there is no group"
        latency = f"{1e6 * link.latency_s:.4g} us"
        sentences.append(f"The link has {link} per rank and {latency} per call, {link.source}.")
        for one in group:
            numbers = (one.measured, one.compute, one.communication.upper, one.bounds.lower, one.bounds.upper)
            off = DASH if one is group[0] else f"{100 * one.deviation:+z.1f}"
            rows.append((labels[one.cell], *(f"{number:.4g}" for number in numbers), off))
    sentences.append(
        "Compute is the step of the cell that communicates least, of those with equal work, less its communication."
    )
    if bound := sorted(one.deviation for group in groups for one in group[1:] if one.is_bound):
        low, middle, high = (f"{100 * share:+z.0f} %" for share in (bound[0], median(bound), bound[-1]))
        sentences.append(
            f"Communication should take longer than compute in {plural(len(bound), 'cell')}: their steps are off the "
            f"upper bound, compute + communication, by {low} to {high}, in the median by {middle}."
        )
    return PageSection(
        key="prediction",
        title="Do steps take as long as the links predict?",
        sentences=tuple(dict.fromkeys(sentences)),
        plots=(),
        table=Table.of("Step times, measured and predicted from the links", HEADER, rows),
    )
