"""A test backend: one that is slower than another by a share that is known."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bench.backends.plain import DDPDeferred
from bench.backends.training_job import Job

if TYPE_CHECKING:
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer

DELAY = 0.05
"""The share of a step's time that is slept after it."""
OVERSLEPT_S = 2e-4
"""The end of a sleep that is spent awake: the system wakes a sleeper that much too late, much for a short step."""
SLEPT = "slept_share"
"""Setting under which a trial records the median share that was really slept."""


class Delayed(DDPDeferred):
    """``ddp-deferred``, and every rank sleeps for DELAY of the time since its last sleep after every step."""

    name = "ddp-deferred-delayed"

    def train(self, job: Job) -> None:
        awake: float | None = None
        self.shares: list[float] = []

        def sleep(*_: Any) -> None:
            nonlocal awake
            now = time.perf_counter()
            if awake is not None:
                until = now + DELAY * (now - awake)
                time.sleep(max(0.0, until - now - OVERSLEPT_S))
                while time.perf_counter() < until:
                    pass
                self.shares.append((time.perf_counter() - now) / (now - awake))
            awake = time.perf_counter()

        def delayed(parameters: Iterable[Parameter]) -> Optimizer:
            optimizer = job.optimizer(parameters)
            optimizer.register_step_post_hook(sleep)
            return optimizer

        super().train(dataclasses.replace(job, optimizer=delayed))

    def settings(self) -> dict[str, Any]:
        """With what was really slept, if there were two steps."""
        return super().settings() | {SLEPT: statistics.median(self.shares) if self.shares else None}
