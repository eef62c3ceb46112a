"""The page on what each backend computes. Every sentence with a backend in it is made from the observations."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.audit.conformance import Observation, escape, groups, markdown, number, scenarios
from bench.audit.grids import group
from bench.audit.scenario import Fault, Scenario
from bench.words import plural

GLOBAL_STEP, ENGINE_STEPS, HOOK = "trainer.global_step", "engine.global_steps", "on_before_optimizer_step"
STRATEGY = "strategy.optimizer_step"
NOT_STEPS = frozenset({"trainer.estimated_stepping_batches", HOOK, STRATEGY})
CONFORMANCE = "conformance"
"""The name of the table's picture among the images; all others are named by their scenario."""
UNSEEN = frozenset({"hooks too often", "miscounted", "misestimated", "empty step", "replicas differ", "cannot go on"})
"""Findings that a weight map does not show."""
GRAVITY = {"detail": 0, "note": 1, "wrong": 2}
MOST_NAMES = 4
"""Backends that are named where the same is to be said of them; the others are counted."""
TOLERANCE = 1e-3
INTRODUCTION = (
    "Each backend trains a model with one weight per use of a sample, by SGD with learning rate 1. What an update "
    "changes is then, for each sample, the coefficient of its gradient; right is what one big batch of the window's "
    "samples gives, so that the coefficients of an update sum to 1. A note is an update that is right for some batch, "
    "perhaps not for the one that was meant."
)


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

    ``images`` has relative paths of pictures by scenario, shown in this order, and perhaps one of the table under
    ``conformance``; ``about`` what was run where (versions, machine), by name; ``throughput`` the relative path of the
    page on ThroughputMonitor, if there is one, and ``throughput_findings`` what it says first, in Markdown.
    """
    facts = ", ".join(f"{escape(name)} {escape(value)}" for name, value in about.items())
    lines = ["# What each backend computes", "", f"Written by `{command}`{f' with {facts}' if facts else ''}.", ""]
    lines += [INTRODUCTION, "", _headline(observations), "", markdown(observations)]
    if CONFORMANCE in images:
        lines += [f"The same [as a picture]({images[CONFORMANCE]}).", ""]
    for title, section in (
        ("Lightning with DeepSpeed", _lightning_deepspeed(observations)),
        ("max_steps and drop_last", _ends(observations)),
        ("ThroughputMonitor", _throughput(throughput, throughput_findings)),
        ("Loops written by hand", _by_hand(observations)),
    ):
        if section:
            lines += [f"## {escape(title)}", "", *section, ""]
    lines += _maps(observations, images)
    lines += ["## Every diagnosis", "", *_diagnoses(observations)]
    return "\n".join(lines).rstrip() + "\n"


def telling(observations: Sequence[Observation], count: int = 4) -> list[str]:
    """The scenarios, at most so many, whose weight maps together show the most kinds of findings.

    What is wrong counts twice as much as a note. Of equal ones that with more distinct maps, then the first.
    """
    words: dict[str, dict[str, int]] = {}
    distinct: dict[str, int] = {}
    for name in scenarios(observations):
        own = [seen for seen in observations if seen["scenario"]["name"] == name]
        shown = [finding for seen in own if seen["updates"] for finding in seen["findings"]]
        words[name] = {f["word"]: GRAVITY[f["level"]] for f in shown if f["word"] not in UNSEEN and GRAVITY[f["level"]]}
        distinct[name] = len(group(own))
    chosen: list[str] = []
    known: set[str] = set()

    def fresh(name: str) -> int:
        return sum(gravity for word, gravity in words[name].items() if word not in known)

    while words and len(chosen) < count:
        best = max(words, key=lambda name: (fresh(name), distinct[name]))
        if not fresh(best):
            break
        chosen.append(best)
        known |= words.pop(best).keys()
    return [name for name in scenarios(observations) if name in chosen]


def _headline(observations: Sequence[Observation]) -> str:
    """How many are right everywhere or nowhere wrong, in one line."""
    wrong = Counter(seen["backend"] for seen in observations if seen["level"] == "wrong")
    backends = _backends(observations)
    clean = [name for name in backends if not wrong[name]]
    least = min((wrong[name] for name in backends), default=0)
    best = clean or [name for name in backends if wrong[name] == least]
    count = len(scenarios(observations))
    words = "nothing is wrong" if clean else f"something is wrong in {least}, the fewest,"
    return f"Of {count} scenarios and {len(backends)} backends: {words} with {_names(best, len(best))}."


def _lightning_deepspeed(observations: Sequence[Observation]) -> list[str]:
    """How often the hook is called, how the loss is divided, what an epoch's end does, and what is clipped."""
    reported = {seen["backend"]: seen["steps_reported"].keys() for seen in reversed(observations) if seen["updates"]}
    both = [name for name in _backends(observations) if {GLOBAL_STEP, ENGINE_STEPS} <= reported.get(name, set())]
    if not both:
        return []
    ours = [seen for seen in observations if seen["backend"] in both]
    others = [seen for seen in observations if seen["backend"] not in both]
    lines = [f"These have the Trainer's counters and the engine's: {_names(both)}.", ""]
    lines += [f"- {text}" for text in (_hooks(ours, others), *_divisions(ours)) if text]
    uneven = [name for name, scenario in scenarios(observations).items() if _is_uneven(scenario)]
    for name in uneven[:1]:
        related = [seen for seen in others if {GLOBAL_STEP, ENGINE_STEPS} & seen["steps_reported"].keys()]
        lines += _behaviour(f"At the epoch's end, in {_code(name)}", [*ours, *related], name, _facts)
    for name, scenario in scenarios(observations).items():
        if scenario["clip_norm"]:
            lines += _behaviour(f"Clipped to norm {scenario['clip_norm']:g}, in {_code(name)}", ours, name, _clipping)
    return lines


def _hooks(ours: Sequence[Observation], others: Sequence[Observation]) -> str:
    """How often the strategy's step and the hook before it are called, against steps of the inner optimizer."""

    def plain(some: Sequence[Observation]) -> list[Observation]:
        return [
            s for s in some if STRATEGY in s["steps_reported"] and s["scenario"]["fault"] == Fault.NONE and s["updates"]
        ]

    def calls(seen: Observation) -> int:
        return int(seen["steps_reported"][STRATEGY])

    found = plain(ours)
    if not found:
        return ""
    example = max(found, key=lambda seen: calls(seen) / len(seen["updates"]))
    if all(calls(seen) == seen["micro_batches"] for seen in found):
        often = "in every micro-batch"
    elif all(calls(seen) == len(seen["updates"]) for seen in found):
        often = "once per update"
    else:
        often = "neither once per update nor in every micro-batch"
    text = (
        f"`{STRATEGY}` is called {often}: {plural(calls(example), 'time')} in "
        f"{_code(example['scenario']['name'])}, in which the inner optimizer steps "
        f"{plural(len(example['updates']), 'time')}."
    )
    if hooks := example["steps_reported"].get(HOOK):
        text += f" The hook `{HOOK}` is called {plural(hooks, 'time')} there."
    rest = plain(others)
    once = [
        name for name in _backends(rest) if all(calls(s) == len(s["updates"]) for s in rest if s["backend"] == name)
    ]
    return text + (f" With {_names(once)} it is called once per update." if once else "")


def _divisions(ours: Sequence[Observation]) -> list[str]:
    """Who divides the loss by N twice, with the purest example, and who does not."""
    twice = [seen for seen in ours if any(finding["word"] == "divided twice" for finding in seen["findings"])]
    texts = []
    if twice:
        pure = min(twice, key=lambda seen: len(seen["findings"]))
        update = pure["updates"][0]
        texts.append(
            f"The loss is divided by N twice with {_names(_backends(twice))}: in {_code(pure['scenario']['name'])}, "
            f"N = {max(pure['scenario']['accumulate'])}, the coefficients of an update sum to {update['sum']:.3g} "
            f"instead of {update['right_sum']:.3g}."
        )
        for text, who in _by_text(
            [s for s in ours if s["scenario"] == pure["scenario"] and s not in twice and s["updates"]],
            lambda seen: f"{seen['updates'][0]['sum']:.3g}",
        ).items():
            texts.append(f"Not with {_names(who)}: there they sum to {text}.")
    else:
        texts.append(f"The loss is divided by N twice with none of {_names(_backends(ours))}.")
    return texts


def _ends(observations: Sequence[Observation]) -> list[str]:
    """Which trainings end late or never, with the counters; then what drop_last leaves of the windows."""
    limited = {name: s for name, s in scenarios(observations).items() if s["max_steps"] is not None}
    lines: list[str] = []
    for text, word in (
        ("max_steps never ends the training", "never stops"),
        ("max_steps ends the training late", "stops late"),
        ("max_steps ends the training early", "stops early"),
    ):
        hit = [seen for seen in observations if any(finding["word"] == word for finding in seen["findings"])]
        where = [
            f"in {_code(name)} with {_names(who)}"
            for name in limited
            if (who := _backends(seen for seen in hit if seen["scenario"]["name"] == name))
        ]
        if where:
            lines.append(f"- {text} {'; '.join(where)}.")
    if limited:
        lines += ["", "<details><summary>Every backend's updates and counters under a limit</summary>", ""]
        lines += ["| scenario | max\\_steps | backends | updates | micro-batches per rank | counters |"]
        lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, scenario in limited.items():
        for row, backends in _by_text([s for s in observations if s["scenario"]["name"] == name], _end_row).items():
            lines.append(f"| {escape(name)} | {scenario['max_steps']} | {_names(backends)} | {row} |")
    lines += ["", "</details>", ""] if limited else [""]
    for name, scenario in scenarios(observations).items():
        if scenario["drop_last"]:
            lines += _behaviour(f"{_code(name)} ({escape(scenario['title'])})", observations, name, _facts)
    return lines if any(lines) else []


def _end_row(seen: Observation) -> str:
    ended = str(len(seen["updates"]))
    if seen["stopped"] != "ended":
        ended += ", not ended" if seen["stopped"] == "bound" else f", {escape(seen['verdict'])}"
    return f"{ended} | {seen['micro_batches']} | {_counters(seen)}"


def _by_hand(observations: Sequence[Observation]) -> list[str]:
    """Backends that count no steps themselves: one line for those that behave alike."""
    counting = {seen["backend"] for seen in observations if seen["steps_reported"]}
    lines = []
    for alike in groups([seen for seen in observations if seen["backend"] not in counting]):
        right = sum(seen["level"] == "detail" for seen in alike.cells.values())
        rest = [
            f"{seen['verdict']} {number(seen, seen['verdict'])}".rstrip() + f" in {name}"
            for name, seen in alike.cells.items()
            if seen["level"] != "detail"
        ]
        but = f"; {', '.join(map(escape, rest))}" if rest else ""
        lines.append(
            f"- {_names(alike.backends, len(alike.backends))}: right in {right} of {len(alike.cells)} scenarios{but}."
        )
    return lines


def _throughput(page: str, findings: Sequence[str]) -> list[str]:
    """What is known of ThroughputMonitor, and where."""
    if not page:
        return []
    found = [f"- {finding}" for finding in findings]
    return [f"Its samples/s under accumulation, over those that were trained ([every point]({page})):", "", *found]


def _maps(observations: Sequence[Observation], images: Mapping[str, str]) -> list[str]:
    """The pictures, each with what is seen in it."""
    lines: list[str] = []
    for name, path in images.items():
        shown = [seen for seen in observations if seen["scenario"]["name"] == name]
        if not shown:
            continue
        verdicts = _by_text(shown, lambda seen: str(seen["verdict"]))
        caption = "; ".join(f"{escape(word)}: {_names(who)}" for word, who in verdicts.items())
        title = shown[0]["scenario"]["title"] or name
        lines += [f"![{escape(title)}]({path})", "", f"{_code(name)}, {escape(title)}. {caption}.", ""]
    return ["## Weight maps", "", *lines] if lines else []


def _diagnoses(observations: Sequence[Observation]) -> list[str]:
    """All of them, folded by backend."""
    lines: list[str] = []
    for backend in _backends(observations):
        own = [seen for seen in observations if seen["backend"] == backend]
        counts = Counter("right" if seen["level"] == "detail" else str(seen["level"]) for seen in own)
        summary = ", ".join(f"{counts[level]} {level}" for level in ("right", "note", "wrong") if counts[level])
        lines += [f"<details><summary>{html.escape(backend)}: {summary}</summary>", ""]
        lines += [f"- {escape(s['scenario']['name'])}, {escape(s['verdict'])}: {escape(s['diagnosis'])}" for s in own]
        lines += ["", "</details>", ""]
    return lines


def _behaviour(
    title: str, observations: Sequence[Observation], scenario: str, describe: Callable[[Observation], str]
) -> list[str]:
    """A bullet for a scenario, and below it one for all backends of which the same is to be said."""
    texts = _by_text([seen for seen in observations if seen["scenario"]["name"] == scenario], describe)
    return [f"- {title}:", *(f"  - {_names(backends)}: {text}" for text, backends in texts.items() if text)]


def _by_text(observations: Iterable[Observation], describe: Callable[[Observation], str]) -> dict[str, list[str]]:
    """The backends by what is to be said of their observations."""
    found: dict[str, list[str]] = {}
    for seen in observations:
        found.setdefault(describe(seen), []).append(seen["backend"])
    return found


def _facts(seen: Observation) -> str:
    """Updates, windows over an epoch's end, wrong weights, samples in no update, and counters that disagree."""
    updates = seen["updates"]
    if not updates:
        return f"{escape(seen['verdict'])}, no update"
    parts = [plural(len(updates), "update")]
    crossing = sum(len(update["epochs"]) > 1 for update in updates)
    if crossing:
        parts.append(f"{crossing} of them over an epoch's end")
    ratios = [update["sum"] / update["right_sum"] for update in updates]
    if max(ratios) - min(ratios) > TOLERANCE:
        parts.append(f"of {min(ratios):.3g} to {max(ratios):.3g} of the right weight")
    else:
        parts.append(
            f"all of {'the right' if abs(ratios[0] - 1) < TOLERANCE else f'{ratios[0]:.3g} of the right'} weight"
        )
    for key, words in (
        ("samples_lost", "lost"),
        ("samples_left_open", "left open at the end"),
        ("samples_duplicated", "twice in an epoch"),
        ("samples_never_fetched", "never fetched"),
    ):
        if seen[key] > 0:
            parts.append(f"{plural(seen[key], 'sample')} {words}")
    steps = {
        name: seen["steps_reported"][name] for name in (GLOBAL_STEP, ENGINE_STEPS) if name in seen["steps_reported"]
    }
    if set(steps.values()) - {len(updates)}:
        parts.append(", ".join(f"{_code(name)} = {value}" for name, value in steps.items()))
    return ", ".join(parts)


def _clipping(seen: Observation) -> str:
    """What is left of an update that should have been clipped."""
    if not seen["updates"]:
        return f"{escape(seen['verdict'])}, no update"
    update = seen["updates"][0]
    right = abs(update["sum"] / update["right_sum"] - 1) < TOLERANCE
    text = f"the coefficients of an update sum to {update['sum']:.3g}"
    return f"{text}, as they should" if right else f"{text} instead of {update['right_sum']:.3g}"


def _is_uneven(values: Mapping[str, Any]) -> bool:
    """Whether the epochs' micro-batches are no multiple of N, and nothing else happens."""
    scenario = Scenario.from_dict(values)
    plain = scenario.fault is Fault.NONE and len(scenario.accumulate) == 1 and scenario.max_steps is None
    return plain and scenario.epochs != 1 and scenario.micro_batches % scenario.accumulate[0] != 0


def _counters(seen: Observation) -> str:
    """The framework's own counters of steps."""
    counters = {name: value for name, value in seen["steps_reported"].items() if name not in NOT_STEPS}
    return ", ".join(f"{_code(name)} = {value}" for name, value in counters.items()) or "none"


def _backends(observations: Iterable[Observation]) -> list[str]:
    """In the order in which they come."""
    return list(dict.fromkeys(seen["backend"] for seen in observations))


def _names(backends: Sequence[str], most: int = MOST_NAMES) -> str:
    """The backends in a sentence, with the number of those for which there is no room."""
    quoted = [_code(name) for name in backends]
    if len(quoted) > most:
        quoted = [*quoted[: most - 1], f"{len(quoted) - most + 1} more"]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _code(name: str) -> str:
    """A name as code, unless that would break out of it."""
    return escape(name) if set(name) & set("`|<\n") else f"`{name}`"
