"""What a reading means, in words: rules over coefficients, each with its numbers. Nothing is looked up by backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from bench.audit.findings import RIGHT, Diagnosis, Gravity, agreeing, count_range, micro_batches, of, uses, verdict
from bench.audit.reading import Reading, ReadUpdate, Use
from bench.audit.scenario import Fault, Reduction, Split
from bench.plan.cell import Status
from bench.words import plural

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


def findings(reading: Reading) -> list[Diagnosis]:
    """All that the rules find, the gravest first."""
    found = [finding for rule in RULES for finding in rule(reading)]
    return sorted(found, key=lambda finding: -finding.level)


def _failed(reading: Reading) -> Iterator[Diagnosis]:
    if not reading.failure:
        return
    reason = " ".join(reading.failure["reason"].split())
    if reading.failure["status"] == Status.UNSUPPORTED:
        yield Diagnosis("unsupported", reason, Gravity.NOTE)
    elif reading.stopped == "lost":
        yield Diagnosis(str(reading.failure["status"]), f"no rank came to the end of the scenario: {reason}")
    elif not reading.num_micro_batches:
        yield Diagnosis("refused", f"the framework refuses before the first micro-batch: {reason}", Gravity.NOTE)
    elif reading.first["faults"]:
        yield Diagnosis("cannot go on", f"training cannot go on after the {reading.scenario.fault}: {reason}")
    else:
        yield Diagnosis("crashed", f"training fails after {micro_batches(reading.num_micro_batches)}: {reason}")


def _never_stops(reading: Reading) -> Iterator[Diagnosis]:
    if reading.stopped == "bound":
        counted = ", ".join(f"{name} = {value}" for name, value in reading.reported.items())
        yield Diagnosis(
            "never stops",
            f"max_steps = {reading.scenario.max_steps} has not ended the training after "
            f"{micro_batches(reading.num_micro_batches)} and {plural(len(reading.updates), 'update')} "
            f"({counted or 'nothing is counted'})",
        )


def _diverged(reading: Reading) -> Iterator[Diagnosis]:
    if reading.diverged_at is not None:
        yield Diagnosis("replicas differ", f"the ranks' parameters differ from update {reading.diverged_at} on")


def _divided_twice(reading: Reading) -> Iterator[Diagnosis]:
    if not _all_divided_twice(reading):
        return
    n, world_size = max(reading.scenario.accumulate), reading.scenario.world_size
    text = f"the loss is divided by N = {n} twice: a micro-batch has a weight of 1/{n * n} in its update, not of 1/{n}"
    if n == world_size:
        text += f" (or by the number of ranks, {n} too)"
    if reading.scenario.clip_norm:
        text += (
            f"; a gradient is clipped only if its norm is above {n} x {reading.scenario.clip_norm:g}, not above "
            f"{reading.scenario.clip_norm:g}: here no update is"
        )
    yield Diagnosis("divided twice", text)


def _all_divided_twice(reading: Reading) -> bool:
    """Whether in every update a micro-batch has the factor 1/N^2, or 1/N of the right one if the window is not whole.

    Where losses are not means, sums are looked at instead. A gradient at the limit of clipping tells nothing.
    """
    pairs = [(update, reading.scenario.accumulate_in(update.epochs[-1])) for update in reading.updates]
    if not pairs or max(n for _, n in pairs) == 1 or any(_is_clipped(update) for update, _ in pairs):
        return False
    known = any(update.num_losses == n for update, n in pairs)
    if reading.scenario.reduction is Reduction.WINDOW:
        return known and all(_near(update.sum, 1 / n) for update, n in pairs)
    return all(
        _near(factor, 1 / n**2) or (known and _near(factor, 1 / (n * update.num_losses)))
        for update, n in pairs
        for factor in update.factors.values()
    )


def _is_clipped(update: ReadUpdate) -> bool:
    """Whether the update's norm is the limit."""
    norm = math.sqrt(math.fsum(coefficient**2 for coefficient in update.coefficients.values()))
    return bool(update.clip_norm) and _near(norm, update.clip_norm)


def _no_update(reading: Reading) -> Iterator[Diagnosis]:
    if not reading.updates and reading.num_micro_batches and not reading.failure:
        yield Diagnosis("no update", f"{micro_batches(reading.num_micro_batches, 'make')} no update at all")


def _no_fault(reading: Reading) -> Iterator[Diagnosis]:
    if reading.scenario.fault is not Fault.NONE and not reading.first["faults"] and not reading.failure:
        yield Diagnosis("no fault", f"training ended before the {reading.scenario.fault} could happen", Gravity.NOTE)


def _too_early(reading: Reading) -> Iterator[Diagnosis]:
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
        after, n = count_range(u.num_losses for u in early), count_range(_n(reading, u) for u in early)
        yield Diagnosis(
            "steps too early",
            f"{of(early, reading.updates, 'come')} after {after} instead of N = {n} micro-batches, in mid-epoch",
        )


def _too_late(reading: Reading) -> Iterator[Diagnosis]:
    if reading.scenario.fault in {Fault.EXCEPTION, Fault.CHECKPOINT}:
        return
    late = [update for update in reading.updates if update.num_losses > _n(reading, update)]
    if late:
        after, n = count_range(u.num_losses for u in late), count_range(_n(reading, u) for u in late)
        yield Diagnosis(
            "steps too late", f"{of(late, reading.updates, 'come')} after {after} instead of N = {n} micro-batches"
        )


def _n(reading: Reading, update: ReadUpdate) -> int:
    """N of the epoch in which an update's last micro-batch lies."""
    if not update.num_losses:
        return max(reading.scenario.accumulate)
    return reading.scenario.accumulate_in(reading.first["fetches"][reading.computed[update.behind - 1]]["epoch"])


def _not_cleared(reading: Reading) -> Iterator[Diagnosis]:
    seen: set[Use] = set()
    again: set[Use] = set()
    for update in reading.updates:
        again |= seen & update.coefficients.keys()
        seen |= update.coefficients.keys()
    if again:
        yield Diagnosis("not cleared", f"{uses(list(again), 'are')} in more than one update: gradients are not cleared")


def _last_only(reading: Reading) -> Iterator[Diagnosis]:
    longer = [update for update in reading.updates if update.num_losses > 1]
    if longer and all(update.fetches == [reading.computed[update.behind - 1]] for update in longer):
        yield Diagnosis(
            "last only", f"only the last of {count_range(u.num_losses for u in longer)} micro-batches is in each update"
        )


def _lost(reading: Reading) -> Iterator[Diagnosis]:
    if not reading.lost or reading.scenario.fault is Fault.ZERO_GRAD:
        return
    level = Gravity.WRONG
    where = "though updates followed"
    if reading.scenario.fault is Fault.EXCEPTION:
        level, where = Gravity.DETAIL, "which the exception cut off"
    elif reading.scenario.fault is Fault.CHECKPOINT:
        where = "which the checkpoint does not hold"
    yield Diagnosis("lost", f"{uses(reading.lost, 'reach')} no update, {where}", level)


def _cleared(reading: Reading) -> Iterator[Diagnosis]:
    if reading.scenario.fault is not Fault.ZERO_GRAD or not reading.first["faults"] or reading.failure:
        return
    at = reading.first["faults"][0]
    opened = max((update.behind for update in reading.all_updates if update.behind <= at), default=0)
    before = set(reading.computed[opened:at])
    kept = before & {fetch for update in reading.updates for fetch in update.fetches}
    if not before:
        yield Diagnosis("nothing open", "zero_grad finds nothing to clear: no window is open", Gravity.DETAIL)
    elif kept:
        yield Diagnosis("kept", "zero_grad does not clear what was accumulated before it", Gravity.NOTE)
    elif closing := _closing(reading):
        yield Diagnosis(
            "cleared",
            f"zero_grad drops {micro_batches(len(before))} before it, and their share of the update with "
            f"them: its sum is {closing.sum:.3g}",
        )


def _closing(reading: Reading) -> ReadUpdate | None:
    """The update of the window in which the scenario clears gradients."""
    if reading.scenario.fault is not Fault.ZERO_GRAD or not reading.first["faults"]:
        return None
    return next((update for update in reading.updates if update.behind > reading.first["faults"][0]), None)


def _mixed_epochs(reading: Reading) -> Iterator[Diagnosis]:
    mixed = [update for update in reading.updates if len(update.epochs) > 1]
    if not mixed:
        return
    if reading.scenario.fault is not Fault.EXCEPTION:
        text = f"{of(mixed, reading.updates, 'mix')} the end of one epoch with the beginning of the next"
        yield Diagnosis("carried over", text, Gravity.NOTE)
        return
    total, wanted = mixed[0].sum, mixed[0].right_sum
    text = f"the gradient of the window that the exception cut off is in the next update, whose sum is {total:.3g}"
    if total > wanted * (1 + TOLERANCE):
        yield Diagnosis("leaks", text)
    else:
        yield Diagnosis("carried over", text, Gravity.NOTE)


def _too_small(reading: Reading) -> Iterator[Diagnosis]:
    if _all_divided_twice(reading):
        return
    closing = _closing(reading)
    small = [u for u in reading.updates if u is not closing and u.sum / u.right_sum < 1 - TOLERANCE]
    if small:
        yield Diagnosis("under-weighted", f"{of(small, reading.updates, 'are')} too small: {_reasons(reading, small)}")


def _reasons(reading: Reading, updates: list[ReadUpdate]) -> str:
    """Why updates are too small: each kind once."""
    kinds = []
    for update in updates:
        n, ratio = reading.scenario.accumulate_in(update.epochs[-1]), update.sum / update.right_sum
        count = len(update.fetches)
        if all(_near(factor, 1 / n) for factor in update.factors.values()):
            makes = agreeing(count, "make")
            kind = f"{micro_batches(count)} divided by N = {n} {makes} {ratio:.3g} of the right update"
        else:
            kind = f"{ratio:.3g} of the right update"
        if kind not in kinds:
            kinds.append(kind)
    return "; ".join(kinds)


def _too_large(reading: Reading) -> Iterator[Diagnosis]:
    large = [update for update in reading.updates if update.sum / update.right_sum > 1 + TOLERANCE]
    if large:
        ratio = max(update.sum / update.right_sum for update in large)
        yield Diagnosis(
            "over-weighted", f"{of(large, reading.updates, 'are')} too large, up to {ratio:.3g} times the right one"
        )


def _uneven(reading: Reading) -> Iterator[Diagnosis]:
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
    yield Diagnosis("mean of means", f"in {of(uneven, reading.updates)} {why}: it differs from the big batch's {much}")


def _left_open(reading: Reading) -> Iterator[Diagnosis]:
    if reading.left_open and not reading.failure:
        limited = reading.scenario.max_steps is not None
        yield Diagnosis(
            "left open",
            f"{uses(reading.left_open, 'reach', 'at the end of training')} no update",
            Gravity.DETAIL if limited else Gravity.NOTE,
        )


def _repeated(reading: Reading) -> Iterator[Diagnosis]:
    padding = min(len(reading.repeated), reading.num_padding)
    if again := reading.repeated[padding:]:
        yield Diagnosis("repeated", f"{uses(again, 'are')} trained on twice: the loader begins anew")
    if padding:
        yield Diagnosis(
            "padded", f"{plural(padding, 'sample')} of padding: another rank has had it too", Gravity.DETAIL
        )


def _never_fetched(reading: Reading) -> Iterator[Diagnosis]:
    if reading.stopped != "ended":
        return
    dropped = min(reading.num_never_fetched, reading.num_dropped)
    if dropped:
        yield Diagnosis("dropped", f"{plural(dropped, 'sample')} of all epochs left out by drop_last", Gravity.DETAIL)
    if missing := reading.num_never_fetched - dropped:
        level = Gravity.NOTE if reading.scenario.fault is Fault.NONE else Gravity.WRONG
        yield Diagnosis("skipped", f"{plural(missing, 'sample')} of all epochs never trained on", level)


def _limit(reading: Reading) -> Iterator[Diagnosis]:
    limit, taken = reading.scenario.max_steps, len(reading.updates)
    if limit is None or reading.stopped != "ended" or taken == limit:
        return
    word = "stops late" if taken > limit else "stops early"
    epochs = reading.scenario.epochs
    if taken < limit and epochs and reading.num_micro_batches >= epochs * reading.scenario.micro_batches:
        text = f"the epochs end after {plural(taken, 'update')}, before max_steps = {limit}"
        yield Diagnosis("epochs end first", text, Gravity.DETAIL)
        return
    after = f"{plural(taken, 'update')} and {micro_batches(reading.num_micro_batches)}"
    text = f"max_steps = {limit} ends the training after {after}"
    yield Diagnosis(word, text)


def _counters(reading: Reading) -> Iterator[Diagnosis]:
    """The framework's own counters against the updates that were seen."""
    if reading.failure:
        return
    taken = len(reading.updates)
    there = f"there {agreeing(taken, 'were')} {plural(taken, 'update')}"
    counters = ["trainer.global_step", "engine.global_steps"]
    if reading.scenario.fault in {Fault.NONE, Fault.ZERO_GRAD}:  # else there are two trainings, each with its own
        counters.append("lr_scheduler.last_epoch")
    wrong = [f"{name} = {reading.reported[name]}" for name in counters if reading.reported.get(name, taken) != taken]
    if wrong:
        yield Diagnosis("miscounted", f"{', '.join(wrong)}, but {there}")
    estimate = reading.reported.get("trainer.estimated_stepping_batches", taken)
    if estimate != taken and reading.scenario.fault is Fault.NONE and reading.scenario.max_steps is None:
        text = f"trainer.estimated_stepping_batches = {estimate}, but {there}"
        yield Diagnosis("misestimated", text, Gravity.NOTE)
    hooks = reading.reported.get("on_before_optimizer_step", taken)
    if hooks > taken and reading.scenario.fault in {Fault.NONE, Fault.ZERO_GRAD}:
        text = f"on_before_optimizer_step was called {hooks} times for {plural(taken, 'update')}"
        yield Diagnosis("hooks too often", text, Gravity.NOTE)


def _empty_steps(reading: Reading) -> Iterator[Diagnosis]:
    if reading.num_empty_steps:
        yield Diagnosis(
            "empty step",
            f"{plural(reading.num_empty_steps, 'step')} of the inner optimizer changed nothing",
            Gravity.DETAIL if reading.scenario.fault is Fault.CHECKPOINT else Gravity.WRONG,
        )


def _reordered(reading: Reading) -> Iterator[Diagnosis]:
    scenario = reading.scenario
    if scenario.split is not Split.FRAMEWORK:
        return
    fetched = [(use.rank, use.fetch % scenario.micro_batches, use.sample) for use in reading.uses.values()]
    offered = [scenario.offered(rank) for rank in range(scenario.world_size)]
    if any(sample not in offered[rank][number] for rank, number, sample in fetched):
        text = "the framework shuffles the samples when it splits them, though the loader was in order"
        yield Diagnosis("shuffled", text, Gravity.NOTE)


RULES: tuple[Callable[[Reading], Iterator[Diagnosis]], ...] = (
    _failed,
    _never_stops,
    _diverged,
    _no_update,
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
    _no_fault,
)
"""In the order in which findings of one level are told."""


def _near(value: float, wanted: float) -> bool:
    return math.isclose(value, wanted, rel_tol=TOLERANCE)
