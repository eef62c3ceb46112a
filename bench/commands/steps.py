"""``steps``: how many optimizer steps a training takes, by the usual formula and by each backend's rule."""

from __future__ import annotations

import argparse
import json
from typing import Any

from bench.commands.options import add_backend, add_training, chosen_backends
from bench.errors import GOOD


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "steps",
        help="calculate how many optimizer steps each backend takes in a training; trains nothing",
        description="Calculate the optimizer steps of a training, by the naive formula and by each backend's rule.",
    )
    add_training(parser, world_size=1, required=True)
    add_backend(parser)
    words = "one JSON object; its keys: see bench/audit/stepcount_text.py"
    parser.add_argument("--json", action="store_true", help=words)
    parser.set_defaults(command=run, accumulate=[1], world_size=1)


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
