"""What each backend did in each scenario: as a table of data, as a table in Markdown, and as a picture."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.words import plural

Observation = Mapping[str, Any]
"""One backend in one scenario (``bench.audit.diagnosis.observation``)."""

COLUMNS = {
    "scenario": "string",
    "backend": "string",
    "verdict": "string",
    "level": "string",
    "optimizer_steps_observed": "Int64",
    "weight_ratio": "Float64",
    "samples_lost": "Int64",
    "samples_left_open": "Int64",
    "samples_duplicated": "Int64",
    "samples_never_fetched": "Int64",
    "micro_batches": "Int64",
    "stopped": "string",
    "reported_trainer_global_step": "Int64",
    "reported_trainer_estimated_stepping_batches": "Int64",
    "reported_on_before_optimizer_step": "Int64",
    "reported_strategy_optimizer_step": "Int64",
    "reported_engine_global_steps": "Int64",
    "reported_lr_scheduler_last_epoch": "Int64",
    "steps_reported": "string",
    "diagnosis": "string",
}
"""Columns of the table with their dtypes. ``weight_ratio`` is the mean over all updates of the sum of coefficients over
the right sum, empty if there was no update; samples are counted over all epochs and ranks, micro-batches per rank;
``reported_*`` are the framework's own counters, empty where it has none, and ``steps_reported`` has all of them as
JSON, also those of users' backends."""
TOLERANCE = 1e-3
"""Relative: numbers that differ by less are no difference in behaviour."""
KEY = (
    "A number without words is the sum of an update's coefficients over the right one, so that 1 is right; after "
    "mean of means it is how far a weight is from the big batch's; +1 is one more wrong finding."
)
MORE = 1
"""Further wrong findings that a cell of the Markdown table names; it counts the others."""
COLOURS = {"detail": "#ffffff", "note": "#c6dbef", "wrong": "#f4a582"}
"""By level; white, pale blue and salmon differ in brightness too, and the text is black on all of them."""
LEVELS = {
    "detail": "right",
    "note": "note: right for some batch, perhaps not the one that was meant",
    "wrong": "wrong (bold)",
}
CELL_SIZES = (6.5, 6.0, 5.5, 5.0, 4.5, 4.0)
"""Font sizes of the picture's cells in points: the largest at which no word is cut, or the last."""
TABLE_HEIGHT = 6.9
MAX_GROUPS = 18
"""Columns of the picture; further groups are named in its notes."""


@dataclass(frozen=True)
class Group:
    """Backends that behave alike in every scenario."""

    backends: tuple[str, ...]
    cells: Mapping[str, Observation]
    """By scenario, the observation of the first backend."""

    @property
    def name(self) -> str:
        """The first backend and how many there are besides."""
        rest = len(self.backends) - 1
        return self.backends[0] + (f" +{rest}" if rest else "")


def table(observations: Sequence[Observation]) -> pd.DataFrame:
    """One row per scenario and backend, in the order of the observations; see COLUMNS."""
    rows = []
    for seen in observations:
        counters = {f"reported_{re.sub(r'[^a-z0-9]+', '_', name)}": v for name, v in seen["steps_reported"].items()}
        rows.append(
            {name: seen.get(name) for name in COLUMNS}
            | {name: value for name, value in counters.items() if name in COLUMNS}
            | {"scenario": seen["scenario"]["name"], "steps_reported": json.dumps(seen["steps_reported"])}
        )
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def groups(observations: Sequence[Observation]) -> list[Group]:
    """The backends that behave alike in every scenario, in the order in which they come."""
    by_backend: dict[str, dict[str, Observation]] = {}
    for seen in observations:
        by_backend.setdefault(seen["backend"], {})[seen["scenario"]["name"]] = seen
    found: list[Group] = []
    for backend, cells in by_backend.items():
        for number, known in enumerate(found):
            if known.cells.keys() == cells.keys() and all(alike(known.cells[name], cells[name]) for name in cells):
                found[number] = Group((*known.backends, backend), known.cells)
                break
        else:
            found.append(Group((backend,), cells))
    return found


def alike(one: Observation, other: Observation) -> bool:
    """Whether two backends did the same in one scenario: the same findings, updates, weights and lost samples.

    Findings that are details, their sentences, and what right counters are called do not matter.
    """

    def words(seen: Observation) -> list[str]:
        return [finding["word"] for finding in seen["findings"] if finding["level"] != "detail"]

    counts = ["verdict", "level", "optimizer_steps_observed", "micro_batches", "stopped"]
    counts += ["samples_lost", "samples_left_open", "samples_duplicated", "samples_never_fetched"]
    a, b = one["weight_ratio"], other["weight_ratio"]
    same = a == b if a is None or b is None else math.isclose(a, b, rel_tol=TOLERANCE)
    return same and words(one) == words(other) and all(one[key] == other[key] for key in counts)


def scenarios(observations: Sequence[Observation]) -> dict[str, Mapping[str, Any]]:
    """The scenarios by name, in the order in which they come."""
    return {seen["scenario"]["name"]: seen["scenario"] for seen in observations}


def number(seen: Observation, word: str) -> str:
    """The number that tells most about a finding of an observation; empty if there is none to tell."""
    return NUMBERS[word](seen) if word in NUMBERS else ""


def telling(seen: Observation, more: int = MORE) -> list[str]:
    """The verdict with its number, then as many further wrong findings, then how many there are besides."""
    others = [f["word"] for f in seen["findings"] if f["level"] == "wrong" and f["word"] != seen["verdict"]]
    words = [f"{word} {number(seen, word)}".rstrip() for word in (seen["verdict"], *others[:more])]
    return words + ([f"+{len(others) - more}"] if len(others) > more else [])


def _ratios(seen: Observation) -> list[float]:
    """Of every update the sum of its coefficients over the right one."""
    return [update["sum"] / update["right_sum"] for update in seen["updates"]]


def _of_samples(key: str) -> Callable[[Observation], str]:
    """How many of all samples of the epochs that were begun."""

    def text(seen: Observation) -> str:
        places = [update["by_epoch"] for update in seen["updates"]] + [seen["lost"], seen["left_open"]]
        epochs = 1 + max((int(epoch) for place in places for epoch in place), default=0)
        return f"{seen[key]} of {seen['scenario']['samples'] * epochs}"

    return text


def _mixed(seen: Observation) -> list[Mapping[str, Any]]:
    return [update for update in seen["updates"] if len(update["epochs"]) > 1]


def _headline(seen: Observation) -> str:
    """The framework's first counter, without the object that it belongs to."""
    for name, value in seen["steps_reported"].items():
        return f"{name.rsplit('.', 1)[-1]} {value}"
    return ""


def _updates(seen: Observation) -> str:
    return plural(len(seen["updates"]), "update")


def _never_stops(seen: Observation) -> str:
    parts = [_updates(seen), _headline(seen)]
    return f"({', '.join(part for part in parts if part)})"


def _miscounted(seen: Observation) -> str:
    """The first counter of steps that is wrong."""
    steps = seen["optimizer_steps_observed"]
    for name, value in seen["steps_reported"].items():
        if name in {"trainer.global_step", "engine.global_steps", "lr_scheduler.last_epoch"} and value != steps:
            return f"({name.rsplit('.', 1)[-1]} {value}, not {steps})"
    return ""


def _distortion(seen: Observation) -> str:
    values = [update["distortion"] for update in seen["updates"]]
    return "" if None in values or not values else f"x {max(values):.3g}"


NUMBERS: dict[str, Callable[[Observation], str]] = {
    "divided twice": lambda seen: f"{max(_ratios(seen), default=math.nan):.3g}",
    "under-weighted": lambda seen: f"{min(_ratios(seen), default=math.nan):.3g}",
    "over-weighted": lambda seen: f"{max(_ratios(seen), default=math.nan):.3g}",
    "leaks": lambda seen: f"({max((update['sum'] for update in _mixed(seen)), default=math.nan):.3g} in an update)",
    "cleared": lambda seen: f"{_ratios(seen)[0]:.3g}" if seen["updates"] else "",
    "mean of means": _distortion,
    "carried over": lambda seen: f"{len(_mixed(seen))} of {len(seen['updates'])}",
    "never stops": _never_stops,
    "stops late": lambda seen: f"({_updates(seen)}, not {seen['scenario']['max_steps']})",
    "stops early": lambda seen: f"({_updates(seen)}, not {seen['scenario']['max_steps']})",
    "miscounted": _miscounted,
    "misestimated": lambda seen: (
        f"({seen['steps_reported'].get('trainer.estimated_stepping_batches', '?')}, not {len(seen['updates'])})"
    ),
    "hooks too often": lambda seen: (
        f"({seen['steps_reported'].get('on_before_optimizer_step', '?')} for {_updates(seen)})"
    ),
    "lost": _of_samples("samples_lost"),
    "left open": _of_samples("samples_left_open"),
    "repeated": _of_samples("samples_duplicated"),
    "skipped": _of_samples("samples_never_fetched"),
    "crashed": lambda seen: f"(after {seen['micro_batches']} micro-batches)",
}
"""By the word of a finding, its most telling number; a word that is not here speaks for itself. Right is 1 for
``divided twice`` (of a whole window), ``under-weighted`` (the smallest), ``over-weighted`` (the largest) and
``cleared``: each is the sum of an update's coefficients over the right one. ``mean of means``: the largest ratio of a
weight to the one in the big batch, or of that to it."""


def escape(text: object) -> str:
    """Text for a Markdown table or page: on one line, and nothing in it is read as markup."""
    plain = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", plain)


def markdown(observations: Sequence[Observation]) -> str:
    """Scenarios by groups of backends that behave alike in every scenario, and who is in which group."""
    found = groups(observations)
    lines = [
        f"| scenario | {' | '.join(escape(group.name) for group in found)} |",
        "| --- |" + " --- |" * len(found),
    ]
    for name in scenarios(observations):
        cells = [_cell(group.cells[name]) if name in group.cells else "" for group in found]
        lines.append(f"| {escape(name)} | {' | '.join(cells)} |")
    legend = [
        f"- {escape(group.name)}: {', '.join(map(escape, group.backends))}"
        for group in found
        if len(group.backends) > 1
    ]
    return "\n".join([*lines, "", KEY, *(["", *legend] if legend else []), ""])


def _cell(seen: Observation) -> str:
    first, *rest = map(escape, telling(seen))
    return "<br>".join([f"**{first}**" if seen["level"] == "wrong" else first, *rest])
