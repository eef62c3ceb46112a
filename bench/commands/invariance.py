"""``invariance``: whether a training computes the same at two splits of its batch."""

from __future__ import annotations

import argparse
import json
import sys

from bench.commands.options import LARGEST, CommandParsers, integer_to, list_of
from bench.errors import UNCHECKED

BY_SIGNAL = 128
"""Statuses above this are of commands that a signal has ended: nothing more is run then."""


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "invariance",
        help="run any training command at several splits of its batch, and say what first differs",
        description=(
            "Run a training command once per split of its batch, and once more for the first, "
            "and say which part of its state depends on the split. In the command, {run} is the "
            "number of the run, {port} a free port, and {vary} the place of the option that "
            "varies, which else is at the end."
        ),
        epilog=(
            "Exit status: a command's own if it failed; else 0 bitwise equal or equal to "
            "rounding; 1 something depends on the split; 2 the input is wrong; 3 the runs cannot "
            "be compared, or what differs may do so."
        ),
    )
    option = parser.add_argument
    option(
        "--vary",
        metavar="OPTIONS",
        help=(
            "what varies: '--gas {N} --micro-batch {B}', or with values of its own '--compile "
            "{0,1}'"
        ),
    )
    option(
        "--accumulate",
        type=list_of(integer_to(LARGEST), "integers"),
        metavar="N,N",
        help="the values of {N}; the others are compared with the first",
    )
    option(
        "--batch",
        type=integer_to(LARGEST),
        metavar="SAMPLES",
        help="{B} is this number divided by N: the samples of an update on one rank",
    )
    option(
        "--updates",
        type=integer_to(LARGEST),
        default=3,
        metavar="K",
        help="updates to compare (default: 3)",
    )
    option(
        "--json",
        action="store_true",
        help="print one JSON object; the commands' output goes to stderr",
    )
    option(
        "training",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="torchrun --nproc-per-node 2 train.py --seed 0 [--other -- COMMAND]",
    )


def run(arguments: argparse.Namespace) -> int:
    from bench.audit.invariance.invariance_screen import document, screen
    from bench.audit.invariance.invariance_verdict import InvarianceVerdict
    from bench.audit.invariance.split_runs import run_split
    from bench.audit.invariance.splits import splits

    planned = splits(arguments.training, arguments.vary, arguments.batch, arguments.accumulate)
    runs = []
    for number, split in enumerate([planned[0], *planned], 1):
        found = run_split(split, number, arguments.updates, quiet=arguments.json)
        runs.append(found)
        if found.status:
            text = f"{split.label} (run {number}) ended with exit status {found.status}"
            if number == 1 and not found.ranks and arguments.vary:
                text += f"; does the command know {arguments.vary}?"
            elif number > 1:
                text += (
                    ", and the first run did not; if a port or a folder was in use, write {port} "
                    "or {run} in its place"
                )
            print(f"invariance: {text}", file=sys.stderr)
            if found.nothing or found.status > BY_SIGNAL or not found.updates:
                return found.status
        elif found.nothing:
            print(f"invariance: nothing seen: {found.nothing}", file=sys.stderr)
            return UNCHECKED
    first, again, *others = runs
    verdict = InvarianceVerdict([first, *others], again, arguments.updates)
    if arguments.json:
        print(json.dumps(document(verdict)))
    else:
        print("\n".join(screen(verdict)))
    for found in runs:
        if found.status:
            return found.status
    return verdict.status
