"""Rules for a config that DeepSpeed reads without another framework."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import deepspeed_config
from bench.audit.lint.config_file import AUTO, ConfigPart
from bench.audit.lint.deepspeed_config import SILENT_CLIPPING, DeepSpeedConfig, deepspeed_keys
from bench.audit.lint.known_keys import repeated_keys
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.proof import SmallRun
from bench.audit.lint.rules import Found, rule, says
from bench.audit.lint.sum_rules import FP32, GradientSum
from bench.audit.lint.version_facts import is_known_bad, page_of
from bench.findings import Level

NEOX_OWN = (
    *("pipe_parallel_size", "model_parallel_size", "train_iters", "lr_decay_iters", "pos_emb"),
    *("no_weight_tying", "checkpoint_factor", "data_impl", "num_layers", "hidden_size"),
)
"""Keys of GPT-NeoX that are none of DeepSpeed."""
ENGINE_CONFIG = "deepspeed/runtime/config.py"


@dataclass(frozen=True)
class DeepSpeedAlone:
    """A config for ``deepspeed.initialize``."""

    config: DeepSpeedConfig
    options: LintOptions

    @property
    def accumulate(self) -> int | None:
        """N as DeepSpeed infers it; None if it is unknown."""
        config, world_size = self.config, self.options.world_size
        if config.accumulate is not None:
            return config.accumulate
        if "gradient_accumulation_steps" in config.autos:
            return None
        if config.batch is not None and config.micro_batch is not None:
            if world_size is None:
                return None
            return config.batch // config.micro_batch // world_size
        return 1

    @property
    def n(self) -> int:
        """N; 1 if it is unknown, or the batch too small for a micro-batch on every rank (BAT01)."""
        n = self.accumulate
        if n is None or n == 0:
            return 1
        return n

    @property
    def micro_batch(self) -> int | None:
        """Samples of a micro-batch, as given or as DeepSpeed infers them; None if unknown."""
        given = self.config.micro_batch_with(self.options)
        batch, ranks = self.config.batch, self.options.world_size
        if given is not None:
            return given
        if batch is None or ranks is None or batch < self.n * ranks:  # DeepSpeed refuses the last
            return None
        return batch // self.n // ranks


def subjects(part: ConfigPart, options: LintOptions) -> Iterator[object]:
    """What rules are about in a config for ``deepspeed.initialize``.

    Raises InputError for a wrong value.
    """
    config = deepspeed_config.read(part)
    yield from repeated_keys(part, is_refused=_is_whole(part) or None)
    yield from deepspeed_keys(part, options)
    training = DeepSpeedAlone(config, options)
    yield training
    # With 'auto', or without an optimizer, a program fills it up.
    is_part = bool(config.autos) or not part.at("optimizer").given
    yield GradientSum(config, training.n, options, options.world_size, is_part=is_part)
    if config.autos:
        _note_autos(config, training.accumulate, options)


def _is_whole(part: ConfigPart) -> bool:
    """Whether DeepSpeed itself reads the config, as it has all that it needs, and no 'auto'.

    Hugging Face's Trainer, accelerate and Lightning hand it what they have read.
    """
    is_filled_in = json.dumps(AUTO) in json.dumps(part.value)
    return part.at("optimizer").given and part.at("train_batch_size").given and not is_filled_in


def _note_autos(config: DeepSpeedConfig, accumulate: int | None, options: LintOptions) -> None:
    """Say that "auto" leaves most of the config to the arguments that are used with it."""
    line = (
        f"{config.part.file}: 'auto' leaves {', '.join(config.autos)} to the arguments that "
        "are used with it, so what "
    )
    line += (
        "depends on them was not judged; lint the TrainingArguments or the script that names "
        "this file too"
    )
    is_16_bits = config.bf16 or "bf16.enabled" in config.autos
    if accumulate is None and is_16_bits and config.accumulation_dtype not in FP32:
        condition = "N > 1 and bf16"
        if config.bf16:
            condition = "N > 1"
        line += f"; with {condition}, gradients are added in bf16 (ACC01)"
    options.note(line)


def neox_subjects(part: ConfigPart, options: LintOptions) -> Iterator[object]:
    """What rules are about in a config of GPT-NeoX, whose keys are DeepSpeed's in part.

    Its DeepSpeed is a fork, so no rule about versions holds. DeepSpeed's keys in YAML without any of
    GPT-NeoX are for a program that is not known. Raises InputError for a wrong value.
    """
    config = deepspeed_config.read(part)
    yield from repeated_keys(part)
    is_bf16 = config.bf16 or part.at("precision").value == "bfloat16"
    config = dataclasses.replace(config, bf16=is_bf16)
    is_part = not any(part.at(key).given for key in NEOX_OWN)
    place = part.at("precision")
    yield GradientSum(config, config.n, options, None, place, is_fork=True, is_part=is_part)


@rule(DeepSpeedAlone, "BAT02", "deepspeed: {train_micro_batch_size_per_gpu: null}")
@says(Level.NOTE, "no batch size", f"{ENGINE_CONFIG} _set_batch_related_parameters")
def _no_batch_size(training: DeepSpeedAlone) -> Iterator[Found]:
    config, sizes = training.config, {"train_batch_size", "train_micro_batch_size_per_gpu"}
    if (
        config.batch is None
        and config.micro_batch is None
        and not any(config.part.at(key).given for key in sizes)
    ):
        what = (
            "deepspeed.initialize refuses a config without a batch size; Lightning and "
            "accelerate fill it in"
        )
        fix = (
            "set train_micro_batch_size_per_gpu, or lint the Lightning config that names this file"
        )
        yield Found(config.part.at("train_micro_batch_size_per_gpu"), what, fix)


@rule(DeepSpeedAlone, "BAT01", "deepspeed: {train_batch_size: 30}")
@says(Level.ERROR, "batch sizes do not multiply", f"{ENGINE_CONFIG} _batch_assertion", stops=True)
def _batch_sizes(training: DeepSpeedAlone) -> Iterator[Found]:
    config, train = training.config, training.config.batch
    given = {
        "train_micro_batch_size_per_gpu": config.micro_batch,
        "gradient_accumulation_steps": config.accumulate,
        "ranks": training.options.world_size,
    }
    if train is None or given.keys() & config.autos:
        return
    factors = {name: number for name, number in given.items() if number is not None}
    product, is_complete = math.prod(factors.values()), len(factors) == len(given)
    # DeepSpeed infers a missing factor by division without remainder, and then refuses the product.
    wanted = str(product)
    fits = train == product
    if not is_complete:
        wanted = f"a multiple of {product}"
        fits = train % product == 0
    if fits:
        return
    names = " x ".join(f"{name} {number}" for name, number in factors.items())
    what = f"DeepSpeed refuses train_batch_size {train}: it is not {wanted} = {names}"
    yield Found(
        config.part.at("train_batch_size"),
        what,
        f"set it to {wanted}, or remove it: DeepSpeed infers it",
    )


@rule(DeepSpeedAlone, "CLP01", "deepspeed: {gradient_clipping: null}")
@says(
    Level.WARNING,
    "clipping that was not asked for",
    page_of(SILENT_CLIPPING),
    advisory=SILENT_CLIPPING,
)
def _silent_clip(training: DeepSpeedAlone) -> Iterator[Found]:
    """A config with 'auto' is for Hugging Face's Trainer, which means to clip to 1.0 too.

    So may be one without the batch of all ranks, or for Lightning, which sets the threshold.
    """
    part, used = training.config.part, training.options.deepspeed
    place = part.at("gradient_clipping")
    if place.given or training.config.autos or not is_known_bad(SILENT_CLIPPING, used):
        return
    level = Level.WARNING
    # Without an optimizer it may be for inference, or a part that the program fills up.
    if training.config.batch is None or not part.at("optimizer").given:
        level = Level.NOTE
    small = SmallRun(4, 8)
    yield Found(
        place,
        f"gradient_clipping is not set: unless the program sets it, DeepSpeed {used} clips to "
        "norm 1.0, which versions "
        "before 0.19.3 did not",
        'set "gradient_clipping" to 0.0 to clip nothing, or to the threshold that is meant',
        small.command("deepspeed-zero2-eager", clip=small.clip)
        + " (shows what a threshold does; the default is 1.0)",
        level,
    )


@rule(DeepSpeedAlone, "TAIL02", "deepspeed: {}, samples: 40, world_size: 2")
@says(Level.WARNING, "partial window carried into the next epoch", "DeepSpeed #7439")
@rule(DeepSpeedAlone, "WIN01", "deepspeed: {}, samples: 12, world_size: 2")
def _carried(training: DeepSpeedAlone) -> Iterator[Found]:
    config, n, options = training.config, training.accumulate, training.options
    ranks, micro = options.world_size, training.micro_batch
    # A config with 'auto' is for Hugging Face's Trainer, which makes the engine step at the end of
    # an epoch.
    if n is None or n <= 1 or not config.managed or config.autos:
        return
    plan = options.windows(n, micro, ranks, drop_last=config.drop_last)
    if plan is None or not plan.partial_window:
        return
    assert micro is not None and ranks is not None  # there is no plan without them
    num_batches = plan.micro_batches_per_epoch
    small = SmallRun.of(n, num_batches)
    backend = "deepspeed-zero2-eager"
    if config.stage == 3:
        backend = "deepspeed-zero3-eager"
    code = "WIN01"
    if plan.full_windows:
        code = "TAIL02"
    yield Found(
        config.part.at("gradient_accumulation_steps"),
        f"DeepSpeed continues a window in the next epoch: {num_batches} micro-batches per epoch "
        "and rank give "
        f"{plan.full_windows} steps after one epoch and {2 * num_batches // n} after two. "
        "Training that ends after one "
        f"epoch drops the last {plan.partial_window} micro-batches",
        f"make the samples a multiple of {micro * n * ranks}, or call "
        "engine.set_gradient_accumulation_boundary(True) before the last micro-batch of an epoch",
        small.command(
            backend,
            drop_last=config.drop_last,
            epochs=small.epochs_of_two_steps,
        ),
        code=code,
    )
