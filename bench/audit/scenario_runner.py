"""Runs scenarios under backends in as few process groups as possible.

One that fails spoils no other.

The scenarios of a backend follow each other in one process group, each on a fresh build. A test
compares the results with those in process groups of their own.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from bench.audit.decoded_scenario import FailureRecord, RankRecord
from bench.audit.hugging_face_job import AuditedHuggingFace
from bench.audit.job import AuditedAccelerator, AuditedEngine, AuditedStream, AuditedTrainer
from bench.audit.recorder import Audit, lost_record
from bench.audit.scenario import Scenario
from bench.backends.accelerate import AccelerateBackend
from bench.backends.base import Backend, only
from bench.backends.deepspeed import DeepSpeedZero2Eager
from bench.backends.hugging_face import HuggingFaceTrainer
from bench.backends.lightning import LightningBackend
from bench.backends.torchtitan import TorchtitanEager
from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.plan.cell import Device, Status
from bench.plan.task import Task

if TYPE_CHECKING:
    import torch

PEERS_S = 3.0
"""How long a rank that failed waits for the others to fail too, or to finish."""
Observed = tuple[str, Scenario, list[RankRecord]]
"""Backend, scenario, and the record of each rank, rank 0 first."""


@dataclass(kw_only=True)
class AuditTask(Task):
    """Scenarios for one backend, all with one world size."""

    work: ClassVar[str] = "bench.audit.scenario_runner:work"

    scenarios: tuple[Scenario, ...]


VARIANTS: Mapping[type, type] = {
    AccelerateBackend: AuditedAccelerator,
    DeepSpeedZero2Eager: AuditedEngine,
    HuggingFaceTrainer: AuditedHuggingFace,
    LightningBackend: AuditedTrainer,
    TorchtitanEager: AuditedStream,
}
"""How scenarios run a backend and all that are made from it: what passes them to the framework.
Others need nothing."""


def audited(backend: type[Backend]) -> type[Backend]:
    """The backend as scenarios run it."""
    for base in backend.__mro__:
        if base in VARIANTS:
            return type(backend.__name__, (VARIANTS[base], backend), {})
    return backend


def work(task: AuditTask, rank: int, device: torch.device) -> dict[str, object]:
    """One rank's part; see ``bench.plan.task.Task``."""
    backend = audited(only(task.backend, task.plugin))
    audits = []
    for index, scenario in enumerate(task.scenarios):
        found = _audit(task, scenario, str(index), backend, rank, device)
        if scenario.clip_norm:
            unclipped = dataclasses.replace(scenario, clip_norm=0.0)
            found["unclipped"] = _audit(
                task, unclipped, f"{index}-unclipped", backend, rank, device
            )
        audits.append(found)
    return {"status": Status.OK, "audits": audits}


def _audit(
    task: AuditTask,
    scenario: Scenario,
    name: str,
    backend: type[Backend],
    number: int,
    device: torch.device,
) -> RankRecord:
    """One scenario on this rank; see ``Audit.run``. All ranks share a folder for checkpoints.

    Raises the error of a scenario that failed on this rank only, since the other ranks wait for it
    in a collective.
    """
    import torch.distributed as dist

    gc.collect()  # frees the previous scenario, whose frameworks leave reference cycles
    # What is left is the frameworks' own; DeepSpeed collects while it builds, and would walk it
    # each time.
    gc.freeze()
    checkpoints = Path(task.folder) / f"checkpoints-{name}"
    if number == 0:
        checkpoints.mkdir()
    dist.barrier()
    audit = Audit(scenario, backend, number, device, checkpoints)
    found = audit.run()
    (Path(task.folder) / f"done-{name}-{number}").touch()
    if audit.error is not None and not _all_done(task, name):
        raise audit.error
    dist.barrier()
    return found


def _all_done(task: AuditTask, name: str) -> bool:
    """Whether all ranks finish a scenario or fail in it within ``PEERS_S``."""
    done = [Path(task.folder) / f"done-{name}-{rank}" for rank in range(task.world_size)]
    deadline = time.monotonic() + PEERS_S
    while time.monotonic() < deadline:
        if all(map(Path.exists, done)):
            return True
        time.sleep(0.02)
    return False


def run(
    launcher: Launcher,
    backends: Sequence[str],
    scenarios: Sequence[Scenario],
    *,
    device: Device,
    timeout_s: float,
) -> Iterator[Observed]:
    """Every scenario under every backend, backend by backend; ``timeout_s`` is for one scenario.

    Scenarios of equal world size share a process group. If it fails as a whole, each is run again
    in its own.
    """
    world_size = attrgetter("world_size")
    launcher.prepare(backends)
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
                    found = [_lost(backend, scenario, found)]
                yield from found


def _lost(backend: str, scenario: Scenario, outcome: Outcome) -> Observed:
    """What is left of a scenario whose process group failed."""
    failure: FailureRecord = {
        "status": outcome.status,
        "reason": outcome.reason,
        "traceback": outcome.traceback,
    }
    return backend, scenario, [lost_record(scenario, failure)]


def _observe(
    launcher: Launcher,
    backend: str,
    scenarios: Sequence[Scenario],
    device: Device,
    timeout_s: float,
) -> list[Observed] | Outcome:
    """Scenarios in one process group; the outcome if it failed."""
    task = AuditTask(
        backend=backend,
        world_size=scenarios[0].world_size,
        scenarios=tuple(scenarios),
        device=device,
    )
    outcome = launcher.run(task, timeout_s).limited_by("--timeout")
    if outcome.status is not Status.OK:
        return outcome
    found: list[Observed] = []
    for index, scenario in enumerate(scenarios):
        records = [rank["audits"][index] for rank in outcome.ranks]
        found.append((backend, scenario, records))
    return found
