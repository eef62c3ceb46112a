"""A matrix file: its keys, what each may hold, and the reader that says what is wrong and what would be right."""

from __future__ import annotations

import dataclasses
import difflib
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import files
from bench.errors import InputError, shown
from bench.plan.cell import SGD, Device, Precision
from bench.plan.models import SIZES

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
    content = files.read(path, f"--matrix {name}", "name a TOML file")
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


OPTIMIZERS = ("adamw-foreach", "adamw-fused", SGD)
METHODS = tuple(dict.fromkeys(name.partition("-")[0] for name in OPTIMIZERS))
"""What the optimizers compute, each with a learning rate of its own: adamw, sgd."""


@dataclass(frozen=True, slots=True)
class Key:
    """What a key of a matrix file may hold."""

    check: Callable[[Any], bool]
    expected: str
    """What would be right, in words."""
    default: Any = None
    """Used if the key is missing; None if it must be there."""


def _integer(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and least <= value < 2**63


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _share(value: Any) -> bool:
    return _number(value) and value < 1


def _number_or_0(value: Any) -> bool:
    return _number(value) or (value == 0 and not isinstance(value, bool))


def _rates(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and value.keys() <= set(METHODS) and all(map(_number, value.values()))
    return _number(value)


def _boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _list_of(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and bool(value) and all(map(check, value))


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


def _string(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


KEYS: dict[str, Key] = {
    "description": Key(lambda value: isinstance(value, str), "a string", ""),
    "device": Key(_one_of(*Device), f"one of {', '.join(Device)}"),
    "repeats": Key(_integer(1), "an integer of at least 1", 3),
    "max_repeats": Key(_integer(0), "an integer of at least repeats, or 0 for no more than those", 0),
    "precision": Key(_share, "the width of an interval above 0 and below 1, such as 0.02", 0.02),
    "budget_s": Key(_number_or_0, "a positive number of seconds, or 0 for no limit", 0),
    "baseline": Key(_string, "'auto' or the name of a backend", "auto"),
    "timeout_s": Key(_number, "a positive number of seconds", 600),
    "threads": Key(_integer(0), "an integer of at least 1: threads per rank, or 0 for its share of the cores", 0),
    "once": Key(_boolean, "true or false: whether each cell has one trial, whatever repeats are", False),
    "share_gpu": Key(_boolean, "true or false", False),
    "inactivity_s": Key(_number_or_0, "a positive number of seconds, or 0 for no limit", 120),
    "workload.workload": Key(_string, "'llama' or 'package.module:factory'", "llama"),
    "workload.model": Key(_string, f"a model size: {', '.join(SIZES)}", "tiny"),
    "workload.corpus": Key(_string, "'markov' or the path of a text file", "markov"),
    "workload.sequence_length": Key(_integer(1), "an integer of at least 1"),
    "workload.global_batch_size": Key(_integer(1), "an integer of at least 1"),
    "workload.for_each_rank": Key(
        _boolean, "true or false: whether global_batch_size is multiplied by the number of ranks", False
    ),
    "training.optimizer": Key(_one_of(*OPTIMIZERS), f"one of {', '.join(OPTIMIZERS)}", "adamw-foreach"),
    "training.learning_rate": Key(
        _rates,
        "a positive number, or a table of one for each of " + " and ".join(METHODS),
        {"adamw": 1e-3, "sgd": 0.05},
    ),
    "training.warmup_windows": Key(_integer(1), "an integer of at least 1", 3),
    "training.timed_windows": Key(_integer(1), "an integer of at least 1", 12),
    "training.seed": Key(_integer(0), "an integer of at least 0 and below 2**63", 0),
    "axes.backend": Key(
        lambda value: value == "all" or _list_of(_string)(value), "'all' or a list of backend names", "all"
    ),
    "axes.accumulate": Key(
        lambda value: value == "auto" or _list_of(_integer(1))(value),
        "a list of integers of at least 1, or 'auto': what axes.micro_batch_size leaves of the global batch",
    ),
    "axes.micro_batch_size": Key(_list_of(_integer(1)), "a list of integers of at least 1", []),
    "axes.world_size": Key(
        lambda value: value == "all" or _list_of(_integer(1))(value),
        "a list of integers of at least 1, or 'all' for one rank per GPU",
    ),
    "virtual.world_size": Key(_list_of(_integer(1)), "a list of integers of at least 1", []),
    "virtual.micro_batch_size": Key(_integer(1), "an integer of at least 1", 1),
    "virtual.fake_tensors": Key(_boolean, "true or false", False),
    "virtual.alone": Key(_boolean, "true or false", False),
    "axes.precision": Key(_list_of(_one_of(*Precision)), f"a list of {', '.join(Precision)}", ["fp32"]),
    "axes.optimizer": Key(_list_of(_one_of(*OPTIMIZERS)), f"a list of {', '.join(OPTIMIZERS)}", []),
    "axes.seed": Key(_list_of(_integer(0)), "a list of integers of at least 0 and below 2**63", []),
    "axes.clip_norm": Key(_list_of(_number_or_0), "a list of positive numbers, or 0 for no clipping", [0.0]),
    "axes.activation_checkpointing": Key(_list_of(_boolean), "a list of true and false", [False]),
    "axes.compiled": Key(_list_of(_boolean), "a list of true and false", [False]),
    "groups": Key(_list_of(lambda group: isinstance(group, dict) and bool(group)), "a list of tables, [[groups]]", []),
}
"""All keys of a matrix file, as table.key; the only ones allowed. One optimizer may also stand under ``training``."""
FOR_ALL = ("workload.corpus", "training.seed", "training.optimizer")
"""Keys that a run has once: the file that all read, the seed of its order; ``axes.optimizer`` is for groups."""
IN_GROUPS = ("once", *(key for key in KEYS if "." in key and key not in FOR_ALL))
"""Keys that a group may set."""


def check(rule: Key, value: Any, place: str) -> None:
    """Raise InputError, which begins with ``place``, if the key may not hold that value."""
    if not rule.check(value):
        raise InputError(f"{place} is {shown(value)}; it must be {rule.expected}")


def suggest(name: str, known: Sequence[str]) -> str:
    """What a name that is unknown may have been meant to be, or what there is, for an error."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"
