"""Two forms of these tests: the short one, and with --all the full one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, settings

SEED = 20251
"""The seed of all moments, places and values that are chosen at random."""


@dataclass
class Form:
    """Which form this session has, and what it found."""

    full: bool = False
    kills: int = 0
    """How many by each signal, in the full form."""
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The rows of the page, by section and name."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """The outcome of each test, with the reason if it was skipped."""

    def choose(self, short: Any, full: Any) -> Any:
        """The one that belongs to the form."""
        return full if self.full else short

    def examples(self, short: int, full: int) -> settings:
        """Settings of hypothesis: the same examples every time."""
        return settings(
            max_examples=self.choose(short, full),
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )

    def note(self, section: str, name: str, *cells: str) -> None:
        """Keep a row of the page."""
        self.facts.setdefault(section, {})[name] = {"cells": cells}


def marked(text: str, good: bool) -> str:
    """The text of a cell, in bold letters if it is not as it must be."""
    return text if good else f"**{text}**"


def nothing(left: Sequence[str]) -> str:
    return marked("; ".join(left), good=False) if left else "nothing"


FORM = Form()


def rng(name: str) -> random.Random:
    """A generator of its own for every test."""
    return random.Random(f"{SEED}/{name}")
