"""The link that a run measured before its first trial, and its steps beside those that follow from that link.

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
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from bench.forecast.prediction import Link, TimeEstimate, predicted_communication, sent_bytes
from bench.grouping import grouped
from bench.judge.analysis import Analysis
from bench.judge.expected import settings_of
from bench.judge.formula_terms import NO_SETTINGS, Settings
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


def measured_link(manifest: Manifest, cell: Cell | None = None) -> Link | None:
    """The link between the ranks of a cell, by default between the most ranks on the most nodes.

    None if the run did not time it, or if no such link fits what it timed.
    """
    links = fitted_links([manifest], cell)
    if links:
        return links[0]
    return None


def fitted_links(manifests: Sequence[Manifest], cell: Cell | None = None) -> list[Link]:
    """The links of runs that differ in the rate between nodes alone, by one latency and one rate within nodes.

    A node's rate to others is shared by its ranks. Empty if a run did not time its link, if the
    time of a link's largest collective is mostly latency, or if the link between nodes comes out
    faster than the one within a node.
    """
    entries = [_timed_entry(manifest, cell) for manifest in manifests]
    timed = [entry for entry in entries if entry is not None]
    if len(timed) < len(entries):
        return []
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
    for name, sent in rows.items():
        most_sent, _ = max(sent)
        if most_sent < latency_s * rates[name]:
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
) -> dict[str | int, list[tuple[float, float]]]:
    """Bytes and seconds of the collectives of each run, by its number, and within nodes of all runs, as NODE."""
    rows: dict[str | int, list[tuple[float, float]]] = {}
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
    """What run.json's ``matmul`` has on the ranks of a cell, by default on the most ranks; None if nothing."""
    if cell is not None:
        return manifest.rates(cell.world_size, cell.num_nodes)
    timed = [entry for entry in manifest.matmul or () if entry.links]
    return max(timed, key=lambda entry: (entry.num_nodes, entry.world_size), default=None)


def _sent_and_seconds(entry: MeasuredRates, device: Device) -> list[tuple[float, float]]:
    """Bytes that a rank sends, and seconds, of each collective of an entry."""
    return [
        (sent_bytes(row["op"], row["bytes"], entry.world_size, device), row["seconds"])
        for row in entry.links
    ]


def _fit(
    rows: Mapping[str | int, Sequence[tuple[float, float]]],
) -> tuple[float, dict[str | int, float]]:
    """Seconds per call of all links, and bytes per second of each, from bytes sent and seconds; none is below 0."""
    number = np.repeat(range(len(rows)), [len(timed) for timed in rows.values()])
    sent, seconds = np.concatenate([np.array(timed) for timed in rows.values()]).T

    def errors(logs: Any) -> Any:
        return np.log((np.exp(logs[0]) + sent * np.exp(logs[1:])[number]) / seconds)

    start = np.log([seconds.min(), *(min(s / b for b, s in timed) for timed in rows.values())])
    latency_s, *per_byte = np.exp(least_squares(errors, start, loss="soft_l1", f_scale=OUTLIER).x)
    return float(latency_s), {
        name: 1 / float(value) for name, value in zip(rows, per_byte, strict=True)
    }


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
    """Measured steps beside their predictions; ``settings`` by cell id (``bench.judge.expected.settings_of``)."""
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
        if len(order) > 1:
            compute = max(0.0, seconds[order[0]] - sent[order[0]].serial)
            groups.append(
                [PredictedStep(cell, link, seconds[cell], compute, sent[cell]) for cell in order]
            )
    return groups


def section(data: Analysis) -> PageSection | None:
    """Measured steps against predicted ones, as a section of the report; None if nothing is predicted."""
    manifest = data.run.manifest
    times = {row.cell: row.step_time_s for row in data.rows.values() if row.step_time_s is not None}
    groups = beside(
        times, lambda cell: measured_link(manifest, cell), settings_of(data.run.records)
    )
    if not groups:
        return None
    rows, sentences = [], []
    for group in groups:
        link = group[0].link
        sentences.append(
            f"The link has {link} per rank and {1e6 * link.latency_s:.4g} us per call, {link.source}."
        )
        for step in group:
            times_s = (
                step.measured,
                step.compute,
                step.communication.serial,
                step.step.overlapped,
                step.step.serial,
            )
            deviation = f"{100 * step.deviation:+z.1f}"
            if step is group[0]:
                deviation = DASH
            rows.append(
                (
                    data.run.labels[step.cell.cell_id],
                    *(f"{seconds:.4g}" for seconds in times_s),
                    deviation,
                )
            )
    off: list[float] = []
    for group in groups:
        off += [step.deviation for step in group[1:]]
    least, middle, most = 100 * min(off), 100 * median(off), 100 * max(off)
    sentences += [
        "Compute is the step of the cell that communicates least, of those with equal work, less its communication.",
        "Overlapped is max(compute, communication), serial is compute + communication. Both are estimates without what "
        "the host does between collectives and without waiting for slower ranks.",
        f"The other steps are off serial by {least:+z.0f} %, {middle:+z.0f} %, {most:+z.0f} % (least, median, most).",
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
