"""What a rank holds when its training is over: random projections of parameters and their state.

Ranks hand over projections (``bench.measure.projection``), so nothing is gathered and no large file
is written: projections of shards add up, those of replicas must be equal, and the distance to the
reference's tensors follows from theirs. The process that compares has run no backend
(``bench.run.state_check``).

AdamW divides by the size of a gradient, so where a gradient is nothing but rounding noise, the
change of a parameter is noise as well. The reference knows these elements; without them, parameters
are projected a second time (TRAINED).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parameter import Parameter
from torch.optim import Optimizer

from bench import files
from bench.backends.base import Backend
from bench.files import replacing
from bench.measure.projection import (
    EXPECTED,
    MASKS,
    PARAMETERS,
    TRAINED,
    Part,
    Truth,
    Truths,
    project,
)

SECOND_MOMENT = "exp_avg_sq"
"""The key of AdamW's mean of squared gradients."""
NOISE = 1e-4
"""Elements of a smaller gradient, relative to the root mean square of all, are not among the
trained ones. In fp32 what should be 0, such as the gradient of the bias of an attention's keys, is
some 1e-7 of that; a tensor of small gradients, such as a table of rare tokens, some 1e-2."""
UNSEEN = ("foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer that say how it computes, and not what."""
MOST_SAMPLED = 2**18
"""Elements of a tensor in which lost digits are looked for."""
FEWEST_SAMPLED = 32
"""Elements other than 0 without which nothing is said of digits."""
LOW_BITS = 0xFFFF
"""The part of an fp32 number that bf16 has not."""
LEFT_OVER = 1e-3
"""Share of elements with digits that bf16 has not, below which a tensor counts as rounded to
bf16."""


class LocalPart(NamedTuple):
    """Consecutive elements of a tensor that a rank holds."""

    value: Tensor
    start: int
    """The place of the first element in the whole tensor."""


def _local(tensor: Tensor) -> LocalPart | None:
    """What this rank holds of a tensor; None if its elements are not consecutive."""
    if not isinstance(tensor, DTensor):
        return LocalPart(tensor, 0)
    placements = tensor.placements
    for placement in placements:
        if type(placement) is not Replicate and placement != Shard(0):
            return None
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, placements)
    first = 0
    if offset:
        first = offset[0]
    return LocalPart(tensor.to_local(), first * math.prod(tensor.shape[1:]))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


def _real(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor


@torch.no_grad()
def is_rounded(values: Tensor) -> bool:
    """Whether a sample of a tensor's elements has no digits that bf16 has not."""
    if values.dtype is torch.bfloat16:
        return True
    if values.dtype is not torch.float32:
        return False
    flat = values.flatten()
    sample = flat[:: max(1, len(flat) // MOST_SAMPLED)].cpu()
    sample = sample[sample != 0]
    if len(sample) < FEWEST_SAMPLED:
        return False
    left = (sample.view(torch.int32) & LOW_BITS) != 0
    return float(left.double().mean()) < LEFT_OVER


class Masks:
    """Which elements of each parameter are trained; without a file all are."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: set[str] = set()
        if path.exists():
            with safe_open(path, framework="np") as stored:
                self._names = set(stored.keys())

    def of(self, name: str, start: int, count: int) -> Tensor | None:
        """Whether each of ``count`` elements from ``start`` on is; None if the whole is trained."""
        if name not in self._names:
            return None
        first, last = start // 8, -(-(start + count) // 8)
        with safe_open(self._path, framework="np") as stored:
            packed = stored.get_slice(name)[first:last]
        bits = np.unpackbits(packed)[start - 8 * first :][:count]
        return torch.from_numpy(bits).bool()


def parameter_parts(
    after: Mapping[str, Tensor],
    names: Iterable[str],
    device: torch.device,
    *,
    kind: str = PARAMETERS,
    masks: Masks | None = None,
) -> Iterator[Part]:
    """Those of whole parameters. All of ``after`` is read, because gathering is collective."""
    known = set(names)
    for name in after:
        value = _real(after[name].detach())
        if name not in known or not value.is_floating_point():
            continue
        yield from _parts(kind, name, value, 0, device, masks)


def _parts(
    kind: str, name: str, value: Tensor, start: int, device: torch.device, masks: Masks | None
) -> Iterator[Part]:
    count = value.numel()
    if not count:
        return
    rounded = is_rounded(value)
    projections = project(value, start, device=device)
    yield Part(
        kind=kind,
        name=name,
        start=start,
        count=count,
        projections=projections,
        is_rounded=rounded,
    )
    if masks is None:
        return
    mask = masks.of(name, start, count)
    if mask is not None:
        projections = project(value, start, mask=mask, device=device)
    yield Part(kind=TRAINED, name=name, start=start, count=count, projections=projections)


class Projecting(Mapping[str, Tensor]):
    """Tensors by name, each of which is projected when it is read."""

    def __init__(
        self, after: Mapping[str, Tensor], names: Iterable[str], kind: str, device: torch.device
    ) -> None:
        self._after, self._names, self._kind, self._device = after, set(names), kind, device
        self.parts: list[Part] = []
        """Those of the tensors that have been read."""

    def __getitem__(self, name: str) -> Tensor:
        value = self._after[name]
        if name in self._names and value.is_floating_point():
            self.parts += _parts(self._kind, name, value.detach(), 0, self._device, None)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._after)

    def __len__(self) -> int:
        return len(self._after)


class FinalState:
    """What a rank holds at the end of a training.

    ``built`` is called with the model before the backend has it.
    """

    def __init__(self, reference: Path) -> None:
        """``reference``: the file of the reference's update."""
        self._reference = reference
        self._counts: dict[str, int] = {}

    def built(self, model: nn.Module) -> None:
        self.model = model
        self._counts = {name: parameter.numel() for name, parameter in model.named_parameters()}

    def projecting(
        self, after: Mapping[str, Tensor], kind: str, device: torch.device
    ) -> Projecting:
        """The parameters in ``after``, which are projected as they are read."""
        return Projecting(after, self._counts, kind, device)

    def read(
        self,
        backend: Backend,
        optimizers: Sequence[Optimizer],
        settings: Mapping[str, object],
        device: torch.device,
        *,
        whole: bool,
    ) -> dict[str, object]:
        """``parts``, the largest number of ``steps``, and ``settings`` other than the given ones.

        With ``whole``, the backend's gathered tensors too, which is collective: the parameters, and
        the state of an optimizer that steps something else. Without, what the tapped optimizers
        step. The result is plain JSON.
        """
        masks = Masks(self._reference.with_suffix(MASKS))
        parts = list(self._of_optimizers(optimizers, None if whole else masks))
        if whole:
            parts += parameter_parts(backend.full_parameters(), self._counts, device, masks=masks)
            state = backend.optimizer_state()
            for key in sorted(state):
                parts += parameter_parts(state[key], self._counts, device, kind=key)
        return {
            "parts": [asdict(part) for part in parts],
            "steps": most_steps(optimizers),
            "settings": other_settings(optimizers, settings),
            "whole": whole,
        }

    def _of_optimizers(
        self, optimizers: Sequence[Optimizer], masks: Masks | None
    ) -> Iterator[Part]:
        """What the tapped optimizers have stepped, and with ``masks`` the parameters too.

        A parameter of another size than it had at first has no name.
        """
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for parameter, state in _stepped(optimizers):
            name = names.get(id(parameter), "")
            if parameter.numel() != self._counts.get(name):
                name = ""
            held = _local(parameter.detach())
            if masks is not None and held is not None and parameter.is_floating_point():
                named = masks if name else None
                yield from _parts(
                    PARAMETERS, name, held.value, held.start, held.value.device, named
                )
            for key, tensor in _like(parameter, state).items():
                held = _local(tensor.detach())
                if held is not None:
                    value = _real(held.value)
                    yield from _parts(key, name, value, held.start, value.device, None)


def _like(parameter: Tensor, state: Mapping[str, object]) -> dict[str, Tensor]:
    """The state of a parameter that has its shape, by key."""
    if parameter.dim() == 0:
        return {}  # a count of steps has its shape, too
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return {key: tensor for key, tensor in tensors.items() if tensor.shape == parameter.shape}


def _stepped(optimizers: Sequence[Optimizer]) -> Iterator[tuple[Tensor, Mapping[str, object]]]:
    """The tensors that optimizers step, with their state.

    ZeRO-3 takes them out of the groups after each step.
    """
    for optimizer in optimizers:
        stepped: dict[int, Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                stepped[id(parameter)] = parameter
        for parameter in optimizer.state:
            stepped[id(parameter)] = parameter
        for parameter in stepped.values():
            yield parameter, optimizer.state.get(parameter, {})


def most_steps(optimizers: Sequence[Optimizer]) -> int | None:
    """The largest number of steps that an optimizer's own state counts; None if none counts."""
    counts: list[int] = []
    for _, state in _stepped(optimizers):
        step = state.get("step")
        if isinstance(step, int | float | Tensor):
            counts.append(int(step))
    return max(counts, default=None)


def other_settings(optimizers: Sequence[Optimizer], settings: Mapping[str, object]) -> list[str]:
    """Settings with which parameters were stepped and that are not the given ones, in words."""
    found: dict[str, None] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key, right in settings.items():
                if key not in UNSEEN and key in group and not _is_same(group[key], right):
                    found[f"{key} is {_plain(group[key])}, {_plain(right)} was due"] = None
    return list(found)


def _is_same(ours: object, right: object) -> bool:
    ours, right = _plain(ours), _plain(right)
    if isinstance(ours, float) and isinstance(right, float):
        return math.isclose(ours, right, rel_tol=1e-6)
    return bool(ours == right)


def _plain(value: object) -> object:
    """A setting as Python numbers: frameworks keep some as tensors, or as lists."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return value


def write_truth(
    path: Path, before: nn.Module, model: nn.Module, optimizer: Optimizer, windows: int
) -> None:
    """Write what the reference holds after ``windows`` windows, and which elements are trained.

    ``before`` is a model of the initial weights. The files are those of the reference's update,
    with the endings MASKS and EXPECTED.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    masks = _trained_elements(trained, optimizer)
    with replacing(path.with_suffix(MASKS), durable=True) as draft:
        save_file({name: mask for name, (mask, _) in masks.items()}, draft)
    initial = dict(before.named_parameters())
    found: dict[str, dict[str, Truth]] = {}

    def note(kind: str, name: str, value: Tensor, scale: float, mask: Tensor | None = None) -> None:
        found.setdefault(kind, {})[name] = Truth(
            count=value.numel(),
            projections=project(value, mask=mask),
            scale=scale,
            size=_norm(value),
            is_rounded=is_rounded(value),
        )

    for name, parameter in trained.items():
        value = _real(parameter.detach())
        change = value - _real(initial[name].detach().to(value.device))
        mask = None
        if name in masks:
            mask = masks[name][1].flatten()
            change = change.flatten() * mask
        note(TRAINED, name, value, _norm(change), mask)
        for key, tensor in _like(parameter, optimizer.state.get(parameter, {})).items():
            state = _real(tensor)
            note(key, name, state, _norm(state))
    truths = Truths(windows=windows, steps=most_steps([optimizer]), tensors=found)
    files.write(path.with_suffix(EXPECTED), json.dumps(asdict(truths)))


@torch.no_grad()
def _trained_elements(
    trained: Mapping[str, Parameter], optimizer: Optimizer
) -> dict[str, tuple[Tensor, Tensor]]:
    """Which elements of each parameter have a gradient of more than noise; none without AdamW.

    By parameter, as packed bits and as bools.
    """
    squares: dict[str, Tensor] = {}
    sums: list[float] = []
    count = 0
    for name, parameter in trained.items():
        state = optimizer.state.get(parameter, {})
        if SECOND_MOMENT not in state:
            continue
        square = squares[name] = _real(state[SECOND_MOMENT].detach())
        sums.append(float(square.double().sum()))
        count += square.numel()
    if not count:
        return {}
    mean = math.fsum(sums) / count
    found = {}
    for name, square in squares.items():
        mask = square > NOISE**2 * mean
        packed = np.packbits(mask.flatten().cpu().numpy())
        found[name] = torch.from_numpy(packed), mask
    return found
