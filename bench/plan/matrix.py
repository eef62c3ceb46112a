"""Matrix files: their keys, the allowed values, and a reader with one-line errors."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field

from bench import files, validation
from bench.errors import InputError, suggest
from bench.plan.cell import Device, Precision
from bench.plan.models import LLAMA, SIZES, display_name
from bench.validation import Amount, Expect, Flag, Natural, Positive, PositiveNumber

FOLDER = Path(__file__).parent.parent / "matrices"
"""The shipped matrices: one TOML file each, named after the matrix."""


Optimizer = Literal["adamw-foreach", "adamw-fused", "sgd"]
OPTIMIZERS: tuple[str, ...] = get_args(Optimizer)
Method = Literal["adamw", "sgd"]
METHODS: tuple[str, ...] = get_args(Method)
"""The optimization algorithms, each with its own learning rate."""
MATRIX_BYTES = 4 * 2**20
MOST_GROUPS, MOST_CELLS = 200, 20_000
"""Groups of a matrix, and cells of all their axes together: a run of more would take months."""
SOME = Field(min_length=1)
Name = Annotated[str, SOME]
Size = Annotated[int, Field(strict=True, ge=1, le=2**24), Expect("an integer from 1 to 2**24")]
Positives = Annotated[list[Size], SOME, Expect("a list of integers from 1 to 2**24")]
Flags = Annotated[list[Flag], SOME, Expect("a list of true and false")]


class MatrixTable(BaseModel):
    """A table of a matrix file; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", use_enum_values=True)


class WorkloadTable(MatrixTable):
    """What is trained, and the batch size."""

    workload: Annotated[Name, Expect("'llama' or 'package.module:factory'")] = "llama"
    model: Annotated[Name, Expect(f"a model size: {', '.join(SIZES)}")] = "tiny"
    corpus: Annotated[Name, Expect("'markov' or the path of a text file")] = "markov"
    sequence_length: Size
    global_batch_size: Size
    for_each_rank: Annotated[
        Flag,
        Expect("true or false: whether global_batch_size is multiplied by the number of ranks"),
    ] = False


class TrainingTable(MatrixTable):
    """How it is trained, and for how long."""

    optimizer: Annotated[Optimizer, Expect(f"one of {', '.join(OPTIMIZERS)}")] = "adamw-foreach"
    learning_rate: Annotated[
        PositiveNumber | Annotated[dict[Method, PositiveNumber], SOME],
        Expect(f"a positive number, or a table of one for each of {' and '.join(METHODS)}"),
    ] = {"adamw": 1e-3, "sgd": 0.05}
    warmup_windows: Positive = 3
    timed_windows: Positive = 12
    seed: Natural = 0


class AxesTable(MatrixTable):
    """The axes; cells are their product."""

    backend: Annotated[
        Literal["all"] | Annotated[list[Name], SOME], Expect("'all' or a list of backend names")
    ] = "all"
    accumulate: Annotated[
        Literal["auto"] | Positives,
        Expect(
            "a list of integers of at least 1, or 'auto': what axes.micro_batch_size leaves of "
            "the global batch"
        ),
    ]
    micro_batch_size: Positives = []
    world_size: Annotated[
        Literal["all"] | Positives,
        Expect("a list of integers of at least 1, or 'all' for one rank per GPU"),
    ]
    precision: Annotated[list[Precision], SOME, Expect(f"a list of {', '.join(Precision)}")] = [
        Precision.FP32
    ]
    optimizer: Annotated[list[Optimizer], SOME, Expect(f"a list of {', '.join(OPTIMIZERS)}")] = []
    seed: Annotated[
        list[Natural], SOME, Expect("a list of integers of at least 0 and below 2**63")
    ] = []
    clip_norm: Annotated[
        list[Amount], SOME, Expect("a list of positive numbers, or 0 for no clipping")
    ] = [0.0]
    activation_checkpointing: Flags = [False]
    selective_checkpointing: Flags = [False]
    compiled: Flags = [False]
    ranks_per_node: Annotated[
        list[Natural],
        SOME,
        Expect(
            "a list of integers: ranks on each of several nodes, or 0 to fill the GPUs of a node "
            "before the next"
        ),
    ] = [0]
    replicate: Annotated[
        list[Annotated[int, Field(strict=True, ge=2)]],
        SOME,
        Expect("a list of integers of at least 2: replicas of HSDP"),
    ] = []


class VirtualTable(MatrixTable):
    """Virtual worlds, in which only rank 0 exists."""

    world_size: Positives = []
    micro_batch_size: Positive = 1
    fake_tensors: Flag = False
    alone: Flag = False


class PublishedTable(MatrixTable):
    """A figure that others published of the same training, which the report shows, too."""

    what: Name
    conditions: Name
    tokens_per_s_per_gpu: PositiveNumber
    memory_gib: PositiveNumber
    """As the source reports it."""
    source: Name
    """With versions and date."""


Limit = Annotated[Amount, Expect("a positive number of seconds, or 0 for no limit")]


class MatrixFile(MatrixTable):
    """A matrix file.

    Defaults are not validated: an empty list, which users may not give, means that another key
    applies.
    """

    description: Annotated[str, Expect("a string")] = ""
    device: Annotated[Device, Expect(f"one of {', '.join(Device)}")]
    repeats: Positive = 3
    max_repeats: Annotated[
        Natural, Expect("an integer of at least repeats, or 0 for no more than those")
    ] = 0
    precision: Annotated[
        float,
        Field(strict=True, gt=0, lt=1),
        Expect("the width of an interval above 0 and below 1, such as 0.02"),
    ] = 0.02
    budget_s: Limit = 0
    baseline: Annotated[Name, Expect("'auto' or the name of a backend")] = "auto"
    timeout_s: Annotated[PositiveNumber, Expect("a positive number of seconds")] = 600
    threads: Annotated[
        Natural,
        Expect("an integer of at least 1: threads per rank, or 0 for its share of the cores"),
    ] = 0
    once: Annotated[
        Flag, Expect("true or false: whether each cell runs a single trial, regardless of repeats")
    ] = False
    share_gpu: Flag = False
    inactivity_s: Limit = 120
    workload: WorkloadTable
    training: TrainingTable
    axes: AxesTable
    virtual: VirtualTable
    published: list[PublishedTable] = []
    groups: Annotated[
        list[Annotated[dict[str, Any], SOME]], SOME, Expect("a list of tables, [[groups]]")
    ] = []


TABLES: Mapping[str, type[MatrixTable]] = {
    "workload": WorkloadTable,
    "training": TrainingTable,
    "axes": AxesTable,
    "virtual": VirtualTable,
}


def _flat(document: Mapping[str, object]) -> dict[str, Any]:
    """The values of a document by table.key."""
    found: dict[str, Any] = {}
    for key, value in document.items():
        if key in TABLES and isinstance(value, dict):
            for inner, of_inner in value.items():
                found[f"{key}.{inner}"] = of_inner
        else:
            found[key] = value
    return found


def _defaults() -> dict[str, Any]:
    """The defaults of all keys that have one, by table.key."""
    tables = {name: table.model_construct() for name, table in TABLES.items()}
    return _flat(MatrixFile.model_construct(None, **tables).model_dump())


DEFAULTS = _defaults()
_TYPES = validation.declared(MatrixFile)
KEYS = tuple(_TYPES)
"""All allowed keys of a matrix file, as table.key. A single optimizer may also be given under
``training``."""
FOR_ALL = ("workload.corpus", "training.seed", "training.optimizer")
"""Keys that apply to the whole run, so groups may not set them; a group uses ``axes.optimizer``
instead."""
OF_TABLES = tuple(key for key in KEYS if "." in key)
IN_GROUPS = ("once", *(key for key in OF_TABLES if key not in FOR_ALL))
"""Keys that a group may set."""


def type_of(key: str) -> tuple[Any, bool]:
    """The type of a key's value, or of its items, and whether it is a list."""
    kind, is_list = _TYPES[key], False
    while arguments := get_args(kind):
        is_list |= get_origin(kind) is list
        is_union = get_origin(kind) in {Union, UnionType}
        kind = arguments[0]
        if is_union and get_origin(kind) is Literal:  # a word that may stand instead of a list
            kind = arguments[1]
    return kind, is_list


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A validated matrix: every key of KEYS has a value."""

    name: str
    source: str
    """Name of the file, for error messages."""
    values: Mapping[str, Any]
    places: Mapping[str, str] = field(default_factory=dict)
    """The command-line option of each key that one overrode."""

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    @property
    def settings(self) -> MatrixFile:
        """The values with their types."""
        return settings_of_stored(self.values, self.source)

    def place(self, key: str) -> str:
        return self.places.get(key, f"{self.source}: {key}")

    def override(self, key: str, value: object, option: str) -> Matrix:
        """The matrix with another value for a key, without the groups that set the same key.

        Raises InputError naming the option if the value is invalid.
        """
        values = _checked({**_given(self.values), key: value}, option, lambda _: "")
        values["groups"] = [group for group in self.values["groups"] if key not in group]
        return dataclasses.replace(self, values=values, places={**self.places, key: option})

    def up_to(self, num_gpus: int, option: str) -> Matrix:
        """The matrix with the worlds that fit on so many GPUs, and no group without one.

        If none fits, the world is that of all GPUs.
        """
        key = "axes.world_size"

        def fitting(sizes: Any) -> Any:
            if sizes == "all":
                return sizes
            return [size for size in sizes if size <= num_gpus]

        groups = []
        for group in self.values["groups"]:
            if key not in group:
                groups.append(group)
            elif sizes := fitting(group[key]):
                groups.append({**group, key: sizes})
        sizes = fitting(self.values.get(key, "all"))
        if not sizes:
            sizes = "all"
        values = {**self.values, key: sizes, "groups": groups}
        if values == self.values:
            return self
        return dataclasses.replace(self, values=values, places={**self.places, key: option})

    @property
    def parts(self) -> list[Matrix]:
        """The matrix without its groups, then each group as a matrix of its own."""
        found = [dataclasses.replace(self, values={**self.values, "groups": []})]
        for number, group in enumerate(self.values["groups"], start=1):
            places = dict(self.places)
            for key in group:
                places[key] = _place(self.source, number, key)
            values = {**self.values, **group, "groups": []}
            found.append(dataclasses.replace(self, values=values, places=places))
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "values": dict(self.values),
            "places": dict(self.places),
        }


def names() -> list[str]:
    """Names of the shipped matrices."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(name: str) -> Matrix:
    """Load a shipped matrix by name, or a TOML file.

    Raises InputError if it cannot be read or is invalid.
    """
    path, source = Path(name), name
    if name in names():
        path, source = FOLDER / f"{name}.toml", f"{name}.toml"
    elif path.suffix != ".toml":
        raise InputError(
            f"--matrix {name}: unknown; {suggest(name, ['auto', *names(), 'a .toml file'])}"
        )
    content = files.read(path, f"--matrix {name}", "name a TOML file", MATRIX_BYTES)
    try:
        # Editors on Windows begin a file with a BOM.
        document = tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise InputError(f"{source}: is not TOML ({error})") from error
    return parse(document, name=path.stem, source=source)


def parse(document: Mapping[str, object], *, name: str, source: str) -> Matrix:
    """Parse a TOML document. Raises InputError naming a key that is unknown, missing or invalid."""
    groups = document.get("groups")
    if isinstance(groups, list) and len(groups) > MOST_GROUPS:
        raise InputError(
            f"{source}: has {len(groups):,} groups; it must have at most {MOST_GROUPS}"
        )
    given = _flat(document)
    values = _checked(given, f"{source}: ")
    workload = values["workload.workload"]
    if workload != LLAMA and "workload.model" not in given:
        values["workload.model"] = display_name(workload)
    parsed_groups = []
    for number, group in enumerate(values["groups"], start=1):
        parsed_groups.append(_group(group, number, given, source))
    values["groups"] = parsed_groups
    if values["max_repeats"] and values["max_repeats"] < values["repeats"]:
        raise InputError(
            f"{source}: max_repeats is {values['max_repeats']}; it must be at least repeats, "
            f"{values['repeats']}"
        )
    if {"axes.optimizer", "training.optimizer"} <= given.keys():
        raise InputError(
            f"{source}: axes.optimizer is {given['axes.optimizer']!r} and training.optimizer is "
            f"{given['training.optimizer']!r}; leave one of them out"
        )
    return Matrix(name=name, source=source, values=values)


def settings_of_stored(values: Mapping[str, object], place: str) -> MatrixFile:
    """The typed values of the matrix that a run has stored, by table.key.

    Keys of other versions are left out. Raises InputError starting with ``place`` if the others are
    not those of a valid matrix.
    """
    known = {key: value for key, value in values.items() if key in KEYS}
    return _parsed(_given(known), f"{place}: matrix: ")


def _given(values: Mapping[str, object]) -> dict[str, object]:
    """The values that differ from their defaults, some of which users may not give."""
    found = dict(values)
    for key, default in DEFAULTS.items():
        if key in found and found[key] == default:
            del found[key]
    return found


def _checked(
    values: Mapping[str, object], place: str, name: Callable[[str], str] = str
) -> dict[str, Any]:
    """The validated values with defaults, by table.key. Raises as ``validation.read``."""
    return _flat(_parsed(values, place, name).model_dump())


def _parsed(
    values: Mapping[str, object], place: str, name: Callable[[str], str] = str
) -> MatrixFile:
    """The same as tables."""
    document: dict[str, Any] = {table: {} for table in TABLES}
    for key, value in values.items():
        table, _, inner = key.partition(".")
        if inner and isinstance(document.get(table), dict):
            document[table][inner] = value
        else:
            document[key] = value
    return validation.read(MatrixFile, document, place, name)


def _place(source: str, number: int, key: str) -> str:
    """Where a key of a group was set, for error messages."""
    return f"{source}: {key} of group {number}"


def _group(
    group: Mapping[str, object], number: int, given: Mapping[str, object], source: str
) -> dict[str, Any]:
    """A group's validated values by table.key.

    Raises InputError for a key that it may not set, or an invalid value.
    """
    flat = _flat(group)
    for key in flat:
        if key not in IN_GROUPS and key not in TABLES:
            hint = "it is one for the whole matrix"
            if key not in KEYS:
                hint = suggest(key, IN_GROUPS)
            raise InputError(f"{_place(source, number, key)} cannot be set there; {hint}")
    values = _checked({**given, **flat}, "", lambda key: _place(source, number, key))
    return {key: values[key] for key in flat}
