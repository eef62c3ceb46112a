"""Comparisons with the reference in a process that has not run the backend's code.

A backend's module may replace functions of torch, or of this package, in the process that imports
it. So a rank only leaves its tensors in a file and asks. When all ranks have ended, the launcher's
process compares, which imports no backend, and the bench's own process adds what was found to the
rank's result.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

from bench import files

LARGEST_BYTES = 2**30
"""Most bytes of tensors that are left in a file. More are compared in the rank, on its device: to
write and read those of 1b would take longer than to train a window."""
ASKED, FOUND = "asked.json", "found.json"
"""Endings of a rank's files: what is to be compared, and what was found."""


class AskedComparison(TypedDict):
    """The content of a file that ends with ASKED; see ``ask``."""

    values: str
    reference: str
    result: str
    keys: dict[str, str]


def ask(
    folder: Path,
    rank: int,
    name: str,
    *,
    values: Path,
    reference: Path,
    result: str,
    keys: Mapping[str, str],
) -> None:
    """Ask for a comparison of the tensors in two safetensors files, by the name of this comparison.

    ``result`` is the key of the rank's result that what is found is added to, and ``keys`` are
    those of ``bench.measure.update.compare`` with their names there.
    """
    asked: AskedComparison = {
        "values": str(values),
        "reference": str(reference),
        "result": result,
        "keys": dict(keys),
    }
    files.write(folder / f"rank{rank}.{name}.{ASKED}", json.dumps(asked))


def answer(folder: Path) -> None:
    """Make the comparisons that the ranks of a trial asked for, and write what each has found."""
    for path in sorted(folder.glob(f"rank*.{ASKED}")):
        found: dict[str, object]
        try:
            found = _compared(json.loads(path.read_text(encoding="utf-8")))
        except Exception as error:  # a damaged file ends its trial, and not the launcher
            found = {"error": f"{type(error).__name__}: {error}"}
        files.write(path.with_name(path.name.replace(ASKED, FOUND)), json.dumps(found))


def _compared(asked: AskedComparison) -> dict[str, object]:
    import torch

    from bench.measure.update import compare_files

    torch.set_num_threads(1)  # others would spin for a while, beside the next trial
    found: Mapping[str, object] = compare_files(Path(asked["values"]), Path(asked["reference"]))
    named = {name: found[key] for key, name in asked["keys"].items()}
    return {"result": asked["result"], "found": named}


def complete(folder: Path, rank: int, result: dict[str, Any]) -> str:
    """Add to a rank's result what was found; why something could not be compared, or nothing."""
    for path in sorted(folder.glob(f"rank{rank}.*.{ASKED}")):
        try:
            answered = json.loads(path.with_name(path.name.replace(ASKED, FOUND)).read_text())
        except FileNotFoundError:  # the launcher was ended first, which its trial is told as
            continue
        if "error" in answered:
            return f"{answered['error']} (comparing with the reference)"
        place = answered["result"]
        result.setdefault(place, {}).update(answered["found"])
    return ""
