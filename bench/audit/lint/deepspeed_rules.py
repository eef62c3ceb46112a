"""DeepSpeed's JSON: what it says, and the rules for one that goes to DeepSpeed without Lightning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import arithmetic, proof
from bench.audit.lint.arithmetic import Epochs, batches_per_epoch
from bench.audit.lint.known import Options, written
from bench.audit.lint.proof import Small
from bench.audit.lint.rules import LintFinding, Severity
from bench.audit.lint.section import AUTO, ConfigPart
from bench.audit.training import LARGEST_ACCUMULATE

FP32 = {"fp32", "float32", "torch.float32", "float"}
LAST_ONLY = (0, 17, 6), (0, 18, 3)
"""From the first, below the second: ZeRO-2 keeps only the last micro-batch of a window (#7509, cured by #7665)."""
MISSED_AVERAGE = (0, 18, 6), (0, 19, 0)
"""From the first, below the second: ZeRO-1 with bf16 and fp32 accumulation misses the last average (#7985)."""
SILENT_CLIP = (0, 19, 3)
"""From here on gradients are clipped to norm 1.0 if the config is silent (#8068)."""
BF16_SUM = (0, 19, 8)
"""Below it ZeRO-2 sums gradients of bf16 in bf16, whatever ``grad_accum_dtype`` says (docs/versions.md)."""


@dataclass(frozen=True)
class Config:
    """What matters of a DeepSpeed config."""

    section: ConfigPart
    train: int | None
    micro: int | None
    accumulate: int | None
    clip: float | None
    stage: int
    offload: bool
    bf16: bool
    accumulation_dtype: str | None
    drop_last: bool
    managed: bool

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
    """What a DeepSpeed config says; None and the defaults where it is silent or 'auto'.

    Raises InputError naming the key of a wrong value.
    """
    for name in ("zero_optimization", "bf16", "data_types"):
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
        accumulation_dtype=None if dtype == AUTO else dtype,
        drop_last=section.at("dataloader_drop_last").flag(default=False, also=AUTO),
        managed=section.at("managed_gradient_accumulation").flag(default=True),
    )


def check(section: ConfigPart, options: Options) -> Iterator[LintFinding]:
    """Findings in a config that ``deepspeed.initialize`` reads. Raises InputError for a wrong value."""
    config = read(section)
    yield from _batches(config, options.world_size)
    accumulate = _accumulate(config, options.world_size)
    yield from _silent_clip(config, options)
    if accumulate is not None and accumulate > 1:
        backend = "deepspeed-zero3-eager" if config.stage == 3 else "deepspeed-zero2-eager"
        # A config for Hugging Face's Trainer has 'auto', and its engine is told to step at the end of an epoch.
        if config.managed and not config.autos:
            yield from _carried(config, accumulate, options, backend)
        yield from bf16(config, accumulate, section.at("bf16.enabled"), options, is_bf16=config.bf16)
        stage = section.at("zero_optimization.stage")
        yield from versions(config, accumulate, stage, options, world_size=options.world_size, is_bf16=config.bf16)


def _accumulate(config: Config, world_size: int | None) -> int | None:
    """N as DeepSpeed infers it; None if it cannot be known."""
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
                Severity.INFO,
                "deepspeed.initialize refuses a config with neither train_batch_size nor "
                "train_micro_batch_size_per_gpu; Lightning and accelerate fill them in",
                "write train_micro_batch_size_per_gpu, or lint the Lightning config that names this file",
                proof.stops("deepspeed/runtime/config.py _set_batch_related_parameters"),
            )
        return
    if "gradient_accumulation_steps" in config.autos or "train_micro_batch_size_per_gpu" in config.autos:
        return
    place = section.at("train_batch_size")
    where = proof.stops("deepspeed/runtime/config.py _batch_assertion")
    given = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": accumulate, "ranks": world_size}
    factors = {name: number for name, number in given.items() if number is not None}
    product = 1
    for number in factors.values():
        product *= number
    # What is not given DeepSpeed infers by division without remainder, and then refuses the product.
    is_whole = train == product if len(factors) == len(given) else train % product == 0
    if is_whole:
        return
    names = " x ".join(f"{name} {number}" for name, number in factors.items())
    near = [product * n for n in (train // product, train // product + 1) if n]
    right = f"write {product}" if len(factors) == len(given) else f"the nearest that divide: {_either(near)}"
    relation = "is not" if len(factors) == len(given) else "does not divide by"
    yield place.finding(
        "BAT01",
        Severity.ERROR,
        f"train_batch_size {train} {relation} {names} = {product}; DeepSpeed refuses it",
        f"{right}; or leave train_batch_size out, it is inferred",
        where,
    )


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, numbers))


def _silent_clip(config: Config, options: Options) -> Iterator[LintFinding]:
    place = config.section.at("gradient_clipping")
    if place.given or (options.deepspeed is not None and options.deepspeed < SILENT_CLIP):
        return
    small = Small(4, 8)
    yield place.finding(
        "CLP01",
        Severity.WARNING,
        f"gradient_clipping is not set, and DeepSpeed {written(options.deepspeed)} (0.19.3 and later) then clips to "
        "norm 1.0: a gradient of norm 5 is scaled by 0.2. Lightning's Trainer sets 0.0, Fabric does not",
        'write "gradient_clipping": 0.0 to clip nothing, or the threshold that is meant',
        small.command("deepspeed-zero2-eager", clip=small.clip) + " (what a threshold does; the default is 1.0)",
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
    run = Epochs(num_batches, accumulate)
    if not run.tail or not num_batches:
        return
    small = Small.of(accumulate, num_batches)
    code, place = "TAIL02", config.section.at("gradient_accumulation_steps")
    first = f"{num_batches} micro-batches per epoch and rank leave {run.tail} over after {run.whole} windows of "
    if num_batches < accumulate:
        code = "WIN01"
        first = f"{num_batches} micro-batches per epoch and rank are fewer than the window of "
    yield place.finding(
        code,
        Severity.WARNING,
        f"{first}{accumulate}; DeepSpeed counts on into the next epoch: {run.carried(1)} steps after one epoch and "
        f"{run.carried(2)} after two, and the {run.tail} micro-batches open after one epoch ({num_batches * 2} - "
        f"{run.carried(2)} x {accumulate} = {2 * num_batches % accumulate} after two) are dropped if training ends",
        f"make the samples a multiple of {micro} x {accumulate} x {world_size} = {micro * accumulate * world_size}, or "
        "call engine.set_gradient_accumulation_boundary(True) before the last micro-batch of an epoch (its divisor "
        f"stays {accumulate})",
        small.command(backend, drop_last=config.drop_last, epochs=max(2, small.endless())),
    )


NEEDS_FP32_SUM = "DeepSpeed 0.19.8 or newer, or ZeRO-3"


def bf16(
    config: Config, accumulate: int, place: ConfigPart, options: Options, *, is_bf16: bool
) -> Iterator[LintFinding]:
    """Accumulation in bf16; ``place`` is the key that switches bf16 on."""
    if not is_bf16:
        return
    dtype = config.section.at("data_types.grad_accum_dtype")
    if config.accumulation_dtype in FP32:
        if config.stage == 0:
            yield dtype.finding(
                "ACC02",
                Severity.ERROR,
                "DeepSpeed raises NotImplementedError: without ZeRO it cannot sum bf16 gradients in fp32",
                "set zero_optimization.stage to 1, 2 or 3",
                proof.stops("deepspeed/runtime/engine.py _do_optimizer_sanity_check"),
            )
        return
    if accumulate <= 1 or config.accumulation_dtype not in {None, "bf16", "bfloat16", "torch.bfloat16"}:
        return
    fix = 'add "data_types": {"grad_accum_dtype": "fp32"} to the DeepSpeed config'
    number = options.deepspeed
    if config.stage == 0:
        fix += " (which needs ZeRO stage 1, 2 or 3)"
    elif config.stage == 2 and (number is None or number < BF16_SUM):
        fix += (
            f", and use {NEEDS_FP32_SUM}: with ZeRO-2, DeepSpeed "
            f"{'below 0.19.8' if number is None else written(number)} sums in bf16 all the same (VER03)"
        )
    yield (dtype if dtype.given else place).finding(
        "ACC01",
        Severity.WARNING,
        f"each of the {accumulate} micro-batches' gradients is added in bf16, which keeps 8 significant bits: "
        f"{arithmetic.effect(accumulate)}",
        fix,
        proof.BF16_SUM,
    )


def versions(
    config: Config, accumulate: int, place: ConfigPart, options: Options, *, world_size: int | None, is_bf16: bool
) -> Iterator[LintFinding]:
    """Defects of the DeepSpeed version that is installed, or named by the command; ``place`` sets the stage."""
    number = options.deepspeed
    if number is None or accumulate <= 1:
        return
    if config.stage == 2 and not config.offload and LAST_ONLY[0] <= number < LAST_ONLY[1]:
        yield place.finding(
            "VER01",
            Severity.ERROR,
            f"DeepSpeed {written(number)} with ZeRO-2 and no offload keeps only the last of the {accumulate} "
            f"micro-batches of a window: {accumulate - 1} of {accumulate} are lost",
            "use DeepSpeed 0.17.5 or older, or 0.18.3 or newer",
            proof.deepspeed(number),
        )
    is_fp32_sum = is_bf16 and config.accumulation_dtype in FP32
    if config.stage == 1 and is_fp32_sum and world_size != 1 and MISSED_AVERAGE[0] <= number < MISSED_AVERAGE[1]:
        yield place.finding(
            "VER02",
            Severity.ERROR,
            f"DeepSpeed {written(number)} with ZeRO-1, bf16 and fp32 accumulation does not average the last of the "
            f"{accumulate} micro-batches over the ranks",
            "use DeepSpeed 0.19.0 or newer, or set bf16.immediate_grad_update",
            "DeepSpeed #7985 (nox -s versions measures one rank, which has nothing to average over)",
        )
    if config.stage == 2 and is_fp32_sum and number < BF16_SUM:
        yield config.section.at("data_types.grad_accum_dtype").finding(
            "VER03",
            Severity.WARNING,
            f"DeepSpeed {written(number)} with ZeRO-2 adds the {accumulate} micro-batches' gradients in bf16, whatever "
            f"grad_accum_dtype says: {arithmetic.effect(accumulate)}",
            f"use {NEEDS_FP32_SUM}",
            proof.deepspeed(number),
        )
