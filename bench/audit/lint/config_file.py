"""Config files: plain values, each with its line. Nothing in them is executed."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, overload

import yaml
from yaml.constructor import ConstructorError

from bench.errors import InputError, reason_of, shown

CONFIGS = {"yaml", "yml", "json", "toml"}
"""Endings of config files."""
MAX_BYTES = 1 << 20
"""Size of a config file; a larger one is no config."""
MAX_DEPTH = 64
"""Nested mappings and lists."""
MAX_VALUES = 100_000
"""Values of a file with its aliases expanded: aliases of aliases grow exponentially."""
AUTO = "auto"
"""The value that Hugging Face's Trainer replaces before DeepSpeed reads the config."""
LARGEST = 2**53
"""The largest integer that a config can mean."""
UNKNOWN = re.compile(r"\$[{(\w]|^\?\?\?$|\{\{|^<[^<>]*>$|^%\(")
"""What another program fills in: ``${...}`` of OmegaConf and of shells, its ``???``, and
templates."""
KeyPath = tuple[str, ...]
"""The keys from the top of a file to a value; items of a list by their index."""


class NotReadError(InputError):
    """The file itself cannot be read as a config."""


class ForeignError(NotReadError):
    """The file is YAML for another program: several documents, or values of its own kinds."""


class NoConfigError(NotReadError):
    """The file holds no mapping, or far too much, so it is no config."""


@dataclass(frozen=True)
class Repeated:
    """A key that is given twice in the same mapping."""

    path: KeyPath
    line: int
    first_line: int
    is_same: bool
    """Whether both values are the same plain value."""


@dataclass(frozen=True)
class ConfigPart:
    """The part of a config file under a path of keys; it may be missing.

    ``checked`` and the methods below it raise InputError for a wrong value. They return None, or
    the default that they are given, if it is missing, the word ``also``, or not known here.
    """

    file: str
    """As given, for findings and errors."""
    values: Any
    """Of the whole file; the keys of mappings are strings."""
    lines: Mapping[KeyPath, int]
    """The line of each key and item of the file, counted from 1."""
    path: KeyPath = ()
    names: Mapping[KeyPath, str] = field(default_factory=dict)
    """What the file calls a value, if its path here is another: the dotted key."""
    repeated: tuple[Repeated, ...] = ()
    """Keys given twice; the last one holds."""

    def at(self, key: str) -> ConfigPart:
        """The part under a dotted key."""
        return self.under(*key.split("."))

    def under(self, *keys: str) -> ConfigPart:
        """The part under keys that may contain dots."""
        return ConfigPart(
            self.file, self.values, self.lines, self.path + keys, self.names, self.repeated
        )

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
    def unknown(self) -> bool:
        """Whether there is a value that another program fills in."""
        return isinstance(self.value, str) and UNKNOWN.search(self.value.strip()) is not None

    @property
    def line(self) -> int:
        """The line of the key, or of the nearest key above it."""
        for length in range(len(self.path), -1, -1):
            line = self.lines.get(self.path[:length])
            if line is not None:
                return line
        return 1

    @property
    def key(self) -> str:
        """The dotted key, from the top of the file, as the file has it."""
        for length in range(len(self.path), 0, -1):
            name = self.names.get(self.path[:length])
            if name is not None:
                return ".".join(filter(None, (name, *self.path[length:])))
        return ".".join(self.path)

    @property
    def name(self) -> str:
        """The last key, as the file has it."""
        return self.key.rpartition(".")[2]

    def items(self) -> list[ConfigPart]:
        """The items of a list; a single mapping or string counts as a list of one."""
        if isinstance(self.value, list):
            return [self.under(str(index)) for index in range(len(self.value))]
        if self.given:
            return [self]
        return []

    @property
    def names_here(self) -> list[str]:
        """The keys of a mapping; none of anything else."""
        if isinstance(self.value, dict):
            return list(self.value)
        return []

    def renamed(
        self, places: Mapping[str, str], defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> ConfigPart:
        """The same values under other dotted keys.

        By new key it is given the key under this part, or an empty one for this part itself.

        A default is the value of a new key that the file does not set; its place is where the file
        would set it.
        """
        values: dict[str, Any] = {}
        lines: dict[KeyPath, int] = {(): self.line}
        names: dict[KeyPath, str] = {}
        for key, source in places.items():
            part = self
            if source:
                part = self.at(source)
            path = tuple(key.split("."))
            names[path] = part.key
            if part.given:
                put(values, path, part.value)
                lines |= {
                    path + place[len(part.path) :]: line for place, line in part._lines_below()
                }
        for key, default in defaults.items():
            path = tuple(key.split("."))
            if ConfigPart(self.file, values, {}, path).value is None:
                put(values, path, default)
        return ConfigPart(self.file, values, lines, (), names, self.repeated)

    def _lines_below(self) -> Iterator[tuple[KeyPath, int]]:
        for place, line in self.lines.items():
            if place[: len(self.path)] == self.path:
                yield place, line

    def refuse(self, expected: str) -> NoReturn:
        """Raise InputError with file, line, key, value, and what would be right."""
        raise InputError(
            f"{self.file}:{self.line}: {self.key} is {shown(self.value)}; it must be {expected}"
        )

    def checked(
        self, is_right: Callable[[Any], bool], expected: str, also: str | None = None
    ) -> Any:
        """The value, if it is right.

        None if it is missing, not known here, or the word ``also``.
        """
        value = self.value
        if value is None or value == also or self.unknown:
            return None
        if is_right(value):
            return value
        if also:
            expected += f" or '{also}'"
        return self.refuse(expected)

    def mapping(self) -> ConfigPart:
        """This part, if it is a mapping, missing, or not known here."""
        self.checked(lambda value: isinstance(value, dict), "a mapping")
        return self

    @overload
    def integer(
        self, least: int = 1, most: int = LARGEST, also: str | None = None
    ) -> int | None: ...

    @overload
    def integer(
        self, least: int = 1, most: int = LARGEST, also: str | None = None, *, default: int
    ) -> int: ...

    def integer(
        self,
        least: int = 1,
        most: int = LARGEST,
        also: str | None = None,
        *,
        default: int | None = None,
    ) -> int | None:
        """An integer; the default if it is missing, not known here, or the word ``also``."""
        expected = f"an integer of at least {least}"
        if most != LARGEST:
            expected += f" and at most {most}"

        def is_right(value: Any) -> bool:
            is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
            return is_whole and least <= value <= most

        value = self.checked(is_right, expected, also)
        if value is None:
            return default
        return int(value)

    def number(self, also: str | None = None, *, least: float = 0.0) -> float | None:
        """A finite number (1e-1 is a string in YAML)."""
        expected = "a finite number"
        if math.isfinite(least):
            expected += f" of at least {least:g}"

        def is_right(value: Any) -> bool:
            try:
                number = float(value)
            except (ValueError, TypeError, OverflowError):
                return False
            return not isinstance(value, bool) and math.isfinite(number) and number >= least

        value = self.checked(is_right, expected, also)
        if value is None:
            return None
        return float(value)

    def flag(self, default: bool, also: str | None = None) -> bool:
        """True or false; the default if it is missing, not known here, or the word ``also``."""
        value = self.checked(lambda value: _flag(value) is not None, "true or false", also)
        if value is None:
            return default
        return bool(_flag(value))

    def string(self) -> str | None:
        found: str | None = self.checked(lambda value: isinstance(value, str), "a string")
        return found

    def zero_stage(self, default: int, also: str | None = None) -> int:
        """A stage of ZeRO; the default if it is missing, not known here, or the word ``also``."""
        value = self.checked(
            lambda value: type(value) is int and 0 <= value <= 3, "0, 1, 2 or 3", also
        )
        if value is None:
            return default
        return int(value)


def _flag(value: Any) -> bool | None:
    """What a value says where true or false is meant, as parsers of options read it."""
    words = str(value).lower()
    if words in {"true", "yes", "t", "y", "1", "1.0"}:
        return True
    if words in {"false", "no", "f", "n", "0", "0.0"}:
        return False
    return None


def put(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Put a value where its path leads, without changing the mappings of a file."""
    for key in path[:-1]:
        inner = values.get(key)
        values[key] = {}
        if isinstance(inner, dict):
            values[key] |= inner
        values = values[key]
    values[path[-1]] = value


def read_file(file: Path) -> ConfigPart:
    """Read a YAML, JSON or TOML file, by its suffix.

    Raises NotReadError, with file and line, if it cannot be read, is too large or nested too
    deeply, or has no keys.
    """
    text = read_text(file)
    readers = {".toml": _toml, ".json": _json}
    part = readers.get(file.suffix.lower(), _yaml)(text, str(file))
    if not isinstance(part.values, dict):
        found = "has no keys at the top level"
        if part.values is None:
            found = "is empty"
        raise NoConfigError(
            f"{file}:1: {found}; it must be a mapping with the keys of a training config"
        )
    return part


def read_text(file: Path) -> str:
    """The text of a file of any kind that lint reads. Raises NotReadError as ``read_file`` does."""
    advice = "name a config file"
    try:
        if file.is_dir():
            raise NotReadError(f"{file}: is a folder that cannot be searched; {advice}")
        if file.exists() and not file.is_file():
            raise NotReadError(f"{file}: is a device or pipe; {advice}")
        with file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = str(error)
        if isinstance(error, OSError):
            reason = reason_of(error)
        raise NotReadError(f"{file}: cannot be read ({reason}); {advice}") from error
    if len(content) > MAX_BYTES:
        raise NoConfigError(
            f"{file}:1: is larger than {MAX_BYTES >> 10} KiB; a config must be smaller"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise NotReadError(
            f"{file}:{line}: is not UTF-8 text (byte {error.start}); {advice}"
        ) from error


def _toml(text: str, file: str) -> ConfigPart:
    """A TOML file; the line of a key is where it stands in its table."""
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        where = re.search(r"line (\d+)", str(error))
        line = "1"
        if where:
            line = where.group(1)
        raise NotReadError(f"{file}:{line}: is not TOML ({error})") from error
    except RecursionError:
        raise NotReadError(f"{file}:1: {TOO_DEEP}") from None
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, line in enumerate(text.split("\n"), 1):
        head = re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$", line)
        if head:
            table = tuple(part.strip().strip("\"'") for part in head.group(1).split("."))
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w\"'.-]+)\s*=", line):
            path = (*table, *(part.strip("\"'") for part in key.group(1).split(".")))
            lines.setdefault(path, number)
    return ConfigPart(file, values, lines)


def _json(text: str, file: str) -> ConfigPart:
    return _loaded(without_comments(text), file, is_json=True)


def _yaml(text: str, file: str) -> ConfigPart:
    return _loaded(text, file, is_json=False)


def _loaded(text: str, file: str, *, is_json: bool) -> ConfigPart:
    try:
        loader = _Loader(text, file, is_json=is_json)
        node = loader.get_single_node()
        values = None
        if node is not None:
            values = loader.value_of(node, ())
    except InputError:
        raise
    except RecursionError:
        raise NotReadError(f"{file}:1: {TOO_DEEP}") from None
    except yaml.MarkedYAMLError as error:
        kind = "plain YAML"
        if is_json:
            kind = "JSON, with or without comments"
        line, problem = _marked(error)
        error_class = NotReadError
        if any(words in problem for words in FOREIGN):
            error_class = ForeignError
        raise error_class(f"{file}:{line}: is not {kind} ({problem})") from error
    except (
        yaml.YAMLError,
        ValueError,
        OverflowError,
    ) as error:  # the last two: an escape beyond Unicode
        position = 0
        if isinstance(error, yaml.reader.ReaderError):  # a control character
            position = error.position
        line = text.count("\n", 0, position) + 1
        kind = "plain YAML"
        if is_json:
            kind = "JSON"
        raise NotReadError(
            f"{file}:{line}: is not {kind} ({str(error).splitlines()[0]})"
        ) from error
    return ConfigPart(file, values, loader.lines, repeated=tuple(loader.repeated))


def _marked(error: yaml.MarkedYAMLError) -> tuple[int, str]:
    """The line of an error, and what is wrong there or, if that is not said, what it is part of."""
    mark, problem = error.problem_mark, error.problem
    if mark is None:
        mark = error.context_mark
    if problem is None:
        problem = error.context
    line = 1
    if mark is not None:
        line = mark.line + 1
    return line, str(problem)


FOREIGN = ("found another document", "could not determine a constructor", "found unhashable key")
"""What PyYAML says of several documents, values of a program's own, and templates."""
TOO_DEEP = f"is nested more than {MAX_DEPTH} levels deep; a config must be flatter"
TOO_MANY = f"has more than {MAX_VALUES} values with its aliases expanded; use fewer"
MERGE = "tag:yaml.org,2002:merge"
NOT_YAML = re.compile(f"{yaml.reader.Reader.NON_PRINTABLE.pattern}|[\t\x85\u2028\u2029]")
"""Characters that JSON may contain, and YAML may not, or takes for the end of a line."""
STRING_OR_COMMENT = re.compile(r'"(?:[^"\\\n]|\\.)*"?|//[^\n]*|#[^\n]*|/\*.*?(?:\*/|\Z)', re.DOTALL)
"""Also those without an end, so that no text is searched for it again and again."""


def without_comments(text: str) -> str:
    """The text without the comments that DeepSpeed's reader (hjson) skips.

    Each character stays in its line.
    """

    def blank(found: re.Match[str]) -> str:
        word = found.group()
        if word.startswith('"'):
            return word
        return re.sub("[^\\n]", " ", word)

    return STRING_OR_COMMENT.sub(blank, text)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """PyYAML's safe loader, which makes no objects of a user's classes, and notes lines.

    JSON's scalars are JSON's.
    """

    def __init__(self, text: str, file: str, *, is_json: bool) -> None:
        self.file, self.json = file, ""
        if is_json:
            self.json = text
            text = NOT_YAML.sub(" ", text)
        super().__init__(text)
        self.lines: dict[KeyPath, int] = {}
        self.repeated: list[Repeated] = []
        self.doubles: dict[int, list[Repeated]] = {}
        """By mapping: keys given twice, with the key as path."""
        self.num_values = 0
        self.num_merged = 0

    def value_of(self, node: yaml.Node, path: KeyPath) -> Any:
        """The value of a node. Raises NotReadError for what is too large or too deep."""
        self.num_values += 1
        if self.num_values > MAX_VALUES:
            raise self.error(node, TOO_MANY)
        if len(path) > MAX_DEPTH:
            raise self.error(node, TOO_DEEP)
        if isinstance(node, yaml.SequenceNode) and (
            node.tag == self.DEFAULT_SEQUENCE_TAG or self.is_foreign(node)
        ):
            return [
                self.inside(item, (*path, str(index)), item)
                for index, item in enumerate(node.value)
            ]
        if isinstance(node, yaml.MappingNode) and (
            node.tag == self.DEFAULT_MAPPING_TAG or self.is_foreign(node)
        ):
            return self.mapping_of(node, path)
        if self.is_foreign(node):
            return f"${{{node.tag}}}"  # made by another program, so it is not known here
        return self.construct_object(node, deep=True)

    def mapping_of(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        """The keys of a mapping: a repeated one has its last value, and a merged one gives way."""
        for each in self.doubles.pop(id(node), ()):
            self.repeated.append(replace(each, path=path + each.path))
        self.flatten_mapping(node)
        found: dict[str, Any] = {}
        for key_node, inner in node.value:
            key = str(self.construct_object(key_node))
            found[key] = self.inside(inner, (*path, key), key_node)
        return found

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Put in what ``<<`` names. Raises NotReadError if that is too much in the whole file."""
        for key_node, value in node.value:
            if key_node.tag == MERGE:
                self.count_merged(value)
        super().flatten_mapping(node)

    def count_merged(self, node: yaml.Node) -> None:
        """Count what a mapping brings, or a list of them, before it is put in."""
        inner = [node]
        if isinstance(node, yaml.SequenceNode):
            inner = node.value
        for each in inner:
            if isinstance(each, yaml.MappingNode):
                self.flatten_mapping(each)
                self.num_merged += len(each.value)
            if self.num_merged > MAX_VALUES:
                raise self.error(node, TOO_MANY)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        first: dict[str, tuple[int, yaml.Node]] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConstructorError(None, None, "found unhashable key", key_node.start_mark)
            if key_node.tag == MERGE:
                continue
            key, line = str(self.construct_object(key_node)), key_node.start_mark.line + 1
            if key in first:
                first_line, before = first[key]
                is_same = isinstance(value, yaml.ScalarNode) and (before.tag, before.value) == (
                    value.tag,
                    value.value,
                )
                self.doubles.setdefault(id(node), []).append(
                    Repeated((key,), line, first_line, is_same)
                )
            first.setdefault(key, (line, value))
        return node

    def is_foreign(self, node: yaml.Node) -> bool:
        """Whether another program's tag, such as ``!env``, says what the value is."""
        return bool(node.tag.startswith("!")) and node.tag != "!"

    def inside(self, node: yaml.Node, path: KeyPath, place: yaml.Node) -> Any:
        """The value of a key or item, whose line is noted."""
        self.lines[path] = int(place.start_mark.line) + 1
        return self.value_of(node, path)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            if not self.json:
                return super().construct_object(node, deep)
            text = self.json[node.start_mark.index : node.end_mark.index]
            is_quoted = text.startswith('"')
            if not is_quoted and not re.fullmatch(
                r"-?[\d.]+([eE][+-]?\d+)?|true|false|null|-?Infinity|NaN", text
            ):
                return f"${{{text}}}"  # a placeholder of a template
            return json.loads(text, strict=False)
        except (
            ValueError,
            KeyError,
            IndexError,
            OverflowError,
            TypeError,
            AttributeError,
        ) as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from error

    def error(self, node: yaml.Node, words: str) -> NotReadError:
        return NotReadError(f"{self.file}:{node.start_mark.line + 1}: {words}")
