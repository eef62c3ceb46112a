"""What a command prints cannot move the cursor or clear the screen, whatever its input holds.

While a command runs (``plain_streams``), what is printed passes through ``PlainStream``. It leaves
out control characters, and characters that turn the direction of text, but for the ends of lines; a
text that has to stay one line is made so by ``formatting.printable``. This module needs no package,
so that a Python without any gets a clear line.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO, cast

from bench.formatting import TERMINAL

HIDDEN = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff]"
)
"""Control characters but for tab and newline (Unicode's Cc), and invisible or bidirectional ones
(of Cf)."""


def harmless(text: str) -> str:
    """The text without control sequences and hidden characters; its lines stay."""
    if text.isprintable() or not HIDDEN.search(text):
        return text
    return HIDDEN.sub("", TERMINAL.sub("", text))


class PlainStream:
    """A stream of text that writes what is harmless; everything else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(harmless(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        found: object = getattr(self.stream, name)
        return found


@contextlib.contextmanager
def plain_streams() -> Iterator[None]:
    """Let standard output and standard error of this process write what is harmless alone.

    What is meant for one that was closed before the process began is dropped.
    """
    out, err = sys.stdout, sys.stderr
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        sys.stdout = cast("TextIO", PlainStream(nowhere if out is None else out))
        sys.stderr = cast("TextIO", PlainStream(nowhere if err is None else err))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err
