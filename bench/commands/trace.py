"""``trace``: trains one cell of a run again for a few windows, and writes one as a Chrome trace."""

from __future__ import annotations

import argparse
import contextlib
import errno
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.commands.options import CommandParsers, named
from bench.errors import BAD, GOOD, InputError
from bench.files import writing
from bench.plan.cell import Cell, Status

TIMEOUT_S = 1800
SUFFIX = ".json.gz"
ADVICE = "name a file that can"
DESCRIPTION = (
    "Trains one cell of a run again on this machine, and writes one optimizer step, the third, as "
    "a Chrome trace for Perfetto (ui.perfetto.dev): what torch's profiler saw on every rank, with "
    "the window, its micro-batches, forwards and optimizer steps as ranges, and collectives with "
    "operation, dtype and size. The profiler slows a step down, so its times are not those of the "
    "run. Exit status 1 if the trial fails."
)


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "trace", help="write one step of a cell as a Chrome trace", description=DESCRIPTION
    )
    option = parser.add_argument
    option("run", type=named, metavar="RUN", help="the run's folder, e.g. results/<run>")
    words = "a cell's id or its beginning, or its label in quotes"
    option("cell", metavar="CELL", help=words)
    words = f"the file, which ends in {SUFFIX} (default: trace-<cell's id>{SUFFIX})"
    option("--out", type=named, metavar="FILE", help=words)


def run(arguments: argparse.Namespace) -> int:
    from bench.judge.loading import load
    from bench.launch.launcher import Launcher, LauncherError
    from bench.plan.models import describe_file
    from bench.plan.task import Spec
    from bench.report.trace_file import write_merged
    from bench.run.machine import threads_per_rank

    loaded = load(arguments.run)
    cell = loaded.find(arguments.cell)
    path: Path | None = arguments.out
    if path is None:
        path = Path(f"trace-{cell.cell_id}{SUFFIX}")
    if not path.name.endswith(SUFFIX):
        raise InputError(f"--out {path}: must end in {SUFFIX}")
    _refuse(cell)
    settings, corpus = loaded.manifest.settings, None
    if cell.corpus != "markov":
        corpus = str(Path(settings.workload.corpus).resolve())
        found = describe_file(Path(corpus), cell.sequence_length + 1, f"{arguments.run}: corpus")
        if found != cell.corpus:
            raise InputError(
                f"{arguments.run}: the corpus was {cell.corpus} and is {found}; restore it"
            )
    with _writable(path), tempfile.TemporaryDirectory(prefix="accumulation-bench-") as folder:
        spec = Spec(
            cell=cell,
            passes=("trace",),
            folder=folder,
            reference="",
            corpus=corpus,
            threads=threads_per_rank(cell.num_processes, settings.threads),
        )
        try:
            with Launcher(cell.device) as launcher:
                outcome = launcher.run(spec, TIMEOUT_S)
        except LauncherError as error:
            print(f"bench: {error}", file=sys.stderr)
            return BAD
        if outcome.status is not Status.OK:
            print(
                f"bench: {loaded.labels[cell.cell_id]}: {outcome.status}: {outcome.reason}",
                file=sys.stderr,
            )
            return BAD
        traces = [Path(folder, rank["trace"]) for rank in outcome.ranks]
        about = {"run": loaded.name, "cell": cell.cell_id, "label": loaded.labels[cell.cell_id]}
        with writing(f"--out {path}", ADVICE):
            num_events = write_merged(traces, path, about)
    print(f"{path}: {num_events:,} events of one step; open it at https://ui.perfetto.dev")
    return GOOD


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Raise InputError for a file that cannot be written, before anything is trained.

    A new file that stays empty is removed; one that was there is kept if nothing replaces it.
    """
    with writing(f"--out {path}", ADVICE):
        is_new = not path.exists()
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))
        path.touch()
    try:
        yield
    finally:
        if is_new and path.exists() and path.stat().st_size == 0:
            path.unlink()


def _refuse(cell: Cell) -> None:
    """Raises InputError for a cell that has no step to be seen on this machine."""
    if not cell.world.computes:
        raise InputError(f"CELL '{cell.label}': is on fake tensors, which compute nothing")
    if cell.num_nodes > 1:
        raise InputError(f"CELL '{cell.label}': is on several nodes; trace one of a single node")
