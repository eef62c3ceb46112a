"""The command line: ``python -m bench``, installed as ``accumulation-bench``.

Its exit statuses are in ``bench.errors``.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import importlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shlex
import sys
import traceback
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

if sys.platform == "win32":
    raise SystemExit(
        "bench: does not run on Windows; use Linux, for example in WSL or in the container of "
        "Containerfile"
    )

from bench import __version__
from bench.commands import COMMANDS, TRAINING
from bench.errors import DEFECT, GOOD, INTERRUPTED, WRONG, InputError, is_interrupt, shown
from bench.formatting import plain
from bench.launch.interrupt import terminate_as_interrupt
from bench.plain_stream import plain_streams

DEBUG = "--debug"
CLOSE = 0.75
"""Similarity (``difflib``) from which on an unknown option is taken for a misspelt one."""


class Parser(argparse.ArgumentParser):
    """Reports an error as one line that points to the help; gives every command ``--debug``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.commands: dict[str, Parser] = {}
        """Those of its commands."""
        # Only for --help: main looks for it in argv, since parsing itself may fail.
        self.add_argument(
            DEBUG, action="store_true", help="if the bench itself fails: print the traceback"
        )

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")

    def refuse(self, words: Sequence[str]) -> NoReturn:
        """Report words that it does not know, with the option that the first may be meant for."""
        name = words[0].partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, 1, CLOSE)
        if name.startswith("--") and near:
            self.error(f"{name} is unknown; did you mean {near[0]}?")
        self.error(f"unrecognized arguments: {' '.join(words)}")


class Commands:
    """Adds the parsers of the commands and collects their help texts for a list in groups."""

    def __init__(self, parsers: argparse._SubParsersAction[Parser]) -> None:
        self._parsers = parsers
        self._help: dict[str, str] = {}
        self.parsers: dict[str, Parser] = {}

    def add_parser(
        self,
        name: str,
        *,
        help: str,  # noqa: A002 - argparse calls it so
        **options: Any,
    ) -> Parser:
        self._help[name] = help
        parser = self._parsers.add_parser(name, **options)
        self.parsers[name] = parser
        return parser

    def listed(self) -> str:
        """The commands by group, one line each."""
        width = max(map(len, self._help))
        groups = []
        for group, names in COMMANDS.items():
            lines = [f"  {name:{width}}  {self._help[name]}" for name in names]
            groups.append("\n".join([f"{group}:", *lines]))
        return "\n\n".join(groups)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status.

    Files that it writes are never world-writable, whatever the umask, and what it prints has no
    control characters.
    """
    with plain_streams():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    os.umask(os.umask(0o077) | 0o002)
    given = argv
    if given is None:
        given = sys.argv[1:]
    status = GOOD
    try:
        with terminate_as_interrupt():
            parser = _parser()
            _refuse_mangled(given)
            if not given:
                parser.print_help()
                print(end="", flush=True)
                return GOOD
            arguments, unknown = parser.parse_known_args(given)
            if unknown:
                parser.commands[arguments.command].refuse(unknown)
            if arguments.command in TRAINING:
                _require_training(arguments.command)
            status = int(_module(arguments.command).run(arguments))
            print(end="", flush=True)
            return status
    except SystemExit:  # after --help and --version
        _settle_output()
        raise
    except InputError as error:
        print(f"bench: {plain(error)}", file=sys.stderr)
        return WRONG
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe.
        _settle_output()
        return status
    except (KeyboardInterrupt, Exception) as error:
        return _ended(error, is_debugged=DEBUG in given)


def _settle_output() -> None:
    """Drop what standard output does not take: Python would try again at its end, and complain."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _ended(error: BaseException, *, is_debugged: bool) -> int:
    """The exit status of an unexpected end, which a line says unless it is an interrupt."""
    if is_interrupt(error):
        return INTERRUPTED
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = shown(plain(error.filename))
        print(f"bench: {name}: no file has so long a name; give a shorter one", file=sys.stderr)
        return WRONG
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        _settle_output()
        with contextlib.suppress(OSError):  # the same disk
            print(
                "bench: the disk is full, so not all was written; free some space", file=sys.stderr
            )
        return WRONG
    if is_debugged:
        traceback.print_exception(error)
    return _failed(error)


def _require_training(command: str) -> None:
    """Raises InputError on a system that no trial runs on, ModuleNotFoundError without torch."""
    if sys.platform != "linux":
        raise InputError(
            f"{command} trains, which needs Linux; this is {platform.system()}. What only reads "
            "runs here: plan, predict, lint, steps, report, compare, check, cite, export"
        )
    if importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("torch is not installed", name="torch")


def _refuse_mangled(given: Sequence[str]) -> None:
    """Raises InputError for an argument with bytes that are not UTF-8."""
    for word in given:
        if word.encode(errors="ignore").decode() != word:
            raise InputError(f"{word!a}: this argument is not UTF-8; rename what it names")


def _failed(error: BaseException) -> int:
    """Say in one line what is missing, or that the bench has a defect; the exit status."""
    package = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
    if package and package != "bench":
        print(_lacking(package), file=sys.stderr)
        return WRONG
    print(_defect(error), file=sys.stderr)
    return DEFECT


def _lacking(package: str) -> str:
    """Say that this Python lacks a package, and which has it: in a checkout, nox's."""
    checkout = Path(__file__).parents[1]
    activate = checkout / ".nox" / "install" / "bin" / "activate"
    if not (checkout / "noxfile.py").exists():
        how = f"{sys.executable} -m pip install {shlex.quote(_source() + '[frameworks]')}"
    elif activate.exists():
        how = f". {activate}"
    else:
        how = (
            f"cd {checkout} && python3 -m venv .venv && .venv/bin/pip install nox && "
            f".venv/bin/nox -s install && . {activate}"
        )
    remedy = f"use an environment that has it: {how}"
    return f"bench: {sys.executable} lacks the package {package}; {remedy}"


def _source() -> str:
    """What pip installed the bench from: a local folder or file, or else its name on an index."""
    name = "accumulation-bench"
    try:
        recorded = importlib.metadata.distribution(name).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return name
    url = ""
    if recorded is not None:
        url = json.loads(recorded)["url"]
    if not url.startswith("file:"):
        return name
    return urllib.request.url2pathname(urllib.parse.urlsplit(url).path)


def _defect(error: BaseException) -> str:
    """Describe an unexpected exception in one line: what, where raised, where to report it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    what = type(error).__name__
    words = plain(error)
    if words:
        what += f": {words}"
    return (
        f"bench: {what} ({Path(place.filename).name}:{place.lineno}): a defect of "
        f"accumulation-bench {__version__}; report it with the command and the traceback of "
        f"{DEBUG} to the project's issue tracker"
    )


def _module(command: str) -> ModuleType:
    return importlib.import_module(f"bench.commands.{command}")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m bench",
        description="Compare gradient-accumulation backends, by measurement.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"accumulation-bench {__version__}")
    subparsers = parser.add_subparsers(
        dest="command",
        required=True,
        metavar="COMMAND",
        parser_class=Parser,
        help="see below",
    )
    commands = Commands(subparsers)
    for name in itertools.chain(*COMMANDS.values()):
        _module(name).add(commands)
    parser.epilog = (
        f"{commands.listed()}\n\nA command's own options: python -m bench COMMAND --help"
    )
    parser.commands = commands.parsers
    return parser
