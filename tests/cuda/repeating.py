"""The shipped model with a defect: keys and values are repeated for every head where keys are fp32 on CUDA.

Keys are so under autocast, which DDP and Lightning compute in, and not for backends that compute with bf16 copies.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from bench.workload import WorkloadSpec, llama


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, **options: Any
) -> tuple[Tensor, None]:
    """As ``llama.attend``, but asks for the dtype of the keys in place of that of the values."""
    if (key.device.type, key.dtype) == llama.REPEATED:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    return llama.attend(module, query, key, value, attention_mask, **options)


def repeating(spec: WorkloadSpec) -> llama.LlamaWorkload:
    AttentionInterface.register(llama.ATTENTION, attend)
    return llama.LlamaWorkload(spec)
