"""Where the host waits for the device inside timed windows, and what it launches: nothing of ours makes it wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from bench.backends.base import registry
from bench.plan.cell import REFERENCES, Cell
from tests.cuda import tables
from tests.cuda.allowed import FRAMEWORKS, NATIVE_FRAMEWORKS, WAITS
from tests.cuda.cells import NEVER, NEVER_ALONE, counted_cell
from tests.cuda.conftest import Machine
from tests.cuda_stub.counters import WAITING

WORDS = {
    "STREAM_SYNC": "stream",
    "DEVICE_SYNC": "device",
    "EVENT_SYNC": "event",
    "BLOCKING_COPY": "copy",
    "BLOCKING_FREE": "free",
}
"""For what the host waits, as the table and the list of what is known have it."""

KINDS = {
    "kernels": "KERNEL",
    "of_libraries": "LIBRARY",
    "copies": "COPY",
    "collectives": "COLLECTIVE",
}
"""Columns of the table of waits, and what is counted for each."""
ON_AN_H100 = {
    "ddp-deferred": (18785, 246 + 892),
    "fsdp2-eager": (17692, 2660 + 892),
    "fsdp2-deferred": (17871, 2474 + 892),
    "deepspeed-zero2-eager": (21179, 1335 + 1345),
    "deepspeed-zero3-eager": (17319, 521 + 1043),
    "lightning-ddp": (18785, 250 + 892),
}
"""Kernels, and copies and memsets, that torch's profiler saw in one window (``tests.cuda.waiting``), torch 2.11."""


@dataclass
class Found:
    """What was counted of one backend in one world, per window."""

    backend: str
    world_size: int
    counts: dict[str, float] = field(default_factory=dict)
    waits: Counter[str] = field(default_factory=Counter)
    """By the place that makes the host wait."""
    ours: list[str] = field(default_factory=list)
    """Stacks of waits that no framework makes."""


def place(wait: dict[str, Any]) -> str:
    """The framework's line that makes the host wait; empty if nothing but torch stands between it and the bench."""
    for line in wait["python"]:
        if line.startswith(FRAMEWORKS):
            return str(line)
        if line.startswith(("bench/", "tests/")):
            break
    # DDP's reducer works in autograd's threads, which run no Python.
    native = next((name for name in wait["native"] if name.startswith(NATIVE_FRAMEWORKS)), "")
    return native.partition("(")[0]


def found_in(trial: dict[str, Any], cell: Cell) -> Found:
    """Means over the timed windows."""
    windows = trial["found"]["windows"]
    found = Found(cell.backend, cell.world_size)
    for kind in windows[0]["counts"]:
        found.counts[kind] = sum(window["counts"][kind] for window in windows) / len(windows)
    for window in windows:
        for wait in window["waits"]:
            if where := place(wait):
                found.waits[f"{WORDS[wait['kind']]}: {where}"] += 1
            else:
                found.ours.append(
                    "\n  ".join([wait["kind"], *wait["python"][:20], *wait["native"][:12]])
                )
    for where in found.waits:
        found.waits[where] //= len(windows)
    return found


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)])
def counted(request: pytest.FixtureRequest, shared_machine: Machine) -> list[Found]:
    """Every backend in a world of this size."""
    world_size: int = request.param
    left_out = (*REFERENCES, *NEVER, *(NEVER_ALONE if world_size == 1 else ()))
    names = [
        name
        for name, backend in registry().items()
        if name not in left_out and not backend.replicate
    ]
    cells = [counted_cell(name, world_size) for name in names]
    trials = shared_machine.trials(
        cells, ("time",), gpus=world_size, counted=True, FAKE_WEIGHTS="none"
    )
    bad = {
        cell.backend: trial["reason"]
        for cell, trial in zip(cells, trials, strict=True)
        if trial["status"] != "ok"
    }
    assert not bad
    found = [found_in(trial, cell) for cell, trial in zip(cells, trials, strict=True)]
    if request.config.getoption("--gpu-tables"):
        tables.write_waits(world_size, [row_of(trial) for trial in found])
    return found


def test_nothing_of_ours_makes_the_host_wait(counted: Sequence[Found]) -> None:
    ours = {trial.backend: trial.ours for trial in counted if trial.ours}
    assert not ours, "\n".join(
        f"{name}: {len(stacks)}, as {stacks[0]}" for name, stacks in ours.items()
    )


def test_frameworks_make_it_wait_where_it_is_known(counted: Sequence[Found]) -> None:
    for trial in counted:
        assert dict(trial.waits) == WAITS[trial.world_size].get(trial.backend, {}), trial.backend


def test_an_h100_did_what_is_counted_and_what_libraries_launch(counted: Sequence[Found]) -> None:
    """As much in each backend: products and attention are the same in all. It had one rank."""
    alone = {trial.backend: trial for trial in counted if trial.world_size == 1}
    if not alone:
        pytest.skip("these are of two ranks")
    for backend, (kernels, copies) in ON_AN_H100.items():
        trial = alone[backend]
        assert kernels - trial.counts["KERNEL"] - trial.counts["LIBRARY"] == 960, trial.backend
        assert copies - trial.counts["COPY"] in (608, 609), trial.backend


def row_of(found: Found) -> dict[str, str]:
    """A row of results/gpu-stub/waits.csv."""
    counts = {name: found.counts[kind] for name, kind in KINDS.items()}
    counts["waits"] = sum(found.counts[kind.name] for kind in WAITING)
    where = "; ".join(f"{times} x {place}" for place, times in sorted(found.waits.items()))
    return {
        "backend": found.backend,
        **{name: f"{count:g}" for name, count in counts.items()},
        "where": where,
    }
