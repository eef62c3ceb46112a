"""Loads what trials need, in the process that they are forked from."""

from __future__ import annotations

import importlib
from contextlib import suppress


def load(name: str) -> None:
    """Import ``module``, or call ``module:function`` (``Backend.preloaded``); nothing if it is not installed."""
    module, _, function = name.partition(":")
    with suppress(ImportError):
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
