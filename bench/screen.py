"""The one console: for all tables and answers.

See ``bench.plain_stream`` for what is printed without it.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from bench.plain_stream import PlainStream, harmless


class Screen(Console):
    """Rich's console, on standard output or standard error.

    Its own control sequences are the only ones.
    """

    def __init__(
        self, *, stderr: bool = False, quiet: bool = False, needs_reader: bool = False
    ) -> None:
        """``needs_reader``: once the reader of standard output has gone, BrokenPipeError is raised.

        Otherwise nothing more is printed, so that the exit status is that of the command.
        """
        self._needs_reader = needs_reader
        stream = sys.stdout
        if stderr:
            stream = sys.stderr
        if isinstance(stream, PlainStream):
            stream = stream.stream
        super().__init__(file=stream, quiet=quiet)

    def on_broken_pipe(self) -> None:
        """What is done instead of ending the program with status 1, as rich does."""
        if self._needs_reader:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self.quiet = True

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)
