"""What a sum in bf16 loses."""

from __future__ import annotations

EXACT = 256
"""Equal addends that bf16 sums without error: 8 significant bits."""


def effect(accumulate: int) -> str:
    """What becomes of the sum of ``accumulate`` gradients that are added in bf16."""
    if accumulate > EXACT:
        return f"{accumulate} equal gradients sum to {EXACT}/{accumulate} = {EXACT / accumulate:.3g} of the truth"
    return f"the sum may be off by {accumulate - 1} x 2^-9 = {(accumulate - 1) / 512:.2%}"
