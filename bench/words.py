"""Words for people: numbers with their nouns, lists of names, and text from outside made harmless."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

MOST_NAMES = 4
"""Names in one sentence."""


def plural(count: int, noun: str, ending: str = "s") -> str:
    """A count with its noun: ``1 repeat``, ``12 repeats``; ``ending`` is what the noun gets if it is not one."""
    return f"{count} {noun}{'' if count == 1 else ending}"


def some(names: Sequence[str]) -> str:
    """The first MOST_NAMES names, and how many more there are."""
    left = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {left} more" if left > 0 else "")


GIB_ABOVE = 4 * 2**30
"""Bytes from which a size is said in GiB."""


def size(number: float) -> str:
    """Bytes in words: ``38.6 MiB``."""
    if number >= GIB_ABOVE:
        return f"{number / 2**30:,.2f} GiB"
    return f"{number / 2**20:,.1f} MiB" if number >= 0.05 * 2**20 else f"{number:,.0f} bytes"


def digits(value: float) -> str:
    """With four significant digits and without an exponent."""
    if not (math.isfinite(value) and value):
        return f"{value:g}"
    decimals = 3 - math.floor(math.log10(abs(value)))
    return f"{round(value, decimals):.{max(0, decimals)}f}"


TERMINAL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""ECMA-48 control sequences."""
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")
"""What may be markup in a paragraph or a table of CommonMark, or of GitHub's dialect; each may be escaped."""
BIBTEX = {
    "\\": r"{\textbackslash}",
    "{": r"{\textbraceleft}",
    "}": r"{\textbraceright}",
    "~": r"{\textasciitilde}",
    "^": r"{\textasciicircum}",
    "<": r"{\textless}",
    ">": r"{\textgreater}",
    "|": r"{\textbar}",
    **{sign: f"\\{sign}" for sign in "&%$#_"},
}
"""What LaTeX reads as a command. Braces are commands too, since BibTeX counts them even behind a backslash."""


def plain(text: object) -> str:
    """One line of printable characters: no control sequences, no invisible or turning characters."""
    shown = "".join(c for c in TERMINAL.sub("", str(text)) if c.isprintable() or c.isspace())
    return " ".join(shown.split())


def markdown(text: object) -> str:
    """One line that is no markup."""
    return MARKDOWN.sub(r"\\\1", plain(text))


def bibtex(text: object) -> str:
    """One line that is a value between braces and holds no command."""
    return "".join(BIBTEX.get(c, c) for c in plain(text))
