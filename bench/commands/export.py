"""``export``: describes a run's tables, or writes them in the formats of other programs."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from bench import files
from bench.commands.options import CommandParsers, named
from bench.errors import GOOD, InputError, suggest
from bench.formatting import plural
from bench.judge.columns import COLUMNS, FRAMES
from bench.screen import Screen
from bench.tabular import Table, TableColumn, TableRow

if TYPE_CHECKING:
    import pandas as pd

    from bench.judge.analysis import Frames

UNKNOWN = "<NA>"
"""How pandas writes a missing value."""
FORMATS = ("pytest-benchmark", "csv", "parquet")
DESCRIPTION = (
    "Describes the tables that bench.load(RUN) returns in Python: rows, columns, dtypes and units. "
    "With --format, writes them: pytest-benchmark (a JSON file for pytest-benchmark compare and "
    "dashboards; a round is a trial, and cells that are not comparable are left out), csv (a "
    "folder with a file per table and columns.csv with the units; no text acts as a formula) or "
    "parquet (a folder; units in each field's metadata)."
)


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "export",
        help="describe a run's tables, or write them for other programs",
        description=DESCRIPTION,
    )
    option = parser.add_argument
    option("run", type=named, metavar="RUN", help="the run's folder, e.g. results/<run>")
    option("--table", metavar="NAME", help="describe only this table")
    option("--head", type=int, metavar="N", help="print the first N rows of --table too")
    option("--format", choices=FORMATS, help="write the tables to --out")
    option(
        "--out", type=named, metavar="PATH", help="a .json file, or for csv and parquet a folder"
    )


def run(arguments: argparse.Namespace) -> int:
    import bench

    if (arguments.format is None) != (arguments.out is None):
        raise InputError(
            "--format and --out: belong together; give both to write the tables, or neither"
        )
    if arguments.format and (arguments.table is not None or arguments.head is not None):
        raise InputError(
            "--table and --head: are for describing tables; leave them out with --format"
        )
    if arguments.table is not None and arguments.table not in FRAMES:
        raise InputError(
            f"--table: '{arguments.table}' is not a table; {suggest(arguments.table, FRAMES)}"
        )
    if arguments.head is not None and (arguments.table is None or arguments.head < 1):
        raise InputError("--head: takes a number from 1 on, and --table NAME with it")
    frames = bench.load(arguments.run)
    if arguments.format is None:
        _describe(frames, arguments)
        return GOOD
    with files.writing(f"--out {arguments.out}", "name a path that can"):
        written = _write(frames, arguments.format, arguments.out)
    names = ", ".join(path.name for path in written)
    print(f"written: {names} to {written[0].parent}", file=sys.stderr)
    return GOOD


def _describe(frames: Frames, arguments: argparse.Namespace) -> None:
    from bench.report.formats import harmless

    described = list(FRAMES)
    if arguments.table is not None:
        described = [arguments.table]
    for name in described:
        _describe_table(name, frames[name])
    if arguments.head is not None:
        rows = harmless(frames[arguments.table].head(arguments.head))
        print(_rows_text(arguments.table, rows))
    elif arguments.table is None:
        run = str(arguments.run)
        print(f"In Python: import bench; frames = bench.load({run!r}); frames.cells")


def _describe_table(name: str, frame: pd.DataFrame) -> None:
    extent = f"{plural(len(frame), 'row')} x {plural(len(frame.columns), 'column')}"
    print(f"{name}: {extent}: {FRAMES[name]}")
    about = []
    for key, column in COLUMNS[name].items():
        about.append((key, str(column.dtype), column.unit, column.meaning))
    table = Table.from_rows(("column", "dtype", "unit", "meaning"), about)
    print(textwrap.indent(table.text(), "  "), end="\n\n")


def _rows_text(name: str, rows: pd.DataFrame) -> str:
    columns = [
        TableColumn(key, key, is_number=column.is_number) for key, column in COLUMNS[name].items()
    ]
    texts = []
    for row in rows.itertuples(index=False):
        of_row = map(_value_text, row)
        texts.append(TableRow(dict(zip(COLUMNS[name], of_row, strict=True))))
    text = Table(columns=columns, rows=texts).text()
    screen = Screen()
    if screen.is_terminal and max(map(len, text.splitlines())) > screen.width:
        return "\n\n".join(map(_record_text, texts))
    return text


def _record_text(row: TableRow) -> str:
    """A row that is too wide for the terminal, a line for each value that is known."""
    known = [(key, text) for key, text in row.texts.items() if text not in {"", UNKNOWN}]
    return Table.from_rows(("column", "value"), known).text()


def _value_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _write(frames: Frames, form: str, out: Path) -> list[Path]:
    if form != "pytest-benchmark":
        from bench.report import formats

        if out.resolve() == frames.folder.resolve():
            raise InputError(f"--out {out}: is the run's own folder; name another one")
        if form == "csv":
            return formats.write_csv(frames, out)
        return formats.write_parquet(frames, out)
    from bench.report.formats import document

    if out.suffix != ".json":
        raise InputError(f"--out {out}: pytest-benchmark reads files that end in .json; name one")
    found = document(frames)
    out.parent.mkdir(parents=True, exist_ok=True)
    files.write(out, json.dumps(found, indent=4, allow_nan=False) + "\n")
    for cell in found["left_out"]:
        why = cell["why"]
        if not why:
            why = cell["status"]
        reason, _, _ = why.partition("; ")  # the file has them all
        print(f"left out: {cell['name']}: {reason}", file=sys.stderr)
    if not found["benchmarks"]:
        print("left out: every cell, so the file holds no benchmark", file=sys.stderr)
    return [out]
