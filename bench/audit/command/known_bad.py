"""Whether packages of an audited training are known to accumulate wrongly as it is set up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from bench.audit.advisories import KnownBad, TrainingFacts, facts_of, matching
from bench.audit.command.recorded_events import RecordedRank
from bench.findings import Finding, Level, note, warning

LOOPS = {
    "Trainer": "lightning",
    "TrainingArguments": "transformers",
    "Accelerator": "accelerate",
    "DeepSpeedEngine": "deepspeed",
}
"""Who owns the loop, by the name of a fact; the first that is there."""
STRATEGIES = {
    "DeepSpeedEngine": "deepspeed",
    "FSDPParam": "fsdp2",
    "FullyShardedDataParallel": "fsdp",
    "DistributedDataParallel": "ddp",
}
OFFLOAD = "deepspeed.zero_optimization.offload_optimizer.device"


def known_bad(rank: RecordedRank) -> Iterator[Finding]:
    """One line for each advisory that certainly applies to what a rank has imported and set up."""
    for found in matching(rank.versions, _facts(rank)):
        if not found.is_certain:
            continue
        if found.advisory.level is Level.NOTE:
            yield note("known bad", _sentence(found))
        else:
            yield warning("known bad", _sentence(found))


def _sentence(found: KnownBad) -> str:
    advisory = found.advisory
    whose = f"your {advisory.package} {found.version}"
    wanted = advisory.condition.get(OFFLOAD)
    if wanted is not None and wanted.present:
        whose += " with offload_optimizer"
    return f"{whose}: {advisory.title} ({advisory.end}; {advisory.link})"


def _facts(rank: RecordedRank) -> TrainingFacts:
    """What is known of the training; of DeepSpeed's engine everything."""
    configs = {}
    if rank.deepspeed is not None:
        configs["deepspeed"] = json.loads(rank.deepspeed)
    loop = _first_of(LOOPS, rank.facts, "torch")
    if loop == "transformers" and "trl" in rank.versions:
        loop = "trl"
    asked = None
    if loop != "torch":
        asked = max((step.asked for step in rank.steps), default=None)
    return facts_of(
        configs,
        framework=loop,
        strategy=_first_of(STRATEGIES, rank.facts, "single"),
        accumulate=asked,
        world_size=rank.world,
    )


def _first_of(table: Mapping[str, str], facts: Mapping[str, str], otherwise: str) -> str:
    for name, meaning in table.items():
        if name in facts:
            return meaning
    return otherwise
