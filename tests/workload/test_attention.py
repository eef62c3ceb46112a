"""Attention of the shipped model: alike under autocast and for copies, fused in fp32 on CUDA too, never waiting."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.workload import llama, load
from tests.factories import make_cell


class Named(TorchDispatchMode):
    """The operators, by name and shapes of their tensors, but for those that only cast."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten._to_copy.default:
            self.found.append(f"{func} {[list(a.shape) for a in args if isinstance(a, Tensor)]}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("device", "dtype", "heads"),
    [
        ("cuda", torch.float32, 6),
        ("cuda", torch.bfloat16, 2),
        ("cpu", torch.float32, 2),
        ("cpu", torch.bfloat16, 2),
    ],
)
def test_heads_are_broadcast_but_in_fp32_on_cuda(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, heads: int
) -> None:
    """Queries and keys are fp32 in all, as they are under autocast; there is no GPU here."""
    given: list[Tensor] = []
    monkeypatch.setattr(
        llama, "scaled_dot_product_attention", lambda *qkv, **_: given.extend(qkv) or qkv[0]
    )
    with FakeTensorMode():
        query, key = (
            torch.empty(1, 6, 8, 64, device=device),
            torch.empty(1, 2, 8, 64, device=device),
        )
        llama.attend(torch.nn.Identity(), query, key, key.to(dtype), None, scaling=0.125)
    assert [tensor.shape[1] for tensor in given] == [6, heads, heads]


def test_autocast_and_copies_compute_alike_and_read_nothing() -> None:
    """What is read from a tensor waits for the device: transformers does, to see whether sequences are packed."""
    workload = load(make_cell(model="micro", sequence_length=16), None)
    found = {}
    for autocast in (True, False):
        model = workload.model() if autocast else workload.model().bfloat16()
        with Named() as named:
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = workload.loss(model, workload.data(2))
            loss.backward()
        found[autocast] = sorted(named.found)
    assert not [name for name in found[True] if "_local_scalar_dense" in name]
    assert found[True] == found[False]
