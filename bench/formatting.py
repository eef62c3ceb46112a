"""Text for people: counts with nouns, lists of names, sizes, and escaping of foreign text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

MOST_NAMES = 4
"""Most names listed in one sentence."""


def plural(count: int, noun: str) -> str:
    """A count with its noun: ``1 repeat``, ``12 repeats``, ``2 micro-batches``."""
    if count == 1:
        return f"{count} {noun}"
    if noun.endswith("tch"):  # batch, but epoch
        return f"{count} {noun}es"
    return f"{count} {noun}s"


def some(names: Sequence[str]) -> str:
    """The first MOST_NAMES names and the number of others: ``a``, ``a and b``, ``a, b and c``."""
    told = list(names[:MOST_NAMES])
    if len(names) > MOST_NAMES:
        told.append(f"{len(names) - MOST_NAMES} more")
    *others, last = told
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


GIB_ABOVE = 4 * 2**30
"""Sizes from here on, in bytes, are given in GiB."""


def size(number: float) -> str:
    """A number of bytes with a unit: ``38.6 MiB``."""
    if number >= GIB_ABOVE:
        return f"{number / 2**30:,.2f} GiB"
    if number >= 0.05 * 2**20:
        return f"{number / 2**20:,.1f} MiB"
    if round(number) == 1:
        return "1 byte"
    return f"{number:,.0f} bytes"


def rate(bytes_per_s: float) -> str:
    """A rate with a unit: ``50 GB/s``."""
    shown = float(f"{bytes_per_s:.3g}")
    for scale, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if shown >= scale:
            return f"{shown / scale:g} {unit}"
    return f"{shown:g} B/s"


def unit_of(most: float) -> tuple[float, str]:
    """The unit in which sizes up to so many bytes are drawn: its bytes, and its name."""
    if most >= GIB_ABOVE:
        return 2.0**30, "GiB"
    return 2.0**20, "MiB"


def digits(value: float) -> str:
    """A number with four significant digits and without an exponent."""
    if not (math.isfinite(value) and value):
        return f"{value:g}"
    rounded = float(f"{value:.3e}")
    decimals = 3 - math.floor(math.log10(abs(rounded)))
    return f"{rounded:.{max(0, decimals)}f}"


def at_most(value: float) -> str:
    """A number above 0 with one significant digit, rounded up: what no value exceeds."""
    if not (math.isfinite(value) and value > 0):
        return f"{value:g}"
    unit = 10.0 ** math.floor(math.log10(value))
    return f"{math.ceil(value / unit - 1e-9) * unit:.1g}"


def scientific(value: float) -> str:
    """A small number with two digits: ``2.3e-3``."""
    mantissa, _, exponent = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def within(tolerance: float) -> str:
    """That something is right as far as it declares to be."""
    return f"within its declared {scientific(tolerance)}"


def beyond(value: float, limit: float, form: int = 2) -> str:
    """A number with two significant digits, or as many as show that it is above a limit."""
    for count in range(form, 17):
        if float(text := f"{value:.{count}g}") > limit:
            return text
    return f"{value:.{form}g}"


def alike(a: float, b: float) -> bool:
    """Whether two sizes tie: their ratio, in the digits that are shown, is 1."""
    return digits(max(a, b) / max(min(a, b), 1)) == "1.000"


TERMINAL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""ECMA-48 control sequences."""
MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~!$&])")
"""Characters that may be markup in CommonMark or GitHub's dialect; a backslash escapes each."""
BIBTEX = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "\\": r"{\textbackslash}",
        "{": r"{\textbraceleft}",
        "}": r"{\textbraceright}",
        "~": r"{\textasciitilde}",
        "^": r"{\textasciicircum}",
        "<": r"{\textless}",
        ">": r"{\textgreater}",
        "|": r"{\textbar}",
    }
)
"""LaTeX for its special characters. Braces become commands, since BibTeX counts them even after a
backslash."""


def plain(text: object) -> str:
    """One line of printable characters.

    It has no control sequences, and no invisible or bidirectional characters.
    """
    shown = TERMINAL.sub("", str(text))
    if not shown.isprintable():
        shown = "".join(filter(_is_plain, shown))
    return " ".join(shown.split())


def printable(text: str) -> str:
    """The text itself if it is one line of printable characters, else ``plain``; indents stay."""
    if text.isprintable():
        return text
    indent = len(text) - len(text.lstrip(" "))
    return " " * indent + plain(text)


def _is_plain(character: str) -> bool:
    return character.isprintable() or character.isspace()


def markdown(text: object) -> str:
    """One line with all Markdown escaped."""
    return MARKDOWN.sub(r"\\\1", plain(text))


def bibtex(text: object) -> str:
    """One line with all LaTeX escaped, for a BibTeX value in braces."""
    return plain(text).translate(BIBTEX)
