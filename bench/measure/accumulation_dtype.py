"""Measures the dtype in which a backend accumulates gradients, through its own training loop.

Both probes train two windows of a tiny model with SGD at learning rate 1. Its loss is linear, so
the data of a micro-batch *is* its gradient, and the change of the weights is the accumulated
gradient. Gradients of the first window are 0: what is measured is the second, as frameworks may
treat the first in another way.

``accumulator``: four micro-batches with gradients 2^j, 1, -2^(j-1) and -2^(j-1), one weight per j.
Their sum is 1, but 0 if 2^j + 1 does not fit into the accumulator: a significand of p bits keeps
the sums for j < p and loses the others. All numbers and their fourths are exact in bf16, so only
the accumulation can lose anything. For j = 8 (256 and 1) this is the known test that gives 1 in
fp32 and 0 in bf16 (https://github.com/pytorch/pytorch/issues/194434), which uses three
micro-batches; a third of a number is not exact. Beside them, 1 and 2^-j: their sum reaches the
optimizer as 1 if it has fewer than j + 1 bits there, however it was accumulated.

``error``: random gradients, also exact in bf16, and the relative error of their accumulated mean
against fp64. In fp32 it stays below 1e-7 up to N = 256; in bf16 it is above 1e-3 and grows with N.

A factor common to all gradients of a window changes neither. Lightning with DeepSpeed has one: it
divides the loss by N twice, so everything is 1/N of its right value, which is exact if N is a power
of two.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from bench.backends.base import Backend
from bench.backends.training_job import Job
from bench.measure.taps import Taps, updates
from bench.plan.cell import Cell, Sync

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer

NUM_MAGNITUDES = 32
"""Number of values of j, from 0; no dtype up to fp32 keeps them all."""
BITS = {"bf16": 8, "fp16": 11, "fp32": 24, "fp64": 53}
"""Significand of each dtype in bits, including the hidden bit."""
NOT_MEASURED = "not measured"
"""Result for backends that accumulate nothing (the reference) and for worlds without values."""
NUM_WEIGHTS = 1024
"""Number of weights for ``error``."""
PARAMETER = "block.weight"


def accumulator(
    backend: type[Backend], cell: Cell, rank: int, device: torch.device
) -> dict[str, object]:
    """How the backend accumulates in the cell's precision and world. Collective.

    ``dtype``: fp32, bf16, another of BITS, ``other: .. bits``, or NOT_MEASURED;
    ``significand_bits``: number of j kept, from 0 to the first that is lost; ``sum``: of the
    gradients 256, 1, -128 and -128; ``result_dtype``: in which the sum reaches the optimizer;
    ``scale``: factor on the mean gradient, 1 if correct; ``num_updates``: updates in the window, 1
    if correct. With several updates nothing is accumulated, so ``dtype`` is ``other``. All ranks
    find the same.
    """
    if backend.sync is Sync.NONE or not cell.world.has_values:
        return {"dtype": NOT_MEASURED}
    import torch

    large = 2.0 ** torch.arange(NUM_MAGNITUDES)
    ones, nothing = torch.ones_like(large), torch.zeros_like(large)
    summed = torch.stack([large, ones, -large / 2, -large / 2])
    kept_whole = torch.stack([ones, 1 / large, nothing, nothing])
    mine = torch.cat([summed, kept_whole], dim=1)
    change, num_updates = _update(backend, cell, rank, device, mine)
    scale = float(change[0]) * len(mine)
    if not (math.isfinite(scale) and scale):
        return {"dtype": "other: no update", "scale": scale, "num_updates": num_updates}
    totals = change / change[0]
    sums: list[float] = totals[:NUM_MAGNITUDES].tolist()
    kept = _num_ones(sums, 1e-3)
    dtype = result = f"other: {num_updates} updates"
    if num_updates == 1:
        dtype = _dtype(kept)
        digits = ((totals[NUM_MAGNITUDES:] - 1) * large.double()).tolist()
        result = _dtype(_num_ones(digits, 0.5))
    return {
        "dtype": dtype,
        "scale": scale,
        "num_updates": num_updates,
        "significand_bits": kept,
        "sum": sums[8] + 0.0,
        "result_dtype": result,
    }


def _num_ones(numbers: Sequence[float], tolerance: float) -> int:
    """How many numbers come before the first that is further than this from 1."""
    for place, number in enumerate(numbers):
        if abs(number - 1) > tolerance:
            return place
    return len(numbers)


def _dtype(kept: int) -> str:
    """The dtype with this many bits, plus or minus one.

    A W that is no power of two may cost a bit in rounding.
    """
    if kept == NUM_MAGNITUDES:
        return "fp64"
    name = min(BITS, key=lambda name: abs(BITS[name] - kept))
    if abs(BITS[name] - kept) <= 1:
        return name
    return f"other: {kept} bits"


def error(
    backend: type[Backend], cell: Cell, rank: int, device: torch.device, accumulate: int
) -> dict[str, object] | None:
    """The relative L2 error of the mean of N micro-gradients over all ranks. Collective.

    Gradients are normal with mean 1 and deviation 1, different on each rank. ``factor`` is 1 or
    1/N, whichever is nearer to the update's least-squares ``scale``; the update is divided by it,
    which corrects only the known defect, before ``error`` is computed, against fp64. None if
    ``accumulator`` says NOT_MEASURED.
    """
    if backend.sync is Sync.NONE or not cell.world.has_values:
        return None
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = 1 + torch.randn(accumulate, cell.world_size, NUM_WEIGHTS, generator=generator)
    gradients = drawn.bfloat16().float()
    change, num_updates = _update(backend, cell, rank, device, gradients[:, rank])
    exact = gradients.double().mean(dim=(0, 1))
    scale = float(change @ exact / (exact @ exact))
    factor = 1.0
    if math.isfinite(scale) and scale * math.sqrt(accumulate) < 1:
        factor = 1 / accumulate
    return {
        "accumulate": accumulate,
        "error": float((change / factor - exact).norm() / exact.norm()),
        "scale": scale,
        "factor": factor,
        "num_updates": num_updates,
    }


def _model(num_weights: int) -> nn.Module:
    """One vector of zero weights in a block inside a root, as in a transformer."""
    import torch

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(num_weights))

        def forward(self, rows: Tensor) -> Tensor:
            # A matrix product, because autocast computes it in bf16, as in a model's layers.
            return rows.to(self.weight.dtype) @ self.weight

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, rows: Tensor) -> Tensor:
            # A block's input needs a gradient in a transformer: ZeRO-3 reduces those of a block
            # when it has that.
            return self.block(rows.detach().requires_grad_())  # type: ignore[no-any-return]

    return Root()


def _update(
    backend: type[Backend], cell: Cell, rank: int, device: torch.device, gradients: Tensor
) -> tuple[Tensor, int]:
    """By how much a second window decreases the weights, and its number of updates.

    ``gradients`` has the shape [N, weights].
    """
    import torch

    accumulate, num_weights = gradients.shape
    taps = Taps(time.perf_counter)
    both = torch.cat([torch.zeros_like(gradients), gradients])
    rows: Sequence[Tensor] = both.to(device).split(1)

    def optimizer(parameters: Iterable[Parameter]) -> Optimizer:
        return taps.optimizer(torch.optim.SGD(parameters, lr=1.0))

    job = Job(
        cell=dataclasses.replace(
            cell,
            accumulate=accumulate,
            global_batch_size=accumulate * cell.world_size,
            clip_norm=0.0,
            twin="",
        ),
        rank=rank,
        world_size=cell.world_size,
        device=device,
        windows=2,
        accumulate=accumulate,
        block_parameters=num_weights,
        num_parameters=num_weights,
        build=lambda: _model(num_weights).to(device),
        blocks=lambda model: [model.block],  # type: ignore[list-item]
        loader=taps.loader(rows),
        loss=taps.loss(lambda model, batch: model(batch).sum()),
        optimizer=optimizer,
        keep_parameters=True,
    )
    trained = backend()
    trained.train(job)
    seen = in_second = 0
    for update in updates(taps.events):
        seen += update.num_micro_batches
        in_second += seen > accumulate
    return -trained.full_parameters()[PARAMETER].detach().double().cpu(), in_second
