"""The keys of a matrix file: what each may hold, in code and in words, and what it is if it is missing."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cell import SGD, Device, Precision
from bench.errors import InputError, shown
from bench.workload.sizes import SIZES

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
    "axes.accumulate": Key(_list_of(_integer(1)), "a list of integers of at least 1"),
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
