"""``python -m studies.semantics``: writes docs/semantics.md and its weight maps from the committed suite.

The page answers a question for each scenario; every table and diagnosis is in the page of the suite itself. What it
found at the end of an epoch is bundled for the reports of timed runs.
"""

from __future__ import annotations

import json
import math
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
from bench.report.sections import EPOCH_END
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
USUAL = ("2 ranks", "N = 4")
"""Parts of a scenario's setting that are said once for all."""
INTRODUCTION = """\
Each backend trains a model with one weight per use of a sample, by SGD with learning rate 1, so that an update \
changes each weight by the coefficient of that sample's gradient. The right update is that of the full batch, all \
samples of the window in one batch, whose coefficients sum to 1. **Bold** verdicts are wrong. Others leave every \
update right for some batch, but perhaps not for the one that was meant. Where the script itself makes a mistake, by \
`zero_grad` in mid-window, what was *cleared* or *kept* is told, and no backend is called wrong for it. \
What a script of your own computes is found by [`python -m bench audit`](audit.md)."""
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
    lines = ["# What each backend computes", "", INTRODUCTION, ""]
    lines += ["## Questions", ""]
    lines += [
        "Each verdict is followed by its most telling number and the backends; a pattern such as "
        "`accelerate-*` stands for all that match it. "
        "Unless said otherwise there are 2 ranks, and N = 4. "
        "What the reduction of the loss does is told apart."
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
        ]
    lines += ["## Every table and diagnosis", ""]
    lines += [
        f"[Each backend in each scenario](../results/semantics/{MARKDOWN}), and the coefficients of every update"
    ]
    lines[-1] += f" in [{OBSERVATIONS}](../results/semantics/{OBSERVATIONS}). Measured by "
    lines[-1] += f"`{' '.join(about['command'])}` with {facts}."
    return "\n".join(lines) + "\n"


def question(name: str, values: Mapping[str, Any], seen: Sequence[Observation]) -> list[str]:
    """What a scenario asks, and the verdicts with the backends under which each came up."""
    parts = Scenario.from_dict(values).setting.split(", ")
    setting = ", ".join(part for part in parts if part not in USUAL)
    lines = [f"**{escape(values['title'])}** ({_code(name)}: {escape(setting)})", ""]
    for only, cause in ((by_backend, ""), (by_loss, "the reduction of the loss: ")):
        parts = [only(observation) for observation in seen]
        told = [part for part in parts if not cause or part["findings"]]
        for verdict, backends in _by_text(told, _verdict).items():
            names = ", ".join(together(backends, [each["backend"] for each in seen]))
            if verdict == "right" and len(backends) > 1:
                names = f"the other {len(backends)}"
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
