"""TrainingArguments of Hugging Face's Trainer: what they say, and rules for them.

Measured with transformers 5.23.0, accelerate 1.15.0 and DeepSpeed 0.19.8. The Trainer itself weighs a partial window
rightly, steps at the end of every epoch under every strategy, and trains ``max_steps`` whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import deepspeed_config
from bench.audit.lint.config_file import AUTO, ConfigPart
from bench.audit.lint.deepspeed_config import deepspeed_keys, deepspeed_part
from bench.audit.lint.deepspeed_rules import SILENT_CLIP
from bench.audit.lint.known_keys import Keys
from bench.audit.lint.lint_options import LintOptions, windows_of
from bench.audit.lint.rules import ERROR, INFO, WARNING, Found, rule, says
from bench.audit.lint.sum_rules import GradientSum
from bench.audit.training_plan import LARGEST_ACCUMULATE, ceil

TRAINER, ARGUMENTS = "transformers/trainer.py", "transformers/training_args.py"
DEFAULT_MICRO, DEFAULT_EPOCHS, DEFAULT_LOGGING, DEFAULT_CLIP = 8, 3.0, 500, 1.0
KWARGS = "accelerator_config.gradient_accumulation_kwargs"


class TrainerArguments:
    """The fields of TrainingArguments that rules need. Raises InputError naming the key of a wrong value."""

    def __init__(self, part: ConfigPart, options: LintOptions) -> None:
        self.part, self.options, self.world_size = part, options, options.world_size
        self.given = deepspeed_part(part.at("deepspeed"))
        """The DeepSpeed config."""
        part.at("accelerator_config").mapping()
        inner = part.at(KWARGS).mapping().at("num_steps").integer(most=LARGEST_ACCUMULATE) or 1
        outer = part.at("gradient_accumulation_steps").integer(most=LARGEST_ACCUMULATE) or 1
        self.accumulate = max(outer, inner)
        self.micro_batch = options.batch_size or part.at("per_device_train_batch_size").integer() or DEFAULT_MICRO
        """Samples of a micro-batch on one rank; with split_batches, on all of them."""
        self.is_split = part.at("accelerator_config.split_batches").flag(default=False)
        epochs, clip = part.at("num_train_epochs").number(), part.at("max_grad_norm").number()
        self.clip = DEFAULT_CLIP if clip is None else clip
        self.dtypes = {name: part.at(name).flag(default=False) for name in ("bf16", "fp16")}
        self.max_steps = max(part.at("max_steps").integer(least=-1) or 0, 0)
        """0 for no limit."""
        self.total_steps = self.max_steps
        """Optimizer steps of the whole training; 0 if they cannot be calculated."""
        if not self.max_steps and options.samples and (self.world_size or self.is_split):
            # accelerate deals batches of the data set to the ranks in turn, or splits each among them.
            together = self.micro_batch * (1 if self.is_split else self.world_size or 1)
            is_dropped = part.at("dataloader_drop_last").flag(default=False)
            batches = options.samples // together if is_dropped else ceil(options.samples, together)
            windows = windows_of(max(batches, 1), self.accumulate).windows
            self.total_steps = math.ceil((DEFAULT_EPOCHS if epochs is None else epochs) * windows)
        elif not self.max_steps:
            options.want(options.samples, self.world_size, self.micro_batch)


@dataclass(frozen=True)
class SameValue:
    """A value of a DeepSpeed config, which must be that of TrainingArguments or 'auto'."""

    place: ConfigPart
    value: float | None
    name: str
    """What it is called in TrainingArguments."""


def subjects(part: ConfigPart, options: LintOptions) -> Iterator[object]:
    """What rules are about in TrainingArguments. Raises InputError for a wrong value."""
    arguments = TrainerArguments(part, options)
    yield Keys(part, "training_arguments", "TrainingArguments", shared=True)
    yield arguments
    given = arguments.given
    if given is None:
        return
    engine = deepspeed_config.read(given)
    yield from deepspeed_keys(given)
    n, ranks = arguments.accumulate, arguments.world_size
    together = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
    yield SameValue(given.at("gradient_accumulation_steps"), n, "gradient_accumulation_steps")
    yield SameValue(given.at("train_micro_batch_size_per_gpu"), arguments.micro_batch, "per_device_train_batch_size")
    yield SameValue(given.at("train_batch_size"), arguments.micro_batch * n * ranks if ranks else None, together)
    yield SameValue(given.at("gradient_clipping"), arguments.clip, "max_grad_norm")
    for name, is_on in arguments.dtypes.items():
        yield SameValue(given.at(f"{name}.enabled"), is_on, name)
    chosen = [name for name, is_on in arguments.dtypes.items() if is_on]
    yield GradientSum(engine.with_dtypes(chosen, missing=False), n, options, ranks)


MISMATCH = "transformers/integrations/deepspeed.py trainer_config_finalize"


@rule("MIS01", "hugging_face: {}, accelerate: {deepspeed_config: {zero_stage: 2, gradient_clipping: 0.5}}")
@says(ERROR, "DeepSpeed and TrainingArguments differ", MISMATCH, stops=True)
def _differ(same: SameValue) -> Iterator[Found]:
    place, value = same.place, same.value
    if place.given and place.value != AUTO and value is not None and place.value != value:
        arguments = f"{same.name} of TrainingArguments is {value:g}"
        what = f"the Trainer raises ValueError: {place.name} is {place.value}, and {arguments}"
        yield Found(place, what, 'set it to "auto", or remove it')


@rule("SCH02", "hugging_face: {accelerator_config: {gradient_accumulation_kwargs: {num_steps: 2}}}")
def _two_factors(arguments: TrainerArguments) -> Iterator[Found]:
    inner, outer = arguments.part.at(f"{KWARGS}.num_steps"), arguments.part.at("gradient_accumulation_steps").value
    if inner.given and (outer or 1) > 1:
        what = f"the Trainer raises ValueError: gradient_accumulation_steps is {outer}, and num_steps {inner.value}"
        yield Found(inner, what, "remove num_steps")


@rule("OPT02", "hugging_face: {optim: galore_adamw_layerwise}")
@says(ERROR, "layerwise optimizer with accumulation", "transformers/trainer_optimizer.py", stops=True)
@rule("OPT03", "hugging_face: {optim: lomo}")
@says(ERROR, "optimizer that steps in every backward", "lomo_optim 0.1.1 lomo.py fused_backward")
def _optimizer(arguments: TrainerArguments) -> Iterator[Found]:
    place, n = arguments.part.at("optim"), arguments.accumulate
    name = (place.string() or "").lower()
    if n > 1 and name.endswith("layerwise"):
        what = f"the Trainer raises ValueError: {name} steps inside backward, so it cannot accumulate"
        fix = f"use {name.removesuffix('_layerwise')}, or set gradient_accumulation_steps to 1"
        yield Found(place, what, fix, code="OPT02")
    elif n > 1 and name in {"lomo", "adalomo"}:
        what = f"{name} updates the parameters in every backward: a window of {n} micro-batches makes {n} updates"
        yield Found(place, what, "set gradient_accumulation_steps to 1, or use another optimizer", code="OPT03")


@rule("BAT04", "hugging_face: {accelerator_config: {split_batches: true}}")
@says(WARNING, "a micro-batch is split among the ranks", f"{ARGUMENTS} split_batches")
def _split_batches(arguments: TrainerArguments) -> Iterator[Found]:
    n, micro, ranks = arguments.accumulate, arguments.micro_batch, arguments.world_size
    if arguments.is_split and ranks != 1:
        what = f"split_batches divides each batch of {micro} among {ranks or 'all'} ranks: a window has {micro * n} "
        fix = "set split_batches to false, or per_device_train_batch_size to the batch of all ranks"
        yield Found(arguments.part.at("accelerator_config.split_batches"), f"{what}samples over all of them", fix)


@rule("BAT05", "hugging_face: {auto_find_batch_size: true}")
@says(WARNING, "effective batch that changes by itself", f"{TRAINER} _inner_training_loop")
def _smaller_batches(arguments: TrainerArguments) -> Iterator[Found]:
    place = arguments.part.at("auto_find_batch_size")
    if place.flag(default=False):
        yield Found(
            place,
            f"out of memory, the Trainer shrinks the micro-batch below {arguments.micro_batch} and keeps N = "
            f"{arguments.accumulate}: the effective batch shrinks, and the steps per epoch grow",
            "find the largest micro-batch once, set it, and scale gradient_accumulation_steps up by as much",
        )


@rule("STP04", "hugging_face: {max_steps: 1000, num_train_epochs: 3}")
@says(WARNING, "num_train_epochs ignored", f"{TRAINER} set_initial_training_values")
def _ignored_epochs(arguments: TrainerArguments) -> Iterator[Found]:
    epochs = arguments.part.at("num_train_epochs")
    if arguments.max_steps and epochs.given:
        what = f"max_steps {arguments.max_steps} alone ends training; num_train_epochs {epochs.value} is ignored"
        yield Found(epochs, what, "keep one of the two")


@rule("LOG01", "hugging_face: {max_steps: 400}")
def _too_rare(arguments: TrainerArguments) -> Iterator[Found]:
    total = arguments.total_steps
    for name, default, usual, field in (("logging", DEFAULT_LOGGING, "steps", "loss"), ("eval", 0, "no", "eval_loss")):
        place = arguments.part.at(f"{name}_steps")
        every = place.number() if place.given else default
        is_by_step = (arguments.part.at(f"{name}_strategy").value or usual) == "steps"
        if is_by_step and every and 0 < total < every:
            given = f"{every:g}{'' if place.given else ' (the default)'}"
            what = f"the whole training has {total} optimizer steps, fewer than {name}_steps {given}: {field} is never "
            proof = f"train with these arguments: no step of log_history has {field}"
            yield Found(place, f"{what}logged", f"set {name}_steps to at most {total}", proof)


@rule("STP05", "hugging_face: {logging_steps: 10, warmup_steps: 100}, samples: 640, world_size: 2")
@says(WARNING, "warm-up longer than the training", f"{ARGUMENTS} get_warmup_steps")
def _long_warmup(arguments: TrainerArguments) -> Iterator[Found]:
    place, total = arguments.part.at("warmup_steps"), arguments.total_steps
    if total and (warmup := place.number() or 0) >= total:
        yield Found(
            place,
            f"the whole training has {total} optimizer steps, no more than warmup_steps {warmup:g}: the learning rate "
            f"reaches at most {total / warmup:.0%} of its peak",
            f"set warmup_steps below {total}, or to a share of the training, such as 0.03",
            "train with these arguments, and read learning_rate in log_history",
        )


@rule("CLP03", "hugging_face: {deepspeed: {zero_optimization: {stage: 2}}, max_grad_norm: 0.5}")
def _ignored_clip(arguments: TrainerArguments) -> Iterator[Found]:
    number = arguments.options.deepspeed
    default = 0.0 if number and number < SILENT_CLIP else 1.0
    if arguments.given is None or arguments.clip == default:
        return
    place = arguments.given.at("gradient_clipping")
    if not place.given:
        yield Found(
            place,
            f"the DeepSpeed config does not set gradient_clipping, so DeepSpeed clips to its default, {default:g} (0: "
            f"not at all), and max_grad_norm {arguments.clip:g} is ignored",
            'add "gradient_clipping": "auto" to the DeepSpeed config',
            "read engine.gradient_clipping() after the first step",
        )


@rule("TOK01", "hugging_face: {average_tokens_across_devices: false}")
@says(WARNING, "tokens weighed by rank", f"{TRAINER} _get_num_items_in_batch; transformers #34191")
def _tokens(arguments: TrainerArguments) -> Iterator[Found]:
    place = arguments.part.at("average_tokens_across_devices")
    if arguments.accumulate > 1 and not place.flag(default=True) and arguments.world_size != 1:
        what = "each rank divides by its own tokens, so a token weighs more on a rank with fewer tokens than the others"
        yield Found(place, what, "remove it: the default, true, divides by the tokens of all ranks")


@rule("MEM01", "hugging_face: {fsdp: full_shard}")
@says(INFO, "unsharded gradients between micro-batches", f"{TRAINER}; accelerate no_sync")
def _unsharded(arguments: TrainerArguments) -> Iterator[Found]:
    place, n = arguments.part.at("fsdp"), arguments.accumulate
    eager = arguments.part.at(f"{KWARGS}.sync_each_batch")
    if n > 1 and place.value and not eager.flag(default=False):
        yield Found(
            place,
            f"only the last of {n} micro-batches is reduced: until then each rank holds all gradients unsharded",
            f"if memory is short, set {eager.key} to true, which reduces after every micro-batch",
            "python -m bench predict --model 8b --world-size 8 --accumulate 4 --sequence 4096 --precision bf16 "
            "(compare the peaks of fsdp2-deferred and fsdp2-eager)",
        )
