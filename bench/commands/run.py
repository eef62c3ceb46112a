"""``run``: trains every cell of a matrix, and writes tables and plots."""

from __future__ import annotations

import argparse
import contextlib
import errno
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import __version__, files
from bench.backends.base import Backend
from bench.commands.matrix_options import OPTIONS, add_matrix_options, check_workloads, planned
from bench.commands.options import CommandParsers, filled, flag, named
from bench.errors import BAD, EXIT_STATUS, INTERRUPTED, InputError, is_interrupt
from bench.files import new_folder, plots_folder
from bench.findings import Level
from bench.formatting import plural
from bench.launch import (
    follower,
    gpu_checks,
    job_nodes,
    shared_nccl,
    surroundings,
    torch_facts,
    two_codes,
)
from bench.launch import gpus as launch_gpus
from bench.launch import launcher as launching
from bench.launch.nodes import JOIN_S, Nodes
from bench.plan.cell import Device, summarize
from bench.run import machine, start
from bench.run.journal import Journal, read_manifest
from bench.run.manifest import CONNECTION, GpuSharing, Manifest
from bench.run.start import Planned

if TYPE_CHECKING:
    from bench.report.progress import Display

DESCRIPTION = (
    "Every trial trains one cell of the matrix. Trials run in blocks, each in seeded random "
    "order. After --repeats blocks, a cell is repeated while the interval of its time ratio to "
    "the baseline is wider than --interval-width, until --max-repeats or the --budget is reached."
)
SIGNALS = (
    "Ctrl-C, SIGTERM and SIGHUP end the run and keep every finished trial; a second signal ends "
    "the current trial at once. A background shell ignores SIGINT, and nohup ignores SIGHUP: use "
    "SIGTERM there. --resume goes on after these, and after a kill -9, a reboot or a full disk. "
    "On several hosts, start the same command once on each, with srun, torchrun or another "
    "engine: docs/hosts.md."
)
STOPPING = "stopping: the processes of this run are being ended; a second signal ends them at once"
"""The answer to an interrupt."""


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "run",
        help="train every cell of a matrix, and write tables and plots",
        description=DESCRIPTION,
        epilog=f"{SIGNALS} {EXIT_STATUS}",
    )
    add_matrix_options(parser)
    option = parser.add_argument
    option(
        "--out",
        type=named,
        metavar="DIR",
        help="the run's folder (default: results/<time>-<matrix>)",
    )
    option(
        "--resume",
        type=named,
        metavar="RUN",
        help="go on with the run in this folder, as it was begun",
    )
    option(
        "--retry-failed",
        action="store_true",
        help="with --resume: also rerun the trials that failed",
    )
    option(
        "--cold",
        action="store_true",
        help="start each trial in a new interpreter, not from the fork server",
    )
    words = (
        "train every cell with this commit of the bench too, in the same blocks, for compare; "
        "one node alone"
    )
    option("--against", type=filled, metavar="COMMIT", help=words)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--quiet", action="store_true", help="print nothing before the answer")
    shown.add_argument(
        "--json", action="store_true", help="print JSON lines: each event, then the answer"
    )


def run(arguments: argparse.Namespace) -> int:
    place = job_nodes.here()
    if place is None:
        surroundings.require_sound()
        return _lead(arguments, None)
    about = _about(job_nodes.address_of(place))
    if not place.is_controller:
        return follower.follow(place, job_nodes.secret(), about)
    if about["error"]:
        raise InputError(f"node 0: {about['error']}")
    with Nodes(place, job_nodes.secret(), about) as others:
        if not arguments.quiet:
            count = plural(place.num_nodes - 1, "other node")
            print(f"bench: waiting for {count} to join, at most {JOIN_S:g} s", file=sys.stderr)
        others.gather()
        return _lead(arguments, others)


def _about(head: str) -> dict[str, object]:
    """What a node tells the controller: versions, GPUs, and why it cannot be used."""
    gpus, error = launch_gpus.gpus(), ""
    try:
        job_nodes.check_interfaces()
        surroundings.require_sound()
        if gpus:
            _require_usable(gpus)
    except InputError as found:
        error = str(found)
    project = {"accumulation-bench": __version__, "its code": machine.code({}, {})["bench"][:12]}
    fingerprint = {**machine.fingerprint(), CONNECTION: machine.connection(head)}
    return {
        "versions": project | machine.packages(),
        "gpus": gpus,
        "error": error,
        "fingerprint": fingerprint,
    }


def _lead(arguments: argparse.Namespace, others: Nodes | None) -> int:
    """Run the matrix, or resume a run, as the controller of all nodes."""
    from bench.forecast import fit

    nodes, head = [], ""
    if others is not None:
        nodes = [node.about["fingerprint"] for node in others.nodes]
        head = others.address
    if arguments.resume:
        folder = arguments.resume
        _refuse_beside_resume(arguments)
        # Read before the lock is taken: nothing is written to a folder that holds no run.
        backends = start.backends_of(folder, read_manifest(folder))
        with files.run_folder(folder, f"--resume {folder}"):
            manifest = start.reopen(folder, backends, nodes)
            return _train(folder, manifest, backends, arguments, others)
    if arguments.retry_failed:
        raise InputError("--retry-failed: works only with --resume RUN; add it")
    plan = planned(arguments, others=others)
    plan = check_workloads(plan)
    if arguments.against:
        plan = _with_other_commit(plan, arguments.against, others)
    folder = arguments.out
    if folder is None:
        folder = new_folder(plan.matrix.name)
    start.require(folder, plan, f"--out {folder}")
    sharing = None
    if plan.gpus and others is None:
        _require_usable(plan.gpus)
        plan, sharing = _shared(plan)
    with files.run_folder(folder, f"--out {folder}"):
        manifest = start.create(
            folder,
            plan,
            cold=arguments.cold,
            peaks=fit.peaks(plan.cells),
            nodes=nodes,
            head=head,
            sharing=sharing,
        )
        return _train(folder, manifest, plan.backends, arguments, others)


def _with_other_commit(plan: Planned, name: str, others: Nodes | None) -> Planned:
    """The plan, with each cell that is compared once more at another commit."""
    if others is not None:
        raise InputError("--against: compares two commits on one node; start it on one host")
    commit = two_codes.commit_of(name)
    cells = list(plan.cells)
    for cell in plan.cells:
        if not cell.is_reference and not cell.twin and cell.cell_id not in plan.once:
            cells.append(cell.at_commit(commit))
    return replace(plan, cells=cells)


def _require_usable(gpus: Sequence[Mapping[str, Any]]) -> None:
    """Raise InputError if another bench has the GPUs, or torch cannot use them."""
    with launch_gpus.hold_gpus([gpu["uuid"] for gpu in gpus]):
        facts = gpu_checks.gather(torch_facts.ask_torch()[0])
    for check in gpu_checks.USABLE:
        for finding in check(facts):
            if finding.level is Level.ERROR:
                raise InputError(f"{finding.topic}: {finding.text}")


def _shared(plan: Planned) -> tuple[Planned, GpuSharing | None]:
    """The plan with what ranks that share a GPU use, NCCL if it works; None if none does."""
    shared = [cell for cell in plan.cells if cell.world.shares_gpus]
    if not shared:
        return plan, None
    try:
        with launching.Launcher(Device.CUDA) as launcher:
            reason = shared_nccl.refusal(shared, launcher)
    except launching.LauncherError as error:  # which the first trial will meet too
        reason = str(error)
    if reason:
        return plan, GpuSharing(over="gloo", reason=reason)
    cells, renamed = [], {}
    for cell in plan.cells:
        new = replace(cell, shared_nccl=cell.world.shares_gpus)
        cells.append(new)
        renamed[cell.cell_id] = new.cell_id
    skipped = {renamed.get(name, name): reason for name, reason in plan.skipped.items()}
    once = [renamed.get(name, name) for name in plan.once]
    return replace(plan, cells=cells, skipped=skipped, once=once), GpuSharing(over="NCCL")


def _train(
    folder: Path,
    manifest: Manifest,
    backends: dict[str, type[Backend]],
    arguments: argparse.Namespace,
    others: Nodes | None,
) -> int:
    """Run the trials that the journal lacks, and write the report."""
    from bench.forecast.estimate import costs
    from bench.judge.baseline import baseline_of, interim_analysis
    from bench.report.outputs import write_outputs
    from bench.report.progress import Display, JsonLines
    from bench.run import matmul, runner
    from bench.screen import Screen

    cells = manifest.cells
    gpus = []
    if any(cell.device is Device.CUDA for cell in cells):
        gpus = launch_gpus.gpus()
    guesses = costs(cells, gpus, manifest.skipped)
    display = Display(Screen(quiet=arguments.quiet, needs_reader=True), guesses, manifest)
    if arguments.json:
        display = JsonLines(guesses, manifest)
    journal = Journal(folder)
    launcher = launching.Launcher(cells[0].device, cold=manifest.cold, others=others)
    working = _with_other_code(launcher, folder, manifest)
    kept = f"the finished trials are kept; go on with: python -m bench run --resume {folder}"
    try:
        with journal.held(str(folder)), display, working:
            compared = summarize(cells, baseline_of(manifest))
            display.say(f"run {manifest.run_id}: {compared}; writing to {folder}")
            if manifest.sharing is not None:
                display.say(manifest.sharing.sentence)
            with _answering(display):
                timed = matmul.time_products(folder, manifest, launcher, display)
                work = runner.Runner(
                    folder,
                    timed,
                    backends,
                    working,
                    display,
                    interim_analysis,
                    retry_failed=arguments.retry_failed,
                    journal=journal,
                )
                work.run()
    except launching.LauncherError as error:
        print(f"bench: {error}", file=sys.stderr)
        return BAD
    except (KeyboardInterrupt, OSError, RuntimeError) as error:
        if is_interrupt(error):
            display.say(f"interrupted: {kept}")
            if arguments.quiet:
                print(f"bench: interrupted: {kept}", file=sys.stderr)
            return INTERRUPTED
        if isinstance(error, BrokenPipeError):
            with contextlib.suppress(BrokenPipeError):
                print(f"bench: nobody reads the output any more: {kept}", file=sys.stderr)
            return INTERRUPTED
        if not isinstance(error, OSError):
            raise
        raise InputError(f"{folder}: {_reason(error)}; {kept}") from error
    from bench.forecast import from_run  # here, since it imports pandas

    return write_outputs(folder, plots_folder(folder), from_run.section, as_json=arguments.json)


def _with_other_code(
    launcher: launching.Launcher, folder: Path, manifest: Manifest
) -> launching.Launcher | two_codes.TwoCodes:
    """The launcher, with one of the other commit beside it if cells have one."""
    commit = next((cell.other_commit for cell in manifest.cells if cell.other_commit), "")
    if not commit:
        return launcher
    code = two_codes.unpack(commit, folder)
    return two_codes.TwoCodes(launcher, manifest.cells[0].device, code, cold=manifest.cold)


def _reason(error: OSError) -> str:
    """Why a run ended."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "the disk is full; free some space"
    return str(error)


@contextlib.contextmanager
def _answering(display: Display) -> Iterator[None]:
    """Answer an interrupt before the processes are ended, which may take seconds."""
    try:
        yield
    except KeyboardInterrupt:
        display.say(STOPPING)
        raise


def _refuse_beside_resume(arguments: argparse.Namespace) -> None:
    """Refuse all options that a resumed run cannot take, since it goes on as it was begun."""
    given = []
    for name in (*OPTIONS, "out", "against"):
        if getattr(arguments, name, None) is not None:
            given.append(name)
    for name, default in (("matrix", "auto"), ("cold", False), ("try_all", False)):
        if getattr(arguments, name) != default:
            given.append(name)
    if given:
        words = "cannot be combined with --resume, which goes on as the run was begun; leave it out"
        raise InputError(f"{flag(given[0])}: {words}")
