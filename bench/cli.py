"""The command line: ``python -m bench``, installed as ``accumulation-bench``; exit statuses: ``bench.errors``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from bench import __version__
from bench.commands import COMMANDS, TRAINING
from bench.errors import DEFECT, GOOD, INTERRUPTED, WRONG, InputError, is_interrupt
from bench.launch.interrupt import terminate_as_interrupt

DEBUG = "--debug"


class Parser(argparse.ArgumentParser):
    """Reports an error as one line that points to the help; gives every command ``--debug``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        # Only for --help: main looks for it in argv, since parsing itself may fail.
        self.add_argument(DEBUG, action="store_true", help="if the bench itself fails: print the traceback")

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see {self.prog} --help")


class Commands:
    """Adds the parsers of the commands and collects their help texts for a list in groups."""

    def __init__(self, parsers: Any) -> None:
        self._parsers = parsers
        self._help: dict[str, str] = {}

    def add_parser(self, name: str, *, help: str, **options: Any) -> Parser:  # noqa: A002 - argparse calls it so
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
    """Run one command and return its exit status. Files that it writes are never world-writable, whatever the umask."""
    os.umask(os.umask(0o077) | 0o002)
    given = sys.argv[1:] if argv is None else argv
    try:
        with terminate_as_interrupt():
            parser = _parser()
            if mangled := [word for word in given if word.encode(errors="ignore").decode() != word]:
                raise InputError(f"{mangled[0]!a}: this argument is not UTF-8; rename what it names")
            if not given:
                parser.print_help()
                return GOOD
            arguments = parser.parse_args(given)
            if arguments.command in TRAINING and importlib.util.find_spec("torch") is None:
                raise ModuleNotFoundError("torch is not installed", name="torch")
            return int(_module(arguments.command).run(arguments))
    except InputError as error:
        print(f"bench: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return GOOD
    except (KeyboardInterrupt, Exception) as error:
        return INTERRUPTED if is_interrupt(error) else _failed(error, debug=DEBUG in given)


def _failed(error: BaseException, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    package = ((isinstance(error, ModuleNotFoundError) and error.name) or "bench").partition(".")[0]
    print(_defect(error) if package == "bench" else _lacking(package), file=sys.stderr)
    return DEFECT if package == "bench" else WRONG


def _lacking(package: str) -> str:
    """Say that this Python lacks a package, and where there is one that has it: in a checkout, nox's."""
    checkout = Path(__file__).parents[1]
    activate = checkout / ".nox" / "install" / "bin" / "activate"
    if not (checkout / "noxfile.py").exists():
        how = "pip install 'accumulation-bench[frameworks]'"
    elif activate.exists():
        how = f". {activate}"
    else:
        how = f"pip install nox && nox -s install && . {activate}"
    return f"bench: {sys.executable} lacks the package {package}; use an environment that has it: {how}"


def _defect(error: BaseException) -> str:
    """Describe an unexpected exception in one line: what it is, where it was raised and where to report it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    words = " ".join(str(error).split())
    return (
        f"bench: {type(error).__name__}{': ' * bool(words)}{words} ({Path(place.filename).name}:{place.lineno}): a "
        f"defect of accumulation-bench {__version__}; report it with the command and the traceback of {DEBUG} to the "
        "project's issue tracker"
    )


def _module(command: str) -> Any:
    return importlib.import_module(f"bench.commands.{command}")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m bench",
        description="Compare gradient-accumulation backends, by measurement.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"accumulation-bench {__version__}")
    add = parser.add_subparsers
    commands = Commands(add(dest="command", required=True, metavar="COMMAND", parser_class=Parser, help="see below"))
    for name in itertools.chain(*COMMANDS.values()):
        _module(name).add(commands)
    parser.epilog = f"{commands.listed()}\n\nA command's own options: python -m bench COMMAND --help"
    return parser
