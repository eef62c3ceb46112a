"""The command line: ``python -m bench``, installed as ``accumulation-bench``; exit statuses: ``bench.errors``."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from bench import __version__
from bench.commands import COMMANDS
from bench.errors import DEFECT, GOOD, INTERRUPTED, WRONG, InputError
from bench.launch.interrupt import terminate_as_interrupt

DEBUG = "--debug"


class Parser(argparse.ArgumentParser):
    """Errors are one line and name what would be right; every command has ``--debug``."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        # Looked for in the arguments themselves: parsing may be what fails.
        self.add_argument(DEBUG, action="store_true", help="if the bench itself fails: print the traceback")

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. What it writes is not writable by everybody, whatever the umask says."""
    os.umask(os.umask(0o077) | 0o002)
    try:
        with terminate_as_interrupt():
            arguments = _parser().parse_args(argv)
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
        if DEBUG in (sys.argv[1:] if argv is None else argv):
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
    parser = Parser(prog="python -m bench", description="Compare gradient-accumulation backends, by measurement.")
    parser.add_argument("--version", action="version", version=f"accumulation-bench {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", parser_class=Parser)
    for name in COMMANDS:
        importlib.import_module(f"bench.commands.{name}").add(commands)
    return parser
