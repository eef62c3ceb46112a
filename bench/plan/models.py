"""Model sizes, workload factories and corpus files that a matrix may name, without torch."""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench import files
from bench.errors import InputError, listed, shown, suggest


@dataclass(frozen=True, slots=True)
class LlamaSize:
    """The shape of a decoder of Llama's kind, in terms of its Hugging Face config.

    What is shipped and trained is plain Llama. The other fields describe relatives, which are only
    predicted.
    """

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    """Of the MLP, or of one expert."""
    vocab_size: int
    tied: bool
    """Whether the output head shares the embedding's weight."""
    rope_theta: float = 10_000.0
    head_dim: int = 0
    """0 if the hidden size is split over the heads."""
    norms_heads: bool = False
    """Whether each head's query and key is normalized, as in Qwen3."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in Qwen2."""
    num_experts: int = 0
    """0 for one MLP."""
    experts_per_token: int = 1

    @property
    def head_size(self) -> int:
        if self.head_dim:
            return self.head_dim
        return self.hidden_size // self.num_heads

    @property
    def num_matrix_parameters(self) -> int:
        """Parameters of a decoder block's matrices: attention, MLP or experts, and their router."""
        attention = self.hidden_size * self.head_size * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.num_experts:
            mlp = self.num_experts * (mlp + self.hidden_size)
        return attention + mlp

    @property
    def num_active_parameters(self) -> int:
        """Parameters of a block's matrices that multiply a token: of experts, its own."""
        unused = self.num_experts - self.experts_per_token
        if not self.num_experts:
            return self.num_matrix_parameters
        return self.num_matrix_parameters - unused * 3 * self.hidden_size * self.intermediate_size

    @property
    def num_block_parameters(self) -> int:
        """Parameters of one decoder block: its matrices, norms and biases."""
        others = 2 * self.hidden_size
        if self.norms_heads:
            others += 2 * self.head_size
        if self.qkv_bias:
            others += self.head_size * (self.num_heads + 2 * self.num_kv_heads)
        return self.num_matrix_parameters + others

    @property
    def num_parameters(self) -> int:
        """P: all parameters, tied weights counted once."""
        embeddings = self.vocab_size * self.hidden_size
        if not self.tied:
            embeddings *= 2
        return embeddings + self.num_layers * self.num_block_parameters + self.hidden_size

    def flops_per_token(self, sequence_length: int) -> float:
        """Model FLOPs per token of forward and backward (PaLM, arXiv:2204.02311, appendix B).

        6 per weight of every matrix product (including a tied head, excluding the embedding
        lookup), plus 12 x layers x heads x head size x sequence length for attention, without
        deducting causality. Recomputation is not counted, so this gives MFU, not HFU.
        """
        matrices = self.num_layers * self.num_active_parameters
        matrices += self.vocab_size * self.hidden_size
        attention = 12 * self.num_layers * self.num_heads * self.head_size * sequence_length
        return 6.0 * matrices + attention

    def recomputed_flops_per_token(self, sequence_length: int, *, selective: bool = False) -> float:
        """FLOPs per token that activation checkpointing adds: the forward of all blocks.

        That is a third of their model FLOPs.

        This is full recomputation (Korthikanti et al., arXiv:2205.05198, appendix A); the head is
        not recomputed. A selective one recomputes three of a block's seven products: keys, the
        output of attention, the MLP's second.
        """
        if selective:
            sizes = (self.num_heads + self.num_kv_heads) * self.head_size + self.intermediate_size
            return 2.0 * self.num_layers * self.hidden_size * sizes
        in_head = 6.0 * self.vocab_size * self.hidden_size
        return (self.flops_per_token(sequence_length) - in_head) / 3


SIZES = {
    "micro": LlamaSize(64, 2, 2, 1, 176, 256, tied=False),
    "mini": LlamaSize(192, 2, 4, 2, 512, 256, tied=False),
    "tiny": LlamaSize(256, 4, 4, 2, 704, 256, tied=False),
    "135m": LlamaSize(576, 30, 9, 3, 1536, 49_152, tied=True, rope_theta=100_000.0),
    "1b": LlamaSize(2048, 16, 32, 8, 8192, 128_256, tied=True, rope_theta=500_000.0),
    "3b": LlamaSize(3072, 28, 24, 8, 8192, 128_256, tied=True, rope_theta=500_000.0),
    "8b": LlamaSize(4096, 32, 32, 8, 14_336, 128_256, tied=False, rope_theta=500_000.0),
}
"""``micro``, ``mini`` and ``tiny`` are our own; ``135m`` has the shape of SmolLM2-135M, ``1b`` and
``3b`` of Llama-3.2, ``8b`` of Llama-3.1."""

SHAPES = {
    "tinyllama-1.1b": LlamaSize(2048, 22, 32, 4, 5632, 32_000, tied=False),
    "llama-2-7b": LlamaSize(4096, 32, 32, 32, 11_008, 32_000, tied=False),
    "llama-2-13b": LlamaSize(5120, 40, 40, 40, 13_824, 32_000, tied=False),
    "llama-2-70b": LlamaSize(8192, 80, 64, 8, 28_672, 32_000, tied=False),
    "llama-3.1-70b": LlamaSize(8192, 80, 64, 8, 28_672, 128_256, tied=False),
    "mistral-7b": LlamaSize(4096, 32, 32, 8, 14_336, 32_000, tied=False),
    "qwen3-8b": LlamaSize(
        4096, 36, 32, 8, 12_288, 151_936, tied=False, head_dim=128, norms_heads=True
    ),
    "qwen3-32b": LlamaSize(
        5120, 64, 64, 8, 25_600, 151_936, tied=False, head_dim=128, norms_heads=True
    ),
    "qwen3-30b-a3b": LlamaSize(
        *(2048, 48, 32, 4, 768, 151_936), tied=False, head_dim=128, norms_heads=True,
        num_experts=128, experts_per_token=8,
    ),
    "mixtral-8x7b": LlamaSize(
        4096, 32, 32, 8, 14_336, 32_000, tied=False, num_experts=8, experts_per_token=2
    ),
}  # fmt: skip
"""Models that are predicted and not shipped, by the names of their checkpoints, from their
``config.json``."""
COMMON_NAMES = {
    "llama-3-8b": "8b",
    "llama-3-70b": "llama-3.1-70b",
    "llama-3.1-8b": "8b",
    "llama-3.2-1b": "1b",
    "llama-3.2-3b": "3b",
    "llama-3.3-70b": "llama-3.1-70b",
    "smollm2-135m": "135m",
}
"""Checkpoints whose shape has another name here, for suggestions."""
NUMBER_OF_PARAMETERS = re.compile(r"[\d.x]*\d[bm](?![a-z\d])")
"""As names of models say it: 8b, 1.1b, 8x7b."""
FAMILIES: dict[str, dict[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8},
}
"""Kinds of models whose layout follows from their config, each with the values that a config may
leave out (transformers 5: the defaults of their configuration classes)."""
EXPERTS = {
    "mixtral": ("intermediate_size", "num_local_experts"),
    "qwen3_moe": ("moe_intermediate_size", "num_experts"),
}
"""Keys of the width of an expert and of the number of experts, of the kinds that have some."""
UNLIKE: dict[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Keys of a config that change the layout unless they have this value."""

LLAMA = "llama"
"""The shipped workload."""
HUGGING_FACE = "hf:"
"""What stands before the path of a model's config."""
CONFIG = "config.json"
"""Name of that file in a model's folder."""
ENTRY_POINTS = "bench.workloads"
"""Entry-point group for workload factories of other packages."""


def _place(name: str) -> str:
    """The location of a factory that is not shipped, as module:function.

    Raises InputError if the name is unknown.
    """
    if ":" in name:
        return name
    installed = {}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        installed[entry.name] = entry.value
    if name not in installed:
        known = suggest(name, [*installed, LLAMA, "'package.module:factory'"])
        raise InputError(f"workload '{name}': unknown; {known}")
    return installed[name]


def sources(name: str) -> list[Path]:
    """The source files of a workload: all Python files of its package, or its single module.

    Empty for shipped workloads. Raises InputError if the workload cannot be found.
    """
    if name == LLAMA:
        return []
    if name.startswith(HUGGING_FACE):
        return [config_file(name)]
    module = _place(name).partition(":")[0]
    if module.startswith(f"{__name__.partition('.')[0]}."):
        return []
    package = None
    try:
        found = importlib.util.find_spec(module)
        if found is not None and found.parent:
            package = importlib.util.find_spec(found.parent)
    except Exception as error:  # finding a module imports its parent packages
        raise InputError(
            f"workload '{name}': {error}; use 'llama', 'hf:CONFIG' or 'package.module:factory'"
        ) from error
    if found is None:
        raise InputError(
            f"workload '{name}': there is no module {module}; use 'llama' or "
            "'package.module:factory'"
        )
    folders: list[str] = []
    if package is not None and package.submodule_search_locations is not None:
        folders += package.submodule_search_locations
    paths: list[Path] = []
    for folder in folders:
        paths += Path(folder).rglob("*.py")
    if not folders and found.origin:
        paths = [Path(found.origin)]
    return sorted(filter(Path.is_file, paths))


def find_factory(name: str) -> Callable[..., Any]:
    """The workload factory ``name`` that is not shipped: an entry point, or module:function.

    The group of entry points is ``bench.workloads``. Raises InputError with the reason if it cannot
    be imported or called.
    """
    module, _, attribute = _place(name).partition(":")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's code may raise anything
        raise InputError(
            f"workload '{name}': {error}; use 'llama', 'hf:CONFIG' or 'package.module:factory'"
        ) from error
    if not callable(factory):
        raise InputError(
            f"workload '{name}': {attribute} is not callable; name a factory that takes a "
            "WorkloadSpec"
        )
    return factory  # type: ignore[no-any-return]


def display_name(workload: str) -> str:
    """What a workload that is not shipped is called: its own name, or ``hf:NAME``.

    NAME is that of the folder or file of a config.
    """
    if not workload.startswith(HUGGING_FACE):
        return workload
    path = config_file(workload).resolve()
    stem = path.stem
    if path.name == CONFIG:
        stem = path.parent.name
    return f"{HUGGING_FACE}{stem}"


CONFIG_FILES: dict[str, Path] = {}
"""The configs of this process, by the names that cells have for them (``name_config``)."""


def name_config(name: str) -> str:
    """``hf:NAME@sha256:...``, by which cells know a workload ``hf:CONFIG``, wherever its file lies.

    From now on this process finds the file by that name. Raises InputError as ``read_config``.
    """
    read_config(name)
    path = config_file(name).resolve()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    found = f"{display_name(name)}@sha256:{digest}"
    CONFIG_FILES[found] = path
    return found


def config_file(name: str) -> Path:
    """The file of the config that a workload ``hf:CONFIG`` names.

    That is a JSON file, or a folder that has ``config.json``.
    """
    if name in CONFIG_FILES:
        return CONFIG_FILES[name]
    path = Path(name.removeprefix(HUGGING_FACE)).expanduser()
    if path.is_dir():
        path /= CONFIG
    return path


def read_config(name: str) -> dict[str, object]:
    """The config of a workload ``hf:CONFIG``.

    Raises InputError if it is none of a model of transformers.
    """
    path = config_file(name)
    place = f"workload '{name}': {path}"
    text = files.read(path, place, "name a config.json of transformers, or the folder that has it")
    try:
        values = json.loads(text)
    except ValueError as error:
        raise InputError(
            f"{place}: is not JSON ({error}); name a config.json of transformers"
        ) from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise InputError(f"{place}: model_type is missing; name a config.json of transformers")
    return values


def suggest_model(name: str, known: Sequence[str]) -> str:
    """Suggest the known model that is meant, by its own or a common name, or list the known ones.

    A model with another number of parameters in its name is never meant.
    """
    names = {model: model for model in known} | COMMON_NAMES
    meant: dict[str, str] = {}
    for common, model in names.items():
        if model in known and _can_mean(name, common):
            meant[_spelling(common)] = model
    near = difflib.get_close_matches(_spelling(name), meant, n=1)
    if near:
        return f"did you mean {meant[near[0]]}?"
    return listed(known)


def _can_mean(name: str, known: str) -> bool:
    """Whether a name has no number of parameters, or that of a known one."""
    ours, theirs = map(NUMBER_OF_PARAMETERS.search, (name.lower(), known.lower()))
    return ours is None or (theirs is not None and ours[0] == theirs[0])


def _spelling(name: str) -> str:
    """A model's name without case and punctuation, and what checkpoints have around it.

    That is the organization, and what follows the number of parameters, such as Instruct.
    """
    text = name.lower().rpartition("/")[2].removeprefix("meta-")
    if size := NUMBER_OF_PARAMETERS.search(text):
        text = text[: size.end()]
    return re.sub(r"[^a-z\d]", "", text)


@cache
def shape_of(model: str) -> LlamaSize | None:
    """The shape of a shipped model, of one of SHAPES, or of ``hf:CONFIG``; None for another name.

    Raises InputError for a config of another kind of model.
    """
    if model.startswith(HUGGING_FACE):
        return _shape_of_config(read_config(model), f"{config_file(model)}")
    return (SIZES | SHAPES).get(model)


def _shape_of_config(values: Mapping[str, object], place: str) -> LlamaSize:
    """The shape that a ``config.json`` describes; ``place``: its path."""
    kind = str(values["model_type"])
    if kind not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(
            f"{place}: the layout of model_type '{kind}' is unknown; known are {known}"
        )
    for key, value in UNLIKE.items():
        if values.get(key) not in (None, value):
            raise InputError(
                f"{place}: {key} is {shown(values[key])}; only {shown(value)} is known"
            )

    def read(key: str, default: int = 0) -> int:
        value = values.get(key)
        if value is None:
            value = FAMILIES[kind].get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"{place}: {key} is {shown(value)}; it must be an integer of at least 1"
            )
        return value

    width, num_experts, experts_per_token = "intermediate_size", 0, 1
    if kind in EXPERTS:
        width, experts = EXPERTS[kind]
        num_experts, experts_per_token = read(experts), read("num_experts_per_tok")
    num_heads, hidden_size = read("num_attention_heads"), read("hidden_size")
    return LlamaSize(
        hidden_size=hidden_size,
        num_layers=read("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read("num_key_value_heads", num_heads),
        intermediate_size=read(width),
        vocab_size=read("vocab_size"),
        tied=bool(values.get("tie_word_embeddings", False)),
        head_dim=read("head_dim", hidden_size // num_heads),
        norms_heads=kind in ("qwen3", "qwen3_moe"),
        qkv_bias=kind == "qwen2",
        num_experts=num_experts,
        experts_per_token=experts_per_token,
    )


def describe_file(path: Path, length: int, place: str = "--corpus") -> str:
    """The name of a corpus file in a cell: ``name@sha256:...``.

    ``place`` is the option or key that named it. Raises InputError if the file is missing,
    unreadable, endless, empty, or shorter than one sample of ``length`` bytes.
    """
    data = files.read(path, f"{place} {path}", "name a text file")
    if len(data) < length:
        what = f"has {len(data)} bytes"
        if not data:
            what = "is empty"
        raise InputError(
            f"{place} {path}: {what}; one sample needs sequence_length + 1 = {length} bytes"
        )
    return f"{path.name}@sha256:{hashlib.sha256(data).hexdigest()[:16]}"
