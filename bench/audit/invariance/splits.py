"""The commands of an invariance check: one command, with an option that varies, or two commands."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bench.errors import InputError, shown

PLACE = re.compile(r"\{([^{}]*)\}")
VARIED, RUN, PORT = "{vary}", "{run}", "{port}"
"""In a command: where the option that varies stands, the number of the run, and a free port."""
EXAMPLE = '--vary "--gas {N} --micro-batch {B}" --batch 8 --accumulate 1,4'
OTHER = "--other"


class Variation(NamedTuple):
    """What a split fills in."""

    text: str
    accumulate: int | None = None
    """N, where ``{N}`` varies."""
    batch: int | None = None
    """B, where ``{B}`` varies."""

    def label(self) -> str:
        if self.accumulate is None:
            text = self.text.strip()
            if not text:
                return "no option"
            return text
        if self.batch is None:
            return f"N={self.accumulate}"
        return f"N={self.accumulate} B={self.batch}"


@dataclass(frozen=True)
class TrainingSplit:
    """One way to run the training."""

    label: str
    command: tuple[str, ...]
    accumulate: int | None = None
    """N, where ``{N}`` varies."""
    batch: int | None = None
    """B, where ``{B}`` varies."""

    def numbered(self, run: int) -> list[str]:
        """The command of one run; runs are numbered from 1."""
        found = []
        for word in self.command:
            filled = word.replace(RUN, str(run))
            if PORT in word:
                filled = filled.replace(PORT, str(_free_port()))
            found.append(filled)
        return found


def splits(
    training: Sequence[str],
    vary: str | None,
    batch: int | None = None,
    accumulate: Sequence[int] | None = None,
) -> list[TrainingSplit]:
    """The splits, of which the first is the one that the others are compared with.

    ``training`` is what stands behind ``--``: a command, and with ``--other -- COMMAND`` a second
    one. Raises InputError.
    """
    first, other = _commands(training)
    if not first:
        raise InputError("invariance: name the training command after --")
    if other is not None:
        if vary is not None or accumulate or batch:
            raise InputError("invariance: --other compares two commands; leave --vary out")
        if not other:
            raise InputError(f"invariance: name the other command after {OTHER} --")
        return [
            TrainingSplit("the command", tuple(first)),
            TrainingSplit("the other command", tuple(other)),
        ]
    if vary is None:
        raise InputError(f"invariance: say what varies: {EXAMPLE}, or {OTHER} -- COMMAND")
    found = []
    for variation in _variations(vary, batch, accumulate):
        try:
            words = shlex.split(variation.text)
        except ValueError as error:
            raise InputError(f"invariance: --vary {shown(vary)}: {error}") from error
        found.append(
            TrainingSplit(
                variation.label(), _with(first, words), variation.accumulate, variation.batch
            )
        )
    return found


def _commands(training: Sequence[str]) -> tuple[list[str], list[str] | None]:
    words = list(training)
    if words[:1] == ["--"]:
        words = words[1:]
    for place in range(len(words) - 1):
        if words[place] == OTHER and words[place + 1] == "--":
            return words[:place], words[place + 2 :]
    if words[-1:] == [OTHER]:
        return words[:-1], []
    return words, None


def _variations(vary: str, batch: int | None, accumulate: Sequence[int] | None) -> list[Variation]:
    places = PLACE.findall(vary)
    if not places:
        raise InputError(
            f"invariance: --vary {shown(vary)} has nothing that varies: {EXAMPLE}, or "
            "--vary '--compile {0,1}'"
        )
    letters = {place for place in places if "," not in place}
    unknown = sorted(letters - {"N", "B"})
    if unknown:
        raise InputError(
            f"invariance: --vary: {{{unknown[0]}}} is not known; "
            "use {N}, {B} or values such as {0,1}"
        )
    if not letters:
        return _alternatives(vary, batch, accumulate)
    if len(letters) < len(set(places)):
        raise InputError("invariance: --vary: use {N} and {B}, or values such as {0,1}, not both")
    return _numbered(vary, letters, batch, accumulate)


def _alternatives(
    vary: str, batch: int | None, accumulate: Sequence[int] | None
) -> list[Variation]:
    if batch or accumulate:
        raise InputError("invariance: --batch and --accumulate need {N} or {B} in --vary")
    pieces = PLACE.split(vary)  # every second one stands in braces
    values = [piece.split(",") for piece in pieces[1::2]]
    counts = sorted(set(map(len, values)))
    if len(counts) > 1:
        raise InputError(
            f"invariance: --vary has {counts[0]} values in one place and {counts[1]} in another; "
            "give each as many"
        )
    found = []
    for chosen in zip(*values, strict=True):
        pieces[1::2] = chosen
        found.append(Variation("".join(pieces)))
    return found


def _numbered(
    vary: str, letters: set[str], batch: int | None, accumulate: Sequence[int] | None
) -> list[Variation]:
    if not accumulate or len(set(accumulate)) < 2:
        raise InputError("invariance: --accumulate: give two or more N, such as 1,4")
    if "B" in letters and batch is None:
        raise InputError(
            "invariance: {B} in --vary needs --batch, the samples of an update, as in --batch 8"
        )
    if "B" not in letters and batch is not None:
        raise InputError("invariance: --batch needs {B} in --vary")
    found = []
    for number in dict.fromkeys(accumulate):
        size = None
        if batch is not None:
            if batch % number:
                raise InputError(
                    f"invariance: --batch {batch} cannot be split into {number} micro-batches; "
                    "take a multiple of every N"
                )
            size = batch // number
        text = vary.replace("{N}", str(number)).replace("{B}", str(size))
        found.append(Variation(text, number, size))
    return found


def _with(command: Sequence[str], words: Sequence[str]) -> tuple[str, ...]:
    """The command with these words, at its end if it does not say where."""
    if VARIED in command:
        place = list(command).index(VARIED)
        return (*command[:place], *words, *command[place + 1 :])
    if not any(VARIED in word for word in command):
        return (*command, *words)
    text = shlex.join(words)
    return tuple(word.replace(VARIED, text) for word in command)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
