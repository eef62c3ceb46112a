"""A Llama decoder from Hugging Face transformers, built from its config: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention

from bench.workload import WorkloadSpec
from bench.workload.corpus import Corpus, FileCorpus, MarkovCorpus
from bench.workload.sizes import SIZES


class LlamaWorkload:
    """Next-token prediction with a Llama decoder; see ``bench.workload.Workload`` for the methods."""

    def __init__(self, spec: WorkloadSpec) -> None:
        _keep_fused_in_fp32()
        self._spec = spec
        self._size = SIZES[spec.model]
        self._corpus: Corpus = MarkovCorpus(spec.seed) if spec.corpus is None else FileCorpus(spec.corpus, spec.seed)
        self.tokens_per_sample = spec.sequence_length
        self.entropy_floor = self._corpus.entropy_floor
        self.flops_per_sample: float | None = spec.sequence_length * self._size.flops_per_token(spec.sequence_length)

    def model(self) -> nn.Module:
        """A ``LlamaForCausalLM`` with SDPA attention and without dropout, biases or a key-value cache."""
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
        config._attn_implementation = "sdpa"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec.seed)
            model: nn.Module = LlamaForCausalLM(config).float().train()
        return model

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The decoder blocks; embedding, last norm and head form the root's unit."""
        return list(model.model.layers)  # type: ignore[union-attr, arg-type]

    def data(self, num_samples: int) -> Tensor:
        """Token ids, int64, shape [num_samples, sequence_length + 1]."""
        return torch.from_numpy(self._corpus.samples(num_samples, self._spec.sequence_length + 1))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, computed in fp32; every sample has equally many tokens."""
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _keep_fused_in_fp32() -> None:
    """Let attention in fp32 on CUDA use a fused kernel, as in bf16 and on the CPU.

    With fewer heads of keys than of queries, transformers asks SDPA to broadcast them (``enable_gqa``). In fp32 no
    fused kernel of CUDA can: SDPA falls back to the one that keeps all scores, S x S per head and layer, for the
    backward (pytorch#181528). There keys and values are repeated, as transformers does for masks and large heads.
    """
    if hasattr(sdpa_attention, "_bench_asked"):
        return
    asks: Any = sdpa_attention.use_gqa_in_sdpa

    def broadcasts(attention_mask: Tensor | None, key: Tensor, *more: Any) -> bool:
        return not (key.is_cuda and key.dtype is torch.float32) and bool(asks(attention_mask, key, *more))

    sdpa_attention.use_gqa_in_sdpa = broadcasts  # type: ignore[assignment]
    sdpa_attention._bench_asked = asks  # type: ignore[attr-defined]
