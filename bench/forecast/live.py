"""What is alive, by name and category, and what was alive when it was most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HELD = ("parameters", "gradients", "optimizer_state")
"""Categories that the formulas give exactly, but for gradients while the first or last micro-batch replaces them."""
ESTIMATED = ("parameters_transient", "gradients_transient", "communication", "activations", "temporaries")
"""Categories that are replayed: parameters gathered or cast for computing beside the held ones, gradients of one
micro-batch that are not yet added or reduced; buffers of collectives; what autograd saves for the backward; and the
work space of loss, backward and optimizer."""


class Live:
    """Named sizes in bytes. A name is alive from ``make`` to ``drop``."""

    def __init__(self) -> None:
        self.moment = ""
        """What is being done, for ``peak_moment``."""
        self.peak = 0
        self.peak_moment = ""
        self.peak_parts: dict[str, int] = {}
        self._alive: dict[str, tuple[str, int]] = {}
        self._parts = dict.fromkeys((*HELD, *ESTIMATED), 0)
        self._total = 0

    def __contains__(self, name: str) -> bool:
        return name in self._alive

    def make(self, name: str, category: str, size: int) -> None:
        """``size`` bytes more; nothing else may have that name."""
        assert name not in self._alive, f"{name} is alive already"
        self._alive[name] = (category, size)
        self._parts[category] += size
        self._total += size
        if self._total > self.peak:
            self.peak, self.peak_moment, self.peak_parts = self._total, self.moment, self.parts()

    def parts(self) -> dict[str, int]:
        """What is alive, in bytes by category."""
        return dict(self._parts)

    def drop(self, *names: str) -> None:
        """These are no more."""
        for name in names:
            category, size = self._alive.pop(name)
            self._parts[category] -= size
            self._total -= size

    def forget(self, names: Sequence[str]) -> None:
        """Those of these that are alive are no more."""
        self.drop(*(name for name in names if name in self._alive))

    def rename(self, name: str, new: str, category: str) -> None:
        """The same bytes, now of another name and category."""
        assert new not in self._alive, f"{new} is alive already"
        before, size = self._alive.pop(name)
        self._alive[new] = (category, size)
        self._parts[before] -= size
        self._parts[category] += size


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of an element."""

    residual: int
    """Of what goes from block to block."""
    norm: int
    """Of what a norm returns; inside it computes in fp32."""
    product: int
    """Of what matrix products take and return."""

    @classmethod
    def of(cls, *, bf16: bool, autocast: bool) -> Widths:
        """Autocast keeps the residual stream and norms in fp32."""
        if not bf16:
            return cls(4, 4, 4)
        return cls(4, 4, 2) if autocast else cls(2, 2, 2)
