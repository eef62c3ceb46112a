"""TrainingArguments of Hugging Face's Trainer: what they say, and rules for them.

Measured with transformers 5.23.0, accelerate 1.15.0 and DeepSpeed 0.19.8. The Trainer itself weighs
a partial window rightly, steps at the end of every epoch under every strategy, and trains
``max_steps`` whole steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import deepspeed_config
from bench.audit.lint.config_file import AUTO, ConfigPart
from bench.audit.lint.config_kinds import TRANSFORMERS, ProgramDtypes
from bench.audit.lint.deepspeed_config import SILENT_CLIPPING, deepspeed_keys, deepspeed_part
from bench.audit.lint.known_keys import Keys, repeated_keys
from bench.audit.lint.lint_options import LintOptions, windows_of
from bench.audit.lint.rules import STOPS, Found, rule, says
from bench.audit.lint.sum_rules import NAMES, GradientSum, in_16_bits
from bench.audit.lint.version_facts import is_known_bad
from bench.audit.training_plan import LARGEST_ACCUMULATE, ceil
from bench.findings import Level

TRAINER, ARGUMENTS = "transformers/trainer.py", "transformers/training_args.py"
LAYERWISE = "transformers/trainer_optimizer.py"
DEFAULT_MICRO, DEFAULT_EPOCHS, DEFAULT_LOGGING, DEFAULT_CLIP = 8, 3.0, 500, 1.0
RESAMPLED = (
    *("packing", "sample_packing", "neat_packing"),
    *("num_generations", "reward_funcs", "max_epochs"),
)
"""Keys by which an epoch has other samples than the data set: packed ones, several of each prompt
as in GRPO (trl/trainer/grpo_trainer.py, ``RepeatSampler``), or an end of ms-swift's own."""
WITHOUT_WARMUP = ("constant", "reduce_lr_on_plateau", "greedy")
"""Schedules that take no warm-up: transformers/optimization.py get_scheduler."""
KWARGS = "accelerator_config.gradient_accumulation_kwargs"
ADAPTERS = (
    "lora",
    "use_lora",
    "use_peft",
    "use_qlora",
    "qlora",
    "peft",
    "adapter",
    "load_in_4bit",
    "load_in_8bit",
    "ia3",
)
"""Beginnings of the keys by which programs train an adapter, whose parameters are in fp32."""
NAMES_OF_RUN = ("output_dir", "run_name", "hub_model_id")
"""Where a run is given a name, which may say that it trains an adapter."""


class TrainerArguments:
    """The fields of TrainingArguments that rules need.

    Raises InputError naming the key of a wrong value.
    """

    def __init__(
        self,
        part: ConfigPart,
        options: LintOptions,
        *,
        launch: ConfigPart | None = None,
        program: ProgramDtypes = TRANSFORMERS,
    ) -> None:
        self.program = program
        self.part, self.options, self.world_size = part, options, options.world_size
        self.launch = launch
        """The config of accelerate that it is launched with."""
        self.given = deepspeed_part(part.at("deepspeed"))
        """The DeepSpeed config, if it is here."""
        if not isinstance(part.at("accelerator_config").value, str):  # JSON, or a file
            part.at("accelerator_config").mapping()
        num_steps = part.at(KWARGS).mapping().at("num_steps")
        inner = num_steps.integer(most=LARGEST_ACCUMULATE, also=AUTO, default=1)
        steps = part.at("gradient_accumulation_steps")
        outer = steps.integer(most=LARGEST_ACCUMULATE, also=AUTO, default=1)
        self.accumulate = max(inner, outer)
        """N; 1 if it is unknown."""
        self.known_accumulate = steps.integer(most=LARGEST_ACCUMULATE, also=AUTO)
        """As given, or None."""
        self.known_micro_batch = part.at("per_device_train_batch_size").integer(also=AUTO)
        self.micro_batch = DEFAULT_MICRO
        for size in (self.known_micro_batch, options.batch_size):
            if size:
                self.micro_batch = size
        """Samples of a micro-batch on one rank; with split_batches, on all of them."""
        self.has_unknown_batch = steps.unknown or (
            options.batch_size is None and part.at("per_device_train_batch_size").unknown
        )
        """Whether another program sets N, or the micro-batch."""
        self.is_split = part.at("accelerator_config.split_batches").flag(default=False)
        epochs = part.at("num_train_epochs").number(least=-math.inf)
        clip = part.at("max_grad_norm")
        self.clip = clip.number(least=-math.inf)
        """None if it is unknown; clips nothing if it is not above 0."""
        if not clip.given:
            self.clip = DEFAULT_CLIP
        self.dtypes = {name: self._dtype(name) for name in ("bf16", "fp16")}
        self.max_steps = _max_steps(part.at("max_steps"))
        """0 for no limit."""
        self.total_steps = self.max_steps
        """Optimizer steps of the whole training; 0 if they cannot be calculated."""
        ends = ("max_steps", "num_train_epochs", "dataloader_drop_last")
        is_known = not self.has_unknown_batch and not any(part.at(name).unknown for name in ends)
        if not self.max_steps and is_known and not any(part.at(name).value for name in RESAMPLED):
            self.total_steps = self._steps_of_epochs(epochs)

    def _steps_of_epochs(self, epochs: float | None) -> int:
        """Of the whole training; 0 if they cannot be calculated."""
        options = self.options
        if not options.samples or not (self.world_size or self.is_split):
            options.want(options.samples, self.world_size, self.micro_batch)
            return 0
        # accelerate deals batches of the data set to the ranks in turn, or splits each among them.
        together = self.micro_batch
        if self.world_size is not None and not self.is_split:
            together *= self.world_size
        batches = ceil(options.samples, together)
        if self.part.at("dataloader_drop_last").flag(default=False):
            batches = options.samples // together
        if epochs is None:
            epochs = DEFAULT_EPOCHS
        steps = math.ceil(epochs * windows_of(max(batches, 1), self.accumulate).windows)
        return max(steps, 0)

    def _dtype(self, name: str) -> bool | None:
        """Whether training is in a dtype; None if it is not known."""
        place, evaluation = self.part.at(name), self.part.at(f"{name}_full_eval")
        if place.unknown or isinstance(place.value, str):
            return None
        return place.flag(default=False) or evaluation.value is True

    @property
    def trains_adapter(self) -> bool:
        """Whether a few parameters beside those of the model are trained."""
        for key in ("finetuning_type", "tuner_type", "train_type", "sft_type"):
            method = self.part.at(key)
            if method.given:
                return str(method.value) not in {"full", "freeze"}
        for key in self.part.names_here:
            value = self.part.under(key).value
            is_adapter = key.startswith(ADAPTERS) or key == "rank"
            if is_adapter and value not in (None, False, 0, "", "none", "None"):
                return True
        named = " ".join(str(self.part.at(key).value).lower() for key in NAMES_OF_RUN)
        return "lora" in named or "adapter" in named

    @property
    def makes_model(self) -> bool:
        """Whether the config describes a model that the program makes, and does not load."""
        return any(
            "num_hidden_layers" in self.part.under(key).names_here for key in self.part.names_here
        )

    @property
    def launch_kind(self) -> str:
        """What accelerate's config launches, such as FSDP; empty if there is none."""
        if self.launch is None:
            return ""
        return str(self.launch.at("distributed_type").value).upper()

    @property
    def fsdp(self) -> ConfigPart | None:
        """Where FSDP is asked for; None if it is not."""
        place = self.part.at("fsdp")
        if place.value and not place.unknown:
            return place
        if self.launch is not None and self.launch_kind == "FSDP":
            return self.launch.at("distributed_type")
        return None

    @property
    def has_options_of_fsdp(self) -> bool:
        """Whether FSDP may be asked for by its options alone (axolotl core/builders/base.py)."""
        return bool(self.part.at("fsdp_config").value)

    def parameters(self) -> tuple[ConfigPart, str] | None:
        """Where the parameters get a dtype of 16 bits, and which.

        None if they do not, or it is not known.
        """
        for key in ("parameters_bf16", "pure_bf16"):
            if self.part.at(key).value is True:
                return self.part.at(key), "bf16"
        for key in self.program.keys:
            for dtype, names in NAMES.items():
                # GradScaler refuses gradients of parameters in fp16, so that training does not
                # start.
                is_refused = dtype == "fp16" and self.dtypes["fp16"] is True
                if self.part.at(key).value in names and not (is_refused or self.makes_model):
                    return self.part.at(key), dtype
        if self.program.bf16_parameters and self.dtypes["bf16"]:
            return self.part.at("bf16"), "bf16"
        return None


def _max_steps(place: ConfigPart) -> int:
    """Optimizer steps after which training ends; 0 for no limit."""
    if _is_negative(place):
        return 0
    return place.integer(least=0, default=0)


def _is_negative(place: ConfigPart) -> bool:
    """Whether a value is below 0, by which TrainingArguments mean that there is no limit."""
    return isinstance(place.value, int | float) and place.value < 0


@dataclass(frozen=True)
class SameValue:
    """A value of a DeepSpeed config, which must be that of TrainingArguments or 'auto'."""

    place: ConfigPart
    value: float | None
    name: str
    """What it is called in TrainingArguments."""


def subjects(
    part: ConfigPart,
    options: LintOptions,
    *,
    launch: ConfigPart | None = None,
    program: ProgramDtypes = TRANSFORMERS,
) -> Iterator[object]:
    """What rules are about in TrainingArguments, and in accelerate's config of their launch.

    Raises InputError for a wrong value.
    """
    arguments = TrainerArguments(part, options, launch=launch, program=program)
    yield from repeated_keys(part)
    yield Keys(part, "training_arguments", "TrainingArguments", shared=True)
    yield arguments
    if part.at("deepspeed").given and arguments.given is None:
        place = part.at("deepspeed")
        if place.value not in (False, ""):
            options.note(
                f"{place.file}:{place.line}: the DeepSpeed config {place.value} is not here, and "
                "not judged"
            )
    if arguments.given is not None:
        yield from _with_deepspeed(arguments, arguments.given, options)


def _with_deepspeed(
    arguments: TrainerArguments, given: ConfigPart, options: LintOptions
) -> Iterator[object]:
    """What rules are about in the DeepSpeed config of the Trainer."""
    engine = deepspeed_config.read(given)
    yield from repeated_keys(given)  # accelerate reads the file, with json.load
    yield from deepspeed_keys(given, options)
    n, ranks, micro = arguments.known_accumulate, arguments.world_size, arguments.known_micro_batch
    together = None
    if n and ranks and micro:
        together = micro * n * ranks
    yield SameValue(given.at("gradient_accumulation_steps"), n, "gradient_accumulation_steps")
    if not arguments.part.at("auto_find_batch_size").value:
        yield SameValue(
            given.at("train_micro_batch_size_per_gpu"), micro, "per_device_train_batch_size"
        )
        product = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
        yield SameValue(given.at("train_batch_size"), together, product)
    yield SameValue(given.at("gradient_clipping"), arguments.clip, "max_grad_norm")
    for name, is_on in arguments.dtypes.items():
        if arguments.part.at(name).given or arguments.program.has_plain_defaults:
            yield SameValue(given.at(f"{name}.enabled"), is_on, name)
    chosen = [name for name, is_on in arguments.dtypes.items() if is_on]
    in_window = arguments.accumulate
    if not given.at("gradient_accumulation_steps").given:
        in_window = 1  # accelerate sets it
        yield MissingAccumulation(arguments, given)
    if arguments.part.at("fp8").value is True:  # of LLaMA-Factory
        return
    yield GradientSum(engine.with_dtypes(chosen, missing=False), in_window, options, ranks)


@dataclass(frozen=True)
class MissingAccumulation:
    """A DeepSpeed config of the Trainer without gradient_accumulation_steps."""

    arguments: TrainerArguments
    given: ConfigPart
    """The DeepSpeed config."""


MISMATCH = "transformers/integrations/deepspeed.py trainer_config_finalize"


@rule(
    SameValue,
    "MIS01",
    "hugging_face: {}, accelerate: {deepspeed_config: {zero_stage: 2, gradient_clipping: 0.5}}",
)
@says(Level.ERROR, "DeepSpeed and TrainingArguments differ", MISMATCH, stops=True)
def _differ(same: SameValue) -> Iterator[Found]:
    place, value = same.place, same.value
    if not place.given or place.value == AUTO or place.unknown or value is None:
        return
    if place.value != value:
        given = f"{value:g}"
        if isinstance(value, bool):
            given = str(value).lower()
        arguments = f"{same.name} of TrainingArguments is {given}"
        name = place.key.removeprefix("deepspeed.")
        what = (
            f"the Trainer raises ValueError: {name} is {str(place.value).lower()}, and {arguments}"
        )
        yield Found(place, what, 'set it to "auto", or remove it')


@rule(
    MissingAccumulation,
    "BAT01",
    "hugging_face: {deepspeed: {zero_optimization: {stage: 2}, train_batch_size: auto, "
    "train_micro_batch_size_per_gpu: auto, gradient_clipping: auto}}",
)
def _missing_accumulation(missing: MissingAccumulation) -> Iterator[Found]:
    """The Trainer fills in both batch sizes with its N, and accelerate sets N to 1."""
    arguments, train = missing.arguments, missing.given.at("train_batch_size")
    n = arguments.known_accumulate
    if n is None or n == 1:
        return
    is_filled = train.value == AUTO and missing.given.at("train_micro_batch_size_per_gpu").given
    if not is_filled or arguments.part.at("auto_find_batch_size").value:
        return
    what = (
        f"the Trainer fills in train_batch_size with N = {n}, and accelerate sets the missing "
        "gradient_accumulation_steps to 1: DeepSpeed refuses the product"
    )
    fix = 'add "gradient_accumulation_steps": "auto" to the DeepSpeed config'
    yield Found(train, what, fix, source="accelerate/utils/dataclasses.py DeepSpeedPlugin")


@rule(
    TrainerArguments,
    "SCH02",
    "hugging_face: {accelerator_config: {gradient_accumulation_kwargs: {num_steps: 2}}}",
)
def _two_factors(arguments: TrainerArguments) -> Iterator[Found]:
    inner, outer = (
        arguments.part.at(f"{KWARGS}.num_steps"),
        arguments.part.at("gradient_accumulation_steps").value,
    )
    if inner.given and isinstance(outer, int | float) and outer > 1:
        what = (
            f"the Trainer raises ValueError: gradient_accumulation_steps is {outer}, and "
            f"num_steps {inner.value}"
        )
        yield Found(inner, what, "remove num_steps")


@rule(TrainerArguments, "ACC01", "hugging_face: {torch_dtype: bfloat16, model_name_or_path: m}")
def _parameters_in_16_bits(arguments: TrainerArguments) -> Iterator[Found]:
    """Parameters in 16 bits have such gradients, unless FSDP's mixed precision makes them fp32.

    Under DeepSpeed its own config decides. Without a known program it is a note: the key is none of
    TrainingArguments, and some programs read it and do not use it.
    """
    found = arguments.parameters()
    if found is None or arguments.accumulate == 1 or arguments.trains_adapter:
        return
    if arguments.part.at("deepspeed").value or arguments.launch_kind == "DEEPSPEED":
        return
    if arguments.fsdp is not None or arguments.has_options_of_fsdp:
        return
    place, dtype = found
    fix = (
        f"load the parameters in float32 ({place.name}); bf16 or fp16 of TrainingArguments "
        "then still train in 16 bits"
    )
    for each in in_16_bits(place, arguments.accumulate, dtype, fix):
        what = f"the parameters are in {dtype}, so under DDP and on one GPU {each.what}"
        level = None
        if not arguments.program.are_given:
            what, level = f"if the program loads the model in this dtype, {what}", Level.NOTE
        yield each._replace(what=what, level=level)


@rule(TrainerArguments, "OPT02", "hugging_face: {optim: galore_adamw_layerwise}")
@says(Level.ERROR, "layerwise optimizer with accumulation", LAYERWISE)
@rule(TrainerArguments, "OPT03", "hugging_face: {optim: lomo}")
@says(
    Level.ERROR, "optimizer that steps in every backward", "lomo_optim 0.1.1 lomo.py fused_backward"
)
def _optimizer(arguments: TrainerArguments) -> Iterator[Found]:
    place, n = arguments.part.at("optim"), arguments.accumulate
    name = place.string()
    if name is None or n == 1:
        return
    name = name.lower()
    if name.endswith("layerwise"):
        what = (
            f"the Trainer raises ValueError: {name} steps inside backward, so it cannot accumulate"
        )
        fix = f"use {name.removesuffix('_layerwise')}, or set gradient_accumulation_steps to 1"
        yield Found(place, what, fix, f"{STOPS}: {LAYERWISE}", code="OPT02")
    elif name in {"lomo", "adalomo"}:
        what = (
            f"{name} updates the parameters in every backward: a window of {n} micro-batches "
            f"makes {n} updates"
        )
        yield Found(
            place,
            what,
            "set gradient_accumulation_steps to 1, or use another optimizer",
            code="OPT03",
        )


@rule(TrainerArguments, "BAT04", "hugging_face: {accelerator_config: {split_batches: true}}")
@says(Level.WARNING, "a micro-batch is split among the ranks", f"{ARGUMENTS} split_batches")
def _split_batches(arguments: TrainerArguments) -> Iterator[Found]:
    n, micro, ranks = arguments.accumulate, arguments.micro_batch, arguments.world_size
    if arguments.is_split and ranks != 1 and not arguments.has_unknown_batch:
        among = "all ranks"
        if ranks is not None:
            among = f"{ranks} ranks"
        what = (
            f"split_batches divides each batch of {micro} among {among}: a window has {micro * n} "
        )
        fix = "set split_batches to false, or per_device_train_batch_size to the batch of all ranks"
        yield Found(
            arguments.part.at("accelerator_config.split_batches"),
            f"{what}samples over all of them",
            fix,
        )


@rule(TrainerArguments, "BAT05", "hugging_face: {auto_find_batch_size: true}")
@says(Level.WARNING, "effective batch that changes by itself", f"{TRAINER} _inner_training_loop")
def _smaller_batches(arguments: TrainerArguments) -> Iterator[Found]:
    place = arguments.part.at("auto_find_batch_size")
    if place.flag(default=False) and not arguments.has_unknown_batch:
        yield Found(
            place,
            f"out of memory, the Trainer shrinks the micro-batch below {arguments.micro_batch} "
            "and keeps N = "
            f"{arguments.accumulate}: the effective batch shrinks, and the steps per epoch grow",
            "find the largest micro-batch once, set it, and scale gradient_accumulation_steps up "
            "by as much",
        )


@rule(TrainerArguments, "STP04", "hugging_face: {max_steps: 1000, num_train_epochs: 3}")
@says(Level.WARNING, "num_train_epochs ignored", f"{TRAINER} set_initial_training_values")
def _ignored_epochs(arguments: TrainerArguments) -> Iterator[Found]:
    epochs = arguments.part.at("num_train_epochs")
    if arguments.max_steps and epochs.given and not _is_negative(epochs):
        what = (
            f"max_steps {arguments.max_steps} alone ends training; num_train_epochs "
            f"{epochs.value} is ignored"
        )
        yield Found(epochs, what, "keep one of the two")


@rule(TrainerArguments, "LOG01", "hugging_face: {max_steps: 400}")
def _too_rare(arguments: TrainerArguments) -> Iterator[Found]:
    """The loss is logged every ``logging_steps`` only; the Trainer evaluates at the end too."""
    total = arguments.total_steps
    place, strategy = (arguments.part.at(f"logging_{name}") for name in ("steps", "strategy"))
    if arguments.part.at("logging_first_step").value or strategy.value not in (None, "steps"):
        return
    every: float | None = DEFAULT_LOGGING
    if place.given:
        every = place.number()
    if every and 0 < total < every:
        given = f"{every:g}"
        if not place.given:
            given += " (the default)"
        yield Found(
            place,
            f"the whole training has {total} optimizer steps, fewer than logging_steps {given}: "
            "loss is never logged",
            f"set logging_steps to at most {total}",
            "train with these arguments: no step of log_history has loss",
        )


@rule(
    TrainerArguments,
    "STP05",
    "hugging_face: {logging_steps: 10, warmup_steps: 100}, samples: 640, world_size: 2",
)
@says(Level.WARNING, "warm-up longer than the training", f"{ARGUMENTS} get_warmup_steps")
def _long_warmup(arguments: TrainerArguments) -> Iterator[Found]:
    place, total = arguments.part.at("warmup_steps"), arguments.total_steps
    if arguments.part.at("lr_scheduler_type").value in WITHOUT_WARMUP:
        return
    if total == 0 or place.value in (-1, -1.0):
        return
    warmup = place.number()
    if warmup is not None and warmup > total:
        yield Found(
            place,
            f"the whole training has {total} optimizer steps, fewer than warmup_steps "
            f"{warmup:g}: the learning rate "
            f"reaches at most {(total - 1) / warmup:.0%} of its peak",
            f"set warmup_steps below {total}, or to a share of the training, such as 0.03",
            "train with these arguments, and read learning_rate in log_history",
        )


@rule(
    TrainerArguments,
    "CLP03",
    "hugging_face: {deepspeed: {zero_optimization: {stage: 2}}, max_grad_norm: 0.5}",
)
def _ignored_clip(arguments: TrainerArguments) -> Iterator[Found]:
    default = 0.0
    if is_known_bad(SILENT_CLIPPING, arguments.options.deepspeed):
        default = 1.0
    if arguments.given is None or arguments.clip is None or max(arguments.clip, 0.0) == default:
        return
    place = arguments.given.at("gradient_clipping")
    if not place.given:
        yield Found(
            place,
            "the DeepSpeed config does not set gradient_clipping, so DeepSpeed clips to its "
            f"default, {default:g} (0: "
            f"not at all), and max_grad_norm {arguments.clip:g} is ignored",
            'add "gradient_clipping": "auto" to the DeepSpeed config',
            "read engine.gradient_clipping() after the first step",
        )


@rule(TrainerArguments, "TOK01", "hugging_face: {average_tokens_across_devices: false}")
@says(
    Level.WARNING,
    "tokens weighed by rank",
    f"{TRAINER} _get_num_items_in_batch; transformers #34191",
)
def _tokens(arguments: TrainerArguments) -> Iterator[Found]:
    place = arguments.part.at("average_tokens_across_devices")
    if arguments.accumulate > 1 and not place.flag(default=True) and arguments.world_size != 1:
        what = (
            "each rank divides by its own tokens, so a token weighs more on a rank with fewer "
            "tokens than the others"
        )
        yield Found(place, what, "remove it: the default, true, divides by the tokens of all ranks")


@rule(TrainerArguments, "MEM01", "hugging_face: {fsdp: full_shard}")
@says(Level.NOTE, "unsharded gradients between micro-batches", f"{TRAINER}; accelerate no_sync")
def _unsharded(arguments: TrainerArguments) -> Iterator[Found]:
    place, n = arguments.fsdp, arguments.accumulate
    eager = arguments.part.at(f"{KWARGS}.sync_each_batch")
    if n > 1 and place is not None and not eager.flag(default=False):
        yield Found(
            place,
            f"only the last of {n} micro-batches is reduced: until then each rank holds all "
            "gradients unsharded",
            f"if memory is short, set {eager.key} to true, which reduces after every micro-batch",
            "python -m bench predict --model 8b --world-size 8 --accumulate 4 --sequence 4096 "
            "--precision bf16 "
            "(compare the peaks of fsdp2-deferred and fsdp2-eager)",
        )
