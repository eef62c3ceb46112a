"""The link that a run measured before its first trial, and its steps beside what the link predicts.

A collective for which a rank sends s bytes takes latency + s / rate: the alpha-beta model (Hockney,
Parallel Computing 20 (1994) 389; for rings: Thakur et al., Int. J. High Perform. Comput. Appl. 19
(2005) 49). Both are fitted to the collectives of all kinds and sizes that ``bench.run.links``
timed, in logarithms, so that small and large ones count alike, and with a loss that outliers hardly
move. Latency is the same between nodes and within a node.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from bench.forecast.prediction import Link, TimeEstimate, predicted_communication, sent_bytes
from bench.grouping import grouped
from bench.judge.analysis import Analysis
from bench.judge.expected import settings_of
from bench.judge.formula_terms import NO_SETTINGS, Settings
from bench.judge.statistics import Array
from bench.judge.trial_columns import DASH
from bench.plan.cell import Cell, Device
from bench.report.sections import PageSection
from bench.run.links import MeasuredRates
from bench.run.manifest import Manifest
from bench.tabular import Table

HEADER = ("cell", "s/step", "compute", "communication", "overlapped", "serial", "off serial (%)")
"""Of the table in the report; times in seconds."""
OUTLIER = 0.1
"""Relative error from which on the loss grows linearly, not quadratically."""
NODE = "node"
"""The link within a node, which is the same in all runs that are fitted together."""


class TimedBytes(NamedTuple):
    """A collective: the bytes that a rank sent, and the seconds that it took."""

    sent: float
    seconds: float


def measured_link(manifest: Manifest, cell: Cell | None = None) -> Link | None:
    """The link between the ranks of a cell, by default between the most ranks on the most nodes.

    None if the run did not time it, or if no such link fits what it timed.
    """
    links = fitted_links([manifest], cell)
    if links:
        return links[0]
    return None


def fitted_links(manifests: Sequence[Manifest], cell: Cell | None = None) -> list[Link]:
    """The links of runs that differ in the rate between nodes alone, by one latency.

    They have one rate within nodes. A node's rate to others is shared by its ranks. Empty if a run
    did not time its link, if the time of a link's largest collective is mostly latency, or if the
    link between nodes comes out faster than the one within a node.
    """
    timed = []
    for manifest in manifests:
        entry = _timed_entry(manifest, cell)
        if entry is None:
            return []
        timed.append(entry)
    num_nodes = timed[0].num_nodes
    share = 1
    if num_nodes > 1:
        share = timed[0].world_size // num_nodes
    rows = _rows_to_fit(manifests, timed, share)
    if not all(rows.values()):
        return []
    latency_s, rates = _fit(rows)
    within = rates.get(NODE, math.inf)
    if max(rates.values()) > within:
        return []
    for name, collectives in rows.items():
        if max(collectives).sent < latency_s * rates[name]:
            return []
    links = []
    for number, (manifest, entry) in enumerate(zip(manifests, timed, strict=True)):
        timed_by = f"the collectives that {manifest.run_id} timed between {entry.ranks}"
        links.append(
            Link(
                bytes_per_s=rates[number] / share,
                latency_s=latency_s,
                intra_bytes_per_s=within,
                node_size=share,
                source=f"fitted to {timed_by}, by the alpha-beta model",
            )
        )
    return links


def _rows_to_fit(
    manifests: Sequence[Manifest], timed: Sequence[MeasuredRates], share: int
) -> dict[str | int, list[TimedBytes]]:
    """The collectives of each run, by its number, and those within nodes of all runs, as NODE."""
    rows: dict[str | int, list[TimedBytes]] = {}
    for number, (manifest, entry) in enumerate(zip(manifests, timed, strict=True)):
        device = manifest.cells[0].device
        rows[number] = _sent_and_seconds(entry, device)
        if share > 1:
            within_node = manifest.rates(share, 1)
            of_node = rows.setdefault(NODE, [])
            if within_node is not None:
                of_node.extend(_sent_and_seconds(within_node, device))
    return rows


def _timed_entry(manifest: Manifest, cell: Cell | None) -> MeasuredRates | None:
    """What was timed between the ranks of a cell, by default the most ranks; None if nothing."""
    if cell is not None:
        return manifest.rates(cell.world_size, cell.num_nodes)
    if manifest.matmul is None:
        return None
    timed = [entry for entry in manifest.matmul if entry.links]
    return max(timed, key=lambda entry: (entry.num_nodes, entry.world_size), default=None)


def _sent_and_seconds(entry: MeasuredRates, device: Device) -> list[TimedBytes]:
    """The collectives of an entry."""
    found = []
    for row in entry.links:
        sent = sent_bytes(row["op"], row["bytes"], entry.world_size, device)
        found.append(TimedBytes(sent, row["seconds"]))
    return found


def _fit(
    rows: Mapping[str | int, Sequence[TimedBytes]],
) -> tuple[float, dict[str | int, float]]:
    """Seconds per call of all links, and bytes per second of each; none is below 0."""
    places: list[int] = []
    every: list[TimedBytes] = []
    starts: list[float] = []
    for place, timed in enumerate(rows.values()):
        places += [place] * len(timed)
        every += timed
        starts.append(min(row.seconds / row.sent for row in timed))
    link, (sent, seconds) = np.array(places), np.array(every).T

    def errors(logs: Array) -> Array:
        found: Array = np.log((np.exp(logs[0]) + sent * np.exp(logs[1:])[link]) / seconds)
        return found

    start = np.log([seconds.min(), *starts])
    latency_s, *per_byte = np.exp(least_squares(errors, start, loss="soft_l1", f_scale=OUTLIER).x)
    rates = {name: 1 / float(value) for name, value in zip(rows, per_byte, strict=True)}
    return float(latency_s), rates


@dataclass(frozen=True, slots=True)
class PredictedStep:
    """A measured step beside its prediction, in seconds."""

    cell: Cell
    link: Link
    measured: float
    compute: float
    communication: TimeEstimate

    @property
    def step(self) -> TimeEstimate:
        return self.communication.beside(self.compute)

    @property
    def deviation(self) -> float:
        """By which share the step takes longer than a serial one."""
        return self.measured / self.step.serial - 1


Groups = list[list[PredictedStep]]
"""Steps with equal work, of which the first communicates least; compute is its step less its
communication."""


def beside(
    seconds: Mapping[Cell, float],
    link_of: Callable[[Cell], Link | None],
    settings: Mapping[str, Settings],
) -> Groups:
    """Measured steps beside their predictions; ``settings`` are by cell id.

    Those are what ``bench.judge.expected.settings_of`` returns.
    """
    alike = grouped((dataclasses.replace(cell, backend="", replicate=0), cell) for cell in seconds)
    groups = []
    for cells in alike.values():
        if (link := link_of(cells[0])) is None:
            continue
        sent: dict[Cell, TimeEstimate] = {}
        for cell in cells:
            estimate = predicted_communication(cell, link, settings.get(cell.cell_id, NO_SETTINGS))
            if estimate is not None:
                sent[cell] = estimate
        order = sorted(sent, key=lambda cell: (sent[cell].serial, seconds[cell]))
        if len(order) < 2:
            continue
        compute = max(0.0, seconds[order[0]] - sent[order[0]].serial)
        group = []
        for cell in order:
            group.append(PredictedStep(cell, link, seconds[cell], compute, sent[cell]))
        groups.append(group)
    return groups


def section(data: Analysis) -> PageSection | None:
    """Measured steps against predicted ones, as a section of the report; None without any."""
    manifest = data.run.manifest
    times = {row.cell: row.step_time_s for row in data.rows.values() if row.step_time_s is not None}
    groups = beside(
        times, lambda cell: measured_link(manifest, cell), settings_of(data.run.records)
    )
    if not groups:
        return None
    rows, sentences = [], []
    off: list[float] = []
    for group in groups:
        link = group[0].link
        latency = f"{1e6 * link.latency_s:.4g} us per call"
        sentences.append(f"The link has {link} per rank and {latency}, {link.source}.")
        for step in group:
            deviation = DASH
            if step is not group[0]:
                off.append(step.deviation)
                deviation = f"{100 * step.deviation:+z.1f}"
            row = [
                data.run.labels[step.cell.cell_id],
                f"{step.measured:.4g}",
                f"{step.compute:.4g}",
                f"{step.communication.serial:.4g}",
                f"{step.step.overlapped:.4g}",
                f"{step.step.serial:.4g}",
                deviation,
            ]
            rows.append(row)
    least, middle, most = 100 * min(off), 100 * median(off), 100 * max(off)
    sentences += [
        "Compute is the step of the cell that communicates least, of those with equal work, less "
        "its communication.",
        "Overlapped is max(compute, communication), serial is compute + communication. Both are "
        "estimates without what the host does between collectives and without waiting for slower "
        "ranks.",
        f"The other steps are off serial by {least:+z.0f} %, {middle:+z.0f} %, {most:+z.0f} % "
        "(least, median, most).",
    ]
    return PageSection(
        key="prediction",
        title="Do steps take as long as the links predict?",
        sentences=tuple(dict.fromkeys(sentences)),
        plots=(),
        table=Table.from_rows(
            HEADER, rows, range(1, len(HEADER)), "Step times, measured and predicted from the links"
        ),
    )
