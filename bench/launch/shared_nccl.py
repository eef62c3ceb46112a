"""Whether ranks that share a GPU can communicate over NCCL, which is tried before a run.

Otherwise they use gloo. NCCL refuses two ranks whose host and GPU are the same (2.28.9,
src/init.cc:903, "Duplicate GPU detected"). What it takes for the host is NCCL_HOSTID where that is
set (src/misc/utils.cc:87). So every rank that shares a GPU is a host of its own, and NCCL connects
the ranks by sockets. The GPU runs the kernels of one process at a time, so a collective waits until
each rank has had its turn: values, calls and streams are those of ranks with GPUs of their own,
times are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from bench.plan.cell import REFERENCE, Cell, Device, Status
from bench.plan.task import Task
from bench.plan.world import World

if TYPE_CHECKING:
    import torch

    from bench.launch.launcher import Launcher

LIMIT_S = 30.0
"""How long the trial of NCCL may take: contexts and communicators of all ranks, and some
collectives."""
ELEMENTS = (2**10, 2**20)
"""Elements that each rank sends: one message that is sent at once, and one in parts."""
SETTINGS = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
"""Only sockets, and nothing that looks for the other ranks' GPUs on this host or between hosts."""
UNSET = ("NCCL_PROTO", "NCCL_ALGO")
"""Left to NCCL, since it chooses them by what connects the ranks."""


def environment(rank: int) -> dict[str, str]:
    """The environment variables that make a rank a host of its own for NCCL, without UNSET."""
    return {"NCCL_HOSTID": f"rank {rank}", **SETTINGS}


@dataclass(kw_only=True)
class SharedNcclTask(Task):
    """Does the collectives of backends between ranks that share a GPU, and checks the results."""

    work: ClassVar[str] = "bench.launch.shared_nccl:work"

    backend: str = REFERENCE
    """Selects the fork server: the reference needs no packages besides torch."""
    device: Device = Device.CUDA
    world: World = World.SHARED_GPU
    shared_nccl: bool = True


def work(task: SharedNcclTask, rank: int, device: torch.device) -> dict[str, object]:
    """The work of one rank. Raises RuntimeError if a collective gives a wrong value."""
    import torch
    import torch.distributed as dist

    size = task.world_size
    for count in ELEMENTS:
        # Each rank sends its number, counted from 1.
        ours = torch.full((count,), rank + 1.0, device=device)
        total = torch.full_like(ours, size * (size + 1) / 2)
        summed, gathered, part = ours.clone(), ours.new_empty(size, count), torch.empty_like(ours)
        dist.all_reduce(summed)
        dist.all_gather_into_tensor(gathered.view(-1), ours)
        dist.reduce_scatter_tensor(part, ours.repeat(size))
        numbers = torch.arange(1, size + 1, device=device, dtype=ours.dtype)
        sent = numbers.unsqueeze(1).expand_as(gathered)
        found = {
            "all-reduce": (summed, total),
            "all-gather": (gathered, sent),
            "reduce-scatter": (part, total),
        }
        for name, (values, expected) in found.items():
            if not torch.equal(values, expected):
                raise RuntimeError(
                    f"{name} of {count} elements over NCCL gives a wrong value on rank {rank}"
                )
    return {"status": Status.OK}


def refusal(cells: Sequence[Cell], launcher: Launcher) -> str:
    """Why the ranks of these cells, which share a GPU, cannot communicate over NCCL.

    Empty if they can. Raises LauncherError as ``launcher`` does.
    """
    task = SharedNcclTask(world_size=max(cell.world_size for cell in cells))
    outcome = launcher.run(task, LIMIT_S)
    return "" if outcome.status is Status.OK else f"{outcome.status}: {outcome.reason}"
