"""What ``steps`` says: the table of optimizer steps by rule, and the sentences below it.

``document`` has these keys:

- ``training``: the inputs, and what follows from them under every backend
  (bench.audit.training_plan.TrainingPlan);
- ``notes``: sentences that hold for all backends;
- ``naive``: ``optimizer_steps`` by the naive formula, and ``wrong``: a sentence, empty if no rule
  differs from it;
- ``rules``: one per rule that a chosen backend follows: its ``name``, ``stepping``, ``clears``,
  ``twice``, ``counted``, ``whole_windows``, ``carries`` and ``deals``
  (bench.audit.stepcount.StepRule), the ``backends`` that follow it, ``steps``
  (bench.audit.stepcount.Steps; null where the rule is unknown) and ``differences``: sentences.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from bench.audit.stepcount import StepRule, Steps, calculate, never_reached
from bench.audit.training_plan import TrainingPlan
from bench.backends.base import Backend
from bench.formatting import plural
from bench.plan.cell import Stepping
from bench.tabular import Table

FEW = 4
"""Backends that are named in a sentence; with more, only their rules are named."""
SHOWN = 6
"""Epochs whose steps the table lists; ``--json`` has all."""


class FollowedRule(NamedTuple):
    """What is said of a rule."""

    backends: list[str]
    """Those that follow it."""
    steps: Steps | None
    """None if they cannot be calculated."""


Rules: TypeAlias = Mapping[StepRule, FollowedRule]


def by_rule(
    training: TrainingPlan,
    backends: Mapping[str, type[Backend]],
    transformers: tuple[int, ...] | None = None,
) -> Rules:
    """The rules that the backends follow.

    Hugging Face's Trainer that of a version, or of the newest.
    """
    backends_of: dict[StepRule, list[str]] = {}
    for name, backend in backends.items():
        rule = StepRule.of_backend(backend).of_trainer(transformers)
        backends_of.setdefault(rule, []).append(name)
    found = {}
    for rule, names in backends_of.items():
        found[rule] = FollowedRule(names, calculate(training, rule))
    return found


def document(training: TrainingPlan, rules: Rules) -> dict[str, Any]:
    """Everything as plain values for JSON."""
    steps_of: dict[StepRule, Steps | None] = {}
    rows = []
    for rule, (backends, steps) in rules.items():
        steps_of[rule] = steps
        row = {
            "name": rule_name(rule),
            **dataclasses.asdict(rule),
            "backends": backends,
            "steps": None,
            "differences": _differences(training, rule, steps),
        }
        if steps is not None:
            row["steps"] = steps.to_dict()
        rows.append(row)
    wrong = _why_naive_is_wrong(training, steps_of)
    return {
        "training": training.to_dict(),
        "notes": common_notes(training),
        "naive": {"optimizer_steps": training.naive_steps, "wrong": wrong},
        "rules": rows,
    }


def printed_lines(training: TrainingPlan, rules: Rules) -> Iterator[str]:
    """The headline, the table, the backends of each rule, and one line per sentence."""
    found = document(training, rules)
    yield _headline(training)
    yield ""
    naive = ("naive formula", str(training.naive_steps), *["-"] * (len(HEADER) - 2))
    rows = [table_row(rule, followed.steps) for rule, followed in rules.items()]
    yield Table.from_rows(HEADER, [naive, *rows], range(1, len(HEADER))).text()
    yield ""
    for row in found["rules"]:
        yield f"{row['name']}: {', '.join(row['backends'])}"
    sentences = list(_sentences(found))
    if sentences:
        yield ""
        yield from sentences


def _sentences(found: Mapping[str, Any]) -> Iterator[str]:
    """Each with its subject: all, the naive formula, or backends, or rules if these are many."""
    for note in found["notes"]:
        yield f"all: {note}"
    wrong = found["naive"]["wrong"]
    if wrong:
        yield f"naive: {wrong}"
    rules: dict[str, list[str]] = {}
    backends: dict[str, list[str]] = {}
    for row in found["rules"]:
        for text in row["differences"]:
            rules.setdefault(text, []).append(row["name"])
            backends.setdefault(text, []).extend(row["backends"])
    for text, names in backends.items():
        who = names
        if len(names) > FEW:
            who = rules[text]
        yield f"{', '.join(who)}: {text}"


def _headline(training: TrainingPlan) -> str:
    until = []
    if training.epochs is not None:
        until.append(plural(training.epochs, "epoch"))
    if training.max_steps is not None:
        until.append(f"max_steps {training.max_steps}")
    windows = (
        f"{plural(training.full_windows, 'window')} of {training.n} and "
        f"{training.partial_window} over; "
        f"effective batch {training.effective_batch}"
    )
    if training.accumulate[1:]:
        windows = (
            f"windows of {training.n}, then {', then '.join(map(str, training.accumulate[1:]))}"
        )
    per_epoch = plural(training.micro_batches_per_epoch, "micro-batch")
    return (
        f"{plural(training.samples, 'sample')} on {plural(training.world_size, 'rank')}: "
        f"{training.samples_per_rank} per rank and epoch = {per_epoch} of {training.batch_size} "
        "(the last has "
        f"{training.last_micro_batch}) = {windows}; until {' or '.join(until)}"
    )


def rule_name(rule: StepRule) -> str:
    """A rule in a few words."""
    if rule.whole_windows:
        return f"{rule.stepping} (whole windows)"
    if rule.stepping is not Stepping.SPLIT:
        name = str(rule.stepping)
        if not rule.counted:
            name += " (no counter)"
        return name
    words = []
    if rule.clears:
        words.append("clearing")
    if not rule.twice:
        words.append("divided once")
    if words:
        return f"split ({', '.join(words)})"
    return "split"


HEADER = (
    *("rule", "updates", "per epoch", "micro-batches", "epochs", "ends by", "scale"),
    *("used", "cleared", "left open", "dropped"),
)


def table_row(rule: StepRule, steps: Steps | None) -> tuple[str, ...]:
    """A row of the table, by HEADER."""
    if steps is None:
        return (rule_name(rule), "unknown", *["-"] * (len(HEADER) - 2))
    shown = ",".join(map(str, steps.steps_per_epoch[:SHOWN]))
    if len(steps.steps_per_epoch) > SHOWN:
        shown += "..."
    updates = str(steps.optimizer_steps)
    if steps.stops == "never":
        updates += "+"
    scales = [f"{scale:.4g}" for scale in steps.update_scales]
    extremes = "-"
    if scales:
        extremes = "-".join(dict.fromkeys((scales[-1], scales[0])))
    return (
        rule_name(rule),
        updates,
        shown,
        str(steps.micro_batches_consumed),
        f"{steps.epochs_consumed:.4g}",
        str(steps.stops),
        extremes,
        *map(
            str,
            (
                steps.samples_used,
                steps.samples_lost_in_mid_run,
                steps.samples_left_open,
                steps.samples_dropped,
            ),
        ),
    )


def common_notes(training: TrainingPlan) -> list[str]:
    """What holds for every backend."""
    notes = []
    if padding := training.padding_per_epoch:
        fate = ", all of them among those that drop_last leaves out"
        if training.dropped_per_epoch == 0:
            fate = ""
        notes.append(
            f"DistributedSampler repeats {plural(padding, 'sample')} per epoch, so that all "
            f"ranks have as many{fate}"
        )
    by_sampler = max(0, training.samples - training.samples_per_rank * training.world_size)
    if by_sampler:
        notes.append(f"DistributedSampler leaves out {plural(by_sampler, 'sample')} in every epoch")
    if dropped := training.dropped_per_epoch - by_sampler:
        notes.append(
            f"drop_last leaves out {plural(dropped, 'sample')} in every epoch, the incomplete "
            "micro-batch of "
            f"{training.samples_per_rank % training.batch_size} on each rank; it never leaves "
            "out an incomplete window"
        )
    if training.last_micro_batch < training.batch_size:
        notes.append(
            f"the last micro-batch of an epoch has {training.last_micro_batch} of "
            f"{training.batch_size} samples and "
            "weighs like a full one where losses are means over the micro-batch: each of its "
            "samples counts "
            f"{training.batch_size / training.last_micro_batch:.4g} times as much"
        )
    return notes


def _why_naive_is_wrong(training: TrainingPlan, groups: Mapping[StepRule, Steps | None]) -> str:
    naive = training.naive_steps
    others = list(_other_steps(naive, groups))
    if not others:
        return ""
    reasons = []
    if training.max_steps == naive:
        expected = f"max_steps {naive} should give {plural(naive, 'update')}"
        reasons.append("a framework may count something else, or the epochs may end first")
    else:
        expected = (
            f"ceil({training.samples} / {training.effective_batch}) x {training.epochs} = {naive}"
        )
        if training.accumulate[1:]:
            expected = (
                f"ceil({training.samples} / effective batch), summed over the epochs, is {naive}"
            )
        is_short = any(rule.deals for rule in groups) and training.drop_last
        if training.dropped_per_epoch or is_short:
            reasons.append("it counts samples that drop_last leaves out")
        if training.limit_batches:
            reasons.append("it does not know the limit of micro-batches")
        if training.partial_window and any(_drops_partial(rule) for rule in groups):
            reasons.append("it counts every epoch's incomplete window as an update")
    return f"{expected}, but {'; '.join(others)}: {', and '.join(reasons)}"


def _other_steps(naive: int | None, groups: Mapping[StepRule, Steps | None]) -> Iterator[str]:
    """The rules that do not take the steps of the naive formula."""
    for rule, steps in groups.items():
        if steps is None:
            continue
        if steps.stops == "never":
            yield f"{rule_name(rule)} never ends"
        elif steps.optimizer_steps != naive:
            yield f"{rule_name(rule)} takes {steps.optimizer_steps}"


def _drops_partial(rule: StepRule) -> bool:
    """Whether an epoch's partial window is no update of its own."""
    return rule.stepping in ("carry", "cancel", "split") or rule.whole_windows


def _differences(training: TrainingPlan, rule: StepRule, steps: Steps | None) -> list[str]:
    """One sentence for each unexpected thing that a backend of this rule does."""
    if steps is None:
        why = {
            Stepping.UNKNOWN: "declares no rule",
            Stepping.SPLIT: "Lightning refuses an N by epoch where the strategy accumulates",
            Stepping.CANCEL: "has one N for the whole training",
            Stepping.OVERRIDE: "has one N for the whole training",
        }.get(rule.stepping, "a window may hold micro-batches of epochs with different N")
        return [f"{why}, so nothing is calculated; measure it with: python -m bench semantics"]
    return [
        *_about_windows(training, rule, steps),
        *_about_counters(training, rule, steps),
        *_about_loader(training, rule, steps),
        *_about_max_steps(training, rule, steps),
    ]


def _about_windows(training: TrainingPlan, rule: StepRule, steps: Steps) -> list[str]:
    """What becomes of the last window of an epoch."""
    n, over = training.n, training.partial_window
    if training.accumulate[1:]:
        over = 0
    sentences: list[str] = []
    if rule.stepping is Stepping.FLUSH and training.accumulate[1:]:
        all_updates = plural(steps.optimizer_steps, "update")
        small = []
        for scale, count in steps.update_scales.items():
            if scale < 1:
                small.append(f"{count} of {all_updates} at {scale:.4g}")
        if small:
            text = "the loss of an incomplete last window of an epoch is still divided by N"
            sentences.append(f"{text}: {', '.join(small)} of the right one")
    elif rule.stepping is Stepping.FLUSH and over:
        tails = steps.micro_batches_consumed // training.micro_batches_per_epoch
        sentences.append(
            f"the last window of an epoch has {over} of {n} micro-batches, but its loss is still "
            f"divided by {n}: "
            f"{tails} of {plural(steps.optimizer_steps, 'update')} are {over / n:.4g} of the "
            "right one"
        )
    if rule.stepping in (Stepping.CARRY, Stepping.CANCEL) and over:
        sentences.append(
            f"the last {plural(over, 'micro-batch')} of an epoch start the first window of the "
            "next epoch"
        )
    return sentences


def _about_counters(training: TrainingPlan, rule: StepRule, steps: Steps) -> list[str]:
    """What frameworks count, what they divide by, and what they lose."""
    sentences, n, taken = [], training.n, steps.optimizer_steps
    others = []
    for name, count in steps.steps_reported.items():
        if count != taken:
            others.append(f"{name} says {count}")
    if others:
        sentences.append(f"{plural(taken, 'update')} taken, but {', and '.join(others)}")
    if rule.twice and n > 1 and steps.optimizer_steps:
        less = ""
        if steps.micro_batches_lost_in_mid_run:
            less = ", or less"
        sentences.append(
            f"trainer and engine both divide the loss by {n}: every update is 1/{n} of the right "
            f"one{less}"
        )
    if steps.micro_batches_lost_in_mid_run:
        sentences.append(
            f"{steps.micro_batches_lost_in_mid_run} of "
            f"{plural(steps.micro_batches_consumed, 'micro-batch')} "
            f"({steps.samples_lost_in_mid_run} samples over all ranks) are cleared in "
            "mid-window by Lightning's zero_grad"
        )
    if steps.micro_batches_left_open:
        rest = f"({plural(steps.samples_left_open, 'sample')} over all ranks)"
        happens = "are left in an open window at the end and reach no update"
        sentences.append(f"{plural(steps.micro_batches_left_open, 'micro-batch')} {rest} {happens}")
    return sentences


def _about_loader(training: TrainingPlan, rule: StepRule, steps: Steps) -> list[str]:
    """What Hugging Face's Trainer makes of the epochs and of drop_last."""
    sentences = []
    if rule.whole_windows and training.partial_window and training.max_steps is None:
        assert training.epochs is not None, "without max_steps only epochs end a training"
        each = max(training.full_windows, 1)
        whole = training.micro_batches_per_epoch * training.epochs
        left = plural(whole - steps.micro_batches_consumed, "micro-batch")
        sentences.append(
            f"transformers up to 4.51.3 ends after max(NB // N, 1) = {each} updates per epoch, "
            f"with {left} left"
        )
    together = training.batch_size * training.world_size
    each, rest = divmod(training.samples, together)
    if rule.deals and training.drop_last and rest:
        sentences.append(
            "accelerate deals whole micro-batches to the ranks in turn: drop_last leaves out "
            f"{rest} of "
            f"{plural(training.samples, 'sample')}, and each rank has {each} per epoch"
        )
    return sentences


def _about_max_steps(training: TrainingPlan, rule: StepRule, steps: Steps) -> list[str]:
    wanted = training.max_steps
    if wanted is None:
        return []
    if never_reached(training, rule):
        stays = (
            f"an epoch has {plural(training.micro_batches_per_epoch, 'micro-batch')}, fewer than "
            f"N = {training.n}, "
            f"so trainer.global_step stays 0 and max_steps {wanted} is never reached"
        )
        if training.epochs is None:
            wanted_end = (
                f"{plural(steps.micro_batches_consumed, 'micro-batch')}, with "
                f"{plural(wanted, 'update')} made"
            )
            return [f"{stays}: training never ends; it should end after {wanted_end}"]
        return [f"{stays}: the epochs end it, with {plural(steps.optimizer_steps, 'update')} taken"]
    if steps.stops == "epochs":
        return [
            f"the epochs end it before max_steps {wanted}, with "
            f"{plural(steps.optimizer_steps, 'update')} taken"
        ]
    beyond = steps.optimizer_steps - wanted
    if not beyond:
        return []
    return [
        f"max_steps {wanted} stops training {plural(beyond, 'update')} late, after "
        f"{steps.optimizer_steps}"
    ]
