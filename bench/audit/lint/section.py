"""A part of a config: its values by dotted key, checked, each with its line."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from bench.audit.lint.config_file import Document
from bench.audit.lint.rules import RULES, LintFinding, Severity
from bench.audit.lint.yaml_values import Path
from bench.errors import InputError, shown

AUTO = "auto"
"""The value that Hugging Face's Trainer replaces before DeepSpeed reads the config."""
LARGEST = 2**53
"""The largest integer that a config can mean."""


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
        """The value here; None if there is none."""
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
        """Whether there is a value other than null."""
        return self.value is not None

    @property
    def line(self) -> int:
        """The line of the key, or of the nearest key above it."""
        path = self.path
        while path and path not in self.document.lines:
            path = path[:-1]
        return self.document.lines.get(path, 1)

    @property
    def key(self) -> str:
        """The dotted key, from the top of the document."""
        return ".".join(self.path)

    def items(self) -> Iterator[ConfigPart]:
        """The items of a list; a single mapping or string counts as a list of one."""
        value = self.value
        if isinstance(value, list):
            yield from (self.at(str(index)) for index in range(len(value)))
        elif value is not None:
            yield self

    def refuse(self, expected: str) -> NoReturn:
        """Raise InputError with file, line, key, value, and what would be right."""
        raise InputError(f"{self.document.file}:{self.line}: {self.key} is {shown(self.value)}; it must be {expected}")

    def mapping(self) -> ConfigPart:
        """This part, if it is a mapping or missing. Raises InputError."""
        if not isinstance(self.value, dict | None):
            self.refuse("a mapping")
        return self

    def integer(self, least: int = 1, most: int = LARGEST, also: str = "") -> int | None:
        """An integer; None if it is missing or the word ``also``. Raises InputError."""
        value = self.value
        if value is None or (also and value == also):
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limit = "" if most == LARGEST else f" and at most {most}"
            self.refuse(f"an integer of at least {least}{limit}" + (f" or '{also}'" if also else ""))
        return value

    def number(self, also: str = "") -> float | None:
        """A finite number of at least 0 (1e-1 is a string in YAML); None if missing or ``also``. Raises InputError."""
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
        """True or false; the default if it is missing or the word ``also``. Raises InputError."""
        value = self.value
        if value is None or (also and value == also):
            return default
        if not isinstance(value, bool):
            self.refuse("true or false")
        return value

    def word(self) -> str | None:
        """A string; None if it is missing. Raises InputError."""
        value = self.value
        if not isinstance(value, str | None):
            self.refuse("a string")
        return value

    def finding(self, code: str, what: str, fix: str, proof: str, severity: Severity | None = None) -> LintFinding:
        """A finding at this place, as severe as its rule unless ``severity`` is given."""
        return LintFinding(
            code=code,
            severity=severity or RULES[code].severity,
            file=self.document.file,
            line=self.line,
            key=self.key,
            what=what,
            fix=fix,
            proof=proof,
        )
