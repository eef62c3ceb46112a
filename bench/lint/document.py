"""A config file becomes values with lines. Nothing is executed, and what is wrong is named with its place.

YAML is read as PyYAML's node graph, so no tag can make an object; see ``bench.lint.nodes``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path as FilePath
from typing import Any

from bench.errors import InputError
from bench.lint import nodes
from bench.lint.depth import Path, check_depth, too_deep

MAX_BYTES = 1 << 18
"""Of a config file. A longer one is not a config."""


class Kind(StrEnum):
    """Whose config it is."""

    LIGHTNING = "lightning"
    """YAML (or JSON) of LightningCLI."""
    DEEPSPEED = "deepspeed"
    """JSON of DeepSpeed."""
    TORCHTITAN = "torchtitan"
    """TOML of torchtitan up to v0.2.2, the last one that read TOML."""


DEEPSPEED_KEYS = {
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_clipping",
    "zero_optimization",
    "data_types",
}
"""One of them is in every DeepSpeed config; other JSON has gradient_accumulation_steps too."""
DEEPSPEED_TABLES = {"bf16", "fp16"}
TORCHTITAN_KEYS = {
    "training": {"local_batch_size", "global_batch_size", "seq_len", "steps", "dataset", "dtype", "max_norm"},
    "parallelism": {"data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree"},
}
"""One of them is in every torchtitan config, by table."""


@dataclass(frozen=True)
class Document:
    """A config file that has been read."""

    file: str
    """As given, to be named in findings and errors."""
    kind: Kind
    values: Mapping[str, Any]
    """Plain values; all keys of mappings are strings."""
    lines: Mapping[Path, int]
    """Of keys and items, counted from 1."""
    root: Path = field(default=())
    """Where the config begins: LightningCLI may nest it under the name of its subcommand."""


def load(file: FilePath) -> Document:
    """Read a config file; its kind is told by suffix and content.

    Raises InputError naming the file, and the key and line where there is one, if it cannot be read, is too large or
    too deeply nested, has a key twice or a tag, or is no config of a known kind.
    """
    text = _read(file)
    suffix = file.suffix.lower()
    if suffix in {".yaml", ".yml"}:
        values, lines = nodes.parse(text, str(file))
    elif suffix == ".json":
        values, lines = _json(text, str(file))
    elif suffix == ".toml":
        values, lines = _toml(text, str(file))
    else:
        raise InputError(f"{file}: is of no known kind; give a .yaml of LightningCLI, a .json of DeepSpeed or a .toml")
    _check_mapping(values, file)
    kind, root = _recognise(values, suffix)
    if kind is None:
        raise InputError(
            f"{file}: is of no known kind; a LightningCLI config has 'trainer', a DeepSpeed one "
            "'train_micro_batch_size_per_gpu' or 'zero_optimization', a torchtitan one training.local_batch_size"
        )
    return Document(str(file), kind, values, lines, root)


def load_deepspeed(file: FilePath) -> Document:
    """Read a file that another config names as DeepSpeed's. Raises InputError as ``load`` does."""
    values, lines = _json(_read(file), str(file))
    _check_mapping(values, file)
    return Document(str(file), Kind.DEEPSPEED, values, lines)


def _check_mapping(values: Any, file: FilePath) -> None:
    if not isinstance(values, dict):
        found = "is empty" if values is None else "has no keys at its top"
        raise InputError(f"{file}: {found}; it must be a mapping with the keys of a training config")


def _recognise(values: Mapping[str, Any], suffix: str) -> tuple[Kind | None, Path]:
    """The kind of a config and where it begins."""
    if suffix == ".toml":
        is_titan = any(
            isinstance(values.get(table), dict) and values[table].keys() & keys
            for table, keys in TORCHTITAN_KEYS.items()
        )
        return (Kind.TORCHTITAN if is_titan else None), ()
    if "trainer" in values:
        return Kind.LIGHTNING, ()
    nested = values.get("fit")
    if isinstance(nested, dict) and "trainer" in nested:
        return Kind.LIGHTNING, ("fit",)
    is_deepspeed = values.keys() & DEEPSPEED_KEYS or any(
        isinstance(values.get(name), dict) for name in DEEPSPEED_TABLES
    )
    return (Kind.DEEPSPEED if suffix == ".json" and is_deepspeed else None), ()


def _read(file: FilePath) -> str:
    content = b""
    try:
        special = "folder" if file.is_dir() else "device or pipe" if file.exists() and not file.is_file() else ""
        if not special:
            with file.open("rb") as stream:
                content = stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"{file}: cannot be read ({reason}); name a config file") from error
    if special:
        raise InputError(f"{file}: is a {special}; name a config file")
    if len(content) > MAX_BYTES:
        raise InputError(f"{file}: is larger than {MAX_BYTES >> 10} KiB; a config must be smaller")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: is not text in UTF-8 (byte {error.start}); name a config file") from error


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|\n|[^\s{}\[\]:,"]+')


def _json(text: str, file: str) -> tuple[Any, dict[Path, int]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{file}:{error.lineno}: is not JSON ({error.msg}); comments are not allowed") from error
    except RecursionError:
        raise too_deep(file) from None
    except ValueError as error:  # an integer of more than 4300 digits
        raise InputError(f"{file}: is not JSON ({error})") from error
    check_depth(values, file)
    return values, _json_lines(text, file)


def _json_lines(text: str, file: str) -> dict[Path, int]:
    """Lines of keys and items of a text that is JSON. Raises InputError for a key that is there twice."""
    lines: dict[Path, int] = {}
    line = 1
    places: list[Path] = []  # of the mappings and lists that are open
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
                raise InputError(f"{file}:{line}: {'.'.join(here)} is there twice (first in line {lines[here]})")
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
                key_follows = token == "{"
    return lines


_TOML_PART = r"""(?:"(?:[^"\\]|\\.)*"|'[^']*'|[A-Za-z0-9_-]+)"""
_TOML_KEY = rf"{_TOML_PART}(?:\s*\.\s*{_TOML_PART})*"
_TOML_LINE = re.compile(rf"\s*(?:\[\[?\s*(?P<table>{_TOML_KEY})\s*\]\]?|(?P<key>{_TOML_KEY})\s*=)")


def _toml(text: str, file: str) -> tuple[Any, dict[Path, int]]:
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise too_deep(file) from None
    except ValueError as error:
        named = _toml_line(text, str(error))
        raise InputError(f"{file}{named}: is not TOML ({error})") from error
    check_depth(values, file)
    lines: dict[Path, int] = {}
    table: Path = ()
    for number, content in enumerate(text.split("\n"), 1):
        if not (match := _TOML_LINE.match(content)):
            continue
        keys = tuple(part.strip("\"'") for part in re.findall(_TOML_PART, match["table"] or match["key"]))
        if match["table"] and _is_table(values, keys):
            table = keys
        lines.setdefault(table if match["table"] else table + keys, number)
    return values, lines


def _is_table(values: Any, keys: Path) -> bool:
    """False for what only looks like a header, such as a row of an array."""
    for key in keys:
        if isinstance(values, list) and values:
            values = values[-1]
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


def _toml_line(text: str, message: str) -> str:
    """Of an error of tomllib: its line, and the key that stands there."""
    found = re.search(r"at line (\d+)", message)
    if not found:
        return ""
    number = int(found[1])
    content = text.split("\n")[number - 1]
    match = _TOML_LINE.match(content)
    return f":{number}: {match['table'] or match['key']}" if match else f":{number}"
