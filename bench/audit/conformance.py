"""The conformance table: what each backend did in each scenario, in a word with its number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.audit.diagnosis import STEP_COUNTERS
from bench.backends.base import Backend, BackendFamily, built_in
from bench.formatting import markdown as escaped
from bench.formatting import plural
from bench.tabular import Table, markdown_table

Observation = Mapping[str, Any]
"""One backend in one scenario (``bench.audit.diagnosis.observation``)."""

Observations = Mapping[str, Sequence[Observation | None]]
"""Observations of the conformance table by scenario."""

SAMPLES = ("samples_lost", "samples_left_open", "samples_duplicated", "samples_never_fetched")
TOLERANCE = 1e-3
"""Relative: smaller differences are no difference in behaviour."""
KEY = (
    "A number alone is the sum of an update's coefficients divided by the right sum: 1 is right. After 'mean of means' "
    "it is the factor by which a weight differs from that in the full batch. +1 stands for one more wrong finding."
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
        return self.cells.keys() == cells.keys() and all(alike(self.cells[name], cells[name]) for name in cells)

    @property
    def name(self) -> str:
        rest = len(self.backends) - 1
        return self.backends[0] + (f" +{rest}" if rest else "")


def groups(observations: Sequence[Observation]) -> list[BackendGroup]:
    """The backends that behave alike in every scenario, in order of appearance."""
    by_backend: dict[str, dict[str, Observation]] = {}
    for seen in observations:
        by_backend.setdefault(seen["backend"], {})[seen["scenario"]["name"]] = seen
    found: list[BackendGroup] = []
    for backend, cells in by_backend.items():
        known = next((group for group in found if group.behaves_as(cells)), None)
        if known is None:
            found.append(BackendGroup([backend], cells))
        else:
            known.backends.append(backend)
    return found


def alike(first: Observation, other: Observation) -> bool:
    """Whether two backends did the same in one scenario: the same findings, updates, weights and lost samples.

    Details, sentences and the names of right counters do not matter.
    """

    def findings(seen: Observation) -> list[str]:
        return [finding["word"] for finding in seen["findings"] if finding["level"] != "detail"]

    same = ["verdict", "level", "optimizer_steps_observed", "micro_batches", "stopped", *SAMPLES]
    a, b = first["weight_ratio"], other["weight_ratio"]
    as_heavy = a == b if a is None or b is None else math.isclose(a, b, rel_tol=TOLERANCE)
    return as_heavy and findings(first) == findings(other) and all(first[key] == other[key] for key in same)


def scenarios(observations: Sequence[Observation]) -> dict[str, Mapping[str, Any]]:
    """The scenarios by name, in order of appearance."""
    return {seen["scenario"]["name"]: seen["scenario"] for seen in observations}


def with_number(seen: Observation, word: str) -> str:
    """The word of a finding with its most telling number, if there is one."""
    return f"{word} {NUMBERS[word](seen)}".rstrip() if word in NUMBERS else word


def by_backend(seen: Observation) -> Observation:
    """The observation without what the reduction of the loss causes, and with the verdict on the rest."""
    return _with_findings(seen, [finding for finding in seen["findings"] if finding["word"] not in OF_LOSS])


def by_loss(seen: Observation) -> Observation:
    """The observation with only what the reduction of the loss causes."""
    return _with_findings(seen, [finding for finding in seen["findings"] if finding["word"] in OF_LOSS])


def _with_findings(seen: Observation, findings: Sequence[Mapping[str, str]]) -> Observation:
    """The observation with these findings, which stand in order of their level, and the verdict that they give."""
    first = next((f for f in findings if f["level"] != "detail"), {"word": "right", "level": "detail"})
    return {**seen, "findings": findings, "verdict": first["word"], "level": first["level"]}


def parts(observations: Sequence[Observation], found: Sequence[BackendGroup]) -> list[tuple[str, Observations]]:
    """The table's two parts: the title of each, and by scenario what it says of each group, if that was measured."""
    names = list(scenarios(observations))
    lossy = [name for name in names if any(by_loss(g.cells[name])["findings"] for g in found if name in g.cells)]
    rows = [(CAUSES[0], names, by_backend), (CAUSES[1], lossy, by_loss)]
    return [
        (title, {name: [only(g.cells[name]) if name in g.cells else None for g in found] for name in some})
        for title, some, only in rows
        if some
    ]


def summary(seen: Observation) -> list[str]:
    """The verdict, then at most FURTHER other wrong findings, then the number of the rest."""
    others = [f["word"] for f in seen["findings"] if f["level"] == "wrong" and f["word"] != seen["verdict"]]
    told = [with_number(seen, word) for word in (seen["verdict"], *others[:FURTHER])]
    return told + ([f"{len(others) - FURTHER} more"] if len(others) > FURTHER else [])


def ratios(seen: Observation) -> list[float]:
    """The sum of each update's coefficients divided by the right sum."""
    return [update["sum"] / update["right_sum"] for update in seen["updates"]]


def mixed(seen: Observation) -> list[Mapping[str, Any]]:
    """The updates that contain samples of several epochs."""
    return [update for update in seen["updates"] if len(update["epochs"]) > 1]


def _share_of_samples(key: str) -> Callable[[Observation], str]:
    """``3 of 8``: the number under the key, and all samples of the epochs that were begun."""

    def text(seen: Observation) -> str:
        places = [update["by_epoch"] for update in seen["updates"]] + [seen["lost"], seen["left_open"]]
        epochs = 1 + max((int(epoch) for place in places for epoch in place), default=0)
        return f"{seen[key]} of {seen['scenario']['samples'] * epochs}"

    return text


def _count_updates(seen: Observation) -> str:
    return plural(len(seen["updates"]), "update")


def _never_stops(seen: Observation) -> str:
    counters = [f"{name.rsplit('.', 1)[-1]} {value}" for name, value in seen["steps_reported"].items()]
    return f"({', '.join([_count_updates(seen), *counters[:1]])})"


def _instead_of_limit(seen: Observation) -> str:
    return f"({_count_updates(seen)}, not {seen['scenario']['max_steps']})"


def _miscounted(seen: Observation) -> str:
    """The first counter of steps that is wrong."""
    steps = seen["optimizer_steps_observed"]
    for name, value in seen["steps_reported"].items():
        if name in STEP_COUNTERS and value != steps:
            return f"({name.rsplit('.', 1)[-1]} {value}, not {steps})"
    return ""


def _distortion(seen: Observation) -> str:
    values = [update["distortion"] for update in seen["updates"]]
    return "" if None in values or not values else f"x {max(values):.3g}"


NUMBERS: dict[str, Callable[[Observation], str]] = {
    "divided twice": lambda seen: f"{max(ratios(seen), default=math.nan):.3g}",
    "under-weighted": lambda seen: f"{min(ratios(seen), default=math.nan):.3g}",
    "over-weighted": lambda seen: f"{max(ratios(seen), default=math.nan):.3g}",
    "leaks": lambda seen: f"({max((update['sum'] for update in mixed(seen)), default=math.nan):.3g} in an update)",
    "cleared": lambda seen: f"{ratios(seen)[0]:.3g}" if seen["updates"] else "",
    "mean of means": _distortion,
    "carried over": lambda seen: f"{len(mixed(seen))} of {len(seen['updates'])}",
    "never stops": _never_stops,
    "stops late": _instead_of_limit,
    "stops early": _instead_of_limit,
    "miscounted": _miscounted,
    "misestimated": lambda seen: (
        f"({seen['steps_reported'].get('trainer.estimated_stepping_batches', '?')}, not {len(seen['updates'])})"
    ),
    "hooks too often": lambda seen: (
        f"({seen['steps_reported'].get('on_before_optimizer_step', '?')} for {_count_updates(seen)})"
    ),
    "lost": _share_of_samples("samples_lost"),
    "left open": _share_of_samples("samples_left_open"),
    "repeated": _share_of_samples("samples_duplicated"),
    "skipped": _share_of_samples("samples_never_fetched"),
    "crashed": lambda seen: f"(after {seen['micro_batches']} micro-batches)",
}
"""The most telling number of a finding, by its word; see KEY. Of several updates, ``divided twice`` takes the largest,
which is that of a complete window."""


def families(observations: Sequence[Observation]) -> dict[str, list[Observation]]:
    """The observations by family of the backend (``bench.backends.base.BackendFamily``)."""
    found: dict[str, list[Observation]] = {family: [] for family in BackendFamily}
    for seen in observations:
        backend = built_in().get(seen["backend"], Backend)
        found[backend.family].append(seen)
    return {family: members for family, members in found.items() if members}


def overview(observations: Sequence[Observation]) -> str:
    """Groups of backends by the number of scenarios in which they are right, and what is wrong in the others."""
    header = ("backends that behave alike", "right", "notes", "wrong", "what is wrong, and in how many scenarios")
    rows = []
    for members in families(observations).values():
        for group in groups(members):
            cells = [by_backend(seen) for seen in group.cells.values()]
            levels = Counter(seen["level"] for seen in cells)
            words_of = Counter(seen["verdict"] for seen in cells if seen["level"] == "wrong")
            wrong = ", ".join(f"{word} {count}" for word, count in words_of.most_common())
            counts = (str(levels[level]) for level in ("detail", "note", "wrong"))
            rows.append((", ".join(group.backends), *counts, wrong))
    return "\n".join(Table.from_rows(header, rows, (1, 2, 3)).markdown())


def markdown(observations: Sequence[Observation]) -> str:
    """Scenarios by groups of backends that behave alike in every scenario, and the backends of each group."""
    found = groups(observations)
    rows = []
    for title, seen_in in parts(observations, found):
        rows.append((f"*{title}*", *[""] * len(found)))
        rows += [(escaped(name), *(_cell_text(seen) if seen else "" for seen in row)) for name, row in seen_in.items()]
    table = markdown_table(("scenario", *(escaped(group.name) for group in found)), rows)
    several = [group for group in found if len(group.backends) > 1]
    legend = ["- " + escaped(f"{group.name}: {', '.join(group.backends)}") for group in several]
    return "\n".join([*table, *legend, *([""] if legend else [])])


def _cell_text(seen: Observation) -> str:
    first, *rest = map(escaped, summary(seen))
    return "<br>".join([f"**{first}**" if seen["level"] == "wrong" else first, *rest])
