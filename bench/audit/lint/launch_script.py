"""Shell scripts: the commands in them that launch a training, and the arguments of each.

Only what the script itself says is taken (``shell``): options, and variables that it sets. Nothing
is executed; everything else stays unknown.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.audit.lint.config_file import ConfigPart, KeyPath
from bench.audit.lint.shell import UNKNOWN, Word, simple_commands

SPREAD = re.compile(r"\$\{(?:[@*]|\w+\[[@*]\])\}")
"""Any number of words that are not known."""
HOLDS_OPTIONS = re.compile(
    r"\$\{(?:\w*_)?(?:args?|opts?|options?|flags?|extras?|params?)(?:_\w*)?\}", re.IGNORECASE
)
"""A variable whose name says that it holds options, and not the value of the one before it."""
TALK = {"echo", "printf", "cat", "grep", "pgrep", "pkill"}
"""Commands that only speak of others."""
RANKS_PER_NODE = ("nproc_per_node", "nproc-per-node", "num_gpus")
NODES = ("nnodes", "num_nodes")
LAUNCHERS = {
    "accelerate": ("accelerate", "launch"),
    "deepspeed": ("deepspeed",),
    "torchrun": ("torchrun",),
    "swift": ("swift",),
    "llamafactory-cli": ("llamafactory-cli", "train"),
}
SWIFT_TRAINS = {"sft", "pt", "rlhf"}
"""What of ms-swift's command trains, without Megatron."""


@dataclass(frozen=True)
class LaunchCommand:
    """A command that launches a training."""

    launcher: str
    """Such as torchrun; python where the script is started without a launcher."""
    program: str
    """The script that is started, or its module; empty for a launcher that is the program."""
    arguments: ConfigPart
    """Of the script."""
    launch: ConfigPart
    """Options of the launcher."""
    ranks: int | None
    """None if the command does not say."""
    folder: str
    """Where the script has gone before; empty if it has not, or that is not known."""
    has_unknown_options: bool
    """Whether the script may get options that are not among the arguments."""


def commands(text: str, file: str) -> list[LaunchCommand]:
    """The launching commands of a script, in its order."""
    found, folder = [], ""
    for words in simple_commands(text):
        if words[0].text == "cd" and len(words) > 1:
            folder = posixpath.join(folder, words[-1].text)
            if UNKNOWN.search(folder):
                folder = ""
        command = _launched(words, file, folder)
        if command is not None:
            found.append(command)
    return found


def _launched(words: Sequence[Word], file: str, folder: str) -> LaunchCommand | None:
    """The training that a command launches; None if it launches none."""
    texts = [word.text for word in words]
    if texts[0] in TALK:
        return None
    for place, text in enumerate(texts):
        name = text.rpartition("/")[2]
        for launcher, start in LAUNCHERS.items():
            if (name, *texts[place + 1 : place + len(start)]) == start:
                return _command(launcher, words[place + len(start) :], file, folder)
        if re.fullmatch(r"python[\d.]*", name):
            rest = texts[place + 1 : place + 3]
            if rest in (["-m", "torch.distributed.launch"], ["-m", "torch.distributed.run"]):
                return _command("torchrun", words[place + 3 :], file, folder)
            return _command("python", words[place + 1 :], file, folder)
    return None


def _command(launcher: str, words: Sequence[Word], file: str, folder: str) -> LaunchCommand | None:
    """The options before the script, and the arguments after it."""
    script = _place_of_script(launcher, words)
    if script is None:
        return None
    launch, _ = _options(words[:script], file)
    arguments, is_open = _options(words[script + 1 :], file)
    if not arguments.value:
        return None
    program = ""
    if launcher not in {"swift", "llamafactory-cli"}:
        program = words[script].text
    ranks = _ranks(launcher, launch)
    return LaunchCommand(launcher, program, arguments, launch, ranks, folder, is_open)


def _place_of_script(launcher: str, words: Sequence[Word]) -> int | None:
    if launcher == "swift":
        if words and words[0].text in SWIFT_TRAINS:
            return 0
        return None
    if launcher == "llamafactory-cli":
        return -1
    for place, word in enumerate(words):
        if word.text.endswith(".py") or (place and words[place - 1].text in {"-m", "--module"}):
            return place
        if launcher == "python" and not word.text.startswith("-"):
            return None
    return None


def _options(words: Sequence[Word], file: str) -> tuple[ConfigPart, bool]:
    """``--key value`` and ``--key=value`` as a mapping, and whether there may be more of them.

    A key without a value is true, one with several has a list.
    """
    values: dict[str, Any] = {}
    lines: dict[KeyPath, int] = {}
    key, is_open = "", False
    if words:
        lines[()] = words[0].line
    for word in words:
        if re.match(r"--?[A-Za-z]", word.text):
            key, is_joined, value = word.text.lstrip("-").partition("=")
            if UNKNOWN.search(key):
                key, is_open = "", True
                continue
            key = key.replace("-", "_")
            values[key] = True
            if is_joined:
                values[key] = plain_value(value)
            lines[(key,)] = word.line
            continue
        has_value = values.get(key, False) is not True
        if _is_several(word.text, has_value=has_value):
            is_open = True
        if key and not (has_value and is_open):
            values[key] = _with_value(values[key], plain_value(word.text))
    return ConfigPart(file, values, lines), is_open


def _with_value(before: Any, value: Any) -> Any:
    """What a key has after one more value."""
    if before is True:
        return value
    if isinstance(before, list):
        return [*before, value]
    return [before, value]


def _is_several(text: str, *, has_value: bool) -> bool:
    """Whether a word may hold options: an unknown one that is not the value of the key before."""
    if SPREAD.fullmatch(text) or HOLDS_OPTIONS.fullmatch(text):
        return True
    return has_value and UNKNOWN.fullmatch(text) is not None


def plain_value(text: str) -> Any:
    """What a word means to a parser of arguments: a bool, a number, nothing, or itself."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    if text.lower() in {"none", "null"}:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _ranks(launcher: str, launch: ConfigPart) -> int | None:
    """Ranks, if the launcher's options say how many."""
    if launcher == "accelerate":
        return _count(launch, ("num_processes",))
    included = _first(launch, ("include", "i"))
    if launcher == "deepspeed" and included is not None:
        return _included(str(included))
    each, nodes = _count(launch, RANKS_PER_NODE), _count(launch, NODES)
    if each is None:
        return None
    if nodes is not None:
        return each * nodes
    # num_gpus is of each host, and a hostfile may have several.
    if _first(launch, (*NODES, "hostfile", "H")) is not None:
        return None
    return each


def _included(hosts: str) -> int | None:
    """The GPUs that ``--include`` names; None for several hosts, or one without its GPUs."""
    named = re.fullmatch(r"[^@:]+:(\d+(?:,\d+)*)", hosts)
    if named is None:
        return None
    return len({*named.group(1).split(",")})


def _count(launch: ConfigPart, names: Sequence[str]) -> int | None:
    for name in names:
        value = launch.at(name.replace("-", "_")).value
        if type(value) is int and value > 0:
            return value
    return None


def _first(launch: ConfigPart, names: Sequence[str]) -> Any:
    """The value of the first of these options that is there; None if none is."""
    return next((launch.at(name).value for name in names if launch.at(name).given), None)
