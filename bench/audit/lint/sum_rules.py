"""Rules for the sum of a window's gradients: 16-bit dtypes, and defects of DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit import advisories
from bench.audit.lint import proof
from bench.audit.lint.config_file import ConfigPart
from bench.audit.lint.deepspeed_config import DeepSpeedConfig
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import Found, rule, rules, says
from bench.audit.lint.version_facts import holds, is_known_bad, page_of
from bench.findings import Level
from bench.measure.accumulation_dtype import BITS

ENGINE = "deepspeed/runtime/engine.py"
FP32 = {"fp32", "float32", "torch.float32", "float"}
NAMES = {
    "bf16": ("bf16", "bfloat16", "torch.bfloat16"),
    "fp16": ("fp16", "float16", "torch.float16", "half"),
}
"""How DeepSpeed's config may name a dtype of 16 bits; PyTorch's name comes second."""
SMALLEST = {"bf16": -133, "fp16": -24}
"""The power of two that is a dtype's smallest positive number."""
FP16_ERROR = 0.01
"""Sums in fp16 are found from this error on: from N = 42."""
LAST_ONLY = "deepspeed-zero2-last-only"
MISSED_AVERAGE = "deepspeed-zero1-missed-average"
BF16_SUM = "deepspeed-zero2-bf16-sum"
"""Advisories that have rules of their own, which tell in the config's own numbers what happens."""
NEEDS_FP32_SUM = "DeepSpeed 0.19.8 or newer, or ZeRO-3"


@dataclass(frozen=True)
class GradientSum:
    """How DeepSpeed adds the gradients of a window."""

    config: DeepSpeedConfig
    n: int
    """N, or 1 if it is unknown."""
    options: LintOptions
    world_size: int | None
    otherwise: ConfigPart | None = None
    """The key that sets dtype and stage where the DeepSpeed config itself does not."""
    is_fork: bool = False
    """Whether another program brings its own DeepSpeed, whose version is not known."""
    is_part: bool = False
    """Whether the program, which is not known, may set N and the dtype too, or accumulate nothing."""

    def place(self, key: str) -> ConfigPart:
        """Where a key of the DeepSpeed config is set."""
        place = self.config.part.at(key)
        if place.given or self.otherwise is None:
            return place
        return self.otherwise


@rule(GradientSum, "ACC01", "deepspeed: {bf16: {enabled: true}}")
@says(Level.WARNING, "gradients are summed in 16 bits", f"{ENGINE} get_data_types; DeepSpeed #1800")
@rule(
    GradientSum,
    "ACC02",
    "deepspeed: {zero_optimization: null, bf16: {enabled: true}, data_types: {grad_accum_dtype: "
    "fp32}}",
)
@says(
    Level.ERROR,
    "fp32 sum of 16-bit gradients without ZeRO",
    f"{ENGINE} _do_optimizer_sanity_check",
    stops=True,
)
def _dtype(gradients: GradientSum) -> Iterator[Found]:
    config, used = gradients.config, gradients.options.deepspeed
    place = config.part.at("data_types.grad_accum_dtype")
    dtype = "fp16"
    if config.bf16:
        dtype = "bf16"
    if gradients.n == 1 or not (config.bf16 or config.fp16):
        return
    is_plain_bf16 = config.bf16 and config.stage == 0
    is_accepted = gradients.is_fork or (
        config.bf16 and holds("fp32-sum-without-zero-accepted", used)
    )
    if config.accumulation_dtype in FP32 and config.stage == 0 and not is_accepted:
        what = (
            f"DeepSpeed {used} raises NotImplementedError: without ZeRO it cannot sum {dtype} "
            "gradients in fp32"
        )
        yield Found(place, what, "set zero_optimization.stage to 1, 2 or 3", code="ACC02")
    if is_plain_bf16 and (gradients.is_fork or holds("bf16-sums-in-fp32-without-zero", used)):
        return
    if config.accumulation_dtype in {None, *NAMES[dtype]}:
        fix = 'add "data_types": {"grad_accum_dtype": "fp32"} to the DeepSpeed config'
        if config.stage == 0:
            fix += " (which needs ZeRO stage 1, 2 or 3)"
        elif config.stage == 2 and config.bf16 and is_known_bad(BF16_SUM, used):
            fix += f", and use {NEEDS_FP32_SUM} (VER03)"
        if not place.given:
            place = gradients.place(f"{dtype}.enabled")
        for each in in_16_bits(place, gradients.n, dtype, fix):
            yield _of_part(each) if gradients.is_part else each


def _of_part(found: Found) -> Found:
    """The finding in a config that the program completes."""
    what = f"unless the program has another N or dtype, or steps each time, {found.what}"
    return found._replace(what=what, level=Level.NOTE)


def in_16_bits(place: ConfigPart, accumulate: int, dtype: str, fix: str) -> Iterator[Found]:
    """ACC01 for N gradients that are added in bf16 or fp16; fp16 is exact enough for a small N."""
    if dtype == "bf16" or worst_error(accumulate, dtype) > FP16_ERROR:
        name, size = NAMES[dtype][1], 2 ** BITS[dtype]
        add = f"sum(torch.full(({accumulate},), 1 / {accumulate}, dtype=torch.{name})).item()"
        if equal_sum(accumulate, dtype) == 1:
            add = f"(torch.tensor({size}., dtype=torch.{name}) + 1 - {size}).item()"
        yield Found(
            place,
            f"gradients are added in {dtype}, with {BITS[dtype]} significant bits: "
            f"{sum_error(accumulate, dtype)}",
            fix,
            f'python -c "import torch; print({add})" (1 in fp32)',
            code="ACC01",
        )


def equal_sum(accumulate: int, dtype: str) -> float:
    """The sum of N gradients of 1/N, each added in the dtype; 1 would be right."""
    addend, total = _rounded(1 / accumulate, dtype), 0.0
    for _ in range(accumulate):
        before, total = total, _rounded(total + addend, dtype)
        if total == before:  # all further addends are lost
            break
    return total


def _rounded(number: float, dtype: str) -> float:
    """The nearest number that the dtype has, ties to even."""
    unit = max(math.frexp(number)[1] - BITS[dtype], SMALLEST[dtype])
    return math.ldexp(round(math.ldexp(number, -unit)), unit)


def sum_error(accumulate: int, dtype: str) -> str:
    """What becomes of the sum of N gradients in a dtype of 16 bits."""
    total = equal_sum(accumulate, dtype)
    if total != 1:
        return f"{accumulate} equal gradients of 1/{accumulate} sum to {total:.4g} instead of 1"
    return (
        f"the sum may be off by {accumulate - 1} x 2^-{BITS[dtype] + 1} = "
        f"{worst_error(accumulate, dtype):.2%}"
    )


def worst_error(accumulate: int, dtype: str) -> float:
    """The largest relative error of a sum of N gradients of one sign.

    Each addition rounds by half a unit at most.
    """
    return (accumulate - 1) / float(2 ** (BITS[dtype] + 1))


@rule(GradientSum, "VER01", "deepspeed: {}, deepspeed_version: [0, 17, 6]")
@says(
    Level.ERROR,
    "ZeRO-2 keeps only the last micro-batch",
    page_of(LAST_ONLY),
    advisory=LAST_ONLY,
)
@rule(
    GradientSum,
    "VER02",
    "deepspeed: {zero_optimization: {stage: 1}, bf16: {enabled: true}, data_types: "
    "{grad_accum_dtype: fp32}}, "
    "deepspeed_version: [0, 18, 6]",
)
@says(
    Level.ERROR,
    "ZeRO-1 misses the last average",
    page_of(MISSED_AVERAGE),
    advisory=MISSED_AVERAGE,
)
@rule(
    GradientSum,
    "VER03",
    "deepspeed: {bf16: {enabled: true}, data_types: {grad_accum_dtype: fp32}}, "
    "deepspeed_version: [0, 19]",
)
@says(
    Level.WARNING,
    "ZeRO-2 sums in bf16 in spite of the config",
    page_of(BF16_SUM),
    advisory=BF16_SUM,
)
def _versions(gradients: GradientSum) -> Iterator[Found]:
    config, n, used = gradients.config, gradients.n, gradients.options.deepspeed
    if n == 1 or gradients.is_fork:
        return
    place, name = (
        gradients.place("zero_optimization.stage"),
        f"DeepSpeed {used} with ZeRO-{config.stage}",
    )
    if config.stage == 2 and not config.offload and is_known_bad(LAST_ONLY, used):
        what = (
            f"{name} and no offload keeps only the last micro-batch of a window: {n - 1} of {n} "
            "are lost"
        )
        fix = "use DeepSpeed 0.17.5 or older, or 0.18.3 or newer"
        yield Found(place, what, fix, proof.deepspeed(used), code="VER01")
    is_fp32_sum = config.bf16 and config.accumulation_dtype in FP32
    is_missed = gradients.world_size != 1 and is_known_bad(MISSED_AVERAGE, used)
    if config.stage == 1 and is_fp32_sum and is_missed:
        what = (
            f"{name}, bf16 and fp32 accumulation does not average the last of {n} micro-batches "
            "over the ranks"
        )
        fix = "use DeepSpeed 0.19.0 or newer, or set bf16.immediate_grad_update"
        yield Found(place, what, fix, code="VER02")
    if config.stage == 2 and is_fp32_sum and is_known_bad(BF16_SUM, used):
        what = (
            f"{name} adds gradients in bf16, whatever grad_accum_dtype says: {sum_error(n, 'bf16')}"
        )
        place = config.part.at("data_types.grad_accum_dtype")
        yield Found(place, what, f"use {NEEDS_FP32_SUM}", proof.deepspeed(used), code="VER03")


@rule(
    GradientSum,
    "VER04",
    "deepspeed: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}, "
    "deepspeed_version: [0, 18, 9]",
)
@says(
    Level.ERROR,
    "this version of DeepSpeed is known to accumulate wrongly with this config",
    advisories.PAGE,
)
def _known_bad(gradients: GradientSum) -> Iterator[Found]:
    if gradients.is_fork:
        return
    part = gradients.config.part
    values = part.mapping().value
    if values is None:  # a strategy without a config
        values = {}
    facts = advisories.facts_of(
        {"deepspeed": values},
        accumulate=gradients.n,
        world_size=gradients.world_size,
    )
    used = str(gradients.options.deepspeed)
    have_rules = {each.advisory for each in rules().values()}
    for found in advisories.matching({"deepspeed": used}, facts):
        advisory = found.advisory
        if not found.is_certain or advisory.id in have_rules:
            continue
        place = part
        for key in advisory.condition:
            if key.startswith("deepspeed."):
                place = gradients.place(key.removeprefix("deepspeed."))
        what = f"DeepSpeed {used}: {advisory.title}: {advisory.effect}"
        yield Found(
            place,
            what,
            advisory.remedy,
            advisory.reproducer,
            level=advisory.level,
        )
