"""YAML and JSON as plain values with lines: from PyYAML's node graph, without its constructors of objects."""

from __future__ import annotations

from typing import Any

import yaml

from bench.errors import InputError, shown

Path = tuple[str, ...]
"""Where a value stands: the keys on the way to it; items of a list by their index."""
MAX_DEPTH = 64
"""Of nested mappings and lists."""


def too_deep(file: str) -> InputError:
    """The error for a text that is nested deeper than MAX_DEPTH, or than its parser can follow."""
    return InputError(f"{file}: is nested more than {MAX_DEPTH} deep; a config must be flatter")


def check_depth(value: Any, file: str) -> None:
    """Raise InputError if mappings and lists are nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise too_deep(file)


MAX_NODES = 20_000
"""Of a YAML file with its aliases expanded: aliases of aliases grow exponentially."""
_TAG = "tag:yaml.org,2002:"
_SCALARS = {_TAG + name for name in ("null", "bool", "int", "float", "str", "timestamp")}


def parse(text: str, file: str) -> tuple[Any, dict[Path, int]]:
    """The values of a YAML text, and the lines of its keys and items.

    Raises InputError naming the line for a syntax error, a tag other than YAML's plain ones, a key that is there
    twice, and for a text that is nested too deep or that its aliases make too large.
    """
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}" if mark else ""
        raise InputError(f"{file}{place}: is not YAML ({error.problem or error.context})") from error
    except RecursionError:
        raise too_deep(file) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the last two: an escape beyond Unicode
        raise InputError(f"{file}: is not YAML ({str(error).splitlines()[0]})") from error
    if node is None:
        return None, {}
    reader = _Reader(file)
    return reader.value(node, (), 0), reader.lines


class _Reader:
    """Walks the node graph once, as a tree."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[Path, int] = {}
        self._num_nodes = 0
        self._scalars = yaml.SafeLoader("")

    def value(self, node: yaml.Node, path: Path, depth: int) -> Any:
        self._count(depth)
        if isinstance(node, yaml.MappingNode):
            self._check_tag(node, {_TAG + "map"}, path)
            return self._mapping(node, path, depth)
        if isinstance(node, yaml.SequenceNode):
            self._check_tag(node, {_TAG + "seq"}, path)
            items = []
            for index, item in enumerate(node.value):
                here = (*path, str(index))
                self.lines[here] = _line(item)
                items.append(self.value(item, here, depth + 1))
            return items
        return self._scalar(node, path)

    def _count(self, depth: int) -> None:
        """Refuse what aliases make too large or endless."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise InputError(f"{self.file}: has more than {MAX_NODES} values with its aliases expanded; write fewer")
        if depth > MAX_DEPTH:
            raise too_deep(self.file)

    def _mapping(self, node: yaml.MappingNode, path: Path, depth: int) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                merged = {**self._merge(value_node, path, depth), **merged}
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(f"{self.file}:{_line(key_node)}: a key is a mapping or a list; it must be a word")
            key = str(self._scalar(key_node, path)) if key_node.tag != _TAG + "str" else key_node.value
            here = (*path, key)
            if key in own:
                raise InputError(
                    f"{self.file}:{_line(key_node)}: {'.'.join(here)} is there twice (first in line {self.lines[here]})"
                )
            self.lines[here] = _line(key_node)
            own[key] = self.value(value_node, here, depth + 1)
        return {**merged, **own}

    def _merge(self, node: yaml.Node, path: Path, depth: int) -> dict[str, Any]:
        """What ``<<`` brings in. Its keys have their own lines, unless the mapping has them too."""
        self._count(depth)
        if isinstance(node, yaml.SequenceNode):
            parts = [self._merge(item, path, depth + 1) for item in node.value]
            return {key: value for part in reversed(parts) for key, value in part.items()}
        if not isinstance(node, yaml.MappingNode):
            raise InputError(f"{self.file}:{_line(node)}: '<<' must name a mapping or a list of them")
        outer, self.lines = self.lines, {}
        value = self.value(node, path, depth + 1)
        inner, self.lines = self.lines, outer
        for here, line in inner.items():
            self.lines.setdefault(here, line)
        assert isinstance(value, dict)
        return value

    def _scalar(self, node: yaml.Node, path: Path) -> Any:
        if node.tag == _TAG + "value":
            return node.value
        self._check_tag(node, _SCALARS, path)
        try:
            return self._scalars.construct_object(node)
        except (yaml.YAMLError, ValueError, KeyError, IndexError, OverflowError, TypeError, AttributeError) as error:
            raise InputError(
                f"{self.file}:{_line(node)}: {'.'.join(path)} is {shown(node.value)}; it is no YAML value"
            ) from error

    def _check_tag(self, node: yaml.Node, allowed: set[str], path: Path) -> None:
        if node.tag not in allowed:
            tag = node.tag.replace(_TAG, "!!")
            raise InputError(
                f"{self.file}:{_line(node)}: {'.'.join(path) or 'the document'} has the tag {shown(tag)}; "
                "lint makes no objects: it must be a plain value"
            )


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
