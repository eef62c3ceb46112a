"""Rules for a LightningCLI config: what is set twice, refused, divided twice, or clipped differently than it says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bench.audit.lint import deepspeed_rules, keys, logging_rules, proof, window_rules
from bench.audit.lint.known import Options
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rules import ENGINE, ENGINE_CONFIG, FORMATS, SCHEDULER, STRATEGY, LintFinding
from bench.audit.lint.section import AUTO, ConfigPart
from bench.audit.lint.trainer import Family, TrainerConfig

LARGEST_CLIP = 1e6
"""A higher clipping threshold is meant to log the norm, not to clip."""


def check(training: TrainerConfig, options: Options) -> Iterator[LintFinding]:
    """Findings in a LightningCLI config."""
    yield from keys.refused(training.trainer, "trainer", "LightningCLI stops with exit status 2")
    yield from _schedule(training)
    if training.engine is None and training.schedule is None:
        yield from _sums(training)
    if training.family is Family.FSDP:
        yield from _fsdp_clip(training)
    if training.engine is not None:
        yield from _engine(training, training.engine, options)
    yield from window_rules.check(training)
    yield from logging_rules.check(training, options)


def _schedule(training: TrainerConfig) -> Iterator[LintFinding]:
    place = training.schedule
    if place is None:
        return
    scheduling = place.at("init_args.scheduling").mapping()
    factors = {}
    for epoch in scheduling.value or {}:
        if not epoch.isdecimal():
            scheduling.refuse("a mapping of epochs, counted from 0, to accumulation factors")
        factors[int(epoch[:15])] = scheduling.at(epoch).integer() or 1
    plan = ", ".join(f"N = {factor} from epoch {epoch}" for epoch, factor in sorted(factors.items())) or "its schedule"
    if training.engine is not None:
        yield place.finding(
            "SCH01",
            f"Lightning raises RuntimeError: DeepSpeed's N cannot change between epochs ({plan})",
            "remove the callback and set trainer.accumulate_grad_batches, or use DDP or FSDP2",
            proof.stops(f"{SCHEDULER} on_train_start"),
        )
    elif training.accumulate != 1:
        yield place.finding(
            "SCH02",
            f"Lightning raises ValueError: trainer.accumulate_grad_batches is {training.accumulate}, and the callback "
            f"has {plan}",
            "keep one of the two",
            proof.stops(f"{SCHEDULER} on_train_start"),
        )
    elif max(factors.values(), default=1) > 1:
        first = factors.get(0, 1)
        yield place.finding(
            "SCH03",
            f"trainer.estimated_stepping_batches uses the N of the moment, {first} before training starts, although "
            f"{plan}: a learning-rate schedule built on it has the wrong length",
            "give the schedule the number of steps yourself",
            "call trainer.estimated_stepping_batches in configure_optimizers, and count the steps",
        )


def _sums(training: TrainerConfig) -> Iterator[LintFinding]:
    """Parameters in 16 bits have gradients in 16 bits, under every strategy."""
    dtype = {"bf16-true": "bf16", "16-true": "fp16"}.get(training.precision)
    if dtype and training.accumulate > 1:
        place = training.trainer.at("precision")
        fix = "set precision to bf16-mixed or 32-true, whose parameters and gradients are in fp32"
        yield from deepspeed_rules.summed(place, training.accumulate, dtype, fix)


def _fsdp_clip(training: TrainerConfig) -> Iterator[LintFinding]:
    if training.clip and not training.clip_by_value:
        yield training.trainer.at("gradient_clip_val").finding(
            "CLP04",
            f"Lightning raises MisconfigurationException at the first step: FSDPStrategy cannot clip to norm "
            f"{training.clip:g}",
            "use ModelParallelStrategy (FSDP2), or clip by value",
            proof.stops("lightning/pytorch/plugins/precision/fsdp.py clip_grad_by_norm"),
        )


def _engine(training: TrainerConfig, engine: deepspeed_rules.Config, options: Options) -> Iterator[LintFinding]:
    """Rules for DeepSpeed under Lightning."""
    own = training.engine_config
    strategy = training.trainer.at("strategy")
    if training.clip_by_value:
        yield training.trainer.at("gradient_clip_algorithm").finding(
            "CLP02",
            "Lightning raises MisconfigurationException: DeepSpeed does not clip by value",
            "set gradient_clip_algorithm to norm",
            proof.stops(f"{STRATEGY} init_deepspeed"),
        )
    if own is not None:
        yield from deepspeed_rules.unknown(own)
        yield from _optimizers(own)
        yield from _set_beside(training, own)
        yield from _autos(engine, own)
        yield from _batches(training, engine, own)
        yield from _two_clips(training, engine, own)
    if training.schedule is None:
        yield from _twice(training, engine, strategy)
        yield from _engine_sums(training, engine, options)


def _engine_sums(training: TrainerConfig, engine: deepspeed_rules.Config, options: Options) -> Iterator[LintFinding]:
    """Sums under DeepSpeed, whose dtype is the Trainer's precision unless its own config has that dtype's part."""
    own, place = training.engine_config, training.trainer.at("strategy")
    is_bf16, is_fp16 = (training.precision.startswith(name) for name in ("bf16", "16"))
    if (is_bf16 or is_fp16) and not (own and own.at("bf16" if is_bf16 else "fp16").given):
        engine = dataclasses.replace(engine, bf16=is_bf16, fp16=is_fp16)
        place = training.trainer.at("precision")
    yield from deepspeed_rules.sums(engine, training.accumulate, options, world_size=training.world_size, place=place)


def _optimizers(own: ConfigPart) -> Iterator[LintFinding]:
    """DeepSpeed's optimizer, or its schedule, in place of the module's. Measured with Lightning 2.6.6."""
    optimizer, scheduler = own.at("optimizer"), own.at("scheduler")
    if optimizer.given:
        schedule = "the schedule is the DeepSpeed config's" if scheduler.given else "there is no learning-rate schedule"
        yield optimizer.finding(
            "OPT01",
            "Lightning does not call configure_optimizers: the module's optimizer and learning-rate schedule are "
            f"ignored, the optimizer is DeepSpeed's {optimizer.at('type').value or ''}, and {schedule}",
            "remove optimizer and scheduler from the DeepSpeed config, and define both in configure_optimizers",
            "raise an exception in configure_optimizers: it is never raised",
        )
    elif scheduler.given:
        yield scheduler.finding(
            "OPT01",
            "DeepSpeed's schedule is used, with interval step, only if configure_optimizers returns none; otherwise it "
            "is ignored",
            "remove scheduler from the DeepSpeed config, and define it in configure_optimizers",
            f"{ENGINE} _configure_lr_scheduler takes the module's schedule if there is one",
        )


def _set_beside(training: TrainerConfig, own: ConfigPart) -> Iterator[LintFinding]:
    place = own.at("gradient_accumulation_steps")
    if place.given:
        yield place.finding(
            "GAS01",
            "Lightning raises MisconfigurationException, whatever the value: the strategy itself sets it to the "
            f"Trainer's accumulate_grad_batches, {training.accumulate}",
            "remove gradient_accumulation_steps and set trainer.accumulate_grad_batches",
            proof.stops(FORMATS),
        )


def _autos(engine: deepspeed_rules.Config, own: ConfigPart) -> Iterator[LintFinding]:
    for key in engine.autos:
        place = own.at(key)
        if key == "gradient_accumulation_steps":
            continue  # GAS01
        if key.endswith(".enabled"):
            dtype = key.partition(".")[0]
            what = (
                f"only Hugging Face's Trainer fills in 'auto'; DeepSpeed ignores it, so {dtype} stays off, and "
                f"Lightning does not enable it because the config has '{dtype}': training is in fp32"
            )
            where = "deepspeed/runtime/config_utils.py DeepSpeedConfigModel drops 'auto'"
        else:
            what = (
                "only Hugging Face's Trainer fills in 'auto'; Lightning does not, and DeepSpeed compares the word with "
                "a number: TypeError"
            )
            where = proof.stops(f"{ENGINE_CONFIG}, or engine.py where it clips")
        yield place.finding("AUT01", what, f"remove {key}; Lightning sets it", where)


def _batches(training: TrainerConfig, engine: deepspeed_rules.Config, own: ConfigPart) -> Iterator[LintFinding]:
    micro = engine.micro or training.batch_size
    world_size, accumulate = training.world_size, training.accumulate
    if engine.train is not None and micro and world_size and training.schedule is None:
        product = micro * accumulate * world_size
        if engine.train != product:
            yield own.at("train_batch_size").finding(
                "BAT01",
                f"train_batch_size is {engine.train}, and the strategy adds micro-batch {micro} x "
                f"accumulate_grad_batches {accumulate} x ranks {world_size} = {product}; DeepSpeed refuses it",
                "remove train_batch_size, which DeepSpeed infers",
                proof.stops(f"{ENGINE_CONFIG} _batch_assertion"),
            )
    if engine.micro and training.batch_size and engine.micro != training.batch_size:
        yield own.at("train_micro_batch_size_per_gpu").finding(
            "BAT03",
            f"the loader has micro-batches of {training.batch_size} samples, the DeepSpeed config says {engine.micro}: "
            "training follows the loader, but DeepSpeed's samples/s and its count of samples follow the config and are "
            f"{engine.micro / training.batch_size:.3g} times the truth",
            "remove train_micro_batch_size_per_gpu; the strategy takes it from the loader",
            "compare engine.global_samples with the samples that the loader returned",
        )


def _two_clips(training: TrainerConfig, engine: deepspeed_rules.Config, own: ConfigPart) -> Iterator[LintFinding]:
    place = own.at("gradient_clipping")
    if training.clip is None or not place.given or place.value == AUTO or engine.clip == training.clip:
        return
    yield place.finding(
        "CLP03",
        f"DeepSpeed clips to {engine.clip or 0.0:g}, as its config says; trainer.gradient_clip_val {training.clip:g} "
        "is ignored",
        "keep one of the two",
        f"{FORMATS} sets gradient_clipping only where it is missing",
    )


def _twice(training: TrainerConfig, engine: deepspeed_rules.Config, strategy: ConfigPart) -> Iterator[LintFinding]:
    """The loss is divided by N in Lightning's closure and again in the engine's backward."""
    accumulate = training.accumulate
    if accumulate <= 1:
        return
    backend = training.backend
    corrected = ["lightning-deepspeed-zero2-corrected"] if backend == "lightning-deepspeed-zero2" else []
    small = SmallRun.of(accumulate)
    yield strategy.finding(
        "DBL01",
        f"Lightning divides the loss by N = {accumulate}, and DeepSpeed divides it again: each micro-batch weighs "
        f"1/{accumulate**2} instead of 1/{accumulate}, so the gradient is {accumulate} times too small. SGD takes "
        f"steps {accumulate} times too short; Adam hides it, except in eps, logged gradient norms and clipping",
        f"return loss * {accumulate} (self.trainer.accumulate_grad_batches) from training_step, and log the loss "
        "without that factor",
        small.command("lightning-ddp", backend, *corrected),
    )
    own = training.engine_config
    place = own.at("gradient_clipping") if own else None
    clip = engine.clip if place is not None and place.given else training.clip
    # A threshold that no gradient reaches clips nothing anyway.
    if clip and clip <= LARGEST_CLIP:
        where = place if place is not None and place.given else training.trainer.at("gradient_clip_val")
        yield where.finding(
            "DBL02",
            f"the norm that is compared with {clip:g} is {accumulate} times too small (DBL01): only a gradient of norm "
            f"above {accumulate} x {clip:g} = {accumulate * clip:g} is clipped",
            f"correct the loss (DBL01), or clip at {clip:g} / {accumulate} = {clip / accumulate:g}",
            small.command("lightning-ddp", backend, clip=small.clip),
        )
