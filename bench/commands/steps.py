"""``bench steps``: how many optimizer steps a training takes, by the usual formula and by each backend's rule.

With ``--json`` one object:

- ``training``: the inputs, and what follows from them under every backend (bench.audit.training.TrainingPlan);
- ``notes``: sentences that hold for all backends;
- ``naive``: ``optimizer_steps`` by the naive formula, and ``wrong``: a sentence, empty if no rule differs from it;
- ``rules``: one per rule that a chosen backend follows: its ``name``, ``stepping``, ``clears``, ``twice``
  (bench.audit.stepcount.StepRule), the ``backends`` that follow it, ``steps`` (bench.audit.stepcount.Steps; null where
  the rule is unknown) and ``differences``: sentences.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bench.commands.options import backend_names
from bench.errors import GOOD, InputError, suggest
from bench.words import plural

if TYPE_CHECKING:
    from bench.audit.stepcount import StepRule, Steps
    from bench.audit.training import TrainingPlan
    from bench.backends.base import Backend


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "steps",
        help="calculate how many optimizer steps each backend takes in a training; trains nothing",
        description="Calculate the optimizer steps of a training, by the naive formula and by each backend's rule.",
    )
    option = parser.add_argument
    option("--samples", type=_integer, required=True, metavar="S", help="samples of the data set")
    option("--micro-batch", type=_integer, required=True, metavar="M", help="samples per micro-batch on a rank")
    option(
        "--accumulate",
        type=_integers,
        default=(1,),
        metavar="N[,N]",
        help="micro-batches per window; a list is one N per epoch (default: 1)",
    )
    option("--world-size", type=_integer, default=1, metavar="W", help="ranks (default: 1)")
    option("--epochs", type=_integer, metavar="E", help="epochs (default: 1, or no limit with --max-steps)")
    option(
        "--max-steps", type=_integer, metavar="K", help="steps after which training stops, unless the epochs end before"
    )
    option("--drop-last", action="store_true", help="the loader drops an incomplete last micro-batch")
    option(
        "--sampler-drop-last", action="store_true", help="DistributedSampler drops samples instead of repeating some"
    )
    option("--limit-batches", type=_integer, metavar="B", help="micro-batches of an epoch, as limit_train_batches")
    option(
        "--backend",
        action="append",
        type=backend_names,
        metavar="B[,B]",
        help="only these, or module:Class for your own; see 'backends' (default: all)",
    )
    option("--json", action="store_true", help="one JSON object; its keys: see bench/commands/steps.py")
    parser.set_defaults(command=_steps)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not an integer") from None


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_integer(part) for part in text.split(","))


def _steps(arguments: argparse.Namespace) -> int:
    from bench.audit.stepcount import calculate
    from bench.audit.stepcount_text import HEADER, differences_in_words, notes_on, row_of, title_of
    from bench.audit.training import TrainingPlan
    from bench.backends.base import registry

    max_steps = None if arguments.max_steps == -1 else arguments.max_steps
    training = TrainingPlan(
        samples=arguments.samples,
        batch_size=arguments.micro_batch,
        accumulate=arguments.accumulate[0],
        accumulate_later=arguments.accumulate[1:],
        world_size=arguments.world_size,
        epochs=1 if arguments.epochs is None and max_steps is None else arguments.epochs,
        max_steps=max_steps,
        drop_last=arguments.drop_last,
        sampler_drop_last=arguments.sampler_drop_last,
        limit_batches=arguments.limit_batches,
    )
    asked = [name for part in arguments.backend or [["all"]] for name in part]
    chosen = _chosen(asked, registry(asked))
    groups = {rule: (backends, calculate(training, rule)) for rule, backends in _by_rule(chosen).items()}
    wrong = _wrong(training, {rule: steps for rule, (_, steps) in groups.items()})
    rows = [
        {
            "name": title_of(rule),
            **dataclasses.asdict(rule),
            "backends": backends,
            "steps": steps and steps.to_dict(),
            "differences": _differences(training, rule, steps),
        }
        for rule, (backends, steps) in groups.items()
    ]
    if arguments.json:
        naive = {"optimizer_steps": training.naive_steps, "wrong": wrong}
        print(json.dumps({"training": training.to_dict(), "notes": notes_on(training), "naive": naive, "rules": rows}))
        return GOOD
    print(_headline(training) + "\n")
    _print_table([HEADER, _naive_row(training), *(row_of(rule, steps) for rule, (_, steps) in groups.items())])
    print()
    for row in rows:
        print(f"{row['name']}: {', '.join(row['backends'])}")
    for line in differences_in_words(training, wrong, rows):
        print(line)
    return GOOD


def _chosen(asked: Sequence[str], known: Mapping[str, type[Backend]]) -> dict[str, type[Backend]]:
    """The backends that ``--backend`` names, in the registry's order."""
    if asked == ["all"]:
        return dict(known)
    if not asked:
        raise InputError("--backend: no name is given; it must be 'all' or a list of backend names")
    for name in asked:
        if name not in known:
            raise InputError(f"--backend: '{name}' is unknown; {suggest(name, known)}")
    return {name: backend for name, backend in known.items() if name in asked}


def _by_rule(backends: Mapping[str, type[Backend]]) -> dict[StepRule, list[str]]:
    """The backends that follow each rule."""
    from bench.audit.stepcount import StepRule

    groups: dict[StepRule, list[str]] = {}
    for name, backend in backends.items():
        # Lightning's backends may multiply the loss by N, which undoes one of the two divisions.
        divides_once = getattr(backend, "loss_factor", "") == "N"
        rule = StepRule.of(backend.stepping, backend.sharding, divides_once=divides_once)
        groups.setdefault(rule, []).append(name)
    return groups


def _naive_row(training: TrainingPlan) -> tuple[str, ...]:
    from bench.audit.stepcount_text import HEADER

    return ("naive formula", str(training.naive_steps), *["-"] * (len(HEADER) - 2))


def _print_table(rows: list[tuple[str, ...]]) -> None:
    from bench.audit.stepcount_text import HEADER

    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    for row in rows:
        first, *others = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        print("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())


def _headline(training: TrainingPlan) -> str:
    until = [] if training.epochs is None else [plural(training.epochs, "epoch")]
    until += [] if training.max_steps is None else [f"max_steps {training.max_steps}"]
    windows = (
        f"{plural(training.full_windows, 'window')} of {training.accumulate} and {training.partial_window} over; "
        f"effective batch {training.effective_batch}"
    )
    if training.accumulate_later:
        windows = f"windows of {training.accumulate}, then {', then '.join(map(str, training.accumulate_later))}"
    return (
        f"{plural(training.samples, 'sample')} on {plural(training.world_size, 'rank')}: "
        f"{training.samples_per_rank} per rank and epoch = {_micro_batches(training.micro_batches_per_epoch)} of "
        f"{training.batch_size} (the last has {training.last_micro_batch}) = {windows}; until {' or '.join(until)}"
    )


def _micro_batches(number: int) -> str:
    return plural(number, "micro-batch", "es")


def _wrong(training: TrainingPlan, groups: Mapping[StepRule, Steps | None]) -> str:
    """Why the naive formula is wrong, if a rule differs from it."""
    from bench.audit.stepcount_text import title_of

    naive = training.naive_steps
    others = [
        f"{title_of(rule)} {'never ends' if steps.stops == 'never' else f'takes {steps.optimizer_steps}'}"
        for rule, steps in groups.items()
        if steps is not None and (steps.optimizer_steps != naive or steps.stops == "never")
    ]
    if not others:
        return ""
    reasons = []
    if training.max_steps == naive:
        expected = f"max_steps {naive} should give {plural(naive, 'update')}"
        reasons.append("a framework may count something else, or the epochs may end first")
    else:
        expected = f"ceil({training.samples} / {training.effective_batch}) x {training.epochs} = {naive}"
        if training.accumulate_later:
            expected = f"ceil({training.samples} / effective batch), summed over the epochs, is {naive}"
        if training.dropped_per_epoch:
            reasons.append("it counts samples that drop_last leaves out")
        if training.limit_batches:
            reasons.append("it does not know the limit of micro-batches")
        if training.partial_window and any(rule.stepping in ("carry", "cancel", "split") for rule in groups):
            reasons.append("it counts every epoch's incomplete window as an update")
    return f"{expected}, but {'; '.join(others)}: {', and '.join(reasons)}"


def _differences(training: TrainingPlan, rule: StepRule, steps: Steps | None) -> list[str]:
    """One sentence for each unexpected thing that a backend of this rule does."""
    from bench.plan.cell import Stepping

    if steps is None:
        why = {
            Stepping.UNKNOWN: "declares no rule",
            Stepping.SPLIT: "Lightning refuses an N by epoch where the strategy accumulates",
            Stepping.CANCEL: "has one N for the whole training",
        }.get(rule.stepping, "a window may hold micro-batches of epochs with different N")
        return [f"{why}, so nothing is calculated; measure it with: python -m bench semantics"]
    n, over = training.accumulate, 0 if training.accumulate_later else training.partial_window
    say: list[str] = []
    if rule.stepping is Stepping.FLUSH and training.accumulate_later:
        all_updates = plural(steps.optimizer_steps, "update")
        small = [
            f"{count} of {all_updates} at {scale:.4g}" for scale, count in steps.update_scales.items() if scale < 1
        ]
        if small:
            text = "the loss of an incomplete last window of an epoch is still divided by N"
            say.append(f"{text}: {', '.join(small)} of the right one")
    elif rule.stepping is Stepping.FLUSH and over:
        tails = steps.micro_batches_consumed // training.micro_batches_per_epoch
        say.append(
            f"the last window of an epoch has {over} of {n} micro-batches, but its loss is still divided by {n}: "
            f"{tails} of {plural(steps.optimizer_steps, 'update')} are {over / n:.4g} of the right one"
        )
    if rule.stepping in (Stepping.CARRY, Stepping.CANCEL) and over:
        say.append(f"the last {_micro_batches(over)} of an epoch start the first window of the next epoch")
    taken = steps.optimizer_steps
    if others := [f"{name} says {count}" for name, count in steps.steps_reported.items() if count != taken]:
        say.append(f"{plural(taken, 'update')} taken, but {', and '.join(others)}")
    if rule.twice and n > 1 and steps.optimizer_steps:
        less = ", or less" if steps.micro_batches_lost_in_mid_run else ""
        say.append(f"trainer and engine both divide the loss by {n}: every update is 1/{n} of the right one{less}")
    if steps.micro_batches_lost_in_mid_run:
        say.append(
            f"{steps.micro_batches_lost_in_mid_run} of {_micro_batches(steps.micro_batches_consumed)} "
            f"({steps.samples_lost_in_mid_run} samples over all ranks) are cleared in "
            "mid-window by Lightning's zero_grad"
        )
    if steps.micro_batches_left_open:
        say.append(
            f"{_micro_batches(steps.micro_batches_left_open)} ({plural(steps.samples_left_open, 'sample')} over all "
            "ranks) are left in an open window at the end and reach no update"
        )
    if training.epochs is not None and steps.equal_max_steps is None:
        say.append(f"no max_steps gives the same updates as {plural(training.epochs, 'epoch')}")
    return say + _about_max_steps(training, rule, steps)


def _about_max_steps(training: TrainingPlan, rule: StepRule, steps: Steps) -> list[str]:
    """Whether ``max_steps`` ends the training early, late or never."""
    from bench.audit.stepcount import reaches

    wanted = training.max_steps
    if wanted is None:
        return []
    if not training.accumulate_later and reaches(training, rule, wanted) is None:
        stays = (
            f"an epoch has {_micro_batches(training.micro_batches_per_epoch)}, fewer than N = {training.accumulate}, "
            f"so trainer.global_step stays 0 and max_steps {wanted} is never reached"
        )
        if training.epochs is None:
            return [
                f"{stays}: training never ends; it should end after {_micro_batches(steps.micro_batches_consumed)}, "
                f"with {plural(wanted, 'update')} made"
            ]
        return [f"{stays}: the epochs end it, with {plural(steps.optimizer_steps, 'update')} taken"]
    if steps.stops == "epochs":
        return [f"the epochs end it before max_steps {wanted}, with {plural(steps.optimizer_steps, 'update')} taken"]
    beyond = steps.optimizer_steps - wanted
    if not beyond:
        return []
    return [f"max_steps {wanted} stops training {plural(beyond, 'update')} late, after {steps.optimizer_steps}"]
