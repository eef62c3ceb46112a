"""TrainingArguments of Hugging Face's Trainer: what they say, and rules for them.

Measured with transformers 5.23.0, accelerate 1.15.0 and DeepSpeed 0.19.8. The Trainer itself weighs a partial window
rightly, steps at the end of every epoch under every strategy, and trains ``max_steps`` whole steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import deepspeed_rules, keys, proof
from bench.audit.lint.arithmetic import windows_of
from bench.audit.lint.known import Options
from bench.audit.lint.rules import LintFinding, Severity
from bench.audit.lint.section import AUTO, ConfigPart
from bench.audit.training import LARGEST_ACCUMULATE, ceil

TRAINER, ARGUMENTS = "transformers/trainer.py", "transformers/training_args.py"
DEEPSPEED = "transformers/integrations/deepspeed.py trainer_config_finalize"
DEFAULT_MICRO, DEFAULT_EPOCHS, DEFAULT_LOGGING, DEFAULT_CLIP = 8, 3.0, 500, 1.0


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The fields of TrainingArguments that rules need, with their defaults."""

    section: ConfigPart
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


def read(section: ConfigPart, options: Options) -> Arguments:
    """What a config of TrainingArguments says. Raises InputError naming the key of a wrong value."""
    world_size = options.world_size
    section.at("accelerator_config").mapping()
    inner = section.at("accelerator_config.gradient_accumulation_kwargs").mapping().at("num_steps")
    accumulate = section.at("gradient_accumulation_steps").integer(most=LARGEST_ACCUMULATE) or 1
    accumulate = max(accumulate, inner.integer(most=LARGEST_ACCUMULATE) or 1)
    micro = options.batch_size or section.at("per_device_train_batch_size").integer() or DEFAULT_MICRO
    is_split = section.at("accelerator_config.split_batches").flag(default=False)
    epochs = section.at("num_train_epochs").number()
    max_steps = section.at("max_steps").integer(least=-1)
    max_steps = None if max_steps in {0, -1} else max_steps
    total = max_steps
    if max_steps is None and options.samples and (world_size or is_split):
        # accelerate deals batches of the data set to the ranks in turn, or splits each among them.
        together = micro * (1 if is_split else world_size or 1)
        is_dropped = section.at("dataloader_drop_last").flag(default=False)
        batches = options.samples // together if is_dropped else ceil(options.samples, together)
        steps = max(windows_of(max(batches, 1), accumulate).windows, 1)
        total = math.ceil((DEFAULT_EPOCHS if epochs is None else epochs) * steps)
    elif max_steps is None:
        absent = {"--samples": options.samples, "--world-size": world_size}
        options.wanted.update(name for name, number in absent.items() if number is None)
    clip = section.at("max_grad_norm").number()
    return Arguments(
        section=section,
        accumulate=accumulate,
        micro=micro,
        is_split=is_split,
        world_size=world_size,
        epochs=DEFAULT_EPOCHS if epochs is None else epochs,
        max_steps=max_steps,
        clip=DEFAULT_CLIP if clip is None else clip,
        dtypes={name: section.at(name).flag(default=False) for name in ("bf16", "fp16")},
        total_steps=total,
    )


def check(section: ConfigPart, options: Options) -> Iterator[LintFinding]:
    """Findings in TrainingArguments. Raises InputError for a wrong value."""
    arguments = read(section, options)
    yield from keys.misspelt(section, "training_arguments", "TrainingArguments")
    yield from _refused(arguments)
    yield from _batches(arguments)
    yield from _lengths(arguments)
    own = deepspeed_rules.part_of(section.at("deepspeed"))
    if own is not None:
        yield from _engine(arguments, own, options)
    if arguments.accumulate > 1:
        yield from _accumulation(arguments)


def _refused(arguments: Arguments) -> Iterator[LintFinding]:
    section, n = arguments.section, arguments.accumulate
    inner = section.at("accelerator_config.gradient_accumulation_kwargs.num_steps")
    given = section.at("gradient_accumulation_steps")
    if inner.given and (given.integer() or 1) > 1:
        yield inner.finding(
            "SCH02",
            f"the Trainer raises ValueError: gradient_accumulation_steps is {given.value}, and num_steps is "
            f"{inner.value}",
            "remove num_steps",
            proof.stops(f"{TRAINER} create_accelerator_and_postprocess"),
        )
    place = section.at("optim")
    name = (place.word() or "").lower()
    if n > 1 and name.endswith("layerwise"):
        yield place.finding(
            "OPT02",
            f"the Trainer raises ValueError: {name} steps inside backward, so it cannot accumulate {n} micro-batches",
            f"use {name.removesuffix('_layerwise')}, or set gradient_accumulation_steps to 1",
            proof.stops("transformers/trainer_optimizer.py"),
        )
    elif n > 1 and name in {"lomo", "adalomo"}:
        yield place.finding(
            "OPT03",
            f"{name} updates the parameters in every backward: a window of {n} micro-batches makes {n} updates, each "
            f"with the gradient of one micro-batch divided by {n}",
            "set gradient_accumulation_steps to 1, or use another optimizer",
            "accelerate/accelerator.py lomo_backward calls fused_backward, which updates (lomo_optim 0.1.1 lomo.py)",
        )


def _batches(arguments: Arguments) -> Iterator[LintFinding]:
    section, n, micro = arguments.section, arguments.accumulate, arguments.micro
    if arguments.is_split and arguments.world_size != 1:
        ranks = arguments.world_size or "the number of"
        yield section.at("accelerator_config.split_batches").finding(
            "BAT04",
            f"split_batches divides each batch of {micro} among {ranks} ranks: a window has {micro} x {n} = "
            f"{micro * n} samples, and not as many on each rank",
            "set split_batches to false, or per_device_train_batch_size to the batch of all ranks",
            f"{ARGUMENTS}: 'split_batches=True will override the per_device_train_batch_size'",
        )
    place = section.at("auto_find_batch_size")
    if place.flag(default=False):
        yield place.finding(
            "BAT05",
            f"out of memory, the Trainer trains with a smaller micro-batch than {micro} but the same N = {n}: the "
            "effective batch shrinks, and the steps per epoch grow",
            "find the largest micro-batch once, set it, and scale gradient_accumulation_steps up by as much",
            f"{TRAINER} _inner_training_loop takes the smaller batch and keeps gradient_accumulation_steps",
        )


def _lengths(arguments: Arguments) -> Iterator[LintFinding]:
    """Lengths counted in optimizer steps, against the steps of the whole training."""
    section, total = arguments.section, arguments.total_steps
    epochs = section.at("num_train_epochs")
    if arguments.max_steps and epochs.given:
        yield epochs.finding(
            "STP04",
            f"max_steps {arguments.max_steps} alone ends training, after as many epochs as it takes; num_train_epochs "
            f"{arguments.epochs:g} is ignored",
            "keep one of the two",
            f"{TRAINER} set_initial_training_values",
        )
    if not total:
        return
    strategies = (("logging", DEFAULT_LOGGING, "steps"), ("eval", 0, "no"))
    for name, default, usual in strategies:
        place = section.at(f"{name}_steps")
        every = place.number()
        if every is None:
            every = default
        if (section.at(f"{name}_strategy").value or usual) == "steps" and total < every and every >= 1:
            verb = "logs the loss" if name == "logging" else "evaluates"
            yield place.finding(
                "LOG01",
                f"the whole training has {total} optimizer steps of {arguments.accumulate} micro-batches, and the "
                f"Trainer {verb} every {every:g}{'' if place.given else ' (the default)'}: never",
                f"set {name}_steps to at most {total}",
                f"train with these arguments: no step of log_history has {'a loss' if verb[0] == 'l' else 'eval_loss'}",
            )
    place = section.at("warmup_steps")
    warmup = place.number() or 0
    if warmup >= total and warmup >= 1:
        yield place.finding(
            "STP05",
            f"the whole training has {total} optimizer steps of {arguments.accumulate} micro-batches, fewer than "
            f"warmup_steps {warmup:g} or as many: the learning rate reaches at most {total / warmup:.0%} of its peak",
            f"set warmup_steps below {total}, or to a share of the training, such as 0.03",
            "train with these arguments, and read learning_rate in log_history",
        )


def _engine(arguments: Arguments, own: ConfigPart, options: Options) -> Iterator[LintFinding]:
    """Rules for DeepSpeed under the Trainer, which fills in 'auto' and compares what is given."""
    n, world_size = arguments.accumulate, arguments.world_size
    engine = deepspeed_rules.read(own)
    yield from deepspeed_rules.unknown(own)
    product = arguments.micro * n * world_size if world_size else None
    wanted = {
        "gradient_accumulation_steps": (n, "gradient_accumulation_steps"),
        "train_micro_batch_size_per_gpu": (arguments.micro, "per_device_train_batch_size"),
        "train_batch_size": (product, "per_device_train_batch_size x gradient_accumulation_steps x ranks"),
        "gradient_clipping": (arguments.clip, "max_grad_norm"),
        **{f"{name}.enabled": (is_on, name) for name, is_on in arguments.dtypes.items()},
    }
    for key, (value, name) in wanted.items():
        yield from differs(own.at(key), value, name)
    clip = own.at("gradient_clipping")
    default = 0.0 if options.deepspeed and options.deepspeed < deepspeed_rules.SILENT_CLIP else 1.0
    if not clip.given and arguments.clip != default:
        yield clip.finding(
            "CLP03",
            f"the DeepSpeed config does not set gradient_clipping, so DeepSpeed clips to its default, {default:g} (0: "
            f"not at all), and max_grad_norm {arguments.clip:g} is ignored",
            'add "gradient_clipping": "auto" to the DeepSpeed config',
            "read engine.gradient_clipping() after the first step",
        )
    is_on = {
        name: is_on if own.at(f"{name}.enabled").value == AUTO else getattr(engine, name)
        for name, is_on in arguments.dtypes.items()
    }
    engine = dataclasses.replace(engine, bf16=is_on["bf16"], fp16=is_on["fp16"])
    yield from deepspeed_rules.sums(engine, n, options, world_size=world_size)


def differs(place: ConfigPart, value: float | None, name: str) -> Iterator[LintFinding]:
    """DeepSpeed's value at a place that is not that of TrainingArguments."""
    if not place.given or place.value == AUTO or value is None or place.value == value:
        return
    yield place.finding(
        "MIS01",
        f"the Trainer raises ValueError: {place.path[-1]} is {place.value}, and {name} is {value:g}",
        'set it to "auto", or remove it',
        proof.stops(DEEPSPEED),
    )


def _accumulation(arguments: Arguments) -> Iterator[LintFinding]:
    section, n = arguments.section, arguments.accumulate
    place = section.at("average_tokens_across_devices")
    if not place.flag(default=True) and arguments.world_size != 1:
        yield place.finding(
            "TOK01",
            f"each rank divides by the tokens of its own {n} micro-batches, and the ranks are then averaged: a token "
            "weighs more on a rank with fewer tokens than the others",
            "remove it: the default, true, divides by the tokens of all ranks",
            f"{TRAINER} _get_num_items_in_batch",
        )
    place = section.at("fsdp")
    eager = section.at("accelerator_config.gradient_accumulation_kwargs.sync_each_batch")
    if place.value and not eager.flag(default=False):
        yield place.finding(
            "MEM01",
            f"the first {n - 1} of {n} micro-batches are not reduced: between them each rank holds the gradients of "
            "all parameters unsharded",
            "if memory is short, set accelerator_config.gradient_accumulation_kwargs.sync_each_batch to true, which "
            "reduces after every micro-batch",
            "python -m bench predict --model 8b --world-size 8 --accumulate 4 --sequence 4096 --precision bf16 "
            "(compare the peaks of fsdp2-deferred and fsdp2-eager)",
            Severity.INFO,
        )
