"""``accumulation``: measures in which dtype every backend sums gradients, and with what error.

With ``--json`` one object per line: ``backend``, ``precision``, ``world_size``; ``dtype`` that gradients are summed in,
or the status of a backend that failed, with its ``reason``; ``significand_bits`` of that dtype; ``sum`` and ``scale``,
of the right update; ``errors``: of each N, the relative L2 error of the update against fp64.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.backends.base import installed_backends, registry
from bench.commands.options import backend_names
from bench.errors import BAD, GOOD, InputError, suggest
from bench.plan.cell import REFERENCES, Device, Precision, Status

DESCRIPTION = (
    "Gives every backend gradients whose sum is exact in fp32 and lost in bf16, and prints a row per backend and "
    "precision. Exit status 1 if one does not sum them in fp32."
)


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "accumulation", help="measure in which dtype each backend sums gradients", description=DESCRIPTION
    )
    option = parser.add_argument
    option(
        "--backend",
        action="append",
        type=backend_names,
        metavar="B[,B]",
        help="only these, or module:Class; see 'backends'",
    )
    option("--world-size", type=int, default=2, metavar="W", help="number of ranks (default: %(default)s)")
    option("--device", type=Device, default=Device.CPU, metavar="|".join(Device), help="what the ranks run on")
    option("--errors", action="store_true", help="also print the error against fp64 for N = 1 to 256")
    option("--json", action="store_true", help="one JSON object per line; its keys: see bench/commands/accumulation.py")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 if a backend does not sum in fp32."""
    from bench.audit.dtypes import WINDOWS, spelled, table

    named = [name for part in arguments.backend or [] for name in part]
    known = [name for name in registry(named) if name not in REFERENCES]
    chosen = named or known
    if unknown := [name for name in chosen if name not in known]:
        raise InputError(
            f"--backend: '{unknown[0]}' is unknown; {suggest(unknown[0], [*known, *installed_backends()])}"
        )
    if arguments.world_size < 1:
        raise InputError(f"--world-size is {arguments.world_size}; it must be at least 1")
    good, windows = True, WINDOWS if arguments.errors else ()
    precisions, device = list(Precision), arguments.device
    for row in table(chosen, precisions, windows, world_size=arguments.world_size, device=device):
        good &= row["dtype"] in {"fp32", Status.UNSUPPORTED}
        print(json.dumps(row) if arguments.json else spelled(row), flush=True)
    return GOOD if good else BAD
