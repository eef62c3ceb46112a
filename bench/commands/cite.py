"""``cite``: prints one number of a run, ready to be pasted, with its permanent id."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.commands.options import CommandParsers, all_folders, filled
from bench.errors import BAD, GOOD, InputError
from bench.files import plots_folder
from bench.findings import Level

if TYPE_CHECKING:
    from bench.judge.analysis import Analysis
    from bench.report.citation import Citation

FORMATS = ("markdown", "bibtex", "text")
TITLES = {"markdown": "Markdown", "bibtex": "BibTeX", "text": "Plain text"}
DESCRIPTION = (
    "Prints the step time of a cell, or its ratio to that of a second one, with interval, n, "
    "machine, versions, commit and the hash of the journal, as Markdown, BibTeX and plain text. A "
    "cell that is not comparable is cited as such, without a number. Of several runs of one "
    "matrix, each counts once. Exit status 1, and nothing cited, if check finds an error; with "
    "--force it is cited, and the text says so. check --citation checks the text."
)


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "cite", help="cite one number, one ratio or one plot", description=DESCRIPTION
    )
    option = parser.add_argument
    option(
        "words",
        nargs="+",
        type=filled,
        metavar="RUN [RUN ...] [CELL [CELL]]",
        help=(
            "folders of runs, or folders that hold runs; then a cell's id or its beginning, or "
            "its label in quotes; with a second cell, the ratio to it"
        ),
    )
    option("--plot", metavar="NAME", help="cite a figure instead, such as memory_vs_time")
    option(
        "--format", choices=[*FORMATS, "all"], default="all", help="what to print (default: all)"
    )
    option(
        "--force", action="store_true", help="cite what check refuses; the text says why it does"
    )


def run(arguments: argparse.Namespace) -> int:
    from bench.judge.analysis import Analysis
    from bench.judge.integrity import examine
    from bench.judge.pool import load_pool

    places, cells = _places_and_cells(arguments.words)
    pool, folders = load_pool(places), all_folders(places)
    data = Analysis.of(pool, folders[0])
    found = _citation(arguments.plot, cells, data)
    errors = []
    for finding in examine(pool, folders):
        if finding.level is Level.ERROR:
            errors.append(f"{finding.topic}: {finding.sentence}")
    if errors and not arguments.force:
        names = ", ".join(map(str, places))
        print(
            f"bench: {names}: is not cited: {errors[0]}; --force cites it anyway", file=sys.stderr
        )
        return BAD
    if errors:
        found = found.in_spite_of(errors)
    if arguments.format == "all":
        parts = [f"{TITLES[name]}:\n\n{getattr(found, name)}\n" for name in FORMATS]
        print("\n".join(parts), end="")
    else:
        print(getattr(found, arguments.format))
    return GOOD


def _places_and_cells(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """The folders, which come first, and the cells."""
    count = 1
    while count < len(words) and Path(words[count]).is_dir():
        count += 1
    return list(map(Path, words[:count])), list(words[count:])


def _citation(plot: str | None, cells: Sequence[str], data: Analysis) -> Citation:
    from bench.report.citation import cite, cite_plot

    if plot is not None:
        if cells:
            raise InputError("--plot: cites a figure alone; leave out CELL")
        folder = plots_folder(data.folder)
        names = sorted(path.stem for path in folder.glob("*.png"))
        if plot not in names:
            hint = f"draw it: python -m bench report {data.folder}"
            if names:
                hint = f"use one of {', '.join(names)}"
            raise InputError(f"--plot '{plot}': is not in {folder}; {hint}")
        return cite_plot(data.pool, plot)
    if len(cells) not in {1, 2}:
        raise InputError(
            f"CELL: {len(cells)} are named; name one, or two for their ratio, or --plot NAME"
        )
    first, *rest = [data.run.find(text).cell_id for text in cells]
    return cite(data, first, *rest)
