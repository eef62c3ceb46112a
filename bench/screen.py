"""The one place that prints: what comes from a run, a file or a workload cannot move the cursor or clear the screen.

``Screen`` is rich's console for all tables and answers. While a command runs (``plain_streams``), what is printed
without it passes through ``PlainStream``. Both leave out control characters, and characters that turn the direction of
text, but for the ends of lines; a text that has to stay one line is made so by ``formatting.printable``.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO, cast

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from bench.formatting import TERMINAL

HIDDEN = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2060-\\u2069\\ufeff]")
"""Control characters but for tab and newline (Unicode's Cc), and invisible or bidirectional ones (of Cf)."""


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Screen(Console):
    """Rich's console, on standard output or standard error, whose own control sequences are the only ones."""

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        stream = sys.stdout
        if stderr:
            stream = sys.stderr
        if isinstance(stream, PlainStream):
            stream = stream.stream
        super().__init__(file=stream, quiet=quiet)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)


@contextlib.contextmanager
def plain_streams() -> Iterator[None]:
    """Let standard output and standard error of this process write what is harmless alone."""
    out, err = sys.stdout, sys.stderr
    sys.stdout = cast("TextIO", PlainStream(out))
    sys.stderr = cast("TextIO", PlainStream(err))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
