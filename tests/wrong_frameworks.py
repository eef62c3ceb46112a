"""Frameworks used with one mistake each, such as scripts and wrappers make, and right uses beside them.

Each is a built-in backend of the bench with the mistake in it, so that its own loop, engine and
wrapper run. In one that has no ``found_by``, nothing may be found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from bench.backends.accelerate import AccelerateDDP, AccelerateFSDP2
from bench.backends.fsdp2 import FSDP2Deferred
from bench.backends.hsdp import HSDPDeferred, HSDPDeferredAllReduce
from bench.backends.hugging_face import HuggingFaceDDP
from bench.backends.training_job import Job
from bench.judge.gates import Gate


class Misuse:
    """What is said of a backend with a mistake."""

    name: ClassVar[str]
    found_by: ClassVar[Gate | None] = None
    """The gate that must find the mistake; None for a right use."""
    words: ClassVar[str] = ""
    """What the reason must say."""


class DividesAgain:
    """The loss is divided by N, which the framework or the loop does as well."""

    found_by, words = Gate.UPDATE, "divided by N = 3 twice"

    def train(self, job: Job) -> None:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            return job.loss(model, batch) / job.accumulate

        super().train(dataclasses.replace(job, loss=loss))  # type: ignore[misc]


class AccelerateDividesAgain(DividesAgain, Misuse, AccelerateDDP):
    """The script divides by N, and so does ``accelerator.backward``."""

    name = "accelerate-divides-again"


class AccelerateFSDP2DividesAgain(DividesAgain, Misuse, AccelerateFSDP2):
    name = "accelerate-fsdp2-divides-again"


class AccelerateForgetsN(Misuse, AccelerateDDP):
    """``gradient_accumulation_steps`` is not handed to the ``Accelerator``."""

    name, found_by = "accelerate-without-n", Gate.STEPS

    def train(self, job: Job) -> None:
        super().train(dataclasses.replace(job, accumulate=1))


class AccelerateStepsOutside(Misuse, AccelerateDDP):
    """The optimizer is not the prepared one, so it steps at every micro-batch."""

    name, found_by = "accelerate-optimizer-not-prepared", Gate.STEPS

    def prepare(self, job: Job, model: nn.Module) -> None:
        super().prepare(job, model)
        self.optimizer = self.optimizer.optimizer


class ClearsAtEveryMicroBatch:
    """An optimizer whose gradients are cleared where the prepared one would wait for the window's end."""

    def __init__(self, prepared: Any) -> None:
        self._prepared = prepared

    def step(self) -> None:
        self._prepared.step()

    def zero_grad(self) -> None:
        self._prepared.optimizer.zero_grad()


class AccelerateClearsEach(Misuse, AccelerateDDP):
    """Only the last micro-batch of a window is in its update."""

    name, found_by = "accelerate-clears-at-every-micro-batch", Gate.UPDATE

    def prepare(self, job: Job, model: nn.Module) -> None:
        super().prepare(job, model)
        self.optimizer: Any = ClearsAtEveryMicroBatch(self.optimizer)


class AccelerateClearsAtEnd(Misuse, AccelerateDDP):
    """A right use: gradients are cleared again after the prepared optimizer has cleared them."""

    name = "sound-accelerate-clears-once-more"

    def prepare(self, job: Job, model: nn.Module) -> None:
        super().prepare(job, model)
        prepared, accelerator = self.optimizer, self.accelerator

        class Clears(ClearsAtEveryMicroBatch):
            def zero_grad(self) -> None:
                if accelerator.sync_gradients:
                    super().zero_grad()

        self.optimizer = Clears(prepared)


class TrainerDividesAgain(DividesAgain, Misuse, HuggingFaceDDP):
    """The model's loss is a mean over N, and the Trainer takes it for a share of the window."""

    name = "hf-trainer-divides-again"


class TrainerModelIgnoresCount(Misuse, HuggingFaceDDP):
    """The model says that it takes ``num_items_in_batch``, and does not divide by it."""

    name, found_by, words = "hf-trainer-count-ignored", Gate.UPDATE, "not divided by N = 3"

    def train(self, job: Job) -> None:
        def loss(model: nn.Module, batch: Tensor) -> Tensor:
            return job.loss(model, batch) * job.accumulate

        super().train(dataclasses.replace(job, loss=loss))


class TrainerForgetsN(Misuse, HuggingFaceDDP):
    """``gradient_accumulation_steps`` is left at its default."""

    name, found_by = "hf-trainer-without-n", Gate.STEPS

    def arguments(self, job: Job) -> dict[str, Any]:
        return super().arguments(job) | {"gradient_accumulation_steps": 1}


class TrainerCountsPerRank(Misuse, HuggingFaceDDP):
    """A right use where all samples have the same number of labels: each rank counts its own."""

    name = "sound-hf-trainer-counts-per-rank"

    def arguments(self, job: Job) -> dict[str, Any]:
        return super().arguments(job) | {"average_tokens_across_devices": False}


class ReplicasNotReduced(Misuse, HSDPDeferredAllReduce):
    """The all-reduce across replicas is turned off for all but the last micro-batch, and never on again.

    FSDP2 then keeps the sums of its reduce-scatters to itself, so that no parameter gets a gradient.
    """

    name, found_by = "hsdp-replicas-not-reduced", Gate.UPDATE

    def continue_training(self, job: Job) -> None:
        keep_off(self.model, "set_requires_all_reduce")
        super().continue_training(job)


class ReplicasNeverSynced(Misuse, HSDPDeferred):
    """``set_requires_gradient_sync(True)`` is missing, so that no shard gets a gradient."""

    name, found_by = "hsdp-never-synced", Gate.UPDATE

    def continue_training(self, job: Job) -> None:
        keep_off(self.model, "set_requires_gradient_sync")
        super().continue_training(job)


class NeverSynced(Misuse, FSDP2Deferred):
    """The same under FSDP2 alone."""

    name, found_by = "fsdp2-never-synced", Gate.UPDATE

    def continue_training(self, job: Job) -> None:
        keep_off(self.model, "set_requires_gradient_sync")
        super().continue_training(job)


class ReplicasDivideAgain(DividesAgain, Misuse, HSDPDeferred):
    name = "hsdp-divides-again"


class WithoutLastBackward(Misuse, HSDPDeferred):
    """A right use: ``set_is_last_backward`` is not needed for the result."""

    name = "sound-hsdp-without-last-backward"

    def continue_training(self, job: Job) -> None:
        keep(self.model, "set_is_last_backward", True)
        super().continue_training(job)


def keep_off(model: Any, setter: str) -> None:
    """Let a setter of FSDP2 only ever turn off."""
    keep(model, setter, False)


def keep(model: Any, setter: str, value: bool) -> None:
    """Let a setter of FSDP2 set only this value."""
    original: Callable[[bool], None] = getattr(model, setter)
    setattr(model, setter, lambda _: original(value))


MISUSES: dict[str, Any] = {kind.name: kind for kind in Misuse.__subclasses__()}
