"""What kind of config a file is, by what is in it, and the names under which the rules read it.

LightningCLI and the frameworks above it, DeepSpeed and accelerate are known by their own structure.
The others are rows of kinds.toml, which also says what each of them calls a value.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.known_keys import known_keys

EXPECTED = (
    "a YAML, JSON, TOML or shell script of Lightning, DeepSpeed, accelerate, Hugging Face's "
    "TrainingArguments, TRL, "
    "LLaMA-Factory, axolotl, ms-swift, torchtune, LitGPT, nanotron, GPT-NeoX or torchtitan"
)
TRAINERS = ("trainer", "fit.trainer", "lightning.trainer", "pl_trainer", "trainer.params", "")
"""Where a config may hold the arguments of Lightning's Trainer; the last: a file that holds nothing
else."""
MOST_UNKNOWN = 1 / 3
"""Share of the keys of a Trainer, of accelerate or of TrainingArguments that may be unknown."""
ACCELERATE_OWN = (
    "compute_environment",
    "distributed_type",
    "num_machines",
    "main_training_function",
    "machine_rank",
)
DEEPSPEED_OWN = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "bf16.enabled",
    "fp16.enabled",
    "data_types",
)
TRAINING_OWN = (
    *(
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "num_train_epochs",
        "warmup_ratio",
    ),
    *(
        "lr_scheduler_type",
        "save_total_limit",
        "eval_strategy",
        "evaluation_strategy",
        "accelerator_config",
    ),
    *(
        "gradient_checkpointing",
        "max_grad_norm",
        "gradient_accumulation_steps",
        "average_tokens_across_devices",
    ),
    *(
        "logging_steps",
        "save_steps",
        "report_to",
        "optim",
        "ddp_timeout",
        "bf16",
        "fp16",
        "save_strategy",
        "max_steps",
    ),
    *("warmup_steps", "output_dir", "learning_rate", "fsdp", "deepspeed", "dataloader_drop_last"),
    *(
        "auto_find_batch_size",
        "logging_strategy",
        "gradient_accumulation_step",
        "logging_step",
        "eval_steps",
    ),
)
TRAINING_NEEDS = (
    *("per_device_train_batch_size", "per_device_eval_batch_size", "accelerator_config"),
    *("average_tokens_across_devices",),
)
"""TrainingArguments are known by one of these; other programs share the rest with them."""
LEAST_BESIDE_EPOCHS = 5
"""Keys of TrainingArguments that must be there where ``num_train_epochs`` is the only sign of
them."""

SCRIPT_OWN = (
    *(
        "save_total_limit",
        "save_strategy",
        "save_steps",
        "eval_strategy",
        "evaluation_strategy",
        "logging_strategy",
    ),
    *(
        "logging_steps",
        "logging_dir",
        "overwrite_output_dir",
        "do_train",
        "warmup_ratio",
        "optim",
        "tf32",
    ),
    *(
        "ddp_timeout",
        "ddp_find_unused_parameters",
        "dataloader_num_workers",
        "group_by_length",
        "fsdp_config",
    ),
)
"""Options that scripts with a parser of their own seldom have; one of these, or a DeepSpeed config,
is needed."""


class Reader(StrEnum):
    """Whose rules judge a config."""

    LIGHTNING = "lightning"
    DEEPSPEED = "deepspeed"
    HUGGING_FACE = "hugging-face"
    ACCELERATE = "accelerate"
    GPT_NEOX = "gpt-neox"
    LOOP = "loop"
    """A training loop of the program's own."""


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A row of kinds.toml, which describes the fields."""

    title: str
    reader: Reader
    suffixes: tuple[str, ...]
    evidence: tuple[str, ...]
    least: int
    launcher: str = ""
    """The command that launches nothing else."""
    needs: int = 0
    """How many keys of TrainingArguments must be there."""
    without: tuple[str, ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    dtype_keys: tuple[str, ...] = ("torch_dtype",)
    """Where the dtype of the parameters is set."""
    bf16_parameters: bool = False
    """Whether ``bf16`` makes the parameters bf16, unless they are those of an adapter."""
    gives_dtype: bool = False
    """Whether the program gives the parameters the dtype that is set."""
    programs: tuple[str, ...] = ()
    """Scripts that do so too, by the end of their path."""
    source: str = ""
    """Where it can be seen in which dtype gradients are added."""
    fix: str = ""
    """How to have them added in fp32."""


@dataclass(frozen=True, kw_only=True)
class ProgramDtypes:
    """How a program that reads TrainingArguments sets dtypes; by default as transformers does."""

    keys: tuple[str, ...] = ("torch_dtype",)
    """Where the dtype of the parameters is set."""
    are_given: bool = False
    """Whether the program is known to give the parameters the dtype that is set."""
    bf16_parameters: bool = False
    """Whether ``bf16`` makes the parameters bf16, unless they are those of an adapter."""
    has_plain_defaults: bool = True
    """Whether bf16 and fp16 are off unless they are given; TRL and others differ."""


TRANSFORMERS = ProgramDtypes()


@dataclass(frozen=True)
class Config:
    """A config file of a known kind."""

    title: str
    reader: Reader
    root: ConfigPart
    """Under the names that the reader's rules use."""
    adapter: Adapter | None = None
    is_command_line: bool = False
    """Whether LightningCLI or another parser that refuses unknown keys reads it."""

    def dtypes(self, program: str) -> ProgramDtypes:
        """How its program sets dtypes; the name of a program may be empty."""
        adapter = self.adapter
        if adapter is None:
            return ProgramDtypes(keys=(), has_plain_defaults=False)
        is_known = any(f"/{program}".endswith(f"/{each}") for each in adapter.programs)
        return ProgramDtypes(
            keys=adapter.dtype_keys,
            are_given=adapter.gives_dtype or is_known,
            bf16_parameters=adapter.bf16_parameters,
            has_plain_defaults=not adapter.evidence,
        )

    @property
    def file(self) -> str:
        return self.root.file


@cache
def adapters() -> list[Adapter]:
    """The rows of kinds.toml, in the order in which they are tried."""
    tables = tomllib.loads((Path(__file__).parent / "kinds.toml").read_text())
    found = []
    for table in tables.values():
        words = {
            name: tuple(table.get(name, "").split())
            for name in ("suffixes", "evidence", "without", "unknown", "programs")
        }
        if "dtype_keys" in table:
            words["dtype_keys"] = tuple(table["dtype_keys"].split())
        found.append(Adapter(**{**table, **words, "reader": Reader(table["reader"])}))
    return found


def has(root: ConfigPart, keys: Iterable[str]) -> int:
    """How many of the dotted keys a config has, with whatever value."""
    number = 0
    for key in keys:
        above, _, name = key.rpartition(".")
        inner = root.value
        if above:
            inner = root.at(above).value
        number += isinstance(inner, dict) and name in inner
    return number


def recognize(root: ConfigPart, suffix: str, launcher: str = "") -> Config | None:
    """The kind of a config; None if there is not enough evidence for one.

    ``launcher`` is the command of a script that has these arguments.
    """
    for adapter in adapters():
        if launcher and launcher == adapter.launcher:
            return adapted(root, adapter)
    for kind in (_accelerate, _lightning, _deepspeed):
        found = kind(root, suffix)
        if found is not None:
            return found
    for adapter in adapters():
        if suffix in adapter.suffixes and _is_like(root, adapter, suffix):
            return adapted(root, adapter)
    return None


def _is_like(root: ConfigPart, adapter: Adapter, suffix: str) -> bool:
    if has(root, adapter.evidence) < adapter.least or has(root, adapter.without):
        return False
    if adapter.reader is Reader.HUGGING_FACE and _is_of_hydra(root):
        return False
    if suffix == "sh" and has(root, SCRIPT_OWN) + isinstance(root.at("deepspeed").value, str) == 0:
        return False
    if adapter.needs:
        return _has_training_arguments(root, adapter.needs)
    if adapter.reader is Reader.HUGGING_FACE or adapter.reader is Reader.GPT_NEOX:
        return True
    return has(root, adapter.keys.values()) >= 2


def _has_training_arguments(root: ConfigPart, least: int) -> bool:
    """Whether keys that only TrainingArguments have are there.

    ``num_train_epochs`` needs more beside it.
    """
    found = has(root, TRAINING_OWN)
    is_wrapped = any(
        isinstance(root.at(key).value, dict) for key in ("num_train_epochs", *TRAINING_NEEDS[:2])
    )
    if is_wrapped:  # a log that Weights & Biases wrote has values beside descriptions
        return False
    if has(root, TRAINING_NEEDS):
        return found >= least
    is_mostly_known = _unknown_share(root, "training_arguments") <= 1 / 2
    return has(root, ("num_train_epochs",)) > 0 and found >= LEAST_BESIDE_EPOCHS and is_mostly_known


def is_composed(root: ConfigPart) -> bool:
    """Whether the file is a part of a config, which Hydra composes with those that it lists."""
    return isinstance(root.at("defaults").value, list)


def _is_of_hydra(root: ConfigPart) -> bool:
    """Whether Hydra composes the config, for a program that makes objects of it itself."""
    if has(root, ("hydra", "defaults")):
        return True
    return any(has(root, (f"{key}._target_",)) for key in root.names_here if "." not in key)


def adapted(root: ConfigPart, adapter: Adapter) -> Config:
    """The config under the names of its reader."""
    places = {key: key for key in root.names_here}
    for name in adapter.keys.values():
        places.pop(name, None)
    part = root.renamed(places | dict(adapter.keys), adapter.defaults)
    for key in adapter.unknown:
        if not part.at(key).given:
            part.values[key] = "${calculated}"
    return Config(adapter.title, adapter.reader, part, adapter)


def _accelerate(root: ConfigPart, suffix: str) -> Config | None:
    known = has(root, known_keys()["accelerate"])
    if (
        has(root, ACCELERATE_OWN[:2]) == 0
        or known < 2
        or _unknown_share(root, "accelerate") > MOST_UNKNOWN
    ):
        return None
    return Config("accelerate", Reader.ACCELERATE, root)


def _deepspeed(root: ConfigPart, suffix: str) -> Config | None:
    keys = {
        *root.names_here,
        *(f"{key}.enabled" for key in ("bf16", "fp16") if has(root, [f"{key}.enabled"])),
    }
    if suffix != "json" or not keys & {*DEEPSPEED_OWN} or _unknown_share(root, "deepspeed") > 1 / 2:
        return None
    return Config("DeepSpeed", Reader.DEEPSPEED, root)


def _lightning(root: ConfigPart, suffix: str) -> Config | None:
    for place in TRAINERS:
        part = root
        if place:
            part = root.at(place)
        if not isinstance(part.value, dict) or not _is_trainer(part):
            continue
        above = place.rpartition(".")[0]
        around = root
        if above:
            around = root.at(above)
        inside = place
        if "class_path" in part.names_here:
            inside = f"{place}.init_args".lstrip(".")
        places = {"trainer": inside}
        if place:
            places |= {
                key: f"{above}.{key}".lstrip(".")
                for key in ("data", "model")
                if around.at(key).given
            }
            if around.at("callbacks").given and part.at("_target_").given:
                # What Hydra makes of them is an argument of its call.
                places.setdefault("trainer.callbacks", f"{above}.callbacks".lstrip("."))
        is_cli = place in {"trainer", "fit.trainer"} and _is_of_command_line(around)
        title = "Lightning's Trainer"
        if is_cli:
            title = "LightningCLI"
        return Config(title, Reader.LIGHTNING, root.renamed(places), is_command_line=is_cli)
    return None


def _is_trainer(part: ConfigPart) -> bool:
    """Whether these are arguments of Lightning's Trainer, of this version or an earlier one."""
    target = part.value.get("_target_", part.value.get("class_path"))
    if isinstance(target, str):
        return target.endswith(".Trainer") and "lightning" in target
    found = has(part, known_keys()["trainer_own"])
    known = has(part, [*known_keys()["trainer"], *known_keys()["trainer_removed"]])
    return found > 0 and known > 1 and known >= (1 - MOST_UNKNOWN) * len(part.value)


def _is_of_command_line(around: ConfigPart) -> bool:
    """Whether LightningCLI wrote or reads the file.

    It names classes by ``class_path``, all but the Trainer, and has a key of its own.
    """
    if has(around, ("trainer.class_path", "trainer._target_")):
        return False
    if has(around, ("seed_everything",)):
        return True
    return any(
        has(around, (f"{name}.class_path",))
        for name in ("model", "data", "optimizer", "lr_scheduler")
    )


def _unknown_share(part: ConfigPart, table: str) -> float:
    keys = part.names_here
    unknown = set(keys) - set(known_keys()[table])
    if keys:
        return len(unknown) / len(keys)
    return 1.0
