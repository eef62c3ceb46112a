"""The page on ``python -m bench invariance``: verdicts of scripts, screens, limits and cost.

``python -m studies.invariance_page`` runs what docs/invariance.json has no result of, and writes both; ``--again
scripts`` runs all scripts, and ``--again cost`` times, on an idle machine. Status 1: a verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.audit.invariance.invariance_screen import screen
from bench.audit.invariance.invariance_verdict import BITWISE, ROUNDED
from bench.formatting import at_most
from bench.tabular import markdown_table
from studies import ROOT
from studies.invariance_texts import INTRODUCTION, LIMITS, PUBLIC, PUBLIC_SCRIPTS, SIZES_OF_ROUNDING
from tests.invariance.cases import CASES, DIFFERENT, SplitCase, compare
from tests.invariance.cost import COST, measure

PAGE, DATA = ROOT / "docs/invariance.md", ROOT / "docs/invariance.json"
COMMAND = "python -m studies.invariance_page"
SCREENS = ("state moe-each", "ddp underweight on 2")
AT_ONCE = 4
"""Cases whose results are kept together."""
RIGHT = (ROUNDED, BITWISE)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has no result yet, keep each result at once, and write the page."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--again", choices=("scripts", "cost"), help="run all of these again")
    options = parser.parse_args(argv)
    data: dict[str, Any] = json.loads(DATA.read_text()) if DATA.exists() else {}
    if options.again == "scripts":
        data = {COST: data[COST]} if COST in data else {}
    elif options.again == "cost":
        data.pop(COST, None)
    missing = [case for case in CASES if case.name not in data]
    for cases in _batches(missing):
        with tempfile.TemporaryDirectory() as folder:
            for case, found in zip(cases, compare(cases, Path(folder)), strict=True):
                data[case.name] = {
                    "verdict": found.verdict,
                    "findings": [each.to_dict() for each in found.findings],
                    "largest": max((each.largest() for each in found.comparisons), default=0.0),
                    "bound": max((each.bound for each in found.comparisons), default=0.0),
                    "screen": screen(found) if case.name in SCREENS else [],
                }
                print(
                    f"{'' if _is_expected(case, data) else 'NOT EXPECTED '}{case.name}: {found.verdict}"
                )
        _keep(data)
    if COST not in data:
        data[COST] = measure()
        _keep(data)
    PAGE.write_text(page(data), encoding="utf-8")
    return int(not all(_is_expected(case, data) for case in CASES))


def _batches(cases: Sequence[SplitCase]) -> list[Sequence[SplitCase]]:
    return [cases[start : start + AT_ONCE] for start in range(0, len(cases), AT_ONCE)]


def _is_expected(case: SplitCase, data: dict[str, Any]) -> bool:
    found = data[case.name]["verdict"]
    if case.verdict == ROUNDED:
        return found in RIGHT
    texts = [each["text"] for each in data[case.name]["findings"] if each["topic"] == case.topic]
    return found == case.verdict and any(case.word in text for text in texts)


def _keep(data: dict[str, Any]) -> None:
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def page(data: dict[str, Any]) -> str:
    """The page, from the results that are kept."""
    cases = [case for case in CASES if case.name in data]
    wrong = [case for case in cases if case.verdict == DIFFERENT]
    sound = [case for case in cases if case.verdict != DIFFERENT]
    found = [case for case in wrong if _is_expected(case, data)]
    accused = [case for case in sound if data[case.name]["verdict"] == DIFFERENT]
    rounded = [case for case in cases if case.verdict == ROUNDED]
    apart = max(data[case.name]["largest"] / (data[case.name]["bound"] or 1.0) for case in rounded)
    return "\n".join(
        [
            "# Invariance: the same training at two splits of its batch",
            "",
            f"Written by `{COMMAND}`.",
            "",
            INTRODUCTION,
            "",
            SIZES_OF_ROUNDING.format(apart=at_most(apart)),
            "",
            "## Scripts with a known verdict",
            "",
            f"In tests/invariance/cases.py, at N = 1 against N = 4. {len(found)} of {len(wrong)} wrong ones are "
            f"found, and {len(accused)} of {len(sound)} right ones accused, of which {len(sound) - len(rounded)} may "
            "depend on N or are not seeded, and are named.",
            "",
            *markdown_table(("finding", "what is wrong"), _by_finding(found)),
            "## Two screens",
            "",
            *(
                line
                for name in SCREENS
                for line in (f"Of `{name}`:", "", "```", *data[name]["screen"], "```", "")
            ),
            LIMITS,
            "",
            "## What it costs",
            "",
            _cost(data[COST]),
            "",
            PUBLIC,
            *markdown_table(
                ("script", "commit or version", "what it says", "checked by hand"), PUBLIC_SCRIPTS
            ),
        ]
    )


def _by_finding(cases: Sequence[SplitCase]) -> list[tuple[str, str]]:
    """What is wrong with scripts, by the topic of the finding that is expected."""
    found: dict[str, list[str]] = {}
    for case in cases:
        found.setdefault(case.topic, []).append(case.about)
    return [(topic, "; ".join(dict.fromkeys(texts))) for topic, texts in found.items()]


def _cost(found: dict[str, Any]) -> str:
    return (
        f"On a model of {found['parameters'] / 1e6:.0f} million parameters (AdamW, clipping, {found['tokens']:,} "
        f"tokens per update in {found['accumulate']} micro-batches, one thread of a CPU), the recorder takes "
        f"{100 * found['share']:.1f} % of the time of an update that is sampled: {found['recorder_s']:.1f} s of "
        f"{found['window_s']:.0f} s. Afterwards a wrapper looks at one flag per backward, step and batch."
    )


if __name__ == "__main__":
    sys.exit(main())
