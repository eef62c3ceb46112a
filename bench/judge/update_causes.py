"""Why the update of a window is wrong, read off how it relates to the right one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

NEAR_ONE = 0.05
"""Distance from 1 below which a factor is written with more digits."""
SAME_FACTOR = 0.05
"""How near a scale must be to 1/N, N, 1/W or W to be called by that name. If several fit, all are
named."""

ROUNDED = 1e-2
"""What rounding gradients to bf16 leaves unexplained is below this: 2.3e-3 was seen of one rounding
on each rank."""


class Cause(StrEnum):
    """A likely cause of an update of the wrong scale."""

    DIVIDED_TWICE = "divided twice"
    NOT_DIVIDED = "not divided"
    AVERAGED_TWICE = "averaged twice"
    SUMMED = "summed"


CAUSES: dict[Cause, str] = {
    Cause.DIVIDED_TWICE: "{n} times too small: the loss is divided by N = {n} twice",
    Cause.NOT_DIVIDED: "{n} times too large: the loss is not divided by N = {n}",
    Cause.AVERAGED_TWICE: "{w} times too small: averaged over the {w} ranks twice",
    Cause.SUMMED: "{w} times too large: summed over the {w} ranks, not averaged",
}
"""Each cause in words, with N micro-batches on each of W ranks."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an update is wrong: in words, and as data."""

    text: str
    causes: tuple[Cause, ...] = ()
    after: str = ""
    """What clipping has made of it, where the text is about the gradient before."""


@dataclass(frozen=True, slots=True)
class Clip:
    """What is known of a clipped update."""

    norm: float
    """The largest norm that an update may have."""
    gradient_norm: float
    """The backend's, before clipping."""
    unclipped_scale: float
    """How many times the reference's update the backend's is if neither clips."""

    @property
    def right_norm(self) -> float:
        """The norm of the reference's update, clipped."""
        return min(self.gradient_norm / self.unclipped_scale, self.norm)


def explain_update(
    scale: float | None,
    residual: float | None,
    accumulate: int,
    world_size: int,
    clip: Clip | None = None,
    rounding: float = SAME_FACTOR,
) -> Explanation:
    """The likeliest cause of a wrong update, from how it relates to the right one.

    ``scale`` is the least-squares factor between the two and ``residual`` what it leaves
    unexplained, of which as much as ``rounding`` may be the precision's. With ``clip``, both were
    clipped: what is f times a gradient of norm g should then be min(f g, c) / min(g, c) times the
    right update, c being the largest norm allowed, and the cause is read off f.
    """
    if scale is None or residual is None:
        return Explanation("it is not finite")
    if scale == 0:
        return Explanation("the parameters did not change in the right direction at all")
    if residual > rounding or residual > abs(scale - 1):
        why = "samples were lost, repeated or weighted unequally"
        if residual < ROUNDED:
            why = f"gradients were rounded, as to bf16, or {why}"
        return Explanation(
            f"{_times(scale)} times the right one and {100 * residual:.2g}% of it pointing "
            f"elsewhere: {why}"
        )
    if clip:
        before = explain_update(
            clip.unclipped_scale, residual, accumulate, world_size, None, rounding
        )
        after = _after_clipping(scale, clip)
        return Explanation(f"before clipping {before.text}", before.causes, after)
    factors = {
        Cause.DIVIDED_TWICE: 1 / accumulate,
        Cause.NOT_DIVIDED: accumulate,
        Cause.AVERAGED_TWICE: 1 / world_size,
        Cause.SUMMED: world_size,
    }
    likely: list[Cause] = []
    words: list[str] = []
    for cause, factor in factors.items():
        if factor != 1 and abs(scale / factor - 1) < SAME_FACTOR:
            likely.append(cause)
            words.append(CAUSES[cause].format(n=accumulate, w=world_size))
    if likely:
        return Explanation(", or ".join(words), tuple(likely))
    direction = "same" if scale > 0 else "opposite"
    return Explanation(f"{_times(scale)} times the right one, in the {direction} direction")


def _after_clipping(scale: float, clip: Clip) -> str:
    """What clipping has made of an update whose scale was wrong before."""
    how = "clipped"
    if clip.gradient_norm <= clip.norm:
        how = "too short to be clipped"
    wanted = min(clip.gradient_norm, clip.norm) / clip.right_norm
    right = ""
    if not abs(scale / wanted - 1) < SAME_FACTOR:
        right = f" and not {wanted:.3g}"
    return f"after, {_times(scale)} times{right} ({how} to {clip.norm:g})"


def _times(factor: float) -> str:
    """A factor with three digits, or as many as show that it is not 1."""
    apart = abs(factor - 1)
    if not 0 < apart < NEAR_ONE:
        return f"{factor:.3g}"
    return f"{factor:.{1 - math.floor(math.log10(apart))}f}"


def explain_clipping(scale: float | None, residual: float | None, clip: Clip) -> str:
    """The likeliest cause of an update that is right before it is clipped and wrong after."""
    if scale is None or residual is None:
        return "it is not finite"
    if residual > SAME_FACTOR or residual > abs(scale - 1):
        return (
            "right before it is clipped: its parts are clipped one by one, "
            f"not the whole to norm {clip.norm:g}"
        )
    if_only_reference_clips = clip.gradient_norm / clip.right_norm
    if abs(scale / if_only_reference_clips - 1) < SAME_FACTOR:
        return f"right but for its length: it is not clipped to norm {clip.norm:g}"
    found = scale * clip.right_norm
    return f"right but for its length: it is clipped to norm {found:.3g}, not to {clip.norm:g}"
