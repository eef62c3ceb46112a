"""A sketch of a tensor: its norm, signed sums, some of its elements, and a hash of its bits.

The signed sums are a count sketch (Charikar, Chen and Farach-Colton 2002): element i is added to
sum i mod 64 with a sign that depends on i div 64. They are linear, so those of a difference are the
difference of sketches, and the sum of their squares estimates the squared norm with a relative
standard deviation of sqrt(2 / 64). Each piece of a tensor is read three times while it is in a
cache, and what is kept of it does not grow with it. Nothing waits for a device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...command.inside.graph_survey import plain
from .state_records import BUCKETS, COORDINATES, WIDTH

ROWS = 4096
"""Rows of signed sums that are added in the dtype of the tensor; their sums are added in double
precision."""
CHUNK = 4
"""Blocks of so many rows that are read at once: 4 MiB of fp32."""
INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
"""By bytes per element."""


class LiveSketch(NamedTuple):
    """A sketch whose numbers are still on the device of its tensor."""

    values: Tensor
    """WIDTH doubles."""
    bits: Tensor
    """A hash, as an integer."""


@functools.cache
def _signs(count: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Signs from a generator of our own: the global one belongs to the training."""
    generator = torch.Generator("cpu").manual_seed(seed)
    signs = torch.randint(2, (count,), generator=generator) * 2 - 1
    return signs.to(device=device, dtype=dtype)


@functools.cache
def _places(size: int, device: torch.device) -> Tensor:
    """The coordinates of tensors of a size."""
    if size <= COORDINATES:
        return torch.arange(size).to(device)
    generator = torch.Generator("cpu").manual_seed(size)
    return torch.randint(size, (COORDINATES,), generator=generator).to(device)


def stored_parts(tensor: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """What of a tensor is stored on this rank, each with what its name has more than the tensor's.

    A tensor that is quantized has its codes and scales; of None there is one without elements.
    """
    if tensor is None:
        yield "", torch.zeros(0)
        return
    local = plain(tensor)
    is_awaited = type(local).__module__.startswith("torch.distributed")  # waits when it is read
    if is_awaited or not hasattr(local, "__tensor_flatten__"):
        yield "", local
        return
    names, _ = local.__tensor_flatten__()
    for name in names:
        for ending, part in stored_parts(getattr(local, name)):
            yield f".{name}{ending}", part


def is_readable(tensor: Tensor) -> bool:
    """Whether a tensor has elements: FSDP2 and ZeRO-3 free those of parameters not in use."""
    if tensor.is_sparse:
        return bool(tensor._nnz())
    if tensor.device.type == "meta":
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() > 0


def sketch(tensor: Tensor) -> LiveSketch:
    """Of all elements of a tensor that are on this rank."""
    flat = plain(tensor).detach()
    if flat.is_sparse:
        flat = flat.coalesce().to_dense()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.contiguous().reshape(-1)
    values = torch.zeros(WIDTH, dtype=torch.float64, device=flat.device)
    size = flat.numel()
    if not size:
        return LiveSketch(values, torch.zeros((), dtype=torch.int64, device=flat.device))
    step = BUCKETS * ROWS * CHUNK
    squares = torch.zeros((), dtype=torch.float64, device=flat.device)
    bits = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, start in enumerate(range(0, size, step)):
        stored = flat[start : start + step]
        bits += _hash(stored)
        part = _for_sums(stored)
        squares += torch.linalg.vector_norm(part).double() ** 2
        outer = _signs(4096, 1, flat.device, torch.float64)[number % 4096]
        values[1 : 1 + BUCKETS] += outer * _signed_sums(part)
    values[0] = squares.sqrt()
    places = _places(size, flat.device)
    values[1 + BUCKETS : 1 + BUCKETS + len(places)] = flat[places].double()
    return LiveSketch(values, bits)


def hash_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """A hash of the bits of all of them, or None if they have no elements."""
    total: Tensor | None = None
    for tensor in tensors:
        for _, part in stored_parts(tensor.detach()):
            if not is_readable(part) or part.is_complex():
                continue
            bits = _hash(part.contiguous().reshape(-1))
            if total is None:
                total = bits
            else:
                total = total + bits.to(total.device, non_blocking=True)
    return total


def _for_sums(part: Tensor) -> Tensor:
    """In fp32, or in double precision what is an integer or has it already."""
    if part.dtype == torch.float64:
        return part
    if part.is_floating_point():
        return part.float()
    return part.double()


def _signed_sums(part: Tensor) -> Tensor:
    """Of at most CHUNK blocks of rows, as BUCKETS doubles."""
    signs = _signs(ROWS, 2, part.device, part.dtype)
    block = BUCKETS * ROWS
    blocks = part.numel() // block
    sums = torch.zeros(BUCKETS, dtype=torch.float64, device=part.device)
    if blocks:
        rows = part[: blocks * block].view(blocks, ROWS, BUCKETS)
        outer = _signs(CHUNK + 1, 3, part.device, torch.float64)[:blocks]
        sums += outer @ _add_rows(signs, rows).double()
    rest = part[blocks * block :]
    count = rest.numel() // BUCKETS
    last = _signs(CHUNK + 1, 3, part.device, torch.float64)[blocks]
    if count:
        rows = rest[: count * BUCKETS].view(1, count, BUCKETS)
        sums += last * _add_rows(signs[:count], rows)[0].double()
    end = rest[count * BUCKETS :]
    if end.numel():
        place = min(count, ROWS - 1)
        sums[: end.numel()] += last * signs[place].double() * end.double()
    return sums


def _add_rows(signs: Tensor, rows: Tensor) -> Tensor:
    """Signed sums of rows, per block.

    A matrix product of CUDA may round to TF32, one of elements does not.
    """
    if rows.device.type == "cpu":
        return torch.matmul(signs, rows)
    return (rows * signs[:, None]).sum(1)


def _hash(flat: Tensor) -> Tensor:
    """The sum of the bits as integers of 8 bytes, the fastest to add.

    What it misses, elements that have changed places, the signed sums see.
    """
    if flat.dtype == torch.bool:
        flat = flat.to(torch.int8)
    size = flat.element_size()
    if size not in INTEGERS:
        return torch.zeros((), dtype=torch.int64, device=flat.device)
    together = 8 // size
    if flat.storage_offset() % together:
        flat = flat.clone()
    whole = flat.numel() // together * together
    bits = flat[:whole].view(torch.int64).sum()
    return bits + flat[whole:].view(INTEGERS[size]).sum(dtype=torch.int64)
