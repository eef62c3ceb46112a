"""Whether a manifest holds what one can hold: a file that was edited, or is hostile, is refused when it is read.

Keys that are missing are no matter here: older runs have fewer, and whoever needs one says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.errors import shown
from bench.predicates import Check, anything, boolean, integer, list_of, number, or_none, table, table_of, text

CHECKS: dict[str, Check] = {
    "run_id": text,
    "started": text,
    "finished": or_none(text),
    "command": list_of(text),
    "matrix": table(name=text, source=text, values=table_of(anything), places=table_of(text)),
    "cells": list_of(table_of(anything)),
    "remarks": table_of(text),
    "backends": table_of(table_of(text)),
    "baseline": text,
    "cold": boolean,
    "code": table_of(text),
    "git": or_none(table(commit=or_none(text), clean=or_none(boolean))),
    "machine": or_none(
        table(
            cpu=or_none(text),
            cores=or_none(integer),
            governor=or_none(text),
            memory_bytes=or_none(integer),
            gpus=list_of(table(name=text, uuid=text, mig=text, driver=text, index=integer, memory_bytes=integer)),
            gpu_settings=list_of(table_of(anything)),
            system=or_none(text),
            python=or_none(text),
        )
    ),
    "matmul": list_of(table(world_size=integer, threads=integer, flops_per_s=table_of(list_of(number)), reason=text)),
    "packages": or_none(table_of(text)),
    "distributions": or_none(table_of(text)),
    "torch_build": or_none(table_of(or_none(text))),
    "environment": or_none(table_of(text)),
    "once": list_of(text),
    "looks": or_none(
        list_of(table(repeats=integer, wanted=integer, open=list_of(text), refused=text, widest=or_none(number)))
    ),
    "ended_by": or_none(text),
    "noise_floor": or_none(table_of(or_none(lambda value: text(value) or boolean(value) or number(value)))),
    "parent_peak_bytes": or_none(integer),
    "journal_sha256": or_none(text),
}
"""What a key of a manifest may hold."""


def wrong(manifest: Mapping[str, Any]) -> str:
    """In words, the first key that holds what it cannot; empty if there is none."""
    for key, check in CHECKS.items():
        if key in manifest and not check(manifest[key]):
            return f"{key} cannot be {shown(manifest[key])}"
    return ""
