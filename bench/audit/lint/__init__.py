"""Lint of training configs: what gradient accumulation will do with their numbers, before anything is trained.

A config is that of LightningCLI, DeepSpeed, Hugging Face's TrainingArguments or accelerate, as YAML or JSON. Every
finding names its place, says in the config's own numbers what will happen and how to mend it, and names a scenario that
shows it in small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.audit.lint import accelerate_rules, deepspeed_rules, hugging_face_rules, lightning_rules
from bench.audit.lint import trainer as trainer_config
from bench.audit.lint.config_file import ConfigKind, load
from bench.audit.lint.known import Options
from bench.audit.lint.rules import LintFinding
from bench.audit.lint.section import ConfigPart


def lint(files: Sequence[Path], options: Options) -> list[LintFinding]:
    """The findings in config files, by file and line.

    A DeepSpeed config that another config among the files names is read as part of it, and not as one for DeepSpeed
    alone. One config of accelerate and one of TrainingArguments belong together. Raises InputError naming the place of
    what cannot be read or is wrong.
    """
    documents = [load(file) for file in files]
    parts = {kind: [ConfigPart(each) for each in documents if each.kind is kind] for kind in ConfigKind}
    launch, trainer = parts[ConfigKind.ACCELERATE], parts[ConfigKind.HUGGING_FACE]
    together = trainer[0] if len(launch) == len(trainer) == 1 else None
    if together is not None:
        options = replace(options, world_size=accelerate_rules.world_size(launch[0], options))
    findings: list[LintFinding] = []
    for document in documents:
        if document.kind is ConfigKind.LIGHTNING:
            findings += _from_start(lightning_rules.check(trainer_config.read(document, options), options))
    for part in trainer:
        findings += _from_start(hugging_face_rules.check(part, options))
    for part in launch:
        findings += _from_start(accelerate_rules.check(part, options, together))
    named = {
        (folder / text).resolve()
        for document in documents
        for text in _texts(document.values)
        for folder in (Path(), Path(document.file).parent)
    }
    for part in parts[ConfigKind.DEEPSPEED]:
        if Path(part.document.file).resolve() not in named:
            findings += _from_start(deepspeed_rules.check(part, options))
    order = {str(file): place for place, file in reversed(list(enumerate(files)))}
    place = {file: (order.get(file, len(files)), file) for file in {finding.file for finding in findings}}
    # A DeepSpeed config that two others name is found twice.
    return sorted(dict.fromkeys(findings), key=lambda found: (*place[found.file], found.line, found.code))


def _texts(value: Any) -> Iterator[str]:
    """The strings among the values of a config that may be the name of a JSON file."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str) and value.endswith(".json") and "\0" not in value:
        yield value


def _from_start(findings: Iterable[LintFinding]) -> list[LintFinding]:
    """The findings of one training: only what stops it from starting, if anything does."""
    found = list(findings)
    return [each for each in found if each.stops] or found
