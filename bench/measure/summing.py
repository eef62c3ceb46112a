"""In which dtype a backend really sums the gradients of a window: probed through its own training loop.

Both probes train one window of a tiny model with SGD at learning rate 1. Its loss is linear, so that the data of a
micro-batch *is* its gradient, and the change of the weights is what became of the sum.

``accumulator``: four micro-batches with gradients 2^j, 1, -2^(j-1) and -2^(j-1), a weight for each j. Their sum is 1,
and is 0 where 2^j + 1 does not fit into the accumulator: so a significand of p bits keeps the sums of j < p, and loses
those from p on. All numbers, and a fourth of them, are exact in bf16, so that nothing but the accumulation can lose
anything. For j = 8, with 256 and 1, this is the known test that gives 1 in fp32 and 0 in bf16
(https://github.com/pytorch/pytorch/issues/194434). That one has three micro-batches; but a third of a number is not
exact, and in bf16 then gives something else than 0.

``error``: random gradients, exact in bf16 too, and the relative error of their accumulated mean against fp64. In fp32
it stays below 1e-7 up to N = 256; in bf16 it is above 1e-3, and grows with N.

A factor that scales all gradients of a window alike changes neither. Lightning with DeepSpeed has one: it divides the
loss by N twice, so all is 1/N of what it should be, which is exact for an N that is a power of two.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from bench.backends.base import Backend, Job
from bench.measure.taps import Taps, updates
from bench.plan.cell import Cell, Sync

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer

NUM_MAGNITUDES = 32
"""Values of j, from 0. No dtype up to fp32 keeps them all."""
BITS = {"bf16": 8, "fp16": 11, "fp32": 24, "fp64": 53}
"""Significand of each dtype in bits, the hidden one counted."""
NOT_MEASURED = "not measured"
"""The dtype of a backend that accumulates nothing, the reference, and of a world whose other ranks are pretended."""
NUM_WEIGHTS = 1024
"""Weights of ``error``."""
PARAMETER = "block.weight"


def accumulator(backend: type[Backend], cell: Cell, rank: int, device: torch.device) -> dict[str, Any]:
    """How the backend accumulates in the cell's precision and world. Collective; the same on every rank.

    ``dtype``: fp32, bf16, another of BITS, ``other: .. bits``, or NOT_MEASURED; ``significand_bits``: the j that are
    kept, counted from 0 to the first one that is not; ``sum``: of the gradients 256, 1, -128 and -128; ``scale``:
    what the mean gradient is multiplied by, 1 if all is well; ``num_updates``: in the window, 1 if all is well. More
    than one is no accumulation of gradients, so the dtype is then ``other``.
    """
    if backend.sync is Sync.NONE or not cell.world.has_values:
        return {"dtype": NOT_MEASURED}
    import torch

    large = 2.0 ** torch.arange(NUM_MAGNITUDES)
    mine = torch.stack([large, torch.ones_like(large), -large / 2, -large / 2])
    change, num_updates = _update(backend, cell, rank, device, mine)
    scale = float(change[0]) * len(mine)
    found: dict[str, Any] = {"dtype": "other: no update", "scale": scale, "num_updates": num_updates}
    if not (math.isfinite(scale) and scale):
        return found
    sums = (change / change[0]).tolist()
    kept = next((j for j, total in enumerate(sums) if abs(total - 1) > 1e-3), NUM_MAGNITUDES)
    dtype = _dtype(kept) if num_updates == 1 else f"other: {num_updates} updates"
    return {**found, "dtype": dtype, "significand_bits": kept, "sum": sums[8] + 0.0}


def _dtype(kept: int) -> str:
    """The dtype with about so many bits: a world size that is no power of two may cost one in rounding."""
    if kept == NUM_MAGNITUDES:
        return "fp64"
    name = min(BITS, key=lambda name: abs(BITS[name] - kept))
    return name if abs(BITS[name] - kept) <= 1 else f"other: {kept} bits"


def error(
    backend: type[Backend], cell: Cell, rank: int, device: torch.device, accumulate: int, *, seed: int = 0
) -> dict[str, Any] | None:
    """The relative L2 error of a mean of N micro-gradients over all ranks, against fp64. Collective.

    Gradients are drawn from a normal distribution with mean 1 and deviation 1, for each rank others. ``factor`` is 1,
    or 1/N if that is the nearer one to the update's least-squares ``scale``; the update is divided by it, the known
    defect, and by nothing else, before its ``error`` is taken. None where ``accumulator`` says NOT_MEASURED.
    """
    if backend.sync is Sync.NONE or not cell.world.has_values:
        return None
    import torch

    generator = torch.Generator().manual_seed(seed)
    drawn = 1 + torch.randn(accumulate, cell.world_size, NUM_WEIGHTS, generator=generator)
    gradients = drawn.bfloat16().float()
    change, num_updates = _update(backend, cell, rank, device, gradients[:, rank])
    exact = gradients.double().mean(dim=(0, 1))
    scale = float(change @ exact / (exact @ exact))
    factor = 1.0 if not math.isfinite(scale) or scale * math.sqrt(accumulate) >= 1 else 1 / accumulate
    return {
        "accumulate": accumulate,
        "error": float((change / factor - exact).norm() / exact.norm()),
        "scale": scale,
        "factor": factor,
        "num_updates": num_updates,
    }


def _model(num_weights: int) -> nn.Module:
    """One vector of weights, all 0, in a block within a root, as a transformer's are."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(num_weights))

        def forward(self, rows: Tensor) -> Tensor:
            # A matrix product, so that autocast computes it in bf16 as it does a model's layers.
            return rows.to(self.weight.dtype) @ self.weight

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, rows: Tensor) -> Tensor:
            return self.block(rows)  # type: ignore[no-any-return]

    return Root()


def _update(
    backend: type[Backend], cell: Cell, rank: int, device: torch.device, gradients: Tensor
) -> tuple[Tensor, int]:
    """What one window of the rows of ``gradients``, [N, weights], takes off the weights; how many updates it made."""
    import torch

    accumulate, num_weights = gradients.shape
    taps = Taps(time.perf_counter)
    rows: Sequence[Tensor] = gradients.to(device).split(1)

    def optimizer(parameters: Iterable[Parameter]) -> Optimizer:
        return taps.optimizer(torch.optim.SGD(parameters, lr=1.0))

    job = Job(
        cell=dataclasses.replace(
            cell, accumulate=accumulate, global_batch_size=accumulate * cell.world_size, clip_norm=0.0, twin=""
        ),
        rank=rank,
        world_size=cell.world_size,
        device=device,
        windows=1,
        accumulate=accumulate,
        num_parameters=num_weights,
        block_parameters=num_weights,
        build=lambda: _model(num_weights).to(device),
        blocks=lambda model: [model.block],  # type: ignore[list-item]
        loader=taps.loader(rows),
        loss=taps.loss(lambda model, batch: model(batch).sum()),
        optimizer=optimizer,
        keep_parameters=True,
    )
    trained = backend()
    trained.train(job)
    return -trained.full_parameters()[PARAMETER].detach().double().cpu(), len(updates(taps.events))
