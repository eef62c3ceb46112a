"""``lint``: what gradient accumulation will do with the numbers in training configs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bench import files
from bench.commands.options import LARGEST, CommandParsers, integer_to, named
from bench.errors import BAD, GOOD, WRONG, InputError
from bench.findings import Level

if TYPE_CHECKING:
    from bench.audit.lint.lint_options import LintOptions
    from bench.audit.lint.rules import LintFinding

EPILOG = (
    "Exit status: 0 nothing but notes found; 1 an error or a warning; 2 a config cannot be read "
    "or has a wrong value, or the only file, or every file of a folder, is of no kind that lint "
    "knows."
)
SHOWN = 5
"""Files of unknown kind that are named."""


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "lint", help="find accumulation mistakes in training configs", epilog=EPILOG
    )
    option = parser.add_argument
    option(
        "configs",
        nargs="*",
        type=named,
        metavar="CONFIG",
        help=(
            "a YAML, JSON or TOML of Lightning, DeepSpeed, accelerate, TrainingArguments or a "
            "framework above them, as Hydra composes it; a shell script that launches a training; "
            "or a folder with such files"
        ),
    )
    integer, absent = integer_to(LARGEST), "if the config does not say"
    option(
        "--samples",
        type=integer,
        metavar="S",
        help="size of the training set; enables the rules about steps",
    )
    option(
        "--micro-batch",
        type=integer,
        metavar="B",
        help=f"samples of a micro-batch on one rank, {absent}",
    )
    option("--world-size", type=integer, metavar="W", help=f"ranks, {absent}")
    for package in ("deepspeed", "lightning"):
        option(
            f"--{package}-version", type=_version, metavar="V", help="instead of the installed one"
        )
    option("--json", action="store_true", help="print a list of findings as JSON")
    option(
        "--sarif",
        type=named,
        metavar="FILE",
        help="also write the findings as SARIF 2.1.0, for code hosts",
    )
    option("--rules", action="store_true", help="list the rules and stop")


def _version(text: str) -> tuple[int, ...]:
    from bench.audit.lint.version_facts import version

    try:
        return version(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is no version such as 0.18.2") from error


def run(arguments: argparse.Namespace) -> int:
    from bench.audit.lint import lint
    from bench.audit.lint.config_kinds import EXPECTED
    from bench.audit.lint.launch_script import LAUNCHERS
    from bench.audit.lint.lint_options import LintOptions
    from bench.audit.lint.rules import sarif
    from bench.audit.lint.version_facts import used

    if arguments.rules:
        _print_rules()
        return GOOD
    if not arguments.configs:
        raise InputError(f"lint: name at least one config: {EXPECTED}")
    first = arguments.configs[0]
    if first.name.partition(" ")[0] in LAUNCHERS and not first.exists():
        raise InputError("lint: reads files, no commands; put it into one, such as train.sh")
    options = LintOptions(
        samples=arguments.samples,
        batch_size=arguments.micro_batch,
        world_size=arguments.world_size,
        deepspeed=used("deepspeed", arguments.deepspeed_version),
        lightning=used("lightning", arguments.lightning_version),
    )
    findings = lint(arguments.configs, options)
    if arguments.sarif:
        with files.writing(f"--sarif {arguments.sarif}"):
            files.write(arguments.sarif, json.dumps(sarif(findings), indent=2) + "\n")
    if arguments.json:
        print(json.dumps([finding.to_dict() for finding in findings], indent=2))
    else:
        for finding in findings:
            # The bytes of a file name may be no text.
            print(str(finding).encode(errors="backslashreplace").decode())
    _print_rest(options, findings)
    if any(finding.level is not Level.NOTE for finding in findings):
        return BAD
    if options.problems:
        return WRONG
    return GOOD


def _print_rules() -> None:
    from bench.audit.lint.rules import EXAMPLES, rules

    for code, rule in rules().items():
        print(f"{code:7} {rule.title} ({rule.source})")
        for example in EXAMPLES:
            if example.code == code:
                print(f"{'':8}{example.config}")
    print("Below a rule: configs in which it is found, where N = 4 unless they say otherwise")


def _print_rest(options: LintOptions, findings: Sequence[LintFinding]) -> None:
    """What was not judged, what could not be read, and what would help, one line each."""
    for line in options.problems:
        _say(f"problem: {line}")
    for line in options.unknown[:SHOWN]:
        _say(f"unknown: {line}")
    if len(options.unknown) > SHOWN:
        _say(f"unknown: {len(options.unknown) - SHOWN} more files")
    for line in options.notes:
        _say(f"note: {line}")
    for package, version in (("DeepSpeed", options.deepspeed), ("Lightning", options.lightning)):
        if version.is_assumed and any(package in finding.what for finding in findings):
            option = f"--{package.lower()}-version"
            _say(
                f"note: {package} is not installed here, so {version} is assumed; {option} names "
                "another"
            )
    if options.how_composed:
        _say(f"hint: {options.how_composed}")
    if any(finding.stops for finding in findings):
        _say("hint: training stops at once; fix that, and lint again to see what else it would do")
    if options.wanted:
        names = ("--samples", "--micro-batch", "--world-size")
        missing = [name for name in names if name in options.wanted]
        _say(f"hint: {' and '.join(missing)} would enable the rules about windows, steps and logs")


def _say(line: str) -> None:
    print(line.encode(errors="backslashreplace").decode(), file=sys.stderr)
