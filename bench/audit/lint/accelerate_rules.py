"""The YAML of ``accelerate config``: what ``accelerate launch`` makes of it. Measured with accelerate 1.15.0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import deepspeed_config, hugging_face_rules, proof
from bench.audit.lint.arithmetic import batches_per_epoch, windows_of
from bench.audit.lint.config_file import AUTO, ConfigPart
from bench.audit.lint.deepspeed_config import DeepSpeedConfig, deepspeed_keys, deepspeed_part
from bench.audit.lint.hugging_face_rules import SameValue, TrainerArguments
from bench.audit.lint.known_keys import Keys, known_keys
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import ERROR, INFO, WARNING, Found, rule
from bench.audit.lint.sum_rules import GradientSum
from bench.audit.training import LARGEST_ACCUMULATE

PLUGIN = "accelerate/utils/dataclasses.py DeepSpeedPlugin"
ACCELERATOR = "accelerate/accelerator.py"
NONE = "none"


@dataclass(frozen=True)
class AccelerateRanks:
    """A config for several ranks that a script, not the Trainer, is launched with."""

    place: ConfigPart
    num_ranks: int


@dataclass(frozen=True)
class AccelerateDeepSpeed:
    """DeepSpeed under accelerate."""

    root: ConfigPart
    inner: ConfigPart
    """``deepspeed_config``."""
    given: ConfigPart | None
    """The DeepSpeed config that ``deepspeed_config_file`` names."""
    engine: DeepSpeedConfig
    arguments: TrainerArguments | None
    options: LintOptions
    num_ranks: int | None

    @property
    def file_name(self) -> ConfigPart:
        """Where the DeepSpeed config is named."""
        return self.inner.at("deepspeed_config_file")

    @property
    def accumulate(self) -> ConfigPart:
        """Where N is set."""
        return (self.given or self.inner).at("gradient_accumulation_steps")

    @property
    def n(self) -> int:
        """N, or 1 if it is unknown."""
        return (self.engine.accumulate if self.arguments is None else self.arguments.accumulate) or 1


def world_size(root: ConfigPart, options: LintOptions) -> int | None:
    """Ranks: ``num_processes`` counts those of all machines."""
    processes = root.at("num_processes").integer(least=-1)
    return options.world_size or (processes if processes and processes > 0 else None)


def subjects(root: ConfigPart, options: LintOptions, trainer: ConfigPart | None = None) -> Iterator[object]:
    """What rules are about in a config of accelerate; ``trainer``: the TrainingArguments that are launched with it.

    Raises InputError for a wrong value.
    """
    yield Keys(root, "accelerate", "accelerate launch raises ValueError", refused=True)
    kind = str(root.at("distributed_type").value).upper()  # NO without quotes is false in YAML
    ranks = world_size(root, options)
    if trainer is None and kind in {"FSDP", "MULTI_GPU"} and ranks and ranks > 1:
        yield AccelerateRanks(root.at("num_processes"), ranks)
    if kind != "DEEPSPEED":
        return
    inner = root.at("deepspeed_config").mapping()
    yield Keys(inner, "deepspeed_config", "accelerate launch")
    given = deepspeed_part(inner.at("deepspeed_config_file"))
    arguments = None if trainer is None else hugging_face_rules.read(trainer, options)
    engine = _engine(inner) if given is None else deepspeed_config.read(given)
    if given is not None:
        yield from deepspeed_keys(given)
    both = AccelerateDeepSpeed(root, inner, given, engine, arguments, options, ranks)
    yield both
    if arguments is not None:
        clip = (given or inner).at("gradient_clipping")
        yield SameValue(both.accumulate, arguments.accumulate, "gradient_accumulation_steps")
        yield SameValue(clip, arguments.clip, "max_grad_norm")
    precision = root.at("mixed_precision")
    place = precision if precision.given else inner
    yield GradientSum(_with_dtype(engine, precision, given), both.n, options, ranks, place)


def _engine(inner: ConfigPart) -> DeepSpeedConfig:
    """What accelerate tells DeepSpeed where there is no config file."""
    clip, stage = inner.at("gradient_clipping"), inner.at("zero_stage").zero_stage()
    return DeepSpeedConfig(
        # Its keys are DeepSpeed's only in part; none of them is one that rules about sums look up.
        part=inner,
        accumulate=inner.at("gradient_accumulation_steps").integer(most=LARGEST_ACCUMULATE, also=AUTO),
        clip=None if clip.value == NONE else clip.number(also=AUTO),
        stage=2 if stage is None else stage,
        offload=inner.at("offload_optimizer_device").word() not in {None, NONE},
    )


def _with_dtype(engine: DeepSpeedConfig, precision: ConfigPart, given: ConfigPart | None) -> DeepSpeedConfig:
    """The engine with the dtype of ``mixed_precision``, which a config file overrides."""
    is_on = {
        name: getattr(engine, name)
        if given is not None and given.at(name).given and given.at(f"{name}.enabled").value != AUTO
        else precision.value == name
        for name in ("bf16", "fp16")
    }
    return dataclasses.replace(engine, bf16=is_on["bf16"], fp16=is_on["fp16"])


SCHEDULER = "accelerate/scheduler.py"


@rule("SCH04", INFO, "schedule that steps once per rank", f"{SCHEDULER}; accelerate #2926")
def _schedule(several: AccelerateRanks) -> Iterator[Found]:
    ranks = several.num_ranks
    yield Found(
        several.place,
        f"a learning-rate scheduler that is passed to accelerator.prepare steps {ranks} times per update: a schedule "
        f"of T steps ends after T / {ranks} updates",
        f"multiply the schedule's length by {ranks}, or pass step_scheduler_with_optimizer=False and step it yourself",
        f"{SCHEDULER} AcceleratedScheduler.step",
    )


@rule("MIS02", ERROR, "settings beside deepspeed_config_file", PLUGIN)
def _beside(both: AccelerateDeepSpeed) -> Iterator[Found]:
    settings = [key for key in known_keys()["deepspeed_config"] if not key.startswith(("deepspeed_", "zero3_init"))]
    beside = [*map(both.inner.at, settings), both.root.at("mixed_precision")]
    for place in beside if both.given is not None else ():
        if place.given:
            file = both.file_name.value
            yield Found(
                place,
                f"accelerate raises ValueError: {place.name} must not be set beside deepspeed_config_file {file}",
                f"remove {place.name}, and set it in {file}",
                proof.stops(f"{PLUGIN}._deepspeed_config_checks"),
            )


@rule("GAS02", WARNING, "accumulation reset to 1", PLUGIN)
@rule("GAS03", INFO, "accumulation set outside the script", f"{ACCELERATOR} __init__, _prepare_deepspeed")
def _accumulate(both: AccelerateDeepSpeed) -> Iterator[Found]:
    place, n = both.accumulate, both.accumulate.value
    if both.arguments is not None:
        return
    if both.given is not None and not place.given:
        yield Found(
            both.file_name,
            "the DeepSpeed config does not set gradient_accumulation_steps, and accelerate then sets it to 1: "
            "Accelerator(gradient_accumulation_steps=N) is overruled, and every micro-batch is a step",
            'add "gradient_accumulation_steps": "auto" to the DeepSpeed config',
            f"{PLUGIN}.__post_init__; accelerator.gradient_accumulation_steps is 1 after prepare",
            code="GAS02",
        )
    elif place.given and n != AUTO:
        yield Found(
            place,
            f"N is {n} whatever the script says: accelerate prefers it to Accelerator(gradient_accumulation_steps=...)",
            f"remove it and set N in the script, or read accelerator.gradient_accumulation_steps ({n}) there",
            "print(accelerator.gradient_accumulation_steps) after accelerator.prepare",
            code="GAS03",
        )


@rule("CLP01")
def _silent_clip(both: AccelerateDeepSpeed) -> Iterator[Found]:
    if both.arguments is None and both.given is None and not both.inner.at("gradient_clipping").given:
        yield Found(
            both.inner,
            "gradient_clipping is not set, and accelerate then has DeepSpeed clip to norm 1.0: a gradient of norm 5 is "
            "scaled by 0.2",
            "set gradient_clipping to 0.0 to clip nothing, or to the threshold that is meant",
            f"{ACCELERATOR} _prepare_deepspeed; engine.gradient_clipping() is 1.0 after prepare",
        )


@rule("TAIL01")
def _underweighted(both: AccelerateDeepSpeed) -> Iterator[Found]:
    n, options, ranks = both.n, both.options, both.num_ranks
    micro = options.batch_size or both.engine.micro
    if both.arguments is not None or n == 1:
        return
    options.want(options.samples, ranks, micro)
    if not (options.samples and ranks and micro):
        return
    plan = windows_of(batches_per_epoch(options.samples, micro, ranks, drop_last=both.engine.drop_last) or n, n)
    if tail := plan.partial_window:
        yield Found(
            both.accumulate,
            f"{plan.micro_batches_per_epoch} micro-batches per epoch and rank leave {tail} after {plan.full_windows} "
            f"windows of {n}: with a prepared loader, accumulate() steps after these {tail} but still divides by {n}, "
            f"so the last step of every epoch has {tail}/{n} of the mean gradient; with another loader, DeepSpeed "
            "continues the window in the next epoch. Hugging Face's Trainer weighs it rightly",
            f"make the samples a multiple of {micro * n * ranks}",
            f"{ACCELERATOR} backward divides by gradient_accumulation_steps in every window",
            INFO,
        )
