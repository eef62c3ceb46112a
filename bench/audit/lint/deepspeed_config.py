"""DeepSpeed's JSON: what it says, with DeepSpeed's defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.audit.lint.config_file import AUTO, ConfigPart, read_file
from bench.audit.lint.known_keys import Keys
from bench.audit.training_plan import LARGEST_ACCUMULATE

AUTO_KEYS = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
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

    @property
    def autos(self) -> list[str]:
        """Keys whose value is 'auto'."""
        return [key for key in AUTO_KEYS if self.part.at(key).value == AUTO]

    def with_dtypes(self, above: Collection[str], *, auto: bool = True, missing: bool = True) -> DeepSpeedConfig:
        """The config with the dtypes of the framework above it, which fills in 'auto', or what is missing, or both."""

        def is_on(name: str, *, given: bool) -> bool:
            place = self.part.at(name)
            is_filled = auto and place.at("enabled").value == AUTO if place.given else missing
            return name in above if is_filled else given

        return dataclasses.replace(self, bf16=is_on("bf16", given=self.bf16), fp16=is_on("fp16", given=self.fp16))


def read(part: ConfigPart) -> DeepSpeedConfig:
    """What a DeepSpeed config says. Raises InputError naming the key of a wrong value."""
    for name in ("zero_optimization", "bf16", "fp16", "data_types"):
        part.at(name).mapping()
    dtype = part.at("data_types.grad_accum_dtype").string()
    offload = part.at("zero_optimization.offload_optimizer").mapping()
    return DeepSpeedConfig(
        part=part,
        batch=part.at("train_batch_size").integer(also=AUTO),
        micro_batch=part.at("train_micro_batch_size_per_gpu").integer(also=AUTO),
        accumulate=part.at("gradient_accumulation_steps").integer(most=LARGEST_ACCUMULATE, also=AUTO),
        clip=part.at("gradient_clipping").number(also=AUTO),
        stage=part.at("zero_optimization.stage").zero_stage(also=AUTO) or 0,
        offload=offload.given and offload.at("device").string() not in {None, "none"},
        bf16=part.at("bf16.enabled").flag(default=False, also=AUTO),
        fp16=part.at("fp16.enabled").flag(default=False, also=AUTO),
        accumulation_dtype=None if dtype == AUTO else dtype,
        drop_last=part.at("dataloader_drop_last").flag(default=False, also=AUTO),
        managed=part.at("managed_gradient_accumulation").flag(default=True),
    )


def deepspeed_part(place: ConfigPart) -> ConfigPart | None:
    """The DeepSpeed config that another config contains here, or names by path; None if there is nothing here.

    Raises InputError if it cannot be read.
    """
    if isinstance(place.value, dict):
        return place
    name, found = place.string(), None
    if name is None:
        return None
    with suppress(OSError, ValueError):  # too long a name, or one with a null character
        found = next((file for file in (Path(name), Path(place.file).parent / name) if file.is_file()), None)
    if found is None:
        place.refuse("the path of a DeepSpeed JSON, from here or from beside the config")
    return read_file(found, is_json=True)


def deepspeed_keys(part: ConfigPart) -> Iterator[Keys]:
    """The keys of a DeepSpeed config: it ignores unknown ones at the top, and refuses them below."""
    yield Keys(part, "deepspeed", "DeepSpeed")
    for name in ("zero_optimization", "bf16", "fp16"):
        yield Keys(part.at(name), name, f"DeepSpeed raises ValidationError for {name}", refused=True)
