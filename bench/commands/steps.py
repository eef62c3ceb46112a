"""``steps``: how many optimizer steps a training takes, by formula and by each backend's rule."""

from __future__ import annotations

import argparse
import json

from bench import validation
from bench.audit.training_plan import TrainingPlan
from bench.commands.options import CommandParsers, add_backend, add_training, chosen_backends, flag
from bench.errors import GOOD

OPTIONS = {"batch_size": "micro_batch"}
"""Of fields of TrainingPlan, where an option has another name."""


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "steps",
        help="calculate how many optimizer steps each backend takes in a training; trains nothing",
        description="Calculate the optimizer steps of a training, by the naive formula and by each "
        "backend's rule.",
    )
    add_training(parser, world_size=1, required=True)
    add_backend(parser)
    words = (
        "of Hugging Face's Trainer (default: the newest); up to 4.51.3 it counts whole windows only"
    )
    parser.add_argument("--transformers-version", type=_version, metavar="V", help=words)
    words = "one JSON object; its keys: see bench/audit/stepcount_text.py"
    parser.add_argument("--json", action="store_true", help=words)
    parser.set_defaults(accumulate=[1], world_size=1)


def _version(text: str) -> tuple[int, ...]:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(text).release
    except InvalidVersion as error:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is no version such as 4.51.3") from error


def run(arguments: argparse.Namespace) -> int:
    from bench.audit.stepcount_text import by_rule, document, printed_lines

    values = vars(arguments) | {"batch_size": arguments.micro_batch}
    if arguments.max_steps == -1:
        values["max_steps"] = None
    if arguments.epochs is None and values["max_steps"] is None:
        values["epochs"] = 1
    fields = {field: values[field] for field in validation.declared(TrainingPlan)}
    training = validation.read(
        TrainingPlan, fields, "", lambda field: flag(OPTIONS.get(field, field))
    )
    rules = by_rule(training, chosen_backends(arguments.backend), arguments.transformers_version)
    if arguments.json:
        print(json.dumps(document(training, rules)))
    else:
        print("\n".join(printed_lines(training, rules)))
    return GOOD
