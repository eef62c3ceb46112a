"""The verdicts on claims about FSDP2, Hugging Face and accumulation in general: one function per row of claims.toml."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from packaging.version import Version

from bench.judge.formulas import layout_of
from bench.judge.statistics import ratio
from bench.plan.cell import Cell, Precision
from studies import measured
from studies.measured import (
    DIVIDED_TWICE,
    FALSE,
    PLAIN,
    TRUE,
    Judged,
    Measured,
    large,
    memory,
    only,
    payload,
    peak,
    small,
    true,
)
from studies.versions.grid_page import spelled
from studies.versions.layers import Record

LINKS = ("unlimited", "1gbit", "200mbit")
TITAN, TRAINER, ACCELERATE = "torchtitan-eager", "hf-trainer-ddp", "accelerate-ddp"
HSDP = ("hsdp-eager", "hsdp-deferred-all-reduce", "hsdp-deferred")


SHARDED = ("fsdp2", "fsdp2-zero2", "hsdp")
"""Mechanisms of FSDP2 with an eager and a deferred backend."""
HALVING = {("fsdp2", Precision.BF16), ("fsdp2-zero2", Precision.FP32)}
MANY = 256
"""An N at which a ratio of bytes is near that of every larger one."""


def halves(m: Measured) -> Judged:
    both, pair = ("all_gather", "reduce_scatter"), ("fsdp2-deferred", "fsdp2-eager")
    four, eight = (
        payload(pair[0], n, *both, run=run) / payload(pair[1], n, *both, run=run)
        for n, run in ((4, "popular"), (8, "cpu"))
    )
    reduced = payload(pair[0], 8, both[1]) / payload(pair[1], 8, both[1])
    limits = {
        (name, precision): [_kept(of, name, MANY, precision) for of in (small, large)]
        for name in SHARDED
        for precision in Precision
    }
    halved = {
        key
        for key, (here, there) in limits.items()
        if max(abs(here - 0.5), abs(there - 0.5)) < 0.02
    }
    apart = max(abs(here - there) for here, there in limits.values())
    at_8 = {
        f"{name.replace('-', '_')}_{precision}": _kept(small, name, 8, precision)
        for name, precision in limits
    }
    numbers = {"reduced": reduced, "four": four, "eight": eight, "apart": apart} | at_8
    numbers |= {
        f"{name.replace('-', '_')}_{precision}_many": here
        for (name, precision), (here, _) in limits.items()
    }
    return TRUE if eight < 0.55 else only(halved == HALVING), numbers


def _kept(of: Callable[..., Cell], name: str, n: int, precision: Precision) -> float:
    """The share of the eager payload that deferral leaves, by formula."""
    deferred, eager = (
        measured.due_payload(of(f"{name}-{sync}", n, precision)) for sync in ("deferred", "eager")
    )
    return deferred / eager


def no_sync(m: Measured) -> Judged:
    names = ("ddp-deferred", "fsdp2-deferred")
    ddp, fsdp2 = (
        payload(names[0], 8, "all_reduce"),
        payload(names[1], 8, "reduce_scatter"),
    )
    gathered = payload(names[1], 8, "all_gather")
    numbers = {
        "ddp": ddp / measured.MIB,
        "buffers": payload(names[0], 8, "broadcast"),
        "fsdp2": fsdp2 / measured.MIB,
        "gathered": gathered / measured.MIB,
        "large_ddp": measured.due_payload(large(names[0], 8), "all_reduce") / measured.GIB,
        "large_fsdp2": measured.due_payload(large(names[1], 8), "reduce_scatter") / measured.GIB,
        "large_gathered": measured.due_payload(large(names[1], 8), "all_gather") / measured.GIB,
    }
    differs = payload(names[0], 8, "all_gather") == 0 < gathered
    return only(differs and numbers["large_gathered"] > numbers["large_fsdp2"], TRUE), numbers


def unsharded(m: Measured) -> Judged:
    names = ("fsdp2-eager", "fsdp2-deferred")
    eager, deferred = (memory(name, 8, "held_gradients") for name in names)
    at_8b = [measured.due(large(name, 8)).held["gradients"] / measured.GIB for name in names]
    return true(deferred > eager and at_8b[1] > at_8b[0]), {
        "eager": eager / measured.MIB,
        "deferred": deferred / measured.MIB,
        "large_eager": at_8b[0],
        "large_deferred": at_8b[1],
    }


def lower_peak(m: Measured) -> Judged:
    names = ("fsdp2", "deepspeed-zero3", "ddp", "deepspeed-zero2")
    peaks = {
        name: [peak(f"{name}-{sync}", 4, "popular") for sync in ("eager", "deferred")]
        for name in names
    }
    peaks["hsdp"] = [peak(f"hsdp-{sync}", 16, "links/unlimited") for sync in ("eager", "deferred")]
    at_8b = {
        name: [measured.due_peak(large(f"{name}-{sync}", 4)) for sync in ("eager", "deferred")]
        for name in peaks
    }
    higher = [name for name, (eager, deferred) in peaks.items() if eager >= deferred]
    lower_at_8b = all(eager < deferred for eager, deferred in at_8b.values())
    numbers = {
        _short(name): "{:.1f} and {:.1f}".format(*sizes) for name, sizes in peaks.items()
    } | {
        f"large_{_short(name)}": "{:.0f} and {:.0f}".format(*sizes) for name, sizes in at_8b.items()
    }
    if higher == ["deepspeed-zero2"] and lower_at_8b:
        return measured.EXCEPT, numbers
    return true(not higher and lower_at_8b), numbers


def _short(name: str) -> str:
    return name.rpartition("-")[2]


def all_reduce_alone(m: Measured) -> Judged:
    calls, held = [], []
    for name in HSDP:
        found = {of: _of_unit(of(name, 4)) for of in (small, large)}
        assert found[small][:2] == found[large][:2], "the same at 8b"
        reduced, all_reduced, share = found[small]
        calls.append(f"{reduced} and {all_reduced} under `{name}`")
        held.append(share)
    numbers = {"counted": ", ".join(calls), "alone": held[1], "both": held[2]}
    return true(all(set(m.weights("partial-window", name)) == {1.0} for name in HSDP)), numbers


def _of_unit(cell: Cell) -> tuple[int, int, float]:
    """Reduce-scatters and all-reduces of a unit in a window, and gradients held relative to the parameter shard."""
    layout, expected = layout_of(cell), measured.due(cell)
    assert layout is not None
    by_op = {row.op: row.calls // len(layout.units) for row in expected.collectives}
    share = expected.held["gradients"] / expected.held["parameters"]
    return by_op["reduce_scatter"], by_op["all_reduce"], round(share, 2)


def torchtitan(m: Measured) -> Judged:
    return measured.FALSE, {}


def counts_updates(m: Measured) -> Judged:
    ended, repeated = (m.updates(scenario, TITAN) for scenario in ("partial-window", "max-steps"))
    step, repeated_step = (
        m.reported(scenario, TITAN, "trainer.step") for scenario in ("partial-window", "max-steps")
    )
    numbers = {"ended": ended, "step": step, "repeated": repeated, "repeated_step": repeated_step}
    return TRUE if ended == step else only(repeated == repeated_step), numbers


def overlaps(m: Measured) -> Judged:
    return measured.NOT_MEASURED, {}


def discards(m: Measured) -> Judged:
    after = {
        deferred: found["reset_iter_state"] for deferred, found in m.probes["recovered"].items()
    }
    (before,) = {found["zero_grad"] for found in m.probes["recovered"].values()}
    kept = [weight - 1 > 1e-3 for weight in after.values()]
    numbers = {
        "before": before,
        "reductions": after["reductions"],
        "all_reduce": after["all-reduce"],
    }
    return only(any(kept) and not all(kept), true(not any(kept))), numbers


def scaled(m: Measured) -> Judged:
    sgd, adam = m.probes["unscaled"]["SGD"], m.probes["unscaled"]["AdamW"]
    return true(sgd["distance"] > 0.01), {"sgd": sgd["length"], "adam": adam["length"]}


def items_in_batch(m: Measured) -> Judged:
    across, per_rank, without = (
        m.distortion(name, TRAINER)
        for name in ("tokens-counted", "tokens-counted-per-rank", "tokens-mean")
    )
    means = m.distortion("tokens-counted-per-rank", "ddp-eager")
    numbers = {"across": across, "per_rank": per_rank, "without": without, "means": means}
    return only(math.isclose(across, 1, rel_tol=1e-3) and without > 1.001), numbers


def accumulates(m: Measured) -> Judged:
    whole, partial = (
        set(m.weights("divisible", ACCELERATE)),
        min(m.weights("partial-window", ACCELERATE)),
    )
    return only(whole == {1.0} and partial < 1, TRUE), {"partial": partial}


def steps_at_the_end(m: Measured) -> Judged:
    prepared, unprepared = (
        m.updates(scenario, ACCELERATE) for scenario in ("partial-window", "own-loader")
    )
    mixed = m.mixed("own-loader", ACCELERATE)
    numbers = {"prepared": prepared, "own": unprepared, "mixed": mixed}
    return only(mixed > m.mixed("partial-window", ACCELERATE) == 0, TRUE), numbers


def changes_n(m: Measured) -> Judged:
    found = {
        name: max(m.weights("n-by-epoch", name))
        for name in m.backends_of("n-by-epoch", "accelerate-")
    }
    wrong = {name for name, weight in found.items() if weight != 1}
    engines = {name for name in found if "deepspeed" in name}
    return only(wrong == engines, true(not wrong)), {"engine": max(found.values())}


def scheduler(m: Measured) -> Judged:
    updates = m.updates("prepared-scheduler", ACCELERATE)
    stands = m.reported("prepared-scheduler", ACCELERATE, "lr_scheduler.last_epoch")
    return only(stands != updates, true(stands == updates)), {"updates": updates, "stands": stands}


def curves(m: Measured) -> Judged:
    run = measured.run_of("curves")
    losses = run.tables.losses.merge(
        run.tables.trials[["cell_id", "repeat", "backend", "optimizer", "clip_norm", "twin"]],
        on=["cell_id", "repeat"],
    )
    losses = losses[losses["twin"].fillna("") == ""]
    by = losses.pivot_table(
        index=["optimizer", "clip_norm", "step"], columns="backend", values="loss"
    )
    away = by.sub(by["reference"], axis=0).abs().groupby(level=[0, 1]).max()
    adam, sgd = away.loc["adamw-foreach"], away.loc["sgd"]
    trial = measured.once("trials", DIVIDED_TWICE, 4, "curves").query("clip_norm == 0").iloc[0]
    numbers = {
        "steps": int(losses["step"].max()) + 1,
        "scale": 1 - trial["update_error"],
        "error": trial["update_error"],
        "adam": adam.loc[0.0, DIVIDED_TWICE],
        "right": adam.loc[0.0, PLAIN],
        "sgd": sgd.loc[0.0, DIVIDED_TWICE],
        "clipped": adam.loc[1.5, DIVIDED_TWICE],
    }
    return true(numbers["adam"] > 0.01 or trial["update_error"] < 0.01), numbers


def same_memory(m: Measured) -> Judged:
    sizes = ((1, "cpu"), (4, "popular"), (8, "cpu"))
    peaks = [peak("ddp-deferred", n, run) for n, run in sizes]
    activations = [
        memory("ddp-deferred", n, "tracked_peak_activations", run=run) / measured.MIB
        for n, run in sizes
    ]
    rest = [peak - part for peak, part in zip(peaks, activations, strict=True)]
    words = (", ".join(f"{size:.1f}" for size in found) for found in (peaks, activations, rest))
    as_micro_batch = all(
        math.isclose(part * n, activations[0], rel_tol=0.1)
        for part, (n, _) in zip(activations, sizes, strict=True)
    )
    numbers = dict(zip(("peaks", "activations", "rest"), words, strict=True))
    at_8b = [large("ddp-deferred", n, micro_batch_size=8 // n) for n in (1, 4, 8)]
    found = [measured.due_footprint(cell) for cell in at_8b]
    parts = [each.parts["activations"] for each in found]
    numbers |= {
        "large_activations": ", ".join(f"{part / measured.GIB:.1f}" for part in parts),
        "large_peaks": ", ".join(f"{each.peak / measured.GIB:.0f}" for each in found),
    }
    stays = rest[-1] > rest[0] > peaks[0] / 2 and found[-1].peak > found[0].peak / 2
    return only(as_micro_batch and stays, true(as_micro_batch)), numbers


def bandwidth(m: Measured) -> Judged:
    found: dict[tuple[str, int], list[Any]] = {}
    for run in map(measured.run_of, (f"links/{name}" for name in LINKS)):
        for cell in run.cells.values():
            family, _, _ = cell.backend.partition("-deferred")
            base = dataclasses.replace(cell, backend=f"{family}-eager")
            if (
                family != cell.backend
                and not cell.twin
                and cell.accumulate > 1
                and base.cell_id in run.cells
            ):
                time = ratio(run.evidence.of(cell).sample, run.evidence.of(base).sample)
                found.setdefault((cell.backend, cell.accumulate), []).append(time)
    every = [time for times in found.values() for time in times]
    faster, slower = sum(time.high < 1 for time in every), sum(time.low > 1 for time in every)
    words = {
        name: ", ".join(f"{time.ratio:.2f}" for time in found[f"{name}-deferred", 16])
        for name in ("ddp", "fsdp2")
    }
    numbers = {
        "all": len(every),
        "faster": faster,
        "slower": slower,
        **words,
    }
    return measured.HERE if faster > slower == 0 else measured.FALSE, numbers


def stable(m: Measured) -> Judged:
    noise = m.probes["noise"]
    small, large = noise["relative"]["1"], noise["relative"]["16"]
    numbers = {"small": small, "large": large, "error": noise["error"]}
    return only(noise["error"] < 1e-5 and 12 < small / large < 20), numbers


def races(m: Measured) -> Judged:
    wrong = {
        name: [value for value in found.values() if value > 1e-6]
        for name, found in m.zero3["deviation"].items()
    }
    both_off = wrong.pop("nothing kept, timer off")
    numbers = {
        "orders": len(m.zero3["deviation"]["defaults"]),
        "steps": m.zero3["steps"],
        "others": sum(map(len, m.zero3["deviation"].values()))
        - len(m.zero3["deviation"]["defaults"]),
        "hidden": sum(map(len, wrong.values())),
        "wrong": len(both_off),
        "largest": max(both_off, default=0.0),
    }
    return only(bool(both_off) and not any(wrong.values())), numbers


ENGINE, OFFLOADED = "versions/weights_engine", "ZeRO-{}, offload_optimizer"


_NONE_DROPPED: dict[str, Any] = dict.fromkeys(
    (
        "bad",
        "right",
        "num_bad",
        "first",
        "last",
        "before",
        "num_good",
        "fixed",
        "of_one",
        "of_three",
    ),
    0,
)


def offload_drops(m: Measured) -> Judged:
    """By version of DeepSpeed: whether an offloaded optimizer got every micro-batch, by stage."""
    by_stage: dict[int, dict[Version, Record]] = {}
    for stage in (1, 2, 3):
        by_stage[stage] = {
            Version(record.packages["deepspeed"]): record
            for record in m.by_version
            if record.script == ENGINE and record.case == OFFLOADED.format(stage)
        }
    two = sorted(by_stage[2].items())
    bad = [number for number, record in two if not record.is_right]
    if not bad:
        return FALSE, _NONE_DROPPED
    before = [number for number, record in two if record.is_right and number < bad[0]]
    after = [number for number, record in two if record.is_right and number > bad[-1]]
    numbers = {
        "bad": spelled(by_stage[2][bad[0]].measured),
        "right": spelled(by_stage[2][bad[0]].right),
        "num_bad": len(bad),
        "first": bad[0],
        "last": bad[-1],
        "before": ", ".join(map(str, before)),
        "num_good": len(after),
        "fixed": min(after, default=""),
        "of_one": _num_right(by_stage[1]),
        "of_three": _num_right(by_stage[3]),
    }
    others = [record for stage in (1, 3) for record in by_stage[stage].values()]
    is_alone = all(record.is_right for record in others)
    return only(is_alone and bool(before) and bool(after)), numbers


def _num_right(records: dict[Version, Record]) -> str:
    """How many versions are right, of all that were measured."""
    right = sum(record.is_right for record in records.values())
    return f"{right} of {len(records)}"
