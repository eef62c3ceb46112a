"""Hugging Face's Trainer without the bench: ``python bare_trainer.py BACKEND,...`` prints what happened, as bare.py.

Where Accelerate knows no way to train on the CPU over gloo, its state is set up before.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState
from bare import (
    Calls,
    M,
    MicroBatchError,
    N,
    Seen,
    W,
    deepspeed_config,
    launch,
    scenarios,
    whole_weight,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler
from transformers import Trainer, TrainerCallback, TrainingArguments, default_data_collator

LONGEST = 512
FOUR, FIVE = [7, LONGEST, 64, 3], [7, LONGEST, 64, 3, 20]
WINDOWS = {"samples": 4 * N * M * W, "counted": True}
SCENARIOS: dict[str, dict[str, Any]] = {
    "partial-window": {"samples": 40, "epochs": 2},
    "max-steps-short": {"samples": 12, "max_steps": 2},
    "resume": {"samples": 32, "stops": 7},
    "clip-hard": {"samples": 32, "clip": 0.05},
    "tokens-mean": {"samples": 32, "tokens": FOUR},
    "tokens-counted": {"samples": 40, "tokens": FOUR, "counted": True},
    "tokens-counted-per-rank": {"samples": 32, "tokens": FIVE, "counted": True, "per_rank": True},
}


class Layer(nn.Module):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples))

    def forward(self, index: Tensor) -> Tensor:
        return self.weight[index]


class Means(nn.Module):
    """Returns the mean of its micro-batch, and takes no number of tokens."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.layer = Layer(samples)

    def total(self, index: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        tokens = (labels != -100).sum(-1)
        return (self.layer(index) * tokens).sum(), tokens.sum()

    def forward(self, index: Tensor, labels: Tensor) -> dict[str, Tensor]:
        summed, tokens = self.total(index, labels)
        return {"loss": summed / tokens}


class Counts(Means):
    """Divides by the tokens that the Trainer counted, as the models of transformers do."""

    def forward(self, index: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return {"loss": self.total(index, labels)[0] / kwargs["num_items_in_batch"]}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples of different numbers of tokens; raises when the micro-batch ``stops`` is fetched, once."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.fetched = given, 0

    def __len__(self) -> int:
        return int(self.given["samples"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.fetched += 1
        if self.fetched > (self.given.get("stops", sys.maxsize) - 1) * M:
            raise MicroBatchError
        tokens = self.given.get("tokens", [1])
        labels = torch.full((LONGEST,), -100)
        labels[: tokens[index % len(tokens)]] = 1
        return {"index": torch.tensor(index), "labels": labels}


class OnCPU(PartialState):
    """Ranks on the CPU that count as GPUs: FSDP takes no others."""

    def _prepare_backend(self, *args: Any, **kwargs: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    def set_device(self) -> None:
        self.device = torch.device("cpu")


def trainer(
    seen: Seen, given: dict[str, Any], kind: str, folder: str, calls: Calls | None = None
) -> Trainer:
    """Notes every update, and all that the third window calls."""
    clip = given.get("clip", 0.0)
    how: dict[str, Any] = {
        "max_steps": given.get("max_steps", -1),
        "num_train_epochs": given.get("epochs", 1),
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = str("deepspeed" in kind).lower()
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if kind != "hf-trainer-ddp":
        how["accelerator_config"] = {"use_configured_state": True}
    if "deepspeed" in kind:
        PartialState(backend="gloo")
        stage = 2 if "zero2" in kind else 3
        how["deepspeed"] = deepspeed_config(stage, given) | {"gradient_accumulation_steps": N}
    elif "fsdp2" in kind:
        OnCPU()
        how |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["Layer"]},
        }
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=M,
        gradient_accumulation_steps=N,
        max_grad_norm=clip,
        average_tokens_across_devices=not given.get("per_rank", False),
        lr_scheduler_type="constant",
        save_strategy="steps" if "stops" in given else "no",
        save_steps=1,
        logging_strategy="no",
        report_to="none",
        log_level="error",
        **how,
    )

    class NoteUpdates(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if calls and state.global_step == 3:
                calls.__exit__(None, None, None)
            parameter = next(made.model_wrapped.parameters())
            seen.look(whole_weight(made.model_wrapped) if "deepspeed" in kind else parameter)
            if calls and state.global_step == 2:
                calls.__enter__()

    class Given(Trainer):
        def get_train_dataloader(self) -> Any:
            sampler: Any = DistributedSampler(self.train_dataset, shuffle=False)
            return DataLoader(
                self.train_dataset, M, sampler=sampler, collate_fn=default_data_collator
            )

        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
            return self.optimizer

    model = (Counts if given.get("counted") else Means)(given["samples"])
    made = Given(
        model=model, args=arguments, train_dataset=Samples(given), callbacks=[NoteUpdates()]
    )
    return made


def run(seen: Seen, given: dict[str, Any], kind: str) -> None:
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    made = trainer(seen, given, kind, folder[0])
    try:
        made.train()
    except MicroBatchError:
        dist.barrier()
        for empty in Path(folder[0]).glob(
            "*/optimizer.bin"
        ):  # of SGD: torch could not load it for FSDP2
            empty.unlink(missing_ok=True)
        dist.barrier()
        made = trainer(seen, {**given, "stops": sys.maxsize}, kind, folder[0])
        made.train(resume_from_checkpoint=True)
    seen.counters["state.global_step"] = made.state.global_step
    if "deepspeed" in kind:
        seen.counters["engine.global_steps"] = made.model_wrapped.global_steps
        made.model_wrapped.destroy()


def collectives(kind: str) -> Calls:
    calls = Calls()
    trainer(Seen(WINDOWS["samples"]), WINDOWS, kind, tempfile.gettempdir(), calls).train()
    return calls


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    kinds = sys.argv[1].split(",")
    launch(
        lambda: (
            {"collectives": {kind: collectives(kind).calls for kind in kinds}}
            | scenarios(kinds, SCENARIOS, run)
        ),
        engine="deepspeed" in sys.argv[1],
    )
