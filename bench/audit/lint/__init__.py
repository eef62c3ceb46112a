"""Lint of training configs: what gradient accumulation will do with their numbers, before anything is trained.

A config is that of LightningCLI (YAML) or of DeepSpeed (JSON). Every finding names its place, says in the config's own
numbers what will happen and how to mend it, and names a scenario that shows it in small.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.audit.lint import deepspeed_rules, lightning_rules, trainer
from bench.audit.lint.config_file import ConfigKind, load
from bench.audit.lint.known import Options
from bench.audit.lint.rules import LintFinding
from bench.audit.lint.section import ConfigPart


def lint(files: Sequence[Path], options: Options) -> list[LintFinding]:
    """The findings in config files, by file and line.

    A DeepSpeed config that a LightningCLI config among the files names is read as part of it, and not as one for
    DeepSpeed alone. Raises InputError naming the place of what cannot be read or is wrong.
    """
    documents = [load(file) for file in files]
    findings: list[LintFinding] = []
    read: set[Path] = set()
    for document in documents:
        if document.kind is ConfigKind.LIGHTNING:
            training = trainer.read(document, options)
            findings += lightning_rules.check(training, options)
            if training.engine_config is not None:
                read.add(Path(training.engine_config.document.file).resolve())
    for document in documents:
        if document.kind is ConfigKind.DEEPSPEED and Path(document.file).resolve() not in read:
            findings += deepspeed_rules.check(ConfigPart(document), options)
    order = {str(file): place for place, file in reversed(list(enumerate(files)))}
    place = {file: (order.get(file, len(files)), file) for file in {finding.file for finding in findings}}
    # A DeepSpeed config that two others name is found twice.
    return sorted(dict.fromkeys(findings), key=lambda found: (*place[found.file], found.line, found.code))
