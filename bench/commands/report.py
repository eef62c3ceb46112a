"""``report``: writes a run's tables, plots and report from its journal."""

from __future__ import annotations

import argparse
import sys

from bench import files
from bench.commands.options import CommandParsers, add_runs, all_folders, named
from bench.errors import InputError
from bench.files import plots_folder
from bench.run.journal import read_manifest


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "report", help="write a run's tables, plots and report again from its journal"
    )
    add_runs(parser, "the first one is shown, and gets the report")
    parser.add_argument(
        "--plots", type=named, metavar="DIR", help="where to draw (default: as run did)"
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="write the tables alone, whatever state they are in; draws and shows nothing",
    )
    parser.add_argument("--open", action="store_true", help="open report.html in the browser")


def run(arguments: argparse.Namespace) -> int:
    from bench.forecast import from_run
    from bench.report.outputs import rebuild, write_outputs

    folder, *others = all_folders(arguments.runs)
    read_manifest(folder)
    if arguments.rebuild:
        if others:
            raise InputError(f"--rebuild: writes the tables of one run; leave out {others[0]}")
        for name in ("plots", "open"):
            if getattr(arguments, name):
                raise InputError(
                    f"--{name}: cannot be combined with --rebuild, which draws nothing; leave one "
                    "of them out"
                )
        return rebuild(folder)
    plots = arguments.plots
    if plots is None:
        plots = plots_folder(folder)
    try:
        with files.run_folder(folder, str(folder)):
            status = write_outputs(folder, plots, from_run.section, others=others)
    except files.BusyError:
        # The run goes on: its trials so far can be shown, but only the runner writes run.json.
        status = write_outputs(folder, plots, from_run.section, others=others)
    if arguments.open:
        import webbrowser

        page = (folder / "report.html").resolve()
        if not webbrowser.open(page.as_uri()):
            print(f"bench: --open: there is no browser here; open {page} in one", file=sys.stderr)
    return status
