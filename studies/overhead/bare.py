"""Training loops without the bench, on the CPU.

Of the bench they have only model, weights, tokens and loss (``LlamaWorkload``). A window lasts from when its turn comes
until the first micro-batch of the next is asked for, so it has N micro-batches, the update and the zeroing of
gradients. Garbage is collected as Python does by default; the bench restricts that to what a trial has made
(``bench.launch.preload``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.workload import WorkloadSpec
from bench.workload.llama import LlamaWorkload

RANKS, N, MICRO_BATCH, LENGTH, SEED, LEARNING_RATE = 2, 2, 2, 64, 0, 1e-3
WARM_UP = 10
"""Windows that do not count. DDP takes statistics of its first ten, and of every 100th, which medians ignore."""


def key(phase: int, turn: int) -> str:
    """The key of the store that says whose turn it is."""
    return f"{phase} turn {turn}"


class Turns:
    """The micro-batches of one side of a comparison: each of its windows begins when the other side has paused.

    The first side trains windows 0, 3, 4, 7, 8 and so on of both together, the second side the others. The store has a
    key ``<phase> turn <t>`` as soon as all ranks have ended the turn before.
    """

    def __init__(self, batches: Any, port: int, side: int, phase: int) -> None:
        self._batches, self._side, self._phase = batches, side, phase
        self._store = dist.TCPStore("127.0.0.1", port)
        self.began: list[float] = []
        self.ended: list[float] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        for index, batch in enumerate(self._batches):
            if index % N == 0:
                self.end()
                self._store.wait([key(self._phase, self._turn(len(self.began)))])
                self.began.append(time.perf_counter())
            yield batch

    def end(self) -> None:
        """End the window that has begun, if any."""
        if len(self.ended) < len(self.began):
            self.ended.append(time.perf_counter())
            turn = self._turn(len(self.ended) - 1)
            if self._store.add(f"{self._phase} ended {turn}", 1) == RANKS:
                self._store.set(key(self._phase, turn + 1), "")

    def seconds(self) -> list[float]:
        return [end - begin for begin, end in zip(self.began, self.ended, strict=True)]

    def _turn(self, window: int) -> int:
        return 2 * window + ((window + self._side) % 2)


class Loop:
    """What all loops share: model, micro-batches and loss."""

    def __init__(self, turns: Turns, workload: LlamaWorkload) -> None:
        self.turns, self.workload = turns, workload
        self.model = workload.model()
        self.losses: list[Tensor] = []

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss = self.workload.loss(model, batch)
        self.losses.append(loss.detach())
        return loss

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)


def ddp(loop: Loop) -> None:
    """DDP under ``no_sync`` but for the last micro-batch of a window."""
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(loop.model, gradient_as_bucket_view=True)
    optimizer = loop.optimizer(model)
    for index, batch in enumerate(loop.turns, start=1):
        last = index % N == 0
        with nullcontext() if last else model.no_sync():
            (loop.loss(model, batch) / N).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def fsdp2(loop: Loop) -> None:
    """``fully_shard`` on each block and the root; the last micro-batch of a window reduces."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = loop.model
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in loop.workload.blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = loop.optimizer(model)
    for index, batch in enumerate(loop.turns, start=1):
        last = index % N == 0
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        (loop.loss(model, batch) / N).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def deepspeed(loop: Loop) -> None:
    """ZeRO stage 2 as documented: ``backward`` and ``step`` of the engine for every micro-batch."""
    import deepspeed.ops
    from deepspeed import comm
    from deepspeed.utils.logging import logger

    logger.setLevel("ERROR")
    os.environ["LOCAL_SIZE"] = str(RANKS)
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False  # would be compiled
    comm.init_distributed(dist_init_required=False)
    bucket = sum(parameter.numel() for parameter in loop.model.parameters())  # less than 25 MiB
    config = {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": N,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            "stage": 2,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": bucket,
            "allgather_bucket_size": bucket,
        },
    }
    arguments = {"model": loop.model, "optimizer": loop.optimizer(loop.model), "config": config}
    engine, *_ = deepspeed.initialize(dist_init_required=False, **arguments)
    for batch in loop.turns:
        engine.backward(loop.loss(engine, batch))
        engine.step()


def lightning(loop: Loop) -> None:
    """Lightning's Trainer with its own accumulation, on DDP."""
    import logging

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = loop.model

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return loop.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return loop.optimizer(self.model)

    for part in ("pytorch", "fabric"):
        logging.getLogger(f"lightning.{part}").setLevel(logging.ERROR)
    trainer = Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        precision="32-true",
        accumulate_grad_batches=N,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), train_dataloaders=loop.turns)


LOOPS: dict[str, Callable[[Loop], None]] = {
    "ddp-deferred": ddp,
    "fsdp2-deferred": fsdp2,
    "deepspeed-zero2-eager": deepspeed,
    "lightning-ddp": lightning,
}
"""By the name of the bench's backend that does the same."""


def batches(tokens: Tensor, rank: int) -> list[Tensor]:
    """The micro-batches of a rank: number j of all ranks together is samples j M to (j + 1) M - 1."""
    return list(tokens.split(MICRO_BATCH))[rank::RANKS]


def means(losses: Sequence[Tensor]) -> list[float]:
    return torch.stack(list(losses)).double().view(-1, N).mean(dim=1).tolist()


def train(backend: str, rank: int, windows: int, turns: Callable[[Any], Turns]) -> dict[str, list[float]]:
    """Train the windows in turn with another group: by window, seconds, and mean losses in nats per token."""
    workload = LlamaWorkload(WorkloadSpec(model="tiny", sequence_length=LENGTH, seed=SEED, corpus=None))
    tokens = workload.data(windows * N * MICRO_BATCH * RANKS)
    loop = Loop(turns(batches(tokens, rank)), workload)
    LOOPS[backend](loop)
    loop.turns.end()
    return {"seconds": loop.turns.seconds(), "losses": means(loop.losses)}
