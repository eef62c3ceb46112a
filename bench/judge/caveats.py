"""The remarks that stand beside the numbers of cells: in the answer, under tables, in figures and in citations.

A remark is one sentence without its full stop. It follows from run.json, so no backend is imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.backends.base import BF16_AUTOCAST
from bench.formatting import digits, some
from bench.plan.cell import REFERENCE, Cell, Device, Precision

WAYS = "bf16 is computed in different ways, which by itself changes time and memory: "
"""Begins the remark that names the ways."""
IMPLIES = {BF16_AUTOCAST: ", which keeps the residual stream and norms in fp32"}
"""What a way of computing bf16 implies."""


def remarks(shown: Iterable[tuple[Mapping[str, Any], Cell]]) -> list[str]:
    """The remarks on cells that are shown together, each with the manifest of its run.

    They are the remarks of the cells' backends, as stored when the run began (``Backend.remark``), and how the cells
    compute bf16, if they do not all do it in the same way.
    """
    cells = [(manifest, cell) for manifest, cell in shown if cell.backend != REFERENCE]
    is_one_run = len({id(manifest) for manifest, _ in cells}) == 1
    own: dict[str, dict[str, None]] = {}
    ways: dict[str, dict[str, None]] = {}
    for manifest, cell in cells:
        if (stored := manifest.get("remarks")) and (text := stored.get(cell.cell_id)):
            own.setdefault(text, {})[cell.label] = None
        if cell.precision is Precision.BF16:
            way = manifest.get("backends", {}).get(cell.backend, {}).get("bf16_as") or "a way that was not stored"
            name = cell.backend if is_one_run else f"{cell.backend} of {manifest.get('run_id')}"
            ways.setdefault(way, {})[name] = None
    found = [text if len(cells) == 1 else f"{some(list(labels))}: {text}" for text, labels in own.items()]
    if len(ways) > 1:
        said = (f"{way}{IMPLIES.get(way, '')} ({some(list(names))})" for way, names in ways.items())
        found.append(WAYS + "; ".join(said))
    return found


def link_words(cells: Sequence[Cell]) -> str:
    """What the ranks of these cells communicate over."""
    num_nodes = max(cell.num_nodes for cell in cells)
    on_cpu = any(cell.device is Device.CPU for cell in cells)
    link = "NCCL"
    if on_cpu or any(cell.world.shares_gpus for cell in cells):
        link = "gloo" if num_nodes > 1 else "gloo over loopback"
    link += f" between {num_nodes} nodes" * (num_nodes > 1)
    if all(cell.world_size == 1 for cell in cells):
        alone = "one process" if on_cpu else "one GPU"
        return f"{alone}, so no bytes move: times show host overhead and memory policy, not communication"
    return link if any(cell.world.has_all_ranks for cell in cells) else "virtual world, nothing is sent"


def transfer(num_parameters: float) -> str:
    """What does not follow from times on CPUs."""
    return f"rankings of a {digits(num_parameters / 1e6)} M model over gloo do not transfer to GPUs"
