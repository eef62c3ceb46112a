"""The tensors that are alive in a replay, by name and category, and what was alive at the peak."""

from __future__ import annotations

from dataclasses import dataclass

HELD = ("parameters", "gradients", "optimizer_state")
"""Categories with exact formulas; gradients are exact but for the first and the last micro-batch of a window."""
ESTIMATED = ("parameters_transient", "gradients_transient", "communication", "activations", "temporaries")
"""Categories that only the replay gives: parameters gathered or cast beside those that are held; gradients of one
micro-batch before they are added or reduced; buffers of collectives; what autograd saves for the backward; work space
of loss, backward and optimizer."""


class Live:
    """Named tensors with their sizes in bytes, each alive from ``make`` to ``drop``."""

    def __init__(self) -> None:
        self.moment = ""
        """The phase of training, for ``peak_moment``."""
        self.peak = 0
        self.peak_moment = ""
        self.peak_parts: dict[str, int] = {}
        self._alive: dict[str, tuple[str, int]] = {}
        self._parts = dict.fromkeys((*HELD, *ESTIMATED), 0)
        self._total = 0

    def __contains__(self, name: str) -> bool:
        return name in self._alive

    def make(self, name: str, category: str, size: int) -> None:
        """Allocate ``size`` bytes under a name that is not in use."""
        assert name not in self._alive, f"{name} is alive already"
        self._alive[name] = (category, size)
        self._parts[category] += size
        self._total += size
        if self._total > self.peak:
            self.peak, self.peak_moment, self.peak_parts = self._total, self.moment, self.parts()

    def parts(self) -> dict[str, int]:
        """Bytes alive, by category."""
        return dict(self._parts)

    def drop(self, *names: str) -> None:
        """Free these tensors, all of which must be alive."""
        for name in names:
            category, size = self._alive.pop(name)
            self._parts[category] -= size
            self._total -= size

    def forget(self, *names: str) -> None:
        """Free those of these tensors that are alive."""
        self.drop(*(name for name in names if name in self._alive))

    def rename(self, name: str, new: str, category: str) -> None:
        """Move a tensor to another name and category."""
        assert new not in self._alive, f"{new} is alive already"
        before, size = self._alive.pop(name)
        self._alive[new] = (category, size)
        self._parts[before] -= size
        self._parts[category] += size


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes per element."""

    residual: int
    """The residual stream, from block to block."""
    norm: int
    """What a norm returns; inside, it computes in fp32."""
    product: int
    """What matrix products take and return."""

    @classmethod
    def of(cls, *, bf16: bool, autocast: bool) -> Widths:
        """Autocast keeps the residual stream and norms in fp32."""
        if not bf16:
            return cls(4, 4, 4)
        return cls(4, 4, 2) if autocast else cls(2, 2, 2)
