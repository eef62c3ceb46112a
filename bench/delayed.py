"""A test backend: one that is slower than another by a share that is known."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from bench.backends.base import Job
from bench.backends.plain import DDPDeferred

if TYPE_CHECKING:
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer

DELAY = 0.05
"""Of a step's time, slept after each of them."""


class Delayed(DDPDeferred):
    """``ddp-deferred``, and every rank sleeps for DELAY of the time since its last sleep after every step."""

    name = "ddp-deferred-delayed"

    def train(self, job: Job) -> None:
        awake: float | None = None

        def sleep(*_: Any) -> None:
            nonlocal awake
            if awake is not None:
                time.sleep(DELAY * (time.perf_counter() - awake))
            awake = time.perf_counter()

        def delayed(parameters: Iterable[Parameter]) -> Optimizer:
            optimizer = job.optimizer(parameters)
            optimizer.register_step_post_hook(sleep)
            return optimizer

        super().train(dataclasses.replace(job, optimizer=delayed))
