"""``lint``: what gradient accumulation will do with the numbers in training configs."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bench import files
from bench.commands.options import LARGEST, integer_to
from bench.errors import BAD, GOOD, InputError

EPILOG = "Exit status: 0 nothing but infos found; 1 an error or a warning; 2 a config cannot be read."


def add(commands: Any) -> None:
    parser = commands.add_parser("lint", help="find accumulation mistakes in training configs", epilog=EPILOG)
    option = parser.add_argument
    option(
        "configs",
        nargs="*",
        type=Path,
        metavar="CONFIG",
        help="a YAML or JSON of LightningCLI, DeepSpeed, Hugging Face's TrainingArguments or accelerate",
    )
    integer, absent = integer_to(LARGEST), "if the config does not say"
    option("--samples", type=integer, metavar="S", help="size of the training set; enables the rules about steps")
    option("--micro-batch", type=integer, metavar="B", help=f"samples of a micro-batch on one rank, {absent}")
    option("--world-size", type=integer, metavar="W", help=f"ranks, {absent}")
    for package in ("deepspeed", "lightning"):
        option(f"--{package}-version", type=_version, metavar="V", help="instead of the installed one")
    option("--json", action="store_true", help="print a list of findings as JSON")
    option("--sarif", type=Path, metavar="FILE", help="also write the findings as SARIF 2.1.0, for code hosts")
    option("--rules", action="store_true", help="list the rules and stop")


def _version(text: str) -> tuple[int, ...]:
    from bench.audit.lint.lint_options import version

    try:
        return version(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text[:40]}' is no version such as 0.18.2") from error


def run(arguments: argparse.Namespace) -> int:
    from bench.audit.lint import lint
    from bench.audit.lint.config_file import EXPECTED
    from bench.audit.lint.lint_options import LintOptions, installed
    from bench.audit.lint.rules import EXAMPLES, Severity, rules, sarif

    if arguments.rules:
        for code, rule in rules().items():
            examples = (f"\n{'':8}{config}" for of, config, _ in EXAMPLES if of == code)
            print(f"{code:7} {rule.title} ({rule.source})", *examples, sep="")
        print("Below a rule: configs in which it is found, where N = 4 unless they say otherwise")
        return GOOD
    if not arguments.configs:
        raise InputError(f"lint: name at least one config: {EXPECTED}")
    options = LintOptions(
        samples=arguments.samples,
        batch_size=arguments.micro_batch,
        world_size=arguments.world_size,
        deepspeed=arguments.deepspeed_version or installed("deepspeed"),
        lightning=arguments.lightning_version or installed("lightning"),
    )
    findings = lint(arguments.configs, options)
    if arguments.sarif:
        with files.writing(f"--sarif {arguments.sarif}"):
            arguments.sarif.write_text(json.dumps(sarif(findings), indent=2) + "\n")
    if arguments.json:
        print(json.dumps([finding.to_dict() for finding in findings], indent=2))
    else:
        for finding in findings:
            # The bytes of a file name may be no text.
            print(str(finding).encode(errors="backslashreplace").decode())
    if any(finding.stops for finding in findings):
        print("hint: training stops at once; fix that, and lint again to see what else it would do", file=sys.stderr)
    if options.wanted:
        missing = [option for option in ("--samples", "--micro-batch", "--world-size") if option in options.wanted]
        print(f"hint: {' and '.join(missing)} would enable the rules about windows, steps and logs", file=sys.stderr)
    return BAD if any(finding.severity is not Severity.INFO for finding in findings) else GOOD
