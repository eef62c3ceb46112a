"""``steps``: how many optimizer steps a training takes, by the usual formula and by each backend's rule."""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.commands.options import add_backend, chosen_backends, list_of
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
    words = "micro-batches per window; a list is one N per epoch (default: 1)"
    option("--accumulate", type=list_of(int, "integers such as 1,4,2"), default=[1], metavar="N[,N]", help=words)
    option("--world-size", type=int, default=1, metavar="W", help="ranks (default: 1)")
    option("--epochs", type=int, metavar="E", help="epochs (default: 1, or no limit with --max-steps)")
    words = "steps after which training stops, unless the epochs end before"
    option("--max-steps", type=int, metavar="K", help=words)
    option("--drop-last", action="store_true", help="the loader drops an incomplete last micro-batch")
    words = "DistributedSampler drops samples instead of repeating some"
    option("--sampler-drop-last", action="store_true", help=words)
    option("--limit-batches", type=int, metavar="B", help="micro-batches of an epoch, as limit_train_batches")
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
        accumulate=arguments.accumulate[0],
        accumulate_later=arguments.accumulate[1:],
        world_size=arguments.world_size,
        epochs=1 if arguments.epochs is None and max_steps is None else arguments.epochs,
        max_steps=max_steps,
        drop_last=arguments.drop_last,
        sampler_drop_last=arguments.sampler_drop_last,
        limit_batches=arguments.limit_batches,
    )
    rules = by_rule(training, chosen_backends(arguments.backend))
    print(json.dumps(document(training, rules)) if arguments.json else "\n".join(lines(training, rules)))
    return GOOD
