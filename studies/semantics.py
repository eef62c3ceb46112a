"""``python -m studies.semantics``: writes docs/semantics.md and its weight maps from the committed suite.

The page answers a question for each scenario; every table and diagnosis is in the page of the suite itself. What it
found at the end of an epoch is bundled for the reports of timed runs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.audit.conformance import Observation, by_backend, by_loss, scenarios, with_number
from bench.audit.scenario import Scenario
from bench.audit.semantics_files import (
    MARKDOWN,
    OBSERVATIONS,
    facts_of,
    load,
    write_pictures,
    write_tables,
)
from bench.formatting import markdown as escape
from bench.report.sections import EPOCH_END
from bench.tabular import markdown_table
from studies import ROOT
from studies.families import together

SUITE, PLOTS, DOCS = (
    ROOT / "results/semantics",
    ROOT / "plots/semantics",
    ROOT / "docs/semantics.md",
)
THROUGHPUT = ROOT / "results/throughput/throughput.md"
EPOCH_END_SCENARIO = "partial-window"
PICTURED = ("partial-window", "resume", "exception", "zero-grad")
"""Scenarios whose weight maps are on the page."""
USUAL = ("32 samples", "2 ranks", "8 micro-batches of 2 per epoch", "N = 4", "1 epoch")
"""Parts of a scenario's setting that are said once for all."""
IN_TITLES = (
    "drop_last",
    "DistributedSampler(drop_last=True)",
    "the framework may split the samples",
    "Accelerate does not prepare the loader",
    "Accelerate prepares the scheduler",
)
"""Parts that the titles of their scenarios have."""
CONTROL = "divisible"
"""The scenario whose verdicts later lists do not repeat."""

INTRODUCTION = """\
Each backend trains a model with one weight per use of a sample, by SGD with learning rate 1, so an update changes \
each weight by the coefficient of that sample's gradient. The right update is that of the window in one batch, whose \
coefficients sum to 1.

A verdict is wrong, and **bold**, if an update is not the full-batch gradient of any set of samples, if samples \
before the last update are lost, if training fails or ends late, or if a counter of updates is wrong. With any other \
verdict each update is that of some samples, perhaps not of those meant. In `zero-grad` and `engine-n` the script \
itself makes a mistake; an update of half a window, *cleared* by it, is a note.

Numbers are an update's sum relative to the right one (*divided twice*, *under-weighted*, *over-weighted*, *cleared*, \
*leaks*), samples that reach no update (*lost*, *left open*), updates that mix epochs (*carried over*), and the factor \
by which a weight differs from that in the full batch (*mean of means*)."""
QUESTIONS = """\
Each list names the backends whose verdict differs from that in the control; a pattern such as `accelerate-*` stands \
for all that match it. What the reduction of the *loss* does is told apart. Scenarios with the same list share it, \
with their numbers in order. Unless said otherwise there are 2 ranks, N = 4, and one epoch of 32 samples, 8 \
micro-batches of 2 on each rank."""
NOTES = """\
Where the first finding is *miscounted*, every update is right: a counter of the framework is wrong.

After `zero_grad` in mid-window the window goes on. Gradients that are *kept* are all in its update, with the right \
sum: a note. If the window is given up, as in `exception`, they *leak* into the next update, with 1.25 times the right \
sum: wrong and, of FSDP2, [known bad](known-bad.md#torch-fsdp2-zero-grad). Under torchtitan and HF Trainer `zero_grad` \
could only be called between two windows.

On a CPU, `deepspeed-zero3-deferred`, with offload or without, cannot continue after `zero_grad`, since DeepSpeed \
marks the open gradients as used by a stream. Over the stub of CUDA they are cleared ([GPUs](gpu.md#semantics)); no \
GPU has run it."""


@dataclass(frozen=True, slots=True)
class Item:
    """A verdict of one scenario or of several, with the backends under which it came up."""

    cause: str
    """What stands before it: nothing, or that the reduction of a scenario's loss causes it."""
    verdict: str
    is_wrong: bool
    numbers: tuple[str, ...]
    """The most telling number in each scenario; empty where there is none."""
    backends: str

    def is_like(self, other: Item) -> bool:
        """Whether they differ in the numbers alone."""
        return replace(self, numbers=()) == replace(other, numbers=())

    def line(self) -> str:
        """The list item in Markdown."""
        numbers = self.numbers
        if len(set(numbers)) == 1:
            numbers = numbers[:1]
        text = f"{self.verdict} {', '.join(numbers)}".rstrip()
        if self.is_wrong:
            text = f"**{text}**"
        return f"- {self.cause}{text}{self.backends}"


def page(
    observations: Sequence[Observation], about: Mapping[str, Any], rates: Sequence[str]
) -> str:
    """The page in Markdown; ``rates`` has the findings on ThroughputMonitor, as list items."""
    facts = ", ".join(f"{escape(name)} {escape(value)}" for name, value in facts_of(about).items())
    lines = ["# What each backend computes", "", INTRODUCTION, "", "## Questions", "", QUESTIONS]
    usual = {
        seen["backend"]: by_backend(seen)["verdict"]
        for seen in observations
        if seen["scenario"]["name"] == CONTROL
    }
    questions: list[tuple[list[str], list[Item], list[Item]]] = []
    for name, values in scenarios(observations).items():
        seen = [each for each in observations if each["scenario"]["name"] == name]
        found = verdicts(seen, {} if name == CONTROL else usual)
        for headings, items, of_loss in questions:
            if len(items) == len(found) and all(map(Item.is_like, items, found)):
                headings.append(heading(name, values))
                items[:] = map(_with_numbers_of, items, found)
                of_loss.extend(loss_verdicts(seen))
                break
        else:
            questions.append(([heading(name, values)], found, loss_verdicts(seen)))
    for headings, items, of_loss in questions:
        lines += ["", "<br>\n".join(headings), "", *map(Item.line, (*items, *of_loss))]
    lines += ["", "## What is wrong, by backend", "", *by_counts(observations), NOTES, ""]
    lines += [
        "## ThroughputMonitor",
        "",
        "Its samples/s, divided by those that were trained, on a virtual clock on which optimizer steps take long "
        f"([every point](../results/throughput/{THROUGHPUT.name}), [claims](claims.md)):",
        "",
        *rates,
        "",
        "## Weight maps",
        "",
    ]
    for name in PICTURED:
        lines += [f"![Weights in {name}](../plots/semantics/weights-{name}.png)", ""]
    lines += [
        "## Every table and diagnosis",
        "",
        f"[Each backend in each scenario](../results/semantics/{MARKDOWN}), and the coefficients of every update in "
        f"[{OBSERVATIONS}](../results/semantics/{OBSERVATIONS}). Measured by `{' '.join(about['command'])}` with "
        f"{facts}.",
    ]
    return "\n".join(lines) + "\n"


def heading(name: str, values: Mapping[str, Any]) -> str:
    """What a scenario asks, its name, and its setting where that is not the usual one."""
    parts = Scenario.from_dict(values).setting.split(", ")
    counted = f"{values['samples']} samples"
    batches = values["samples"] / (values["batch_size"] * values["world_size"])
    known: tuple[str, ...] = (*USUAL, *IN_TITLES)
    if f"{batches:g} micro-batches of {values['batch_size']} per epoch" in parts:
        known += (counted,)  # which is their product
    setting = ", ".join(part for part in parts if part not in known)
    about = f"{_code(name)}: {escape(setting)}" if setting else _code(name)
    return f"**{escape(values['title'])}** ({about})"


def verdicts(seen: Sequence[Observation], usual: Mapping[str, str]) -> list[Item]:
    """An item for each verdict, with the backends under which it came up; not those whose verdict is usual."""
    every = [observation["backend"] for observation in seen]
    of_backends = [by_backend(observation) for observation in seen]
    told = [each for each in of_backends if each["verdict"] != usual.get(each["backend"])]
    items = []
    for (verdict, number, is_wrong), backends in _by_verdict(told).items():
        names = ", ".join(together(backends, every))
        if verdict == "right" and not usual:
            names = f"the other {len(backends)}"
        items.append(Item("", verdict, is_wrong, (number,), f": {names}"))
    if not told:
        items.append(Item("", "as in the control", False, ("",), ""))
    return items


def loss_verdicts(seen: Sequence[Observation]) -> list[Item]:
    """An item for each verdict that the reduction of the loss causes in a scenario, with the scenario's name."""
    every = [observation["backend"] for observation in seen]
    items = []
    of_loss = [part for part in map(by_loss, seen) if part["findings"]]
    for (verdict, number, is_wrong), backends in _by_verdict(of_loss).items():
        named = together(backends, every)
        others = together([name for name in every if name not in backends], every)
        names = ", ".join(named)
        if 2 * len(others) < len(named):
            names = f"all but {', '.join(others)}"
        cause = f"the loss of {_code(seen[0]['scenario']['name'])}: "
        items.append(Item(cause, verdict, is_wrong, (number,), f": {names}"))
    return items


def _by_verdict(observations: Iterable[Observation]) -> dict[tuple[str, str, bool], list[str]]:
    """The backends by verdict, its number, and whether it is wrong."""
    found: dict[tuple[str, str, bool], list[str]] = {}
    for seen in observations:
        verdict = seen["verdict"]
        number = with_number(seen, verdict).removeprefix(verdict).strip()
        key = escape(verdict), escape(number), seen["level"] == "wrong"
        found.setdefault(key, []).append(seen["backend"])
    return found


def _with_numbers_of(item: Item, other: Item) -> Item:
    return replace(item, numbers=item.numbers + other.numbers)


def by_counts(observations: Sequence[Observation]) -> list[str]:
    """In how many scenarios backends are right, and what is wrong in the others; those with equal counts in one row."""
    of_backends: dict[str, list[Observation]] = {}
    for seen in observations:
        of_backends.setdefault(seen["backend"], []).append(by_backend(seen))
    rows: dict[tuple[str, ...], list[str]] = {}
    for backend, found in of_backends.items():
        levels = Counter(seen["level"] for seen in found)
        words = Counter(seen["verdict"] for seen in found if seen["level"] == "wrong")
        wrong = ", ".join(f"{word} {count}" for word, count in words.most_common())
        rows.setdefault((str(levels["detail"]), str(levels["note"]), wrong), []).append(backend)
    every = list(of_backends)
    return markdown_table(
        ("backends", "right", "notes", "wrong, in so many scenarios"),
        [(", ".join(together(names, every)), *row) for row, names in rows.items()],
        range(1, 3),
    )


def _code(name: str) -> str:
    """The name as code, unless it would break out of it."""
    return escape(name) if set(name) & set("`|<\n") else f"`{name}`"


def throughput() -> list[str]:
    """How many settings of ThroughputMonitor are right, and what changes that, as list items."""
    lines = THROUGHPUT.read_text(encoding="utf-8").splitlines()
    first, *_, last = (line for line in lines if line.startswith("- "))
    return [first, last]


def at_epoch_end(about: Mapping[str, Any], observations: Sequence[Observation]) -> dict[str, Any]:
    """What ``bench.report.sections`` shows of a suite."""
    chosen = [seen for seen in observations if seen["scenario"]["name"] == EPOCH_END_SCENARIO]
    scenario = chosen[0]["scenario"]
    (n,) = scenario["accumulate"]
    ranks, epochs = scenario["world_size"], scenario["epochs"]
    batches = math.ceil(scenario["samples"] / (scenario["batch_size"] * ranks))
    return {
        "packages": {name: about["packages"][name] for name in ("torch", "lightning", "deepspeed")},
        "scenario": f"{epochs} epochs of {batches} micro-batches on each of {ranks} ranks, N = {n}",
        "due": epochs * math.ceil(batches / n),
        "backends": {
            seen["backend"]: {
                "finding": seen["diagnosis"],
                "taken": seen["optimizer_steps_observed"],
                "reported": seen["steps_reported"],
            }
            for seen in chosen
        },
    }


def main() -> None:
    """Write all pages and pictures again, from the observations."""
    about, observations = load(SUITE / OBSERVATIONS)
    write_tables(observations, about, SUITE)
    write_pictures(
        [
            observation
            for observation in observations
            if observation["scenario"]["name"] in PICTURED
        ],
        about,
        PLOTS,
    )
    DOCS.write_text(page(observations, about, throughput()), encoding="utf-8")
    bundle = json.dumps(at_epoch_end(about, observations), indent=1)
    EPOCH_END.write_text(f"{bundle}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
