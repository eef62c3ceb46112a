"""Rules for programs with a training loop of their own: torchtune, LitGPT, nanotron, torchtitan.

kinds.toml says what each of them calls a value. Nothing here is about one of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bench.audit.lint.config_file import AUTO, ConfigPart
from bench.audit.lint.config_kinds import Adapter
from bench.audit.lint.known_keys import repeated_keys
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import STOPS, Found, rule, says
from bench.audit.lint.sum_rules import NAMES, in_16_bits
from bench.audit.training_plan import LARGEST_ACCUMULATE
from bench.findings import Level

TRUE_16_BITS = {"bf16": ("bf16-true", "bfloat16-true"), "fp16": ("16-true", "fp16-true")}
"""Names that Lightning's Fabric gives to parameters in 16 bits."""
RECIPE = "torchtune recipes/full_finetune_distributed.py __init__"


@dataclass(frozen=True)
class OwnLoop:
    """A training of a program with a loop of its own, under the names of kinds.toml."""

    part: ConfigPart
    adapter: Adapter
    accumulate: int
    """N; 1 if it is unknown."""
    parameters: str | None
    """The parameters' dtype, if it has 16 bits."""
    has_fp32_sums: bool


def subjects(part: ConfigPart, adapter: Adapter, options: LintOptions) -> Iterator[object]:
    """What rules are about in a config. Raises InputError for a wrong value."""
    yield from repeated_keys(part)
    accumulate = _accumulate(part, options)
    if accumulate is None:
        line = (
            f"{part.file}: {adapter.title}'s N depends on the number of ranks, so rules about it "
            "were not tried"
        )
        options.want(0, options.world_size, 0)
        options.note(line)
        accumulate = 1
    yield OwnLoop(
        part,
        adapter,
        accumulate,
        _sixteen_bits(part.at("parameters")),
        part.at("fp32_sums").flag(default=False),
    )


def _sixteen_bits(place: ConfigPart) -> str | None:
    """The dtype of 16 bits that parameters have here; None for another, or an unknown one."""
    for dtype, names in NAMES.items():
        if place.value in (*names, *TRUE_16_BITS[dtype]):
            return dtype
    return None


def _accumulate(part: ConfigPart, options: LintOptions) -> int | None:
    """N as it is given, or as it follows from the batch of all ranks; None if it is unknown."""
    place = part.at("accumulate")
    if place.given:
        return place.integer(most=LARGEST_ACCUMULATE, also=AUTO)
    together, each = part.at("global_batch"), part.at("micro_batch")
    if not together.given:
        return 1
    devices, nodes = part.at("devices"), part.at("nodes")
    ranks = options.world_size
    if ranks is None and devices.given:
        number, times = devices.value, 1
        if nodes.given:
            times = nodes.value
        if type(number) is int and type(times) is int and min(number, times) > 0:
            ranks = number * times
    batch, micro = together.integer(least=-1), each.integer()
    if batch == -1:
        return 1
    if batch is None or micro is None or ranks is None or batch < ranks * micro:
        return None
    return batch // ranks // micro


@rule(OwnLoop, "ACC01", "torchtune: {dtype: bf16, gradient_accumulation_steps: 16}")
def _sixteen_bit_sums(loop: OwnLoop) -> Iterator[Found]:
    if loop.parameters is None or loop.has_fp32_sums or loop.accumulate == 1:
        return
    place = loop.part.at("parameters")
    for each in in_16_bits(place, loop.accumulate, loop.parameters, loop.adapter.fix):
        what = (
            f"{loop.adapter.title} keeps parameters and gradients in {loop.parameters}: {each.what}"
        )
        yield each._replace(what=what)


@rule(
    OwnLoop,
    "OPT02",
    "torchtune: {optimizer_in_bwd: true, gradient_accumulation_steps: 16, dtype: fp32}",
)
def _fused(loop: OwnLoop) -> Iterator[Found]:
    place, n = loop.part.at("fused_optimizer"), loop.accumulate
    if n > 1 and place.value is True:
        what = (
            f"{loop.adapter.title} raises RuntimeError: an optimizer that steps inside backward "
            "cannot accumulate"
        )
        number = loop.part.at("accumulate").name
        yield Found(
            place, what, f"set {place.name} to false, or {number} to 1", f"{STOPS}: {RECIPE}"
        )


@rule(OwnLoop, "CLP05", "torchtune: {optimizer_in_bwd: true, clip_grad_norm: 1.0, dtype: fp32}")
@says(Level.ERROR, "clipping with an optimizer that steps inside backward", RECIPE, stops=True)
def _fused_clip(loop: OwnLoop) -> Iterator[Found]:
    place = loop.part.at("fused_optimizer")
    clip = loop.part.at("clip")
    if place.value is True and clip.given:
        what = (
            f"{loop.adapter.title} raises RuntimeError: gradients cannot be clipped to a norm "
            "inside backward"
        )
        yield Found(clip, what, f"remove {clip.name}, or set {place.name} to false")
