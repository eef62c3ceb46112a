"""Runs scenarios under backends in as few process groups as possible; one that fails spoils no other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.audit.observe import AuditTask, record
from bench.audit.scenario import Scenario
from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.plan.cell import Device, Status

Observed = tuple[str, Scenario, list[dict[str, Any]]]
"""Backend, scenario, and the record of each rank (``bench.audit.observe.Audit.run``), rank 0 first."""


def run(
    launcher: Launcher,
    backends: Sequence[str],
    scenarios: Sequence[Scenario],
    *,
    device: Device,
    timeout_s: float,
) -> Iterator[Observed]:
    """Every scenario under every backend, backend by backend; ``timeout_s`` is for one scenario.

    Scenarios of equal world size share a process group. If it fails as a whole, each is run again in its own.
    """

    def world_size(scenario: Scenario) -> int:
        return scenario.world_size

    for backend in backends:
        for _, group in groupby(sorted(scenarios, key=world_size), key=world_size):
            together = list(group)
            if len(together) > 1:
                found = _observe(launcher, backend, together, device, timeout_s * len(together))
                if not isinstance(found, Outcome):
                    yield from found
                    continue
            for scenario in together:
                found = _observe(launcher, backend, [scenario], device, timeout_s)
                if isinstance(found, Outcome):
                    failure = {"status": found.status, "reason": found.reason, "traceback": found.traceback}
                    found = [(backend, scenario, [record(scenario, "lost", failure)])]
                yield from found


def _observe(
    launcher: Launcher, backend: str, scenarios: Sequence[Scenario], device: Device, timeout_s: float
) -> list[Observed] | Outcome:
    """Scenarios in one process group; the outcome if it failed."""
    with tempfile.TemporaryDirectory(prefix="accumulation-bench-") as folder:
        task = AuditTask(
            backend=backend,
            world_size=scenarios[0].world_size,
            scenarios=tuple(scenarios),
            folder=str(Path(folder) / "audit"),
            device=device,
        )
        outcome = launcher.run(task, timeout_s)
    if outcome.status is not Status.OK:
        return outcome
    return [
        (backend, scenario, [rank["audits"][index] for rank in outcome.ranks])
        for index, scenario in enumerate(scenarios)
    ]
