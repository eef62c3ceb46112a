"""A matrix file is read. Every key is checked, and what is wrong is named with what would be right."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import reading
from bench.errors import InputError
from bench.matrix.keys import IN_GROUPS, KEYS, check, suggest

FOLDER = Path(__file__).parent.parent / "matrices"
"""The matrices that are shipped, one TOML file each; the file's name is the matrix' name."""


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A checked matrix: every key of KEYS has a value."""

    name: str
    source: str
    """Where the values came from, to be named in errors: the file."""
    values: Mapping[str, Any]
    """By table.key."""
    places: Mapping[str, str] = field(default_factory=dict)
    """For keys that an option of the command overrode: the option."""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def place(self, key: str) -> str:
        """Where the value of a key stands."""
        return self.places.get(key, f"{self.source}: {key}")

    def override(self, key: str, value: Any, option: str) -> Matrix:
        """The same matrix with another value, without the groups that set that key: they would say otherwise.

        Raises InputError naming the option if the value cannot be.
        """
        check(KEYS[key], value, option)
        kept = [group for group in self.values["groups"] if key not in group]
        return dataclasses.replace(
            self, values={**self.values, "groups": kept, key: value}, places={**self.places, key: option}
        )

    @property
    def parts(self) -> list[Matrix]:
        """The matrix without its groups, then each group as a matrix."""
        found = [dataclasses.replace(self, values={**self.values, "groups": []})]
        for number, group in enumerate(self.values["groups"], start=1):
            places = {**self.places, **{key: _place(self.source, number, key) for key in group}}
            found.append(dataclasses.replace(self, values={**self.values, **group, "groups": []}, places=places))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain values for run.json."""
        return {"name": self.name, "source": self.source, "values": dict(self.values), "places": dict(self.places)}


def names() -> list[str]:
    """The names of the shipped matrices."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Matrix:
    """The shipped matrix of that name, or the one in the file. Raises InputError if it cannot be read or is wrong."""
    shipped = name in names()
    path = FOLDER / f"{name}.toml" if shipped else Path(name)
    source = f"{name}.toml" if shipped else name
    if not shipped and path.suffix != ".toml":
        raise InputError(f"--matrix {name}: unknown; use {', '.join(['auto', *names()])} or a .toml file")
    content = reading.read(path, f"--matrix {name}", "name a TOML file")
    try:
        document = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:  # the second: nested too deeply
        raise InputError(f"{source}: is not TOML ({error})") from error
    return parse(document, name=path.stem, source=source)


def parse(document: Mapping[str, Any], *, name: str, source: str) -> Matrix:
    """A matrix from a TOML document. Raises InputError naming the key that is unknown, missing or wrong."""
    given = _flat(document, f"{source}:")
    for key, value in given.items():
        if key not in KEYS:
            raise InputError(f"{source}: {key} is unknown; {suggest(key, list(KEYS))}")
        check(KEYS[key], value, f"{source}: {key}")
    if "groups" in given:
        given["groups"] = [_group(group, number, source) for number, group in enumerate(given["groups"], start=1)]
    values = {}
    for key, rule in KEYS.items():
        if key not in given and rule.default is None:
            raise InputError(f"{source}: {key} is missing; it must be {rule.expected}")
        values[key] = given.get(key, rule.default)
    if values["max_repeats"] and values["max_repeats"] < values["repeats"]:
        raise InputError(
            f"{source}: max_repeats is {values['max_repeats']}; it must be at least repeats, {values['repeats']}"
        )
    if {"axes.optimizer", "training.optimizer"} <= given.keys():
        raise InputError(
            f"{source}: axes.optimizer is {given['axes.optimizer']!r} and training.optimizer is "
            f"{given['training.optimizer']!r}; leave one of them out"
        )
    return Matrix(name=name, source=source, values=values)


def check_stored(manifest: Mapping[str, Any], place: str) -> None:
    """Raise InputError, which begins with ``place``, if a run's manifest does not hold a matrix' values."""
    values = manifest.get("matrix", {}).get("values", {})
    for key, rule in KEYS.items():
        if key in values:
            if values[key] != rule.default:  # a default need not be what may be asked for
                check(rule, values[key], f"{place}: matrix: {key}")
        elif rule.default is None:
            raise InputError(f"{place}: matrix: {key} is missing; it must be {rule.expected}")


def _flat(document: Mapping[str, Any], place: str) -> dict[str, Any]:
    """The values of a document by table.key."""
    tables = {key.partition(".")[0] for key in KEYS if "." in key}
    given: dict[str, Any] = {}
    for key, value in document.items():
        if key in tables:
            if not isinstance(value, dict):
                raise InputError(f"{place} {key} must be a table, [{key}]")
            given |= {f"{key}.{inner}": v for inner, v in value.items()}
        else:
            given[key] = value
    return given


def _place(source: str, number: int, key: str) -> str:
    """Where the value of a key of a group stands."""
    return f"{source}: {key} of group {number}"


def _group(group: Mapping[str, Any], number: int, source: str) -> dict[str, Any]:
    """A group's values by table.key. Raises InputError naming the key that it may not set, or that is wrong."""
    given = _flat(group, f"{source}: in group {number},")
    for key, value in given.items():
        place = _place(source, number, key)
        if key not in IN_GROUPS:
            hint = "it is one for the whole matrix" if key in KEYS else suggest(key, list(IN_GROUPS))
            raise InputError(f"{place} cannot be set there; {hint}")
        check(KEYS[key], value, place)
    return given
