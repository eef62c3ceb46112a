"""The YAML of ``accelerate config``: what ``accelerate launch`` makes of it.

Measured with accelerate 1.15.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.audit.lint import deepspeed_config
from bench.audit.lint.config_file import AUTO, ConfigPart, put
from bench.audit.lint.deepspeed_config import (
    SILENT_CLIPPING,
    DeepSpeedConfig,
    deepspeed_keys,
    deepspeed_part,
)
from bench.audit.lint.hugging_face_rules import DEFAULT_CLIP, SameValue, TrainerArguments
from bench.audit.lint.known_keys import Keys, known_keys, repeated_keys
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.proof import AUDIT
from bench.audit.lint.rules import Found, rule, says
from bench.audit.lint.sum_rules import GradientSum
from bench.audit.lint.version_facts import is_known_bad
from bench.audit.training_plan import LARGEST_ACCUMULATE
from bench.findings import Level

PLUGIN = "accelerate/utils/dataclasses.py DeepSpeedPlugin"
ACCELERATOR, SCHEDULER = "accelerate/accelerator.py", "accelerate/scheduler.py"
NONE = "none"
N = "gradient_accumulation_steps"
DEFAULT_STAGE = 2
"""Of ZeRO, where a config has none."""
CONFIG_SUFFIXES = {".yaml", ".yml", ".json"}
"""Of files that hold TrainingArguments; others are scripts, whose program is not known for sure."""
FLAGS = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
"""Options of ``accelerate launch``, and the kind of training that each starts."""
OPTION = "${option}"
"""A value that an option overrules."""
SAGEMAKER = "AMAZON_SAGEMAKER"
SEVERAL_RANKS = {
    *(
        "MULTI_GPU",
        "MULTI_CPU",
        "MULTI_XPU",
        "MULTI_NPU",
        "MULTI_MLU",
        "MULTI_SDAA",
        "MULTI_MUSA",
        "MULTI_HPU",
    ),
    *("FSDP", "DEEPSPEED", "XLA"),
}
"""Kinds of training in which every rank has batches of its own."""


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
    file: ConfigPart | None
    """The DeepSpeed config that ``deepspeed_config_file`` names, if it is here."""
    engine: DeepSpeedConfig
    options: LintOptions
    num_ranks: int | None
    trainer: ConfigPart | None
    """The TrainingArguments that are launched with it; None if another script, or one not known, is
    launched."""

    @property
    def is_script(self) -> bool:
        """Whether a script, not the Trainer, is launched, as far as is known."""
        return self.trainer is None

    @property
    def accumulate(self) -> ConfigPart:
        """Where N is set."""
        return self.engine.part.at("gradient_accumulation_steps")


def _kind(launch: ConfigPart) -> str:
    """What the options of ``accelerate launch`` start; empty if a config says so."""
    return next((kind for option, kind in FLAGS.items() if launch.at(option).value), "")


def _options(launch: ConfigPart) -> dict[str, str]:
    """By key of a config, the option of ``accelerate launch`` that says the same, if it is there."""
    keys = {f"deepspeed_config.{name}": name for name in known_keys()["deepspeed_config"]}
    keys |= {name: name for name in ("mixed_precision", "num_processes", "num_machines")}
    return {key: option for key, option in keys.items() if option in launch.names_here}


def of_options(launch: ConfigPart) -> ConfigPart | None:
    """The options of ``accelerate launch`` as a config.

    None if they do not say what is started: a config on the user's machine may.
    """
    kind = _kind(launch)
    if not kind:
        return None
    return launch.renamed(_options(launch), {"distributed_type": kind})


def overruled(root: ConfigPart, launch: ConfigPart) -> ConfigPart:
    """A config whose values are not known where options of ``accelerate launch`` overrule them.

    Raises InputError for a wrong value.
    """
    root.at("deepspeed_config").mapping()
    given = root.renamed({key: key for key in root.names_here})
    for key in _options(launch):
        *above, name = key.split(".")
        if not given.under(*above).unknown:
            put(given.values, (*above, name), OPTION)
    if kind := _kind(launch):
        given.values["distributed_type"] = kind
    return given


def world_size(root: ConfigPart, options: LintOptions) -> int | None:
    """Ranks: ``num_processes`` counts those of all machines."""
    processes = root.at("num_processes").integer(least=-1)
    if options.world_size is not None or processes is None or processes <= 0:
        return options.world_size
    return processes


def subjects(
    root: ConfigPart, options: LintOptions, trainer: ConfigPart | None = None
) -> Iterator[object]:
    """What rules are about in a config of accelerate.

    ``trainer``: the TrainingArguments that are launched with it.

    Raises InputError for a wrong value.
    """
    yield from repeated_keys(root)
    if root.at("compute_environment").value != SAGEMAKER:  # whose configs have keys of their own
        added = frozenset(key for key in root.names_here if _is_added(root.under(key)))
        reader = "accelerate launch raises ValueError"
        yield Keys(root, "accelerate", reader, refused=True, ignored=added)
    kind = str(root.at("distributed_type").value).upper()  # NO without quotes is false in YAML
    ranks = world_size(root, options)
    if trainer is None and kind in SEVERAL_RANKS and ranks and ranks > 1:
        yield AccelerateRanks(root.at("num_processes"), ranks)
    if kind != "DEEPSPEED":
        return
    inner = root.at("deepspeed_config").mapping()
    options.note_if_unknown(inner)
    yield Keys(inner, "deepspeed_config", "accelerate launch")
    place = inner.at("deepspeed_config_file")
    given = deepspeed_part(place)
    engine = _engine(inner)
    if given is not None:
        engine = deepspeed_config.read(given)
        yield from deepspeed_keys(given, options)
    elif place.given:
        options.note(
            f"{place.file}:{place.line}: {place.key} {place.value} is not here, so it was not "
            "judged"
        )
        engine = dataclasses.replace(engine, is_known=False)
    yield AccelerateDeepSpeed(root, inner, given, engine, options, ranks, trainer)
    n = engine.n
    arguments = None
    if trainer is not None:
        arguments = TrainerArguments(trainer, options)
        if _says_accumulate(arguments):
            n = arguments.accumulate
        yield from _same_values(arguments, engine)
    if given is not None and not given.at(N).given:
        n = 1  # accelerate sets it
    if not engine.is_known:
        return
    place, dtype = _precision(root, arguments)
    yield GradientSum(
        engine.with_dtypes([dtype]),
        n,
        options,
        ranks,
        place,
        is_part=trainer is None,
    )


def _is_added(place: ConfigPart) -> bool:
    """Whether a part may be one that a fork of accelerate has, as it names and shapes them."""
    return isinstance(place.value, dict) and place.name.endswith("_config")


def _precision(root: ConfigPart, arguments: TrainerArguments | None) -> tuple[ConfigPart, str]:
    """Where the precision is set, and which: the Trainer's own before accelerate's."""
    if arguments is not None:
        for name, is_on in arguments.dtypes.items():
            if is_on:
                return arguments.part.at(name), name
    place = root.at("mixed_precision")
    if place.given:
        return place, str(place.value)
    return root.at("deepspeed_config"), ""


def _says_accumulate(arguments: TrainerArguments) -> bool:
    """Whether TrainingArguments say N, be it by their default.

    A command that leaves it out may be of a program that asks accelerate for it.
    """
    if arguments.known_accumulate is not None:
        return True
    return _is_in_config(arguments) and not arguments.part.at(N).unknown


def _is_in_config(arguments: TrainerArguments) -> bool:
    """Whether a config has TrainingArguments, and not a command."""
    return Path(arguments.part.file).suffix in CONFIG_SUFFIXES


def _same_values(arguments: TrainerArguments, engine: DeepSpeedConfig) -> Iterator[SameValue]:
    """What accelerate's config and TrainingArguments both say."""
    if _says_accumulate(arguments):
        yield SameValue(engine.part.at(N), arguments.accumulate, N)
    has_clip = _is_in_config(arguments) or arguments.part.at("max_grad_norm").given
    if engine.clip and has_clip:  # accelerate drops a threshold of 0
        yield SameValue(engine.part.at("gradient_clipping"), arguments.clip, "max_grad_norm")


def _engine(inner: ConfigPart) -> DeepSpeedConfig:
    """What accelerate tells DeepSpeed where there is no config file."""
    clip, threshold = inner.at("gradient_clipping"), None
    if clip.value != NONE:
        threshold = clip.number(also=AUTO)
    return DeepSpeedConfig(
        # Its keys are DeepSpeed's only in part; none of them is one that rules about sums look up.
        part=inner,
        accumulate=inner.at("gradient_accumulation_steps").integer(
            most=LARGEST_ACCUMULATE, also=AUTO
        ),
        clip=threshold,
        stage=inner.at("zero_stage").zero_stage(default=DEFAULT_STAGE),
        offload=inner.at("offload_optimizer_device").string() not in {None, NONE},
        is_known=not inner.unknown,
    )


@rule(AccelerateRanks, "SCH04", "accelerate: {distributed_type: MULTI_GPU, num_processes: 4}")
@says(
    Level.NOTE,
    "schedule that steps once per rank",
    f"{SCHEDULER} AcceleratedScheduler.step; accelerate #2926",
)
def _schedule(several: AccelerateRanks) -> Iterator[Found]:
    ranks = several.num_ranks
    yield Found(
        several.place,
        f"a scheduler that a script passes to accelerator.prepare steps {ranks} times per "
        "update: T steps end after "
        f"T / {ranks} updates; Hugging Face's Trainer steps its own once",
        f"multiply the schedule's length by {ranks}, or pass step_scheduler_with_optimizer=False "
        "and step it yourself",
    )


@rule(
    AccelerateDeepSpeed,
    "MIS02",
    "accelerate: {mixed_precision: bf16, deepspeed_config: {deepspeed_config_file: ds.json}}, "
    "named: {}",
)
@says(
    Level.ERROR,
    "settings beside deepspeed_config_file",
    f"{PLUGIN}._deepspeed_config_checks",
    stops=True,
)
def _beside(both: AccelerateDeepSpeed) -> Iterator[Found]:
    is_config = Path(both.root.file).suffix in CONFIG_SUFFIXES  # accelerate checks no options
    if both.file is None or not is_config:
        return
    settings = [
        key
        for key in known_keys()["deepspeed_config"]
        if not key.startswith(("deepspeed_", "zero3_init"))
    ]
    name = both.inner.at("deepspeed_config_file").value
    for place in [*map(both.inner.at, settings), both.root.at("mixed_precision")]:
        if place.given and not place.unknown:
            what = (
                f"accelerate raises ValueError: {place.name} must not be set beside "
                f"deepspeed_config_file {name}"
            )
            yield Found(place, what, f"remove {place.name}, and set it in {name}")


@rule(
    AccelerateDeepSpeed,
    "GAS02",
    "accelerate: {deepspeed_config: {deepspeed_config_file: ds.json}}, named: {}",
)
@says(Level.NOTE, "accumulation reset to 1", f"{PLUGIN}.__post_init__")
@rule(
    AccelerateDeepSpeed,
    "GAS03",
    "accelerate: {deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 1.0}}",
)
@says(
    Level.NOTE, "accumulation set outside the script", f"{ACCELERATOR} __init__, _prepare_deepspeed"
)
def _accumulate(both: AccelerateDeepSpeed) -> Iterator[Found]:
    place, n = both.accumulate, both.accumulate.value
    if not both.is_script:
        return
    if both.file is not None and not place.given:
        what = (
            "without gradient_accumulation_steps in its file, accelerate sets it to 1, whatever "
            "the script says"
        )
        fix = 'add "gradient_accumulation_steps": "auto" to the DeepSpeed config'
        yield Found(both.inner.at("deepspeed_config_file"), what, fix, AUDIT, code="GAS02")
    elif place.given and n != AUTO:
        what = (
            f"N is {n} whatever a script says: Accelerator(gradient_accumulation_steps=...) is "
            "overruled; Hugging "
        )
        what += "Face's Trainer refuses another N than its own"
        fix = (
            "remove it and set N in the script, or read accelerator.gradient_accumulation_steps "
            f"({n}) there"
        )
        yield Found(place, what, fix, AUDIT, code="GAS03")


@rule(
    AccelerateDeepSpeed,
    "CLP01",
    "accelerate: {deepspeed_config: {zero_stage: 2, gradient_clipping: 0.0}}",
)
def _silent_clip(both: AccelerateDeepSpeed) -> Iterator[Found]:
    """Accelerate keeps a threshold only if it is not 0, and fills in 1.0 where there is none.

    The Trainer fills in max_grad_norm first.
    """
    place = both.inner.at("gradient_clipping")
    same = f"{ACCELERATOR} _prepare_deepspeed; engine.gradient_clipping() is 1.0 after prepare"
    nothing = 'name a deepspeed_config_file with "gradient_clipping": 0.0 to clip nothing'
    if both.file is not None or not both.engine.is_known or place.unknown:
        return
    if not place.given and both.is_script:
        what = (
            "gradient_clipping is not set: accelerate has DeepSpeed clip to norm 1.0 in a "
            "script, and Hugging Face's "
        )
        what += "Trainer to max_grad_norm"
        yield Found(
            place,
            what,
            f"set gradient_clipping to the threshold that is meant, or {nothing}",
            same,
            Level.NOTE,
        )
    elif both.engine.clip == 0 and is_known_bad(SILENT_CLIPPING, both.options.deepspeed):
        what = "accelerate drops a gradient_clipping of 0, and DeepSpeed then clips to norm 1.0"
        if both.trainer is not None:
            max_norm = both.trainer.at("max_grad_norm").value
            if max_norm is None:
                max_norm = DEFAULT_CLIP
            what += f"; max_grad_norm {max_norm} is ignored too"
        yield Found(place, what, f"remove gradient_clipping, and {nothing}", same)


@rule(
    AccelerateDeepSpeed,
    "TAIL01",
    "accelerate: {deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 1}}, "
    "samples: 9, batch_size: 1",
    "GAS03",
)
def _underweighted(both: AccelerateDeepSpeed) -> Iterator[Found]:
    n, ranks = both.engine.n, both.num_ranks
    micro = both.engine.micro_batch_with(both.options)
    if not both.is_script or n == 1:
        return
    plan = both.options.windows(n, micro, ranks, drop_last=both.engine.drop_last)
    if plan is not None and (tail := plan.partial_window):
        assert micro is not None and ranks is not None  # there is no plan without them
        yield Found(
            both.accumulate,
            f"{plan.micro_batches_per_epoch} micro-batches per epoch and rank leave {tail} after "
            f"{plan.full_windows} "
            f"windows of {n}: with a prepared loader, accumulate() steps after them but divides "
            f"by {n}, so the last "
            f"step has {tail}/{n} of the mean gradient; with another loader, DeepSpeed carries "
            "them over",
            f"make the samples a multiple of {micro * n * ranks}",
            f"{ACCELERATOR} backward divides by gradient_accumulation_steps in every window",
            Level.NOTE,
        )
