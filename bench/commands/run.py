"""``run``: train every cell of a matrix, and write tables and plots."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from bench.backends.base import registry
from bench.cell import Cell
from bench.commands.matrix_options import OPTIONS, add_matrix_options, cells_of, chosen_matrix, estimates
from bench.commands.report import finish
from bench.errors import BAD, EXIT_STATUS, INTERRUPTED, InputError
from bench.folders import new_folder, plots_folder
from bench.interrupt import terminate_as_interrupt

DESCRIPTION = (
    "Every cell of the matrix is trained in trials of its own, block by block, in seeded random order. After --repeats "
    "blocks, cells are trained on while their step time's ratio to the baseline's is less certain than --precision, up "
    "to --max-repeats or as far as --budget reaches."
)


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "run",
        help="run a matrix: train every cell, write tables and plots",
        description=DESCRIPTION,
        epilog=EXIT_STATUS,
    )
    add_matrix_options(parser)
    option = parser.add_argument
    option("--out", type=Path, metavar="DIR", help="the run's folder (default: results/<time>-<matrix>)")
    option("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, and nothing else")
    option("--cold", action="store_true", help="start each trial from a new interpreter, not the fork server")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Run it; the exit status that its trials deserve."""
    from rich.console import Console

    from bench import runner
    from bench.analysis.baseline import look
    from bench.launch import Launcher, LauncherError
    from bench.report.display import Display

    backends = registry()
    if arguments.resume:
        folder = arguments.resume
        _refuse_beside_resume(arguments)
        manifest = runner.reopen(folder)
    else:
        chosen = chosen_matrix(arguments)
        cells = cells_of(chosen, backends)
        folder = arguments.out or new_folder(chosen.name)
        manifest = runner.create(folder, chosen, cells, backends, cold=arguments.cold)
    cells = [Cell.from_dict(cell) for cell in manifest["cells"]]
    if unknown := {cell.backend for cell in cells} - backends.keys():
        raise InputError(f"--resume {folder}: backend '{unknown.pop()}' is not installed here any more")
    seconds = {cell_id: guess.seconds for cell_id, guess in estimates(cells, backends).items()}
    display = Display(Console(), seconds)
    plots = plots_folder(folder)
    launcher = Launcher(cells[0].device, cold=manifest["cold"])
    work = runner.Runner(folder, manifest, backends, launcher, display, look)
    with terminate_as_interrupt():
        try:
            with display, launcher:
                display.say(f"run {manifest['run_id']}: {len(cells)} cells; writing to {folder}")
                work.run()
        except KeyboardInterrupt:
            display.say(f"interrupted: the finished trials are kept; go on with: python -m bench run --resume {folder}")
            return INTERRUPTED
        except LauncherError as error:
            print(f"bench: {error}", file=sys.stderr)
            return BAD
    return finish(folder, plots)


def _refuse_beside_resume(arguments: argparse.Namespace) -> None:
    """A resumed run goes on as it was begun, so no option may ask for anything else."""
    given = [name for name in (*OPTIONS, "out") if getattr(arguments, name, None) is not None]
    given += [name for name, default in (("matrix", "auto"), ("cold", False)) if getattr(arguments, name) != default]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise InputError(f"{option}: cannot stand beside --resume, which goes on as the run was begun; leave it out")
