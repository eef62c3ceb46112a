"""A Llama decoder from Hugging Face transformers, built from its config without a download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from bench.plan.models import SIZES
from bench.workload import WorkloadSpec
from bench.workload.corpus import FileCorpus, MarkovCorpus

ATTENTION = "bench"
"""Name under which transformers finds ``attend``.

For an unknown attention it creates no masks and does not check for packed sequences; that check would synchronize with
the device in every micro-batch (transformers/masking_utils.py:_preprocess_mask_arguments).
"""
REPEATED = ("cuda", torch.float32)
"""Device and dtype for which keys and values are repeated for every query head; see ``attend``."""


class LlamaWorkload:
    """Next-token prediction with a Llama decoder; methods as in ``bench.workload.Workload``."""

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        self._size = SIZES[spec.model]
        self._corpus: MarkovCorpus | FileCorpus = MarkovCorpus(spec.seed)
        if spec.corpus is not None:
            self._corpus = FileCorpus(spec.corpus, spec.seed)
        self.tokens_per_sample = spec.sequence_length
        self.entropy_floor = self._corpus.entropy_floor
        self.flops_per_sample: float | None = spec.sequence_length * self._size.flops_per_token(spec.sequence_length)

    def model(self) -> nn.Module:
        """A ``LlamaForCausalLM`` with SDPA attention, without dropout, biases or a key-value cache."""
        size = self._size
        config = LlamaConfig(
            hidden_size=size.hidden_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_kv_heads,
            intermediate_size=size.intermediate_size,
            vocab_size=size.vocab_size,
            tie_word_embeddings=size.tied,
            max_position_embeddings=max(2048, self._spec.sequence_length),
            rope_parameters={"rope_type": "default", "rope_theta": size.rope_theta},
            use_cache=False,
        )
        config._attn_implementation = ATTENTION
        # The accelerator's generator is only touched where weights are drawn there; torch.manual_seed would seed both.
        device = torch.get_default_device()
        drawn_by = [] if device.type in ("cpu", "meta") else [device]
        with torch.random.fork_rng(drawn_by, device_type=drawn_by[0].type if drawn_by else "cuda"):
            torch.default_generator.manual_seed(self._spec.seed)
            if drawn_by:
                torch.get_device_module(device).manual_seed(self._spec.seed)
            model: nn.Module = LlamaForCausalLM(config).float().train()
        return model

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The decoder blocks; embedding, final norm and head form the root unit."""
        return list(model.model.layers)  # type: ignore[union-attr, arg-type]

    def data(self, num_samples: int) -> Tensor:
        """Token ids, int64, shape [num_samples, sequence_length + 1]."""
        return torch.from_numpy(self._corpus.samples(num_samples, self._spec.sequence_length + 1))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, computed in fp32; all samples have the same number of tokens."""
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Causal attention in a fused kernel: [batch, heads, tokens, head size] to [batch, tokens, heads, head size].

    With fewer key heads than query heads, SDPA broadcasts them (``enable_gqa``). No fused CUDA kernel supports that in
    fp32: SDPA falls back to the math kernel, which keeps all S x S scores per head and layer for the backward
    (pytorch#181528). There keys and values are repeated instead. The dtype checked is that of the values: under
    autocast, queries and keys leave the rotary embedding in fp32, and SDPA casts them.
    """
    if (value.device.type, value.dtype) == REPEATED:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)
