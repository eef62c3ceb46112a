"""Lint of training configs: what accumulation will do with their numbers, before training.

What a file is follows from its keys (``config_kinds``). Every finding names its place, says in the
config's own numbers what will happen and how to mend it, and names a scenario that shows it in
small. Nothing here needs torch or the framework that the config is for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.audit.lint import (
    accelerate_rules,
    deepspeed_config,
    deepspeed_rules,
    hugging_face_rules,
    launch_script,
    lightning_rules,
    loop_rules,
)
from bench.audit.lint.config_file import (
    CONFIGS,
    ConfigPart,
    ForeignError,
    NoConfigError,
    read_file,
    read_text,
)
from bench.audit.lint.config_kinds import EXPECTED, Config, Reader, is_composed, recognize
from bench.audit.lint.known_keys import known_keys
from bench.audit.lint.launch_script import LaunchCommand
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import LintFinding
from bench.audit.lint.rules import findings as findings_about
from bench.errors import InputError
from bench.formatting import plain

SCRIPTS = {"sh", "bash", "sbatch", "slurm"}
MOST_FILES = 20_000
"""Files of a folder that are looked at."""
SKIPPED = {"node_modules", "__pycache__", "site-packages"}
"""Folders that hold no configs of a training, beside hidden ones."""


@dataclass(frozen=True)
class _Training:
    """A config, or a command of a script, with the options that its launcher gives."""

    config: Config
    options: LintOptions
    launch: ConfigPart | None = None
    """The config of accelerate that it is launched with."""
    program: str = ""
    """The script that a command starts; empty if none is named."""


def lint(paths: Sequence[Path], options: LintOptions) -> list[LintFinding]:
    """The findings in config files, and in those of folders, by file and line.

    A DeepSpeed config that another config among the files names is read as part of it, and not as
    one for DeepSpeed alone. One config of accelerate and one of TrainingArguments that are named
    themselves belong together. What is wrong with one file does not stop the others: it goes to
    ``options.problems``, and what is not judged to ``options.notes``. Raises InputError if the only
    file cannot be read, is wrong, or is of no kind that lint knows.
    """
    files = list(_files(paths))
    trainings: list[_Training] = []
    for file in files:
        try:
            trainings += _trainings(file, options)
        except InputError as error:
            if len(files) > 1 and _is_for_another(error, is_named=file in paths):
                options.unknown.append(str(error).partition(";")[0])
            else:
                _problem(error, files, options)
    if (
        not trainings
        and not options.problems
        and (len(files) == 1 or all(path.is_dir() for path in paths))
    ):
        raise InputError(_nothing_known(paths, files, options))
    if len(files) == len(paths):
        trainings = _together(trainings)
    named = _named(trainings)
    findings: list[LintFinding] = []
    for training in trainings:
        is_part = (
            training.config.reader is Reader.DEEPSPEED
            and Path(training.config.file).resolve() in named
        )
        if is_part:
            continue
        try:
            findings += findings_about(_subjects(training))
        except InputError as error:
            _problem(error, files, options)
    order = {str(file): place for place, file in reversed(list(enumerate(files)))}
    # A DeepSpeed config that two others name is found twice.
    return sorted(
        dict.fromkeys(findings),
        key=lambda each: (order.get(each.file, len(files)), each.file, each.line, each.code),
    )


def _is_for_another(error: InputError, *, is_named: bool) -> bool:
    """Whether a file is for another program, as some of a folder are; ``is_named``: by itself."""
    return isinstance(error, NoConfigError) or (isinstance(error, ForeignError) and not is_named)


def _problem(error: InputError, files: Sequence[Path], options: LintOptions) -> None:
    """Keep what is wrong with one of several files. Raises the error if there is only one."""
    if len(files) == 1:
        raise error
    options.problems.append(str(error))


def _nothing_known(paths: Sequence[Path], files: Sequence[Path], options: LintOptions) -> str:
    found = f"{paths[0]}: none of {len(files)} files is of a kind that lint knows"
    if len(files) == 1:
        found = options.unknown[0]
    advice = f"give {EXPECTED}"
    if options.composed:
        advice = options.how_composed
    return f"{found}; {advice}"


def _files(paths: Sequence[Path]) -> Iterator[Path]:
    """The files that are named, and those of folders that may be configs.

    Raises InputError for an empty folder.
    """
    for path in paths:
        if not path.is_dir():
            yield path
            continue
        found = sorted(_files_of(path))
        if not found:
            raise InputError(f"{path}: has no file that may be a config; name {EXPECTED}")
        yield from found


def _files_of(folder: Path) -> Iterator[Path]:
    number = 0
    for place, below, names in os.walk(folder):  # does not follow links to folders
        shown = [name for name in below if not name.startswith(".")]
        below[:] = sorted(set(shown) - SKIPPED)
        for name in names:
            path = Path(place, name)
            if path.suffix[1:].lower() in CONFIGS | SCRIPTS and path.is_file():
                number += 1
                if number > MOST_FILES:
                    raise InputError(
                        f"{folder}: has more than {MOST_FILES} files that may be configs; name a "
                        "part"
                    )
                yield path


def _trainings(file: Path, options: LintOptions) -> list[_Training]:
    """What a file trains; nothing if it is of no known kind.

    Raises InputError if it cannot be read.
    """
    suffix = file.suffix[1:].lower()
    if suffix in SCRIPTS:
        commands = launch_script.commands(read_text(file), str(file))
        found = list(_of_commands(commands, options))
        kind = "has no command that launches a training with options"
        if commands:
            kind = (
                f"line {commands[0].arguments.line} launches a training, but with too few options "
                "to tell its program, or of none that lint knows"
            )
    elif suffix in CONFIGS:
        root = read_file(file)
        config = recognize(root, suffix)
        found = []
        if config is not None:
            found.append(_Training(config, options))
        kind = "is of no kind that lint knows"
        if is_composed(root):
            options.composed.append(plain(str(file)))
    else:
        read_text(file)
        found, kind = [], "is of no kind that lint knows"
    if not found:
        options.unknown.append(f"{plain(str(file))}:1: {kind}")
    return found


def _of_commands(commands: Sequence[LaunchCommand], options: LintOptions) -> Iterator[_Training]:
    """The trainings that the commands of a script launch, each with what its launcher says."""
    for command in commands:
        config = recognize(command.arguments, "sh", command.launcher)
        if config is None or config.reader is not Reader.HUGGING_FACE:
            continue
        if command.has_unknown_options:
            _leave_open(config)
        _find_in_folder(config, command.folder)
        launch = _launch_config(command)
        ranks = _ranks(command, launch, options)
        yield _Training(config, replace(options, world_size=ranks), launch, command.program)


def _ranks(command: LaunchCommand, launch: ConfigPart | None, options: LintOptions) -> int | None:
    """Ranks as lint is told, else as the command says, else the config of accelerate it names."""
    if options.world_size is not None:
        return options.world_size
    if command.ranks is not None:
        return command.ranks
    if launch is None or command.launch.at("num_processes").given:
        return None
    return accelerate_rules.world_size(launch, options)


def _find_in_folder(config: Config, folder: str) -> None:
    """Name the DeepSpeed config as seen from the script, if it is in the folder that it goes to."""
    name = config.root.at("deepspeed").value
    parts = [part for part in Path(folder).parts if part.strip("./")]
    if not isinstance(name, str) or Path(name).is_absolute():
        return
    for first in range(len(parts)):
        inside = str(Path(*parts[first:], name))
        if deepspeed_config.named_file(Path(config.file), inside) is not None:
            config.root.values["deepspeed"] = inside
            return


def _leave_open(config: Config) -> None:
    """Take every argument that a command may have, and does not show, for unknown.

    That the number of epochs or a DeepSpeed config is given would be a statement of its own.
    """
    unsaid = {"num_train_epochs", "deepspeed", "fsdp"}
    for key in ("use_peft", *known_keys()["training_arguments"]):
        if key not in unsaid:
            config.root.values.setdefault(key, "${arguments}")


def _launch_config(command: LaunchCommand) -> ConfigPart | None:
    """What accelerate is told: by the config that a command names, if it is here, and by options."""
    if command.launcher != "accelerate":
        return None
    name = command.launch.at("config_file").value
    if name is None:
        return accelerate_rules.of_options(command.launch)
    if not isinstance(name, str):
        return None
    file = deepspeed_config.named_file(Path(command.launch.file), name)
    if file is None:
        return None
    config = recognize(read_file(file), file.suffix[1:].lower())
    if config is not None and config.reader is Reader.ACCELERATE:
        return accelerate_rules.overruled(config.root, command.launch)
    return None


def _together(trainings: list[_Training]) -> list[_Training]:
    """One config of accelerate and one of TrainingArguments are one training."""
    launches = [each for each in trainings if each.config.reader is Reader.ACCELERATE]
    trainers = [each for each in trainings if each.config.reader is Reader.HUGGING_FACE]
    if len(launches) != 1 or len(trainers) != 1 or trainers[0].launch is not None:
        return trainings
    launch, trainer = launches[0].config.root, trainers[0]
    ranks = accelerate_rules.world_size(launch, trainer.options)
    joined = replace(trainer, options=replace(trainer.options, world_size=ranks), launch=launch)
    rest = [each for each in trainings if each not in (launches[0], trainer)]
    return [*rest, joined]


def _subjects(training: _Training) -> Iterable[object]:
    """What rules are about in a training. Raises InputError for a wrong value."""
    config, options, launch = training.config, training.options, training.launch
    if config.reader is Reader.LIGHTNING:
        yield from lightning_rules.subjects(
            config.root, options, is_command_line=config.is_command_line
        )
    elif config.reader is Reader.DEEPSPEED:
        yield from deepspeed_rules.subjects(config.root, options)
    elif config.reader is Reader.GPT_NEOX:
        yield from deepspeed_rules.neox_subjects(config.root, options)
    elif config.reader is Reader.ACCELERATE:
        yield from accelerate_rules.subjects(config.root, options)
    elif config.reader is Reader.HUGGING_FACE:
        yield from hugging_face_rules.subjects(
            config.root,
            options,
            launch=launch,
            program=config.dtypes(training.program),
        )
        if launch is not None:
            yield from accelerate_rules.subjects(launch, options, config.root)
    elif config.adapter is not None:
        yield from loop_rules.subjects(config.root, config.adapter, options)


def _named(trainings: Iterable[_Training]) -> set[Path]:
    """The DeepSpeed configs that other configs name."""
    found: set[Path] = set()
    for training in trainings:
        root = training.config.root
        for text in _names(root.values):
            file = deepspeed_config.named_file(Path(root.file), text)
            if file is not None:
                found.add(file.resolve())
    return found


def _names(value: Any) -> Iterator[str]:
    """The strings among the values of a config that may be the name of a JSON file."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _names(each)
    elif isinstance(value, str) and value.endswith(".json") and "\0" not in value:
        yield value
