"""A virtual world: one process is rank 0 of W ranks, over torch's process group that only pretends to communicate.

Shards, buckets and calls are those of rank 0 of a real world, and so are their bytes; no other rank exists. What would
come from the others is made of what this rank has (``FakeProcessGroup`` of torch >= 2.13: a gather repeats the own
shard, a reduction keeps the own values), so all numbers are finite and none means anything. A step takes what it would
if communication took no time.

With fake tensors nothing is allocated either: tensors have shapes, dtypes and storages of a size, and no memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from bench.backends.base import Backend
from bench.cell import Cell
from bench.workload import LLAMA

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PASSES = {False: ("time", "collectives", "memory"), True: ("collectives", "memory")}
"""The passes that mean something in a virtual world, by whether tensors are fake. None compares values."""


class Tensors(Protocol):
    """What a trial's tensors are made of; a context, open while a pass runs."""

    def __enter__(self) -> Any:
        """Tensors that are made from now on are of this kind."""

    def __exit__(self, *exc: object) -> None:
        """As before."""

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A model whose parameters can be counted, and that ``place`` takes."""

    def place(self, model: nn.Module) -> nn.Module:
        """The model on the device, to be trained."""

    def data(self, make: Callable[[int], Tensor], num_samples: int) -> Tensor:
        """So many samples on the device."""


class RealTensors(nullcontext[None]):
    """Tensors as they are; see ``Tensors``."""

    def __init__(self, device: torch.device, workload: str) -> None:
        super().__init__()
        self._device = device
        # A core takes 12 s to draw 1 G weights, which is longer than to train with them. GPUs of one kind draw alike.
        self._draws = device if workload == LLAMA and device.type != "cpu" else nullcontext()

    def model(self, make: Callable[[], nn.Module]) -> nn.Module:
        with self._draws:
            return make()

    def place(self, model: nn.Module) -> nn.Module:
        return model.to(self._device)

    def data(self, make: Callable[[int], Tensor], num_samples: int) -> Tensor:
        return make(num_samples).to(self._device)


def tensors(cell: Cell, device: torch.device, packages: Sequence[str] = ()) -> Tensors:
    """What the cell's tensors are made of; ``packages`` are those that its backend requires."""
    if not cell.fake_tensors:
        return RealTensors(device, cell.workload)
    from bench.fakes import FakeTensors

    return FakeTensors(device, packages)


def refusal(cell: Cell, backend: type[Backend]) -> str:
    """Why there cannot be such a virtual world, in one line; empty if there can, and for a cell that is none."""
    if cell.fake_tensors and not cell.virtual:
        return "fake tensors have no values to send to another rank: they need a virtual world"
    if not cell.virtual:
        return ""
    if backend.not_virtual:
        return f"{backend.name} cannot be in a virtual world: {backend.not_virtual}"
    if cell.fake_tensors and backend.not_fake:
        return f"{backend.name} cannot run on fake tensors: {backend.not_fake}"
    return ""


def passes(cell: Cell, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the passes that mean something for this cell, in order."""
    return tuple(name for name in asked if not cell.virtual or name in PASSES[cell.fake_tensors])


def join(world_size: int) -> None:
    """Make this process rank 0 of ``world_size`` ranks, of which no other exists.

    The pretended ranks are on nodes of their own, one each: no framework then looks for their devices on this one.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # Lightning and DeepSpeed ask the environment too, which says what torch elastic started: one process.
    alone = {"RANK": 0, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 0}
    pretended = {"WORLD_SIZE": world_size, "GROUP_WORLD_SIZE": world_size, "ROLE_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in (alone | pretended).items()})
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    _teach_ddp()


def _teach_ddp() -> None:
    """Let every DistributedDataParallel of this process get its reduced buckets.

    Its C++ reducer wants them as the result of the collective's future, and the pretended one's has none: it ends in an
    internal assertion. A communication hook may bring a future of its own.
    """
    from torch.nn.parallel import DistributedDataParallel

    if getattr(DistributedDataParallel, "_knows_virtual_worlds", False):
        return
    initialize = DistributedDataParallel.__init__

    def __init__(ddp: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - it takes that name's place
        initialize(ddp, *args, **kwargs)
        ddp.register_comm_hook(ddp.process_group, _all_reduce)

    DistributedDataParallel.__init__ = __init__  # type: ignore[method-assign, assignment]
    DistributedDataParallel._knows_virtual_worlds = True  # type: ignore[attr-defined]


def _all_reduce(group: Any, bucket: Any) -> Any:
    """What DDP does without a hook, a division and an all-reduce in place; and the bucket as the result."""
    import torch
    import torch.distributed as dist

    buffer = bucket.buffer().div_(group.size())
    dist.all_reduce(buffer, group=group)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


_all_reduce.__annotations__.clear()  # torch wants its own types there or none, and ours are strings
