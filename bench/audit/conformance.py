"""The conformance table: what each backend did in each scenario, in a word with its number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from bench.audit.decoded_scenario import UpdateRecord
from bench.audit.diagnosis import STEP_COUNTERS, FindingRecord, Observation
from bench.backends.base import Backend, BackendFamily, built_in
from bench.formatting import markdown as escaped
from bench.formatting import plural
from bench.tabular import Table, markdown_table

Observations = Mapping[str, Sequence[Observation | None]]
"""Observations of the conformance table by scenario."""

SampleCount = Literal[
    "samples_lost",
    "samples_left_open",
    "samples_duplicated",
    "samples_never_fetched",
]
TOLERANCE = 1e-3
"""Relative: smaller differences are no difference in behaviour."""
KEY = (
    "A number alone is the sum of an update's coefficients divided by the right sum: 1 is right. "
    "After 'mean of means' it is the factor by which a weight differs from that in the full batch. "
    "+1 stands for one more wrong finding."
)
OF_LOSS = frozenset({"mean of means"})
"""Findings that the reduction of the loss causes, unless the trainer weighs tokens itself."""
CAUSES = ("What the backend does", "What the reduction of the loss does")
"""The two parts of the table."""
FURTHER = 1
"""Further wrong findings that a cell of the Markdown table names; it counts the others."""


@dataclass(frozen=True)
class BackendGroup:
    """Backends that behave alike in every scenario."""

    backends: list[str]
    cells: Mapping[str, Observation]
    """By scenario, the observation of the first backend."""

    def behaves_as(self, cells: Mapping[str, Observation]) -> bool:
        if self.cells.keys() != cells.keys():
            return False
        return all(alike(self.cells[name], cells[name]) for name in cells)

    @property
    def name(self) -> str:
        others = len(self.backends) - 1
        if not others:
            return self.backends[0]
        return f"{self.backends[0]} +{others}"


def groups(observations: Sequence[Observation]) -> list[BackendGroup]:
    """The backends that behave alike in every scenario, in order of appearance."""
    by_backend: dict[str, dict[str, Observation]] = {}
    for seen in observations:
        by_backend.setdefault(seen["backend"], {})[seen["scenario"]["name"]] = seen
    found: list[BackendGroup] = []
    for backend, cells in by_backend.items():
        for group in found:
            if group.behaves_as(cells):
                group.backends.append(backend)
                break
        else:
            found.append(BackendGroup([backend], cells))
    return found


def alike(first: Observation, other: Observation) -> bool:
    """Whether two backends did the same in one scenario.

    Then they have the same findings, updates, weights and lost samples. Details, sentences and the
    names of right counters do not matter.
    """
    if _behaviour(first) != _behaviour(other):
        return False
    return _as_heavy(first["weight_ratio"], other["weight_ratio"])


def _behaviour(seen: Observation) -> tuple[object, ...]:
    """What backends that behave alike have in common, beside the weights."""
    return (
        [finding["word"] for finding in seen["findings"] if finding["level"] != "detail"],
        seen["verdict"],
        seen["level"],
        seen["optimizer_steps_observed"],
        seen["micro_batches"],
        seen["stopped"],
        seen["samples_lost"],
        seen["samples_left_open"],
        seen["samples_duplicated"],
        seen["samples_never_fetched"],
    )


def _as_heavy(first: float | None, other: float | None) -> bool:
    if first is None or other is None:
        return first == other
    return math.isclose(first, other, rel_tol=TOLERANCE)


def scenarios(observations: Sequence[Observation]) -> dict[str, Mapping[str, Any]]:
    """The scenarios by name, in order of appearance."""
    return {seen["scenario"]["name"]: seen["scenario"] for seen in observations}


def with_number(seen: Observation, word: str) -> str:
    """The word of a finding with its most telling number, if there is one."""
    number = NUMBERS.get(word)
    if number is None:
        return word
    return f"{word} {number(seen)}".rstrip()


def by_backend(seen: Observation) -> Observation:
    """The observation without what the loss's reduction causes, and the verdict on the rest."""
    others = [finding for finding in seen["findings"] if finding["word"] not in OF_LOSS]
    return _with_findings(seen, others)


def by_loss(seen: Observation) -> Observation:
    """The observation with only what the reduction of the loss causes."""
    caused = [finding for finding in seen["findings"] if finding["word"] in OF_LOSS]
    return _with_findings(seen, caused)


def _with_findings(seen: Observation, findings: list[FindingRecord]) -> Observation:
    """The observation with these findings, the gravest first, and the verdict that they give."""
    verdict, level = "right", "detail"
    if findings and findings[0]["level"] != "detail":
        verdict, level = findings[0]["word"], findings[0]["level"]
    return {**seen, "findings": findings, "verdict": verdict, "level": level}


def parts(
    observations: Sequence[Observation],
    found: Sequence[BackendGroup],
) -> list[tuple[str, Observations]]:
    """The table's two parts: the title, and by scenario what it says of each group if measured."""
    of_backends: dict[str, list[Observation | None]] = {}
    of_losses: dict[str, list[Observation | None]] = {}
    for name in scenarios(observations):
        of_backends[name] = _table_row(found, name, by_backend)
        of_loss = _table_row(found, name, by_loss)
        if any(map(_has_findings, of_loss)):
            of_losses[name] = of_loss
    what_backends_do, what_losses_do = CAUSES
    found_in: list[tuple[str, Observations]] = []
    if of_backends:
        found_in.append((what_backends_do, of_backends))
    if of_losses:
        found_in.append((what_losses_do, of_losses))
    return found_in


def _has_findings(seen: Observation | None) -> bool:
    return seen is not None and bool(seen["findings"])


def _table_row(
    found: Sequence[BackendGroup], scenario: str, part: Callable[[Observation], Observation]
) -> list[Observation | None]:
    """A part of what each group did in the scenario; None where that was not measured."""
    row: list[Observation | None] = []
    for group in found:
        seen = group.cells.get(scenario)
        if seen is not None:
            row.append(part(seen))
        else:
            row.append(None)
    return row


def summary(seen: Observation) -> list[str]:
    """The verdict, then at most FURTHER other wrong findings, then the number of the rest."""
    others = []
    for finding in seen["findings"]:
        if finding["level"] == "wrong" and finding["word"] != seen["verdict"]:
            others.append(finding["word"])
    told = [with_number(seen, word) for word in (seen["verdict"], *others[:FURTHER])]
    if len(others) > FURTHER:
        told.append(f"{len(others) - FURTHER} more")
    return told


def ratios(seen: Observation) -> list[float]:
    """The sum of each update's coefficients divided by the right sum."""
    return [update["sum"] / update["right_sum"] for update in seen["updates"]]


def mixed(seen: Observation) -> list[UpdateRecord]:
    """The updates that have samples of several epochs."""
    return [update for update in seen["updates"] if len(update["epochs"]) > 1]


def _share_of_samples(key: SampleCount) -> Callable[[Observation], str]:
    """``3 of 8``: the number under the key, and all samples of the epochs that were begun."""

    def text(seen: Observation) -> str:
        epochs = 1 + max(map(int, _epochs(seen)), default=0)
        return f"{seen[key]} of {seen['scenario']['samples'] * epochs}"

    return text


def _epochs(seen: Observation) -> Iterator[str]:
    """The epochs of the samples that are in an update, or in none."""
    for update in seen["updates"]:
        yield from update["by_epoch"]
    yield from seen["lost"]
    yield from seen["left_open"]


def _count_updates(seen: Observation) -> str:
    return plural(len(seen["updates"]), "update")


def _three_digits(values: Iterable[float], choose: Callable[[Iterable[float]], float]) -> str:
    """The largest or the smallest value; ``nan`` if there is none."""
    found = list(values)
    if not found:
        return "nan"
    return f"{choose(found):.3g}"


def _largest_ratio(seen: Observation) -> str:
    return _three_digits(ratios(seen), max)


def _smallest_ratio(seen: Observation) -> str:
    return _three_digits(ratios(seen), min)


def _first_ratio(seen: Observation) -> str:
    if not seen["updates"]:
        return ""
    return f"{ratios(seen)[0]:.3g}"


def _largest_leak(seen: Observation) -> str:
    sums = [update["sum"] for update in mixed(seen)]
    return f"({_three_digits(sums, max)} in an update)"


def _share_of_mixed(seen: Observation) -> str:
    return f"{len(mixed(seen))} of {len(seen['updates'])}"


def _never_stops(seen: Observation) -> str:
    """The updates that were made, and the first counter."""
    reported = list(seen["steps_reported"].items())
    if not reported:
        return f"({_count_updates(seen)})"
    name, value = reported[0]
    return f"({_count_updates(seen)}, {_short(name)} {value})"


def _short(counter: str) -> str:
    """Its name without that of what has it."""
    return counter.rpartition(".")[2]


def _instead_of_limit(seen: Observation) -> str:
    return f"({_count_updates(seen)}, not {seen['scenario']['max_steps']})"


def _miscounted(seen: Observation) -> str:
    """The first counter of steps that is wrong."""
    steps = seen["optimizer_steps_observed"]
    for name, value in seen["steps_reported"].items():
        if name in STEP_COUNTERS and value != steps:
            return f"({_short(name)} {value}, not {steps})"
    return ""


def _misestimated(seen: Observation) -> str:
    estimate = seen["steps_reported"].get("trainer.estimated_stepping_batches", "?")
    return f"({estimate}, not {len(seen['updates'])})"


def _calls_of_hook(seen: Observation) -> str:
    calls = seen["steps_reported"].get("on_before_optimizer_step", "?")
    return f"({calls} for {_count_updates(seen)})"


def _distortion(seen: Observation) -> str:
    worst = 0.0
    for update in seen["updates"]:
        if update["distortion"] is None:
            return ""
        worst = max(worst, update["distortion"])
    if not seen["updates"]:
        return ""
    return f"x {worst:.3g}"


def _crashed(seen: Observation) -> str:
    return f"(after {seen['micro_batches']} micro-batches)"


NUMBERS: dict[str, Callable[[Observation], str]] = {
    "divided twice": _largest_ratio,
    "under-weighted": _smallest_ratio,
    "over-weighted": _largest_ratio,
    "leaks": _largest_leak,
    "cleared": _first_ratio,
    "mean of means": _distortion,
    "carried over": _share_of_mixed,
    "never stops": _never_stops,
    "stops late": _instead_of_limit,
    "stops early": _instead_of_limit,
    "miscounted": _miscounted,
    "misestimated": _misestimated,
    "hooks too often": _calls_of_hook,
    "lost": _share_of_samples("samples_lost"),
    "left open": _share_of_samples("samples_left_open"),
    "repeated": _share_of_samples("samples_duplicated"),
    "skipped": _share_of_samples("samples_never_fetched"),
    "crashed": _crashed,
}
"""The most telling number of a finding, by its word; see KEY. Of several updates, ``divided twice``
takes the largest, which is that of a complete window."""


def families(observations: Sequence[Observation]) -> dict[BackendFamily, list[Observation]]:
    """The observations by family of the backend (``bench.backends.base.BackendFamily``)."""
    ordered = sorted(observations, key=_place_of_family)
    families = list(BackendFamily)
    by_place = groupby(ordered, key=_place_of_family)
    return {families[place]: list(members) for place, members in by_place}


def _place_of_family(seen: Observation) -> int:
    backend = built_in().get(seen["backend"], Backend)
    return list(BackendFamily).index(backend.family)


def overview(observations: Sequence[Observation]) -> str:
    """Groups of backends: in how many scenarios they are right, and what is wrong in the others."""
    header = (
        "backends that behave alike",
        "right",
        "notes",
        "wrong",
        "what is wrong, and in how many scenarios",
    )
    rows: list[tuple[str, ...]] = []
    for members in families(observations).values():
        rows += map(_overview_row, groups(members))
    return "\n".join(Table.from_rows(header, rows, (1, 2, 3)).markdown())


def _overview_row(group: BackendGroup) -> tuple[str, ...]:
    levels: Counter[str] = Counter()
    words: Counter[str] = Counter()
    for seen in map(by_backend, group.cells.values()):
        levels[seen["level"]] += 1
        if seen["level"] == "wrong":
            words[seen["verdict"]] += 1
    return (
        ", ".join(group.backends),
        str(levels["detail"]),
        str(levels["note"]),
        str(levels["wrong"]),
        ", ".join(f"{word} {count}" for word, count in words.most_common()),
    )


def markdown(observations: Sequence[Observation]) -> str:
    """Scenarios by groups of backends that behave alike in all, and who is in each group."""
    found = groups(observations)
    rows: list[Sequence[str]] = []
    for title, seen_in in parts(observations, found):
        rows.append((f"*{title}*", *[""] * len(found)))
        for name, row in seen_in.items():
            rows.append((escaped(name), *map(_cell_text, row)))
    header = ["scenario"]
    legend = []
    for group in found:
        header.append(escaped(group.name))
        if len(group.backends) > 1:
            legend.append("- " + escaped(f"{group.name}: {', '.join(group.backends)}"))
    lines = markdown_table(header, rows) + legend
    if legend:
        lines.append("")
    return "\n".join(lines)


def _cell_text(seen: Observation | None) -> str:
    """The summary, in bold if it is wrong; empty if nothing was measured."""
    if seen is None:
        return ""
    first, *others = map(escaped, summary(seen))
    if seen["level"] == "wrong":
        first = f"**{first}**"
    return "<br>".join([first, *others])
