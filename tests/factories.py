"""Small pieces of synthetic runs that many tests share: cells, ranks' results, records, manifests, a launcher."""

from __future__ import annotations

import dataclasses
import errno
import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from bench.audit.scenario import Scenario
from bench.backends.base import Backend, registry
from bench.backends.training_job import Job
from bench.errors import InputError
from bench.judge.formulas import BUILT_IN, expect, layout_of
from bench.judge.loading import Run, run_of
from bench.judge.tables import Tables, build
from bench.launch.outcome import Outcome
from bench.plan.cell import REFERENCE, Cell, Device, Sharding, Status, Sync
from bench.plan.matrix import Matrix, parse
from bench.plan.task import EXTRA_PASSES, Spec
from bench.run.manifest import SCHEMA_VERSION, Manifest, parse_manifest
from bench.run.matmul import MatmulTask
from bench.run.trial_record import TrialRecord, parse_records

ALL_PASSES = ("time", *EXTRA_PASSES)
PEAK_BYTES = 40 * 2**20
Script = Callable[[Spec, int], Outcome | None]
"""What a scripted launcher does with the spec of its n-th call; None for a sound trial."""


def make_cell(**changes: Any) -> Cell:
    """A small cell on two ranks of the CPU, ``ddp-deferred`` unless changed; HSDP with as many replicas as usual."""
    values: dict[str, Any] = {
        "backend": "ddp-deferred",
        "accumulate": 4,
        "world_size": 2,
        "global_batch_size": 16,
        "sequence_length": 32,
        "warmup_windows": 2,
        "timed_windows": 3,
    } | changes
    if (backend := BUILT_IN.get(values["backend"])) and backend.replicate:
        values.setdefault("replicate", backend.replicate)
    return Cell(**values)


def make_time(cell: Cell, **changes: Any) -> dict[str, Any]:
    """What the time pass of a sound rank hands back."""
    return {
        "warmup_seconds": [0.75] * (cell.warmup_windows - 1),
        "step_seconds": [0.5 + 0.01 * step for step in range(cell.timed_windows)],
        "began": 100.0,
        "ended": 102.0,
        "host": None,
        "losses": [5.0 - 0.1 * window for window in range(cell.windows)],
        "num_micro_batches": cell.windows * cell.accumulate,
        "num_fetched": cell.windows * cell.accumulate,
        "num_updates": cell.windows,
        "num_inner_steps": cell.windows,
        "micro_batches_per_update": [cell.accumulate],
        "reported": {},
        "settings": {},
        "cuda_memory": None,
    } | changes


def make_collectives(cell: Cell) -> list[dict[str, Any]]:
    """The collectives that a sound backend issues; one all-reduce for backends without a formula."""
    layout = layout_of(cell)
    expected = expect(cell, layout) if layout else None
    if expected is None:
        return [
            {
                "op": "all_reduce",
                "group": "world",
                "dtype": "float32",
                "calls": 1,
                "payload_bytes": 13_644_800,
            }
        ]
    return [dataclasses.asdict(row) for row in expected.collectives]


def make_rank(
    cell: Cell, passes: Sequence[str] = ALL_PASSES, rank: int = 0, **changes: Any
) -> dict[str, Any]:
    """What a sound rank writes for its launcher."""
    result: dict[str, Any] = {
        "status": "ok",
        "num_parameters": 3_411_200,
        "entropy_floor": 1.25,
        "tokens_per_step": cell.global_batch_size * cell.sequence_length,
        "flops_per_step": 1e12,
        "device_name": "cpu",
    }
    answers: dict[str, Any] = {
        "time": make_time(cell),
        "update": {"error": 1e-7, "scale": 1.0, "residual": 1e-7} if rank == 0 else None,
        "collectives": make_collectives(cell),
        "memory": {"peak": PEAK_BYTES, "held": 2**20},
        "accumulation": {
            "dtype": "fp32",
            "significand_bits": 24,
            "sum": 1.0,
            "scale": 1.0,
            "num_updates": 1,
        },
        "dispatch": {"cpu_s": 0.5, "num_operators": 2000, "num_launches": None},
    }
    result |= {name: answers[name] for name in passes}
    return result | {"training_s": 3.0} | changes


def make_record(cell: Cell, repeat: int = 0, **changes: Any) -> dict[str, Any]:
    """The journal's record of a sound trial with all passes; ``time`` may be given as changes of the sound one."""
    time = make_time(cell) | {"ranks_agree": True} | changes.pop("time", {})
    time.setdefault("rank_step_seconds", [time["step_seconds"]])
    time.setdefault("num_warmup", len(time["warmup_seconds"]) + 1)
    facts = make_rank(cell)
    counted = changes.pop("collectives", facts["collectives"])
    passes = {
        "time": time,
        "collectives": counted and [{"group": "world", **row} for row in counted],
    }
    about = make_failure(cell, repeat, "ok", "") | {"passes": list(ALL_PASSES), "wall_s": 4.25}
    return facts | passes | about | changes


def make_failure(
    cell: Cell, repeat: int = 0, status: str = "oom", reason: str = "rank 0: too big"
) -> dict[str, Any]:
    """The journal's record of a trial that has no facts."""
    return {
        "cell_id": cell.cell_id,
        "repeat": repeat,
        "cell": cell.to_dict(),
        "status": status,
        "reason": reason,
        "passes": ["time"],
        "ended": "2025-01-01T00:00:00+00:00",
        "wall_s": 2.5,
    }


def make_gpu(**changes: Any) -> dict[str, Any]:
    """What a record's telemetry says of a GPU that only a power cap slowed down."""
    facts = {
        "uuid": "GPU-1",
        "sm_clock_mhz": 1500.0,
        "power_w": 400.0,
        "temperature_c": 60,
        "throttle": {"SwPowerCap": 0.6, "HwThermalSlowdown": 0.05},
        "slowdowns": ["HwThermalSlowdown", "SwPowerCap"],
        "energy_j": 90.0,
        "other_processes": 0,
    }
    return facts | changes


def make_document(**axes: Any) -> dict[str, Any]:
    """The smallest good TOML document of a matrix, with these axes instead of its own."""
    return {
        "device": "cpu",
        "workload": {"sequence_length": 32, "global_batch_size": 16},
        "axes": {"backend": ["ddp-eager", "ddp-deferred"], "accumulate": [1, 2], "world_size": [2]}
        | axes,
    }


def make_matrix(overrides: Mapping[str, Any] | None = None, **axes: Any) -> Matrix:
    """The matrix of ``make_document``; ``overrides`` by table.key."""
    matrix = parse(make_document(**axes), name="made", source="made.toml")
    for key, value in (overrides or {}).items():
        matrix = matrix.override(key, value, key)
    return matrix


def make_manifest(cells: Sequence[Cell] = (), **changes: Any) -> dict[str, Any]:
    """A run's manifest that knows all built-in backends."""
    described = {
        name: {
            "framework": backend.framework,
            "sync": str(backend.sync),
            "sharding": str(backend.sharding),
            "defect": backend.defect,
        }
        for name, backend in registry().items()
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "run_id": "made-run",
        "matrix": make_matrix().to_dict(),
        "cells": [cell.to_dict() for cell in cells],
        "backends": described,
        "cold": False,
        "machine": {"cpu": "made", "cores": 2, "gpus": []},
        "packages": {"torch": "2.11.0"},
    } | changes


def manifest_of(document: Mapping[str, Any]) -> Manifest:
    """The manifest in a document such as ``make_manifest`` makes."""
    return parse_manifest(document, "made")


def parsed_records(records: Iterable[Mapping[str, Any]]) -> list[TrialRecord]:
    """Records such as ``make_record`` makes, as they are read from a journal."""
    return parse_records([*records], Path("made"))


def make_tables(
    records: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any] | None = None
) -> Tables:
    """The tables of records, not yet judged."""
    return build(
        parsed_records(records), manifest_of(make_manifest() if manifest is None else manifest)
    )


def judged_run(records: Iterable[Mapping[str, Any]], manifest: Mapping[str, Any]) -> Run:
    """The run of records, judged."""
    return run_of(parsed_records(records), manifest_of(manifest))


def make_backend(backend_name: str, reason: str = "") -> type[Backend]:
    """A backend that only has a name and, with a reason, cannot run here."""

    class Made(Backend):
        name, framework = backend_name, "made"
        sync, sharding = Sync.EAGER, Sharding.NONE

        def train(self, job: Job) -> None:
            raise AssertionError("a test never trains it")

        def full_parameters(self) -> dict[str, Any]:
            raise AssertionError("a test never trains it")

        @classmethod
        def missing(cls, device: Device) -> str:
            return reason

    return Made


def failed(status: Status = Status.CRASHED, reason: str = "rank 1: ValueError: no") -> Outcome:
    """How a trial ends that hands back nothing."""
    return Outcome(
        status=status,
        reason=reason,
        ranks=[],
        wall_s=1.5,
        traceback="Traceback: line of the cause\n",
    )


class GoneReader(io.StringIO):
    """Standard output whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)


class FakeLauncher:
    """Takes a launcher's place: answers at once, as a sound trial would unless ``script`` says otherwise.

    As the real one's ranks do, it leaves logs, and the reference's update pass leaves the reference's file.
    """

    def __init__(self, script: Script | None = None) -> None:
        self.specs: list[Spec] = []
        self.timeouts: list[float] = []
        self.closed = 0
        self._script = script or (lambda spec, number: None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def prepare(self, backends: Iterable[str]) -> None:
        self.prepared = set(backends)

    def run(self, spec: Spec | MatmulTask, timeout_s: float, inactivity_s: float = 0.0) -> Outcome:
        if isinstance(spec, MatmulTask):
            rates = {str(precision): 5e11 for precision in spec.precisions}
            ranks = [{"status": "ok", "flops_per_s": rates} for _ in range(spec.world_size)]
            return Outcome(status=Status.OK, reason="", ranks=ranks, wall_s=1.0)
        number = len(self.specs)
        self.specs.append(spec)
        self.timeouts.append(timeout_s)
        logs = Path(spec.folder) / "attempt_0" / "0"
        logs.mkdir(parents=True)
        (logs / "stderr.log").write_text(f"the log of call {number}")
        outcome = self._script(spec, number)
        if outcome is not None:
            return outcome
        if spec.cell.backend == REFERENCE and "update" in spec.passes:
            Path(spec.reference).write_bytes(b"the reference's update")
        if (
            spec.cell.backend != REFERENCE
            and "update" in spec.passes
            and not Path(spec.reference).exists()
        ):
            raise InputError("an update pass without a reference to compare with")
        ranks = [make_rank(spec.cell, spec.passes, rank) for rank in range(spec.cell.world_size)]
        return Outcome(status=Status.OK, reason="", ranks=ranks, wall_s=4.25)

    def close(self) -> None:
        self.closed += 1


def make_observation(
    backend_name: str = "ddp-eager",
    updates: Sequence[Mapping[int, Mapping[int, float]]] = ({0: dict.fromkeys(range(8), 0.125)},),
    findings: Sequence[tuple[str, str]] = (),
    *,
    scenario: Mapping[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """What a backend did, as ``bench.audit.diagnosis.observation`` tells it: coefficients by epoch and sample.

    All samples have the same number of tokens, and each is used once in an update. Findings are words and levels, the
    gravest first.
    """
    values = {
        "name": "made",
        "title": "made by hand",
        "samples": 8,
        "batch_size": 1,
        "accumulate": (4,),
    }
    made = Scenario.from_dict({**values, **(scenario or {})})
    told = []
    for update in updates:
        flat = [coefficient for of in update.values() for coefficient in of.values()]
        samples: dict[str, float] = {}
        for of in update.values():
            for sample, coefficient in of.items():
                samples[str(sample)] = samples.get(str(sample), 0.0) + coefficient
        shares = [coefficient / sum(flat) * len(flat) for coefficient in flat]
        told.append(
            {
                "samples": samples,
                "sum": sum(flat),
                "right_sum": 1.0,
                "epochs": list(update),
                "micro_batches": len(flat) // (made.batch_size * made.world_size),
                "by_epoch": {
                    str(e): {str(s): c for s, c in of.items()} for e, of in update.items()
                },
                "relative": {
                    str(e): {str(s): c * len(flat) for s, c in of.items()}
                    for e, of in update.items()
                },
                "distortion": max(max(share, 1 / share) for share in shares),
            }
        )
    ratios = [update["sum"] for update in told]
    grave = [(word, level) for word, level in findings if level != "detail"]
    verdict, level = grave[0] if grave else ("right", "detail")
    lost, left_open = changes.get("lost", {}), changes.get("left_open", {})
    return {
        "backend": backend_name,
        "scenario": made.to_dict(),
        "updates": told,
        "optimizer_steps_observed": len(told),
        "optimizer_steps_without_effect": 0,
        "steps_reported": {},
        "samples_lost": sum(map(len, lost.values())),
        "samples_left_open": sum(map(len, left_open.values())),
        "samples_duplicated": 0,
        "samples_never_fetched": 0,
        "lost": {},
        "left_open": {},
        "weight_ratio": sum(ratios) / len(ratios) if ratios else None,
        "micro_batches": sum(update["micro_batches"] for update in told),
        "stopped": "ended",
        "failure": None,
        "verdict": verdict,
        "level": level,
        "findings": [
            {"word": word, "level": level, "text": f"{word} here"} for word, level in findings
        ],
        "diagnosis": "; ".join(f"{word} here" for word, _ in findings) or "every update is right",
    } | changes
