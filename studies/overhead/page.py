"""docs/performance.md: what the bench costs, beside what it cost at the last commit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.formatting import digits
from bench.judge.statistics import Interval, Sample, ratio
from bench.measure.host import IDLE_SHARE
from bench.tabular import markdown_table
from studies.overhead import bare
from studies.overhead.in_turn import LOOPS, PROCESSES

BOUND = 0.01
"""How far from 1 the ratio to a bare loop may be."""


def page(data: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """The page on what ``__main__`` measured, in Markdown; ``last`` is the same of the last commit, or empty."""
    head = [
        "# What the bench costs",
        "",
        "Written by `nox -s overhead`.",
        "",
    ]
    head += ["## A step, beside a bare loop", "", *_machine(data)]
    return "\n".join([*head, *_loops(data["loops"]), *_times(data, last)])


def _machine(data: Mapping[str, Any], above: Mapping[str, Any] | None = None) -> Iterator[str]:
    """When, at which commit and on which machine a part was measured.

    Machine and versions are left out where they are those of the part ``above``.
    """
    machine, git, packages = data["machine"], data["git"], data["packages"]
    changed = "" if git["clean"] else ", changed since"
    yield f"- {data['date'][:10]}, commit {git['commit'][:12]}{changed}, in {data['minutes']:.0f} minutes"
    others = f"{100 * data['busy']:.1f} % of the CPUs"
    if data["busy"] > IDLE_SHARE:
        yield f"- **The machine was not idle: others took {others}. Do not cite these times.**"
    if above is not None and all(data[what] == above[what] for what in ("machine", "packages")):
        yield ""
        return
    versions = [
        f"{name} {packages[name]}"
        for name in ("torch", "lightning", "deepspeed")
        if name in packages
    ]
    size = f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    yield f"- {machine['cpu']}, {size}, {machine['system']}; others took at most {others} before and after"
    yield ", ".join([f"- Python {machine['python']}", *versions])
    yield ""


def _loops(loops: Mapping[str, Any]) -> Iterator[str]:
    rows = []
    for backend, measured in loops.items():
        found = _beside_bare(measured)
        beside = ratio(
            *(
                _sample(measured, [f"{loop}, {processes}" for loop in LOOPS])
                for processes in PROCESSES
            )
        )
        bare_loop = _seconds(statistics.median(measured["bare, torchrun"]))
        num_groups, inside = str(len(measured["bare, torchrun"])), _inside(found.low, found.high)
        rows.append((backend, bare_loop, *_cells(found), inside, *_cells(beside), num_groups))
    reported = {
        backend: ratio(*(_sample(measured, [f"{what}, trial"]) for what in ("step", "bench"))).ratio
        for backend, measured in loops.items()
    }
    watching = max(share for measured in loops.values() for share in measured["watching"])
    yield (
        "The [bare loops](../studies/overhead/bare.py) use nothing of the bench but model, weights, tokens and loss: "
        f"Llama `tiny`, {bare.LENGTH} tokens, micro-batch {bare.MICRO_BATCH}, N = {bare.N}, fp32, {bare.RANKS} ranks "
        "over gloo with one thread each. Two groups of processes, those of a trial and those of torch elastic alone, "
        "train the same windows in turn, one by the bench's loop and one by the bare loop; then they change places. So "
        "`bench / bare` compares the loops, and `trial / torchrun` the processes. All losses are bitwise equal. Ratios "
        "are of median windows, paired by group. The process that watches the trial took at most "
        f"{100 * watching:.2f} % of one core."
    )
    yield ""
    least, most = min(reported, key=reported.__getitem__), max(reported, key=reported.__getitem__)
    yield (
        "A window ends where the loop asks for the next micro-batch. The step that the bench reports, from update to "
        f"update, is from {reported[least]:.4f} ({least}) to {reported[most]:.4f} ({most}) of the window, longer where "
        "ranks leave an update at different times."
    )
    yield ""
    yield (
        f"*Within {100 * BOUND:g} %* is yes if the whole first interval is, no if none of it is, else undecided."
    )
    yield ""
    interval = "95 % interval"
    header = ("backend", "bare loop", "bench / bare", interval, f"within {100 * BOUND:g} %")
    yield from markdown_table((*header, "trial / torchrun", interval, "groups"), rows)


def bare_loops(loops: Mapping[str, Any]) -> dict[str, list[float | None]]:
    """By backend, the ratio of the bench's step to the bare loop's and the ends of its interval, as on the page."""
    found = {backend: _beside_bare(measured) for backend, measured in loops.items()}
    ends = {backend: (each.ratio, each.low, each.high) for backend, each in found.items()}
    return {
        backend: [None if end is None else round(end, 4) for end in three]
        for backend, three in ends.items()
    }


def _beside_bare(measured: Mapping[str, Any]) -> Interval:
    ours, theirs = (
        _sample(measured, [f"{loop}, {processes}" for processes in PROCESSES]) for loop in LOOPS
    )
    return ratio(ours, theirs)


def _sample(measured: Mapping[str, Any], sides: Iterable[str]) -> Sample:
    """The median steps of some sides; those of one group are a block."""
    groups = [enumerate(measured[side]) for side in sides]
    blocks, seconds = zip(*(pair for group in groups for pair in group), strict=True)
    return Sample(seconds, blocks)


def _cells(found: Interval) -> tuple[str, str]:
    return (
        f"{found.ratio:.4f}",
        "-" if found.low is None else f"{found.low:.4f} to {found.high:.4f}",
    )


def _inside(low: float | None, high: float | None) -> str:
    """Whether a ratio is within the bound of 1."""
    if low is None or high is None:
        return "unknown"
    if low > 1 + BOUND or high < 1 - BOUND:
        return "**no**"
    return "yes" if low >= 1 - BOUND and high <= 1 + BOUND else "undecided"


def _times(data: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[str]:
    before = last.get("times", {})
    yield from ("## Everything else", "", *_machine(data.get("fixed", data), data))
    rows, ratios = [], []
    for name, timed in sorted(data["times"].items(), key=lambda item: -item[1]["seconds"]):
        ratio_to_last = "-"
        if name in before:
            ratios.append(timed["seconds"] / before[name]["seconds"])
            ratio_to_last = digits(ratios[-1])
        rows.append((name, _seconds(timed["seconds"]), str(timed["runs"]), ratio_to_last))
    yield f"Medians of wall time unless said otherwise. {_since(last, ratios)}".rstrip()
    yield ""
    yield from markdown_table(("what", "time", "runs", "time / last time"), rows)


def _since(last: Mapping[str, Any], ratios: Sequence[float]) -> str:
    """What the ratios to the last times compare with, and what they can show."""
    if not ratios:
        return ""
    then = last.get("fixed", last)
    return (
        f"The last column compares with {then['date'][:10]}, commit {then['git']['commit'][:12]}, on another day and "
        f"perhaps another machine. Its median is {digits(statistics.median(ratios))}: only a row that is far from that "
        "may be due to a change of the code."
    )


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
