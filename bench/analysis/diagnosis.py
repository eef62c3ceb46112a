"""What a reading means, in words: rules over coefficients, each with its numbers. Nothing is looked up by backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from bench.analysis.findings import RIGHT, Finding, Level, count_range, of, plural, uses, verdict
from bench.analysis.semantics import Reading, Update, Use
from bench.cell import Status
from bench.scenario import Fault, Reduction, Split

TOLERANCE = 1e-4
"""Relative. The decoder's coefficients are exact to fp32's 6e-8 each; the smallest wrong ones here are off by 1e-2."""


def observation(reading: Reading) -> dict[str, Any]:
    """The reading as plain JSON with its findings, the verdict in a word and the diagnosis in sentences."""
    found = findings(reading)
    chosen = verdict(found)
    return reading.to_dict() | {
        "verdict": chosen.word,
        "level": chosen.level.name.lower(),
        "findings": [{"word": f.word, "level": f.level.name.lower(), "text": f.text} for f in found],
        "diagnosis": "; ".join(f.text for f in found or [RIGHT]),
    }


def findings(reading: Reading) -> list[Finding]:
    """All that the rules find, the gravest first."""
    found = [finding for rule in RULES for finding in rule(reading)]
    return sorted(found, key=lambda finding: -finding.level)


def _failed(reading: Reading) -> Iterator[Finding]:
    if not reading.failure:
        return
    reason = " ".join(reading.failure["reason"].split())
    if reading.failure["status"] == Status.UNSUPPORTED:
        yield Finding("unsupported", reason, Level.NOTE)
    elif reading.stopped == "lost":
        yield Finding(str(reading.failure["status"]), f"the process group ended without a word: {reason}")
    elif not reading.num_micro_batches:
        yield Finding("refused", f"the framework refuses before the first micro-batch: {reason}", Level.NOTE)
    elif reading.first["faults"]:
        yield Finding("cannot go on", f"training cannot go on after the {reading.scenario.fault}: {reason}")
    else:
        yield Finding("crashed", f"training fails after {reading.num_micro_batches} micro-batches: {reason}")


def _never_stops(reading: Reading) -> Iterator[Finding]:
    if reading.stopped == "bound":
        counted = ", ".join(f"{name} = {value}" for name, value in reading.reported.items())
        yield Finding(
            "never stops",
            f"max_steps = {reading.scenario.max_steps} has not ended the training after {reading.num_micro_batches} "
            f"micro-batches and {len(reading.updates)} updates ({counted or 'nothing is counted'})",
        )


def _diverged(reading: Reading) -> Iterator[Finding]:
    if reading.diverged_at is not None:
        yield Finding("replicas differ", f"the ranks' parameters differ from update {reading.diverged_at} on")


def _divided_twice(reading: Reading) -> Iterator[Finding]:
    if not _all_divided_twice(reading):
        return
    n = max(reading.scenario.accumulate)
    text = f"the loss is divided by N = {n} twice: a micro-batch has a weight of 1/{n * n} in its update, not of 1/{n}"
    if reading.scenario.clip_norm:
        text += (
            f"; a gradient is clipped only if its norm is above {n} x {reading.scenario.clip_norm:g}, not above "
            f"{reading.scenario.clip_norm:g}: here no update is"
        )
    yield Finding("divided twice", text)


def _all_divided_twice(reading: Reading) -> bool:
    """Whether in every update a micro-batch has the factor 1/N^2, or 1/N of the right one if the window is not whole.

    Where losses are not means, sums are looked at instead.
    """
    n = [reading.scenario.accumulate_in(update.epochs[-1]) for update in reading.updates]
    if not n or max(n) == 1:
        return False
    if reading.scenario.reduction is Reduction.WINDOW:
        return all(_near(update.sum, 1 / m) for update, m in zip(reading.updates, n, strict=True))
    known = any(update.num_losses == m for update, m in zip(reading.updates, n, strict=True))
    return all(
        _near(factor, 1 / m**2) or (known and _near(factor, 1 / (m * update.num_losses)))
        for update, m in zip(reading.updates, n, strict=True)
        for factor in update.factors.values()
    )


def _too_early(reading: Reading) -> Iterator[Finding]:
    """Updates after fewer micro-batches than N, though no epoch ends there."""
    if reading.scenario.fault in {Fault.EXCEPTION, Fault.CHECKPOINT}:
        return
    epochs = [reading.first["fetches"][fetch]["epoch"] for fetch in reading.computed]
    early = []
    for update in reading.updates:
        around = epochs[update.behind - 1 : update.behind + 1]  # of its last micro-batch and of the one after it
        goes_on = len(around) == 2 and around[0] == around[1]
        if goes_on and 0 < update.num_losses < reading.scenario.accumulate_in(around[0]):
            early.append(update)
    if early:
        after, n = count_range(update.num_losses for update in early), max(reading.scenario.accumulate)
        yield Finding(
            "steps too early",
            f"{of(early, reading.updates)} come after {after} instead of N = {n} micro-batches, in mid-epoch",
        )


def _too_late(reading: Reading) -> Iterator[Finding]:
    n = max(reading.scenario.accumulate)
    late = [update for update in reading.updates if update.num_losses > n]
    if late and reading.scenario.fault not in {Fault.EXCEPTION, Fault.CHECKPOINT}:
        after = count_range(update.num_losses for update in late)
        yield Finding(
            "steps too late", f"{of(late, reading.updates)} come after {after} instead of N = {n} micro-batches"
        )


def _not_cleared(reading: Reading) -> Iterator[Finding]:
    seen: set[Use] = set()
    again: set[Use] = set()
    for update in reading.updates:
        again |= seen & update.coefficients.keys()
        seen |= update.coefficients.keys()
    if again:
        yield Finding("not cleared", f"{uses(list(again))} are in more than one update: gradients are not cleared")


def _last_only(reading: Reading) -> Iterator[Finding]:
    longer = [update for update in reading.updates if update.num_losses > 1]
    if longer and all(update.fetches == [reading.computed[update.behind - 1]] for update in longer):
        yield Finding(
            "last only", f"only the last of {count_range(u.num_losses for u in longer)} micro-batches is in each update"
        )


def _lost(reading: Reading) -> Iterator[Finding]:
    if not reading.lost or reading.scenario.fault is Fault.ZERO_GRAD:
        return
    level = Level.WRONG
    where = "though updates followed"
    if reading.scenario.fault is Fault.EXCEPTION:
        level, where = Level.DETAIL, "which the exception cut off"
    elif reading.scenario.fault is Fault.CHECKPOINT:
        where = "which the checkpoint does not hold"
    yield Finding("lost", f"{uses(reading.lost)} reach no update, {where}", level)


def _cleared(reading: Reading) -> Iterator[Finding]:
    if reading.scenario.fault is not Fault.ZERO_GRAD or not reading.first["faults"] or not reading.updates:
        return
    before = set(reading.computed[: reading.first["faults"][0]])
    kept = before & {fetch for update in reading.updates for fetch in update.fetches}
    ratio = reading.updates[0].sum
    if kept:
        yield Finding("kept", "zero_grad does not clear what was accumulated before it", Level.NOTE)
    else:
        yield Finding(
            "cleared",
            f"zero_grad drops the {len(before)} micro-batches before it, and their share of the update with them: "
            f"its coefficients sum to {ratio:.3g}",
            Level.NOTE,
        )


def _mixed_epochs(reading: Reading) -> Iterator[Finding]:
    mixed = [update for update in reading.updates if len(update.epochs) > 1]
    if not mixed:
        return
    if reading.scenario.fault is not Fault.EXCEPTION:
        text = f"{of(mixed, reading.updates)} mix the end of one epoch with the beginning of the next"
        yield Finding("carried over", text, Level.NOTE)
        return
    total, wanted = mixed[0].sum, mixed[0].right_sum
    text = f"the gradient of the window that the exception cut off is in the next update, whose sum is {total:.3g}"
    if total > wanted * (1 + TOLERANCE):
        yield Finding("leaks", text)
    else:
        yield Finding("carried over", text, Level.NOTE)


def _too_small(reading: Reading) -> Iterator[Finding]:
    if _all_divided_twice(reading) or reading.scenario.fault is Fault.ZERO_GRAD:
        return
    small = [update for update in reading.updates if update.sum / update.right_sum < 1 - TOLERANCE]
    if small:
        yield Finding("under-weighted", f"{of(small, reading.updates)} are too small: {_reasons(reading, small)}")


def _reasons(reading: Reading, updates: list[Update]) -> str:
    """Why updates are too small: each kind once."""
    kinds = []
    for update in updates:
        n, ratio = reading.scenario.accumulate_in(update.epochs[-1]), update.sum / update.right_sum
        count = len(update.fetches)
        if all(_near(factor, 1 / n) for factor in update.factors.values()):
            kind = f"{plural(count, 'micro-batch', 'es')} divided by N = {n} make {ratio:.3g} of the right update"
        else:
            kind = f"{ratio:.3g} of the right update"
        if kind not in kinds:
            kinds.append(kind)
    return "; ".join(kinds)


def _too_large(reading: Reading) -> Iterator[Finding]:
    large = [update for update in reading.updates if update.sum / update.right_sum > 1 + TOLERANCE]
    if large:
        ratio = max(update.sum / update.right_sum for update in large)
        yield Finding(
            "over-weighted", f"{of(large, reading.updates)} are too large, up to {ratio:.3g} times the right one"
        )


def _uneven(reading: Reading) -> Iterator[Finding]:
    uneven = [update for update in reading.updates if update.distortion > 1 + TOLERANCE]
    if not uneven:
        return
    worst = max(update.distortion for update in uneven)
    why = (
        "a token's weight depends on how many its micro-batch has"
        if reading.scenario.token_weights
        else ("a sample's weight depends on how many its micro-batch has")
    )
    much = "without bound" if math.isinf(worst) else f"by up to {worst:.3g} times"
    yield Finding("mean of means", f"in {of(uneven, reading.updates)} {why}: it differs from the big batch's {much}")


def _left_open(reading: Reading) -> Iterator[Finding]:
    if reading.left_open and not reading.failure:
        limited = reading.scenario.max_steps is not None
        yield Finding(
            "left open",
            f"{uses(reading.left_open)} at the end of training reach no update",
            Level.DETAIL if limited else Level.NOTE,
        )


def _repeated(reading: Reading) -> Iterator[Finding]:
    if not reading.repeated:
        return
    if reading.scenario.fault is Fault.CHECKPOINT:
        yield Finding("repeated", f"{uses(reading.repeated)} are trained on twice: the loader begins anew")
    else:
        text = f"{uses(reading.repeated)} are padding: samples that another rank has had in the same epoch"
        yield Finding("padded", text, Level.DETAIL)


def _never_fetched(reading: Reading) -> Iterator[Finding]:
    missing = reading.num_never_fetched
    if missing <= 0 or reading.stopped != "ended":
        return
    by_loader = reading.scenario.drop_last and reading.scenario.fault is Fault.NONE
    if reading.scenario.fault is Fault.NONE:
        why = "dropped by the loader" if by_loader else "never asked for"
        level = Level.DETAIL if by_loader else Level.NOTE
        yield Finding("dropped", f"{plural(missing, 'sample')} of all epochs are {why}", level)
    else:
        yield Finding("skipped", f"{plural(missing, 'sample')} are never trained on")


def _limit(reading: Reading) -> Iterator[Finding]:
    limit, taken = reading.scenario.max_steps, len(reading.updates)
    if limit is None or reading.stopped != "ended" or taken == limit:
        return
    word = "stops late" if taken > limit else "stops early"
    if taken < limit and reading.scenario.epochs is not None:
        yield Finding(
            "epochs end first", f"the epochs end after {taken} updates, before max_steps = {limit}", Level.DETAIL
        )
        return
    text = f"max_steps = {limit} ends the training after {taken} updates and {reading.num_micro_batches} micro-batches"
    yield Finding(word, text)


def _counters(reading: Reading) -> Iterator[Finding]:
    """The framework's own counters against the updates that were seen."""
    if reading.failure:
        return
    taken = len(reading.updates)
    counters = ["trainer.global_step", "engine.global_steps"]
    if reading.scenario.fault in {Fault.NONE, Fault.ZERO_GRAD}:  # else there are two trainings, each with its own
        counters.append("lr_scheduler.last_epoch")
    wrong = [f"{name} = {reading.reported[name]}" for name in counters if reading.reported.get(name, taken) != taken]
    if wrong:
        yield Finding("miscounted", f"{', '.join(wrong)}, but there were {plural(taken, 'update')}")
    estimate = reading.reported.get("trainer.estimated_stepping_batches", taken)
    if estimate != taken and reading.scenario.fault is Fault.NONE and reading.scenario.max_steps is None:
        text = f"trainer.estimated_stepping_batches = {estimate}, but there were {plural(taken, 'update')}"
        yield Finding("misestimated", text, Level.NOTE)
    hooks = reading.reported.get("on_before_optimizer_step", taken)
    if hooks > taken and reading.scenario.fault in {Fault.NONE, Fault.ZERO_GRAD}:
        yield Finding(
            "hooks too often", f"on_before_optimizer_step was called {hooks} times for {taken} updates", Level.NOTE
        )


def _empty_steps(reading: Reading) -> Iterator[Finding]:
    if reading.num_empty_steps:
        yield Finding(
            "empty step",
            f"{reading.num_empty_steps} steps of the inner optimizer changed nothing",
            Level.DETAIL if reading.scenario.fault is Fault.CHECKPOINT else Level.WRONG,
        )


def _reordered(reading: Reading) -> Iterator[Finding]:
    scenario = reading.scenario
    if scenario.split is not Split.FRAMEWORK:
        return
    expected = -1
    for use in sorted(reading.uses.values(), key=lambda use: (use.epoch, use.fetch)):
        if use.sample // (scenario.batch_size * scenario.world_size) != use.fetch % scenario.micro_batches:
            expected = use.fetch
            break
    if expected >= 0:
        yield Finding(
            "shuffled",
            "the framework shuffles the samples when it splits them, though the loader was in order",
            Level.NOTE,
        )


RULES: tuple[Callable[[Reading], Iterator[Finding]], ...] = (
    _failed,
    _never_stops,
    _diverged,
    _divided_twice,
    _last_only,
    _too_early,
    _not_cleared,
    _mixed_epochs,
    _lost,
    _cleared,
    _too_small,
    _too_large,
    _too_late,
    _uneven,
    _limit,
    _counters,
    _repeated,
    _left_open,
    _never_fetched,
    _empty_steps,
    _reordered,
)
"""In the order in which findings of one level are told."""


def _near(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=TOLERANCE)
