"""Config files: plain values, each with its line. Nothing in them is executed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

import yaml
from yaml.constructor import ConstructorError

from bench import files
from bench.errors import InputError, shown

MAX_BYTES = 1 << 18
"""Size of a config file; a larger one is no config."""
MAX_DEPTH = 64
"""Nested mappings and lists."""
MAX_VALUES = 20_000
"""Values of a file with its aliases expanded: aliases of aliases grow exponentially."""
EXPECTED = "a .yaml or .json of LightningCLI, DeepSpeed, Hugging Face's TrainingArguments or accelerate"
AUTO = "auto"
"""The value that Hugging Face's Trainer replaces before DeepSpeed reads the config."""
LARGEST = 2**53
"""The largest integer that a config can mean."""


class ConfigKind(StrEnum):
    """The framework that reads the config."""

    LIGHTNING = "lightning"
    DEEPSPEED = "deepspeed"
    """Always JSON."""
    HUGGING_FACE = "hugging-face"
    """The fields of transformers.TrainingArguments."""
    ACCELERATE = "accelerate"
    """What ``accelerate config`` writes."""


DEEPSPEED_KEYS = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping", "zero_optimization", "data_types")
}
"""Every DeepSpeed config has one of these; other JSON may have gradient_accumulation_steps too."""
ACCELERATE_KEYS = {"compute_environment", "distributed_type"}
HUGGING_FACE_KEYS = {
    *("per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "accelerator_config"),
    "average_tokens_across_devices",
}
"""A config of TrainingArguments is known by one of these; those of other programs share further fields with it."""


@dataclass(frozen=True)
class ConfigPart:
    """The part of a config file under a path of keys; it may be missing.

    ``checked`` and the methods below it raise InputError for a wrong value. They return None if it is missing or the
    word ``also``.
    """

    file: str
    """As given, for findings and errors."""
    values: Any
    """Of the whole file; the keys of mappings are strings."""
    lines: Mapping[tuple[str, ...], int]
    """The line of each key and item of the file, counted from 1; items of a list by their index."""
    path: tuple[str, ...] = ()

    def at(self, key: str) -> ConfigPart:
        """The part under a dotted key."""
        return self.under(*key.split("."))

    def under(self, *keys: str) -> ConfigPart:
        """The part under keys that may contain dots."""
        return ConfigPart(self.file, self.values, self.lines, self.path + keys)

    @property
    def value(self) -> Any:
        """The value here; None if there is none."""
        here = self.values
        for key in self.path:
            if isinstance(here, list) and key.isdecimal() and int(key) < len(here):
                here = here[int(key)]
            elif isinstance(here, dict):
                here = here.get(key)
            else:
                return None
        return here

    @property
    def given(self) -> bool:
        """Whether there is a value other than null."""
        return self.value is not None

    @property
    def line(self) -> int:
        """The line of the key, or of the nearest key above it."""
        above = (self.path[:length] for length in range(len(self.path), 0, -1))
        return next((self.lines[path] for path in above if path in self.lines), 1)

    @property
    def key(self) -> str:
        """The dotted key, from the top of the file."""
        return ".".join(self.path)

    @property
    def name(self) -> str:
        """The last key."""
        return self.path[-1]

    def items(self) -> list[ConfigPart]:
        """The items of a list; a single mapping or string counts as a list of one."""
        if isinstance(self.value, list):
            return [self.under(str(index)) for index in range(len(self.value))]
        return [self] if self.given else []

    def refuse(self, expected: str) -> NoReturn:
        """Raise InputError with file, line, key, value, and what would be right."""
        raise InputError(f"{self.file}:{self.line}: {self.key} is {shown(self.value)}; it must be {expected}")

    def checked(self, is_right: Callable[[Any], bool], expected: str, also: str | None = None) -> Any:
        """The value, if it is right; None if it is missing or the word ``also``."""
        if not self.given or self.value == also:
            return None
        return self.value if is_right(self.value) else self.refuse(expected + (f" or '{also}'" if also else ""))

    def mapping(self) -> ConfigPart:
        """This part, if it is a mapping or missing."""
        self.checked(lambda value: isinstance(value, dict), "a mapping")
        return self

    def integer(self, least: int = 1, most: int = LARGEST, also: str | None = None) -> int | None:
        expected = f"an integer of at least {least}" + ("" if most == LARGEST else f" and at most {most}")
        found: int | None = self.checked(lambda value: type(value) is int and least <= value <= most, expected, also)
        return found

    def number(self, also: str | None = None) -> float | None:
        """A finite number of at least 0 (1e-1 is a string in YAML)."""

        def is_right(value: Any) -> bool:
            try:
                return not isinstance(value, bool) and 0 <= float(value) < math.inf
            except (ValueError, TypeError, OverflowError):
                return False

        value = self.checked(is_right, "a finite number of at least 0", also)
        return None if value is None else float(value)

    def flag(self, default: bool, also: str | None = None) -> bool:
        """True or false; the default if it is missing or the word ``also``."""
        value = self.checked(lambda value: isinstance(value, bool), "true or false", also)
        return default if value is None else value

    def string(self) -> str | None:
        found: str | None = self.checked(lambda value: isinstance(value, str), "a string")
        return found

    def zero_stage(self, also: str | None = None) -> int | None:
        found: int | None = self.checked(lambda value: type(value) is int and 0 <= value <= 3, "0, 1, 2 or 3", also)
        return found


def load(file: Path) -> tuple[ConfigKind, ConfigPart]:
    """Read a config file; its kind follows from suffix and content. LightningCLI's may be nested under ``fit``.

    Raises InputError with file, line and key if it cannot be read, is too large or nested too deeply, repeats a key,
    or is not a known kind of config.
    """
    suffix = file.suffix.lower()
    if suffix == ".toml":
        raise InputError(f"{file}:1: TOML is not read: torchtitan v0.2.2 was the last to use it; give {EXPECTED}")
    if suffix not in {".yaml", ".yml", ".json"}:
        raise InputError(f"{file}:1: is not a known kind of config; give {EXPECTED}")
    config = read_file(file, is_json=suffix == ".json")
    keys = config.values.keys()
    for root in (config, config.at("fit")):
        if isinstance(root.value, dict) and "trainer" in root.value:
            return ConfigKind.LIGHTNING, root
    if keys & ACCELERATE_KEYS:
        return ConfigKind.ACCELERATE, config
    has_tables = any(isinstance(config.at(name).value, dict) for name in ("bf16", "fp16"))
    if suffix == ".json" and (keys & DEEPSPEED_KEYS or has_tables):
        return ConfigKind.DEEPSPEED, config
    if keys & HUGGING_FACE_KEYS:
        return ConfigKind.HUGGING_FACE, config
    raise InputError(
        f"{file}:1: is not a known kind of config; a LightningCLI config has 'trainer', a DeepSpeed one (JSON) "
        "'train_micro_batch_size_per_gpu' or 'zero_optimization', TrainingArguments 'per_device_train_batch_size' "
        "or 'num_train_epochs', an accelerate one 'distributed_type'"
    )


def read_file(file: Path, *, is_json: bool) -> ConfigPart:
    """Read a config file of any kind. Raises InputError as ``load`` does."""
    content = files.read(file, str(file), "name a config file")
    if len(content) > MAX_BYTES:
        raise InputError(f"{file}:1: is larger than {MAX_BYTES >> 10} KiB; a config must be smaller")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise InputError(f"{file}:{line}: is not UTF-8 text (byte {error.start}); name a config file") from error
    values, lines = _parse(text, str(file), is_json=is_json)
    if not isinstance(values, dict):
        found = "is empty" if values is None else "has no keys at the top level"
        raise InputError(f"{file}:1: {found}; it must be a mapping with the keys of a training config")
    return ConfigPart(str(file), values, lines)


def _parse(text: str, file: str, *, is_json: bool) -> tuple[Any, Mapping[tuple[str, ...], int]]:
    """The values of a text, and the lines of its keys and items. Raises InputError as ``load`` does."""
    try:
        if is_json:
            json.loads(text)
        loader = _Loader(text, file, is_json=is_json)
        node = loader.get_single_node()
        return (None if node is None else loader.value_of(node, ())), loader.lines
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{error.lineno}: is not JSON ({error.msg}); comments are not allowed") from error
    except RecursionError:
        raise InputError(f"{file}:1: {TOO_DEEP}") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else f"{file}:1"
        raise InputError(f"{place}: is not plain YAML ({error.problem or error.context})") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: an escape beyond Unicode
        # A control character is the reader's error, which knows its position.
        line = text.count("\n", 0, getattr(error, "position", None) or 0) + 1
        kind = "JSON" if is_json else "plain YAML"
        raise InputError(f"{file}:{line}: is not {kind} ({str(error).splitlines()[0]})") from error


TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep; a config must be flatter"
NOT_YAML = re.compile(f"{yaml.reader.Reader.NON_PRINTABLE.pattern}|[\t\x85\u2028\u2029]")
"""Characters that JSON may contain, and YAML may not, or takes for the end of a line."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """PyYAML's safe loader, which makes no objects of a user's classes, and notes lines. JSON's scalars are JSON's."""

    def __init__(self, text: str, file: str, *, is_json: bool) -> None:
        super().__init__(NOT_YAML.sub(" ", text) if is_json else text)
        self.file, self.json = file, text if is_json else ""
        self.lines: dict[tuple[str, ...], int] = {}
        self.num_values = 0

    def value_of(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        """The value of a node. Raises InputError for a repeated key, and for what is too large or too deep."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.error(node, f"has more than {MAX_VALUES} values with its aliases expanded; use fewer")
        if len(path) > MAX_DEPTH:
            raise self.error(node, TOO_DEEP)
        if isinstance(node, yaml.SequenceNode) and node.tag == self.DEFAULT_SEQUENCE_TAG:
            return [self.inside(item, (*path, str(index)), item) for index, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == self.DEFAULT_MAPPING_TAG:
            self.flatten_mapping(node)  # a key of the mapping itself follows, and replaces, a merged one
            keys = [(str(self.construct_object(key)), key, inner) for key, inner in node.value]
            return {key: self.inside(inner, (*path, key), key_node) for key, key_node, inner in keys}
        return self.construct_object(node, deep=True)

    def inside(self, node: yaml.Node, path: tuple[str, ...], place: yaml.Node) -> Any:
        """The value of a key or item, whose line is noted."""
        self.lines[path] = int(place.start_mark.line) + 1
        return self.value_of(node, path)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConstructorError(None, None, "found unhashable key", key_node.start_mark)
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = str(self.construct_object(key_node))
            if key in first:
                raise self.error(key_node, f"{key} is repeated (first in line {first[key]})")
            first[key] = key_node.start_mark.line + 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if self.json:
                return json.loads(self.json[node.start_mark.index : node.end_mark.index])
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, OverflowError, TypeError, AttributeError) as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from error

    def error(self, node: yaml.Node, words: str) -> InputError:
        return InputError(f"{self.file}:{node.start_mark.line + 1}: {words}")
