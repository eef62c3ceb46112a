"""Process groups that run the memory pass of several cells each: python -m tests.memory_ranks FOLDER CELLS.

CELLS is JSON: lists of cells by number of ranks. Frameworks are imported once, then every rank is a fork. Here is also
the workload of these cells, whose shapes no number of ranks divides.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import deepspeed  # noqa: F401  # imported before the ranks are forked
import torch
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn

from bench.backends.base import registry
from bench.measure.trial import RankTrial
from bench.plan.cell import Cell
from bench.plan.task import Spec
from bench.workload import WorkloadSpec

WIDTH, HIDDEN, OUT = 65, 131, 7
NUM_BLOCKS = 2
BLOCK_SHAPES = [(HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,)]
SHAPES = [*BLOCK_SHAPES * NUM_BLOCKS, (OUT, WIDTH), (OUT,)]
"""Shapes of the parameters in the model's order; the last two are the root's."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.up.weight.dtype)
        out: Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Perceptron:
    """Random vectors in, the mean square of what comes out as the loss."""

    entropy_floor: float | None = None
    flops_per_sample: float | None = None
    tokens_per_sample = 1

    def __init__(self, spec: WorkloadSpec) -> None:
        pass

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, OUT))

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return [module for module in model.modules() if isinstance(module, Block)]

    def data(self, num_samples: int) -> Tensor:
        return torch.ones(num_samples, WIDTH)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        out: Tensor = model(batch).float().pow(2).mean()
        return out


def measure(folder: Path, world_size: int, rank: int, cells: list[dict[str, object]]) -> None:
    """One rank: the memory of each cell, as ``rank<r>.json`` in the folder."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    store = torch.distributed.FileStore(str(folder / "store"), world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    results = []
    for values in cells:
        cell = Cell.from_dict(values)
        spec = Spec(cell=cell, passes=("memory",), folder=str(folder), reference="")
        results.append(RankTrial(spec, rank, torch.device("cpu"), registry()[cell.backend]).memory())
        gc.collect()
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    torch.distributed.barrier()


def main(folder: Path, groups: dict[str, list[dict[str, object]]]) -> None:
    """One group after the other; each leaves its results in a folder named by its number of ranks."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for world_size, cells in groups.items():
        (folder / world_size).mkdir()
        children = []
        for rank in range(int(world_size)):
            if child := os.fork():
                children.append(child)
                continue
            try:
                measure(folder / world_size, int(world_size), rank, cells)
            except BaseException:
                traceback.print_exc()
            # Not by the usual way out: gloo may abort while it tidies up.
            os._exit(0)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
