"""The page that answers claims about gradient accumulation: each verdict is computed from measurements.

``python -m studies.claims`` writes docs/claims.md from claims.toml and the committed measurements, and
``--probes`` runs the probes of ``studies.probes`` first. A claim whose measurement changes changes its verdict
with it.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies import ROOT, judges_lightning, judges_torch
from studies.measured import EXCEPT, ONLY, PROBES, Measured

DOCS = ROOT / "docs" / "claims.md"
ROWS = Path(__file__).with_suffix(".toml")
CLAIMS: Mapping[str, Sequence[Mapping[str, Any]]] = tomllib.loads(ROWS.read_text(encoding="utf-8"))
MOST_WORDS = 80
"""Of what was measured."""
PACKAGES = ("torch", "lightning", "deepspeed", "transformers", "accelerate", "torchtitan")


def answer(row: Mapping[str, Any], m: Measured) -> tuple[str, str]:
    """The verdict on a claim, and the sentence with its numbers."""
    module = judges_torch if hasattr(judges_torch, row["judge"]) else judges_lightning
    verdict, numbers = getattr(module, row["judge"])(m)
    if verdict in (ONLY, EXCEPT):
        verdict = f"{verdict} {row['only']}"
    return verdict, row["measured"].format(**numbers)


def page(m: Measured) -> str:
    about = m.about
    versions = ", ".join(f"{name} {about['packages'][name]}" for name in PACKAGES)
    lines = [
        "# Claims about gradient accumulation",
        "",
        "Claims of articles, documentation and threads, held against measurements. `nox -s results -- claims` "
        "computes each verdict that has numbers beside it. *True only* and *true, except* are said where the other "
        "cases were measured, too. N is the number of micro-batches in a window, NB that of an epoch. Unless an entry "
        "says otherwise, N is 4; partial windows are those of two epochs of 10 micro-batches; memory and bytes are of "
        "a model of 3.1 M parameters on CPUs and, by formula, of 8b on 8 ranks. Other versions may do otherwise. "
        "Each entry ends with [what measured it](#measured-by).",
    ]
    for topic, claims in CLAIMS.items():
        lines += ["", f"## {topic}", ""]
        for row in claims:
            verdict, text = answer(row, m)
            assert len(text.split()) <= MOST_WORDS, f"{row['judge']}: {len(text.split())} words"
            sources = ", ".join(f"[source]({url})" for url in row["source"]) or "no source"
            by = ", ".join(row["by"])
            lines.append(f"- *{row['claim']}* ({sources}) **{verdict}**: {text} ({by})")
    return "\n".join(
        [
            *(*lines, "", "## Measured by", ""),
            f"- suite: [semantics](semantics.md), with {versions}, on {about['date']}.",
            "- steps: `python -m bench steps --samples 33 --micro-batch 2 --accumulate 4 --world-size 2 --epochs 2 "
            "--drop-last`.",
            "- throughput: [every point](../results/throughput/throughput.md).",
            "- versions, weights: one environment for each version: [behaviour](versions.md), "
            "[weights](versions.md#deepspeeds-engine-in-a-loop).",
            "- run, popular, curves: [cpu](../results/cpu/report.md), [popular](../results/popular/report.md) and "
            "[curves](../results/curves/report.md), two ranks of a CPU.",
            "- links: [three rates between two hosts](../results/links/links.md).",
            f"- probes: `python -m studies.claims --probes`, with {m.probes['versions']}.",
            "- stub: `python -m tests.cuda.plain_zero3 STUB`: two GPUs that are not there, whose "
            "[streams](gpu.md#streams) are threads, with torch 2.11 and DeepSpeed 0.19.8.",
            "- source: read in the source, not measured.",
            "",
        ]
    )


def main(arguments: Sequence[str]) -> None:
    """Write the page; with ``--probes`` measure what only this page needs before."""
    if "--probes" in arguments:
        from studies import probes

        PROBES.write_text(json.dumps(probes.measure(), indent=1) + "\n", encoding="utf-8")
    DOCS.write_text(page(Measured.load()), encoding="utf-8")
    print(DOCS.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
