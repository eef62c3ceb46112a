"""``throughput``: with which settings Lightning's ThroughputMonitor is right under accumulation."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping

from bench import files
from bench.audit.monitor_grid import MICRO_BATCH_S, OPTIMIZER_S, Epoch, RateVerdict, Strategy
from bench.commands.options import LARGEST, CommandParsers, integer_to, list_of, named, writable
from bench.errors import BAD, GOOD, InputError

ACCUMULATE = [1, 2, 4, 8]
LOG_EVERY = [1, 2, 3, 5, 8, 50]
"""The last is Lightning's default."""
WINDOW_SIZES = [2, 5, 9, 10, 17, 33, 97, 100]
"""The last is Lightning's default."""
INTEGER = integer_to(LARGEST)
MAY_BE_MISSING = (
    "true_samples_per_s",
    "reported_samples_per_s",
    "ratio_min",
    "ratio_median",
    "ratio_max",
)
DESCRIPTION = (
    "Trains at every combination of accumulate_grad_batches, log_every_n_steps and window_size "
    "with the installed Lightning, and compares the monitor's device/samples_per_sec (with several "
    "ranks, samples_per_sec) with the rate measured at the optimizer. Exit status 1 if a point is "
    "not right."
)


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "throughput",
        help="audit Lightning's ThroughputMonitor under accumulation",
        description=DESCRIPTION,
    )

    def option(
        name: str, read: Callable[[str], object], metavar: str, words: str, default: object = None
    ) -> None:
        parser.add_argument(name, type=read, metavar=metavar, help=words, default=default)

    option("--accumulate", _integers(1), "N[,N]", "accumulate_grad_batches", ACCUMULATE)
    option("--log-every", _integers(1), "K[,K]", "log_every_n_steps", LOG_EVERY)
    option(
        "--window-size",
        _integers(2),
        "S[,S]",
        "the monitor's window in micro-batches",
        WINDOW_SIZES,
    )
    words = (
        "whole (NB a multiple of N), partial (NB = 2N + N/2), short (NB = N/2); default: all three"
    )
    option("--epoch", _epochs, "E[,E]", words)
    option("--micro-batches", INTEGER, "NB", "NB, instead of --epoch")
    words = "with --micro-batches: epochs of the training (default: enough for some rates)"
    option("--epochs", INTEGER, "E", words)
    words = "duration of a micro-batch (default: %(default)s)"
    option("--micro-batch-time", _positive, "SECONDS", words, MICRO_BATCH_S)
    words = "duration of an optimizer step (default: %(default)s)"
    option("--optimizer-time", _positive, "SECONDS", words, OPTIMIZER_S)
    words = "what the Trainer trains with (default: %(default)s)"
    strategies = list(map(str, Strategy))
    parser.add_argument("--strategy", choices=strategies, default=str(Strategy.DDP), help=words)
    option("--world-size", INTEGER, "W", "ranks, on the CPU (default: %(default)s)", 1)
    option("--validate-every", INTEGER, "K", "micro-batches between validations (default: none)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    option("--out", named, "DIR", "write throughput.parquet and .md there")


def _integers(least: int) -> Callable[[str], list[int]]:
    """A parser of lists of integers from ``least`` on; sorted, each once."""
    what = f"integers from {least} on, such as {least},{least + 3}"
    parse = list_of(integer_to(LARGEST, least), what)

    def read(text: str) -> list[int]:
        return sorted(set(parse(text)))

    return read


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number above 0, such as 0.01")
    return number


def _epochs(text: str) -> list[Epoch]:
    wanted = set(map(str.strip, text.split(",")))
    if not wanted <= set(Epoch):
        raise argparse.ArgumentTypeError(
            f"'{text}' is not of {', '.join(Epoch)}, such as whole,partial"
        )
    return [epoch for epoch in Epoch if epoch in wanted]


def run(arguments: argparse.Namespace) -> int:
    from bench.audit import monitor
    from bench.audit.monitor_ranks import measure_all
    from bench.audit.monitor_table import settings_of, show_table, write_files
    from bench.launch.launcher import LauncherError

    arguments.strategy = Strategy(arguments.strategy)
    given = arguments.micro_batches is not None
    _check_options(arguments, given=given)
    points = monitor.grid(
        arguments.accumulate,
        arguments.log_every,
        arguments.window_size,
        _chosen_epochs(arguments, given=given),
        micro_batch_s=arguments.micro_batch_time,
        optimizer_s=arguments.optimizer_time,
        micro_batches=arguments.micro_batches,
        num_epochs=arguments.epochs,
        strategy=arguments.strategy,
        world_size=arguments.world_size,
        validate_every=arguments.validate_every,
    )
    if not points:
        raise InputError(
            "--accumulate 1: has no partial and no short epoch; add --epoch whole or a larger N"
        )
    if arguments.out:
        writable(arguments.out)

    import pandas as pd
    from rich.progress import track

    from bench.screen import Screen

    notes = Screen(stderr=True)
    rows_of, quiet = measure_all(points), not notes.is_terminal
    try:
        measured = list(
            track(rows_of, "measuring", len(points), console=notes, transient=True, disable=quiet)
        )
    except LauncherError as error:
        print(f"bench: {error}", file=sys.stderr)
        return BAD
    about = settings_of(arguments)
    # A column without a number in any row would otherwise have no dtype.
    rows = pd.DataFrame(measured).astype(dict.fromkeys(MAY_BE_MISSING, float))
    if arguments.json:
        print(json.dumps({**about, "points": measured}, indent=1))
    else:
        show_table(rows, about)
        if given:
            print("\n".join(map(_logs_text, measured)))
    if arguments.out:
        with files.writing(f"--out {arguments.out}"):
            written = write_files(arguments.out, rows, about)
        names = ", ".join(path.name for path in written)
        notes.print(f"written: {names} to {arguments.out}", highlight=False, soft_wrap=True)
    if (rows["verdict"] == RateVerdict.RIGHT).all():
        return GOOD
    return BAD


def _check_options(arguments: argparse.Namespace, *, given: bool) -> None:
    """Raise InputError for options that do not go together."""
    if arguments.epochs is not None and not given:
        raise InputError("--epochs: goes with --micro-batches; add it")
    for name in ("epoch", "out"):
        if given and getattr(arguments, name) is not None:
            why = "which is about the kinds of --epoch; leave out one"
            raise InputError(f"--micro-batches: does not go with --{name}, {why}")


def _chosen_epochs(arguments: argparse.Namespace, *, given: bool) -> list[Epoch]:
    """The kinds of ``--epoch``, or all; ``given`` micro-batches are of one kind."""
    if given:
        return [Epoch.WHOLE]
    chosen: list[Epoch] | None = arguments.epoch
    if chosen is None:
        return list(Epoch)
    return chosen


def _logs_text(row: Mapping[str, object]) -> str:
    return (
        f"N = {row['accumulate']}, {row['epoch']}, log_every_n_steps {row['log_every_n_steps']}, "
        f"window_size {row['window_size']}: {row['num_updates']} optimizer steps, "
        f"{row['num_logs']} of them logged, {row['num_rates_logged']} with a rate"
    )
