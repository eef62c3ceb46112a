"""The committed measurements that claims are held against."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd

from bench.audit.conformance import ratios
from bench.audit.semantics_files import load as load_suite
from bench.forecast.footprint import Footprint
from bench.forecast.prediction import Prediction
from bench.judge.formulas import BUILT_IN, Expectation, expect, layout_of
from bench.judge.loading import Run
from bench.judge.loading import load as load_run
from bench.plan.cell import Cell, Device, Precision
from studies import ROOT
from studies.versions.grid import RECORDS
from studies.versions.layers import Record, read_records

PROBES = ROOT / "docs" / "claims.json"
MIB, GIB = 2**20, 2**30
LARGE_WORLD = 8
"""Ranks of the large world in which verdicts on memory and bytes must hold too."""
TRUE, FALSE, NOT_MEASURED = "true", "false", "not measured"
ONLY, EXCEPT = "true only", "true, except"
"""Followed by the condition that claims.toml names; the other cases were measured, too."""
HERE = "true over gloo, not measured elsewhere"
GLOBAL_STEP, STRATEGY, HOOK = (
    "trainer.global_step",
    "strategy.optimizer_step",
    "on_before_optimizer_step",
)
DIVIDED_TWICE, PLAIN, FIXED = (
    "lightning-deepspeed-zero2",
    "lightning-ddp",
    "lightning-deepspeed-zero2-corrected",
)
Judged = tuple[str, Mapping[str, Any]]
"""A verdict, and the numbers of the sentence."""


def true(condition: bool) -> str:
    return TRUE if condition else FALSE


def only(condition: bool, otherwise: str = FALSE) -> str:
    """True under the condition that claims.toml names, if that is what was measured."""
    return ONLY if condition else otherwise


def large(
    backend: str, n: int, precision: Precision = Precision.FP32, micro_batch_size: int = 1
) -> Cell:
    """A cell of the 8b model on 8 GPUs, of which closed forms are asked: nothing here trains it."""
    return Cell(
        backend=backend,
        accumulate=n,
        world_size=LARGE_WORLD,
        global_batch_size=LARGE_WORLD * n * micro_batch_size,
        sequence_length=2048,
        model="8b",
        precision=precision,
        device=Device.CUDA,
        replicate=2 if backend.startswith("hsdp") else 0,
    )


def small(backend: str, n: int, precision: Precision = Precision.FP32) -> Cell:
    """The same of the tiny model on 2 ranks of a CPU, 4 under HSDP, as the committed runs have it."""
    replicas = 2 if backend.startswith("hsdp") else 0
    ranks = 2 * max(1, replicas)
    return Cell(
        backend=backend,
        accumulate=n,
        world_size=ranks,
        global_batch_size=ranks * n,
        sequence_length=64,
        precision=precision,
        replicate=replicas,
    )


def due(cell: Cell) -> Expectation:
    """What the formulas say that a cell of a shipped model sends and holds."""
    layout = layout_of(cell)
    assert layout is not None
    found = expect(cell, layout)
    assert found is not None
    return found


def due_payload(cell: Cell, *ops: str) -> int:
    """Payload bytes of these collectives of one window, or of all, by the formulas."""
    rows = due(cell).collectives
    return sum(row.payload_bytes for row in rows if not ops or row.op in ops)


def due_footprint(cell: Cell) -> Footprint:
    """The predicted memory of a rank at its peak."""
    layout = layout_of(cell)
    assert layout is not None
    return Prediction(cell, BUILT_IN[cell.backend], layout).memory


def due_peak(cell: Cell) -> float:
    """The predicted peak of a rank in GiB."""
    return due_footprint(cell).peak / GIB


class Measured:
    """The committed measurements that claims are held against."""

    def __init__(
        self,
        about: Mapping[str, Any],
        suite: Sequence[Any],
        rates: pd.DataFrame,
        versions: Sequence[Any],
        probes: Any,
        zero3: Any,
        weights: Sequence[Record],
    ) -> None:
        self.about, self.suite, self.rates, self.versions, self.probes = (
            about,
            suite,
            rates,
            versions,
            probes,
        )
        self.zero3, self.by_version = zero3, weights
        self.seen = {(seen["scenario"]["name"], seen["backend"]): seen for seen in suite}

    @classmethod
    def load(cls) -> Measured:
        """From results/ and docs/."""
        return cls(
            *load_suite(ROOT / "results/semantics/observations.json"),
            pd.read_parquet(ROOT / "results/throughput/throughput.parquet"),
            json.loads((ROOT / "docs/versions.json").read_text())["versions"],
            json.loads(PROBES.read_text()),
            json.loads((ROOT / "docs/zero3.json").read_text()),
            read_records(RECORDS),
        )

    def backends_of(self, scenario: str, prefix: str = "") -> list[str]:
        """The backends whose names begin so and whose updates in the scenario were seen."""
        return [
            name
            for (where, name), seen in self.seen.items()
            if where == scenario and name.startswith(prefix) and seen["updates"]
        ]

    def updates(self, scenario: str, backend: str) -> int:
        return int(self.seen[scenario, backend]["optimizer_steps_observed"])

    def without_step(self, scenario: str, due: int) -> list[str]:
        """The backends that made fewer updates than are due."""
        return [name for name in self.backends_of(scenario) if self.updates(scenario, name) < due]

    def mixed(self, scenario: str, backend: str) -> int:
        """Updates with samples of several epochs."""
        return sum(len(update["epochs"]) > 1 for update in self.seen[scenario, backend]["updates"])

    def reported(self, scenario: str, backend: str, counter: str) -> int:
        return int(self.seen[scenario, backend]["steps_reported"][counter])

    def weights(self, scenario: str, backend: str) -> list[float]:
        """The sum of the coefficients of each update divided by the right sum."""
        return [round(found, 4) for found in ratios(self.seen[scenario, backend])]

    def distortion(self, scenario: str, backend: str) -> float:
        """The largest factor by which a sample weighs more or less than others of its update."""
        return max(
            float(update["distortion"]) for update in self.seen[scenario, backend]["updates"]
        )

    def right(self, rows: pd.DataFrame) -> tuple[int, int, str]:
        """How many settings of ThroughputMonitor are right, of how many, and both in words."""
        right = int((rows["verdict"] == "right").sum())
        return right, len(rows), f"{right} of {len(rows)}"

    def version(self, package: str, finding: str) -> dict[str, str]:
        """What was found of each version of a package."""
        entries = [entry for entry in self.versions if entry["package"] == package]
        return {
            entry["version"]: next(
                fact["measured"] for fact in entry["findings"] if fact["finding"] == finding
            )
            for entry in entries
        }


@cache
def run_of(name: str) -> Run:
    return load_run(ROOT / "results" / name)


def once(table: str, backend: str, n: int, run: str = "cpu") -> pd.DataFrame:
    """The rows of a cell's first trial that has any: some things are measured once only."""
    found = run_of(run)
    chosen = [
        cell_id
        for cell_id, cell in found.cells.items()
        if (cell.backend, cell.accumulate, cell.twin) == (backend, n, "")
        and cell.optimizer != "sgd"
    ]
    rows = getattr(found.tables, table)
    rows = rows[rows["cell_id"].isin(chosen)]
    return rows[rows["repeat"] == rows["repeat"].min()]


def payload(backend: str, n: int, *ops: str, run: str = "cpu") -> int:
    """Bytes of these collectives of one window on one rank."""
    rows = once("collectives", backend, n, run)
    return int(rows[rows["op"].isin(ops)]["payload_bytes"].sum())


def memory(backend: str, n: int, *categories: str, run: str = "cpu") -> int:
    rows = once("memory", backend, n, run)
    return int(rows[rows["category"].isin(categories)]["bytes"].sum())


def peak(backend: str, n: int, run: str = "cpu") -> float:
    """MiB."""
    return float(once("trials", backend, n, run)["peak_memory_bytes"].max()) / MIB
