"""docs/performance.md: what the bench costs, beside what it cost at the last commit."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from bench.judge.sides import IDLE_SHARE
from bench.judge.statistics import Sample, ratio
from bench.words import digits
from tests.overhead import bare
from tests.studies.markdown import table

BOUND = 0.01
"""How far from 1 the ratio to a bare loop may be."""
CONTROLLED = "ddp-deferred"
CONTROL = f"bare {CONTROLLED} in a trial's processes"
"""A bare loop beside itself."""


def page(data: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    """The page on what ``__main__`` measured, in Markdown; ``last`` is the same of the last commit, or empty."""
    return "\n".join(["# What the bench costs", "", *_machine(data), *_loops(data["loops"]), *_times(data, last)])


def _machine(data: Mapping[str, Any]) -> Iterator[str]:
    machine, git, packages = data["machine"], data["git"], data["packages"]
    changed = "" if git["clean"] else ", changed since"
    made = f"on {data['date'][:10]} at commit {git['commit'][:12]}{changed}, in {data['minutes']:.0f} minutes"
    yield from (f"Written by `nox -s overhead` {made}. Nothing here is edited by hand.", "")
    others = f"{100 * data['busy']:.1f} % of the CPUs"
    if data["busy"] > IDLE_SHARE:
        yield from (f"**The machine was not idle: others took {others}. Do not cite these times.**", "")
    versions = [f"{name} {packages[name]}" for name in ("torch", "lightning", "deepspeed") if name in packages]
    size = f"{machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
    yield f"- {machine['cpu']}, {size}, {machine['system']}; others took at most {others} before and after"
    yield ", ".join([f"- Python {machine['python']}", *versions])
    yield ""


def _loops(loops: Mapping[str, Any]) -> Iterator[str]:
    rows, watching = [], 0.0
    for backend, groups in loops.items():
        blocks = range(len(groups["bench"]))
        ours, theirs = (Sample([[seconds] for seconds in groups[side]], blocks) for side in ("bench", "bare"))
        found = ratio(ours, theirs)
        interval = "-" if found.low is None else f"{found.low:.4f} to {found.high:.4f}"
        bare_loop = _seconds(statistics.median(groups["bare"]))
        inside = _inside(found.low, found.high)
        rows.append((backend, bare_loop, f"{found.ratio:.4f}", interval, str(len(blocks)), inside))
        watching = max(watching, *groups["watching"])
    yield from ("## A step, beside a bare loop", "")
    yield (
        "The [bare loops](../tests/overhead/bare.py) use nothing of the bench but model, weights, tokens and loss. "
        f"Llama `tiny`, {bare.LENGTH} tokens, micro-batch {bare.MICRO_BATCH}, N = {bare.N}, fp32, {bare.RANKS} ranks "
        "over gloo with one thread each. A trial of the bench and a bare loop train the same windows in turn (bench, "
        "bare, bare, bench, and so on): while the process group of one side trains, that of the other sleeps. The "
        "losses of all windows are equal in every bit. A group counts as its median step, and the ratio of two is "
        "estimated as in reports, paired by group. The process that watches the trial runs beside both sides; it took "
        f"{100 * watching:.2f} % of one core at most. The last row is a control: both sides train the same bare loop, "
        "one of them in the processes of a trial. The last column says whether the whole interval is within "
        f"{100 * BOUND:g} % of 1: no, if all of it is outside, and undecided, if a part of it is."
    )
    yield ""
    header = ("backend", "bare loop", "bench / bare", "95 % interval", "groups", f"within {100 * BOUND:g} %")
    yield from table(header, rows)


def _inside(low: float | None, high: float | None) -> str:
    """Whether a ratio is within the bound of 1."""
    if low is None or high is None:
        return "unknown"
    if low > 1 + BOUND or high < 1 - BOUND:
        return "**no**"
    return "yes" if low >= 1 - BOUND and high <= 1 + BOUND else "undecided"


def _times(data: Mapping[str, Any], last: Mapping[str, Any]) -> Iterator[str]:
    before = last.get("times", {})
    yield from ("## Everything else", "")
    since = f"The last column compares with {last['date'][:10]}, commit {last['git']['commit'][:12]}." if last else ""
    yield f"Medians by the clock, where nothing else is said; the longest first. {since}".rstrip()
    yield ""
    rows = [
        (
            name,
            _seconds(one["seconds"]),
            str(one["runs"]),
            digits(one["seconds"] / before[name]["seconds"]) if name in before else "-",
        )
        for name, one in sorted(data["times"].items(), key=lambda item: -item[1]["seconds"])
    ]
    yield from table(("what", "time", "runs", "time / last time"), rows)


def _seconds(seconds: float) -> str:
    """A time with its unit."""
    scale, unit = next((s, u) for s, u in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")) if seconds >= s or u == "µs")
    return f"{seconds / scale:.3g} {unit}"
