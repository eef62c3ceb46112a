"""``audit``: which weight each micro-batch of any training command has."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench.commands.options import LARGEST, CommandParsers, integer_to
from bench.errors import BAD, GOOD, UNCHECKED, InputError
from bench.findings import Level

if TYPE_CHECKING:
    from bench.audit.command.training_audit import TrainingAudit


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "audit",
        help="run any training command, and say what weight each of its micro-batches has",
        description="Run a training command unchanged, and say how it accumulates gradients.",
        epilog="Exit status: the command's own if it failed; else 0 nothing wrong; 1 something is "
        "wrong; 2 the command cannot be started; 3 no training was seen, or nothing of it could be "
        "judged.",
    )
    option = parser.add_argument
    option(
        "--expect",
        type=integer_to(LARGEST),
        metavar="N",
        help="micro-batches that an update should have",
    )
    option(
        "--updates",
        type=integer_to(LARGEST),
        default=8,
        metavar="K",
        help="updates to sample (default: 8)",
    )
    option(
        "--json",
        action="store_true",
        help="print one JSON object; the command's output goes to stderr",
    )
    option(
        "training",
        nargs=argparse.REMAINDER,
        metavar="-- COMMAND",
        help="torchrun --nproc-per-node 2 train.py ...",
    )


def run(arguments: argparse.Namespace) -> int:
    from bench.audit.command import audited_command
    from bench.audit.command.audit_screen import document, screen
    from bench.audit.command.training_audit import TrainingAudit

    command = arguments.training
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise InputError("audit: name the training command after --")
    with audited_command.records_folder("audit") as name:
        status = audited_command.run(command, Path(name), arguments.updates, quiet=arguments.json)
        nothing = audited_command.why_nothing(Path(name))
        ranks, others = audited_command.read(Path(name))
    if others:
        print(
            f"audit: processes that trained apart from these ranks and are not judged: {others}",
            file=sys.stderr,
        )
    if status:
        print(f"audit: the command ended with exit status {status}", file=sys.stderr)
    if nothing or not ranks:
        if not nothing:
            nothing = audited_command.NO_RECORD
        print(f"audit: nothing seen: {nothing}", file=sys.stderr)
        if status:
            return status
        return UNCHECKED
    audit = TrainingAudit(ranks, arguments.expect)
    if arguments.json:
        print(json.dumps(document(audit, status)))
    else:
        print("\n".join(screen(audit)))
    if status:
        return status
    return _status(audit)


def _status(audit: TrainingAudit) -> int:
    """The exit status by what was found, for a command that has not failed itself."""
    if any(found.level is Level.ERROR for found in audit.findings):
        return BAD
    if audit.is_judged:
        return GOOD
    return UNCHECKED
