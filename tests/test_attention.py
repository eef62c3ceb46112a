"""Attention of the shipped model: a fused kernel in fp32 on CUDA too, and on the CPU what transformers does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.integrations import sdpa_attention

from bench.workload import load
from tests.factories import make_cell


def key(dtype: torch.dtype, *, is_cuda: bool) -> Any:
    """What is asked of a tensor of keys; there is no GPU here."""
    return SimpleNamespace(dtype=dtype, is_cuda=is_cuda, shape=(1, 2, 8, 64))


@pytest.mark.parametrize(
    ("dtype", "is_cuda", "broadcasts"),
    [
        (torch.float32, True, False),
        (torch.bfloat16, True, True),
        (torch.float32, False, True),
        (torch.bfloat16, False, True),
    ],
)
def test_heads_are_broadcast_but_in_fp32_on_cuda(dtype: torch.dtype, is_cuda: bool, broadcasts: bool) -> None:
    load(make_cell(model="micro"), None)
    one = key(dtype, is_cuda=is_cuda)
    assert sdpa_attention.use_gqa_in_sdpa(None, one, one) is broadcasts
    assert sdpa_attention.use_gqa_in_sdpa(torch.ones(1), one, one) is False, "with a mask it is as it was"


def test_what_transformers_asks_is_replaced_once() -> None:
    load(make_cell(model="micro"), None)
    first = sdpa_attention.use_gqa_in_sdpa
    load(make_cell(model="micro"), None)
    assert sdpa_attention.use_gqa_in_sdpa is first


def test_repeated_heads_attend_as_broadcast_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fp32 on CUDA does instead, done here: the same losses and gradients."""
    workload = load(make_cell(model="micro", sequence_length=16), None)
    batch, found = workload.data(2), []
    for broadcasts in (True, False):
        asked: list[bool] = []
        monkeypatch.setattr(
            sdpa_attention, "use_gqa_in_sdpa", lambda *_, b=broadcasts, asked=asked: asked.append(b) or b
        )
        model = workload.model()
        loss = workload.loss(model, batch)
        loss.backward()
        assert asked, "transformers asks under this name"
        found.append((loss.item(), [p.grad for p in model.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
