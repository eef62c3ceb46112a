"""The verdict of an invariance check as lines of text and as data."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from bench.audit.command.audit_screen import MARKS
from bench.audit.invariance.invariance_verdict import InvarianceVerdict
from bench.audit.invariance.split_runs import SplitRun
from bench.audit.invariance.state_comparison import Likeness, SplitComparison, TensorPair
from bench.audit.invariance.window_comparison import backwards, compare_rows
from bench.formatting import plural

MOST_FINDINGS = 12
NOT_LOOKED_AT = "later updates, state outside of torch, faults that all splits share"
SOURCE = "rounding of sums and layers, Higham and Mary 2019"
"""Of the bound."""


def headline(verdict: InvarianceVerdict) -> str:
    """The verdict, and of what."""
    labels = ", ".join(run.split.label for run in verdict.others)
    return f"{verdict.verdict}: {labels} against {verdict.first.split.label}"


def evidence(verdict: InvarianceVerdict) -> dict[str, str]:
    """What was seen, by name."""
    first = verdict.first
    shown = {}
    if first.ranks:
        trainer = next(iter(first.ranks.values())).trainer
        facts = [f"{name} {fact}".strip() for name, fact in trainer.facts.items()]
        shown["ranks"] = f"{len(first.ranks)} of {trainer.world}"
        shown["wrappers"] = ", ".join(facts) or "none"
    for number, run in enumerate([first, *verdict.others]):
        counts = compare_rows(run, verdict.others[0] if run is first else first, 1)
        text = f"{run.split.label}: {plural(run.updates, 'update')}, "
        text += f"{plural(backwards(run, 1), 'backward')} in the first"
        if counts is not None:
            text += f", {plural(counts[0], 'row')} on all ranks"
        shown[f"split {number + 1}"] = text
    if verdict.twin is not None:
        shown["A/A"] = _alike(verdict.twin)
    for label, check in verdict.samples.items():
        shown[f"samples of {label}" if len(verdict.samples) > 1 else "samples"] = check.reason
    for comparison in verdict.comparisons:
        name = "compared"
        if len(verdict.comparisons) > 1:
            name = f"compared with {comparison.other.split.label}"
        shown[name] = _alike(comparison)
    if verdict.comparisons:
        shown["bound"] = f"{verdict.comparisons[0].bound:.1g} of a gradient in update 1 ({SOURCE})"
    shown["not seen"] = NOT_LOOKED_AT
    return shown


def _alike(comparison: SplitComparison) -> str:
    """How many tensors are how much alike."""
    counts = Counter(pair.likeness for pair in comparison.pairs)
    parts = [f"{counts[likeness]:,} {likeness}" for likeness in Likeness if counts[likeness]]
    text = f"{', '.join(parts) or 'no tensors'} in {plural(comparison.updates, 'update')}"
    if comparison.likeness is Likeness.ROUNDED:
        text += f"; gradients of update 1 differ by at most {comparison.largest():.1g}"
    return text


def screen(verdict: InvarianceVerdict) -> list[str]:
    """The screen: the verdict first, then the evidence."""
    findings = [f"  {MARKS[found.level]} {found.topic}: {found.text}" for found in verdict.findings]
    if len(findings) > MOST_FINDINGS:
        left = len(findings) - MOST_FINDINGS
        findings = [*findings[:MOST_FINDINGS], f"  ... {left} more with --json"]
    shown = [f"{name:9} {text}" for name, text in evidence(verdict).items()]
    return [f"{'verdict':9} {headline(verdict)}", *findings, *shown]


def document(verdict: InvarianceVerdict) -> dict[str, Any]:
    """The same as data."""
    differences = [
        {"split": comparison.other.split.label, **_data(pair)}
        for comparison in verdict.comparisons
        for pair in comparison.different()
    ]
    return {
        "verdict": verdict.verdict,
        "headline": headline(verdict),
        "findings": [found.to_dict() for found in verdict.findings],
        "exit_statuses": {run.split.label: run.status for run in (verdict.first, *verdict.others)},
        "evidence": evidence(verdict),
        "bounds": {
            comparison.other.split.label: comparison.bound for comparison in verdict.comparisons
        },
        "recorder_s": {run.split.label: _seconds(run) for run in (verdict.first, *verdict.others)},
        "differences": differences,
    }


def _data(pair: TensorPair) -> dict[str, Any]:
    """Its fields; null where a number is infinite or none."""
    fields = dict(vars(pair))
    if not math.isfinite(pair.relative):
        fields["relative"] = None
    return fields


def _seconds(run: SplitRun) -> float:
    """What the recorder took on the slowest rank."""
    ends = [rank.finish.seconds for rank in run.ranks.values() if rank.finish is not None]
    return max(ends, default=0.0)
