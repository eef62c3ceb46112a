"""What a check of a machine or of a run found: data that check, doctor, reports, citations and exit statuses read."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial


class Level(StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    """A run is impossible, or its data cannot be trusted."""
    WARNING = "warning"
    """A limitation to know, and to mention when citing a run."""
    NOTE = "note"
    """A fact that belongs to the numbers."""
    GOOD = "good"
    """Checked, without a problem."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, or one statement of a report."""

    level: Level
    topic: str
    text: str
    _: KW_ONLY
    subject: str = ""
    """What the text is about, such as a cell's label; it stands before the text."""
    cells: tuple[str, ...] = ()
    """Ids of the cells that it concerns; empty for all of the run."""
    brief: str = ""
    """The same in a citation of these cells; empty if citations do not carry it."""
    command: str = ""
    """What to do about it, ready to paste."""

    @property
    def sentence(self) -> str:
        return f"{self.subject}: {self.text}" if self.subject else self.text

    def to_dict(self) -> dict[str, str]:
        found = {"level": str(self.level), "topic": self.topic, "text": self.sentence}
        return found | ({"command": self.command} if self.command else {})


error, warning, note, good = (partial(Finding, level) for level in Level)
"""Findings of a level, from topic and text."""
