"""Rules for the sum of a window's gradients: a dtype of 16 bits, and defects of DeepSpeed's versions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint import arithmetic, proof
from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.deepspeed_config import DeepSpeedConfig
from bench.audit.lint.lint_options import LintOptions, written
from bench.audit.lint.proof import ENGINE
from bench.audit.lint.rules import ERROR, WARNING, Found, rule

FP32 = {"fp32", "float32", "torch.float32", "float"}
NAMES = {"bf16": ("bf16", "bfloat16", "torch.bfloat16"), "fp16": ("fp16", "float16", "torch.float16", "half")}
"""How DeepSpeed's config may name a dtype of 16 bits."""
FP16_ERROR = 0.01
"""Sums in fp16 are found from this error on: from N = 42."""
LAST_ONLY = (0, 17, 6), (0, 18, 3)
"""From the first, below the second: ZeRO-2 keeps only the last micro-batch of a window (#7509, fixed by #7665)."""
MISSED_AVERAGE = (0, 18, 6), (0, 19, 0)
"""From the first, below the second: ZeRO-1 with bf16 and fp32 accumulation misses the last average (#7985)."""
BF16_SUM = (0, 19, 8)
"""Below this version, ZeRO-2 sums bf16 gradients in bf16, whatever ``grad_accum_dtype`` says (docs/versions.md)."""
NEEDS_FP32_SUM = "DeepSpeed 0.19.8 or newer, or ZeRO-3"


@dataclass(frozen=True)
class GradientSum:
    """How DeepSpeed adds the gradients of a window."""

    config: DeepSpeedConfig
    accumulate: int | None
    options: LintOptions
    world_size: int | None
    otherwise: ConfigPart | None = None
    """The key that sets dtype and stage where the DeepSpeed config itself does not."""

    @property
    def n(self) -> int:
        """N, or 1 if it is unknown."""
        return self.accumulate or 1

    def place(self, key: str) -> ConfigPart:
        """Where a key of the DeepSpeed config is set."""
        place = self.config.part.at(key)
        return place if place.given or self.otherwise is None else self.otherwise


@rule("ACC01", WARNING, "gradients are summed in 16 bits", f"{ENGINE} get_data_types; DeepSpeed #1800")
@rule("ACC02", ERROR, "fp32 sum of 16-bit gradients without ZeRO", f"{ENGINE} _do_optimizer_sanity_check")
def _dtype(gradients: GradientSum) -> Iterator[Found]:
    config, number = gradients.config, gradients.options.deepspeed
    dtype, place = "bf16" if config.bf16 else "fp16", config.part.at("data_types.grad_accum_dtype")
    if gradients.n == 1 or not (config.bf16 or config.fp16):
        return
    if config.accumulation_dtype in FP32 and config.stage == 0:
        yield Found(
            place,
            f"DeepSpeed raises NotImplementedError: without ZeRO it cannot sum {dtype} gradients in fp32",
            "set zero_optimization.stage to 1, 2 or 3",
            proof.stops(f"{ENGINE} _do_optimizer_sanity_check"),
            code="ACC02",
        )
    if config.accumulation_dtype in {None, *NAMES[dtype]}:
        fix = 'add "data_types": {"grad_accum_dtype": "fp32"} to the DeepSpeed config'
        if config.stage == 0:
            fix += " (which needs ZeRO stage 1, 2 or 3)"
        elif config.stage == 2 and (number is None or number < BF16_SUM):
            below = "below 0.19.8" if number is None else written(number)
            fix += f", and use {NEEDS_FP32_SUM}: with ZeRO-2, DeepSpeed {below} still sums in {dtype} (VER03)"
        yield from in_16_bits(place if place.given else gradients.place(f"{dtype}.enabled"), gradients.n, dtype, fix)


def in_16_bits(place: ConfigPart, accumulate: int, dtype: str, fix: str) -> Iterator[Found]:
    """ACC01 for N gradients that are added in bf16 or fp16; fp16 is exact enough for a small N."""
    if dtype == "bf16" or arithmetic.worst_error(accumulate, dtype) > FP16_ERROR:
        what = (
            f"each of the {accumulate} micro-batches' gradients is added in {dtype}, which keeps "
            f"{arithmetic.BITS[dtype]} significant bits: {arithmetic.sum_error(accumulate, dtype)}"
        )
        yield Found(place, what, fix, proof.sum_in(dtype, accumulate), code="ACC01")


BF16_SOURCE = "docs/versions.md; deepspeed/runtime/zero/stage_1_and_2.py"


@rule("VER01", ERROR, "ZeRO-2 keeps only the last micro-batch", "DeepSpeed #7718")
@rule("VER02", ERROR, "ZeRO-1 misses the last average", "DeepSpeed #7985")
@rule("VER03", WARNING, "ZeRO-2 sums in bf16 in spite of the config", BF16_SOURCE)
def _versions(gradients: GradientSum) -> Iterator[Found]:
    config, n, number = gradients.config, gradients.n, gradients.options.deepspeed
    if number is None or n == 1:
        return
    place = gradients.place("zero_optimization.stage")
    if config.stage == 2 and not config.offload and LAST_ONLY[0] <= number < LAST_ONLY[1]:
        yield Found(
            place,
            f"DeepSpeed {written(number)} with ZeRO-2 and no offload keeps only the last of the {n} micro-batches of a "
            f"window: {n - 1} of {n} are lost",
            "use DeepSpeed 0.17.5 or older, or 0.18.3 or newer",
            proof.deepspeed(number),
            code="VER01",
        )
    is_fp32_sum = config.bf16 and config.accumulation_dtype in FP32
    is_missed = gradients.world_size != 1 and MISSED_AVERAGE[0] <= number < MISSED_AVERAGE[1]
    if config.stage == 1 and is_fp32_sum and is_missed:
        yield Found(
            place,
            f"DeepSpeed {written(number)} with ZeRO-1, bf16 and fp32 accumulation does not average the last of the {n} "
            "micro-batches over the ranks",
            "use DeepSpeed 0.19.0 or newer, or set bf16.immediate_grad_update",
            "DeepSpeed #7985 (nox -s versions measures one rank, which has nothing to average over)",
            code="VER02",
        )
    if config.stage == 2 and is_fp32_sum and number < BF16_SUM:
        yield Found(
            config.part.at("data_types.grad_accum_dtype"),
            f"DeepSpeed {written(number)} with ZeRO-2 adds the {n} micro-batches' gradients in bf16, whatever "
            f"grad_accum_dtype says: {arithmetic.sum_error(n, 'bf16')}",
            f"use {NEEDS_FP32_SUM}",
            proof.deepspeed(number),
            code="VER03",
        )
