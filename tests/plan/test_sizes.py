"""Shapes of the models: published parameter counts, the FLOPs that torch counts, the same weights for everyone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.errors import InputError
from bench.plan.models import SHAPES, SIZES, LlamaSize, shape_of
from bench.workload import WorkloadSpec
from bench.workload.layout import llama_layout

PUBLISHED = {"135m": 134_515_008, "1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248}
"""Parameters as the models' authors count them, a tied weight once."""
PUBLISHED_SHAPES = {
    "tinyllama-1.1b": 1_100_048_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}
SMALL = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": {},
    "mistral": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 32},
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
    },
}
"""A small config of each kind of model whose layout is known, beside SMALL."""


def config_of(tmp_path: Path, **values: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(values))
    return f"hf:{tmp_path}"


@pytest.fixture(scope="module")
def llama() -> Any:
    """The tiny model's workload; its imports take seconds, so it is made once."""
    from bench.workload.llama import LlamaWorkload

    return LlamaWorkload(WorkloadSpec(model="tiny", sequence_length=8, seed=3, corpus=None))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name: str) -> None:
    assert SIZES[name].num_parameters == PUBLISHED[name]


def test_published_parameter_counts_of_what_is_only_predicted() -> None:
    assert {name: shape.num_parameters for name, shape in SHAPES.items()} == PUBLISHED_SHAPES


@pytest.mark.torch
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_layout_of_a_config_is_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """Names and shapes of all parameters, in order, and which one backward finishes when."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    values = SMALL | FAMILIES[kind]
    shape = shape_of(config_of(tmp_path, model_type=kind, **values))
    assert isinstance(shape, LlamaSize)
    config = CONFIG_MAPPING[kind](**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    layout = llama_layout(shape)
    assert [(p.name, p.shape) for p in layout.parameters] == [
        (name, tuple(parameter.shape)) for name, parameter in model.named_parameters()
    ]
    assert sorted(layout.gradients) == list(range(len(layout.parameters)))
    assert shape.num_parameters == layout.num_parameters


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_bias": True}, "attention_bias is True; only False is known"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be"),
        ({"vocab_size": None}, "vocab_size is 0; it must be"),
        ({"model_type": "gemma3"}, "the layout of model_type 'gemma3' is unknown"),
    ],
)
def test_a_config_of_another_layout_is_refused_in_one_line(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"config.json: {words}"):
        shape_of(config_of(tmp_path, **({"model_type": "llama"} | SMALL | changes)))


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


@pytest.mark.torch
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
