"""Compares the update of one SGD window with the reference's, and an accelerator with the CPU.

Other gates compare with a reference on the same device, so they cannot see an error that every program there makes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from bench.workload import Batch, Workload, batches, load


def save(change: Mapping[str, Tensor], path: Path, *, durable: bool = False) -> None:
    """Write an update atomically; with ``durable``, a power failure leaves no empty file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=durable) as draft:
        save_file(dict(change), draft)


CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**24}
"""Elements that are compared at once, by device type: on a CPU what fits into a core's cache, since a new fp64 copy of
a whole tensor costs more to map than to compute; on a GPU so many that launching kernels costs nothing."""


def change_from(
    model: nn.Module, after: Mapping[str, Tensor], backend: str
) -> Iterator[tuple[str, Tensor]]:
    """What an update changed, in fp32 on the device of ``model``, which has the values before it, by parameter.

    Each of ``after`` is read once, so no more than one parameter is held besides ``model``. It may be a state dict, and
    hold buffers and tied parameters under each of their names; they are read, because gathering is collective, and not
    compared. A complex parameter is two real ones in a last dimension. Raises RuntimeError if a parameter is missing,
    or one is there that is not the model's.
    """
    before = dict(model.named_parameters())
    known = {
        name for name, _ in model.named_parameters(remove_duplicate=False)
    } | model.state_dict().keys()
    known |= {name for name, _ in model.named_buffers()}
    if wrong := (before.keys() - after.keys()) | (after.keys() - known):
        raise RuntimeError(
            f"full_parameters() of {backend} is not the model's: {sorted(wrong)[:3]}"
        )
    for name in after:
        value = after[name].detach()
        if name not in before:
            continue
        was = before[name].detach()
        if not before[name].requires_grad:
            was = was.to(value.dtype)  # a frozen one has no fp32 master
        yield name, _real(value.to(was.device)) - _real(was)


def _real(value: Tensor) -> Tensor:
    if value.is_complex():
        value = torch.view_as_real(value)
    return value.float()


def compare(
    change: Iterable[tuple[str, Tensor]], reference: Path, device: torch.device
) -> dict[str, float]:
    """The deviation of an update from the reference's, which is in a file; calculated on the device."""
    with safe_open(reference, framework="pt") as stored:
        return deviation(change, stored.get_tensor, reference.name, device)


def compare_files(values: Path, reference: Path) -> dict[str, float]:
    """The same of an update in a file, on the CPU. Raises RuntimeError if the two files have other tensors."""
    with safe_open(values, framework="pt") as ours, safe_open(reference, framework="pt") as theirs:
        names = list(ours.keys())
        if apart := set(names) ^ set(theirs.keys()):
            words = f"the update has other tensors than the reference's: {sorted(apart)[:3]}"
            raise RuntimeError(words)
        change = ((name, ours.get_tensor(name)) for name in names)
        return compare(change, reference, torch.device("cpu"))


def deviation(
    change: Iterable[tuple[str, Tensor]],
    expected: Callable[[str], Tensor],
    source: str,
    device: torch.device,
) -> dict[str, float]:
    """The deviation of an update from the one expected, over all parameters together, summed in fp64.

    ``error`` is the relative L2 error |u - r| / |r|; ``scale`` the least-squares factor <u, r> / <r, r>; ``residual``
    the relative error after dividing u by it; ``norm`` is |u|. A wrong divisor shows as a scale other than 1 without
    residual; lost or repeated samples show as a residual. A non-finite update has infinite error. Raises RuntimeError
    if r is zero or not finite.
    """
    uu = ur = rr = dd = 0.0
    size = CHUNK_ELEMENTS[device.type]
    for name, value in change:
        chunks = zip(value.flatten().split(size), expected(name).flatten().split(size), strict=True)
        for ours, theirs in chunks:
            u, r = ours.to(device).double(), theirs.to(device).double()
            uu, ur, rr = uu + float(u @ u), ur + float(u @ r), rr + float(r @ r)
            d = u.sub_(r)
            dd += float(d @ d)
    norm = math.sqrt(uu)
    if rr == 0.0 or not math.isfinite(rr):
        raise RuntimeError(
            f"the reference update in {source} has norm {math.sqrt(rr)}: nothing to compare with"
        )
    if not math.isfinite(uu):
        return {"error": math.inf, "scale": math.nan, "residual": math.nan, "norm": norm}
    scale = ur / rr
    residual = (
        math.sqrt(max(0.0, uu / (scale * scale) - 2 * ur / scale + rr) / rr) if scale else 1.0
    )
    return {"error": math.sqrt(dd / rr), "scale": scale, "residual": residual, "norm": norm}


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
    losses, change = _train(on_device, workload, batches.to(samples, device), optimizer)
    expected_losses, expected = _train(on_cpu, workload, samples, optimizer)
    apart = [abs(loss - other) for loss, other in zip(losses, expected_losses, strict=True)]
    error = deviation(change.items(), expected.__getitem__, "the CPU", torch.device("cpu"))["error"]
    largest = max(apart) if all(map(math.isfinite, apart)) else math.inf
    return {"device_error": error, "device_loss_deviation": largest}


def _train(
    model: nn.Module,
    workload: Workload,
    samples: Batch,
    make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of each window, and what SGD with learning rate 1 would change in the first one."""
    optimizer = make_optimizer(model.parameters())
    losses: list[float] = []
    change: dict[str, Tensor] = {}
    for batch in batches.split(samples, SAMPLES):
        loss = workload.loss(model, batch)
        loss.backward()
        if not losses:
            change = {
                name: -p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, change
