"""Types and ranges of fields in files, for pydantic, and a line for the first wrong field."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import (
    BaseModel,
    Field,
    GetCoreSchemaHandler,
    InstanceOf,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import CoreSchema, ErrorDetails, core_schema

from bench.errors import InputError, shown, suggest


@dataclass(frozen=True)
class Expect:
    """Annotation of a type: what a value must be, in words.

    Replaces all other error messages of the type.
    """

    words: str

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.custom_error_schema(
            handler(source), custom_error_type="expected", custom_error_message=self.words
        )


class MisfitError(InputError):
    """Two fields contradict each other. Names one of them and says what would be right."""

    def __init__(self, key: str, words: str) -> None:
        super().__init__(key + words)
        self.key, self.words = key, words


MAX = int(sys.float_info.max)
Flag = Annotated[bool, Field(strict=True), Expect("true or false")]
Integer = Annotated[int, Field(strict=True, gt=-(2**63), lt=2**63), Expect("an integer")]
Natural = Annotated[
    int,
    Field(strict=True, ge=0, lt=2**63),
    Expect("an integer of at least 0 and below 2**63"),
]
Positive = Annotated[int, Field(strict=True, ge=1, lt=2**63), Expect("an integer of at least 1")]
Number = Annotated[InstanceOf[float] | Integer, Expect("a number")]
"""Includes NaN and infinity. Integers stay integers, here and below."""
_AmountFloat = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_AmountInteger = Annotated[int, Field(strict=True, ge=0, le=MAX)]
Amount = Annotated[_AmountFloat | _AmountInteger, Expect("a finite number of at least 0")]
PositiveNumber = Annotated[Amount, Field(gt=0), Expect("a positive number")]

Seconds = Annotated[Amount, Field(le=1e9), Expect("seconds, from 0 to 1e9")]
Duration = Annotated[Amount, Field(ge=1e-9, le=1e9), Expect("seconds, from 1e-9 to 1e9")]
"""What a clock measured between two moments that cannot be the same."""
Rate = Annotated[Amount, Field(ge=1e-3, le=1e30), Expect("a rate per second, from 1e-3 to 1e30")]

T = TypeVar("T")
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""pydantic's error types for an unknown key."""


def read(kind: type[T], values: object, place: str = "", name: Callable[[str], str] = str) -> T:
    """Validate the values as ``kind``: a model, a dataclass or a TypedDict.

    Raises InputError for an unknown key, else for a wrong value, else for a missing key: one line
    that begins with ``place`` and ``name(key)`` and says what would be right.
    """
    try:
        found: T = _adapter(kind).validate_python(values)
    except ValidationError as error:
        raise InputError(place + _line(error, kind, name)) from error
    return found


def _line(error: ValidationError, kind: Any, name: Callable[[str], str]) -> str:
    found = min(error.errors(include_url=False), key=_urgency)
    key = _key(found["loc"])
    if found["type"] in UNKNOWN:
        return f"{name(key)} is unknown; {_known_instead(key, list(declared(kind)))}"
    if found["type"] == "missing":
        words = _expected(declared(kind).get(key))
        if not words:
            return f"{name(key)} is missing"
        return f"{name(key)} is missing; it must be {words}"
    misfit = found.get("ctx", {}).get("error")
    if isinstance(misfit, MisfitError):
        return name(misfit.key) + misfit.words
    if isinstance(misfit, InputError):
        return str(misfit)
    expected = found["msg"].removeprefix("Input should be ").replace("a valid ", "a ")
    if "dictionary" in found["msg"]:
        expected = "a table"
    subject = "it"
    if key:
        subject = name(key)
    return f"{subject} is {shown(found['input'])}; it must be {expected}"


def _known_instead(key: str, known: Sequence[str]) -> str:
    """The key or table that an unknown one may be meant for, or else those beside it."""
    tables = list(dict.fromkeys(name.partition(".")[0] for name in known))
    if difflib.get_close_matches(key, [*known, *tables], n=1):
        return suggest(key, [*known, *tables])
    table = key.rpartition(".")[0]
    if not table:
        return suggest(key, tables)
    beside = [name for name in known if name.rpartition(".")[0] == table]
    if not beside:
        return suggest(key, tables)
    return suggest(key, beside)


def _urgency(error: ErrorDetails) -> int:
    """Which error is told: an unknown key before a wrong value, and that before a missing key."""
    if error["type"] in UNKNOWN:
        return 0
    if error["type"] != "missing":
        return 1
    return 2


def _key(location: tuple[int | str, ...]) -> str:
    """``axes.world_size[2]``."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}"
    return text.removeprefix(".")


def _expected(hint: object) -> str:
    """What a value of an annotated type must be, by its last ``Expect``; empty without one."""
    words = ""
    for part in getattr(hint, "__metadata__", ()):
        if isinstance(part, Expect):
            words = part.words
    return words


def declared(kind: Any) -> dict[str, Any]:
    """The types of the fields of a model, a dataclass or a TypedDict.

    Those of an inner model by ``table.key``.
    """
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if isinstance(hint, type) and issubclass(hint, BaseModel):
            for inner, of_inner in declared(hint).items():
                found[f"{name}.{inner}"] = of_inner
        elif not name.startswith("_"):
            found[name] = hint
    return found
