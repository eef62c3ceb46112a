"""What a backend did wrong in a scenario: rules over decoded coefficients and counters, none of which knows a backend.

Each rule yields its findings as a word and a sentence with numbers; RULES has their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from bench.audit.decoded_scenario import DecodedScenario, DecodedUpdate, Use
from bench.audit.scenario import Fault, Split
from bench.audit.semantics_findings import (
    RIGHT,
    TOLERANCE,
    all_divided_twice,
    count_range,
    divided_twice,
    hidden_by_clipping,
    is_near,
    samples_text,
    share_of_updates,
    verdict,
)
from bench.findings import Finding, Level, error, good, note
from bench.formatting import plural
from bench.plan.cell import Status

STORED_LEVELS = {Level.ERROR: "wrong", Level.NOTE: "note", Level.GOOD: "detail"}
"""How files name the levels."""
STEP_COUNTERS = (
    *("trainer.global_step", "state.global_step", "engine.global_steps", "trainer.step", "lr_scheduler.last_epoch"),
)
"""Counters that should say how many updates were made; the last one is of the scheduler."""
RESTARTS = {Fault.EXCEPTION, Fault.CHECKPOINT}
"""Faults after which training is started again: windows end early there, and there are two sets of counters."""


def observation(decoded: DecodedScenario) -> dict[str, Any]:
    """The decoded as plain JSON with its findings, the verdict in a word, and the diagnosis in sentences."""
    found = findings(decoded)
    chosen = verdict(found)
    return decoded.to_dict() | {
        "verdict": chosen.topic,
        "level": STORED_LEVELS[chosen.level],
        "findings": [{"word": f.topic, "level": STORED_LEVELS[f.level], "text": f.text} for f in found],
        "diagnosis": "; ".join(f.text for f in found or [RIGHT]),
    }


def findings(decoded: DecodedScenario) -> list[Finding]:
    """Everything that the rules find, the gravest first."""
    found = [finding for rule in RULES for finding in rule(decoded)]
    return sorted(found, key=lambda finding: finding.level.rank)


def _outcome(decoded: DecodedScenario) -> Iterator[Finding]:
    """Whether training failed, never ended or made no update, and whether replicas diverged."""
    done, reported = plural(decoded.num_micro_batches, "micro-batch"), decoded.reported
    if decoded.failure:
        yield _failure(decoded.failure, decoded, done)
    if decoded.stopped == "bound":
        counters = ", ".join(f"{name} = {value}" for name, value in reported.items()) or "no counters"
        limit, updates = decoded.scenario.max_steps, plural(len(decoded.updates), "update")
        text = f"max_steps = {limit} had not stopped training after {done} and {updates} ({counters})"
        yield error("never stops", text)
    if decoded.diverged_at is not None:
        yield error("replicas differ", f"the ranks' parameters differ from update {decoded.diverged_at} on")
    if not decoded.updates and decoded.num_micro_batches and not decoded.failure:
        yield error("no update", f"{done} led to no update")
    if decoded.scenario.fault is not Fault.NONE and not decoded.first["faults"] and not decoded.failure:
        yield note("no fault", f"training ended before the {decoded.scenario.fault} could happen")


def _failure(failure: Mapping[str, Any], decoded: DecodedScenario, done: str) -> Finding:
    reason = " ".join(failure["reason"].split())
    if failure["status"] == Status.UNSUPPORTED:
        return note("unsupported", reason)
    if decoded.stopped == "lost":
        return error(str(failure["status"]), f"no rank finished the scenario: {reason}")
    if not decoded.num_micro_batches:
        return note("refused", f"the framework refused before the first micro-batch: {reason}")
    if decoded.first["faults"]:
        return error("cannot continue", f"training failed after the {decoded.scenario.fault}: {reason}")
    return error("crashed", f"training failed after {done}: {reason}")


def _too_early(decoded: DecodedScenario) -> Iterator[Finding]:
    if decoded.scenario.fault in RESTARTS:
        return
    epochs = [decoded.first["fetches"][fetch]["epoch"] for fetch in decoded.computed]
    early = []
    for update in decoded.updates:
        around = epochs[update.losses_before - 1 : update.losses_before + 1]  # of its last micro-batch and the next
        in_mid_epoch = len(around) == 2 and around[0] == around[1]
        if in_mid_epoch and 0 < update.num_losses < decoded.scenario.accumulate_in(around[0]):
            early.append(update)
    if early:
        yield error("steps too early", f"in mid-epoch, {_window_lengths(decoded, early)}")


def _too_late(decoded: DecodedScenario) -> Iterator[Finding]:
    if decoded.scenario.fault in RESTARTS:
        return
    if late := [update for update in decoded.updates if update.num_losses > _n(decoded, update)]:
        yield error("steps too late", _window_lengths(decoded, late))


def _window_lengths(decoded: DecodedScenario, updates: list[DecodedUpdate]) -> str:
    after, n = count_range(u.num_losses for u in updates), count_range(_n(decoded, u) for u in updates)
    return f"{share_of_updates(updates, decoded.updates)} came after {after} instead of N = {n} micro-batches"


def _n(decoded: DecodedScenario, update: DecodedUpdate) -> int:
    if not update.num_losses:
        return max(decoded.scenario.accumulate)
    return decoded.scenario.accumulate_in(decoded.closed_in(update))


def _not_cleared(decoded: DecodedScenario) -> Iterator[Finding]:
    seen: set[Use] = set()
    again: set[Use] = set()
    for update in decoded.updates:
        again |= seen & update.coefficients.keys()
        seen |= update.coefficients.keys()
    if again:
        yield error("not cleared", f"gradients were not cleared: {samples_text(list(again))} in more than one update")


def _last_only(decoded: DecodedScenario) -> Iterator[Finding]:
    longer = [update for update in decoded.updates if update.num_losses > 1]
    if longer and all(update.fetches == [decoded.computed[update.losses_before - 1]] for update in longer):
        lengths = count_range(update.num_losses for update in longer)
        yield error("last only", f"each update contains only the last of {lengths} micro-batches")


def _lost(decoded: DecodedScenario) -> Iterator[Finding]:
    if not decoded.lost or decoded.scenario.fault is Fault.ZERO_GRAD:
        return
    by_fault = [use for use in decoded.lost if use.fetch in decoded.interrupted and decoded.scenario.fault in RESTARTS]
    others = [use for use in decoded.lost if use not in by_fault]
    level, why = Level.ERROR, "since the checkpoint does not contain them"
    if decoded.scenario.fault is Fault.EXCEPTION:
        level, why = Level.GOOD, "since the exception discarded their window"
    if by_fault:
        yield Finding(level, "lost", f"{samples_text(by_fault)} reached no update, {why}")
    if others:
        yield error("lost", f"{samples_text(others)} reached no update, although updates followed")


def _cleared(decoded: DecodedScenario) -> Iterator[Finding]:
    if decoded.scenario.fault is not Fault.ZERO_GRAD or not decoded.first["faults"] or decoded.failure:
        return
    before = decoded.interrupted
    kept = before & {fetch for update in decoded.updates for fetch in update.fetches}
    if not before:
        yield good("nothing open", "zero_grad was called between two windows and cleared nothing")
    elif kept:
        yield note("kept", "zero_grad did not clear the gradients accumulated before it")
    elif rest := _rest_of_cleared_window(decoded):
        discarded = plural(len(before), "micro-batch")
        text = f"zero_grad discarded the {discarded} before it; the sum of the update is {rest.sum:.3g}"
        yield error("cleared", text)


def _rest_of_cleared_window(decoded: DecodedScenario) -> DecodedUpdate | None:
    if decoded.scenario.fault is not Fault.ZERO_GRAD or not decoded.first["faults"]:
        return None
    return next((update for update in decoded.updates if update.losses_before > decoded.first["faults"][0]), None)


def _mixed_epochs(decoded: DecodedScenario) -> Iterator[Finding]:
    mixed = [update for update in decoded.updates if len(update.epochs) > 1]
    aborted = [update for update in mixed if decoded.aborted_epoch in update.epochs[:-1]]
    if aborted:
        text = f"the next update, whose sum is {aborted[0].sum:.3g}, contains the window that the exception interrupted"
        leaks = aborted[0].ratio > 1 + TOLERANCE
        yield error("leaks", text) if leaks else note("carried over", text)
    if mixed := [update for update in mixed if update not in aborted]:
        text = f"{share_of_updates(mixed, decoded.updates)} mixed the end of one epoch with the start of the next"
        yield note("carried over", text)


def _wrong_sum(decoded: DecodedScenario) -> Iterator[Finding]:
    cleared = _rest_of_cleared_window(decoded)
    small = [update for update in decoded.updates if update is not cleared and update.ratio < 1 - TOLERANCE]
    if small and not all_divided_twice(decoded):
        reasons = dict.fromkeys(_why_small(decoded, update) for update in small)
        yield error(
            "under-weighted", f"{share_of_updates(small, decoded.updates)} came out too small: {'; '.join(reasons)}"
        )
    if large := [update for update in decoded.updates if update.ratio > 1 + TOLERANCE]:
        ratio = max(update.ratio for update in large)
        text = f"{share_of_updates(large, decoded.updates)} came out too large, up to {ratio:.3g} times the right one"
        yield error("over-weighted", text)


def _why_small(decoded: DecodedScenario, update: DecodedUpdate) -> str:
    n, size = decoded.scenario.accumulate_in(update.epochs[-1]), f"{update.ratio:.3g} of the right update"
    if all(is_near(factor, 1 / n) for factor in update.factors.values()):
        return f"{plural(len(update.fetches), 'micro-batch')} divided by N = {n} gave {size}"
    return size


def _mean_of_means(decoded: DecodedScenario) -> Iterator[Finding]:
    uneven = [update for update in decoded.updates if update.distortion > 1 + TOLERANCE]
    if not uneven:
        return
    worst = max(update.distortion for update in uneven)
    unit = "token" if decoded.scenario.token_weights else "sample"
    where = "its rank's window" if all(map(_is_even_on_ranks, uneven)) else "its micro-batch"
    much = "without bound" if math.isinf(worst) else f"by a factor of up to {worst:.3g}"
    text = (
        f"in {share_of_updates(uneven, decoded.updates)}, a {unit}'s weight depends on how many {unit}s {where} has, "
    )
    yield error("mean of means", f"{text}and differs from that in the full batch {much}")


def _is_even_on_ranks(update: DecodedUpdate) -> bool:
    """Whether the weights of an update are right within each rank, though its micro-batches differ in tokens."""
    ratios: dict[int, list[float]] = {}
    tokens: dict[tuple[int, int], int] = {}
    for use, coefficient in update.coefficients.items():
        ratios.setdefault(use.rank, []).append(coefficient / update.right[use])
        tokens[use.rank, use.fetch] = tokens.get((use.rank, use.fetch), 0) + use.tokens
    differ = {rank for rank in ratios if len({n for (of, _), n in tokens.items() if of == rank}) > 1}
    return bool(differ) and all(is_near(max(of_rank), min(of_rank)) for of_rank in ratios.values())


def _left_open(decoded: DecodedScenario) -> Iterator[Finding]:
    if decoded.left_open and not decoded.failure:
        level = Level.NOTE if decoded.scenario.max_steps is None else Level.GOOD
        yield Finding(level, "left open", f"{samples_text(decoded.left_open)} at the end of training reached no update")


def _repeated(decoded: DecodedScenario) -> Iterator[Finding]:
    padding = min(len(decoded.repeated), decoded.num_padding)
    if again := decoded.repeated[padding:]:
        yield error("repeated", f"{samples_text(again)} trained on twice: the loader started over")
    if padding:
        yield good("padded", f"{plural(padding, 'sample')} repeated on another rank as padding")


def _never_fetched(decoded: DecodedScenario) -> Iterator[Finding]:
    scenario = decoded.scenario
    if decoded.stopped != "ended":
        return
    dropped = min(decoded.num_never_fetched, decoded.num_dropped)
    if dropped:
        given = [name for name in ("drop_last", "sampler_drop_last", "limit_batches") if getattr(scenario, name)]
        text = f"{plural(dropped, 'sample')} left out by {' and '.join(given)}, over all epochs"
        yield good("dropped", text)
    if missing := decoded.num_never_fetched - dropped:
        level = Level.NOTE if scenario.fault is Fault.NONE else Level.ERROR
        yield Finding(level, "skipped", f"{plural(missing, 'sample')} never trained on, over all epochs")


def _limit(decoded: DecodedScenario) -> Iterator[Finding]:
    limit, taken, epochs = decoded.scenario.max_steps, len(decoded.updates), decoded.scenario.epochs
    if limit is None or decoded.stopped != "ended" or taken == limit:
        return
    if taken < limit and epochs and decoded.num_micro_batches >= epochs * decoded.scenario.micro_batches_per_epoch:
        text = f"the epochs ended after {plural(taken, 'update')}, before max_steps = {limit}"
        yield good("epochs end first", text)
        return
    after = f"{plural(taken, 'update')} and {plural(decoded.num_micro_batches, 'micro-batch')}"
    word = "stops late" if taken > limit else "stops early"
    yield error(word, f"max_steps = {limit} stopped training after {after}")


def _counters(decoded: DecodedScenario) -> Iterator[Finding]:
    if decoded.failure:
        return
    taken, reported, fault = len(decoded.updates), decoded.reported, decoded.scenario.fault
    observed = f"but {plural(taken, 'update')} {'was' if taken == 1 else 'were'} observed"
    names = STEP_COUNTERS[:-1] if fault in RESTARTS else STEP_COUNTERS
    since = taken
    if fault is Fault.EXCEPTION and decoded.first["faults"]:
        since = sum(update.losses_before > decoded.first["faults"][0] for update in decoded.updates)
    if anew := [f"{name} = {since}" for name in names if reported.get(name, taken) == since != taken]:
        text = f"{', '.join(anew)}: it counts from 0 again when training is started again after the exception"
        yield note("counted anew", text)
    if wrong := [f"{name} = {reported[name]}" for name in names if reported.get(name, taken) not in {taken, since}]:
        yield error("miscounted", f"{', '.join(wrong)}, {observed}")
    estimate = reported.get("trainer.estimated_stepping_batches", taken)
    if estimate != taken and fault is Fault.NONE and decoded.scenario.max_steps is None:
        yield note("misestimated", f"trainer.estimated_stepping_batches = {estimate}, {observed}")
    calls = reported.get("on_before_optimizer_step", taken)
    if calls > taken and fault not in RESTARTS:
        text = f"on_before_optimizer_step was called {calls} times for {plural(taken, 'update')}"
        yield note("hooks too often", text)


def _empty_steps(decoded: DecodedScenario) -> Iterator[Finding]:
    empty = [update for update in decoded.all_updates if not update.coefficients]
    why = ": no update, but what torch.distributed.checkpoint calls, with learning rate 0, to create optimizer state"
    for is_of_restart, level, reason in ((True, Level.GOOD, why), (False, Level.ERROR, "")):
        if number := sum(update.num_inner_steps for update in empty if update.is_of_restart == is_of_restart):
            text = f"{plural(number, 'step')} of the inner optimizer changed nothing{reason}"
            yield Finding(level, "empty step", text)


def _shuffled(decoded: DecodedScenario) -> Iterator[Finding]:
    scenario = decoded.scenario
    if scenario.split is not Split.FRAMEWORK:
        return
    fetched = [(use.fetch % scenario.micro_batches_per_epoch, use.sample) for use in decoded.uses.values()]
    by_rank = map(scenario.offered, range(scenario.world_size))
    offered = [set(chain(*together)) for together in zip(*by_rank, strict=True)]
    if any(sample not in offered[number] for number, sample in fetched):
        text = "the framework shuffled the samples when it split them, although the loader was in order"
        yield note("shuffled", text)


RULES: tuple[Callable[[DecodedScenario], Iterator[Finding]], ...] = (
    _outcome,
    divided_twice,
    _last_only,
    _too_early,
    _not_cleared,
    _mixed_epochs,
    _lost,
    _cleared,
    _wrong_sum,
    hidden_by_clipping,
    _too_late,
    _mean_of_means,
    _limit,
    _counters,
    _repeated,
    _left_open,
    _never_fetched,
    _empty_steps,
    _shuffled,
)
"""In the order in which findings of one level are listed."""
