"""What a check of a machine or of a run found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial


class Level(StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    """A run is impossible, or its data cannot be trusted."""
    WARNING = "warning"
    """A limitation to know, and to mention when citing a run."""
    GOOD = "good"
    """Checked, without a problem."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    topic: str
    text: str


error, warning, good = (partial(Finding, level) for level in Level)
"""Findings of a level, from topic and text."""
