"""DeepSpeed's JSON: what it says, and the rules for a config that DeepSpeed reads without Lightning."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.audit.lint import arithmetic, keys, proof
from bench.audit.lint.arithmetic import CARRY, batches_per_epoch, windows_of
from bench.audit.lint.config_file import load_deepspeed
from bench.audit.lint.known import Options, Version, written
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rules import ENGINE, ENGINE_CONFIG, LintFinding
from bench.audit.lint.section import AUTO, ConfigPart
from bench.audit.stepcount import updates
from bench.audit.training import LARGEST_ACCUMULATE

FP32 = {"fp32", "float32", "torch.float32", "float"}
NAMES = {"bf16": ("bf16", "bfloat16", "torch.bfloat16"), "fp16": ("fp16", "float16", "torch.float16", "half")}
"""How DeepSpeed's config may name a dtype of 16 bits."""
FP16_ERROR = 0.01
"""Sums in fp16 are found from this error on: from N = 42."""
LAST_ONLY = (0, 17, 6), (0, 18, 3)
"""From the first, below the second: ZeRO-2 keeps only the last micro-batch of a window (#7509, fixed by #7665)."""
MISSED_AVERAGE = (0, 18, 6), (0, 19, 0)
"""From the first, below the second: ZeRO-1 with bf16 and fp32 accumulation misses the last average (#7985)."""
SILENT_CLIP = (0, 19, 3)
"""From this version on, gradients are clipped to norm 1.0 unless the config says otherwise (#8068)."""
BF16_SUM = (0, 19, 8)
"""Below this version, ZeRO-2 sums bf16 gradients in bf16, whatever ``grad_accum_dtype`` says (docs/versions.md)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """The parts of a DeepSpeed config that rules need; None where it is silent or 'auto'."""

    section: ConfigPart
    train: int | None = None
    micro: int | None = None
    accumulate: int | None = None
    clip: float | None = None
    stage: int = 0
    offload: bool = False
    bf16: bool = False
    fp16: bool = False
    accumulation_dtype: str | None = None
    drop_last: bool = False
    managed: bool = True

    @property
    def autos(self) -> list[str]:
        """Keys whose value is 'auto'."""
        return [key for key in AUTO_KEYS if self.section.at(key).value == AUTO]


AUTO_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "bf16.enabled",
    "fp16.enabled",
)


def read(section: ConfigPart) -> Config:
    """What a DeepSpeed config says, with DeepSpeed's defaults. Raises InputError naming the key of a wrong value."""
    for name in ("zero_optimization", "bf16", "fp16", "data_types"):
        section.at(name).mapping()
    stage = section.at("zero_optimization.stage").integer(least=0, also=AUTO) or 0
    if stage > 3:
        section.at("zero_optimization.stage").refuse("0, 1, 2 or 3")
    dtype = section.at("data_types.grad_accum_dtype").word()
    offload = section.at("zero_optimization.offload_optimizer").mapping()
    return Config(
        section=section,
        train=section.at("train_batch_size").integer(also=AUTO),
        micro=section.at("train_micro_batch_size_per_gpu").integer(also=AUTO),
        accumulate=section.at("gradient_accumulation_steps").integer(most=LARGEST_ACCUMULATE, also=AUTO),
        clip=section.at("gradient_clipping").number(also=AUTO),
        stage=stage,
        offload=offload.given and offload.at("device").word() not in {None, "none"},
        bf16=section.at("bf16.enabled").flag(default=False, also=AUTO),
        fp16=section.at("fp16.enabled").flag(default=False, also=AUTO),
        accumulation_dtype=None if dtype == AUTO else dtype,
        drop_last=section.at("dataloader_drop_last").flag(default=False, also=AUTO),
        managed=section.at("managed_gradient_accumulation").flag(default=True),
    )


def part_of(place: ConfigPart) -> ConfigPart | None:
    """The DeepSpeed config that another config contains here, or names by path; None if there is nothing here.

    Raises InputError if it cannot be read.
    """
    if isinstance(place.value, Mapping):
        return place
    name = place.word()
    if name is None:
        return None
    path = Path(name)
    beside = Path(place.document.file).parent / name
    if "\0" in name:
        place.refuse("the path of a DeepSpeed JSON")
    try:
        found = next((file for file in (path, beside) if file.is_file()), None)
    except OSError:  # too long a name
        found = None
    if found is None:
        place.refuse("the path of a DeepSpeed JSON, from here or from beside the config")
    return ConfigPart(load_deepspeed(found))


def check(section: ConfigPart, options: Options) -> Iterator[LintFinding]:
    """Findings in a config for ``deepspeed.initialize``. Raises InputError for a wrong value."""
    config = read(section)
    yield from unknown(section)
    yield from _batches(config, options.world_size)
    accumulate = _accumulate(config, options.world_size)
    yield from _silent_clip(config, options)
    if accumulate is not None and accumulate > 1:
        backend = "deepspeed-zero3-eager" if config.stage == 3 else "deepspeed-zero2-eager"
        # A config with 'auto' is for Hugging Face's Trainer, which makes the engine step at the end of an epoch.
        if config.managed and not config.autos:
            yield from _carried(config, accumulate, options, backend)
        yield from sums(config, accumulate, options, world_size=options.world_size)


def _accumulate(config: Config, world_size: int | None) -> int | None:
    """N as DeepSpeed infers it; None if it is unknown."""
    if config.accumulate is not None:
        return config.accumulate
    if "gradient_accumulation_steps" in config.autos:
        return None
    if config.train is not None and config.micro is not None:
        return config.train // config.micro // world_size if world_size else None
    return 1


def _batches(config: Config, world_size: int | None) -> Iterator[LintFinding]:
    train, micro, accumulate = config.train, config.micro, config.accumulate
    section = config.section
    if train is None:
        keys = {"train_batch_size", "train_micro_batch_size_per_gpu"}
        if micro is None and not keys & set(config.autos):
            yield section.at("train_micro_batch_size_per_gpu").finding(
                "BAT02",
                "deepspeed.initialize refuses a config with neither train_batch_size nor "
                "train_micro_batch_size_per_gpu; Lightning and accelerate fill them in",
                "set train_micro_batch_size_per_gpu, or lint the Lightning config that names this file",
                proof.stops(f"{ENGINE_CONFIG} _set_batch_related_parameters"),
            )
        return
    if "gradient_accumulation_steps" in config.autos or "train_micro_batch_size_per_gpu" in config.autos:
        return
    given = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulate, "ranks": world_size}
    factors = {name: number for name, number in given.items() if number is not None}
    product, is_complete = math.prod(factors.values()), len(factors) == len(given)
    # DeepSpeed infers a missing factor by division without remainder, and then refuses the product.
    if train == product if is_complete else train % product == 0:
        return
    near = [str(product * n) for n in (train // product, train // product + 1) if n]
    fix = f"set it to {product}" if is_complete else f"set it to a multiple, such as {' or '.join(near)}"
    names = " x ".join(f"{name} {number}" for name, number in factors.items())
    yield section.at("train_batch_size").finding(
        "BAT01",
        f"train_batch_size {train} is not {'' if is_complete else 'a multiple of '}{names} = {product}; DeepSpeed "
        "refuses it",
        f"{fix}, or remove train_batch_size, which DeepSpeed infers",
        proof.stops(f"{ENGINE_CONFIG} _batch_assertion"),
    )


def _silent_clip(config: Config, options: Options) -> Iterator[LintFinding]:
    place = config.section.at("gradient_clipping")
    if place.given or (options.deepspeed is not None and options.deepspeed < SILENT_CLIP):
        return
    small = SmallRun(4, 8)
    yield place.finding(
        "CLP01",
        f"gradient_clipping is not set, and DeepSpeed {written(options.deepspeed)} (0.19.3 and later) then clips to "
        "norm 1.0: a gradient of norm 5 is scaled by 0.2. Lightning's Trainer sets 0.0, Fabric does not",
        'set "gradient_clipping" to 0.0 to clip nothing, or to the threshold that is meant',
        small.command("deepspeed-zero2-eager", clip=small.clip) + " (shows what a threshold does; the default is 1.0)",
    )


def _carried(config: Config, accumulate: int, options: Options, backend: str) -> Iterator[LintFinding]:
    world_size = options.world_size
    micro = options.batch_size or config.micro
    if micro is None and config.train is not None and world_size:
        micro = config.train // accumulate // world_size
    absent = {"--samples": options.samples, "--world-size": world_size, "--micro-batch": micro or None}
    options.wanted.update(name for name, number in absent.items() if number is None)
    if not (options.samples and world_size and micro):
        return
    num_batches = batches_per_epoch(options.samples, micro, world_size, drop_last=config.drop_last)
    if not num_batches % accumulate:
        return
    plan, small = windows_of(num_batches, accumulate), SmallRun.of(accumulate, num_batches)
    tail, once, twice = plan.partial_window, *(updates(plan, CARRY, num_batches * epochs) for epochs in (1, 2))
    windows = f"are fewer than a window of {accumulate}"
    if plan.full_windows:
        windows = f"are {plan.full_windows} windows of {accumulate}, and {tail} left over"
    yield config.section.at("gradient_accumulation_steps").finding(
        "TAIL02" if plan.full_windows else "WIN01",
        f"{num_batches} micro-batches per epoch and rank {windows}; DeepSpeed continues the window in the next epoch: "
        f"{once} steps after one epoch and {twice} after two. Training that ends after one epoch drops the last {tail} "
        f"micro-batches, after two epochs the last {2 * num_batches % accumulate}",
        f"make the samples a multiple of {micro} x {accumulate} x {world_size} = {micro * accumulate * world_size}, or "
        "call engine.set_gradient_accumulation_boundary(True) before the last micro-batch of an epoch (the loss is "
        f"still divided by {accumulate})",
        small.command(backend, drop_last=config.drop_last, epochs=small.epochs_of_two_steps),
    )


def unknown(section: ConfigPart) -> Iterator[LintFinding]:
    """Keys that DeepSpeed does not know: it ignores them at the top, and refuses them below."""
    yield from keys.ignored(section, "deepspeed", "DeepSpeed")
    for name in ("zero_optimization", "bf16", "fp16"):
        yield from keys.refused(section.at(name), name, f"DeepSpeed raises ValidationError for {name}")


NEEDS_FP32_SUM = "DeepSpeed 0.19.8 or newer, or ZeRO-3"


def sums(
    config: Config, accumulate: int, options: Options, *, world_size: int | None, place: ConfigPart | None = None
) -> Iterator[LintFinding]:
    """What adds the gradients of a window wrongly: a dtype of 16 bits, and defects of the DeepSpeed version.

    ``place`` is the key that sets dtype and stage where the DeepSpeed config itself does not.
    """
    if accumulate <= 1:
        return
    dtype = "bf16" if config.bf16 else "fp16" if config.fp16 else ""
    if dtype:
        yield from _dtype(config, accumulate, _place(config, f"{dtype}.enabled", place), options, dtype)
    if options.deepspeed is not None:
        stage = _place(config, "zero_optimization.stage", place)
        yield from _versions(config, accumulate, stage, options.deepspeed, world_size=world_size)


def _place(config: Config, key: str, other: ConfigPart | None) -> ConfigPart:
    own = config.section.at(key)
    return own if own.given or other is None else other


def _dtype(config: Config, accumulate: int, place: ConfigPart, options: Options, dtype: str) -> Iterator[LintFinding]:
    own = config.section.at("data_types.grad_accum_dtype")
    if config.accumulation_dtype in FP32:
        if config.stage == 0:
            yield own.finding(
                "ACC02",
                f"DeepSpeed raises NotImplementedError: without ZeRO it cannot sum {dtype} gradients in fp32",
                "set zero_optimization.stage to 1, 2 or 3",
                proof.stops(f"{ENGINE} _do_optimizer_sanity_check"),
            )
        return
    if config.accumulation_dtype not in {None, *NAMES[dtype]}:
        return
    fix = 'add "data_types": {"grad_accum_dtype": "fp32"} to the DeepSpeed config'
    number = options.deepspeed
    if config.stage == 0:
        fix += " (which needs ZeRO stage 1, 2 or 3)"
    elif config.stage == 2 and (number is None or number < BF16_SUM):
        fix += (
            f", and use {NEEDS_FP32_SUM}: with ZeRO-2, DeepSpeed "
            f"{'below 0.19.8' if number is None else written(number)} still sums in {dtype} (VER03)"
        )
    yield from summed(own if own.given else place, accumulate, dtype, fix)


def summed(place: ConfigPart, accumulate: int, dtype: str, fix: str) -> Iterator[LintFinding]:
    """The finding that N gradients are added in bf16 or fp16; fp16 is exact enough for a small N."""
    if dtype == "fp16" and arithmetic.worst_error(accumulate, dtype) <= FP16_ERROR:
        return
    yield place.finding(
        "ACC01",
        f"each of the {accumulate} micro-batches' gradients is added in {dtype}, which keeps "
        f"{arithmetic.BITS[dtype]} significant bits: {arithmetic.sum_error(accumulate, dtype)}",
        fix,
        proof.sum_in(dtype, accumulate),
    )


def _versions(
    config: Config, accumulate: int, place: ConfigPart, number: Version, *, world_size: int | None
) -> Iterator[LintFinding]:
    """Defects of the DeepSpeed version, installed or given; ``place`` is the key that sets the stage."""
    if config.stage == 2 and not config.offload and LAST_ONLY[0] <= number < LAST_ONLY[1]:
        yield place.finding(
            "VER01",
            f"DeepSpeed {written(number)} with ZeRO-2 and no offload keeps only the last of the {accumulate} "
            f"micro-batches of a window: {accumulate - 1} of {accumulate} are lost",
            "use DeepSpeed 0.17.5 or older, or 0.18.3 or newer",
            proof.deepspeed(number),
        )
    is_fp32_sum = config.bf16 and config.accumulation_dtype in FP32
    if config.stage == 1 and is_fp32_sum and world_size != 1 and MISSED_AVERAGE[0] <= number < MISSED_AVERAGE[1]:
        yield place.finding(
            "VER02",
            f"DeepSpeed {written(number)} with ZeRO-1, bf16 and fp32 accumulation does not average the last of the "
            f"{accumulate} micro-batches over the ranks",
            "use DeepSpeed 0.19.0 or newer, or set bf16.immediate_grad_update",
            "DeepSpeed #7985 (nox -s versions measures one rank, which has nothing to average over)",
        )
    if config.stage == 2 and is_fp32_sum and number < BF16_SUM:
        yield config.section.at("data_types.grad_accum_dtype").finding(
            "VER03",
            f"DeepSpeed {written(number)} with ZeRO-2 adds the {accumulate} micro-batches' gradients in bf16, whatever "
            f"grad_accum_dtype says: {arithmetic.sum_error(accumulate, 'bf16')}",
            f"use {NEEDS_FP32_SUM}",
            proof.deepspeed(number),
        )
