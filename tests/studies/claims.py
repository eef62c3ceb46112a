"""The page that answers claims about gradient accumulation: each verdict is computed from measurements.

``python -m tests.studies.claims`` writes docs/claims.md from the committed measurements, and ``--probes`` runs the
probes of ``tests.studies.probes`` first. A claim whose measurement changes changes its verdict with it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

import bench
from bench.audit.conformance import ratios
from bench.audit.semantics_files import load
from bench.judge.formulas import expect, layout_of
from bench.plan.cell import Cell, Precision
from tests.conftest import ROOT
from tests.studies.semantics import GLOBAL_STEP, STRATEGY

DOCS, PROBES = ROOT / "docs" / "claims.md", ROOT / "docs" / "claims.json"
RUN = "results/cpu"
TRUE, FALSE, OUTSIDE = "true", "false", "not measured here"
Answer = tuple[str, str]
"""Verdict, and the numbers behind it in a sentence."""
PACKAGES = ("torch", "lightning", "deepspeed", "transformers", "accelerate", "torchtitan")
TITAN, TRAINER, ACCELERATE = "torchtitan-eager", "hf-trainer-ddp", "accelerate-ddp"
HSDP = ("hsdp-eager", "hsdp-deferred-all-reduce", "hsdp-deferred")
DIVIDED_TWICE, PLAIN, FIXED = "lightning-deepspeed-zero2", "lightning-ddp", "lightning-deepspeed-zero2-corrected"


def only(condition: str) -> str:
    """The verdict on a claim that holds under a condition."""
    return f"true only {condition}"


class Measured:
    """The committed measurements that claims are held against."""

    def __init__(
        self, about: Mapping[str, Any], suite: Sequence[Any], rates: pd.DataFrame, versions: Sequence[Any], probes: Any
    ) -> None:
        self.about, self.suite, self.rates, self.versions, self.probes = about, suite, rates, versions, probes
        self.seen = {(one["scenario"]["name"], one["backend"]): one for one in suite}

    @classmethod
    def load(cls) -> Measured:
        """From results/ and docs/."""
        return cls(
            *load(ROOT / "results/semantics/observations.json"),
            pd.read_parquet(ROOT / "results/throughput/throughput.parquet"),
            json.loads((ROOT / "docs/versions.json").read_text())["versions"],
            json.loads(PROBES.read_text()),
        )

    def updates(self, scenario: str, backend: str) -> int:
        return int(self.seen[scenario, backend]["optimizer_steps_observed"])

    def reported(self, scenario: str, backend: str, counter: str) -> int:
        return int(self.seen[scenario, backend]["steps_reported"][counter])

    def step(self, scenario: str, backend: str) -> int:
        """torchtitan's counter."""
        return self.reported(scenario, backend, "trainer.step")

    def weights(self, scenario: str, backend: str) -> list[float]:
        """The sum of the coefficients of each update divided by the right sum."""
        return [round(ratio, 4) for ratio in ratios(self.seen[scenario, backend])]

    @cached_property
    def run(self) -> Any:
        """The frames of the reference run."""
        return bench.load(ROOT / RUN)

    def window(self, backend: str, op: str, n: int) -> int:
        """Payload bytes of the collectives of one window on one rank."""
        return self._sum("collectives", backend, n, "payload_bytes", op=op)

    def held(self, backend: str, n: int) -> int:
        """Bytes of gradients that a rank holds between two micro-batches."""
        return self._sum("memory", backend, n, "bytes", category="held_gradients")

    def _sum(self, table: str, backend: str, n: int, column: str, **where: str) -> int:
        trials = self.run.trials
        chosen = trials[(trials["backend"] == backend) & (trials["accumulate"] == n) & (trials["status"] == "ok")]
        trial = ["cell_id", "repeat"]
        rows = getattr(self.run, table).merge(chosen[trial], on=trial)
        rows = rows.merge(rows.head(1)[trial], on=trial)  # the first that has any: some is measured once only
        for name, value in where.items():
            rows = rows[rows[name] == value]
        return int(rows[column].sum())

    def version(self, package: str, number: str) -> dict[str, str]:
        """What was measured of one version, by question."""
        (found,) = [one for one in self.versions if (one["package"], one["version"]) == (package, number)]
        return {one["finding"]: one["measured"] for one in found["findings"]}


def holds(condition: bool, text: str) -> Answer:
    """True or false by the condition."""
    return TRUE if condition else FALSE, text


def completely(m: Measured) -> Answer:
    weights = m.weights("divisible", DIVIDED_TWICE)
    counted = m.reported("partial-window", DIVIDED_TWICE, GLOBAL_STEP)
    engine = m.updates("partial-window", DIVIDED_TWICE)
    lost = m.seen["partial-window", "lightning-deepspeed-zero3"]["samples_lost"]
    hands_over = weights[0] == 1 and counted == engine and not lost
    return holds(
        hands_over,
        "`handles_gradient_accumulation` is set and the engine decides when to step. But the Trainer still divides the "
        f"loss by N (an update has {weights[0]:g} of its weight at N = 4), still counts windows of its own "
        f"(`global_step` {counted} after {engine} updates), and still zeroes at them (ZeRO-3 lost {lost} samples of "
        "two epochs of 40).",
    )


def every_batch(m: Measured) -> Answer:
    calls = m.reported("divisible", DIVIDED_TWICE, STRATEGY)
    updates = m.updates("divisible", DIVIDED_TWICE)
    plain = m.reported("divisible", PLAIN, STRATEGY)
    batches = m.seen["divisible", DIVIDED_TWICE]["micro_batches"]
    return (only("under DeepSpeed") if calls == batches != updates and plain == updates else FALSE), (
        f"{calls} calls for {batches} micro-batches and {updates} updates under DeepSpeed, {plain} calls under DDP. So "
        "hooks such as `on_before_optimizer_step` run N times per update there."
    )


def equal_n(m: Measured) -> Answer:
    error = m.probes["equal_n"]
    return holds(
        not error,
        f"Lightning refuses `gradient_accumulation_steps` in DeepSpeed's config before the first batch, even if it "
        f"equals `accumulate_grad_batches`, which sets both ({error})."
        if error
        else "Both may say the same N.",
    )


def configure_optimizers(m: Measured) -> Answer:
    both = m.probes["both_defined"]
    own, other = both["neither"], both["optimizer"]
    replaced, ignored = other["optimizer"] != own["optimizer"], both["scheduler"]["scheduler"] == own["scheduler"]
    scheduler = "is ignored" if ignored else "replaces the module's"
    return holds(
        replaced,
        f"An optimizer in DeepSpeed's config replaces the module's {own['optimizer']} by its {other['optimizer']}, and "
        f"the module's scheduler {'stays' if other['scheduler'] else 'is dropped'}, both without an error. A scheduler "
        f"alone in that config {scheduler}.",
    )


def normal(m: Measured) -> Answer:
    weights, fixed = m.weights("divisible", DIVIDED_TWICE), m.weights("divisible", FIXED)
    return holds(
        weights[0] == 1,
        f"Every update has {weights[0]:g} of its weight at N = 4; the same training with the loss multiplied by N has "
        f"{fixed[0]:g}. Adam hides most of it (see the last claim on FSDP2), SGD and clipping do not.",
    )


def ends_early(m: Measured) -> Answer:
    wanted = m.seen["max-steps", PLAIN]["scenario"]["max_steps"]
    ddp, engine = m.updates("max-steps", PLAIN), m.updates("max-steps", DIVIDED_TWICE)
    never = m.updates("max-steps-short", DIVIDED_TWICE)
    step = m.reported("max-steps-short", DIVIDED_TWICE, GLOBAL_STEP)
    return holds(
        ddp < wanted or engine < wanted,
        f"With `max_steps={wanted}` DDP takes {ddp} updates and Lightning with DeepSpeed {engine}. With fewer "
        f"micro-batches per epoch than N the latter does not stop at all: {never} updates when the bench stopped it, "
        f"`global_step` {step}.",
    )


def drop_last(m: Measured) -> Answer:
    without, dropped = m.weights("partial-window", PLAIN), m.weights("drop-last", PLAIN)
    return holds(
        min(without) == 1 != min(dropped),
        f"The number of micro-batches per epoch decides, not `drop_last`: without it a partial window has "
        f"{min(without):g} of its weight, with it {min(dropped):g} (a shorter rest), and both take "
        f"{m.updates('drop-last', PLAIN)} updates under DDP.",
    )


def last_window(m: Measured) -> Answer:
    ddp, engine = m.seen["partial-window", PLAIN], m.seen["partial-window", "deepspeed-zero2-eager"]
    carried = sum(len(update["epochs"]) > 1 for update in engine["updates"])
    return (FALSE if len(ddp["updates"]) == 6 and carried else TRUE), (
        f"Lightning with DDP or FSDP2 steps at the end of each epoch ({len(ddp['updates'])} updates in two epochs of "
        f"10 micro-batches at N = 4), with {min(m.weights('partial-window', PLAIN)):g} of the weight. DeepSpeed keeps "
        f"the rest and fills the window in the next epoch ({len(engine['updates'])} updates, {carried} of them mixed)."
    )


def max_epochs(m: Measured) -> Answer:
    counts = {name: m.updates("partial-window", name) for name in ("ddp-eager", PLAIN, DIVIDED_TWICE)}
    same = len(set(counts.values())) == 1
    return (TRUE if same else only("where N divides the micro-batches of an epoch")), (
        "Two epochs of 10 micro-batches at N = 4 are "
        + ", ".join(f"{count} updates under `{name}`" for name, count in counts.items())
        + f"; whole windows are {m.updates('divisible', PLAIN)} under each. The partial window weighs "
        f"{min(m.weights('partial-window', PLAIN)):g} under Lightning with DDP either way."
    )


def resume_safe(m: Measured) -> Answer:
    lost = {
        name: m.seen["resume-epoch", name]["samples_lost"]
        for name in ("ddp-deferred", PLAIN, "deepspeed-zero2-eager", DIVIDED_TWICE)
    }
    losing = [f"`{name}` loses {count}" for name, count in lost.items() if count]
    keeping = [f"`{name}`" for name, count in lost.items() if not count]
    return (only("if no window is open then") if losing else TRUE), (
        f"With 10 micro-batches per epoch and N = 4, {' and '.join(losing)} of 80 samples: unfinished "
        f"windows are not checkpointed. {' and '.join(keeping)} lose none, since they step there."
    )


def ceil_steps(m: Measured) -> Answer:
    scenario = m.seen["partial-window", PLAIN]["scenario"]
    per_epoch = scenario["samples"] // (scenario["batch_size"] * scenario["world_size"])
    formula = scenario["epochs"] * math.ceil(per_epoch / scenario["accumulate"][0])
    ddp, engine = m.updates("partial-window", PLAIN), m.updates("partial-window", DIVIDED_TWICE)
    right = only("under DDP and FSDP2") if ddp == formula != engine else TRUE if ddp == engine == formula else FALSE
    counted = f"Lightning takes {ddp} updates with DDP, {engine} with DeepSpeed"
    return right, f"epochs x ceil(NB / N) is {formula}; {counted}."


def inverted(m: Measured) -> Answer:
    question = "log_every_n_steps at N = 4, window_size 5"
    before, after = m.version("lightning", "2.2.0")[question], m.version("lightning", "2.2.1")[question]
    raises = "raised" in before and "raised" not in after
    return (only("in Lightning 2.2.0") if raises else FALSE), (
        f"2.2.0: {before.split(': ValueError')[0]}. 2.2.1 and later have no check: {after}. So the check "
        "the other way round would refuse settings that work, too."
    )


def multiple_of_n(m: Measured) -> Answer:
    whole = m.rates[(m.rates["epoch"] == "whole") & (m.rates["accumulate"] > 1)]
    multiple = whole["log_every_n_steps"] % whole["accumulate"] == 0
    right = (whole["verdict"] == "right").groupby(multiple).agg(["sum", "size"])
    wrong_all_the_same = right.loc[True, "sum"] < right.loc[True, "size"]
    return holds(
        not wrong_all_the_same,
        f"With whole windows, {right.loc[True, 'sum']} of {right.loc[True, 'size']} settings are right where "
        f"`log_every_n_steps` is a multiple of N, and {right.loc[False, 'sum']} of {right.loc[False, 'size']} where it "
        "is not. It counts optimizer steps, and changes nothing in whole windows.",
    )


def window_size(m: Measured) -> Answer:
    whole = m.rates[(m.rates["epoch"] == "whole") & (m.rates["accumulate"] > 1)]
    fits = (whole["window_size"] - 1) % whole["accumulate"] == 0
    right = (whole["verdict"] == "right").groupby(fits).agg(["sum", "size"])
    exact = right.loc[True, "sum"] == right.loc[True, "size"]
    default = whole[(whole["window_size"] == 100) & (whole["accumulate"] == 8)].iloc[0]
    return (only("if window_size - 1 is a multiple of N") if exact else FALSE), (
        "Lightning always logs at a window's end. With whole windows the rate is right at "
        f"{right.loc[True, 'sum']} of {right.loc[True, 'size']} settings if `window_size` - 1 is a multiple of N, and "
        f"at {right.loc[False, 'sum']} of {right.loc[False, 'size']} otherwise. At N = 8 the default of 100 reports "
        f"{default['ratio_median']:.3f} of the rate. Here an optimizer step takes as long as "
        f"{default['optimizer_s'] / default['micro_batch_s']:g} micro-batches; a shorter step makes the error smaller, "
        "and so does a longer window."
    )


def halves(m: Measured) -> Answer:
    payloads = {}
    for n in (2, 8):
        deferred, eager = (
            m.window(backend, "all_gather", n) + m.window(backend, "reduce_scatter", n)
            for backend in ("fsdp2-deferred", "fsdp2-eager")
        )
        payloads[n] = deferred / eager
    reduced = m.window("fsdp2-deferred", "reduce_scatter", 8) / m.window("fsdp2-eager", "reduce_scatter", 8)
    mixed = {n: due_payload("fsdp2-deferred", n) / due_payload("fsdp2-eager", n) for n in (8, 64)}
    halved = min(payloads.values()) < 0.55, mixed[64] < 0.51
    return (TRUE if halved[0] else only("in bf16 and for large N") if halved[1] else FALSE), (
        f"It divides the reduce-scatters by N ({reduced:g} at N = 8) and leaves the all-gathers. In fp32 the payload "
        f"is {payloads[2]:.2f} of eager's at N = 2, {payloads[8]:.2f} at N = 8 and 2/3 for large N, since a block is "
        "gathered twice per micro-batch. With parameters gathered in bf16 and gradients reduced in fp32, it is "
        f"{mixed[8]:.2f} at N = 8 and {mixed[64]:.2f} at N = 64, by formula. With resident parameters "
        "(`fsdp2-deferred-resident`) one gather and one reduction per window are left."
    )


def due_payload(backend: str, n: int) -> int:
    """Payload bytes of the collectives of one window in bf16, by the formulas."""
    size = {"world_size": 2, "global_batch_size": 2 * n, "sequence_length": 8, "model": "tiny"}
    cell = Cell(backend=backend, accumulate=n, precision=Precision.BF16, **size)
    layout = layout_of(cell)
    assert layout is not None
    due = expect(cell, layout)
    assert due is not None
    return sum(row.payload_bytes for row in due.collectives)


def unsharded(m: Measured) -> Answer:
    eager, deferred = m.held("fsdp2-eager", 8), m.held("fsdp2-deferred", 8)
    return holds(
        deferred > eager,
        f"Between micro-batches a rank of two holds {deferred / 1e6:.1f} MB of gradients deferred and "
        f"{eager / 1e6:.1f} MB eager: all of them in fp32 instead of its share, whatever N.",
    )


def torchtitan(m: Measured) -> Answer:
    return FALSE, (
        "Its training loop (torchtitan 0.3.0, `torchtitan/trainer.py`) never calls `set_requires_gradient_sync`: every "
        "micro-batch reduces, as in `torchtitan-eager`. Only its chunked loss calls it, on the head, between the "
        "chunks of one micro-batch."
    )


def counts_updates(m: Measured) -> Answer:
    updates, step = ((of("partial-window", TITAN), of("max-steps", TITAN)) for of in (m.updates, m.step))
    return (TRUE if updates == step else only("until the data ends") if updates[1] == step[1] else FALSE), (
        f"Two epochs of 10 micro-batches at N = 4 are {updates[0]} updates, and then `trainer.step` is {step[0]}: the "
        "step that is cancelled for want of data is counted, though neither logged nor saved. torchtitan's own loaders "
        f"repeat their data by default (`infinite`). With such data and `steps` = {updates[1]} it is {step[1]}."
    )


def all_reduce_alone(m: Measured) -> Answer:
    weights = {name: set(m.weights("partial-window", name)) for name in HSDP}
    cell = Cell(
        backend="", accumulate=4, world_size=4, replicate=2, global_batch_size=16, sequence_length=8, model="135m"
    )
    layout = layout_of(cell)
    assert layout is not None
    calls, held = {}, {}
    for name in HSDP:
        due = expect(dataclasses.replace(cell, backend=name), layout)
        assert due is not None
        by_op = {row.op: row.calls // len(layout.units) for row in due.collectives}
        calls[name] = f"{by_op['reduce_scatter']} and {by_op['all_reduce']}"
        held[name] = due.held["gradients"] / due.held["parameters"]
    counted = ", ".join(f"{calls[name]} under `{name}`" for name in HSDP)
    return holds(
        all(found == {1.0} for found in weights.values()),
        f"Every update of the three modes has its right weight. With 2 x 2 ranks at N = 4, the reduce-scatters and "
        f"all-reduces of a unit in a window are {counted}. Between micro-batches a rank holds "
        f"{held[HSDP[1]]:.2g} times its parameter shard as gradients with the all-reduce deferred, and "
        f"{held[HSDP[2]]:.2g} times with both deferred.",
    )


def items_in_batch(m: Measured) -> Answer:
    across, per_rank, without = (
        max(update["distortion"] for update in m.seen[name, TRAINER]["updates"])
        for name in ("tokens-counted", "tokens-counted-per-rank", "tokens-mean")
    )
    condition = "if the model or `compute_loss_func` takes `num_items_in_batch`, counted over all ranks"
    exact = math.isclose(across, 1, rel_tol=1e-3) and without > 1.001
    return (only(condition) if exact else FALSE), (
        "The largest factor by which a token's weight differs from that in the full batch, with samples of 3 to 512 "
        f"tokens, is {across:.3g} then. It is {per_rank:.3g} with `average_tokens_across_devices=False`, which is not "
        f"the default, and {without:.3g} if neither takes the argument: then the Trainer averages means."
    )


def accumulates(m: Measured) -> Answer:
    whole, partial = m.weights("divisible", ACCELERATE), m.weights("partial-window", ACCELERATE)
    condition = "where N divides the micro-batches of an epoch"
    return (only(condition) if set(whole) == {1.0} and min(partial) < 1 else TRUE), (
        f"`accumulate()` divides by N in a smaller window too: at an epoch's end an update has {min(partial):g} of its "
        "weight with 2 of 4 micro-batches, under DDP, FSDP2 and DeepSpeed alike. The loop that Accelerate's guide has "
        "for samples of variable size divides by the samples of the window itself, and is right there."
    )


def steps_at_the_end(m: Measured) -> Answer:
    prepared, own = m.seen["partial-window", ACCELERATE], m.seen["own-loader", ACCELERATE]
    mixed = [sum(len(update["epochs"]) > 1 for update in one["updates"]) for one in (prepared, own)]
    return (only("with a prepared loader and `sync_with_dataloader`") if mixed[1] > mixed[0] == 0 else TRUE), (
        f"Two epochs of 10 micro-batches at N = 4 are {len(prepared['updates'])} updates with a loader that Accelerate "
        f"prepared. With one's own they are {len(own['updates'])}, {mixed[1]} of them with samples of two epochs, as "
        "they are if `GradientAccumulationPlugin` turns off `sync_with_dataloader`, which is on by default."
    )


def changes_n(m: Measured) -> Answer:
    engine, ddp = (max(m.weights("n-by-epoch", name)) for name in ("accelerate-deepspeed-zero2", ACCELERATE))
    return (only("without DeepSpeed") if engine > ddp == 1 else TRUE if engine == 1 else FALSE), (
        f"With N = 1, 4 and 2 in three epochs, updates have up to {engine:g} times their weight under DeepSpeed, whose "
        "engine keeps dividing by its first N, and all are right under DDP. The engine's `set_train_batch_size` "
        "changes its N too; with both set, all are right."
    )


def scheduler(m: Measured) -> Answer:
    updates = m.updates("prepared-scheduler", ACCELERATE)
    stands = m.reported("prepared-scheduler", ACCELERATE, "lr_scheduler.last_epoch")
    return holds(
        stands == updates,
        f"After {updates} updates on two ranks it stands at {stands}: Accelerate steps it W times per update, for "
        "schedules that were written for one rank's number of batches. With `split_batches=True` it steps once.",
    )


def overlaps(m: Measured) -> Answer:
    return OUTSIDE, (
        "FSDP2 issues one reduce-scatter per block from the block's backward hook, so it can. Whether it is hidden is "
        "measured on CUDA by the exposure pass (`exposed_s`); nothing here has run on a GPU yet."
    )


def scaled(m: Measured) -> Answer:
    sgd, adam = m.probes["unscaled"]["SGD"], m.probes["unscaled"]["AdamW"]
    return holds(
        sgd["distance"] > 0.01,
        f"FSDP2 averages over ranks, not over micro-batches. Without the division the first update at N = 4 is "
        f"{sgd['length']:.2f} times as long under SGD. Under AdamW it is {adam['length']:.4f} times as long (it "
        "normalizes the gradient), so the loss curve hides the mistake until something clips or decays.",
    )


def discards(m: Measured) -> Answer:
    kept = {deferred: of["reset_iter_state"] - 1 > 1e-3 for deferred, of in m.probes["recovered"].items()}
    (before,) = {of["zero_grad"] for of in m.probes["recovered"].values()}
    after = [f"{m.probes['recovered'][deferred]['reset_iter_state']:g}" for deferred in ("reductions", "all-reduce")]
    return (TRUE if not any(kept.values()) else FALSE if all(kept.values()) else only("for a deferred all-reduce")), (
        f"After an exception in the second of N = 4 micro-batches and `zero_grad`, the next update is {before:g} times "
        "the right one, since `zero_grad` does not clear what is not reduced yet. PyTorch documents `reset_iter_state` "
        f"for that. With it the next update is {after[1]} times the right one if only the all-reduce was deferred, but "
        f"still {after[0]} times if the reduce-scatter was: it leaves the unsharded gradients."
    )


def stable(m: Measured) -> Answer:
    start = m.probes["noise"]
    sizes = sorted(start["relative"], key=int)
    small, large = start["relative"][sizes[0]], start["relative"][sizes[-1]]
    return only("compared with a smaller batch"), (
        f"On the shipped model the noise of the gradient, the mean of (g_B - g)² / g², falls from {small:.3g} at B = "
        f"{sizes[0]} to {large:.3g} at B = {sizes[-1]}: with 1/B. Accumulation gives the gradient of the large batch "
        f"(relative difference {start['error']:.1g}), so it is exactly as stable as that batch, and no more."
    )


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim as it is made, how it is judged, and which measurements judge it."""

    text: str
    judge: Callable[[Measured], Answer]
    evidence: str


SUITE, RATES, VERSIONS, REFERENCE, PROBE, SOURCE = "suite", "throughput", "versions", "run", "probes", "source"
BOTH = f"{SUITE}, {SOURCE}"
CLAIMS: dict[str, tuple[Claim, ...]] = {
    "Lightning with DeepSpeed": (
        Claim("Lightning hands control of accumulation completely to DeepSpeed.", completely, SUITE),
        Claim("`strategy.optimizer_step` runs for every batch.", every_batch, SUITE),
        Claim("Keep N equal in the Trainer and in DeepSpeed's config.", equal_n, PROBE),
        Claim("Define optimizer and scheduler only in `configure_optimizers`.", configure_optimizers, PROBE),
        Claim("It is normal cooperation of two frameworks, not a defect.", normal, SUITE),
    ),
    "max_steps and the end of an epoch": (
        Claim("With N > 1, `max_steps` ends training early.", ends_early, SUITE),
        Claim("`drop_last` is the cause.", drop_last, SUITE),
        Claim("The last, partial window gets no step.", last_window, SUITE),
        Claim("Use `max_epochs` instead.", max_epochs, SUITE),
        Claim("Compute `max_steps` with ceil.", ceil_steps, SUITE),
        Claim("A checkpoint at the end of an epoch is safe.", resume_safe, SUITE),
    ),
    "ThroughputMonitor": (
        Claim("Its check of `log_every_n_steps` is inverted.", inverted, VERSIONS),
        Claim("Set `log_every_n_steps` to a multiple of N.", multiple_of_n, RATES),
        Claim("Logging at the end of a window makes the rate exact.", window_size, RATES),
    ),
    "FSDP2": (
        Claim("Deferred sync halves communication.", halves, REFERENCE),
        Claim("Deferred sync holds unsharded gradients.", unsharded, REFERENCE),
        Claim("HSDP can defer the all-reduce alone.", all_reduce_alone, SUITE),
        Claim("torchtitan defers the reduce-scatter or the all-reduce.", torchtitan, SOURCE),
        Claim("torchtitan's `step` counts optimizer steps.", counts_updates, BOTH),
        Claim("The reduce-scatter of a block overlaps with the next block.", overlaps, SOURCE),
        Claim("`reset_iter_state()` discards a window that an exception interrupted.", discards, PROBE),
        Claim("The loss must be scaled by 1/N.", scaled, PROBE),
    ),
    "Hugging Face": (
        Claim("HF Trainer gives every token the weight that it has in the full batch.", items_in_batch, BOTH),
        Claim("`accumulate()` takes care of the loss's division.", accumulates, BOTH),
        Claim("Accelerate steps at the end of every epoch.", steps_at_the_end, BOTH),
        Claim("Set `accelerator.gradient_accumulation_steps` to change N.", changes_n, BOTH),
        Claim("A prepared scheduler steps once per update.", scheduler, BOTH),
    ),
    "In general": (Claim("Accumulation makes training more stable.", stable, PROBE),),
}


def page(m: Measured) -> str:
    """The page in Markdown."""
    about = m.about
    versions = ", ".join(f"{name} {about['packages'][name]}" for name in PACKAGES)
    rates = m.rates.iloc[0]
    evidence = {
        SUITE: f"`{' '.join(about['command'])}`: [semantics](semantics.md), with {versions}, on {about['date']}",
        RATES: "`python -m bench throughput --out results/throughput`: [every point]"
        f"(../results/throughput/throughput.md), with Lightning {rates['lightning']} and torch {rates['torch']}",
        VERSIONS: "`nox -s versions`: [versions](versions.md), one environment for each version",
        REFERENCE: f"`{RUN}`, 2 ranks of a CPU, model of 3.1 M parameters: `python -m bench report {RUN}`",
        PROBE: f"`python -m tests.studies.claims --probes`, with {m.probes['versions']}",
        SOURCE: "read in the source, not measured",
    }
    lines = [
        "# Claims about gradient accumulation",
        "",
        "Claims that articles, documentation and threads make, held against measurements. `nox -s results -- claims` "
        "computes each verdict from the numbers beside it, and writes this page. N is the number of micro-batches in a "
        "window, NB that of an epoch. Other versions may do otherwise: measure yours with the commands below.",
    ]
    for topic, claims in CLAIMS.items():
        lines += ["", f"## {topic}", "", "| claim | verdict | measured | by |", "| --- | --- | --- | --- |"]
        for claim in claims:
            verdict, text = claim.judge(m)
            lines.append(f"| {claim.text} | **{verdict}** | {text} | {claim.evidence} |")
    lines += ["", "## Measured by", "", *(f"- {name}: {text}." for name, text in evidence.items())]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> None:
    """Write the page; with ``--probes`` measure what only this page needs before."""
    if "--probes" in arguments:
        from tests.studies import probes

        PROBES.write_text(json.dumps(probes.measure(), indent=1) + "\n", encoding="utf-8")
    DOCS.write_text(page(Measured.load()), encoding="utf-8")
    print(Path(DOCS).relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
