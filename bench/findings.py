"""What a check of a machine, a run or a training found.

Reports, citations and exit statuses read it.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial

from bench.formatting import printable


class Level(StrEnum):
    """Severity of a finding, the gravest first."""

    ERROR = "error"
    """A run is impossible, its data cannot be trusted, or a training does not compute what it
    should."""
    WARNING = "warning"
    """A limitation to know, and to mention when citing a run."""
    NOTE = "note"
    """A fact that belongs to the numbers."""
    GOOD = "good"
    """Checked, without a problem."""

    @property
    def rank(self) -> int:
        """0 for the gravest."""
        return list(Level).index(self)


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

    def __post_init__(self) -> None:
        """A finding is one line, whatever a run's texts hold."""
        for name in ("topic", "text", "subject", "brief", "command"):
            object.__setattr__(self, name, printable(getattr(self, name)))

    @property
    def sentence(self) -> str:
        if not self.subject:
            return self.text
        return f"{self.subject}: {self.text}"

    def to_dict(self) -> dict[str, str]:
        found = {"level": str(self.level), "topic": self.topic, "text": self.sentence}
        if self.command:
            found["command"] = self.command
        return found


error = partial(Finding, Level.ERROR)
warning = partial(Finding, Level.WARNING)
note = partial(Finding, Level.NOTE)
good = partial(Finding, Level.GOOD)
"""Findings of a level, from topic and text."""
