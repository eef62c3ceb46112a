"""Holds an accelerator against the CPU: both train a small model from the same weights on the same samples.

All other gates compare with a reference on the same device, so they cannot see an error that every program there makes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from bench.measure.update import deviation
from bench.plan.cell import Cell
from bench.plan.models import LLAMA
from bench.workload import Workload, load

MODEL = "mini"
"""The smallest shipped model with several key heads, each shared by several query heads, as large models have."""
SAMPLES, WINDOWS, TOKENS = 4, 4, 128
"""Samples per window, windows, and the most tokens of a sample."""
LARGEST_FLOPS = 1e11
"""Of training a model that is not shipped; one core of a CPU takes some 5 s for it."""


def device_check(
    cell: Cell, device: torch.device, optimizer: Callable[[Iterable[Parameter]], Optimizer]
) -> dict[str, float]:
    """The deviation of the device from the CPU in fp32: of the first update by SGD, and of the losses by ``optimizer``.

    The shipped workload has a small model for it; of others it is the cell's own. Empty if that takes the CPU too long,
    and on the CPU.
    """
    if device.type == "cpu":
        return {}
    if cell.workload == LLAMA:
        cell = dataclasses.replace(
            cell, model=MODEL, sequence_length=min(TOKENS, cell.sequence_length), corpus="markov"
        )
    workload = load(cell, None)
    on_cpu = workload.model()
    num_parameters = sum(p.numel() for p in on_cpu.parameters())
    if 6 * num_parameters * SAMPLES * WINDOWS * workload.tokens_per_sample > LARGEST_FLOPS:
        return {}
    samples = workload.data(SAMPLES * WINDOWS)
    on_device = copy.deepcopy(on_cpu).to(device)
    losses, change = _train(on_device, workload, samples.to(device), optimizer)
    expected_losses, expected = _train(on_cpu, workload, samples, optimizer)
    apart = [abs(loss - other) for loss, other in zip(losses, expected_losses, strict=True)]
    error = deviation(change, expected.__getitem__, "the CPU")["error"]
    largest = max(apart) if all(map(math.isfinite, apart)) else math.inf
    return {"device_error": error, "device_loss_deviation": largest}


def _train(
    model: nn.Module, workload: Workload, samples: Tensor, make_optimizer: Callable[[Iterable[Parameter]], Optimizer]
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each window, and what SGD with learning rate 1 would change in the first one."""
    optimizer = make_optimizer(model.parameters())
    losses: list[float] = []
    change: dict[str, Tensor] = {}
    for batch in samples.split(SAMPLES):
        loss = workload.loss(model, batch)
        loss.backward()
        if not losses:
            change = {name: -p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, change
