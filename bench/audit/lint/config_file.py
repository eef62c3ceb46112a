"""A config file as plain values with their lines. Nothing in it is executed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path as FilePath
from typing import Any

from bench import files
from bench.audit.lint import yaml_values
from bench.audit.lint.yaml_values import MAX_DEPTH, Path, deep_line, too_deep
from bench.errors import InputError

MAX_BYTES = 1 << 18
"""Size of a config file; a larger one is no config."""
EXPECTED = "a .yaml or .json of LightningCLI, DeepSpeed, Hugging Face's TrainingArguments or accelerate"


class ConfigKind(StrEnum):
    """The framework that reads the config."""

    LIGHTNING = "lightning"
    """YAML (or JSON) of LightningCLI."""
    DEEPSPEED = "deepspeed"
    """JSON of DeepSpeed."""
    HUGGING_FACE = "hugging-face"
    """YAML or JSON with the fields of transformers.TrainingArguments."""
    ACCELERATE = "accelerate"
    """YAML or JSON that ``accelerate config`` writes."""


DEEPSPEED_KEYS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_clipping",
    "zero_optimization",
    "data_types",
}
"""Every DeepSpeed config has one of these; other JSON may have gradient_accumulation_steps too."""
DEEPSPEED_TABLES = {"bf16", "fp16"}
ACCELERATE_KEYS = {"compute_environment", "distributed_type"}
HUGGING_FACE_KEYS = {
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "num_train_epochs",
    "average_tokens_across_devices",
    "accelerator_config",
}
"""A config of TrainingArguments is known by one of these; those of other programs share further fields with it."""


@dataclass(frozen=True)
class Document:
    """A config file that has been read."""

    file: str
    """As given, for findings and errors."""
    kind: ConfigKind
    values: Mapping[str, Any]
    """Plain values; the keys of mappings are strings."""
    lines: Mapping[Path, int]
    """Of keys and items, counted from 1."""
    root: Path = field(default=())
    """Where the config begins: LightningCLI may nest it under the name of a subcommand."""


def load(file: FilePath) -> Document:
    """Read a config file, whose kind follows from suffix and content.

    Raises InputError with file, line and key if it cannot be read, is too large or nested too deeply, repeats a key,
    or is not a known kind of config.
    """
    suffix = file.suffix.lower()
    if suffix == ".toml":
        raise InputError(f"{file}:1: TOML is not read: torchtitan v0.2.2 was the last to use it; give {EXPECTED}")
    text = _read(file)
    if suffix in {".yaml", ".yml"}:
        values, lines = yaml_values.parse(text, str(file))
    elif suffix == ".json":
        values, lines = _json(text, str(file))
    else:
        raise InputError(f"{file}:1: is not a known kind of config; give {EXPECTED}")
    _check_mapping(values, file)
    kind, root = _recognise(values, suffix)
    if kind is None:
        raise InputError(
            f"{file}:1: is not a known kind of config; a LightningCLI config has 'trainer', a DeepSpeed one (JSON) "
            "'train_micro_batch_size_per_gpu' or 'zero_optimization', TrainingArguments 'per_device_train_batch_size' "
            "or 'num_train_epochs', an accelerate one 'distributed_type'"
        )
    return Document(str(file), kind, values, lines, root)


def load_deepspeed(file: FilePath) -> Document:
    """Read the DeepSpeed config that another config names. Raises InputError as ``load`` does."""
    values, lines = _json(_read(file), str(file))
    _check_mapping(values, file)
    return Document(str(file), ConfigKind.DEEPSPEED, values, lines)


def _check_mapping(values: Any, file: FilePath) -> None:
    if not isinstance(values, dict):
        found = "is empty" if values is None else "has no keys at the top level"
        raise InputError(f"{file}:1: {found}; it must be a mapping with the keys of a training config")


def _recognise(values: Mapping[str, Any], suffix: str) -> tuple[ConfigKind | None, Path]:
    """The kind of a config and where it begins."""
    if "trainer" in values:
        return ConfigKind.LIGHTNING, ()
    nested = values.get("fit")
    if isinstance(nested, dict) and "trainer" in nested:
        return ConfigKind.LIGHTNING, ("fit",)
    is_deepspeed = values.keys() & DEEPSPEED_KEYS or any(
        isinstance(values.get(name), dict) for name in DEEPSPEED_TABLES
    )
    if values.keys() & ACCELERATE_KEYS:
        return ConfigKind.ACCELERATE, ()
    if suffix == ".json" and is_deepspeed:
        return ConfigKind.DEEPSPEED, ()
    return (ConfigKind.HUGGING_FACE if values.keys() & HUGGING_FACE_KEYS else None), ()


def _read(file: FilePath) -> str:
    content = files.read(file, str(file), "name a config file")
    if len(content) > MAX_BYTES:
        raise InputError(f"{file}:1: is larger than {MAX_BYTES >> 10} KiB; a config must be smaller")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file}:{line}: is not UTF-8 text (byte {error.start}); name a config file") from error


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|\n|[^\s{}\[\]:,"]+')


def _json(text: str, file: str) -> tuple[Any, dict[Path, int]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{error.lineno}: is not JSON ({error.msg}); comments are not allowed") from error
    except RecursionError:
        raise too_deep(file, deep_line(text)) from None
    except ValueError as error:  # an integer of more than 4300 digits
        raise InputError(f"{file}:1: is not JSON ({error})") from error
    return values, _json_lines(text, file)


def _json_lines(text: str, file: str) -> dict[Path, int]:
    """Lines of the keys and items of valid JSON. Raises InputError for a repeated key, and for too deep a nesting."""
    lines: dict[Path, int] = {}
    line = 1
    places: list[Path] = []  # of the open mappings and lists
    counts: list[int | None] = []  # items of an open list; None in a mapping
    here: Path = ()
    key_follows = False
    for token in _TOKEN.findall(text):
        if token == "\n":
            line += 1
            continue
        in_list = bool(counts) and counts[-1] is not None
        if token == ":":
            continue
        if token in {"}", "]"}:
            here = places.pop()
            counts.pop()
            key_follows = False
        elif token == ",":
            key_follows = not in_list
        elif key_follows:
            here = (*places[-1], json.loads(token))
            if here in lines:
                raise InputError(f"{file}:{line}: {'.'.join(here)} is repeated (first in line {lines[here]})")
            lines[here] = line
            key_follows = False
        else:
            if in_list:
                index = counts[-1] or 0
                here = (*places[-1], str(index))
                lines[here] = line
                counts[-1] = index + 1
            if token in {"{", "["}:
                places.append(here)
                counts.append(None if token == "{" else 0)
                if len(places) > MAX_DEPTH:
                    raise too_deep(file, line)
                key_follows = token == "{"
    return lines
