"""The verdict of an invariance check as lines of text and as data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from bench.audit.command.audit_screen import lines_of, wrappers
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
        trainer = first.trainers()[0]
        shown["ranks"] = f"{len(first.ranks)} of {trainer.world}"
        shown["wrappers"] = wrappers(trainer.facts)
    shown["split 1"] = _first_update(first, verdict.others[0])
    for number, run in enumerate(verdict.others, 2):
        shown[f"split {number}"] = _first_update(run, first)
    if verdict.twin is not None:
        shown["A/A"] = _alike(verdict.twin)
    for label, check in verdict.samples.items():
        name = "samples"
        if len(verdict.samples) > 1:
            name += f" of {label}"
        shown[name] = check.reason
    for comparison in verdict.comparisons:
        name = "compared"
        if len(verdict.comparisons) > 1:
            name += f" with {comparison.other.split.label}"
        shown[name] = _alike(comparison)
    if verdict.comparisons:
        shown["bound"] = f"{verdict.comparisons[0].bound:.1g} of a gradient in update 1 ({SOURCE})"
    shown["not seen"] = NOT_LOOKED_AT
    return shown


def _first_update(run: SplitRun, other: SplitRun) -> str:
    """How many updates a run made, and of what the first was made; the other run tells rows."""
    text = f"{run.split.label}: {plural(run.updates, 'update')}, "
    text += f"{plural(backwards(run, 1), 'backward')} in the first"
    counts = compare_rows(run, other, 1)
    if counts is not None:
        text += f", {plural(counts.first, 'row')} on all ranks"
    return text


def _alike(comparison: SplitComparison) -> str:
    """How many tensors are how much alike."""
    counts = Counter(pair.likeness for pair in comparison.pairs)
    parts = []
    for likeness in Likeness:
        if counts[likeness]:
            parts.append(f"{counts[likeness]:,} {likeness}")
    if not parts:
        parts.append("no tensors")
    text = f"{', '.join(parts)} in {plural(comparison.updates, 'update')}"
    if comparison.likeness is Likeness.ROUNDED:
        text += f"; gradients of update 1 differ by at most {comparison.largest():.1g}"
    return text


def screen(verdict: InvarianceVerdict) -> list[str]:
    """The screen: the verdict first, then the evidence."""
    return lines_of(headline(verdict), verdict.findings, evidence(verdict), MOST_FINDINGS)


def document(verdict: InvarianceVerdict) -> dict[str, object]:
    """The same as data."""
    statuses, seconds, bounds = {}, {}, {}
    for run in (verdict.first, *verdict.others):
        statuses[run.split.label] = run.status
        seconds[run.split.label] = _seconds(run)
    for comparison in verdict.comparisons:
        bounds[comparison.other.split.label] = comparison.bound
    return {
        "verdict": verdict.verdict,
        "headline": headline(verdict),
        "findings": [found.to_dict() for found in verdict.findings],
        "exit_statuses": statuses,
        "evidence": evidence(verdict),
        "bounds": bounds,
        "recorder_s": seconds,
        "differences": list(_differences(verdict)),
    }


def _differences(verdict: InvarianceVerdict) -> Iterator[dict[str, object]]:
    """Each tensor that differs, and in which split."""
    for comparison in verdict.comparisons:
        for pair in comparison.different():
            yield {"split": comparison.other.split.label, **_data(pair)}


def _data(pair: TensorPair) -> dict[str, object]:
    """Its fields; null where a number is infinite or none."""
    fields = dict(vars(pair))
    if not math.isfinite(pair.relative):
        fields["relative"] = None
    return fields


def _seconds(run: SplitRun) -> float:
    """What the recorder took on the slowest rank."""
    longest = 0.0
    for rank in run.ranks.values():
        if rank.finish is not None:
            longest = max(longest, rank.finish.seconds)
    return longest
