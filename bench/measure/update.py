"""Compares the update of one SGD window with the reference's, and an accelerator with the CPU.

Other gates compare with a reference on the same device, so they cannot see an error that every
program there makes.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

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

SIZES = "sizes"
"""Key of the reference's file for the norms of the parameters before the update, by name, in
JSON."""


def save(
    change: Mapping[str, Tensor],
    path: Path,
    sizes: Mapping[str, float] | None = None,
    *,
    durable: bool = False,
) -> None:
    """Write an update atomically; the reference's with the norms of the parameters that it changes.

    With ``durable``, a power failure leaves no empty file.
    """
    if sizes is None:
        sizes = {}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, durable=durable) as draft:
        save_file(dict(change), draft, {SIZES: json.dumps(dict(sizes))})


def sizes_of(model: nn.Module) -> dict[str, float]:
    """The L2 norms of a model's parameters."""
    return {
        name: float(torch.linalg.vector_norm(_real(parameter.detach()), dtype=torch.float64))
        for name, parameter in model.named_parameters()
    }


CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**24}
"""Elements that are compared at once, by device type: on a CPU what fits into a core's cache, since
a new fp64 copy of a whole tensor costs more to map than to compute; on a GPU so many that launching
kernels costs nothing."""


def change_from(
    model: nn.Module, after: Mapping[str, Tensor], backend: str
) -> Iterator[tuple[str, Tensor]]:
    """What an update changed by parameter, in fp32 on the device of ``model``.

    ``model`` has the values before the update. Each of ``after`` is read once, so no more than one
    parameter is held besides ``model``. It may be a state dict, and hold buffers and tied
    parameters under each of their names; they are read, because gathering is collective, and not
    compared. A complex parameter is two real ones in a last dimension. Raises RuntimeError if a
    parameter is missing, or one is there that is not the model's.
    """
    before = dict(model.named_parameters())
    known = set(model.state_dict())
    known.update(dict(model.named_parameters(remove_duplicate=False)))
    known.update(dict(model.named_buffers()))
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


class UpdateDeviation(TypedDict):
    """How an update u deviates from the expected r, over all parameters together."""

    error: float
    """The relative L2 error, |u - r| / |r|."""
    scale: float
    """The least-squares factor, <u, r> / <r, r>."""
    residual: float
    """The relative error after dividing u by ``scale``."""
    norm: float
    """|u|."""
    tensor_error: float
    """The largest relative error of a parameter of its own."""
    tensor: str
    """That parameter."""


def compare(
    change: Iterable[tuple[str, Tensor]], reference: Path, device: torch.device
) -> UpdateDeviation:
    """The deviation of an update from the reference's, in a file; calculated on the device."""
    with safe_open(reference, framework="pt") as stored:
        sizes: dict[str, float] = {}
        metadata = stored.metadata()
        if metadata is not None and SIZES in metadata:
            sizes = json.loads(metadata[SIZES])
        return deviation(change, stored.get_tensor, reference.name, device, sizes)


SMALL = 0.1
"""A tensor whose expected update is less than this share of the root mean square of all is compared
with that share. The gradient of the bias of an attention's keys should be 0: its relative error
would be one of nothing."""
ROUNDING = 2.0**-23
"""Of an fp32 number, relative: twice what rounding two new weights leaves in the difference of two
updates."""


@dataclass(slots=True)
class _Tensor:
    """Squares of norms of one tensor: of what is expected and of the difference."""

    name: str
    count: int
    expected: float
    apart: float

    def error(self, mean: float, size: float) -> float:
        """The relative L2 error, but for the rounding of weights of norm ``size``."""
        apart = math.sqrt(self.apart)
        if not math.isfinite(apart):
            return math.inf
        scale = max(math.sqrt(self.expected), SMALL * mean * math.sqrt(self.count))
        return max(0.0, apart - ROUNDING * size) / scale


def compare_files(values: Path, reference: Path) -> UpdateDeviation:
    """The same of an update in a file, on the CPU. Raises RuntimeError for other tensors."""
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
    sizes: Mapping[str, float] | None = None,
) -> UpdateDeviation:
    """The deviation of an update from the one expected, summed in fp64.

    A wrong divisor shows as a scale other than 1 without residual; lost or repeated samples show as
    a residual. A non-finite update has infinite error. ``sizes`` are the norms of parameters, whose
    rounding does not count in ``tensor_error``. Raises RuntimeError if what is expected is zero or
    not finite.
    """
    if sizes is None:
        sizes = {}
    uu = ur = rr = dd = 0.0
    size = CHUNK_ELEMENTS[device.type]
    tensors: list[_Tensor] = []
    for name, value in change:
        right = apart = 0.0
        chunks = zip(value.flatten().split(size), expected(name).flatten().split(size), strict=True)
        for ours, theirs in chunks:
            u, r = ours.to(device).double(), theirs.to(device).double()
            uu, ur, right = uu + float(u @ u), ur + float(u @ r), right + float(r @ r)
            d = u.sub_(r)
            apart += float(d @ d)
        rr, dd = rr + right, dd + apart
        tensors.append(_Tensor(name, value.numel(), right, apart))
    if rr == 0.0 or not math.isfinite(rr):
        raise RuntimeError(
            f"the reference update in {source} has norm {math.sqrt(rr)}: nothing to compare with"
        )
    mean = math.sqrt(rr / sum(tensor.count for tensor in tensors))
    errors: dict[str, float] = {}
    for tensor in tensors:
        errors[tensor.name] = tensor.error(mean, sizes.get(tensor.name, 0.0))
    worst = max(errors, key=errors.__getitem__)
    found: UpdateDeviation = {
        "error": math.inf,
        "scale": math.nan,
        "residual": math.nan,
        "norm": math.sqrt(uu),
        "tensor_error": errors[worst],
        "tensor": worst,
    }
    if not math.isfinite(uu):
        return found
    found["error"] = math.sqrt(dd / rr)
    found["scale"] = scale = ur / rr
    found["residual"] = 1.0
    if scale:
        left = max(0.0, uu / (scale * scale) - 2 * ur / scale + rr)
        found["residual"] = math.sqrt(left / rr)
    return found


MODEL = "mini"
"""The smallest shipped model with several key heads, each shared by several query heads, as large
models have."""
SAMPLES, WINDOWS, TOKENS = 4, 4, 128
"""Samples per window, windows, and the most tokens of a sample."""
LARGEST_FLOPS = 1e11
"""Of training a model that is not shipped; one core of a CPU takes some 5 s for it."""


def device_check(
    cell: Cell, device: torch.device, optimizer: Callable[[Iterable[Parameter]], Optimizer]
) -> dict[str, float]:
    """The deviation of the device from the CPU in fp32.

    It is that of the first update by SGD, and of the losses by ``optimizer``. The shipped workload
    has a small model for it; of others it is the cell's own. Empty if that takes the CPU too long,
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
    found = _train(on_device, workload, batches.to(samples, device), optimizer)
    expected = _train(on_cpu, workload, samples, optimizer)
    apart = deviation(
        found.change.items(), expected.change.__getitem__, "the CPU", torch.device("cpu")
    )
    largest = 0.0
    for loss, other in zip(found.losses, expected.losses, strict=True):
        largest = max(largest, abs(loss - other))
        if not math.isfinite(loss - other):
            largest = math.inf
    return {
        "device_error": apart["error"],
        "device_loss_deviation": largest,
        "device_loss_size": max(map(abs, expected.losses)),
    }


class TrainedWindows(NamedTuple):
    """What ``device_check`` compares."""

    losses: list[float]
    """Of each window."""
    change: dict[str, Tensor]
    """What SGD with learning rate 1 would change in the first window, by parameter."""


def _train(
    model: nn.Module,
    workload: Workload,
    samples: Batch,
    make_optimizer: Callable[[Iterable[Parameter]], Optimizer],
) -> TrainedWindows:
    optimizer = make_optimizer(model.parameters())
    losses: list[float] = []
    change: dict[str, Tensor] = {}
    for batch in batches.split(samples, SAMPLES):
        loss = workload.loss(model, batch)
        loss.backward()
        if not losses:
            for name, p in model.named_parameters():
                if p.grad is not None:
                    change[name] = -p.grad.cpu()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return TrainedWindows(losses, change)
