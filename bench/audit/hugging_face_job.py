"""Hugging Face's Trainer in scenarios."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.audit.job import limit_of_trainer, of_scenario, trust_own_classes
from bench.audit.scenario import Fault, Reduction, Split
from bench.backends.accelerate import FSDP2
from bench.backends.deepspeed import ZeroBackend
from bench.backends.hugging_face import HuggingFaceTrainer
from bench.backends.training_job import Job
from bench.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler


class AuditedHuggingFace(HuggingFaceTrainer):
    """Hugging Face's Trainer, told of epochs and limits.

    Its checkpoints are those that it writes after an update.
    """

    def train(self, job: Job) -> None:
        self.job = of_scenario(job)
        scenario = self.job.scenario
        if len(scenario.accumulate) > 1:
            raise UnsupportedError("the Trainer has one N for the whole training")
        if scenario.epochs and scenario.max_steps:
            raise UnsupportedError("the Trainer has one end: max_steps overrides num_train_epochs")
        if scenario.fault is Fault.VALIDATION:
            raise UnsupportedError("the Trainer evaluates after an update, not within a window")
        self.counts_labels = scenario.reduction in {Reduction.COUNTED, Reduction.COUNTED_PER_RANK}
        super().train(job)

    def arguments(self, job: Job) -> dict[str, Any]:
        scenario, found = self.job.scenario, super().arguments(job)
        n = scenario.engine_accumulate
        if n and isinstance(self, ZeroBackend):
            found["deepspeed"]["gradient_accumulation_steps"] = n
        is_per_rank = scenario.reduction is Reduction.COUNTED_PER_RANK
        found["average_tokens_across_devices"] = not is_per_rank
        found["max_steps"] = limit_of_trainer(scenario.max_steps)
        return found

    def batches(self, job: Job) -> Iterable[dict[str, Tensor]]:
        """A DataLoader, which the Trainer can begin in the middle, with labels for each token."""
        from torch.utils.data import DataLoader

        splits = self.job.scenario.split is Split.FRAMEWORK
        source = self.job.loader
        if splits:
            source = self.job.whole

        def collate(samples: list[int]) -> dict[str, Tensor]:
            batch = source.collate_fn(samples)
            return {"batch": batch, "labels": batch.new_zeros(int(batch[:, 1].sum()))}

        loader = DataLoader(source.dataset, batch_sampler=source.batch_sampler, collate_fn=collate)
        if splits:
            prepared: Iterable[dict[str, Tensor]] = self.trainer.accelerator.prepare(loader)
            return prepared
        return loader

    def scheduler(self, optimizer: Optimizer, job: Job) -> LRScheduler:
        return of_scenario(job).scheduler(optimizer)

    def continue_training(self, job: Job) -> None:
        self.job = job = of_scenario(job)
        epochs = job.scenario.epochs
        if epochs is None:  # max_steps overrides it
            epochs = 1
        if job.resume:  # the Trainer skips the epochs that the checkpoint has seen
            self.trainer.args.num_train_epochs = epochs
            trust_own_classes(self)
            self.trainer.args.output_dir = str(job.resume)
        else:
            self.trainer.args.num_train_epochs = epochs - job.first_epoch
        self.resumes = bool(job.resume)
        super().continue_training(job)

    def save(self, folder: Path, seen: int, accumulate: int) -> int:
        import torch

        self.trainer.args.output_dir = str(folder)
        self.trainer._save_checkpoint(self.trainer.model_wrapped, trial=None)
        if self.job.rank == 0 and self.wrapper == FSDP2:
            # SGD has no state, which torch could not load.
            for empty in folder.glob("*/optimizer.bin"):
                empty.unlink()
        torch.distributed.barrier()
        return 0  # the Trainer skips what it has trained on
