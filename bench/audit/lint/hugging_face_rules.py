"""TrainingArguments of Hugging Face's Trainer: what they say, and rules for them.

Measured with transformers 5.23.0, accelerate 1.15.0 and DeepSpeed 0.19.8. The Trainer itself weighs a partial window
rightly, steps at the end of every epoch under every strategy, and trains ``max_steps`` whole steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import deepspeed_config, proof
from bench.audit.lint.arithmetic import windows_of
from bench.audit.lint.config_file import AUTO, ConfigPart
from bench.audit.lint.deepspeed_config import DeepSpeedConfig, deepspeed_keys, deepspeed_part
from bench.audit.lint.deepspeed_rules import SILENT_CLIP
from bench.audit.lint.known_keys import Keys
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import ERROR, INFO, WARNING, Found, rule
from bench.audit.lint.sum_rules import GradientSum
from bench.audit.training import LARGEST_ACCUMULATE, ceil

TRAINER, ARGUMENTS = "transformers/trainer.py", "transformers/training_args.py"
DEEPSPEED = "transformers/integrations/deepspeed.py trainer_config_finalize"
DEFAULT_MICRO, DEFAULT_EPOCHS, DEFAULT_LOGGING, DEFAULT_CLIP = 8, 3.0, 500, 1.0


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """The fields of TrainingArguments that rules need, with their defaults."""

    part: ConfigPart
    accumulate: int
    micro: int
    """Samples of a micro-batch on one rank; with split_batches, on all of them."""
    is_split: bool
    world_size: int | None
    epochs: float
    max_steps: int | None
    clip: float
    dtypes: dict[str, bool]
    """bf16 and fp16, each on or off."""
    total_steps: int | None
    """Optimizer steps of the whole training, if they can be calculated."""


@dataclass(frozen=True)
class SameValue:
    """A value of a DeepSpeed config, which must be that of TrainingArguments or 'auto'."""

    place: ConfigPart
    value: float | None
    name: str
    """What it is called in TrainingArguments."""


@dataclass(frozen=True)
class TrainerDeepSpeed:
    """DeepSpeed under the Trainer, which fills in 'auto' and compares what is given."""

    arguments: TrainerArguments
    engine: DeepSpeedConfig
    options: LintOptions


def read(part: ConfigPart, options: LintOptions) -> TrainerArguments:
    """What a config of TrainingArguments says. Raises InputError naming the key of a wrong value."""
    world_size = options.world_size
    part.at("accelerator_config").mapping()
    inner = part.at("accelerator_config.gradient_accumulation_kwargs").mapping().at("num_steps")
    accumulate = part.at("gradient_accumulation_steps").integer(most=LARGEST_ACCUMULATE) or 1
    accumulate = max(accumulate, inner.integer(most=LARGEST_ACCUMULATE) or 1)
    micro = options.batch_size or part.at("per_device_train_batch_size").integer() or DEFAULT_MICRO
    is_split = part.at("accelerator_config.split_batches").flag(default=False)
    epochs = part.at("num_train_epochs").number()
    max_steps = part.at("max_steps").integer(least=-1)
    max_steps = None if max_steps in {0, -1} else max_steps
    total = max_steps
    if max_steps is None and options.samples and (world_size or is_split):
        # accelerate deals batches of the data set to the ranks in turn, or splits each among them.
        together = micro * (1 if is_split else world_size or 1)
        is_dropped = part.at("dataloader_drop_last").flag(default=False)
        batches = options.samples // together if is_dropped else ceil(options.samples, together)
        steps = max(windows_of(max(batches, 1), accumulate).windows, 1)
        total = math.ceil((DEFAULT_EPOCHS if epochs is None else epochs) * steps)
    elif max_steps is None:
        options.want(options.samples, world_size, micro)
    clip = part.at("max_grad_norm").number()
    return TrainerArguments(
        part=part,
        accumulate=accumulate,
        micro=micro,
        is_split=is_split,
        world_size=world_size,
        epochs=DEFAULT_EPOCHS if epochs is None else epochs,
        max_steps=max_steps,
        clip=DEFAULT_CLIP if clip is None else clip,
        dtypes={name: part.at(name).flag(default=False) for name in ("bf16", "fp16")},
        total_steps=total,
    )


def subjects(part: ConfigPart, options: LintOptions) -> Iterator[object]:
    """What rules are about in TrainingArguments. Raises InputError for a wrong value."""
    arguments = read(part, options)
    yield Keys(part, "training_arguments", "TrainingArguments", shared=True)
    yield arguments
    given = deepspeed_part(part.at("deepspeed"))
    if given is None:
        return
    engine = deepspeed_config.read(given)
    yield from deepspeed_keys(given)
    n, ranks = arguments.accumulate, arguments.world_size
    together = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
    yield SameValue(given.at("gradient_accumulation_steps"), n, "gradient_accumulation_steps")
    yield SameValue(given.at("train_micro_batch_size_per_gpu"), arguments.micro, "per_device_train_batch_size")
    yield SameValue(given.at("train_batch_size"), arguments.micro * n * ranks if ranks else None, together)
    yield SameValue(given.at("gradient_clipping"), arguments.clip, "max_grad_norm")
    for name, is_on in arguments.dtypes.items():
        yield SameValue(given.at(f"{name}.enabled"), is_on, name)
    yield TrainerDeepSpeed(arguments, engine, options)
    dtypes = {
        name: is_on if given.at(f"{name}.enabled").value == AUTO else getattr(engine, name)
        for name, is_on in arguments.dtypes.items()
    }
    engine = dataclasses.replace(engine, bf16=dtypes["bf16"], fp16=dtypes["fp16"])
    yield GradientSum(engine, n, options, ranks)


@rule("MIS01", ERROR, "DeepSpeed and TrainingArguments differ", "transformers/integrations/deepspeed.py")
def _differ(same: SameValue) -> Iterator[Found]:
    place, value = same.place, same.value
    if place.given and place.value != AUTO and value is not None and place.value != value:
        yield Found(
            place,
            f"the Trainer raises ValueError: {place.name} is {place.value}, and {same.name} is {value:g}",
            'set it to "auto", or remove it',
            proof.stops(DEEPSPEED),
        )


@rule("SCH02")
def _two_factors(arguments: TrainerArguments) -> Iterator[Found]:
    inner = arguments.part.at("accelerator_config.gradient_accumulation_kwargs.num_steps")
    given = arguments.part.at("gradient_accumulation_steps")
    if inner.given and (given.integer() or 1) > 1:
        yield Found(
            inner,
            f"the Trainer raises ValueError: gradient_accumulation_steps is {given.value}, and num_steps is "
            f"{inner.value}",
            "remove num_steps",
            proof.stops(f"{TRAINER} create_accelerator_and_postprocess"),
        )


@rule("OPT02", ERROR, "layerwise optimizer with accumulation", "transformers/trainer_optimizer.py")
@rule("OPT03", ERROR, "optimizer that steps in every backward", "lomo_optim/lomo.py fused_backward")
def _optimizer(arguments: TrainerArguments) -> Iterator[Found]:
    place, n = arguments.part.at("optim"), arguments.accumulate
    name = (place.word() or "").lower()
    if n > 1 and name.endswith("layerwise"):
        yield Found(
            place,
            f"the Trainer raises ValueError: {name} steps inside backward, so it cannot accumulate {n} micro-batches",
            f"use {name.removesuffix('_layerwise')}, or set gradient_accumulation_steps to 1",
            proof.stops("transformers/trainer_optimizer.py"),
            code="OPT02",
        )
    elif n > 1 and name in {"lomo", "adalomo"}:
        yield Found(
            place,
            f"{name} updates the parameters in every backward: a window of {n} micro-batches makes {n} updates, each "
            f"with the gradient of one micro-batch divided by {n}",
            "set gradient_accumulation_steps to 1, or use another optimizer",
            "accelerate/accelerator.py lomo_backward calls fused_backward, which updates (lomo_optim 0.1.1 lomo.py)",
            code="OPT03",
        )


@rule("BAT04", WARNING, "a micro-batch is split among the ranks", "transformers/training_args.py; accelerate")
@rule("BAT05", WARNING, "effective batch that changes by itself", TRAINER)
def _batches(arguments: TrainerArguments) -> Iterator[Found]:
    n, micro = arguments.accumulate, arguments.micro
    if arguments.is_split and arguments.world_size != 1:
        yield Found(
            arguments.part.at("accelerator_config.split_batches"),
            f"split_batches divides each batch of {micro} among {arguments.world_size or 'the number of'} ranks: a "
            f"window has {micro} x {n} = {micro * n} samples, and not as many on each rank",
            "set split_batches to false, or per_device_train_batch_size to the batch of all ranks",
            f"{ARGUMENTS}: 'split_batches=True will override the per_device_train_batch_size'",
            code="BAT04",
        )
    place = arguments.part.at("auto_find_batch_size")
    if place.flag(default=False):
        yield Found(
            place,
            f"out of memory, the Trainer trains with a smaller micro-batch than {micro} but the same N = {n}: the "
            "effective batch shrinks, and the steps per epoch grow",
            "find the largest micro-batch once, set it, and scale gradient_accumulation_steps up by as much",
            f"{TRAINER} _inner_training_loop takes the smaller batch and keeps gradient_accumulation_steps",
            code="BAT05",
        )


@rule("STP04", WARNING, "num_train_epochs ignored", f"{TRAINER} set_initial_training_values")
def _ignored_epochs(arguments: TrainerArguments) -> Iterator[Found]:
    epochs = arguments.part.at("num_train_epochs")
    if arguments.max_steps and epochs.given:
        yield Found(
            epochs,
            f"max_steps {arguments.max_steps} alone ends training, after as many epochs as it takes; num_train_epochs "
            f"{arguments.epochs:g} is ignored",
            "keep one of the two",
            f"{TRAINER} set_initial_training_values",
        )


@rule("LOG01")
def _too_rare(arguments: TrainerArguments) -> Iterator[Found]:
    total = arguments.total_steps
    for name, default, usual in (("logging", DEFAULT_LOGGING, "steps"), ("eval", 0, "no")) if total else ():
        place = arguments.part.at(f"{name}_steps")
        every = place.number() if place.given else default
        is_by_step = (arguments.part.at(f"{name}_strategy").value or usual) == "steps"
        if is_by_step and total and every and max(total, 1) < every:
            verb, value = ("logs the loss", "a loss") if name == "logging" else ("evaluates", "eval_loss")
            yield Found(
                place,
                f"the whole training has {total} optimizer steps of {arguments.accumulate} micro-batches, and the "
                f"Trainer {verb} every {every:g}{'' if place.given else ' (the default)'}: never",
                f"set {name}_steps to at most {total}",
                f"train with these arguments: no step of log_history has {value}",
            )


@rule("STP05", WARNING, "warm-up longer than the training", f"{ARGUMENTS} get_warmup_steps")
def _long_warmup(arguments: TrainerArguments) -> Iterator[Found]:
    place, total = arguments.part.at("warmup_steps"), arguments.total_steps
    if total and (warmup := place.number() or 0) >= total:
        yield Found(
            place,
            f"the whole training has {total} optimizer steps of {arguments.accumulate} micro-batches, fewer than "
            f"warmup_steps {warmup:g} or as many: the learning rate reaches at most {total / warmup:.0%} of its peak",
            f"set warmup_steps below {total}, or to a share of the training, such as 0.03",
            "train with these arguments, and read learning_rate in log_history",
        )


@rule("CLP03")
def _ignored_clip(both: TrainerDeepSpeed) -> Iterator[Found]:
    place, clip, number = both.engine.part.at("gradient_clipping"), both.arguments.clip, both.options.deepspeed
    default = 0.0 if number and number < SILENT_CLIP else 1.0
    if not place.given and clip != default:
        yield Found(
            place,
            f"the DeepSpeed config does not set gradient_clipping, so DeepSpeed clips to its default, {default:g} (0: "
            f"not at all), and max_grad_norm {clip:g} is ignored",
            'add "gradient_clipping": "auto" to the DeepSpeed config',
            "read engine.gradient_clipping() after the first step",
        )


@rule("TOK01", WARNING, "tokens weighed by rank", f"{TRAINER} _get_num_items_in_batch; transformers #34191")
@rule("MEM01", INFO, "unsharded gradients between micro-batches", f"{TRAINER}; accelerate no_sync")
def _accumulation(arguments: TrainerArguments) -> Iterator[Found]:
    part, n = arguments.part, arguments.accumulate
    if n == 1:
        return
    place = part.at("average_tokens_across_devices")
    if not place.flag(default=True) and arguments.world_size != 1:
        yield Found(
            place,
            f"each rank divides by the tokens of its own {n} micro-batches, and the ranks are then averaged: a token "
            "weighs more on a rank with fewer tokens than the others",
            "remove it: the default, true, divides by the tokens of all ranks",
            f"{TRAINER} _get_num_items_in_batch",
            code="TOK01",
        )
    eager = part.at("accelerator_config.gradient_accumulation_kwargs.sync_each_batch")
    if part.at("fsdp").value and not eager.flag(default=False):
        yield Found(
            part.at("fsdp"),
            f"the first {n - 1} of {n} micro-batches are not reduced: between them each rank holds the gradients of "
            "all parameters unsharded",
            "if memory is short, set accelerator_config.gradient_accumulation_kwargs.sync_each_batch to true, which "
            "reduces after every micro-batch",
            "python -m bench predict --model 8b --world-size 8 --accumulate 4 --sequence 4096 --precision bf16 "
            "(compare the peaks of fsdp2-deferred and fsdp2-eager)",
            code="MEM01",
        )
