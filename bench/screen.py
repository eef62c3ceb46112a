"""The one console: for all tables and answers.

See ``bench.plain_stream`` for what is printed without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from bench.plain_stream import PlainStream, harmless


class Screen(Console):
    """Rich's console, on standard output or standard error.

    Its own control sequences are the only ones.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False) -> None:
        stream = sys.stdout
        if stderr:
            stream = sys.stderr
        if isinstance(stream, PlainStream):
            stream = stream.stream
        super().__init__(file=stream, quiet=quiet)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(harmless(segment.text), segment.style)
