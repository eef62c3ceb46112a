"""YAML as plain values with the lines of their keys. PyYAML's safe loader makes no objects of a user's classes."""

from __future__ import annotations

from typing import Any

import yaml
from yaml.constructor import ConstructorError

from bench.errors import InputError

Path = tuple[str, ...]
"""The keys that lead to a value; items of a list by their index."""
MAX_DEPTH = 64
"""Nested mappings and lists."""
MAX_NODES = 20_000
"""Values of a file with its aliases expanded: aliases of aliases grow exponentially."""
MERGE = "tag:yaml.org,2002:merge"


def deep_line(text: str) -> int:
    """The line where more than MAX_DEPTH brackets are open; the first if there is none."""
    depth, line = 0, 1
    for character in text:
        depth += (character in "[{") - (character in "]}")
        line += character == "\n"
        if depth > MAX_DEPTH:
            return line
    return 1


def too_deep(file: str, line: int) -> InputError:
    """The error for a text that is nested deeper than MAX_DEPTH, or than its parser can follow."""
    return InputError(f"{file}:{line}: is nested more than {MAX_DEPTH} levels deep; a config must be flatter")


def parse(text: str, file: str) -> tuple[Any, dict[Path, int]]:
    """The values of a YAML text, and the lines of its keys and items; keys become strings.

    Raises InputError for a syntax error, a tag other than YAML's plain ones, a repeated key, and a text that is nested
    too deep or that its aliases make too large.
    """
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = _Lines(file, loader)
        lines.add(node, (), 0)
        return _with_text_keys(loader.construct_document(node)), lines.found
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{file}:{mark.line + 1}" if mark else f"{file}:1"
        raise InputError(f"{place}: is not plain YAML ({error.problem or error.context})") from error
    except RecursionError:
        raise too_deep(file, deep_line(text)) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: an escape beyond Unicode
        # A control character is the reader's error, which knows its position.
        line = text.count("\n", 0, getattr(error, "position", None) or 0) + 1
        raise InputError(f"{file}:{line}: is not plain YAML ({str(error).splitlines()[0]})") from error


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
    """PyYAML's safe loader, whose every error has a line."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, KeyError, IndexError, OverflowError, TypeError, AttributeError) as error:
            raise ConstructorError(None, None, str(error), node.start_mark) from error


class _Lines:
    """The lines of keys and items, from one walk over the nodes."""

    def __init__(self, file: str, loader: _Loader) -> None:
        self.file, self.loader = file, loader
        self.found: dict[Path, int] = {}
        self.num_nodes = 0

    def add(self, node: yaml.Node, path: Path, depth: int) -> None:
        """Add what is below a node. Raises InputError for a repeated key, and for what is too large or too deep."""
        self.num_nodes += 1
        if self.num_nodes > MAX_NODES:
            place = f"{self.file}:{_line(node)}"
            raise InputError(f"{place}: has more than {MAX_NODES} values with its aliases expanded; use fewer")
        if depth > MAX_DEPTH:
            raise too_deep(self.file, _line(node))
        if isinstance(node, yaml.SequenceNode):
            for index, item in enumerate(node.value):
                self.found.setdefault((*path, str(index)), _line(item))
                self.add(item, (*path, str(index)), depth + 1)
        elif isinstance(node, yaml.MappingNode):
            self._add_keys(node, path, depth)

    def _add_keys(self, node: yaml.MappingNode, path: Path, depth: int) -> None:
        own: dict[str, int] = {}
        for key_node, value_node in node.value:
            if key_node.tag == MERGE or not isinstance(key_node, yaml.ScalarNode):
                continue  # PyYAML refuses a key that is a mapping or a list
            key, line = str(self.loader.construct_object(key_node)), _line(key_node)
            here = (*path, key)
            if key in own:
                raise InputError(f"{self.file}:{line}: {'.'.join(here)} is repeated (first in line {own[key]})")
            own[key] = line
            self.found.setdefault(here, line)
            self.add(value_node, here, depth + 1)
        for key_node, value_node in node.value:
            if key_node.tag == MERGE:  # a key of the mapping itself goes before a merged one
                for part in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    self.add(part, path, depth + 1)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(inner) for key, inner in value.items()}
    return [_with_text_keys(inner) for inner in value] if isinstance(value, list) else value
