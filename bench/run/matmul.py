"""The rates of matrix products and of collectives, measured once before a run's first trial.

They are stored in run.json, and measured in a process group of its own, on as many ranks at once as
the cells have, each with a cell's threads. It is a second reference for MFU: a datasheet's peak
assumes clocks that a GPU under load does not keep, and CPUs have none.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from typing_extensions import TypedDict

from bench import validation
from bench.errors import InputError
from bench.launch.launcher import Launcher
from bench.launch.outcome import Outcome
from bench.plan.cell import REFERENCE, Cell, Device, Precision, Status
from bench.plan.task import Task
from bench.run import links, machine
from bench.run.journal import write_manifest
from bench.run.links import MeasuredRates, TimedCollective
from bench.run.manifest import Manifest
from bench.validation import Rate

if TYPE_CHECKING:
    import torch

    from bench.run.runner import Observer

TIMEOUT_S = 120.0
"""Time limit of one process group, including start and warm-up."""
SIZE = {"cuda": 8192, "cpu": 1024}
"""Rows and columns of both matrices, by device type: large enough that a product keeps the whole
device busy."""
WARM_S = {"cuda": 0.5, "cpu": 0.1}
"""Duration of the warm-up, in which clocks settle and libraries choose their kernels."""
PRODUCTS = {"cuda": 25, "cpu": 5}
"""Number of products that are timed one by one; the rate is that of the median."""

STARTING = (
    "the processes that ranks start from import torch; then matrix products and the link are timed"
)
"""What a run waits for first."""


@dataclass(kw_only=True)
class MatmulTask(Task):
    """Times matrix products in each precision, on all ranks at once, and collectives."""

    work: ClassVar[str] = "bench.run.matmul:work"

    precisions: tuple[Precision, ...]
    backend: str = REFERENCE
    """Selects the fork server: the reference needs no packages besides torch."""


class RankRates(TypedDict):
    """What a rank measured."""

    flops_per_s: dict[str, Rate]
    """By precision."""
    capacity: dict[str, Rate]
    """The same, had nobody else taken the CPUs."""
    links: list[TimedCollective]


def work(task: MatmulTask, rank: int, device: torch.device) -> dict[str, Any]:
    """The work of one rank (``bench.plan.task.Task``): measure its rates while all others do so."""
    import torch
    import torch.distributed as dist

    dtypes = {Precision.FP32: torch.float32, Precision.BF16: torch.bfloat16}
    rates, capacity = {}, {}
    for precision in task.precisions:
        dist.barrier()
        name = str(precision)
        rates[name], capacity[name] = matmul_rate(device, dtypes[precision])
    seconds = []
    if task.world_size > 1:
        seconds = links.measure(task.world_size, device)
    return {"status": Status.OK, "flops_per_s": rates, "capacity": capacity, "links": seconds}


def matmul_rate(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """FLOP/s of this process on the device, with its threads; 2 n^3 per product of n x n matrices.

    The second number is what it would have been, had nobody else taken the CPUs: per second of CPU
    time of a thread.

    The elements are normally distributed: zeros would draw less power on a GPU and run faster.
    """
    import torch

    from bench.measure.taps import clock_for

    kind = device.type
    rows, clock = SIZE[kind], clock_for(device)
    a = torch.randn(rows, rows, device=device).to(dtype)
    b = torch.randn(rows, rows, device=device).to(dtype)
    product = torch.empty(rows, rows, device=device, dtype=dtype)
    until = time.perf_counter() + WARM_S[kind]
    while time.perf_counter() < until:
        torch.mm(a, b, out=product)
        if kind != "cpu":
            torch.accelerator.synchronize()
    marks, used = [clock.mark()], -time.process_time()
    for _ in range(PRODUCTS[kind]):
        torch.mm(a, b, out=product)
        marks.append(clock.mark())
    used += time.process_time()
    flops = 2 * rows**3
    rate = flops / median(clock.intervals(marks))
    if kind != "cpu":
        return rate, rate
    return rate, max(rate, flops * PRODUCTS[kind] * torch.get_num_threads() / used)


class RanksAtOnce(NamedTuple):
    """Ranks that measure their rates together."""

    device: Device
    world_size: int
    num_nodes: int


def tasks(cells: Iterable[Cell], threads: int, folder: Path) -> list[MatmulTask]:
    """One task for each number of ranks and nodes that cells are timed on, with their precisions.

    Where cells have several ranks on each of several nodes, one is for the ranks of a single node.
    Leaves out the reference, virtual worlds and shared GPUs, whose speed is not reported.
    ``threads`` as in ``machine.threads_per_rank``.
    """
    wanted: dict[RanksAtOnce, dict[Precision, None]] = {}
    for cell in cells:
        if cell.is_reference or not cell.world.times_communication:
            continue
        groups = [RanksAtOnce(cell.device, cell.world_size, cell.num_nodes)]
        if cell.ranks_per_node > 1:
            groups.append(RanksAtOnce(cell.device, cell.ranks_per_node, 1))
        for group in groups:
            wanted.setdefault(group, {})[cell.precision] = None
    found = []
    for group, precisions in wanted.items():
        name = f"matmul-{group.world_size}-{group.num_nodes}"
        found.append(
            MatmulTask(
                world_size=group.world_size,
                num_nodes=group.num_nodes,
                threads=machine.threads_per_rank(group.world_size // group.num_nodes, threads),
                device=group.device,
                precisions=tuple(precisions),
                folder=str((folder / name).resolve()),
            )
        )
    return found


def measure(
    cells: Iterable[Cell], threads: int, folder: Path, launcher: Launcher
) -> tuple[MeasuredRates, ...]:
    """The entries for run.json, one per task, with scratch files under ``folder``.

    An entry without rates has the ``reason``; MFU against it stays empty.
    """
    entries = []
    for task in tasks(cells, threads, folder):
        entries.append(_rates(task, launcher.run(task, TIMEOUT_S)))
    return tuple(entries)


def _rates(task: MatmulTask, outcome: Outcome) -> MeasuredRates:
    """What the ranks of a task measured."""
    found = MeasuredRates(
        world_size=task.world_size,
        num_nodes=task.num_nodes,
        threads=task.threads,
        reason=outcome.reason,
    )
    if outcome.status is not Status.OK:
        return found
    ranks: list[RankRates] = []
    for rank in outcome.ranks:
        rates = {key: rank.get(key) for key in RankRates.__annotations__}
        try:
            ranks.append(validation.read(RankRates, rates))
        except InputError as error:
            return replace(found, reason=f"a rank returned damaged rates: {error}")
    flops_per_s, capacity = {}, {}
    for precision in task.precisions:
        name = str(precision)
        flops_per_s[name] = tuple(rank["flops_per_s"][name] for rank in ranks)
        capacity[name] = tuple(rank["capacity"][name] for rank in ranks)
    return replace(
        found,
        flops_per_s=flops_per_s,
        capacity=capacity,
        links=tuple(links.merge([rank["links"] for rank in ranks])),
    )


def time_products(
    folder: Path, manifest: Manifest, launcher: Launcher, observer: Observer
) -> Manifest:
    """The manifest with the rate of matrix products, measured and stored unless it is there."""
    if manifest.matmul is not None:
        return manifest
    observer.waits(STARTING)
    entries = measure(manifest.cells, manifest.settings.threads, folder / "scratch", launcher)
    timed = replace(manifest, matmul=entries)
    write_manifest(folder, timed)
    for line in summary(entries):
        observer.say(line)
    return timed


def summary(entries: Iterable[MeasuredRates]) -> list[str]:
    """Lines of text on the entries."""
    lines = []
    for entry in entries:
        rates = []
        for precision, of_ranks in entry.flops_per_s.items():
            rates.append(f"{sum(of_ranks) / 1e12:.3g} TFLOP/s in {precision}")
        what = " and ".join(rates)
        if not rates:
            what = f"not known, so neither is MFU against it: {entry.reason}"
        lines.append(f"matrix products on {entry.ranks}: {what}")
        if entry.link_text:
            lines.append(entry.link_text)
    return lines
