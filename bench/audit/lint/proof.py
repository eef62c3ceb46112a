"""The proof of a finding: a command that trains the same arithmetic in small.

A config names no script, so few findings can be proved by ``bench audit`` on the user's own: those
on how many micro-batches the script gets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.audit.lint.lint_options import windows_of
from bench.audit.lint.version_facts import UsedVersion

MODULE = "python -m bench"
LARGEST_N, SMALL_N = 8, 4
"""A larger N becomes SMALL_N, with a remainder that is the same share of the window."""
AUDIT = f"{MODULE} audit -- accelerate launch ... train.py"
"""Counts the micro-batches of each update of the user's own script."""
RANKS = 2
"""Of every scenario; the decoder then has an even number of weights, as DeepSpeed's buckets want
it."""


def deepspeed(used: UsedVersion) -> str:
    """The command that measures one version of DeepSpeed, as in docs/versions.md."""
    return f"nox -s versions -- deepspeed=={used}"


def throughput(
    accumulate: int, log_every: int, window: int, batches: int | None = None, more: str = ""
) -> str:
    """The command that shows what ThroughputMonitor logs beside what was measured.

    Epochs of NB or of whole windows.
    """
    length = f"--micro-batches {batches}"
    if batches is None:
        length = "--epoch whole"
    return (
        f"{MODULE} throughput --accumulate {accumulate} --log-every {log_every} --window-size "
        f"{window} {length}{more}"
    )


@dataclass(frozen=True)
class SmallRun:
    """A small training with the structure of a large one: N, and what NB leaves over."""

    accumulate: int
    num_batches: int

    @staticmethod
    def of(accumulate: int, num_batches: int | None = None) -> SmallRun:
        """The small training for a config's numbers.

        Of complete windows where NB is unknown or a multiple of N.
        """
        small = SMALL_N
        if accumulate <= LARGEST_N:
            small = accumulate
        if num_batches is None:
            return SmallRun(small, 2 * small)
        rest = num_batches % accumulate
        if small != accumulate and rest:
            rest = min(max(round(rest * small / accumulate), 1), small - 1)
        if num_batches < accumulate:
            return SmallRun(small, rest)
        return SmallRun(small, 2 * small + rest)

    def command(
        self,
        *backends: str,
        epochs: int = 2,
        drop_last: bool = False,
        max_steps: int | None = None,
        clip: float | None = None,
    ) -> str:
        samples, more = self.num_batches * RANKS, ""
        if drop_last:
            more += " --drop-last"
        if max_steps is not None:
            more += f" --max-steps {max_steps}"
        if clip is not None:
            more += f" --clip {clip}"
        return (
            f"{MODULE} semantics --backend {','.join(backends)} --samples {samples} "
            "--micro-batch 1 "
            f"--accumulate {self.accumulate} --epochs {epochs} --world-size {RANKS}{more}"
        )

    @property
    def clip(self) -> float:
        """A threshold that a window's mean gradient exceeds, and one N times smaller does not.

        With one weight per sample, the mean over B samples has B entries of 1/B, and its norm is 1
        / sqrt(B).
        """
        return round(0.75 / math.sqrt(self.accumulate * RANKS), 3)

    @property
    def first_divergence(self) -> tuple[int, int]:
        """max_steps and epochs at which an engine that carries is a step ahead of the trainer."""
        plan = windows_of(self.num_batches, self.accumulate)
        full = -(-self.accumulate // plan.partial_window)
        return full * plan.full_windows + 1, full + 1

    @property
    def epochs_of_two_steps(self) -> int:
        """Epochs after which an engine that carries windows over has made two steps, at least 2."""
        return max(2, -(-2 * self.accumulate // self.num_batches))
