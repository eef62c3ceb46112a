"""The page on ``python -m bench invariance``: verdicts of scripts, screens, limits and cost.

``python -m studies.invariance_page`` runs what docs/invariance.json has no result of, and writes both; ``--again
scripts`` runs all scripts, and ``--again cost`` times, on an idle machine. Status 1: a verdict is not the expected one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeAlias

from bench.audit.invariance.invariance_screen import screen
from bench.audit.invariance.invariance_verdict import BITWISE, ROUNDED, InvarianceVerdict
from bench.formatting import at_most
from studies import ROOT
from studies.invariance_texts import INTRODUCTION, LIMITS, PUBLIC, PUBLIC_SCRIPTS, SIZES_OF_ROUNDING
from tests.invariance.cases import CASES, DIFFERENT, SplitCase, compare
from tests.invariance.cost import COST, measure

PAGE, DATA = ROOT / "docs/invariance.md", ROOT / "docs/invariance.json"
COMMAND = "python -m studies.invariance_page"
SCREENS = ("ddp underweight on 2", "state moe-each")
LEFT_OUT = "ranks"
"""The first line of a screen that the page leaves out, with all that follow."""
AT_ONCE = 4
"""Cases whose results are kept together."""
RIGHT = (ROUNDED, BITWISE)
TRAINED_BY = {
    "state": "a loop on one process",
    "ddp": "DDP",
    "ranks head": "DDP",
    "fsdp2": "FSDP2",
    "parallel tensor": "tensor parallel",
    "ranks tensor": "tensor parallel in FSDP2",
    "ranks pipeline": "1F1B",
    "ranks titan": "a loop as torchtitan's",
    "accelerate": "Accelerate",
    "hf": "HF Trainer",
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
    "torchtitan": "torchtitan's Trainer",
}
"""By how the name of a script begins."""
Results: TypeAlias = dict[str, Any]
"""As docs/invariance.json has them: by the name of a case, and what COST was measured."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what has no result yet, keep each result at once, and write the page."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--again", choices=("scripts", "cost"), help="run all of these again")
    options = parser.parse_args(argv)
    data: Results = {}
    if DATA.exists():
        data = json.loads(DATA.read_text())
    if options.again == "scripts":
        measured = data.get(COST)
        data = {}
        if measured is not None:
            data[COST] = measured
    elif options.again == "cost":
        data.pop(COST, None)
    missing = [case for case in CASES if case.name not in data]
    for start in range(0, len(missing), AT_ONCE):
        _run(missing[start : start + AT_ONCE], data)
    if COST not in data:
        data[COST] = measure()
        _keep(data)
    PAGE.write_text(page(data), encoding="utf-8")
    return int(not all(_is_expected(case, data) for case in CASES))


def _run(cases: Sequence[SplitCase], data: Results) -> None:
    """Run cases, and keep what is found."""
    with tempfile.TemporaryDirectory() as folder:
        for case, found in zip(cases, compare(cases, Path(folder)), strict=True):
            data[case.name] = _result(case, found)
            text = f"{case.name}: {found.verdict}"
            if not _is_expected(case, data):
                text = f"NOT EXPECTED {text}"
            print(text)
    _keep(data)


def _result(case: SplitCase, found: InvarianceVerdict) -> dict[str, object]:
    shown = []
    if case.name in SCREENS:
        shown = screen(found)
    return {
        "verdict": found.verdict,
        "findings": [each.to_dict() for each in found.findings],
        "largest": max((each.largest() for each in found.comparisons), default=0.0),
        "bound": max((each.bound for each in found.comparisons), default=0.0),
        "screen": shown,
    }


def _is_expected(case: SplitCase, data: Results) -> bool:
    found = data[case.name]
    if case.verdict == ROUNDED:
        return found["verdict"] in RIGHT
    if found["verdict"] != case.verdict:
        return False
    texts = [finding["text"] for finding in found["findings"] if finding["topic"] == case.topic]
    return any(case.word in text for text in texts)


def _keep(data: Results) -> None:
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def page(data: Results) -> str:
    """The page, from the results that are kept."""
    cases = [case for case in CASES if case.name in data]

    return "\n".join(
        [
            "# Invariance: the same training at two splits of its batch",
            "",
            f"Written by `{COMMAND}`.",
            "",
            INTRODUCTION,
            "",
            SIZES_OF_ROUNDING.format(apart=at_most(_largest_share(cases, data))),
            "",
            "## Scripts with a known verdict",
            "",
            *_known_verdicts(cases, data),
            *_screens(data),
            LIMITS,
            "",
            "## What it costs",
            "",
            _cost(data[COST]),
            "",
            PUBLIC,
            *(
                f"- {what} ({which}): {says}. *{checked}*"
                for what, which, says, checked in PUBLIC_SCRIPTS
            ),
            "",
        ]
    )


def _largest_share(cases: Sequence[SplitCase], data: Results) -> float:
    """What gradients of right scripts differ by at most, as a share of the bound."""
    largest = 0.0
    for case in cases:
        if case.verdict == ROUNDED:
            result = data[case.name]
            largest = max(largest, result["largest"] / (result["bound"] or 1.0))
    return largest


def _known_verdicts(cases: Sequence[SplitCase], data: Results) -> Iterator[str]:
    """How many scripts are found or accused, and what is found."""
    wrong = [case for case in cases if case.verdict == DIFFERENT]
    found = [case for case in wrong if _is_expected(case, data)]
    right = [case for case in cases if case.verdict != DIFFERENT]
    accused = [case for case in right if data[case.name]["verdict"] == DIFFERENT]
    excused = [case for case in right if case.verdict != ROUNDED]
    yield (
        f"The [scripts](../tests/invariance/cases.py) ran at N = 1 and at N = 4. Of {len(wrong)} wrong ones "
        f"{len(found)} are found, of {len(right)} right ones {len(accused)} accused; {len(excused)} right ones "
        "may depend on N or are unseeded, and the answer says so."
    )
    yield ""
    yield "| trained by | wrong, found | right, accused |"
    yield "| --- | ---: | ---: |"
    yield from _by_framework(cases, found, accused)
    yield ""


def _screens(data: Results) -> Iterator[str]:
    for name in SCREENS:
        shown = takewhile(lambda line: not line.startswith(LEFT_OUT), data[name]["screen"])
        yield from (f"The first lines of `{name}`:", "", "```", *shown, "```", "")


def _by_framework(
    cases: Sequence[SplitCase], found: Sequence[SplitCase], accused: Sequence[SplitCase]
) -> Iterator[str]:
    """Rows of a table: how many scripts are wrong, found, right and accused, by what trains them."""
    for framework in dict.fromkeys(TRAINED_BY.values()):
        own = [case for case in cases if _trained_by(case) == framework]
        wrong = [case for case in own if case.verdict == DIFFERENT]
        told = [case for case in wrong if case in found]
        named = [case for case in own if case in accused]
        num_right = len(own) - len(wrong)
        yield f"| {framework} | {len(wrong)}, {len(told)} | {num_right}, {len(named)} |"


def _trained_by(case: SplitCase) -> str:
    for start, framework in TRAINED_BY.items():
        if case.script.startswith(start):
            return framework
    raise KeyError(case.script)


def _cost(found: Sequence[dict[str, float]]) -> str:
    usual, short = found
    return (
        f"On a model of {usual['parameters'] / 1e6:.0f} million parameters (AdamW, clipping, {usual['tokens']:,.0f} "
        f"tokens per update in {usual['accumulate']} micro-batches as in `gpu`, one thread of a CPU), the recorder "
        f"takes {100 * usual['share']:.1f} % of the time of a sampled update: {usual['recorder_s']:.1f} s of "
        f"{usual['window_s']:.0f} s. With {short['tokens']:,.0f} tokens it takes {short['recorder_s']:.1f} s: "
        f"{100 * short['share']:.1f} %. Afterwards it looks at one flag per backward, step and batch."
    )


if __name__ == "__main__":
    sys.exit(main())
