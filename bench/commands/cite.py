"""``cite``: prints one number of a run, ready to be pasted, with its permanent id."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from bench.commands.options import named
from bench.errors import BAD, GOOD, InputError
from bench.files import plots_folder
from bench.findings import Level

if TYPE_CHECKING:
    from bench.judge.loading import Run
    from bench.report.citation import Citation

FORMATS = ("markdown", "bibtex", "text")
TITLES = {"markdown": "Markdown", "bibtex": "BibTeX", "text": "Plain text"}
DESCRIPTION = (
    "Prints the step time of a cell, or its ratio to that of a second one, with interval, n, machine, versions, commit "
    "and the hash of the journal, as Markdown, BibTeX and plain text. A cell that is not comparable is cited as such, "
    "without a number. Exit status 1 if the journal was changed after the run. check --citation checks the text."
)


def add(commands: Any) -> None:
    parser = commands.add_parser("cite", help="cite one number, one ratio or one plot", description=DESCRIPTION)
    option = parser.add_argument
    option("run", type=named, metavar="RUN", help="the run's folder, e.g. results/<run>")
    option(
        "cells",
        nargs="*",
        metavar="CELL",
        help="a cell's id or its beginning, or its label in quotes; with a second cell, the ratio to it",
    )
    option("--plot", metavar="NAME", help="cite a figure instead, such as memory_vs_time")
    option("--format", choices=[*FORMATS, "all"], default="all", help="what to print (default: all)")


def run(arguments: argparse.Namespace) -> int:
    from bench.judge.integrity import journal
    from bench.judge.loading import load

    found = load(arguments.run)
    citation = _citation(arguments, found)
    if (unchanged := journal(found)).level is Level.ERROR:
        print(f"bench: {arguments.run}: is not cited: its journal {unchanged.text}", file=sys.stderr)
        return BAD
    if arguments.format == "all":
        parts = [f"{TITLES[name]}:\n\n{getattr(citation, name)}\n" for name in FORMATS]
        print("\n".join(parts), end="")
    else:
        print(getattr(citation, arguments.format))
    return GOOD


def _citation(arguments: argparse.Namespace, found: Run) -> Citation:
    from bench.judge.analysis import Analysis
    from bench.report.citation import cite, cite_plot

    if arguments.plot is not None:
        if arguments.cells:
            raise InputError("--plot: cites a figure alone; leave out CELL")
        folder = plots_folder(arguments.run)
        names = sorted(path.stem for path in folder.glob("*.png"))
        if arguments.plot not in names:
            hint = f"use one of {', '.join(names)}" if names else f"draw it: python -m bench report {arguments.run}"
            raise InputError(f"--plot '{arguments.plot}': is not in {folder}; {hint}")
        return cite_plot(found, arguments.plot)
    if len(arguments.cells) not in {1, 2}:
        raise InputError(f"CELL: {len(arguments.cells)} are named; name one, or two for their ratio, or --plot NAME")
    first, *rest = [found.find(text).cell_id for text in arguments.cells]
    return cite(Analysis(run=found, folder=arguments.run), first, *rest)
