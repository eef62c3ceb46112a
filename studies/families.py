"""Names of backends that do the same, told by the patterns that they match."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

PATTERNS = (
    "accelerate-*",
    "accelerate-deepspeed-*",
    "accelerate-fsdp2*",
    "ddp-*",
    "deepspeed-*",
    "deepspeed-*-deferred",
    "deepspeed-*-eager",
    "deepspeed-zero2-*",
    "deepspeed-zero3-*",
    "deepspeed-zero?-offload",
    "fsdp2-*",
    "fsdp2*-deferred",
    "fsdp2*-eager",
    "hf-trainer-*",
    "hf-trainer-deepspeed-*",
    "hsdp-*",
    "hsdp-deferred*",
    "lightning-*",
    "lightning-deepspeed-*",
    "lightning-deepspeed-*-corrected",
    "lightning-deepspeed-zero2*",
    "lightning-deepspeed-zero3*",
    "lightning-deepspeed-zero?",
)


def together(backends: Sequence[str], every: Sequence[str]) -> list[str]:
    """The backends in order, all among ``every`` that match a pattern as one: ```accelerate-*```; the widest first."""
    names, left = dict.fromkeys(backends), set(backends)
    members = {
        pattern: [name for name in every if fnmatchcase(name, pattern)] for pattern in PATTERNS
    }
    for pattern in sorted(PATTERNS, key=lambda pattern: -len(members[pattern])):
        matching = members[pattern]
        if len(matching) > 1 and left.issuperset(matching):
            left.difference_update(matching)
            names = dict.fromkeys(f"`{pattern}`" if name in matching else name for name in names)
    return list(names)
