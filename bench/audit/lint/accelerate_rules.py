"""The YAML of ``accelerate config``: what ``accelerate launch`` makes of it. Measured with accelerate 1.15.0."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bench.audit.lint import deepspeed_rules, hugging_face_rules, keys, proof
from bench.audit.lint.arithmetic import batches_per_epoch, windows_of
from bench.audit.lint.deepspeed_rules import Config
from bench.audit.lint.known import Options
from bench.audit.lint.rules import LintFinding, Severity
from bench.audit.lint.section import AUTO, ConfigPart
from bench.audit.training import LARGEST_ACCUMULATE

PLUGIN = "accelerate/utils/dataclasses.py DeepSpeedPlugin"
BESIDE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_param_nvme_path",
    "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)
"""Keys that must not stand beside ``deepspeed_config_file``."""
NONE = "none"


def world_size(section: ConfigPart, options: Options) -> int | None:
    """Ranks: ``num_processes`` counts those of all machines."""
    processes = section.at("num_processes").integer(least=-1)
    return options.world_size or (processes if processes and processes > 0 else None)


def check(section: ConfigPart, options: Options, trainer: ConfigPart | None = None) -> Iterator[LintFinding]:
    """Findings in a config of accelerate, and in the TrainingArguments that are launched with it, if they are known.

    Raises InputError for a wrong value.
    """
    yield from keys.refused(section, "accelerate", "accelerate launch raises ValueError")
    kind = str(section.at("distributed_type").value).upper()  # NO without quotes is false in YAML
    ranks = world_size(section, options)
    if kind == "DEEPSPEED":
        yield from _deepspeed(section, options, ranks, trainer)
    if trainer is None and kind in {"FSDP", "MULTI_GPU"} and ranks and ranks > 1:
        yield section.at("num_processes").finding(
            "SCH04",
            f"a learning-rate scheduler that is passed to accelerator.prepare steps {ranks} times per update: a "
            f"schedule of T steps ends after T / {ranks} updates",
            f"multiply the schedule's length by {ranks}, or pass step_scheduler_with_optimizer=False and step it "
            "yourself",
            "accelerate/scheduler.py AcceleratedScheduler.step",
        )


def _deepspeed(
    section: ConfigPart, options: Options, ranks: int | None, trainer: ConfigPart | None
) -> Iterator[LintFinding]:
    inner = section.at("deepspeed_config").mapping()
    yield from keys.ignored(inner, "deepspeed_config", "accelerate launch")
    named = inner.at("deepspeed_config_file")
    own = deepspeed_rules.part_of(named)
    arguments = None if trainer is None else hugging_face_rules.read(trainer, options)
    if own is None:
        engine, accumulate = _engine(inner), inner.at("gradient_accumulation_steps")
    else:
        engine, accumulate = deepspeed_rules.read(own), own.at("gradient_accumulation_steps")
        yield from deepspeed_rules.unknown(own)
        yield from _beside(section, inner, named)
    if arguments is not None:
        yield from hugging_face_rules.differs(accumulate, arguments.accumulate, "gradient_accumulation_steps")
        clip = inner if own is None else own
        yield from hugging_face_rules.differs(clip.at("gradient_clipping"), arguments.clip, "max_grad_norm")
    elif own is not None and not accumulate.given:
        yield named.finding(
            "GAS02",
            "the DeepSpeed config does not set gradient_accumulation_steps, and accelerate then sets it to 1: "
            "Accelerator(gradient_accumulation_steps=N) is overruled, and every micro-batch is a step",
            'add "gradient_accumulation_steps": "auto" to the DeepSpeed config',
            f"{PLUGIN}.__post_init__; accelerator.gradient_accumulation_steps is 1 after prepare",
        )
    elif accumulate.given and accumulate.value != AUTO:
        yield accumulate.finding(
            "GAS03",
            f"N is {accumulate.value} whatever the script says: accelerate prefers it to "
            "Accelerator(gradient_accumulation_steps=...)",
            f"remove it and set N in the script, or read accelerator.gradient_accumulation_steps ({accumulate.value}) "
            "there",
            "print(accelerator.gradient_accumulation_steps) after accelerator.prepare",
        )
    if arguments is None and own is None and not inner.at("gradient_clipping").given:
        yield inner.finding(
            "CLP01",
            "gradient_clipping is not set, and accelerate then has DeepSpeed clip to norm 1.0: a gradient of norm 5 is "
            "scaled by 0.2",
            "set gradient_clipping to 0.0 to clip nothing, or to the threshold that is meant",
            "accelerate/accelerator.py _prepare_deepspeed; engine.gradient_clipping() is 1.0 after prepare",
        )
    n = engine.accumulate if arguments is None else arguments.accumulate
    if n is None or n <= 1:
        return
    precision = section.at("mixed_precision")
    place = precision if precision.given else inner
    yield from deepspeed_rules.sums(_with_dtype(engine, section, own), n, options, world_size=ranks, place=place)
    if arguments is None:
        yield from _partial(accumulate, n, options, engine, ranks)


def _engine(inner: ConfigPart) -> Config:
    """What accelerate tells DeepSpeed where there is no config file."""
    clip, accumulate = inner.at("gradient_clipping"), inner.at("gradient_accumulation_steps")
    stage = inner.at("zero_stage").integer(least=0)
    if stage is not None and stage > 3:
        inner.at("zero_stage").refuse("0, 1, 2 or 3")
    return Config(
        # Its keys are DeepSpeed's only in part; none of them is one that rules about sums look up.
        section=inner,
        accumulate=accumulate.integer(most=LARGEST_ACCUMULATE, also=AUTO),
        clip=None if clip.value == NONE else clip.number(also=AUTO),
        stage=2 if stage is None else stage,
        offload=inner.at("offload_optimizer_device").word() not in {None, NONE},
    )


def _with_dtype(engine: Config, section: ConfigPart, own: ConfigPart | None) -> Config:
    """The engine with the dtype of ``mixed_precision``, which a config file overrides."""
    given = {
        name: getattr(engine, name)
        if own is not None and own.at(name).given and own.at(f"{name}.enabled").value != AUTO
        else section.at("mixed_precision").value == name
        for name in ("bf16", "fp16")
    }
    return dataclasses.replace(engine, bf16=given["bf16"], fp16=given["fp16"])


def _beside(section: ConfigPart, inner: ConfigPart, named: ConfigPart) -> Iterator[LintFinding]:
    beside = [inner.at(key) for key in BESIDE]
    for place in [each for each in (*beside, section.at("mixed_precision")) if each.given]:
        yield place.finding(
            "MIS02",
            f"accelerate raises ValueError: {place.path[-1]} must not be set beside deepspeed_config_file "
            f"{named.value}",
            f"remove {place.path[-1]}, and set it in {named.value}",
            proof.stops(f"{PLUGIN}._deepspeed_config_checks"),
        )


def _partial(place: ConfigPart, n: int, options: Options, engine: Config, ranks: int | None) -> Iterator[LintFinding]:
    micro = options.batch_size or engine.micro
    absent = {"--samples": options.samples, "--world-size": ranks, "--micro-batch": micro}
    options.wanted.update(name for name, number in absent.items() if number is None)
    if not (options.samples and ranks and micro):
        return
    plan = windows_of(batches_per_epoch(options.samples, micro, ranks, drop_last=engine.drop_last) or n, n)
    if tail := plan.partial_window:
        yield place.finding(
            "TAIL01",
            f"{plan.micro_batches_per_epoch} micro-batches per epoch and rank leave {tail} after {plan.full_windows} "
            f"windows of {n}: with a prepared loader, accumulate() steps after these {tail} but still divides by {n}, "
            f"so the last step of every epoch has {tail}/{n} of the mean gradient; with another loader, DeepSpeed "
            "continues the window in the next epoch. Hugging Face's Trainer weighs it rightly",
            f"make the samples a multiple of {micro * n * ranks}",
            "accelerate/accelerator.py backward divides by gradient_accumulation_steps in every window",
            Severity.INFO,
        )
