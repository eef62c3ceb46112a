"""A causal language model of transformers, built from a config (``hf:CONFIG``), not downloaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from bench.errors import InputError, suggest
from bench.workload import WorkloadSpec
from bench.workload.llama import FileCorpus, MarkovCorpus

RANDOM = ("dropout", "pdrop", "layerdrop", "jitter_noise")
"""Parts of the names of a config's numbers that make a training draw random numbers."""
EXPERTS = "batched_mm"
"""How experts are computed: in operators whose shapes do not depend on which tokens they get
(transformers/integrations/moe.py)."""
TOKENS = 256
"""Token ids of the corpora are below this."""


class CausalWorkload:
    """Next-token prediction with any decoder that transformers has.

    Methods as in ``bench.workload.Workload``. Weights are drawn from the seed, and all dropout is
    off.
    """

    flops_per_sample: float | None = None

    def __init__(self, spec: WorkloadSpec, values: Mapping[str, Any], place: str) -> None:
        """``values`` are those of a ``config.json``, ``place`` its path.

        Raises InputError for models of other kinds.
        """
        self._spec = spec
        kind = values["model_type"]
        if kind not in CONFIG_MAPPING:
            raise InputError(
                f"{place}: model_type '{kind}' is unknown to transformers; "
                f"{suggest(kind, CONFIG_MAPPING)}"
            )
        self._config = CONFIG_MAPPING[kind].from_dict(dict(values))
        if type(self._config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise InputError(
                f"{place}: transformers has no causal language model of model_type '{kind}'; "
                "for another kind write a workload: docs/matrix.md#a-model-of-your-own"
            )
        _disable_randomness(self._config)
        self._config.use_cache = False
        text = self._config.get_text_config()
        longest = getattr(text, "max_position_embeddings", None)
        if longest is not None and spec.sequence_length > longest:
            raise InputError(
                f"{place}: max_position_embeddings is {longest}, fewer than the "
                f"{spec.sequence_length} tokens of a sample; give --sequence {longest} or less"
            )
        if text.vocab_size < TOKENS:
            raise InputError(
                f"{place}: vocab_size is {text.vocab_size}; the corpora need at least {TOKENS}"
            )
        self._corpus: MarkovCorpus | FileCorpus = MarkovCorpus(spec.seed)
        if spec.corpus is not None:
            self._corpus = FileCorpus(spec.corpus, spec.seed)
        self.tokens_per_sample = spec.sequence_length
        self.entropy_floor = self._corpus.entropy_floor

    def model(self) -> nn.Module:
        """The model in fp32 and training mode, with weights drawn from the seed."""
        made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(self._config)]
        if isinstance(made, tuple):
            made = made[0]
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self._spec.seed)
            model: Any = made._from_config(self._config, dtype=torch.float32)
        if model._can_set_experts_implementation():
            model.set_experts_implementation(EXPERTS)
        found: nn.Module = model.train()
        return found

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """The modules of the longest ModuleList that is in no other.

        So the layers, and not the experts of one.
        """
        longest: list[nn.Module] = []
        lists: list[str] = []
        for name, module in model.named_modules():  # each before those in it
            if not isinstance(module, nn.ModuleList):
                continue
            is_inner = any(name.startswith(f"{outer}.") for outer in lists)
            lists.append(name)
            if not is_inner and len(module) > len(longest):
                longest = list(module)
        return longest

    def data(self, num_samples: int) -> Tensor:
        """Token ids, int64, shape [num_samples, sequence_length + 1]."""
        return torch.from_numpy(self._corpus.samples(num_samples, self._spec.sequence_length + 1))

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, computed in fp32.

        All samples have the same number of tokens.
        """
        logits = model(input_ids=batch[:, :-1]).logits
        return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def _disable_randomness(config: PreTrainedConfig) -> None:
    """Set every rate of dropout and noise of a config, and of the configs in it, to 0."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _disable_randomness(value)
        elif (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and any(word in name for word in RANDOM)
        ):
            setattr(config, name, 0.0)
