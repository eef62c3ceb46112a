"""Options that several commands share: their types, ``--backend``, and the folder of ``--out``."""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from bench import files
from bench.backends.base import Backend, installed_backends, register, registry
from bench.errors import InputError, suggest
from bench.plan.cell import REFERENCES, Device

NUMBER = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z/]*)")
SECONDS = {"s": 1.0, "sec": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
"""Seconds per unit of time."""
LARGEST = 999_999_999
"""The largest integer of an option, if nothing else limits it."""
T = TypeVar("T")


class CommandParsers(Protocol):
    """Where each command adds its parser."""

    def add_parser(
        self,
        name: str,
        *,
        help: str,  # noqa: A002 - argparse calls it so
        description: str = "",
        epilog: str = "",
    ) -> argparse.ArgumentParser: ...


def filled(text: str) -> str:
    """The name itself; an empty one, as of an unset variable, is refused."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the name is empty; give one, or leave it out")
    return text


def named(text: str) -> Path:
    """The path of a file or folder. An empty name would be the current folder."""
    return Path(filled(text))


def flag(name: str) -> str:
    """The option that argparse stores under this name."""
    return f"--{name.replace('_', '-')}"


def split_names(text: str) -> list[str]:
    """The names in a comma-separated list, without empty ones."""
    return list(filter(None, map(str.strip, text.split(","))))


def list_of(read: Callable[[str], T], what: str) -> Callable[[str], list[T]]:
    """A parser of comma-separated lists; ``what`` names their content for the error."""

    def parse(text: str) -> list[T]:
        try:
            found = list(map(read, split_names(text)))
        except (ValueError, argparse.ArgumentTypeError):
            found = []
        if not found:
            raise argparse.ArgumentTypeError(f"'{text}' is not a list of {what}")
        return found

    return parse


def integer_to(largest: int, least: int = 1) -> Callable[[str], int]:
    """A parser of integers from ``least`` to ``largest``, which has at most nine digits."""

    def read(text: str) -> int:
        is_number = text.isascii() and text.isdecimal() and len(text) <= 9
        if not is_number or not least <= int(text) <= largest:
            raise argparse.ArgumentTypeError(
                f"'{text}' is not an integer from {least} to {largest}"
            )
        return int(text)

    return read


def share(text: str) -> float:
    """0.05 for ``5%`` or ``0.05``.

    A number of 1 or more without a sign is refused: it may be meant as per cent.
    """
    words = text.strip()
    is_percentage = words.endswith("%")
    try:
        number = float(words.removesuffix("%"))
    except ValueError:
        number = math.nan
    if is_percentage:
        number /= 100
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"'{text}' is not a number from 0 on, such as 5% or 0.05")
    if number >= 1 and not is_percentage:
        remedy = f"write {words}%, or a share below 1 such as 0.05"
        raise argparse.ArgumentTypeError(f"'{text}' has no unit; {remedy}")
    return number


def quantity(
    units: Mapping[str, float], what: str, *, zero: bool = False
) -> Callable[[str], float]:
    """A parser of finite numbers above 0, or ``zero`` too, with a unit, which is not guessed."""

    def read(text: str) -> float:
        value = math.nan
        match = NUMBER.fullmatch(text.strip())
        if match and match[2] in units:
            value = float(match[1]) * units[match[2]]
        is_zero = zero and value == 0
        if not math.isfinite(value) or (value <= 0 and not is_zero):
            raise argparse.ArgumentTypeError(f"'{text}' is not {what}")
        return value

    return read


duration = quantity(SECONDS, "a time above 0 with its unit, such as 90s, 20m or 1h")


def backend_names(text: str) -> list[str]:
    """The names in a comma-separated list; ``module:Class`` is loaded and has its own name."""
    found = []
    for name in split_names(text):
        known_as = name
        if ":" in name:
            try:
                known_as = register(name)
            except InputError as error:
                raise argparse.ArgumentTypeError(str(error)) from error
        found.append(known_as)
    return found


def add_runs(parser: argparse.ArgumentParser, more: str) -> None:
    """Add the folders of runs, which ``all_folders`` reads; ``more``: what becomes of several."""
    words = (
        "a run's folder, e.g. results/<run>, or a folder of runs; several of one matrix are "
        f"pooled: {more}"
    )
    parser.add_argument("runs", nargs="+", type=named, metavar="RUN", help=words)


def all_folders(places: Sequence[Path]) -> list[Path]:
    """The folders of the runs in these."""
    from bench.judge.pool import folders_of

    return folders_of(places)


def add_training(
    parser: argparse._ActionsContainer, *, world_size: int, required: bool = False
) -> None:
    """Add the options that describe a training; each is a field of TrainingPlan and of Scenario."""
    option, accumulate = parser.add_argument, list_of(int, "integers such as 1,4,2")
    option("--samples", type=int, required=required, metavar="S", help="samples of the data set")
    words = "samples per micro-batch on a rank"
    option("--micro-batch", type=int, required=required, metavar="M", help=words)
    words = "micro-batches per window; a list is one N per epoch"
    option("--accumulate", type=accumulate, metavar="N[,N]", help=words)
    words = "epochs (default: 1, or no limit with --max-steps)"
    option("--epochs", type=int, metavar="E", help=words)
    option("--world-size", type=int, metavar="W", help=f"ranks (default: {world_size})")
    words = "micro-batches of an epoch, as limit_train_batches"
    option("--limit-batches", type=int, metavar="B", help=words)
    words = "steps after which training stops, unless the epochs end before"
    option("--max-steps", type=int, metavar="K", help=words)
    words = "the loader drops an incomplete last micro-batch"
    option("--drop-last", action="store_true", help=words)
    words = "DistributedSampler drops samples instead of repeating some"
    option("--sampler-drop-last", action="store_true", help=words)


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add ``--backend``, of which ``chosen_backends`` reads the value."""
    words = "only these backends, or module:Class for your own; see 'backends' (default: all)"
    parser.add_argument(
        "--backend", action="extend", type=backend_names, metavar="B[,B]", help=words
    )


def add_device(parser: argparse.ArgumentParser, default: Device) -> None:
    """Add ``--device``."""
    words = f"what the ranks run on (default: {default})"
    devices = list(map(str, Device))
    parser.add_argument("--device", choices=devices, default=str(default), help=words)


def chosen_backends(given: Sequence[str] | None) -> dict[str, type[Backend]]:
    """The backends of ``--backend``, in the registry's order; with ``all`` or without it, all.

    References are left out. Raises InputError if one is named, since it accumulates nothing, or for
    an unknown name.
    """
    asked = given
    if asked is None:
        asked = ["all"]
    known = {name: backend for name, backend in registry(asked).items() if name not in REFERENCES}
    if asked == ["all"]:
        return known
    if not asked:
        raise InputError("--backend: no name is given; it must be 'all' or a list of backend names")
    for name in asked:
        if name in REFERENCES:
            why = "accumulates nothing, the others are compared with it; leave it out"
            raise InputError(f"--backend: '{name}' {why}")
        if name not in known:
            remedy = suggest(name, [*known, *installed_backends()])
            raise InputError(f"--backend: '{name}' is unknown; {remedy}")
    return {name: backend for name, backend in known.items() if name in asked}


def writable(folder: Path) -> None:
    """Create the folder of ``--out`` if it is missing. InputError if it cannot be written."""
    with files.writing(f"--out {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
