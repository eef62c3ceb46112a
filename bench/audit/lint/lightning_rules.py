"""Rules for LightningCLI: what is set twice, refused, divided twice, or clipped otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import logging_rules, window_rules  # noqa: F401 - the former has rules too
from bench.audit.lint.class_reference import arguments
from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.deepspeed_config import DeepSpeedConfig, deepspeed_keys
from bench.audit.lint.deepspeed_rules import ENGINE_CONFIG
from bench.audit.lint.known_keys import Keys, known_keys, repeated_keys
from bench.audit.lint.lightning_config import LightningConfig
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rules import Found, rule, says
from bench.audit.lint.sum_rules import ENGINE, GradientSum, in_16_bits
from bench.audit.lint.version_facts import holds, is_known_bad, source
from bench.findings import Level

LARGEST_CLIP = 1e6
"""A higher clipping threshold is meant to log the norm, not to clip."""
STRATEGY = "lightning/pytorch/strategies/deepspeed.py"
FORMATS = f"{STRATEGY} _format_batch_size_and_grad_accum_config"
SCHEDULER = "lightning/pytorch/callbacks/gradient_accumulation_scheduler.py"
TWO_FACTORS = (
    f"{SCHEDULER} on_train_start; transformers/trainer.py create_accelerator_and_postprocess"
)
FSDP_CLIP = "lightning/pytorch/plugins/precision/fsdp.py"
OF_HYDRA = ("_target_", "_recursive_", "_convert_", "_partial_", "_args_")
"""Keys by which Hydra makes an object."""


@dataclass(frozen=True)
class LightningDeepSpeed:
    """DeepSpeed under Lightning."""

    training: LightningConfig
    engine: DeepSpeedConfig


def in_strategy(config: str, more: str = "") -> str:
    """The example with this DeepSpeed config under Lightning, and further keys of the Trainer."""
    return (
        "lightning: {strategy: {class_path: DeepSpeedStrategy, init_args: {config: {"
        + config
        + "}}}"
        + more
        + "}"
    )


@dataclass(frozen=True)
class RemovedArgument:
    """An argument that Trainer had in Lightning 1.x."""

    place: ConfigPart
    options: LintOptions


def subjects(
    root: ConfigPart, options: LintOptions, *, is_command_line: bool = True
) -> Iterator[object]:
    """What rules are about in a config of Lightning, which LightningCLI reads or another program.

    Raises InputError for a wrong value.
    """
    training = LightningConfig(root, options)
    engine = training.engine
    removed = {*known_keys()["trainer_removed"], *OF_HYDRA}
    yield from repeated_keys(root)
    if is_command_line:
        reader = "LightningCLI stops with exit status 2"
        appended = {f"{key}+" for key in known_keys()["trainer"]}  # adds to a list (jsonargparse)
        ignored = frozenset(removed | appended)
        yield Keys(training.trainer, "trainer", reader, refused=True, ignored=ignored)
    else:
        reader, ignored = "Lightning's Trainer", frozenset(removed)
        yield Keys(training.trainer, "trainer", reader, shared=True, ignored=ignored)
    removed_here = list(_removed_arguments(training))
    yield from removed_here
    if removed_here and holds("removed-trainer-keys", options.lightning):
        return  # nothing is trained, of which more could be said
    yield training
    for key in ("accumulate_grad_batches", "max_epochs", "max_steps", "strategy"):
        options.note_if_unknown(training.trainer.at(key))
    if engine is not None:
        if isinstance(engine.part.value, dict):
            yield from deepspeed_keys(engine.part, options)
        elif not engine.is_known:
            place = engine.part
            options.note(
                f"{place.file}:{place.line}: the DeepSpeed config {place.value} is not here, and "
                "not judged"
            )
        yield LightningDeepSpeed(training, engine)
        if training.schedule is None and engine.is_known:
            yield _sum(training, engine)
    yield from window_rules.subjects(training)


def _removed_arguments(training: LightningConfig) -> Iterator[RemovedArgument]:
    for key in training.trainer.names_here:
        if key in known_keys()["trainer_removed"]:
            yield RemovedArgument(training.trainer.under(key), training.options)


def _sum(training: LightningConfig, engine: DeepSpeedConfig) -> GradientSum:
    """Sums under DeepSpeed.

    Their dtype is the Trainer's precision, unless DeepSpeed's own config has that dtype's part.
    """
    names = []
    for name, start in (("bf16", "bf16"), ("fp16", "16")):
        if training.precision.startswith(start):
            names.append(name)
    filled = engine
    key = "strategy"
    if names:
        filled = engine.with_dtypes(names, auto=False)
        if filled != engine:
            key = "precision"
    place = training.trainer.at(key)
    return GradientSum(filled, training.accumulate, training.options, training.world_size, place)


@rule(RemovedArgument, "KEY04", "lightning: {gpus: 2}")
@says(Level.NOTE, "argument of an older Lightning", source("removed-trainer-keys"))
def _removed(argument: RemovedArgument) -> Iterator[Found]:
    place, used = argument.place, argument.options.lightning
    if holds("removed-trainer-keys", used):
        what = (
            f"Trainer had {place.name} in Lightning 1.x; Lightning {used} refuses it, so nothing "
            "would be trained"
        )
        yield Found(place, what, "remove it, or use the Lightning that the config was written for")


@rule(LightningConfig, "ACC01", "lightning: {precision: bf16-true}")
def _parameters_in_16_bits(training: LightningConfig) -> Iterator[Found]:
    """Parameters in 16 bits have gradients in 16 bits, under every strategy."""
    dtype = {"bf16-true": "bf16", "16-true": "fp16"}.get(training.precision)
    if dtype and training.accumulate > 1 and training.engine is None and training.schedule is None:
        fix = "set precision to bf16-mixed or 32-true, whose parameters and gradients are in fp32"
        yield from in_16_bits(training.trainer.at("precision"), training.accumulate, dtype, fix)


@rule(
    LightningConfig,
    "SCH01",
    "lightning: {strategy: deepspeed, callbacks: GradientAccumulationScheduler}",
)
@says(
    Level.ERROR,
    "GradientAccumulationScheduler with DeepSpeed",
    f"{SCHEDULER} on_train_start",
    stops=True,
)
@rule(LightningConfig, "SCH02", "lightning: {callbacks: GradientAccumulationScheduler}")
@says(Level.ERROR, "two accumulation factors", TWO_FACTORS, stops=True)
@rule(
    LightningConfig,
    "SCH03",
    "lightning: {accumulate_grad_batches: 1, callbacks: "
    "{class_path: GradientAccumulationScheduler, init_args: {scheduling: {0: 2}}}}",
)
@says(
    Level.NOTE,
    "estimated number of steps ignores that N changes",
    "lightning/pytorch/trainer/trainer.py",
)
def _schedule(training: LightningConfig) -> Iterator[Found]:
    place = training.schedule
    if place is None:
        return
    scheduling = arguments(place).at("scheduling").mapping()
    if scheduling.unknown:
        return
    epochs = scheduling.names_here
    if not all(epoch.isdecimal() for epoch in epochs):
        scheduling.refuse("a mapping of epochs, counted from 0, to accumulation factors")
    factors = {int(epoch[:15]): scheduling.at(epoch).integer(default=1) for epoch in epochs}
    plan = "its schedule"
    if factors:
        plan = ", ".join(
            f"N = {factor} from epoch {epoch}" for epoch, factor in sorted(factors.items())
        )
    if training.engine is not None:
        what = f"Lightning raises RuntimeError: DeepSpeed's N cannot change between epochs ({plan})"
        fix = "remove the callback and set trainer.accumulate_grad_batches, or use DDP or FSDP2"
        yield Found(place, what, fix, code="SCH01")
    elif training.accumulate != 1:
        given = f"trainer.accumulate_grad_batches is {training.accumulate}"
        what = f"Lightning raises ValueError: {given}, and the callback has {plan}"
        yield Found(place, what, "keep one of the two", code="SCH02")
    elif max(factors.values(), default=1) > 1:
        yield Found(
            place,
            f"trainer.estimated_stepping_batches assumes N = {factors.get(0, 1)} for the whole "
            "training, "
            f"although {plan}: a learning-rate schedule built on it has the wrong length",
            "give the schedule the number of steps yourself",
            "call trainer.estimated_stepping_batches in configure_optimizers, and count the steps",
            code="SCH03",
        )


@rule(LightningConfig, "CLP04", "lightning: {strategy: fsdp, gradient_clip_val: 1.0}")
@says(
    Level.ERROR,
    "clipping by norm with FSDP",
    f"{FSDP_CLIP} clip_grad_by_norm; Lightning #19235",
    stops=True,
)
def _fsdp_clip(training: LightningConfig) -> Iterator[Found]:
    if training.is_fsdp and training.clip and not training.clip_by_value:
        what = (
            "Lightning raises MisconfigurationException: FSDPStrategy cannot clip to norm "
            f"{training.clip:g}"
        )
        fix = "use ModelParallelStrategy (FSDP2), or clip by value"
        yield Found(training.trainer.at("gradient_clip_val"), what, fix)


@rule(
    LightningDeepSpeed,
    "CLP02",
    "lightning: {strategy: deepspeed_stage_3, gradient_clip_algorithm: value, gradient_clip_val: "
    "1}",
)
@says(Level.ERROR, "clipping by value with DeepSpeed", f"{STRATEGY} init_deepspeed", stops=True)
def _clip_by_value(both: LightningDeepSpeed) -> Iterator[Found]:
    if both.training.clip_by_value:
        what = "Lightning raises MisconfigurationException: DeepSpeed does not clip by value"
        yield Found(
            both.training.trainer.at("gradient_clip_algorithm"),
            what,
            "set gradient_clip_algorithm to norm",
        )


@rule(
    LightningDeepSpeed,
    "OPT01",
    in_strategy("zero_optimization: {stage: 2}, optimizer: {type: AdamW}"),
    "DBL01",
)
@says(
    Level.WARNING,
    "optimizer or schedule in DeepSpeed's config",
    f"{STRATEGY} _initialize_deepspeed_train",
)
def _optimizers(both: LightningDeepSpeed) -> Iterator[Found]:
    """Measured with Lightning 2.6.6."""
    optimizer, scheduler = both.engine.part.at("optimizer"), both.engine.part.at("scheduler")
    if optimizer.given:
        whose = "DeepSpeed's"
        if optimizer.at("type").given:
            whose += f" {optimizer.at('type').value}"
        schedule = "there is no learning-rate schedule"
        if scheduler.given:
            schedule = "the schedule is the DeepSpeed config's"
        yield Found(
            optimizer,
            f"Lightning does not call configure_optimizers: the optimizer is {whose}, and "
            f"{schedule}",
            "remove optimizer and scheduler from the DeepSpeed config, and define both in "
            "configure_optimizers",
            "raise an exception in configure_optimizers: it is never raised",
        )
    elif scheduler.given:
        what = (
            "DeepSpeed's schedule is used, with interval step, only if configure_optimizers "
            "returns none"
        )
        fix = "remove scheduler from the DeepSpeed config, and define it in configure_optimizers"
        yield Found(
            scheduler,
            what,
            fix,
            f"{ENGINE} _configure_lr_scheduler takes the module's schedule if there is one",
        )


@rule(LightningDeepSpeed, "GAS01", in_strategy("gradient_accumulation_steps: 4"))
@says(Level.ERROR, "accumulation set in DeepSpeed's config too", FORMATS, stops=True)
def _set_in_both(both: LightningDeepSpeed) -> Iterator[Found]:
    place = both.engine.part.at("gradient_accumulation_steps")
    if place.given:
        what = (
            "Lightning raises MisconfigurationException: it sets this itself, to "
            "trainer.accumulate_grad_batches, "
        )
        fix = "remove gradient_accumulation_steps and set trainer.accumulate_grad_batches"
        yield Found(place, f"{what}{both.training.accumulate}", fix)


@rule(LightningDeepSpeed, "AUT01", in_strategy("gradient_clipping: auto"))
@says(
    Level.ERROR,
    "'auto' that nothing fills in",
    f"{STRATEGY}; {ENGINE_CONFIG}; Lightning #19891",
    stops=True,
)
def _autos(both: LightningDeepSpeed) -> Iterator[Found]:
    for key in both.engine.autos:
        dtype = key.removesuffix(".enabled")
        what = (
            "only Hugging Face's Trainer fills in 'auto': DeepSpeed compares it with a number "
            "and raises TypeError"
        )
        where = ""
        if key != dtype:
            what = (
                f"only Hugging Face's Trainer fills in 'auto': {dtype} stays off, and training "
                "is in fp32"
            )
            where = "deepspeed/runtime/config_utils.py DeepSpeedConfigModel drops 'auto'"
        if key != "gradient_accumulation_steps":  # that is GAS01
            yield Found(both.engine.part.at(key), what, f"remove {key}; Lightning sets it", where)


@rule(LightningDeepSpeed, "BAT01", in_strategy("train_batch_size: 30"))
def _batch_sizes(both: LightningDeepSpeed) -> Iterator[Found]:
    training, engine = both.training, both.engine
    ranks, n = training.world_size, training.accumulate
    micro = engine.micro_batch
    if micro is None:
        micro = training.batch_size
    if (
        engine.batch is not None
        and micro
        and ranks
        and training.schedule is None
        and engine.batch != micro * n * ranks
    ):
        product = (
            f"micro-batch {micro} x accumulate_grad_batches {n} x ranks {ranks} = "
            f"{micro * n * ranks}"
        )
        what = f"DeepSpeed refuses train_batch_size {engine.batch}: it is not {product}"
        yield Found(
            both.engine.part.at("train_batch_size"),
            what,
            "remove train_batch_size, which DeepSpeed infers",
        )


@rule(LightningDeepSpeed, "BAT03", in_strategy("train_micro_batch_size_per_gpu: 1"), "DBL01")
@says(Level.NOTE, "two micro-batch sizes", f"{STRATEGY} _auto_select_batch_size")
def _two_sizes(both: LightningDeepSpeed) -> Iterator[Found]:
    loaded, micro = both.training.batch_size, both.engine.micro_batch
    if loaded and micro and micro != loaded:
        yield Found(
            both.engine.part.at("train_micro_batch_size_per_gpu"),
            f"the loader has micro-batches of {loaded} samples, and DeepSpeed counts {micro}: its "
            f"samples and samples/s are {micro / loaded:.3g} times the truth",
            "remove train_micro_batch_size_per_gpu; the strategy takes it from the loader",
            "compare engine.global_samples with the samples that the loader returned",
        )


@rule(
    LightningDeepSpeed,
    "CLP03",
    in_strategy("gradient_clipping: 0.0", ", gradient_clip_val: 1.0"),
    "DBL01",
)
@says(Level.WARNING, "two clipping thresholds", FORMATS)
def _two_clips(both: LightningDeepSpeed) -> Iterator[Found]:
    place, clip, inner = (
        both.engine.part.at("gradient_clipping"),
        both.training.clip,
        both.engine.clip,
    )
    if clip is not None and inner is not None and inner != clip:
        what = (
            f"DeepSpeed clips to {inner:g}, as its config says; trainer.gradient_clip_val {clip:g} "
            "is ignored"
        )
        yield Found(
            place,
            what,
            "keep one of the two",
            f"{FORMATS} sets gradient_clipping only where it is missing",
        )


TWICE = f"lightning/pytorch/loops/optimization/automatic.py; {ENGINE} backward"
DIVIDES_TWICE = "lightning-deepspeed-divides-twice"
"""The advisory of DBL01."""


@rule(LightningDeepSpeed, "DBL01", "lightning: {strategy: deepspeed}")
@says(Level.ERROR, "loss divided by N twice", TWICE, advisory=DIVIDES_TWICE)
@rule(
    LightningDeepSpeed,
    "DBL02",
    "lightning: {strategy: deepspeed_stage_2, gradient_clip_val: 1.0}",
    "DBL01",
)
@says(
    Level.WARNING, "clipping threshold N times too high", "as DBL01: the norm is N times too small"
)
def _twice(both: LightningDeepSpeed) -> Iterator[Found]:
    """The loss is divided by N in Lightning's closure and again in the engine's backward."""
    training, n, backend = both.training, both.training.accumulate, both.training.backend
    if (
        n == 1
        or training.schedule is not None
        or not is_known_bad(DIVIDES_TWICE, training.options.lightning)
    ):
        return
    small = SmallRun.of(n)
    corrected = []
    if backend == "lightning-deepspeed-zero2":
        corrected.append("lightning-deepspeed-zero2-corrected")
    yield Found(
        training.trainer.at("strategy"),
        f"Lightning and DeepSpeed both divide the loss by N = {n}: each micro-batch weighs "
        f"1/{n**2} instead of 1/{n}, "
        f"so SGD takes steps {n} times too short; Adam hides it, except in eps, gradient norms "
        "and clipping",
        f"return loss * {n} (self.trainer.accumulate_grad_batches) from training_step, and log "
        "the loss without it",
        small.command("lightning-ddp", backend, *corrected),
        code="DBL01",
    )
    place, clip = both.engine.part.at("gradient_clipping"), both.engine.clip
    if not place.given:
        place, clip = training.trainer.at("gradient_clip_val"), training.clip
    if clip and clip <= LARGEST_CLIP:
        what = (
            f"the gradient is {n} times too small (DBL01): only a norm above {n} x {clip:g} = "
            f"{n * clip:g} is clipped"
        )
        fix = f"correct the loss (DBL01), or clip at {clip:g} / {n} = {clip / n:g}"
        yield Found(
            place, what, fix, small.command("lightning-ddp", backend, clip=small.clip), code="DBL02"
        )
