"""``accumulation``: measures in which dtype every backend sums gradients, and with what error.

With ``--json`` one object per line: ``backend``, ``precision``, ``world_size``; ``dtype`` that
gradients are summed in, or the status of a backend that failed, with its ``reason``;
``significand_bits`` of that dtype, ``sum``, ``scale`` and ``result_dtype``
(bench.measure.accumulation_dtype);
``errors``: the relative L2 error of the update against fp64, one per N.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from bench.commands.options import (
    CommandParsers,
    add_backend,
    add_device,
    chosen_backends,
    integer_to,
)
from bench.errors import BAD, GOOD
from bench.plan.cell import Device, Precision, Status

DESCRIPTION = (
    "Gives every backend gradients whose sum is exact in fp32 and lost in bf16, and prints a row "
    "per backend and precision. Exit status 1 if one does not sum them in fp32."
)


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "accumulation",
        help="measure in which dtype each backend sums gradients",
        description=DESCRIPTION,
    )
    option = parser.add_argument
    add_backend(parser)
    option("--world-size", type=integer_to(1024), default=2, metavar="W", help="ranks (default: 2)")
    add_device(parser, Device.CPU)
    words = "also print the error against fp64 for N = 1 to 256"
    option("--errors", action="store_true", help=words)
    words = "one JSON object per line; its keys: see bench/commands/accumulation.py"
    option("--json", action="store_true", help=words)


def run(arguments: argparse.Namespace) -> int:
    from bench.audit.dtypes import WINDOWS, row_text, table
    from bench.launch.launcher import LauncherError

    windows: Sequence[int] = ()
    if arguments.errors:
        windows = WINDOWS
    rows = table(
        list(chosen_backends(arguments.backend)),
        list(Precision),
        windows,
        world_size=arguments.world_size,
        device=Device(arguments.device),
    )
    status = GOOD
    try:
        for row in rows:
            if row["dtype"] not in {"fp32", Status.UNSUPPORTED}:
                status = BAD
            if arguments.json:
                print(json.dumps(row), flush=True)
            else:
                print(row_text(row), flush=True)
    except LauncherError as error:
        print(f"bench: {error}", file=sys.stderr)
        return BAD
    return status
