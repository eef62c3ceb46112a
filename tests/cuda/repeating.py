"""The shipped model with defects that only CUDA has."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from bench.workload import WorkloadSpec, llama


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As ``llama.attend``, but asks for the dtype of the keys in place of that of the values.

    Keys are in fp32 under autocast, which DDP and Lightning compute in, and not for backends that compute with bf16
    copies.
    """
    if (key.device.type, key.dtype) == llama.REPEATED:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return llama.attend(module, query, key, value, attention_mask, **options)


def repeating(spec: WorkloadSpec) -> llama.LlamaWorkload:
    AttentionInterface.register(llama.ATTENTION, attend)
    return llama.LlamaWorkload(spec)


def repeat_in_turn(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As ``llama.attend``, but on CUDA the key heads follow each other in the wrong order."""
    if key.device.type == "cuda":
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat(1, repeats, 1, 1), value.repeat(1, repeats, 1, 1)
    return llama.attend(module, query, key, value, attention_mask, **options)


def in_turn(spec: WorkloadSpec) -> llama.LlamaWorkload:
    AttentionInterface.register(llama.ATTENTION, repeat_in_turn)
    return llama.LlamaWorkload(spec)
