"""The page on what each backend computes: semantics.md.jinja, filled from the observations alone."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from bench.audit.conformance import (
    KEY,
    TOLERANCE,
    Observation,
    by_backend,
    families,
    groups,
    markdown,
    mixed,
    overview,
    ratios,
    scenarios,
    with_number,
)
from bench.audit.scenario import Fault, Scenario
from bench.plan.cell import Status
from bench.words import markdown as escape
from bench.words import plural, some

GLOBAL_STEP, ENGINE_STEPS = "trainer.global_step", "engine.global_steps"
STRATEGY, HOOK = "strategy.optimizer_step", "on_before_optimizer_step"


def page(
    observations: Sequence[Observation],
    images: Mapping[str, str],
    *,
    command: str,
    about: Mapping[str, str],
    throughput: str = "",
    throughput_findings: Sequence[str] = (),
) -> str:
    """The page in Markdown.

    ``images`` has the relative paths of the weight maps that are shown, by scenario, and of the tables' pictures, by
    family; ``about`` has versions and machine; ``throughput`` is the relative path of the page on
    ThroughputMonitor, if there is one, and ``throughput_findings`` are its list items.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("semantics.md.jinja").render(
        command=command,
        about=", ".join(f"{escape(name)} {escape(value)}" for name, value in about.items()),
        best=_best(observations),
        overview=overview(observations),
        tables={family: markdown(own) for family, own in families(observations).items()},
        key=KEY,
        images=images,
        sections={
            "Lightning with DeepSpeed": _lightning_deepspeed(observations),
            "max\\_steps, drop\\_last and limit\\_train\\_batches": _limits(observations),
            "Loops written by hand": _by_hand(observations),
        },
        throughput=throughput,
        throughput_findings=throughput_findings,
        maps=[_map(observations, name, path) for name, path in images.items() if name in scenarios(observations)],
        diagnoses=[_diagnoses(observations, backend) for backend in _backends(observations)],
    )
    return text.rstrip() + "\n"


def _best(observations: Sequence[Observation]) -> str:
    """The backends that are wrong in the fewest scenarios, of those that run them all."""
    own = [by_backend(seen) for seen in observations]
    wrong = Counter(seen["backend"] for seen in own if seen["level"] == "wrong")
    partial = {seen["backend"] for seen in own if seen["verdict"] == Status.UNSUPPORTED}
    backends = [name for name in _backends(observations) if name not in partial]
    least = min((wrong[name] for name in backends), default=0)
    best = ", ".join(_code(name) for name in backends if wrong[name] == least) or "none"
    fewest = f"these are wrong in the fewest, {least} of {len(scenarios(observations))}: {best}"
    every = f"Of {plural(len(backends), 'backend')} that can run every scenario"
    return f"{every}, {fewest}. What the reduction of the loss does is not counted."


def _lightning_deepspeed(observations: Sequence[Observation]) -> list[str]:
    """How the loss is divided, how often hooks are called, what the end of an epoch does, and what is clipped."""
    reported = {seen["backend"]: seen["steps_reported"].keys() for seen in reversed(observations) if seen["updates"]}
    both = [name for name in _backends(observations) if {GLOBAL_STEP, ENGINE_STEPS} <= reported.get(name, set())]
    ours = [seen for seen in observations if seen["backend"] in both]
    if not ours:
        return []
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
        whole = one.training.partial_window == 0
        if plain and whole == complete and (complete or one.epochs != 1):
            return name
    return ""


def _limits(observations: Sequence[Observation]) -> list[str]:
    """What every backend does in the scenarios that leave something out."""
    lines = []
    for name, scenario in scenarios(observations).items():
        if any(scenario[key] for key in ("max_steps", "drop_last", "sampler_drop_last", "limit_batches")):
            lines += _behaviour(
                f"{_code(name)} ({escape(Scenario.from_dict(scenario).setting)})", observations, name, _facts
            )
    return lines


def _by_hand(observations: Sequence[Observation]) -> list[str]:
    """The backends without a Trainer's or an engine's counter, one line for those that behave alike."""
    counting = {one["backend"] for one in observations if {GLOBAL_STEP, ENGINE_STEPS} & one["steps_reported"].keys()}
    lines = []
    for alike in groups([seen for seen in observations if seen["backend"] not in counting]):
        cells = {name: by_backend(seen) for name, seen in alike.cells.items()}
        right = sum(seen["level"] == "detail" for seen in cells.values())
        rest = [
            escape(f"{with_number(seen, seen['verdict'])} in {name}")
            for name, seen in cells.items()
            if seen["level"] != "detail"
        ]
        names = ", ".join(map(_code, alike.backends))
        lines.append(f"- {names}: {'; '.join([f'right in {right} of {len(alike.cells)} scenarios', *rest])}.")
    return lines


def _map(observations: Sequence[Observation], name: str, path: str) -> dict[str, str]:
    """A picture with the verdicts that it shows."""
    shown = [seen for seen in observations if seen["scenario"]["name"] == name]
    verdicts = _by_text(shown, lambda seen: str(seen["verdict"]))
    return {
        "name": _code(name),
        "title": escape(shown[0]["scenario"]["title"] or name),
        "setting": escape(Scenario.from_dict(shown[0]["scenario"]).setting),
        "path": path,
        "verdicts": "; ".join(f"{escape(word)}: {_names(backends)}" for word, backends in verdicts.items()),
    }


def _diagnoses(observations: Sequence[Observation], backend: str) -> dict[str, Any]:
    own = [seen for seen in observations if seen["backend"] == backend]
    counts = Counter("right" if seen["level"] == "detail" else str(seen["level"]) for seen in own)
    summary = ", ".join(f"{counts[level]} {level}" for level in ("right", "note", "wrong") if counts[level])
    lines = [f"- {escape(s['scenario']['name'])}, {escape(s['verdict'])}: {escape(s['diagnosis'])}" for s in own]
    return {"summary": f"{html.escape(backend)}: {summary}", "lines": lines}


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


def _backends(observations: Iterable[Observation]) -> list[str]:
    """In order of appearance."""
    return list(dict.fromkeys(seen["backend"] for seen in observations))


def _names(backends: Sequence[str]) -> str:
    return some([_code(name) for name in backends])


def _code(name: str) -> str:
    """The name as code, unless it would break out of it."""
    return escape(name) if set(name) & set("`|<\n") else f"`{name}`"
