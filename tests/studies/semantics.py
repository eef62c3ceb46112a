"""``python -m tests.studies.semantics``: writes docs/semantics.md and its weight maps from the committed suite.

The page answers a question for each scenario; every table and diagnosis is in the page of the suite itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.audit.conformance import (
    TOLERANCE,
    Observation,
    by_backend,
    by_loss,
    mixed,
    overview,
    ratios,
    scenarios,
    with_number,
)
from bench.audit.scenario import Fault, Scenario
from bench.audit.semantics_files import MARKDOWN, OBSERVATIONS, facts_of, load, write_pictures, write_tables
from bench.formatting import markdown as escape
from bench.formatting import plural, some
from bench.plan.cell import Status
from tests.conftest import ROOT

GLOBAL_STEP, ENGINE_STEPS = "trainer.global_step", "engine.global_steps"
STRATEGY, HOOK = "strategy.optimizer_step", "on_before_optimizer_step"
SUITE, PLOTS, DOCS = ROOT / "results/semantics", ROOT / "plots/semantics", ROOT / "docs/semantics.md"
THROUGHPUT = ROOT / "results/throughput/throughput.md"
PICTURED = ("partial-window", "resume", "exception", "zero-grad")
"""Scenarios whose weight maps are on the page."""
INTRODUCTION = """\
Each backend trains a model with one weight per use of a sample, by SGD with learning rate 1, so that an update \
changes each weight by the coefficient of that sample's gradient. The right update is that of the full batch, all \
samples of the window in one batch, whose coefficients sum to 1. A verdict without bold type leaves every update right \
for some batch, but perhaps not for the one that was meant. In some scenarios the script makes a mistake, such as \
`zero_grad` in mid-window, or goes on after an exception: their verdicts say what becomes of the update, not whose \
fault it is."""
NOTES = """\
Where the first finding is *miscounted*, every update is right, and only a counter of the framework is wrong.

Where gradients *leak*, those that are not reduced yet outlive `zero_grad`. Of FSDP2's, PyTorch's `reset_iter_state`, \
which the scenario does not call, discards only those that await a deferred all-reduce."""


def page(observations: Sequence[Observation], about: Mapping[str, Any], rates: Sequence[str]) -> str:
    """The page in Markdown; ``rates`` has the findings on ThroughputMonitor, as list items."""
    facts = ", ".join(f"{escape(name)} {escape(value)}" for name, value in facts_of(about).items())
    lines = ["# What each backend computes", "", INTRODUCTION, "", best(observations), ""]
    lines += ["## Questions", "", "After a verdict stand its most telling number, and the backends; **bold** is wrong."]
    for name, values in scenarios(observations).items():
        lines += ["", *question(name, values, [seen for seen in observations if seen["scenario"]["name"] == name])]
    lines += ["", "## What is wrong, by backend", "", overview(observations), NOTES, ""]
    lines += ["## Lightning with DeepSpeed", "", *lightning_deepspeed(observations), ""]
    lines += ["## ThroughputMonitor", ""]
    lines += ["Its samples/s under accumulation, divided by those that were trained, on a virtual clock on which "]
    lines[-1] += f"optimizer steps take long ([settings and every point](../results/throughput/{THROUGHPUT.name})):"
    lines += ["", *rates, "", "## Weight maps", ""]
    for name in PICTURED:
        title = escape(scenarios(observations)[name]["title"])
        lines += [f"![{title}](../plots/semantics/weights-{name}.png)", "", f"{title} ({_code(name)}).", ""]
    lines += ["## Every table and diagnosis", ""]
    lines += [f"[Each backend in each scenario](../results/semantics/{MARKDOWN}), and the coefficients of every update"]
    lines[-1] += f" in [{OBSERVATIONS}](../results/semantics/{OBSERVATIONS}). Measured by "
    lines[-1] += f"`{' '.join(about['command'])}` with {facts}."
    return "\n".join(lines) + "\n"


def best(observations: Sequence[Observation]) -> str:
    """The backends that are wrong in the fewest scenarios, of those that run them all."""
    own = [by_backend(seen) for seen in observations]
    wrong = Counter(seen["backend"] for seen in own if seen["level"] == "wrong")
    partial = {seen["backend"] for seen in own if seen["verdict"] == Status.UNSUPPORTED}
    backends = [name for name in backends_of(observations) if name not in partial]
    least = min((wrong[name] for name in backends), default=0)
    best = ", ".join(_code(name) for name in backends if wrong[name] == least) or "none"
    fewest = f"these are wrong in the fewest, {least} of {len(scenarios(observations))}: {best}"
    every = f"Of {plural(len(backends), 'backend')} that can run every scenario"
    return f"{every}, {fewest}. What the reduction of the loss does is not counted."


def question(name: str, values: Mapping[str, Any], seen: Sequence[Observation]) -> list[str]:
    """What a scenario asks, and the verdicts with the backends under which each came up."""
    lines = [f"**{escape(values['title'])}** ({_code(name)}: {escape(Scenario.from_dict(values).setting)})", ""]
    for only, cause in ((by_backend, ""), (by_loss, "the reduction of the loss: ")):
        parts = [only(one) for one in seen]
        told = [part for part in parts if not cause or part["findings"]]
        for verdict, backends in _by_text(told, _verdict).items():
            names = some(backends) if cause or verdict == "right" else ", ".join(backends)
            lines.append(f"- {cause}{verdict}: {names}")
    return lines


def _verdict(seen: Observation) -> str:
    text = escape(with_number(seen, seen["verdict"]))
    return f"**{text}**" if seen["level"] == "wrong" else text


def lightning_deepspeed(observations: Sequence[Observation]) -> list[str]:
    """How the loss is divided, how often hooks are called, what the end of an epoch does, and what is clipped."""
    reported = {seen["backend"]: seen["steps_reported"].keys() for seen in reversed(observations) if seen["updates"]}
    both = [name for name in backends_of(observations) if {GLOBAL_STEP, ENGINE_STEPS} <= reported.get(name, set())]
    ours = [seen for seen in observations if seen["backend"] in both]
    lines = [f"Backends with the counters of both the Trainer and the engine: {_names(both)}.", ""]
    counting = [seen for seen in observations if {GLOBAL_STEP, ENGINE_STEPS} & seen["steps_reported"].keys()]
    if whole := _first_plain(observations, complete=True):
        title = f"With complete windows, in {_code(whole)}; a loss divided by N twice gives 1/N of the right weight"
        lines += _behaviour(title, counting, whole, _facts)
        hooked = [seen for seen in counting if STRATEGY in seen["steps_reported"]]
        lines += _behaviour(f"Calls of hooks, in {_code(whole)}", hooked, whole, _hooks)
    if partial := _first_plain(observations, complete=False):
        title = f"With an incomplete window at the end of each epoch, in {_code(partial)}"
        lines += _behaviour(title, counting, partial, _facts)
    for name, scenario in scenarios(observations).items():
        if scenario["clip_norm"]:
            lines += _behaviour(f"Clipped to norm {scenario['clip_norm']:g}, in {_code(name)}", ours, name, _sum)
    return lines


def _first_plain(observations: Sequence[Observation], *, complete: bool) -> str:
    """The first scenario in which nothing but the windows matters; empty if there is none."""
    for name, values in scenarios(observations).items():
        one = Scenario.from_dict(values)
        plain = one.fault is Fault.NONE and len(one.accumulate) == 1 and one.max_steps is None and not one.clip_norm
        whole = one.partial_window == 0
        if plain and whole == complete and (complete or one.epochs != 1):
            return name
    return ""


def _behaviour(
    title: str, observations: Sequence[Observation], scenario: str, describe: Callable[[Observation], str]
) -> list[str]:
    """A list item for a scenario, and below it one for all backends with the same description."""
    texts = _by_text([seen for seen in observations if seen["scenario"]["name"] == scenario], describe)
    return [f"- {title}:", *(f"  - {_names(backends)}: {text}" for text, backends in texts.items())]


def _by_text(observations: Iterable[Observation], describe: Callable[[Observation], str]) -> dict[str, list[str]]:
    """The backends by the description of their observations."""
    found: dict[str, list[str]] = {}
    for seen in observations:
        found.setdefault(describe(seen), []).append(seen["backend"])
    return found


def _facts(seen: Observation) -> str:
    """Updates, epochs that they mix, weights, samples in no update, and counters that disagree."""
    steps, found = len(seen["updates"]), ratios(seen)
    if not found:
        return f"{escape(seen['verdict'])}, no update"
    limited = seen["scenario"]["max_steps"] is not None
    parts = [plural(steps, "update") + (f" in {seen['micro_batches']} micro-batches per rank" if limited else "")]
    if seen["stopped"] != "ended":
        parts.append("training never ended" if seen["stopped"] == "bound" else escape(seen["verdict"]))
    if crossing := len(mixed(seen)):
        parts.append(f"{crossing} of them with samples of two epochs")
    if max(found) - min(found) > TOLERANCE:
        parts.append(f"{min(found):.3g} to {max(found):.3g} of the right weight")
    else:
        parts.append("the right weight" if abs(found[0] - 1) < TOLERANCE else f"{found[0]:.3g} of the right weight")
    for key, words in (
        ("samples_lost", "lost"),
        ("samples_left_open", "left open at the end"),
        ("samples_duplicated", "twice in an epoch"),
        ("samples_never_fetched", "never fetched"),
    ):
        if seen[key] > 0:
            parts.append(f"{plural(seen[key], 'sample')} {words}")
    counters = {name: value for name, value in seen["steps_reported"].items() if name in {GLOBAL_STEP, ENGINE_STEPS}}
    if set(counters.values()) - {steps}:
        parts += [f"{_code(name)} = {value}" for name, value in counters.items()]
    return ", ".join(parts)


def _hooks(seen: Observation) -> str:
    """How often the strategy's step and the hook before it were called."""
    reported = seen["steps_reported"]
    calls = [f"{_code(name)} {plural(reported[name], 'time')}" for name in (STRATEGY, HOOK) if name in reported]
    return f"{', '.join(calls)}, for {plural(len(seen['updates']), 'update')}"


def _sum(seen: Observation) -> str:
    """The sum of an update that should have been clipped."""
    if not seen["updates"]:
        return f"{escape(seen['verdict'])}, no update"
    update = seen["updates"][0]
    text = f"the coefficients of an update sum to {update['sum']:.3g}"
    right = abs(ratios(seen)[0] - 1) < TOLERANCE
    return f"{text}, as they should" if right else f"{text} instead of {update['right_sum']:.3g}"


def backends_of(observations: Iterable[Observation]) -> list[str]:
    """In order of appearance."""
    return list(dict.fromkeys(seen["backend"] for seen in observations))


def _names(backends: Sequence[str]) -> str:
    return some([_code(name) for name in backends])


def _code(name: str) -> str:
    """The name as code, unless it would break out of it."""
    return escape(name) if set(name) & set("`|<\n") else f"`{name}`"


def throughput() -> list[str]:
    """The findings on ThroughputMonitor, as list items."""
    return [line for line in THROUGHPUT.read_text(encoding="utf-8").splitlines() if line.startswith("- ")]


def main() -> None:
    """Write all pages and pictures again, from the observations."""
    about, observations = load(SUITE / OBSERVATIONS)
    write_tables(observations, about, SUITE)
    write_pictures([one for one in observations if one["scenario"]["name"] in PICTURED], about, PLOTS)
    DOCS.write_text(page(observations, about, throughput()), encoding="utf-8")


if __name__ == "__main__":
    main()
