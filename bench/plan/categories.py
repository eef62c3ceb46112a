"""What memory is used for: nine categories, one for every live storage, so that they add up to the whole.

Nothing here imports torch: tables and reports use it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

PEAK, HELD = "peak", "held"
"""Keys of the two totals, in bytes; ``peak_<category>`` and ``held_<category>`` are their parts."""


class Category(StrEnum):
    """What a storage is for. Sharded is a rank's own part, unsharded what is whole on the rank."""

    PARAMETERS_SHARDED = "parameters_sharded"
    """The part of the parameters that this rank keeps and updates, fp32 masters and padding included."""
    PARAMETERS_UNSHARDED = "parameters_unsharded"
    """Whole parameters: never sharded ones, gathered ones, and copies cast for computing."""
    GRADIENTS_SHARDED = "gradients_sharded"
    """Reduced gradients of this rank's part, padding included."""
    GRADIENTS_UNSHARDED = "gradients_unsharded"
    """Whole gradients of parameters: summed over micro-batches, or of one micro-batch and not yet reduced or added."""
    OPTIMIZER_STATE = "optimizer_state"
    """All tensors in the inner optimizer's ``state``."""
    COMMUNICATION = "communication"
    """What a collective reads or writes, and the buffers of a framework that are filled for one."""
    ACTIVATIONS = "activations"
    """What was made between the fetch of a micro-batch and its loss, and is not one of the above."""
    TEMPORARIES = "temporaries"
    """What was made between a loss and the next fetch, and is not one of the above: gradients of activations, and the
    work space of backward, clipping and the optimizer."""
    OTHER = "other"
    """What was there before the window and has no known use: tokens, buffers of the model, a framework's constants."""


def named(total: str, size: int, parts: Mapping[Category, int]) -> dict[str, int]:
    """A total (PEAK or HELD) and its parts in bytes, by the keys of a trial's ``memory``. They add up, or it raises."""
    if sum(parts.values()) != size:
        raise AssertionError(f"categories at the {total} add up to {sum(parts.values())} of {size} bytes")
    return {total: size, **{f"{total}_{category}": parts.get(category, 0) for category in Category}}


def parts(memory: Mapping[str, int], total: str) -> dict[Category, int]:
    """The parts of a total in a trial's ``memory``, in bytes; empty where they were not measured."""
    keys = {category: f"{total}_{category}" for category in Category}
    return {category: memory[key] for category, key in keys.items() if key in memory}
