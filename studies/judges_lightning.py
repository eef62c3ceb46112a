"""The verdicts on claims about Lightning: a function for each row of claims.toml."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from bench.audit.stepcount_text import by_rule
from bench.audit.training_plan import TrainingPlan
from bench.backends.base import registry
from studies import measured
from studies.measured import (
    DIVIDED_TWICE,
    GLOBAL_STEP,
    HOOK,
    PLAIN,
    TRUE,
    Judged,
    Measured,
    only,
    true,
)


def completely(m: Measured) -> Judged:
    weight = m.weights("divisible", DIVIDED_TWICE)[0]
    counted, engine = (
        m.reported("partial-window", DIVIDED_TWICE, GLOBAL_STEP),
        m.updates("partial-window", DIVIDED_TWICE),
    )
    lost = m.seen["partial-window", "lightning-deepspeed-zero3"]["samples_lost"]
    numbers = {"weight": weight, "counted": counted, "engine": engine, "lost": lost}
    return true(weight == 1 and counted == engine and not lost), numbers


def _calls(m: Measured) -> dict[str, int]:
    return {
        "calls": m.reported("divisible", DIVIDED_TWICE, measured.STRATEGY),
        "updates": m.updates("divisible", DIVIDED_TWICE),
        "batches": m.seen["divisible", DIVIDED_TWICE]["micro_batches"],
        "plain": m.reported("divisible", PLAIN, measured.STRATEGY),
    }


def every_batch(m: Measured) -> Judged:
    found = _calls(m)
    every = {
        name: m.reported("divisible", name, measured.STRATEGY) == found["batches"]
        for name in m.backends_of("divisible", "lightning-")
    }
    return only(_is_of_deepspeed(every)), found


def _is_of_deepspeed(found: Mapping[str, bool]) -> bool:
    """Whether something is so of the backends with DeepSpeed and of no others."""
    return all(value == ("deepspeed" in name) for name, value in found.items())


def divided_twice(m: Measured) -> Judged:
    weight, fixed = (m.weights("divisible", name)[0] for name in (DIVIDED_TWICE, measured.FIXED))
    return true(weight != 1 == fixed), {"weight": weight, "fixed": fixed}


def hook(m: Measured) -> Judged:
    calls, plain = (m.reported("divisible", name, HOOK) for name in (DIVIDED_TWICE, PLAIN))
    updates, plain_updates = (m.updates("divisible", name) for name in (DIVIDED_TWICE, PLAIN))
    numbers = {"calls": calls, "plain": plain, "updates": updates, "plain_updates": plain_updates}
    wrong = {
        name: m.reported("divisible", name, HOOK) != m.updates("divisible", name)
        for name in m.backends_of("divisible", "lightning-")
    }
    return only(_is_of_deepspeed(wrong), true(calls == updates)), numbers


def equal_n(m: Measured) -> Judged:
    return true(not m.probes["equal_n"]), {"error": m.probes["equal_n"]}


def configure_optimizers(m: Measured) -> Judged:
    neither, other, alone = (
        m.probes["both_defined"][name] for name in ("neither", "optimizer", "scheduler")
    )
    stays = "stays" if other["scheduler"] else "is dropped"
    ignored = (
        "is ignored" if alone["scheduler"] == neither["scheduler"] else "replaces the module's"
    )
    numbers = {
        "own": neither["optimizer"],
        "other": other["optimizer"],
        "stays": stays,
        "alone": ignored,
    }
    return true(other["optimizer"] != neither["optimizer"]), numbers


def ends_early(m: Measured) -> Judged:
    wanted = m.seen["max-steps", PLAIN]["scenario"]["max_steps"]
    ddp, engine = m.updates("max-steps", PLAIN), m.updates("max-steps", DIVIDED_TWICE)
    never = m.updates("max-steps-short", DIVIDED_TWICE)
    step = m.reported("max-steps-short", DIVIDED_TWICE, GLOBAL_STEP)
    numbers = {"wanted": wanted, "ddp": ddp, "engine": engine, "never": never, "step": step}
    return true(ddp < wanted or engine < wanted), numbers


def small_last_batch(m: Measured) -> Judged:
    kept, dropped = (m.distortion(scenario, PLAIN) for scenario in ("keep-last", "drop-last"))
    weight_kept, weight = (
        min(m.weights(scenario, PLAIN)) for scenario in ("keep-last", "drop-last")
    )
    lost = m.seen["drop-last", PLAIN]["samples_never_fetched"]
    numbers = {
        "kept": kept,
        "dropped": dropped,
        "weight_kept": weight_kept,
        "weight": weight,
        "lost": lost,
    }
    return only(kept > dropped == 1 and weight < 1, true(weight == 1)), numbers


TITAN = "torchtitan-eager"


def _waits(backend: str) -> bool:
    """Whether a partial window is left to DeepSpeed's engine, alone or under Lightning, or to torchtitan's loop.

    With a prepared loader: Accelerate leaves that of one's own open, too.
    """
    of_engine = backend.startswith(("deepspeed-", "lightning-deepspeed-"))
    return backend == TITAN or (of_engine and not backend.endswith("-deferred"))


def last_window(m: Measured) -> Judged:
    ddp, engine = (
        m.updates("partial-window", PLAIN),
        m.updates("partial-window", "deepspeed-zero2-eager"),
    )
    mixed = m.mixed("partial-window", "deepspeed-zero2-eager")
    weight = min(m.weights("partial-window", PLAIN))
    waiting = set(filter(_waits, m.backends_of("partial-window")))
    without = set(m.without_step("partial-window", 6))
    unprepared = set(m.backends_of("own-loader", "accelerate-"))
    is_left = bool(unprepared) and unprepared.issubset(m.without_step("own-loader", 6))
    return only(without == waiting and is_left and mixed > 0, true(ddp < 6)), {
        "ddp": ddp,
        "engine": engine,
        "mixed": mixed,
        "weight": weight,
    }


def max_epochs(m: Measured) -> Judged:
    counts = {
        name: m.updates("partial-window", name) for name in ("ddp-eager", PLAIN, DIVIDED_TWICE)
    }
    words = ", ".join(f"{count} under `{name}`" for name, count in counts.items())
    weight = min(m.weights("partial-window", PLAIN))
    numbers = {"counts": words, "whole": m.updates("divisible", PLAIN), "weight": weight}
    return only(len(set(counts.values())) > 1, TRUE), numbers


def _by_samples(scenario: Mapping[str, Any]) -> int:
    size = scenario["batch_size"] * scenario["accumulate"][0] * scenario["world_size"]
    return int(scenario["epochs"] * math.ceil(scenario["samples"] / size))


def ceil_of_samples(m: Measured) -> Judged:
    plan = TrainingPlan(
        samples=33, batch_size=2, accumulate=(4,), world_size=2, epochs=2, drop_last=True
    )
    (truth,) = {steps.optimizer_steps for _, steps in by_rule(plan, registry()).values() if steps}
    ddp, engine = m.updates("drop-last", PLAIN), m.updates("drop-last", DIVIDED_TWICE)
    formula_37 = _by_samples(m.seen["drop-last", PLAIN]["scenario"])
    numbers = {
        "formula": plan.naive_steps,
        "truth": truth,
        "formula_37": formula_37,
        "ddp": ddp,
        "engine": engine,
    }
    return true(plan.naive_steps == truth and formula_37 == ddp == engine), numbers


def ceil_of_batches(m: Measured) -> Judged:
    scenario = m.seen["partial-window", PLAIN]["scenario"]
    per_epoch = scenario["samples"] // (scenario["batch_size"] * scenario["world_size"])
    formula = scenario["epochs"] * math.ceil(per_epoch / scenario["accumulate"][0])
    ddp, engine = m.updates("partial-window", PLAIN), m.updates("partial-window", DIVIDED_TWICE)
    other = {
        name: m.updates("partial-window", name) != formula
        for name in m.backends_of("partial-window", "lightning-")
    }
    return only(_is_of_deepspeed(other), true(ddp == engine == formula)), {
        "formula": formula,
        "ddp": ddp,
        "engine": engine,
    }


def resume_safe(m: Measured) -> Judged:
    names = ("ddp-deferred", PLAIN, "deepspeed-zero2-eager", DIVIDED_TWICE)
    lost = {name: m.seen["resume-epoch", name]["samples_lost"] for name in names}
    losing = " and ".join(f"`{name}` loses {count}" for name, count in lost.items() if count)
    keeping = " and ".join(f"`{name}`" for name, count in lost.items() if not count)
    return only(any(lost.values()), TRUE), {"losing": losing, "keeping": keeping}


ACCEPTED = "log_every_n_steps at N = 4, window_size 5"


def inverted(m: Measured) -> Judged:
    before, after = (m.version("lightning", ACCEPTED)[number] for number in ("2.2.0", "2.2.1"))
    return only("raised" in before and "raised" not in after), {
        "before": before.split(": ValueError")[0],
        "after": after,
    }


def _whole(m: Measured) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The settings with whole windows: those with N > 1, and those with N = 1."""
    whole = m.rates[m.rates["epoch"] == "whole"]
    return whole[whole["accumulate"] > 1], whole[whole["accumulate"] == 1]


def multiple_of_n(m: Measured) -> Judged:
    several, single = _whole(m)
    multiple = several["log_every_n_steps"] % several["accumulate"] == 0
    right, of, words = m.right(several[multiple])
    return true(right == of), {
        "multiple": words,
        "other": m.right(several[~multiple])[2],
        "single": m.right(single)[2],
    }


def window_size(m: Measured) -> Judged:
    several, single = _whole(m)
    whole = pd.concat([several, single])
    fits = (whole["window_size"] - 1) % whole["accumulate"] == 0
    right, of, words = m.right(whole[fits])
    default = whole[(whole["window_size"] == 100) & (whole["accumulate"] == 8)].iloc[0]
    share = default["optimizer_s"] / default["micro_batch_s"]
    numbers = {
        "fits": words,
        "single": len(single),
        "other": m.right(whole[~fits])[2],
        "share": share,
    }
    numbers["default"] = default["ratio_median"]
    if right == of:
        return measured.EXCEPT, numbers
    return measured.FALSE, numbers


def variable_batch(m: Measured) -> Judged:
    found = m.version("lightning", "rates, N = 4, window_size 5, batches of 1, 3 and 5 samples")
    raising = [number for number, measured in found.items() if measured.startswith("raised")]
    right = [number for number, measured in found.items() if measured.startswith("right")]
    only_older = raising[-1:] == ["2.5.6"] and bool(right)
    return only(only_older, true(not right)), {
        "raising": ", ".join(raising),
        "right": ", ".join(right),
    }
