"""Errors that a user can act on, and the exit statuses of the command line."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from errno import EBADF

GOOD = 0
BAD = 1
"""Something measured is bad."""
WRONG = 2
"""The command or its input is wrong."""
UNCHECKED = 3
"""A gate could not be checked."""
DEFECT = 70
"""The bench itself failed (EX_SOFTWARE of sysexits.h)."""
INTERRUPTED = 130
MAX_SHOWN = 60
"""Longest quotation of a value in an error, in characters."""
EXIT_STATUS = (
    "Exit status: 0 all good; 1 something measured is bad; 2 the command or its input is wrong, "
    "said in one line; 70 the bench itself has failed (--debug prints the traceback); 130 "
    "interrupted, with all finished trials kept."
)


class InputError(ValueError):
    """The command or its input is wrong (status 2).

    One line names the place and what would be right.
    """


class UnsupportedError(RuntimeError):
    """This machine or framework cannot run the cell; the trial gets the status ``unsupported``."""


def reason_of(error: OSError) -> str:
    """Why the system refused, without the number of the error."""
    if error.strerror:
        return error.strerror
    return str(error)


def is_interrupt(error: BaseException) -> bool:
    """Whether it is an interrupt or what Python turns it into.

    That is EBADF in shutil.rmtree, and RuntimeError in __set_name__.
    """
    if KeyboardInterrupt in {type(error), type(error.__cause__)}:
        return True
    closed_twice = isinstance(error, OSError) and error.errno == EBADF
    return closed_twice and type(error.__context__) is KeyboardInterrupt


def shown(value: object) -> str:
    """The repr of a value for an error message, cut after MAX_SHOWN characters."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more than 4300 digits
        return "too long a number"
    if len(text) > MAX_SHOWN:
        return text[:MAX_SHOWN] + "..."
    return text


def suggest(name: str, known: Iterable[str]) -> str:
    """Suggest the known name closest to an unknown one, or else list the known names."""
    names = list(dict.fromkeys(known))
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]}?"
    return listed(names)


def listed(known: Iterable[str]) -> str:
    """List the known names."""
    return f"use one of {', '.join(known)}"
