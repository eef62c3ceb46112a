"""A matrix file becomes cells. Every key is checked, and what is wrong is named with what would be right."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import reading
from bench.backends.base import Backend, offered
from bench.cell import REFERENCE, SGD, Cell, Device, Precision
from bench.errors import InputError, shown
from bench.virtual import refusal
from bench.workload import find_factory
from bench.workload.corpus import describe_file
from bench.workload.sizes import SIZES

FOLDER = Path(__file__).parent / "matrices"
"""The matrices that are shipped, one TOML file each; the file's name is the matrix' name."""
OPTIMIZERS = ("adamw-foreach", "adamw-fused", SGD)
TWIN = "again"
"""Label of the second half of the A/A pair."""
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
ONCE = ("workload.corpus", "training.seed", "training.optimizer")
"""Keys that a run has once: the file that all read, the seed of its order; ``axes.optimizer`` is for groups."""
IN_GROUPS = ("repeats", *(key for key in KEYS if "." in key and key not in ONCE))
"""Keys that a group may set; ``repeats`` are then the most of its cells."""


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
        _check(KEYS[key], value, option)
        kept = [group for group in self.values["groups"] if key not in group]
        return dataclasses.replace(
            self, values={**self.values, "groups": kept, key: value}, places={**self.places, key: option}
        )

    @property
    def parts(self) -> list[tuple[Matrix, int]]:
        """The matrix without its groups, then each group as a matrix; and the most repeats of its cells, 0 for any."""
        found = [(dataclasses.replace(self, values={**self.values, "groups": []}), 0)]
        for number, group in enumerate(self.values["groups"], start=1):
            own = {key: value for key, value in group.items() if key != "repeats"}
            part = dataclasses.replace(
                self,
                values={**self.values, **own, "groups": []},
                places={**self.places, **{key: _place(self.source, number, key) for key in own}},
            )
            found.append((part, group.get("repeats", 0)))
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
            raise InputError(f"{source}: {key} is unknown; {_suggest(key, list(KEYS))}")
        _check(KEYS[key], value, f"{source}: {key}")
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
                _check(rule, values[key], f"{place}: matrix: {key}")
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
            hint = "it is one for the whole matrix" if key in KEYS else _suggest(key, list(IN_GROUPS))
            raise InputError(f"{place} cannot be set there; {hint}")
        _check(KEYS[key], value, place)
    return given


def _check(rule: Key, value: Any, place: str) -> None:
    if not rule.check(value):
        raise InputError(f"{place} is {shown(value)}; it must be {rule.expected}")


def _suggest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"use one of {', '.join(known)}"


def expand(matrix: Matrix, backends: Mapping[str, type[Backend]], num_gpus: int) -> list[Cell]:
    """The cells of a matrix and of its groups, each once; the reference of each comes along, before all others.

    Then come those in virtual worlds, which have no reference, with the micro-batch that ``virtual.micro_batch_size``
    says; alone if ``virtual.alone``. Last comes the A/A twin: the baseline's cell with the most ranks and the largest N
    once more, under another label; of the groups only if what is before them has none.

    Raises InputError for an unknown backend, model or workload, an optimizer without a learning rate, a batch that does
    not divide by N x W, a corpus that cannot be used, more ranks than GPUs unless they share them, no GPU to share, or
    a backend that cannot be virtual.
    """
    parts = [_part(part, backends, num_gpus) for part, _ in matrix.parts]
    cells = dict.fromkeys(cell.reference() for real, _ in parts for cell in real)
    cells |= dict.fromkeys(cell for real, _ in parts for cell in real if cell.backend != REFERENCE)
    cells |= dict.fromkeys(cell for _, virtual in parts for cell in virtual)
    base = baseline(matrix, backends)
    for real, virtual in parts:
        timed = [cell for cell in real if cell.backend != REFERENCE and not cell.shared_gpu]
        timed = timed or [cell for cell in virtual if not cell.fake_tensors]
        own = [cell for cell in timed if cell.backend == base]
        if own:
            largest = max(own, key=lambda cell: (cell.world_size, cell.accumulate))
            return [*cells, dataclasses.replace(largest, twin=TWIN)]
    return list(cells)


def most_repeats(matrix: Matrix, backends: Mapping[str, type[Backend]], num_gpus: int) -> dict[str, int]:
    """Cells that are to have no more than so many trials, by id: those of groups that say so, and references on CUDA.

    A reference is there to be compared with, and does the same in every trial; on a GPU it may take longer than all
    else.
    """
    found: dict[Cell, int] = {}
    for part, repeats in matrix.parts:
        for cells in _part(part, backends, num_gpus):
            for cell in cells:
                found[cell] = max(found.get(cell, 1), repeats or sys.maxsize)
                if cell.device is Device.CUDA and not cell.virtual:
                    found[cell.reference()] = 1
    return {cell.cell_id: repeats for cell, repeats in found.items() if repeats < sys.maxsize}


def _part(matrix: Matrix, backends: Mapping[str, type[Backend]], num_gpus: int) -> tuple[list[Cell], list[Cell]]:
    """The cells of a matrix without its groups: on real ranks, and in virtual worlds. Raises as ``expand``."""
    chosen = list(backends) if matrix["axes.backend"] == "all" else matrix["axes.backend"]
    for name in chosen:
        if name not in backends:
            known = list(dict.fromkeys([*backends, *offered()]))
            raise InputError(f"{matrix.place('axes.backend')}: '{name}' is unknown; {_suggest(name, known)}")
    _check_workload(matrix)
    alone = matrix["virtual.alone"] and matrix["virtual.world_size"]
    world_sizes = [] if alone else _world_sizes(matrix, num_gpus)
    _check_batch(matrix, world_sizes)
    corpus = matrix["workload.corpus"]
    if corpus != "markov":
        corpus = describe_file(Path(corpus), matrix["workload.sequence_length"] + 1, matrix.place("workload.corpus"))
    real = _cells(matrix, chosen, corpus, world_sizes, virtual=False)
    virtual = _cells(matrix, chosen, corpus, matrix["virtual.world_size"], virtual=True)
    if matrix["axes.backend"] != "all":
        for cell in virtual:
            if reason := refusal(cell, backends[cell.backend]):
                raise InputError(f"{matrix.place('virtual.world_size')}: {reason}; leave it out")
    return real, virtual


def _cells(
    matrix: Matrix, backends: Sequence[str], corpus: str, world_sizes: Sequence[int], *, virtual: bool
) -> list[Cell]:
    """The product of the axes over worlds that exist, or that are virtual; each cell once."""
    rates = _learning_rates(matrix)
    seeds = matrix["axes.seed"] or [matrix["training.seed"]]
    axes = [matrix[f"axes.{name}"] for name in ("clip_norm", "activation_checkpointing", "compiled")]
    sizes = [matrix["axes.precision"], world_sizes, matrix["axes.accumulate"]]
    cells: dict[Cell, None] = {}
    for (
        optimizer,
        clip_norm,
        checkpointing,
        compiled,
        seed,
        precision,
        world_size,
        accumulate,
        name,
    ) in itertools.product(rates, *axes, seeds, *sizes, backends):
        if virtual and name == REFERENCE:
            continue
        micro_batch = matrix["virtual.micro_batch_size"]
        cell = Cell(
            backend=name,
            accumulate=accumulate,
            world_size=world_size,
            global_batch_size=micro_batch * accumulate * world_size if virtual else _batch(matrix, world_size),
            sequence_length=matrix["workload.sequence_length"],
            workload=matrix["workload.workload"],
            model=matrix["workload.model"],
            corpus=corpus,
            precision=Precision(precision),
            optimizer=optimizer,
            learning_rate=rates[optimizer],
            warmup_windows=matrix["training.warmup_windows"],
            timed_windows=matrix["training.timed_windows"],
            seed=seed,
            device=Device(matrix["device"]),
            clip_norm=float(clip_norm),
            virtual=virtual,
            fake_tensors=virtual and matrix["virtual.fake_tensors"],
            shared_gpu=matrix["share_gpu"] and not virtual,
            activation_checkpointing=checkpointing,
            compiled=compiled,
        )
        cells.setdefault(cell)
    return list(cells)


def baseline(matrix: Matrix, backends: Mapping[str, type[Backend]]) -> str:
    """The backend that the others are compared with: the one that is named, else the first of the matrix that can run.

    One with a known defect is taken only where there is no other. Raises InputError if the one named is not among
    those of the matrix.
    """
    chosen = list(backends) if matrix["axes.backend"] == "all" else list(dict.fromkeys(matrix["axes.backend"]))
    named = matrix["baseline"]
    if named != "auto":
        if named not in chosen:
            raise InputError(f"{matrix.place('baseline')}: '{named}' is not run here; {_suggest(named, chosen)}")
        return str(named)
    device = Device(matrix["device"])
    others = [name for name in chosen if name != REFERENCE]
    ranked = sorted(others, key=lambda name: (bool(backends[name].missing(device)), bool(backends[name].defect)))
    return ranked[0] if ranked else REFERENCE


def _check_workload(matrix: Matrix) -> None:
    """Refuse an unknown model size or a factory that cannot be found."""
    if matrix["workload.workload"] == "llama":
        model = matrix["workload.model"]
        if model not in SIZES:
            raise InputError(f"{matrix.place('workload.model')}: '{model}' is unknown; {_suggest(model, list(SIZES))}")
        return
    try:
        find_factory(matrix["workload.workload"])
    except InputError as error:
        raise InputError(f"{matrix.place('workload.workload')}: {error}") from error


def _world_sizes(matrix: Matrix, num_gpus: int) -> list[int]:
    asked, place = matrix["axes.world_size"], matrix.place("axes.world_size")
    if matrix["share_gpu"]:
        _check_sharing(matrix, num_gpus)
        return list(asked)
    if matrix["device"] == Device.CUDA:
        if num_gpus == 0:
            raise InputError(f"{matrix.place('device')} is 'cuda', and no GPU is visible here; use --matrix cpu")
        if asked != "all" and max(asked) > num_gpus:
            raise InputError(f"{place}: {max(asked)} ranks need as many GPUs; {num_gpus} are visible here")
    elif asked == "all":
        raise InputError(f"{place} is 'all', which means GPUs; on the CPU it must be a list of integers")
    return [num_gpus] if asked == "all" else list(asked)


def _check_sharing(matrix: Matrix, num_gpus: int) -> None:
    """Refuse ranks that are to share a GPU where there is none, or where it is not said how many they are."""
    place = matrix.place("share_gpu")
    on_cuda = matrix["device"] == Device.CUDA
    if num_gpus == 0 or not on_cuda:
        here = "none is visible here" if on_cuda else f"{matrix.place('device')} is '{matrix['device']}'"
        raise InputError(f"{place}: needs a GPU, and {here}; leave it out, or use --matrix gpu on a machine with one")
    if matrix["axes.world_size"] == "all":
        raise InputError(
            f"{matrix.place('axes.world_size')} is 'all', one rank per GPU; beside {place} it must be a list of "
            "integers, such as --world-size 2,4"
        )


def _batch(matrix: Matrix, world_size: int) -> int:
    """Samples per optimizer step over all ranks of a real world."""
    batch: int = matrix["workload.global_batch_size"]
    return batch * world_size if matrix["workload.for_each_rank"] else batch


def _learning_rates(matrix: Matrix) -> dict[str, float]:
    """The learning rate of each optimizer that is asked for."""
    optimizers = matrix["axes.optimizer"] or [matrix["training.optimizer"]]
    rates, place = matrix["training.learning_rate"], matrix.place("training.learning_rate")
    methods = {name: name.partition("-")[0] for name in optimizers}
    if not isinstance(rates, dict):
        if len(set(methods.values())) > 1:
            raise InputError(
                f"{place} is {rates!r} for {' and '.join(methods)}, which need different ones; "
                f"give a table such as {{adamw = 1e-3, sgd = 0.05}}"
            )
        rates = dict.fromkeys(METHODS, rates)
    for name, method in methods.items():
        if method not in rates:
            raise InputError(f"{place} has none for {name}; add {method} = ... to the table")
    return {name: float(rates[method]) for name, method in methods.items()}


def _check_batch(matrix: Matrix, world_sizes: Sequence[int]) -> None:
    """Refuse a batch that does not divide by N x W, and name the nearest that do."""
    batch, of_rank = matrix["workload.global_batch_size"], matrix["workload.for_each_rank"]
    for accumulate, world_size in itertools.product(matrix["axes.accumulate"], world_sizes):
        product = accumulate * (1 if of_rank else world_size)
        if of_rank and batch % product:
            raise InputError(
                f"{matrix.place('workload.global_batch_size')} is {batch} for each rank, which does not divide by N = "
                f"{accumulate}; use a multiple of it"
            )
        if batch % product:
            near = [product * n for n in (batch // product, batch // product + 1) if n]
            raise InputError(
                f"{matrix.place('workload.global_batch_size')} is {batch}, which does not divide by N x world size = "
                f"{accumulate} x {world_size} = {product}; the nearest that do: {' and '.join(map(str, near))}"
            )
