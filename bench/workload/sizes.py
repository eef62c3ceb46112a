"""Shapes of the Llama decoders, and the counts that follow from them. No torch here: the plan needs these."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaSize:
    """The shape of a Llama decoder, in the terms of its Hugging Face config."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    """Whether the output head shares the embedding's weight."""
    rope_theta: float = 10_000.0

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one decoder block: attention, gated MLP and two norms; no biases."""
        attention = self.hidden_size * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """P: all parameters, a tied weight counted once."""
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied else 2)
        return embeddings + self.num_layers * self.num_block_parameters + self.hidden_size

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs per token of forward and backward.

        6 per weight of every matrix product (the head counted even if tied, the embedding's look-up not) and
        12 x layers x heads x head size x sequence length for attention, causality not deducted: PaLM
        (arXiv:2204.02311), appendix B. Recomputation is not counted, so this is for MFU, not for HFU.
        """
        matrices = self.num_layers * (self.num_block_parameters - 2 * self.hidden_size)
        matrices += self.vocab_size * self.hidden_size
        attention = 12 * self.num_layers * self.num_heads * self.head_size * sequence_length
        return 6.0 * matrices + attention


SIZES = {
    "micro": LlamaSize(
        hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate_size=176, vocab_size=256, tied=False
    ),
    "tiny": LlamaSize(
        hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, intermediate_size=704, vocab_size=256, tied=False
    ),
    "135m": LlamaSize(
        hidden_size=576,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        intermediate_size=1536,
        vocab_size=49_152,
        tied=True,
        rope_theta=100_000.0,
    ),
    "1b": LlamaSize(
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=8192,
        vocab_size=128_256,
        tied=True,
        rope_theta=500_000.0,
    ),
    "3b": LlamaSize(
        hidden_size=3072,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        intermediate_size=8192,
        vocab_size=128_256,
        tied=True,
        rope_theta=500_000.0,
    ),
    "8b": LlamaSize(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        intermediate_size=14_336,
        vocab_size=128_256,
        tied=False,
        rope_theta=500_000.0,
    ),
}
"""``micro`` and ``tiny`` are ours.

``135m`` has SmolLM2-135M's shape, ``1b`` and ``3b`` Llama-3.2's, ``8b`` Llama-3.1's."""
