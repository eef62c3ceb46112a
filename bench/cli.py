"""The command line: ``python -m bench``, installed as ``accumulation-bench``.

Exit status: 0 all good; 1 something measured is bad; 2 the command or its input is wrong, said in one line; 130
interrupted, with all finished trials kept.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from bench import __version__, machine, matrix, plan
from bench.backends.base import Backend, registry
from bench.cell import Cell, Device, Precision, Status
from bench.commands import COMMANDS
from bench.commands.options import split_names
from bench.errors import BAD, GOOD, INTERRUPTED, WRONG, InputError
from bench.folders import RESULTS, new_folder, plots_folder
from bench.interrupt import terminate_as_interrupt
from bench.matrix import Matrix

if TYPE_CHECKING:
    from bench.tables import Tables

SUMMARY_WIDTH = 160


class Parser(argparse.ArgumentParser):
    """Errors are one line and name what would be right."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    try:
        arguments = _parser().parse_args(argv)
        command: Callable[[argparse.Namespace], int] = arguments.command
        return command(arguments)
    except InputError as error:
        print(f"bench: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD


def _parser() -> Parser:
    parser = Parser(prog="python -m bench", description="Compare gradient-accumulation backends, by measurement.")
    parser.add_argument("--version", action="version", version=f"accumulation-bench {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)

    run = commands.add_parser("run", help="run a matrix: train every cell, write tables and plots", epilog=__doc__)
    _add_matrix_options(run)
    run.add_argument("--out", type=Path, metavar="DIR", help="the run's folder (default: results/<time>-<matrix>)")
    run.add_argument("--resume", type=Path, metavar="RUN", help="go on with the run in this folder, and nothing else")
    run.add_argument("--cold", action="store_true", help="start each trial from a new interpreter, not the fork server")
    run.set_defaults(command=_run)

    planned = commands.add_parser("plan", help="show what run would do: cells, skips, estimates; starts nothing")
    _add_matrix_options(planned)
    planned.set_defaults(command=_plan)

    report = commands.add_parser("report", help="write a run's tables and plots again from its journal")
    report.add_argument("run", type=Path, metavar="RUN", help="the run's folder, e.g. results/<run>")
    report.add_argument("--plots", type=Path, metavar="DIR", help="where to draw (default: as run did)")
    report.set_defaults(command=_report)

    backends = commands.add_parser("backends", help="list the backends and what this machine can run")
    backends.set_defaults(command=_backends)

    for name in COMMANDS:
        importlib.import_module(f"bench.commands.{name}").add(commands)
    return parser


def _add_matrix_options(parser: argparse.ArgumentParser) -> None:
    """What to run; the lists may be given with commas or by repeating the option."""
    names = ", ".join(matrix.names())
    add = parser.add_argument
    add(
        "--matrix",
        default="auto",
        metavar="NAME|FILE",
        help=f"auto (gpu or cpu, as the machine is), {names}, or a TOML file",
    )
    add(
        "--backend",
        action="append",
        type=split_names,
        metavar="B[,B]",
        help="only these backends, or all; see 'backends'",
    )
    add("--accumulate", action="append", type=_integers, metavar="N[,N]", help="accumulation factors")
    add(
        "--world-size",
        action="append",
        type=_integers_or_all,
        metavar="W[,W]",
        help="numbers of ranks, or all for one per GPU",
    )
    add("--precision", action="append", type=split_names, metavar="P[,P]", help=" or ".join(Precision))
    add("--optimizer", action="append", type=split_names, metavar="O[,O]", help=", ".join(matrix.OPTIMIZERS))
    add(
        "--clip-norm",
        action="append",
        type=_numbers,
        metavar="C[,C]",
        help="largest norms of the gradient; 0 for no clipping",
    )
    add("--repeats", type=int, metavar="R", help="trials per cell")
    add("--seed", type=int, metavar="S", help="of weights, tokens and order")
    add("--batch", type=int, metavar="B", help="samples per optimizer step over all ranks")
    add("--model", metavar="SIZE", help="size of the model")
    add("--workload", metavar="MODULE:FACTORY", help="a model of your own, instead of llama")
    add("--corpus", metavar="FILE", help="a text file whose bytes are the tokens")
    add("--device", metavar="|".join(Device), help="what the ranks run on")
    add("--timeout", type=float, metavar="SECONDS", help="per trial")


OPTIONS = {
    "backend": "axes.backend",
    "accumulate": "axes.accumulate",
    "world_size": "axes.world_size",
    "precision": "axes.precision",
    "optimizer": "axes.optimizer",
    "clip_norm": "axes.clip_norm",
    "repeats": "repeats",
    "seed": "training.seed",
    "batch": "workload.global_batch_size",
    "model": "workload.model",
    "workload": "workload.workload",
    "corpus": "workload.corpus",
    "device": "device",
    "timeout": "timeout_s",
}
"""Options of the command that override a key of the matrix."""


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in split_names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of integers such as 1,4,8") from None


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in split_names(text)]
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers such as 0,1.5") from None


def _integers_or_all(text: str) -> list[Any]:
    return ["all"] if text.strip() == "all" else _integers(text)


def _matrix(arguments: argparse.Namespace) -> Matrix:
    """The matrix that the options name, with the keys that they override."""
    name = arguments.matrix
    if name == "auto":
        name = "gpu" if machine.gpus() else "cpu"
    chosen = matrix.load(name)
    for option, key in OPTIONS.items():
        value = getattr(arguments, option)
        if value is None:
            continue
        if isinstance(value, list):
            value = [item for part in value for item in part]
            value = "all" if value == ["all"] else value
        chosen = chosen.override(key, value, "--" + option.replace("_", "-"))
    return chosen


def _cells(chosen: Matrix, backends: Mapping[str, type[Backend]]) -> list[Cell]:
    return matrix.expand(chosen, backends, len(machine.gpus()) if chosen["device"] == Device.CUDA else 0)


def _estimates(cells: Sequence[Cell], backends: Mapping[str, type[Backend]]) -> dict[str, plan.Estimate]:
    walls = plan.earlier_walls(RESULTS)
    gpus = machine.gpus() if any(cell.device is Device.CUDA for cell in cells) else []
    name, cores = (gpus[0]["name"] if gpus else "cpu"), machine.num_cores()
    return {
        cell.cell_id: plan.estimate(cell, backends[cell.backend], walls, cores=cores, device_name=name)
        for cell in cells
    }


def _plan(arguments: argparse.Namespace) -> int:
    backends = registry()
    chosen = _matrix(arguments)
    cells = _cells(chosen, backends)
    skipped = plan.skipped(cells, backends)
    estimates = _estimates(cells, backends)
    width = max(len(cell.backend) for cell in cells)
    several = len({(cell.optimizer, cell.clip_norm) for cell in cells}) > 1
    lines = [
        f"{'cell':12}  {'backend':{width}}  {'N':>4} {'W':>4} {'micro-batch':>11}  dtype  {'time':>9} {'memory':>12}"
    ]
    for cell in cells:
        guess = estimates[cell.cell_id]
        seconds = "unknown" if guess.seconds is None else f"{guess.seconds:.1f} s"
        memory = "unknown" if guess.memory_bytes is None else f"{guess.memory_bytes / 2**20:,.0f} MiB"
        lines.append(
            f"{cell.cell_id}  {cell.backend:{width}}  {cell.accumulate:4d} {cell.world_size:4d} "
            f"{cell.micro_batch_size:11d}  {cell.precision}   {seconds:>9} {memory:>12}"
            + (f"  {cell.optimizer}, clip {cell.clip_norm:g}" if several else "")
            + (f"  skipped: {skipped[cell.backend]}" if cell.backend in skipped else "")
        )
    runnable = [cell for cell in cells if cell.backend not in skipped]
    total = sum(estimates[cell.cell_id].seconds or 0.0 for cell in runnable) * chosen["repeats"]
    lines.append(
        f"matrix {chosen.name}: {chosen['description']}: {len(cells)} cells x {chosen['repeats']} repeats = "
        f"{len(cells) * chosen['repeats']} trials, {len(cells) - len(runnable)} cells skipped, "
        f"about {total / 60:.0f} min (time per trial: as measured in earlier runs here, or a rough guess; memory per "
        "rank: a rough guess)"
    )
    print("\n".join(lines))
    return GOOD


def _backends(arguments: argparse.Namespace) -> int:
    rows = [("backend", "framework", "sharding", "sync", "cpu", "cuda", "known defect")]
    has_gpu = bool(machine.gpus())
    for name, backend in registry().items():
        cpu = backend.missing(Device.CPU) or "yes"
        cuda = (backend.missing(Device.CUDA) or "yes") if has_gpu else "no GPU here"
        rows.append((name, backend.framework, str(backend.sharding), str(backend.sync), cpu, cuda, backend.defect))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]).rstrip())
    return GOOD


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from bench import runner
    from bench.launch import Launcher, LauncherError
    from bench.report.display import Display

    backends = registry()
    if arguments.resume:
        folder = arguments.resume
        _refuse_beside_resume(arguments)
        manifest = runner.reopen(folder)
    else:
        chosen = _matrix(arguments)
        cells = _cells(chosen, backends)
        folder = arguments.out or new_folder(chosen.name)
        manifest = runner.create(folder, chosen, cells, backends, cold=arguments.cold)
    cells = [Cell.from_dict(cell) for cell in manifest["cells"]]
    if unknown := {cell.backend for cell in cells} - backends.keys():
        raise InputError(f"--resume {folder}: backend '{unknown.pop()}' is not installed here any more")
    seconds = {cell_id: guess.seconds for cell_id, guess in _estimates(cells, backends).items()}
    display = Display(Console(), seconds)
    plots = plots_folder(folder)
    launcher = Launcher(cells[0].device, cold=manifest["cold"])
    work = runner.Runner(folder, manifest, backends, launcher, display)
    with terminate_as_interrupt():
        try:
            with display, launcher:
                display.say(f"run {manifest['run_id']}: {len(work.trials)} trials; writing to {folder}")
                display.expect(work.left())
                work.run()
        except KeyboardInterrupt:
            display.say(f"interrupted: the finished trials are kept; go on with: python -m bench run --resume {folder}")
            return INTERRUPTED
        except LauncherError as error:
            print(f"bench: {error}", file=sys.stderr)
            return BAD
    return _finish(folder, plots)


def _refuse_beside_resume(arguments: argparse.Namespace) -> None:
    """A resumed run goes on as it was begun, so no option may ask for anything else."""
    given = [name for name in (*OPTIONS, "out") if getattr(arguments, name) is not None]
    given += [name for name, default in (("matrix", "auto"), ("cold", False)) if getattr(arguments, name) != default]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise InputError(f"{option}: cannot stand beside --resume, which goes on as the run was begun; leave it out")


def _report(arguments: argparse.Namespace) -> int:
    folder = arguments.run
    return _finish(folder, arguments.plots or plots_folder(folder))


def _finish(folder: Path, plots: Path) -> int:
    """Tables, plots and the summary of a run; the exit status that its trials deserve."""
    from rich.console import Console

    from bench import tables
    from bench.analysis import gates
    from bench.journal import read_manifest
    from bench.report.plots import draw
    from bench.report.summary import show

    manifest = read_manifest(folder)
    judged = gates.judge(tables.load(folder))
    if judged.trials.empty:
        raise InputError(f"{folder}: no trial has finished yet; go on with: python -m bench run --resume {folder}")
    try:
        plots.mkdir(parents=True, exist_ok=True)
        judged.write(folder)
        drawn = draw(judged, manifest, plots)
    except OSError as error:
        place = f"--plots {plots}" if str(error.filename).startswith(str(plots)) else str(folder)
        raise InputError(f"{place}: cannot be written ({error.strerror}); name a folder that can") from error
    console = Console(width=max(SUMMARY_WIDTH, Console().width))  # better wrapped by the terminal than cut off
    show(console, judged)
    console.print(f"tables: {folder}/*.parquet\nplots:  {plots} ({len(drawn)} files)", highlight=False, soft_wrap=True)
    return _status(judged, manifest)


def _status(judged: Tables, manifest: dict[str, Any]) -> int:
    """0 if every trial that could run is good, or invalid by a defect that its backend is known for; 1 otherwise."""
    bad = judged.trials[~judged.trials["status"].isin([Status.OK, Status.UNSUPPORTED])]
    for _, trial in bad.iterrows():
        known = manifest["backends"][trial["backend"]]["defect"]
        cause = f"the loss is divided by N = {trial['accumulate']} twice"
        only = trial["reason"].startswith("the update is off")  # it is named last
        if not (known and trial["status"] == Status.INVALID and only and cause in trial["reason"]):
            return BAD
    return GOOD
