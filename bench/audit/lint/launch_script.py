"""Shell scripts: the commands in them that launch a training, and the arguments of each.

Only what a reader of the script would know is taken: options, and variables that are set once, to
plain text. Nothing is executed; everything else stays unknown.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.audit.lint.config_file import ConfigPart, KeyPath

MAX_TOKENS = 20_000
"""Words of a script that are looked at."""
MAX_LINES = 400
"""Lines of a command."""
ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)(\+?)=(.*)$", re.DOTALL)
VARIABLE = re.compile(r"\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)\})")
SUBSTITUTION = re.compile(r"\$\(+[^()]*\)+|`[^`]*`")
"""What a command prints, which only the shell knows."""
REDIRECTION = re.compile(r"^(\d|&)?(>>?|<<?<?)(&\d)?")
"""Where output goes to or input comes from: in this word, or in the next one if nothing follows."""
ENDS = {";", "&&", "||", "|", "&"}
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
class Word:
    """A word of a command, with its line."""

    text: str
    line: int


@dataclass(frozen=True)
class LaunchCommand:
    """A command that launches a training."""

    launcher: str
    """Such as torchrun; python where the script is started without a launcher."""
    arguments: ConfigPart
    """Of the script."""
    launch: ConfigPart
    """Options of the launcher."""
    ranks: int | None
    """None if the command does not say."""


@dataclass
class _Variables:
    """Variables that are set once in a script; those set otherwise are unknown."""

    values: dict[str, str | None] = field(default_factory=dict)

    def assign(self, name: str, text: str | None) -> None:
        if name in self.values and self.values[name] != text:
            text = None
        self.values[name] = text

    def expand(self, text: str) -> str:
        def value(found: re.Match[str]) -> str:
            known = self.values.get(found.group(1) or found.group(2))
            if known is None:
                return found.group()
            return known

        return VARIABLE.sub(value, text)


def commands(text: str, file: str) -> list[LaunchCommand]:
    """The launching commands of a script, in its order."""
    variables = _Variables()
    found: list[LaunchCommand] = []
    for words in _logical_lines(text):
        _note_assignments(words, variables)
        for command in _between_ends(words):
            expanded = list(_expanded(command, variables))
            launched = _launched(expanded, file)
            if launched is not None:
                found.append(launched)
    return found


def _logical_lines(text: str) -> Iterator[list[Word]]:
    """The words of each line, with those of the lines that continue it or its quotation."""
    pieces: list[tuple[int, str]] = []
    number_of_words = 0
    for number, line in enumerate(text.split("\n"), 1):
        stripped = line.rstrip()
        if not pieces and stripped.lstrip().startswith("#"):
            continue
        continues = stripped.endswith("\\")
        pieces.append((number, SUBSTITUTION.sub("${command}", stripped.removesuffix("\\"))))
        if continues and len(pieces) < MAX_LINES:
            continue
        words = _words(pieces)
        if words is None and len(pieces) < MAX_LINES:  # a quotation that goes on in the next line
            continue
        number_of_words += len(words or ())
        if number_of_words > MAX_TOKENS:
            return
        if words:
            yield words
        pieces = []
    yield _words(pieces) or []


def _words(pieces: Sequence[tuple[int, str]]) -> list[Word] | None:
    """The words of lines that belong together; None if a quotation has no end."""
    words: list[Word] = []
    try:
        for number, text in pieces:
            words += [Word(part, number) for part in shlex.split(text, comments=True)]
    except ValueError:
        whole = " ".join(text for _, text in pieces)
        try:
            return [Word(part, pieces[0][0]) for part in shlex.split(whole)]
        except ValueError:
            return None
    return words


def _note_assignments(words: Sequence[Word], variables: _Variables) -> None:
    """Keep the variables that a line sets to plain text."""
    texts = [word.text for word in words]
    if texts[:1] == ["for"] and len(texts) > 1:
        variables.values[texts[1]] = None
        return
    for place, text in enumerate(texts):
        match = ASSIGNMENT.match(text)
        if match is None:
            if text not in {"export", "local", "declare", "readonly"}:
                return
            continue
        name, more, value = match.groups()
        is_alone = place == len(texts) - 1 or ASSIGNMENT.match(texts[place + 1]) is not None
        value = variables.expand(value)
        is_set = is_alone or place > 0 or bool(value)
        is_plain = not more and is_set and not re.search(r"[$`(]", value)
        known = None
        if is_plain:
            known = value
        variables.assign(name, known)


def _between_ends(words: Sequence[Word]) -> Iterator[list[Word]]:
    command: list[Word] = []
    is_target = False
    for word in words:
        redirection = REDIRECTION.match(word.text)
        if redirection is not None or is_target:
            is_target = (
                redirection is not None
                and redirection.group() == word.text
                and not redirection.group(3)
            )
            continue
        if word.text in ENDS:
            yield command
            command = []
        else:
            command.append(word)
    yield command


def _expanded(words: Sequence[Word], variables: _Variables) -> Iterator[Word]:
    """The words with known variables.

    One that holds several words, or a command for ``eval``, is split.
    """
    is_evaluated = bool(words) and words[0].text == "eval"
    for word in words:
        text = variables.expand(variables.expand(word.text))
        if (is_evaluated or word.text.startswith("$")) and " " in text:
            for part in text.split():
                yield Word(part, word.line)
        else:
            yield Word(text, word.line)


def _launched(words: Sequence[Word], file: str) -> LaunchCommand | None:
    """The training that a command launches; None if it launches none."""
    texts = [word.text for word in words]
    for place, text in enumerate(texts):
        name = text.rpartition("/")[2]
        for launcher, start in LAUNCHERS.items():
            if (name, *texts[place + 1 : place + len(start)]) == start:
                return _command(launcher, words[place + len(start) :], file)
        if re.fullmatch(r"python[\d.]*", name):
            rest = texts[place + 1 : place + 3]
            if rest in (["-m", "torch.distributed.launch"], ["-m", "torch.distributed.run"]):
                return _command("torchrun", words[place + 3 :], file)
            return _command("python", words[place + 1 :], file)
    return None


def _command(launcher: str, words: Sequence[Word], file: str) -> LaunchCommand | None:
    """The options before the script, and the arguments after it."""
    script = _place_of_script(launcher, words)
    if script is None:
        return None
    launch, arguments = _options(words[:script], file), _options(words[script + 1 :], file)
    if not arguments.value:
        return None
    return LaunchCommand(launcher, arguments, launch, _ranks(launcher, launch))


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


def _options(words: Sequence[Word], file: str) -> ConfigPart:
    """``--key value`` and ``--key=value`` as a mapping.

    A key without a value is true, one with several has a list.
    """
    values: dict[str, Any] = {}
    lines: dict[KeyPath, int] = {}
    key = ""
    if words:
        lines[()] = words[0].line
    for word in words:
        if re.match(r"--?[A-Za-z]", word.text):
            key, is_joined, value = word.text.lstrip("-").partition("=")
            key = key.replace("-", "_")
            values[key] = True
            if is_joined:
                values[key] = plain_value(value)
            lines[(key,)] = word.line
        elif key:
            value = plain_value(word.text)
            before = values[key]
            if isinstance(before, list):
                before.append(value)
            else:
                values[key] = [before, value]
                if before is True:
                    values[key] = value
    return ConfigPart(file, values, lines)


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
    included = launch.at("include").value
    if launcher == "deepspeed" and isinstance(included, str) and "@" not in included:
        return len(included.rpartition(":")[2].split(","))
    each, nodes = _count(launch, RANKS_PER_NODE), _count(launch, NODES)
    if each is None:
        return None
    if nodes is None and any(launch.at(name).given for name in NODES):
        return None
    return each * (nodes or 1)


def _count(launch: ConfigPart, names: Sequence[str]) -> int | None:
    for name in names:
        value = launch.at(name.replace("-", "_")).value
        if type(value) is int and value > 0:
            return value
    return None
