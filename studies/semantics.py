"""``python -m studies.semantics``: writes docs/semantics.md and its weight maps from the committed suite.

The page answers a question for each scenario; every table and diagnosis is in the page of the suite itself. What it
found at the end of an epoch is bundled for the reports of timed runs.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.audit.conformance import (
    Observation,
    by_backend,
    by_loss,
    overview,
    scenarios,
    with_number,
)
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
from bench.formatting import plural, some
from bench.plan.cell import Status
from bench.report.sections import EPOCH_END
from studies import ROOT

SUITE, PLOTS, DOCS = (
    ROOT / "results/semantics",
    ROOT / "plots/semantics",
    ROOT / "docs/semantics.md",
)
THROUGHPUT = ROOT / "results/throughput/throughput.md"
EPOCH_END_SCENARIO = "partial-window"
PICTURED = ("partial-window", "resume", "exception", "zero-grad")
"""Scenarios whose weight maps are on the page."""
INTRODUCTION = """\
Each backend trains a model with one weight per use of a sample, by SGD with learning rate 1, so that an update \
changes each weight by the coefficient of that sample's gradient. The right update is that of the full batch, all \
samples of the window in one batch, whose coefficients sum to 1. A verdict without bold type leaves every update right \
for some batch, but perhaps not for the one that was meant. In some scenarios the script makes a mistake, such as \
`zero_grad` in mid-window, or goes on after an exception: their verdicts say what becomes of the update, not whose \
fault it is. What a script of your own computes is found by [`python -m bench audit`](audit.md)."""
NOTES = """\
Where the first finding is *miscounted*, every update is right: what is wrong is a counter of the framework.

Where gradients *leak*, those that are not reduced yet outlive `zero_grad`. Of FSDP2's, PyTorch's `reset_iter_state`, \
which the scenario does not call, discards only those that await a deferred all-reduce.

After `zero_grad`, `deepspeed-zero3-deferred`, with offload or without, cannot continue on a CPU: DeepSpeed marks the \
open gradients as used by \
the current stream, and a CPU has none. On CUDA they are cleared ([GPUs](gpu.md#semantics))."""


def page(
    observations: Sequence[Observation], about: Mapping[str, Any], rates: Sequence[str]
) -> str:
    """The page in Markdown; ``rates`` has the findings on ThroughputMonitor, as list items."""
    facts = ", ".join(f"{escape(name)} {escape(value)}" for name, value in facts_of(about).items())
    lines = ["# What each backend computes", "", INTRODUCTION, "", best(observations), ""]
    lines += ["## Questions", ""]
    lines += [
        "Each verdict is followed by its most telling number and the backends; **bold** is wrong."
    ]
    for name, values in scenarios(observations).items():
        lines += [
            "",
            *question(
                name, values, [seen for seen in observations if seen["scenario"]["name"] == name]
            ),
        ]
    lines += ["", "## What is wrong, by backend", "", overview(observations), NOTES, ""]
    lines += [
        "What follows for Lightning with DeepSpeed, FSDP2 and Hugging Face: [claims](claims.md).",
        "",
    ]
    lines += ["## ThroughputMonitor", ""]
    lines += [
        "Its samples/s under accumulation, divided by those that were trained, on a virtual clock on which "
    ]
    lines[-1] += "optimizer steps take long, with NB micro-batches per epoch "
    lines[-1] += f"([settings and every point](../results/throughput/{THROUGHPUT.name})):"
    lines += ["", *rates, "", "## Weight maps", ""]
    for name in PICTURED:
        title = escape(scenarios(observations)[name]["title"])
        lines += [
            f"![{title}](../plots/semantics/weights-{name}.png)",
            "",
            f"{title} ({_code(name)}).",
            "",
        ]
    lines += ["## Every table and diagnosis", ""]
    lines += [
        f"[Each backend in each scenario](../results/semantics/{MARKDOWN}), and the coefficients of every update"
    ]
    lines[-1] += f" in [{OBSERVATIONS}](../results/semantics/{OBSERVATIONS}). Measured by "
    lines[-1] += f"`{' '.join(about['command'])}` with {facts}."
    return "\n".join(lines) + "\n"


def best(observations: Sequence[Observation]) -> str:
    """The backends that are wrong in the fewest scenarios, of those that run them all."""
    observed = [by_backend(seen) for seen in observations]
    wrong = Counter(seen["backend"] for seen in observed if seen["level"] == "wrong")
    partial = {seen["backend"] for seen in observed if seen["verdict"] == Status.UNSUPPORTED}
    backends = [name for name in backends_of(observations) if name not in partial]
    least = min((wrong[name] for name in backends), default=0)
    best = ", ".join(_code(name) for name in backends if wrong[name] == least) or "none"
    fewest = f"these are wrong in the fewest, {least} of {len(scenarios(observations))}: {best}"
    every = f"Of {plural(len(backends), 'backend')} that can run every scenario"
    return f"{every}, {fewest}. What the reduction of the loss does is not counted."


def question(name: str, values: Mapping[str, Any], seen: Sequence[Observation]) -> list[str]:
    """What a scenario asks, and the verdicts with the backends under which each came up."""
    lines = [
        f"**{escape(values['title'])}** ({_code(name)}: {escape(Scenario.from_dict(values).setting)})",
        "",
    ]
    for only, cause in ((by_backend, ""), (by_loss, "the reduction of the loss: ")):
        parts = [only(observation) for observation in seen]
        told = [part for part in parts if not cause or part["findings"]]
        for verdict, backends in _by_text(told, _verdict).items():
            names = some(backends) if cause or verdict == "right" else ", ".join(backends)
            lines.append(f"- {cause}{verdict}: {names}")
    return lines


def _verdict(seen: Observation) -> str:
    text = escape(with_number(seen, seen["verdict"]))
    return f"**{text}**" if seen["level"] == "wrong" else text


def _by_text(
    observations: Iterable[Observation], describe: Callable[[Observation], str]
) -> dict[str, list[str]]:
    """The backends by the description of their observations."""
    found: dict[str, list[str]] = {}
    for seen in observations:
        found.setdefault(describe(seen), []).append(seen["backend"])
    return found


def backends_of(observations: Iterable[Observation]) -> list[str]:
    """In order of appearance."""
    return list(dict.fromkeys(seen["backend"] for seen in observations))


def _code(name: str) -> str:
    """The name as code, unless it would break out of it."""
    return escape(name) if set(name) & set("`|<\n") else f"`{name}`"


def throughput() -> list[str]:
    """The findings on ThroughputMonitor, as list items."""
    return [
        line
        for line in THROUGHPUT.read_text(encoding="utf-8").splitlines()
        if line.startswith("- ")
    ]


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
