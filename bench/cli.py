"""The command line: ``python -m bench``, installed as ``accumulation-bench``; exit statuses: ``bench.errors``."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from bench import __version__
from bench.commands import COMMANDS
from bench.errors import DEFECT, GOOD, INTERRUPTED, WRONG, InputError
from bench.launch.interrupt import terminate_as_interrupt

DEBUG = "--debug"


class Parser(argparse.ArgumentParser):
    """Errors are one line and name what would be right; every command has ``--debug``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Looked for in the arguments themselves: parsing may be what fails.
        self.add_argument(DEBUG, action="store_true", help="if the bench itself fails: print the traceback")

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


class Commands:
    """Adds the commands' parsers, and remembers the help of each for a list of our own."""

    def __init__(self, parsers: Any) -> None:
        self._parsers = parsers
        self._help: dict[str, str] = {}

    def add_parser(self, name: str, *, help: str, **options: Any) -> Parser:  # noqa: A002 - as argparse has it
        self._help[name] = help
        parser: Parser = self._parsers.add_parser(name, **options)
        return parser

    def listed(self) -> str:
        """The commands by group, one line each."""
        width = max(map(len, self._help))
        groups = (
            "\n".join([f"{group}:", *(f"  {name:{width}}  {self._help[name]}" for name in names)])
            for group, names in COMMANDS.items()
        )
        return "\n\n".join(groups)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. What it writes is not writable by everybody, whatever the umask says."""
    os.umask(os.umask(0o077) | 0o002)
    given = sys.argv[1:] if argv is None else argv
    try:
        with terminate_as_interrupt():
            parser = _parser()
            if not given:
                parser.print_help()
                return GOOD
            arguments = parser.parse_args(given)
            command: Callable[[argparse.Namespace], int] = arguments.command
            return command(arguments)
    except InputError as error:
        print(f"bench: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; there is nobody left to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except Exception as error:
        if DEBUG in given:
            traceback.print_exc()
        print(_defect(error), file=sys.stderr)
        return DEFECT


def _defect(error: Exception) -> str:
    """One line on an exception that no command expects: what it is, where it was raised, where to report it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return (
        f"bench: {type(error).__name__}{': ' * bool(words)}{words} ({Path(place.filename).name}:{place.lineno}): a "
        f"defect of accumulation-bench {__version__}; report it in the issue tracker of the repository that you have "
        f"it from, with this command and what it prints with {DEBUG}"
    )


def _parser() -> Parser:
    parser = Parser(
        prog="python -m bench",
        description="Compare gradient-accumulation backends, by measurement.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"accumulation-bench {__version__}")
    commands = Commands(parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser, help="see below"))
    for name in itertools.chain(*COMMANDS.values()):
        importlib.import_module(f"bench.commands.{name}").add(commands)
    parser.epilog = f"{commands.listed()}\n\nA command's own options: python -m bench COMMAND --help"
    return parser
