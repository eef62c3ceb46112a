"""Lint of training configs: what gradient accumulation will do with their numbers, before anything is trained.

A config is that of LightningCLI, DeepSpeed, Hugging Face's TrainingArguments or accelerate, as YAML or JSON. Every
finding names its place, says in the config's own numbers what will happen and how to mend it, and names a scenario that
shows it in small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.audit.lint import accelerate_rules, deepspeed_rules, hugging_face_rules, lightning_rules
from bench.audit.lint.config_file import ConfigKind, ConfigPart, load
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import LintFinding
from bench.audit.lint.rules import findings as findings_about


def lint(files: Sequence[Path], options: LintOptions) -> list[LintFinding]:
    """The findings in config files, by file and line.

    A DeepSpeed config that another config among the files names is read as part of it, and not as one for DeepSpeed
    alone. One config of accelerate and one of TrainingArguments belong together. Raises InputError naming the place of
    what cannot be read or is wrong.
    """
    configs = [load(file) for file in files]
    launch = [root for kind, root in configs if kind is ConfigKind.ACCELERATE]
    trainer = [root for kind, root in configs if kind is ConfigKind.HUGGING_FACE]
    together = trainer[0] if len(launch) == len(trainer) == 1 else None
    if together is not None:
        options = replace(options, world_size=accelerate_rules.world_size(launch[0], options))
    named = {
        (folder / text).resolve()
        for _, root in configs
        for text in _names(root.values)
        for folder in (Path(), Path(root.file).parent)
    }
    subjects: dict[ConfigKind, Callable[[ConfigPart, LintOptions], Iterable[object]]] = {
        ConfigKind.LIGHTNING: lightning_rules.subjects,
        ConfigKind.HUGGING_FACE: hugging_face_rules.subjects,
        ConfigKind.ACCELERATE: partial(accelerate_rules.subjects, trainer=together),
        ConfigKind.DEEPSPEED: deepspeed_rules.subjects,
    }
    findings: list[LintFinding] = []
    for kind, root in configs:
        if kind is not ConfigKind.DEEPSPEED or Path(root.file).resolve() not in named:
            findings += findings_about(subjects[kind](root, options))
    order = {str(file): place for place, file in reversed(list(enumerate(files)))}
    # A DeepSpeed config that two others name is found twice.
    return sorted(
        dict.fromkeys(findings), key=lambda each: (order.get(each.file, len(files)), each.file, each.line, each.code)
    )


def _names(value: Any) -> Iterator[str]:
    """The strings among the values of a config that may be the name of a JSON file."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _names(each)
    elif isinstance(value, str) and value.endswith(".json") and "\0" not in value:
        yield value
