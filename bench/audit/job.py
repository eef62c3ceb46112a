"""What only scenarios ask of a backend: a job that ends within a window, and how it is told.

The loops are those of ``bench.backends``. What is added here is what a user would write around
them: several epochs, a limit of steps, an N that changes, a learning-rate scheduler, a checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bench.audit.scenario import Fault, Reduction, Scenario, Split
from bench.backends.accelerate import AccelerateBackend
from bench.backends.base import Backend
from bench.backends.deepspeed import DeepSpeedZero2Eager, ZeroBackend
from bench.backends.lightning import LightningBackend
from bench.backends.torchtitan import TorchtitanEager
from bench.backends.training_job import Job, Window
from bench.errors import UnsupportedError
from bench.plan.cell import Sync

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import DataLoader

CHECKPOINT = "checkpoint"
"""Name of a framework's checkpoint in the folder of a scenario."""


@dataclass(kw_only=True)
class ScenarioJob(Job):
    """A job of a scenario.

    Its loader is iterable once per epoch, and ends at the scenario's ``limit_batches``.
    """

    scenario: Scenario
    whole: DataLoader[int]
    """A DataLoader for a framework that limits epochs itself, and splits samples itself if the
    scenario wants that."""
    first_epoch: int
    """The epoch to begin or go on with, from 0."""
    scheduler: Callable[[Optimizer], LRScheduler]
    """Makes a learning-rate scheduler that the framework is to step once per update."""
    resume: Path | None
    """The folder that ``Backend.save`` filled, to go on from."""
    validate: Callable[[nn.Module], None]
    """Evaluates a model that is in evaluation mode."""
    epoch_ended: Callable[[], None]
    """For a framework that owns the epochs, to be called where it writes an epoch's checkpoint."""

    def each_epoch(self) -> Iterable[int]:
        """The numbers of the epochs that are left."""
        if self.scenario.epochs is None:
            return itertools.count(self.first_epoch)
        return range(self.first_epoch, self.scenario.epochs)

    def each_window(self) -> Iterator[Window]:
        """The windows of the training; an epoch's incomplete window is one too."""
        num_windows = 0
        for epoch in self.each_epoch():
            left, batches = len(self.loader), iter(self.loader)
            while left > 0:
                if num_windows == self.scenario.max_steps:
                    return
                size = min(self.scenario.accumulate_in(epoch), left)
                yield Window(size, itertools.islice(batches, size))
                num_windows, left = num_windows + 1, left - size


def of_scenario(job: Job) -> ScenarioJob:
    """The job that a backend is given, which is a scenario's here."""
    assert isinstance(job, ScenarioJob)
    return job


def evaluate(backend: Backend, validate: Callable[[nn.Module], None]) -> None:
    """Evaluate the model in the middle of a training, as user code would."""
    from torch import nn, no_grad

    model = getattr(backend, "engine", getattr(backend, "model", None))
    if not isinstance(model, nn.Module):
        raise UnsupportedError(
            f"{backend.name} has no model to evaluate: keep the wrapped one in self.model"
        )
    model.eval()
    with no_grad():
        validate(model)
    model.train()


class AuditedStream(TorchtitanEager):
    """torchtitan's trainer over the epochs as one stream.

    Its ``training.steps`` are those of the naive formula.
    """

    def train(self, job: Job) -> None:
        self.job = of_scenario(job)
        scenario = self.job.scenario
        if len(scenario.accumulate) > 1:
            raise UnsupportedError("torchtitan's trainer has one N for the whole training")
        if scenario.fault is Fault.EXCEPTION:
            raise UnsupportedError(
                "torchtitan's trainer does not survive an exception: it resumes from a checkpoint"
            )
        super().train(dataclasses.replace(self.job, windows=scenario.naive_steps))

    def continue_training(self, job: Job) -> None:
        job = of_scenario(job)
        self.trainer.lr_schedulers.step = job.scheduler(self.optimizer).step
        self.num_fetched = 0
        if job.resume:
            per_epoch = job.scenario.micro_batches_per_epoch
            before = (job.first_epoch + 1) * per_epoch - len(job.loader)
            self.trainer.step = before // job.accumulate
        super().continue_training(dataclasses.replace(job, loader=self._batches(job)))

    def _batches(self, job: ScenarioJob) -> Iterator[Tensor]:
        for _ in job.each_epoch():
            for batch in job.loader:
                self.num_fetched += 1
                yield batch

    def num_tokens(self, batch: Tensor) -> int:
        """The tokens of its samples.

        If the loss is already a share of the window's, the number of samples.
        """
        if self.job.scenario.reduction is Reduction.WINDOW:
            return len(batch)
        return int(batch[:, 1].sum())

    def save(self, folder: Path, seen: int, accumulate: int) -> int:
        """torchtitan saves after a step, so that the window of the next one is fetched again."""
        step: int = self.trainer.step
        return seen - (self.num_fetched - (step - 1) * accumulate)


class AuditedEngine(DeepSpeedZero2Eager):
    """DeepSpeed's engine in a loop over epochs."""

    def train(self, job: Job) -> None:
        self.job = of_scenario(job)
        super().train(job)

    def continue_training(self, job: Job) -> None:
        # The engine tells windows apart; the other loops go by ``each_window``.
        if self.sync is Sync.EAGER:
            job = dataclasses.replace(job, loader=self._batches(of_scenario(job)))
        super().continue_training(job)

    def _batches(self, job: ScenarioJob) -> Iterator[Tensor]:
        """The micro-batches of all epochs, until the engine has taken ``max_steps``."""
        for epoch in job.each_epoch():
            if len(job.scenario.accumulate) > 1:
                # The engine has no setter for N: it divides this by micro-batch size and world
                # size.
                n = job.scenario.accumulate_in(epoch)
                self.engine.set_train_batch_size(n * job.cell.micro_batch_size * job.world_size)
            for batch in job.loader:
                yield batch
                if self.engine.global_steps == job.scenario.max_steps:
                    return

    def start(self, **arguments: Any) -> Any:
        if self.job.scenario.engine_accumulate:
            arguments["config"]["gradient_accumulation_steps"] = self.job.scenario.engine_accumulate
        engine = super().start(**arguments, lr_scheduler=self.job.scheduler(arguments["optimizer"]))
        if self.job.resume:
            trust_own_classes(self)
            engine.load_checkpoint(str(self.job.resume), tag=CHECKPOINT)
        return engine

    def save(self, folder: Path, seen: int, accumulate: int) -> int:
        self.engine.save_checkpoint(str(folder), tag=CHECKPOINT)
        if self.sync is Sync.EAGER:
            return seen
        return seen - seen % accumulate


class AuditedAccelerator(AccelerateBackend):
    """Accelerate's loop over epochs, with the limit of updates of its examples."""

    def train(self, job: Job) -> None:
        scenario_job = of_scenario(job)
        self.scenario, self.resume = scenario_job.scenario, scenario_job.resume
        self.num_updates = 0

        def optimizer(parameters: Iterable[Parameter]) -> Optimizer:
            self.inner = job.optimizer(parameters)
            return self.inner

        super().train(dataclasses.replace(job, optimizer=optimizer))

    def plugin(self, job: Job, model: nn.Module) -> dict[str, Any]:
        found = super().plugin(job, model)
        n = self.scenario.engine_accumulate
        if n and "deepspeed_plugin" in found:
            found["deepspeed_plugin"].deepspeed_config["gradient_accumulation_steps"] = n
        return found

    def prepare(self, job: Job, model: nn.Module) -> None:
        super().prepare(job, model)
        self.scheduler = None
        if self.scenario.prepared_scheduler:
            scheduler = of_scenario(job).scheduler(self.inner)
            self.scheduler = self.accelerator.prepare_scheduler(scheduler)
        if self.resume:
            trust_own_classes(self)
            self.accelerator.load_state(str(self.resume))

    def batches(self, job: Job) -> Iterator[Tensor]:
        """The micro-batches of all epochs, until ``max_steps`` updates are made."""
        scenario_job, scenario = of_scenario(job), self.scenario
        loader = scenario_job.loader
        if scenario.split is Split.FRAMEWORK:
            loader = self.accelerator.prepare_data_loader(scenario_job.whole)
        elif not scenario.own_loader:
            loader = super().batches(job)
        for epoch in scenario_job.each_epoch():
            if len(scenario.accumulate) > 1:
                self.accelerator.gradient_accumulation_steps = scenario.accumulate_in(epoch)
            for batch in loader:
                yield batch
                if self.scheduler:
                    self.scheduler.step()
                self.num_updates += self.accelerator.sync_gradients
                if self.num_updates == scenario.max_steps:
                    return

    def save(self, folder: Path, seen: int, accumulate: int) -> int:
        """A prepared loader is one micro-batch ahead of the training, unless an epoch is over."""
        self.accelerator.save_state(str(folder))
        if self.scenario.own_loader:
            return seen
        return max(0, seen - 1)


def trust_own_classes(backend: Backend) -> None:
    """Name to torch the classes in DeepSpeed's checkpoints: no others are read from a file."""
    if not isinstance(backend, ZeroBackend):
        return
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from torch.serialization import add_safe_globals

    add_safe_globals([LossScaler, ZeroStageEnum, fragment_address])


class AuditedTrainer(LightningBackend):
    """Lightning's Trainer, told of epochs and limits, and with its counters noted.

    Its checkpoints are one file each, read with ``weights_only``: the metadata of FSDP2's
    distributed ones are a pickle, which torch loads whatever stands in it.
    """

    def train(self, job: Job) -> None:
        self.job = of_scenario(job)
        self.validates = self.job.scenario.fault is Fault.VALIDATION

        def optimizer(parameters: Iterable[Parameter]) -> Any:
            made = job.optimizer(parameters)
            scheduler = {"scheduler": self.job.scheduler(made), "interval": "step"}
            return {"optimizer": made, "lr_scheduler": scheduler}

        super().train(dataclasses.replace(job, optimizer=optimizer))

    def trainer_arguments(self, job: Job) -> dict[str, Any]:
        from lightning.pytorch.callbacks import GradientAccumulationScheduler

        scenario, callbacks = self.job.scenario, [_count(self.counters, self.job.epoch_ended)]
        found = super().trainer_arguments(job)
        if len(scenario.accumulate) == 1:
            found["accumulate_grad_batches"] = job.accumulate
        else:
            found["accumulate_grad_batches"] = 1
            by_epoch = dict(enumerate(scenario.accumulate))
            callbacks.insert(0, GradientAccumulationScheduler(by_epoch))
        if self.validates:
            found |= {"val_check_interval": scenario.at, "check_val_every_n_epoch": None}
        return found | {
            "limit_train_batches": scenario.limit_batches,
            "num_sanity_val_steps": 0,
            "callbacks": callbacks,
            "max_epochs": limit_of_trainer(scenario.epochs),
            "max_steps": limit_of_trainer(scenario.max_steps),
            "use_distributed_sampler": scenario.split is Split.FRAMEWORK,
        }

    def strategy(self, job: Job) -> Strategy:
        from lightning.pytorch.strategies import ModelParallelStrategy

        strategy = super().strategy(job)
        n = self.job.scenario.engine_accumulate
        if n and isinstance(self, ZeroBackend):
            strategy.config["gradient_accumulation_steps"] = n  # type: ignore[attr-defined]
        if isinstance(strategy, ModelParallelStrategy) and self.job.resume:
            restore_sgd(strategy)
        return strategy

    def continue_training(self, job: Job, **arguments: Any) -> None:
        from torch.utils.data import DataLoader

        scenario_job = of_scenario(job)
        if self.validates:
            module: Any = self.module
            module.validation_step = lambda batch, batch_idx: scenario_job.validate(module.model)
            arguments["val_dataloaders"] = DataLoader(range(1))  # type: ignore[arg-type]
        if scenario_job.resume:
            trust_own_classes(self)
            arguments |= {"ckpt_path": scenario_job.resume / CHECKPOINT, "weights_only": True}
        super().continue_training(scenario_job, **arguments)

    def batches(self, job: Job) -> Iterable[Tensor]:
        """A DataLoader, whose sampler the Trainer can replace."""
        return cast("Iterable[Tensor]", of_scenario(job).whole)

    def save(self, folder: Path, seen: int, accumulate: int) -> int:
        self.trainer.save_checkpoint(folder / CHECKPOINT)
        return 0  # what is skipped is up to the Trainer


def limit_of_trainer(limit: int | None) -> int:
    """A limit as Lightning's Trainer and Hugging Face's take it: -1 for none."""
    if limit is None:
        return -1
    return limit


def _count(counters: dict[str, int], epoch_ended: Callable[[], None]) -> Callback:
    """A callback that notes what the Trainer foresees, and how often it calls two functions.

    These are the strategy's step and the hook before it.
    """
    from lightning.pytorch import Callback

    class Count(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            estimate = trainer.estimated_stepping_batches
            if math.isfinite(estimate):
                counters["trainer.estimated_stepping_batches"] = int(estimate)
            counters["on_before_optimizer_step"] = counters["strategy.optimizer_step"] = 0
            step: Callable[..., object] = trainer.strategy.optimizer_step

            def counted(*arguments: object, **options: object) -> object:
                counters["strategy.optimizer_step"] += 1
                return step(*arguments, **options)

            trainer.strategy.optimizer_step = counted  # type: ignore[method-assign]

        def on_before_optimizer_step(
            self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
        ) -> None:
            counters["on_before_optimizer_step"] += 1

        def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            epoch_ended()

    return Count()


def restore_sgd(strategy: ModelParallelStrategy) -> None:
    """Let ``ModelParallelStrategy`` restore SGD.

    Lightning 2.6 looks for the first entry of an empty state.
    """
    from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

    load: Callable[..., dict[str, Any]] = strategy.load_checkpoint

    def load_checkpoint(*arguments: object, **options: object) -> object:
        optimizers, strategy.optimizers = strategy.optimizers, []
        found = load(*arguments, **options)
        strategy.optimizers = optimizers
        assert strategy.model is not None
        for optimizer, state in zip(optimizers, found["optimizer_states"], strict=True):
            set_optimizer_state_dict(strategy.model, optimizer, optim_state_dict=state)
        return found

    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign,assignment]
