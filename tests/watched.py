"""DeepSpeed's backends, watched from within a rank, where a framework's start could be slow without a trace."""

from __future__ import annotations

import subprocess
from typing import Any

import torch

from bench.backends.base import Backend
from bench.backends.deepspeed import DeepSpeedZero3Eager
from bench.backends.lightning import LightningDeepSpeedZero3
from bench.backends.training_job import Job


class Watched(Backend):
    """Counts processes that are started while it trains, and tensors that are written out."""

    def train(self, job: Job) -> None:
        self.counts = {"processes": 0, "tensors": 0}
        self.count(subprocess.Popen, "__init__", "processes")
        self.count(torch.Tensor, "__repr__", "tensors")
        super().train(job)  # type: ignore[safe-super]

    def count(self, owner: type, method: str, what: str) -> None:
        function = getattr(owner, method)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[what] += 1
            return function(*args, **kwargs)

        setattr(owner, method, counted)

    def reported(self) -> dict[str, int]:
        return self.counts


class WatchedZero3(Watched, DeepSpeedZero3Eager):
    name = "x-zero3"


class WatchedLightning(Watched, LightningDeepSpeedZero3):
    name = "x-lightning"
