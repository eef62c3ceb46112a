"""``check``: audits a finished run from its raw samples, or checks a citation against them.

With ``--json`` one object: ``run``, its folder, or several with commas; ``findings``, each with
``level`` (error, warning, note, good), ``topic`` and ``text``; ``errors`` and ``warnings``, their
numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import files
from bench.commands.options import CommandParsers, add_runs, all_folders
from bench.errors import InputError, reason_of
from bench.findings import Finding

DESCRIPTION = (
    "Recomputes everything from a run's journal, and says what to know before citing it: schema "
    "and hashes, medians, order, drift, outliers, two modes, ranks out of balance, A/A pair, "
    "gates. Exit status 1 if the data is not what it claims to be, 0 with warnings alone. With "
    "--citation: checks the ids, values, intervals, n and hashes in a text; exit status 1 if one "
    "is wrong."
)


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "check", help="audit a run, or check a text that cites it", description=DESCRIPTION
    )
    add_runs(parser, "each is audited, and what they say together")
    parser.add_argument(
        "--citation",
        metavar="FILE",
        help="check this text, which cites the run; - is standard input",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object; its keys: see bench/commands/check.py"
    )


def run(arguments: argparse.Namespace) -> int:
    from bench.judge.integrity import check
    from bench.report.terminal import report_findings

    verdicts = ("do not cite it", "mention these when you cite it", "clean")
    if arguments.citation is None:
        found = check(*arguments.runs)
    else:
        found = _citation_findings(arguments.runs, arguments.citation)
        verdicts = ("it does not match the data", "it matches the data", "it matches the data")
    runs = ", ".join(map(str, arguments.runs))
    return report_findings(found, verdicts, as_json=arguments.json, run=runs)


def _citation_findings(places: Sequence[Path], name: str) -> list[Finding]:
    from bench.judge.analysis import Analysis
    from bench.judge.integrity import journal
    from bench.judge.pool import load_pool
    from bench.report.citation import check_citations

    place, advice = f"--citation {name}", "name a file with what cite printed"
    try:
        if name == "-":
            if sys.stdin is None:
                raise InputError(f"{place}: standard input is closed; {advice}")
            text = sys.stdin.read()
        else:
            text = files.read(Path(name), place, advice).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: cannot be read (it is not UTF-8); {advice}") from error
    except OSError as error:
        why = reason_of(error)
        raise InputError(f"{place}: cannot be read ({why}); {advice}") from error
    pool = load_pool(places)
    data = Analysis.of(pool, all_folders(places)[0])
    return [*map(journal, pool.runs), *check_citations(data, text)]
