"""Compares the update of one SGD window with the reference's, and an accelerator with the CPU.

Other gates compare with a reference on the same device, so they cannot see an error that every program there makes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from bench.files import replacing
from bench.plan.cell import Cell
from bench.plan.models import LLAMA
from bench.workload import Workload, load


def save(change: Mapping[str, Tensor], path: Path) -> None:
    """Write the reference's update atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=True) as draft:  # or a power failure could leave an empty file
        save_file(dict(change), draft)


def change_from(model: nn.Module, after: Mapping[str, Tensor], backend: str) -> dict[str, Tensor]:
    """What an update changed, on the CPU, by name of a parameter; ``model`` has the values before it.

    Raises RuntimeError if the names after it are not the model's.
    """
    before = {name: p.detach() for name, p in model.named_parameters()}
    change = {name: after[name].detach().float().cpu() - before[name].cpu() for name in after if name in before}
    if missing := before.keys() ^ after.keys():
        raise RuntimeError(f"full_parameters() of {backend} is not the model's: {sorted(missing)[:3]}")
    return change


def compare(change: Mapping[str, Tensor], reference: Path) -> dict[str, float]:
    """The deviation of an update from the reference's, which is in a file."""
    with safe_open(reference, framework="pt") as stored:
        return deviation(change, stored.get_tensor, reference.name)


def deviation(change: Mapping[str, Tensor], expected: Callable[[str], Tensor], source: str) -> dict[str, float]:
    """The deviation of an update from the one expected, over all parameters together, summed in fp64.

    ``error`` is the relative L2 error |u - r| / |r|; ``scale`` the least-squares factor <u, r> / <r, r>; ``residual``
    the relative error after dividing u by it. A wrong divisor shows as a scale other than 1 without residual; lost or
    repeated samples show as a residual. A non-finite update has infinite error. Raises RuntimeError if r is zero or not
    finite.
    """
    uu = ur = rr = dd = 0.0
    for name, value in change.items():
        u, r = value.double().flatten(), expected(name).double().flatten()
        uu, ur, rr, dd = uu + float(u @ u), ur + float(u @ r), rr + float(r @ r), dd + float((u - r) @ (u - r))
    if rr == 0.0 or not math.isfinite(rr):
        raise RuntimeError(f"the reference update in {source} has norm {math.sqrt(rr)}: nothing to compare with")
    if not math.isfinite(uu):
        return {"error": math.inf, "scale": math.nan, "residual": math.nan}
    scale = ur / rr
    residual = math.sqrt(max(0.0, uu / (scale * scale) - 2 * ur / scale + rr) / rr) if scale else 1.0
    return {"error": math.sqrt(dd / rr), "scale": scale, "residual": residual}


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
