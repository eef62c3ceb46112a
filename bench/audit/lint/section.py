"""A part of a document: its values by dotted key, checked, each with the place where it stands."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from bench.audit.lint.config_file import Document
from bench.audit.lint.nodes import Path
from bench.audit.lint.rules import LintFinding, Severity
from bench.errors import InputError, shown

AUTO = "auto"
"""What the Trainer of Hugging Face fills in before DeepSpeed reads its config."""
LARGEST = 2**53
"""Of the integers of a config: larger ones cannot be meant."""


@dataclass(frozen=True)
class ConfigPart:
    """The values of a document under a path."""

    document: Document
    path: Path = ()

    def at(self, key: str) -> ConfigPart:
        """The part under a dotted key; it may be missing."""
        return ConfigPart(self.document, self.path + tuple(key.split(".")))

    @property
    def value(self) -> Any:
        """What stands here; None if there is nothing."""
        here: Any = self.document.values
        for key in self.path:
            if isinstance(here, list) and key.isdecimal() and int(key) < len(here):
                here = here[int(key)]
            elif isinstance(here, dict):
                here = here.get(key)
            else:
                return None
        return here

    @property
    def given(self) -> bool:
        """Whether something other than null stands here."""
        return self.value is not None

    @property
    def line(self) -> int:
        """The line of the key, or of the nearest one above it that is there."""
        path = self.path
        while path and path not in self.document.lines:
            path = path[:-1]
        return self.document.lines.get(path, 1)

    @property
    def key(self) -> str:
        """The dotted key, from the top of the document."""
        return ".".join(self.path)

    def items(self) -> Iterator[ConfigPart]:
        """The parts of a list, or the one mapping or string that stands for a list of one."""
        value = self.value
        if isinstance(value, list):
            yield from (self.at(str(index)) for index in range(len(value)))
        elif value is not None:
            yield self

    def refuse(self, expected: str) -> NoReturn:
        """Raise InputError naming file, line, key, value and what would be right."""
        raise InputError(f"{self.document.file}:{self.line}: {self.key} is {shown(self.value)}; it must be {expected}")

    def mapping(self) -> ConfigPart:
        """This part, of which only a mapping or nothing is right."""
        if not isinstance(self.value, dict | None):
            self.refuse("a mapping")
        return self

    def integer(self, least: int = 1, most: int = LARGEST, also: str = "") -> int | None:
        """An integer; None if nothing, or the word ``also``, stands here."""
        value = self.value
        if value is None or (also and value == also):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limit = "" if most == LARGEST else f" and at most {most}"
            self.refuse(f"an integer of at least {least}{limit}" + (f" or '{also}'" if also else ""))
        return value

    def number(self, also: str = "") -> float | None:
        """A finite number of at least 0; None if nothing, or the word ``also``, stands here. 1e-1 is a word in YAML."""
        value = self.value
        if value is None or (also and value == also):
            return None
        number = math.nan
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            with contextlib.suppress(ValueError, OverflowError):
                number = float(value)
        if not 0 <= number < math.inf:
            self.refuse("a finite number of at least 0")
        return number

    def flag(self, default: bool, also: str = "") -> bool:
        """True or false; the default if nothing, or the word ``also``, stands here."""
        value = self.value
        if value is None or (also and value == also):
            return default
        if not isinstance(value, bool):
            self.refuse("true or false")
        return value

    def word(self) -> str | None:
        """A string; None if nothing stands here."""
        value = self.value
        if not isinstance(value, str | None):
            self.refuse("a string")
        return value

    def finding(self, code: str, severity: Severity, what: str, fix: str, proof: str) -> LintFinding:
        """A finding at this place."""
        return LintFinding(
            code=code,
            severity=severity,
            file=self.document.file,
            line=self.line,
            key=self.key,
            what=what,
            fix=fix,
            proof=proof,
        )
