"""The committed measurements that claims are held against."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pandas as pd

from bench.audit.conformance import ratios
from bench.audit.semantics_files import load as load_suite
from bench.judge.loading import Run
from bench.judge.loading import load as load_run
from studies import ROOT
from studies.versions.grid import RECORDS
from studies.versions.layers import Record, read_records

PROBES = ROOT / "docs" / "claims.json"
MIB = 2**20
TRUE, FALSE, ONLY, OUTSIDE = "true", "false", "true only", "not measured here"
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

    def updates(self, scenario: str, backend: str) -> int:
        return int(self.seen[scenario, backend]["optimizer_steps_observed"])

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
