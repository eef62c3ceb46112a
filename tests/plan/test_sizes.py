"""Shapes of the models: published parameter counts, the FLOPs that torch counts, the same weights for everyone."""

from __future__ import annotations

from typing import Any

import pytest

from bench.plan.models import SIZES
from bench.workload import WorkloadSpec

PUBLISHED = {"135m": 134_515_008, "1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248}
"""Parameters as the models' authors count them, a tied weight once."""


@pytest.fixture(scope="module")
def llama() -> Any:
    """The tiny model's workload; its imports take seconds, so it is made once."""
    from bench.workload.llama import LlamaWorkload

    return LlamaWorkload(WorkloadSpec(model="tiny", sequence_length=8, seed=3, corpus=None))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    assert SIZES[name].num_parameters == PUBLISHED[name]


@pytest.mark.torch
def test_flops_are_those_that_torch_counts(llama: Any) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = llama.model(), llama.data(3)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = llama.loss(model, batch)
        loss.backward()
    assert counter.get_total_flops() == 3 * llama.flops_per_sample
    assert loss.item() == pytest.approx(5.55, abs=0.5), (
        "an untrained model knows nothing of 256 tokens: ln 256 = 5.55"
    )


def test_the_same_weights_for_everyone(llama: Any) -> None:
    import torch

    torch.manual_seed(11)
    expected_next = torch.rand(1)
    torch.manual_seed(11)
    first = llama.model().state_dict()
    assert torch.equal(torch.rand(1), expected_next), (
        "building a model must not move the global random state"
    )
    second = llama.model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {value.dtype for value in first.values()} == {torch.float32}
    other = (
        type(llama)(WorkloadSpec(model="tiny", sequence_length=8, seed=4, corpus=None))
        .model()
        .state_dict()
    )
    assert any(not torch.equal(first[name], other[name]) for name in first)
