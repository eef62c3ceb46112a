"""Scenarios x backends: every audit in as few process groups as that takes, none lost when one of them fails."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.audit.observe import AuditTask
from bench.audit.scenario import Scenario
from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.plan.cell import Device, Status

Observed = tuple[str, Scenario, list[dict[str, Any]]]
"""Backend, scenario, and what each rank saw (``bench.audit.observe.Audit.run``), rank 0 first."""


def run(
    launcher: Launcher,
    backends: Sequence[str],
    scenarios: Sequence[Scenario],
    *,
    device: Device,
    timeout_s: float,
    shared: bool = True,
) -> Iterator[Observed]:
    """Every scenario under every backend, backend by backend.

    With ``shared`` the scenarios of equal world size share a process group; if that group fails as a whole, each gets
    one of its own, so that only the culprit fails. ``timeout_s`` is for one scenario.
    """
    for backend in backends:
        for _, group in groupby(sorted(scenarios, key=_world_size), key=_world_size):
            together = list(group)
            if shared and len(together) > 1:
                found = _observe(launcher, backend, together, device, timeout_s * len(together))
                if not isinstance(found, Outcome):
                    yield from found
                    continue
            for scenario in together:
                found = _observe(launcher, backend, [scenario], device, timeout_s)
                if isinstance(found, Outcome):
                    found = [(backend, scenario, [_lost(scenario, found)])]
                yield from found


def _world_size(scenario: Scenario) -> int:
    return scenario.world_size


def _observe(
    launcher: Launcher, backend: str, scenarios: Sequence[Scenario], device: Device, timeout_s: float
) -> list[Observed] | Outcome:
    """Scenarios in one process group; how it ended if that is not well."""
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
        (backend, scenario, [of_rank["audits"][index] for of_rank in outcome.ranks])
        for index, scenario in enumerate(scenarios)
    ]


def _lost(scenario: Scenario, outcome: Outcome) -> dict[str, Any]:
    """What is known of a scenario whose process group ended without a word about it."""
    failure = {"status": outcome.status, "reason": outcome.reason, "traceback": outcome.traceback}
    return {
        "scenario": scenario.name,
        "stopped": "lost",
        "failure": failure,
        "own_slots": scenario.slots_per_rank,
        "fetches": [],
        "losses": [],
        "faults": [],
        "events": "",
        "changes": [],
        "digests": [],
        "reported": {},
    }
