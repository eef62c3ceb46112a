"""The scenario of a finding: a command that trains the same arithmetic in small and shows what each sample weighed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.audit.lint.arithmetic import Epochs
from bench.audit.lint.known import Version, written

MODULE = "python -m bench"
KEPT = 8
"""An N up to here is kept; a larger one becomes SMALL, with a remainder of the same share of the window."""
SMALL = 4
RANKS = 2
"""Of every scenario; the weights of the decoder are then even in number, as DeepSpeed's buckets want them."""

BF16_SUM = (
    'python -c "import torch; s = torch.tensor(256., dtype=torch.bfloat16); print((s + 1 - 256).item())" '
    "(0.0, where fp32 says 1.0)"
)


def stops(where: str) -> str:
    """For what a framework refuses by itself."""
    return f"training stops before its first step: {where}"


def deepspeed(number: Version) -> str:
    """The command that trains the scenarios of docs/versions.md on one version of DeepSpeed."""
    return f"nox -s versions -- deepspeed=={written(number)}"


def throughput(
    accumulate: int,
    log_every: int,
    window: int,
    *,
    batches: int | None = None,
    epochs: int | None = None,
    max_steps: int | None = None,
) -> str:
    """The command that shows what ThroughputMonitor logs beside what was measured.

    ``batches`` is NB; without it, epochs are whole windows. Without ``epochs`` the training is long enough for rates.
    """
    words = [f"{MODULE} throughput --accumulate {accumulate} --log-every {log_every} --window-size {window}"]
    words.append("--epoch whole" if batches is None else f"--micro-batches {batches}")
    if epochs is not None:
        words.append(f"--epochs {epochs}")
    if max_steps is not None:
        words.append(f"--max-steps {max_steps}")
    return " ".join(words)


@dataclass(frozen=True)
class Small:
    """A small run with the structure of a large one: N, and what NB leaves over."""

    accumulate: int
    num_batches: int

    @staticmethod
    def of(accumulate: int, num_batches: int | None = None) -> Small:
        """The small run for a config's numbers; whole windows where NB is not known or leaves nothing over."""
        small = accumulate if accumulate <= KEPT else SMALL
        if num_batches is None:
            return Small(small, 2 * small)
        rest = num_batches % accumulate
        if small != accumulate and rest:
            rest = min(max(round(rest * small / accumulate), 1), small - 1)
        return Small(small, rest if num_batches < accumulate else 2 * small + rest)

    def command(
        self,
        *backends: str,
        epochs: int = 2,
        drop_last: bool = False,
        max_steps: int | None = None,
        clip: float | None = None,
    ) -> str:
        """The command line."""
        words = [
            f"{MODULE} semantics --backend {','.join(backends)} --samples {self.num_batches * RANKS}",
            f"--micro-batch 1 --accumulate {self.accumulate} --epochs {epochs} --world-size {RANKS}",
        ]
        if drop_last:
            words.append("--drop-last")
        if max_steps is not None:
            words.append(f"--max-steps {max_steps}")
        if clip is not None:
            words.append(f"--clip {clip:g}")
        return " ".join(words)

    @property
    def clip(self) -> float:
        """A threshold that the mean gradient of a window exceeds and a gradient N times smaller does not.

        One weight per sample: the mean over B samples has B entries of 1/B, so its norm is 1 / sqrt(B).
        """
        return round(0.75 / math.sqrt(self.accumulate * RANKS), 3)

    def late(self) -> tuple[int, int]:
        """max_steps and epochs at which an engine that carries windows over is ahead of the trainer by a step."""
        run = Epochs(self.num_batches, self.accumulate)
        full = -(-self.accumulate // run.tail)
        return full * run.whole + 1, full + 1

    def endless(self) -> int:
        """Epochs after which an engine has made two steps."""
        return -(-2 * self.accumulate // self.num_batches)
