"""A Llama decoder of transformers, built from its config without a download, and its tokens.

The tokens are those of a Markov chain with a known entropy rate, or the bytes of a file. Both use
token ids below 256, which every model's vocabulary contains. ``samples(count, length)`` returns
samples 0 to ``count`` - 1 as token ids of shape [count, length]; sample i does not depend on
``count``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from bench.plan.models import SIZES
from bench.workload import WorkloadSpec

MARKOV_TOKENS = 32
"""Number of distinct tokens of the Markov source: few, so that short runs already learn."""


class MarkovCorpus:
    """A stationary first-order Markov chain over the tokens 0 to 31.

    Each row of the transition matrix is drawn from a symmetric Dirichlet distribution; its small
    concentration makes it peaked, so that there is something to learn. Samples start from the
    stationary distribution.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rows = np.random.default_rng([seed, 1]).dirichlet(
            np.full(MARKOV_TOKENS, 0.1), size=MARKOV_TOKENS
        )
        # Mixing in the uniform distribution makes the chain ergodic, so the stationary distribution
        # is unique.
        self.transitions: NDArray[np.float64] = 0.99 * rows + 0.01 / MARKOV_TOKENS

    @cached_property
    def stationary(self) -> NDArray[np.float64]:
        """The distribution pi with pi P = pi and sum(pi) = 1, shape [32]."""
        system = np.vstack([self.transitions.T - np.eye(MARKOV_TOKENS), np.ones(MARKOV_TOKENS)])
        solution = np.linalg.lstsq(system, np.append(np.zeros(MARKOV_TOKENS), 1.0), rcond=None)[0]
        return np.asarray(solution / solution.sum(), dtype=np.float64)

    @cached_property
    def entropy_floor(self) -> float:
        """Entropy rate in nats per token: -sum_i pi_i sum_j P_ij ln P_ij.

        Cover and Thomas, "Elements of Information Theory", theorem 4.2.4.
        """
        row_entropy = -(self.transitions * np.log(self.transitions)).sum(axis=1)
        return float(self.stationary @ row_entropy)

    def samples(self, count: int, length: int) -> NDArray[np.int64]:
        """Draw by inverting the cumulative distributions.

        All samples advance together, one position at a time.
        """
        uniform = np.random.default_rng([self._seed, 2]).random((count, length))
        # Row i's cumulative distribution lies in (i, i + 1], so one sorted array serves all rows at
        # once.
        steps = np.cumsum(self.transitions, axis=1)
        table = (steps / steps[:, -1:] + np.arange(MARKOV_TOKENS)[:, None]).ravel()
        start = np.cumsum(self.stationary)
        tokens = np.empty((count, length), dtype=np.int64)
        tokens[:, 0] = np.minimum(
            np.searchsorted(start / start[-1], uniform[:, 0], side="right"), MARKOV_TOKENS - 1
        )
        for position in range(1, length):
            state = tokens[:, position - 1]
            found = (
                np.searchsorted(table, uniform[:, position] + state, side="right")
                - state * MARKOV_TOKENS
            )
            tokens[:, position] = np.clip(found, 0, MARKOV_TOKENS - 1)
        return tokens


class FileCorpus:
    """The bytes of a file; sample i starts at a seeded random position. Its entropy is unknown."""

    entropy_floor: float | None = None

    def __init__(self, path: Path, seed: int) -> None:
        self._bytes = np.fromfile(path, dtype=np.uint8)
        self._seed = seed

    def samples(self, count: int, length: int) -> NDArray[np.int64]:
        uniform = np.random.default_rng([self._seed, 3]).random(count)
        starts = (uniform * (len(self._bytes) - length + 1)).astype(np.int64)
        tokens: NDArray[np.int64] = self._bytes[starts[:, None] + np.arange(length)].astype(
            np.int64
        )
        return tokens


ATTENTION = "bench"
"""Name under which transformers finds ``attend``.

For an unknown attention it creates no masks and does not check for packed sequences; that check
would synchronize with the device in every micro-batch
(transformers/masking_utils.py:_preprocess_mask_arguments). """
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
        self.flops_per_sample: float | None = spec.sequence_length * self._size.flops_per_token(
            spec.sequence_length
        )

    def model(self) -> nn.Module:
        """A ``LlamaForCausalLM`` with SDPA, without dropout, biases or a key-value cache."""
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
        # The accelerator's generator is only touched where weights are drawn there;
        # torch.manual_seed would seed both.
        device = torch.get_default_device()
        drawn_by, device_type = [device], device.type
        if device.type in ("cpu", "meta"):
            drawn_by, device_type = [], "cuda"
        with torch.random.fork_rng(drawn_by, device_type=device_type):
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
        """Mean cross-entropy in nats per token, computed in fp32.

        All samples have the same number of tokens.
        """
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Causal attention in a fused kernel.

    From [batch, heads, tokens, head size] to [batch, tokens, heads, head size].

    With fewer key heads than query heads, SDPA broadcasts them (``enable_gqa``). No fused CUDA
    kernel supports that in fp32: SDPA falls back to the math kernel, which keeps all S x S scores
    per head and layer for the backward (pytorch#181528). There keys and values are repeated
    instead. The dtype checked is that of the values: under autocast, queries and keys leave the
    rotary embedding in fp32, and SDPA casts them.
    """
    if (value.device.type, value.dtype) == REPEATED:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    output = scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2), None


AttentionInterface.register(ATTENTION, attend)
