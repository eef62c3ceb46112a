"""Findings on the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from bench.analysis.check import Finding, Level

STYLES = {Level.ERROR: "bold red", Level.WARNING: "yellow", Level.GOOD: "green"}


def show(findings: Sequence[Finding], verdict: str) -> None:
    """One line each, and the verdict on all."""
    console = Console()
    width = max((len(one.topic) for one in findings), default=0)
    for one in findings:
        mark = Text(f"{one.level:7}  {one.topic:{width}}  ", style=STYLES[one.level])
        console.print(mark + Text(one.text), soft_wrap=True)
    console.print(verdict, highlight=False, soft_wrap=True)
