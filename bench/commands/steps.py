"""``steps``: how many optimizer steps a training takes, by the usual formula and by each backend's rule."""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.commands.options import add_backend, chosen_backends
from bench.errors import GOOD


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "steps",
        help="calculate how many optimizer steps each backend takes in a training; trains nothing",
        description="Calculate the optimizer steps of a training, by the naive formula and by each backend's rule.",
    )
    option = parser.add_argument
    option("--samples", type=int, required=True, metavar="S", help="samples of the data set")
    option("--micro-batch", type=int, required=True, metavar="M", help="samples per micro-batch on a rank")
    option("--accumulate", type=int, default=1, metavar="N", help="micro-batches per window (default: 1)")
    option("--world-size", type=int, default=1, metavar="W", help="ranks (default: 1)")
    option("--epochs", type=int, metavar="E", help="epochs (default: 1, or no limit with --max-steps)")
    words = "steps after which training stops, unless the epochs end before"
    option("--max-steps", type=int, metavar="K", help=words)
    option("--drop-last", action="store_true", help="the loader drops an incomplete last micro-batch")
    add_backend(parser)
    option("--json", action="store_true", help="one JSON object; its keys: see bench/audit/stepcount_text.py")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Calculate and print."""
    from bench.audit.stepcount_text import by_rule, document, lines
    from bench.audit.training import TrainingPlan

    max_steps = None if arguments.max_steps == -1 else arguments.max_steps
    training = TrainingPlan(
        samples=arguments.samples,
        batch_size=arguments.micro_batch,
        accumulate=arguments.accumulate,
        world_size=arguments.world_size,
        epochs=1 if arguments.epochs is None and max_steps is None else arguments.epochs,
        max_steps=max_steps,
        drop_last=arguments.drop_last,
    )
    rules = by_rule(training, chosen_backends(arguments.backend))
    print(json.dumps(document(training, rules)) if arguments.json else "\n".join(lines(training, rules)))
    return GOOD
