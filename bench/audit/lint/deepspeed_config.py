"""DeepSpeed's JSON: what it says, with DeepSpeed's defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.audit.lint.config_file import AUTO, ConfigPart, read_file
from bench.audit.lint.known_keys import Keys
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.version_facts import holds
from bench.audit.training_plan import LARGEST_ACCUMULATE

SILENT_CLIPPING = "deepspeed-silent-clipping"
"""The advisory of CLP01 and CLP03."""
MOST_ABOVE = 6
"""Folders above a file in which a file that it names is looked for."""
AUTO_KEYS = (
    *(
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ),
    *("bf16.enabled", "fp16.enabled"),
)


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """The parts of a DeepSpeed config that rules need; None where it is silent or 'auto'."""

    part: ConfigPart
    batch: int | None = None
    micro_batch: int | None = None
    accumulate: int | None = None
    clip: float | None = None
    stage: int = 0
    offload: bool = False
    bf16: bool = False
    fp16: bool = False
    accumulation_dtype: str | None = None
    drop_last: bool = False
    managed: bool = True
    is_known: bool = True
    """Whether the config could be read; a file that is named may be elsewhere."""

    @property
    def n(self) -> int:
        """N; 1 where the config is silent or says 'auto'."""
        if self.accumulate is None:
            return 1
        return self.accumulate

    def micro_batch_with(self, options: LintOptions) -> int | None:
        """Samples of a micro-batch on one rank, of which the options go before the config."""
        if options.batch_size is not None:
            return options.batch_size
        return self.micro_batch

    @property
    def autos(self) -> list[str]:
        """Keys whose value is 'auto'."""
        return [key for key in AUTO_KEYS if self.part.at(key).value == AUTO]

    def with_dtypes(
        self, above: Collection[str], *, auto: bool = True, missing: bool = True
    ) -> DeepSpeedConfig:
        """The config with the dtypes of the framework above it.

        That fills in 'auto', or what is missing, or both.
        """

        def is_on(name: str, *, given: bool) -> bool:
            place = self.part.at(name)
            is_filled = missing
            if place.given:
                is_filled = auto and place.at("enabled").value == AUTO
            if is_filled:
                return name in above
            return given

        return dataclasses.replace(
            self, bf16=is_on("bf16", given=self.bf16), fp16=is_on("fp16", given=self.fp16)
        )


def _bf16_key(part: ConfigPart) -> str:
    """What the config calls its bf16: DeepSpeed still takes the older name."""
    if part.at("bf16").given:
        return "bf16"
    return "bfloat16"


def read(part: ConfigPart) -> DeepSpeedConfig:
    """What a DeepSpeed config says. Raises InputError naming the key of a wrong value."""
    zero, stage = part.at("zero_optimization"), 0
    if isinstance(zero.value, bool):  # as in old configs; true is stage 1
        stage = int(zero.value)
    else:
        zero.mapping()
    for name in ("bf16", "bfloat16", "fp16", "data_types"):
        part.at(name).mapping()
    dtype = part.at("data_types.grad_accum_dtype").string()
    if dtype == AUTO:
        dtype = None
    offload = zero.at("offload_optimizer").mapping()
    return DeepSpeedConfig(
        part=part,
        batch=part.at("train_batch_size").integer(also=AUTO),
        micro_batch=part.at("train_micro_batch_size_per_gpu").integer(also=AUTO),
        accumulate=part.at("gradient_accumulation_steps").integer(
            most=LARGEST_ACCUMULATE, also=AUTO
        ),
        clip=part.at("gradient_clipping").number(also=AUTO),
        stage=zero.at("stage").zero_stage(default=stage, also=AUTO),
        offload=offload.given and offload.at("device").string() not in {None, "none"},
        bf16=part.at(f"{_bf16_key(part)}.enabled").flag(default=False, also=AUTO),
        fp16=part.at("fp16.enabled").flag(default=False, also=AUTO),
        accumulation_dtype=dtype,
        drop_last=part.at("dataloader_drop_last").flag(default=False, also=AUTO),
        managed=part.at("managed_gradient_accumulation").flag(default=True),
    )


def deepspeed_part(place: ConfigPart) -> ConfigPart | None:
    """The DeepSpeed config that another config contains here, or names by path.

    None if there is nothing here, or what is named is a preset or a file that is not here. Raises
    InputError if the file cannot be read.
    """
    if isinstance(place.value, dict):
        return place
    name = None
    if not isinstance(place.value, bool):
        name = place.string()
    if not name:
        return None
    found = named_file(Path(place.file), name)
    if found is None:
        return None
    return read_file(found)


def named_file(file: Path, name: str) -> Path | None:
    """The file that a config or script names: from here, beside it, or a folder above it."""
    with suppress(OSError, ValueError):  # too long a name, or one with a null character
        for folder in (Path(), *list(file.parents)[:MOST_ABOVE]):
            if (folder / name).is_file() and name.endswith((".json", ".yaml", ".yml")):
                return folder / name
    return None


def deepspeed_keys(part: ConfigPart, options: LintOptions) -> Iterator[object]:
    """The keys of a DeepSpeed config; unknown ones are ignored at the top, and refused below."""
    yield Keys(part, "deepspeed", "DeepSpeed")
    for name in ("zero_optimization", "bf16", "fp16"):
        is_refused, ignored = True, set[str]()
        if name == "zero_optimization" and holds("mics-keys", options.deepspeed):
            ignored = {"mics_shard_size", "mics_hierarchical_params_gather"}
        elif name != "zero_optimization" and holds("bf16-keys-ignored", options.deepspeed):
            is_refused = False
        reader = f"DeepSpeed {options.deepspeed}"
        if is_refused:
            reader += f" raises ValidationError for {name}"
        yield Keys(part.at(name), name, reader, is_refused, ignored=frozenset(ignored))
