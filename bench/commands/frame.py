"""``frame``: the pandas frames of a run: their rows, columns, dtypes and units."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.errors import GOOD, InputError
from bench.words import plural

if TYPE_CHECKING:
    from collections.abc import Iterator

DESCRIPTION = (
    "Describes the frames that bench.load(RUN) gives in Python: rows, columns, dtypes and units. With --table only one "
    "of them, with --head also its first rows."
)


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("frame", help="show what bench.load gives of a run", description=DESCRIPTION)
    option = parser.add_argument
    option("run", type=Path, metavar="RUN", help="the run's folder, e.g. results/<run>")
    option("--table", metavar="NAME", help="only this frame")
    option("--head", type=int, metavar="N", help="print the first N rows of --table too")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Show."""
    import bench
    from bench.analysis.columns import FRAMES

    if arguments.table is not None and arguments.table not in FRAMES:
        raise InputError(f"--table: '{arguments.table}' is not a frame; use one of {', '.join(FRAMES)}")
    if arguments.head is not None and (arguments.table is None or arguments.head < 1):
        raise InputError("--head: takes a number from 1 on, and --table NAME with it")
    frames = bench.load(arguments.run)
    for name in FRAMES if arguments.table is None else [arguments.table]:
        print("\n".join(_described(name, frames[name])))
        print()
    if arguments.head is not None:
        from bench.report.export import harmless

        print(harmless(frames[arguments.table]).head(arguments.head).to_string(index=False))
    elif arguments.table is None:
        print(f"In Python: import bench; frames = bench.load({str(arguments.run)!r}); frames.cells")
    return GOOD


def _described(name: str, frame: Any) -> Iterator[str]:
    from bench.analysis.columns import COLUMNS, FRAMES

    yield f"{name}: {plural(len(frame), 'row')} x {plural(len(frame.columns), 'column')}: {FRAMES[name]}"
    rows = [(key, about.dtype, about.unit, about.meaning) for key, about in COLUMNS[name].items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        words = "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=False))
        yield f"  {words}  {row[-1]}"
