"""Categories of memory: every live storage belongs to one, so that they add up to the total.

This module does not import torch, because tables and reports use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

PEAK, HELD = "peak", "held"
"""Keys of the two totals, in bytes; ``peak_<category>`` and ``held_<category>`` are their parts."""
ON_HOST = "host"
"""Prefix of the keys of the same totals and parts of the host, beside a device."""
PINNED = f"{ON_HOST}_{HELD}_pinned"
"""Key of the bytes of the host that are held in pinned memory, whatever their categories."""
COPIED_TO_HOST, COPIED_TO_DEVICE = "copied_to_host", "copied_to_device"
"""Keys of the bytes that are copied between host and device in a window."""

UNTRACKED = "malloc_untracked"
"""Ending of two more keys, on the CPU: bytes that the process has allocated since before the
backend was built, beyond those of the tensors that are counted (``bench.measure.process_memory``);
at the peak the most in the window."""


class Category(StrEnum):
    """What a storage holds. Sharded: the rank's own part. Unsharded: complete on the rank."""

    PARAMETERS_SHARDED = "parameters_sharded"
    """The shard of the parameters that this rank keeps and updates, including fp32 masters and
    padding."""
    PARAMETERS_UNSHARDED = "parameters_unsharded"
    """Complete parameters: never sharded, gathered, or cast for computation."""
    GRADIENTS_SHARDED = "gradients_sharded"
    """Reduced gradients of this rank's shard, including padding."""
    GRADIENTS_UNSHARDED = "gradients_unsharded"
    """Complete gradients: summed over micro-batches, or of one micro-batch before it is reduced or
    added."""
    OPTIMIZER_STATE = "optimizer_state"
    """All tensors in the inner optimizer's ``state``."""
    COMMUNICATION = "communication"
    """Inputs and outputs of collectives, and the framework's buffers that are filled for them, or
    for copies between host and device."""
    ACTIVATIONS = "activations"
    """Allocated between the fetch of a micro-batch and its loss, and in none of the categories
    above."""
    TEMPORARIES = "temporaries"
    """Allocated between a loss and the next fetch, and in none of the categories above: gradients
    of activations, and workspace of backward, clipping and the optimizer."""
    OTHER = "other"
    """Allocated before the window, use unknown: tokens, buffers of the model, constants of a
    framework."""


def named(total: str, size: int, parts: Mapping[Category, int]) -> dict[str, int]:
    """A total (PEAK or HELD) and its parts in bytes, under the keys of a trial's ``memory``.

    Raises AssertionError if the parts do not add up to the total.
    """
    if sum(parts.values()) != size:
        raise AssertionError(
            f"categories at the {total} add up to {sum(parts.values())} of {size} bytes"
        )
    found = {total: size}
    for category in Category:
        found[f"{total}_{category}"] = parts.get(category, 0)
    return found
