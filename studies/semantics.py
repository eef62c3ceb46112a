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
USUAL = ("32 samples", "2 ranks", "8 micro-batches of 2 per epoch", "N = 4", "1 epoch")
"""Parts of a scenario's setting that are said once for all."""
CONTROL = "divisible"
"""The scenario whose verdicts later lists do not repeat."""
INTRODUCTION = """\
Each backend trains a model with one weight per use of a sample, by SGD with learning rate 1, so that an update \
changes each weight by the coefficient of that sample's gradient. The right update is that of the full batch, all \
samples of the window in one batch, whose coefficients sum to 1. \
[`python -m bench audit`](audit.md) finds what a script of your own computes.

One rule holds for all backends. A verdict is wrong, and **bold**, if an update is not the full-batch gradient of \
any set of samples, or if samples, steps or counters are not what they should be. With any other verdict each update \
is that of some samples, though perhaps not of those that were meant. In `zero-grad` and `engine-n` the script itself \
makes a mistake: verdicts say what becomes of it, not whose fault it is.

The number after *divided twice*, *under-weighted*, *over-weighted* and *cleared* is an update's sum relative to the \
right one, after *leaks* its sum, after *lost* and *left open* samples that reach no update, after *carried over* the \
updates that mix epochs, and after *mean of means* the factor by which a weight differs from that in the full batch."""
QUESTIONS = """\
Each list names the backends whose verdict is another one than in the control, with a telling number; a pattern such \
as `accelerate-*` stands for all that match it. What the reduction of the loss does is told apart. \
Unless said otherwise there are 2 ranks, N = 4, and one epoch of 32 samples, 8 micro-batches of 2 on each rank."""
NOTES = """\
Where the first finding is *miscounted*, every update is right: a counter of the framework is wrong.

After `zero_grad` in mid-window the window goes on. If the gradients are *kept*, its update has all of them with the \
right sum, so this is a note under each backend. If the window is given up, as in `exception`, gradients that outlive \
`zero_grad` are added to the next window: they *leak*, and the update has 1.25 times the right sum. That is wrong and, \
of FSDP2, [known bad](known-bad.md#torch-fsdp2-zero-grad). PyTorch's `reset_iter_state`, which the scenario does not \
call, discards of FSDP2's only those that await a deferred all-reduce. Under torchtitan and HF Trainer `zero_grad` \
could only be called between two windows, where nothing is open.

After `zero_grad`, `deepspeed-zero3-deferred`, with offload or without, cannot continue on a CPU: DeepSpeed marks the \
open gradients as used by the current stream, and a CPU has none. On CUDA they are cleared \
([GPUs](gpu.md#semantics))."""


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
    told: list[str] = []
    place = 0
    for name, values in scenarios(observations).items():
        seen = [each for each in observations if each["scenario"]["name"] == name]
        found = verdicts(seen, {} if name == CONTROL else usual)
        if found == told:
            lines[place] += f"<br>\n{heading(name, values)}"
        else:
            place = len(lines) + 1
            lines += ["", heading(name, values), "", *found]
        told = found
    lines += ["", "## What is wrong, by backend", "", overview(observations), NOTES, ""]
    lines += [
        "What follows for Lightning with DeepSpeed, FSDP2 and Hugging Face: [claims](claims.md).",
        "",
        "## ThroughputMonitor",
        "",
        "Its samples/s under accumulation, divided by those that were trained, on a virtual clock on which optimizer "
        "steps take long, with NB micro-batches per epoch "
        f"([settings and every point](../results/throughput/{THROUGHPUT.name})):",
        "",
        *rates,
        "",
        "## Weight maps",
        "",
    ]
    for name in PICTURED:
        title = escape(scenarios(observations)[name]["title"])
        lines += [f"![{title}](../plots/semantics/weights-{name}.png)", ""]
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
    setting = ", ".join(part for part in parts if part not in USUAL)
    about = f"{_code(name)}: {escape(setting)}" if setting else _code(name)
    return f"**{escape(values['title'])}** ({about})"


def verdicts(seen: Sequence[Observation], usual: Mapping[str, str]) -> list[str]:
    """A list item for each verdict, with the backends under which it came up; not those whose verdict is usual."""
    every = [observation["backend"] for observation in seen]
    of_backends = [by_backend(observation) for observation in seen]
    told = [each for each in of_backends if each["verdict"] != usual.get(each["backend"])]
    lines = []
    for verdict, backends in _by_text(told, _verdict).items():
        names = ", ".join(together(backends, every))
        if verdict == "right" and not usual:
            names = f"the other {len(backends)}"
        lines.append(f"- {verdict}: {names}")
    if not told:
        lines.append("- as in the control")
    of_loss = [part for part in map(by_loss, seen) if part["findings"]]
    for verdict, backends in _by_text(of_loss, _verdict).items():
        named = together(backends, every)
        others = together([name for name in every if name not in backends], every)
        names = ", ".join(named)
        if 2 * len(others) < len(named):
            names = f"all but {', '.join(others)}"
        lines.append(f"- the reduction of the loss: {verdict}: {names}")
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
