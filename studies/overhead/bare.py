"""Training loops without the bench, on the CPU, and two of them on a GPU.

Of the bench they have only model, weights, tokens and loss (``LlamaWorkload``, ``tensors``). A window lasts from when
its turn comes until the first micro-batch of the next is asked for, so it has N micro-batches, the update and the
zeroing of gradients; on a GPU it ends when all of that has been computed. Garbage is collected as Python does by
default; the bench restricts that to what a trial has made (``bench.launch.preload``).
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

from bench.measure.tensors import tensors
from bench.plan.cell import Cell
from bench.workload import WorkloadSpec
from bench.workload.llama import LlamaWorkload

RANKS, N, MICRO_BATCH, LENGTH, SEED, LEARNING_RATE = 2, 2, 2, 64, 0, 1e-3
"""Of what is trained on the CPU; seed and learning rate on a GPU too."""
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

    def __init__(self, batches: Any, cell: Cell, port: int, side: int, phase: int) -> None:
        self._batches, self._cell, self._side, self._phase = batches, cell, side, phase
        self._store = dist.TCPStore("127.0.0.1", port)
        self.began: list[float] = []
        self.ended: list[float] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Tensor]:
        for index, batch in enumerate(self._batches):
            if index % self._cell.accumulate == 0:
                self.end()
                self._store.wait([key(self._phase, self._turn(len(self.began)))])
                self.began.append(time.perf_counter())
            yield batch

    def end(self) -> None:
        """End the window that has begun, if any."""
        if len(self.ended) < len(self.began):
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # or the other side would begin while this one computes
            self.ended.append(time.perf_counter())
            turn = self._turn(len(self.ended) - 1)
            if self._store.add(f"{self._phase} ended {turn}", 1) == self._cell.world_size:
                self._store.set(key(self._phase, turn + 1), "")

    def seconds(self) -> list[float]:
        return [end - begin for begin, end in zip(self.began, self.ended, strict=True)]

    def _turn(self, window: int) -> int:
        return 2 * window + ((window + self._side) % 2)


class Loop:
    """What all loops share: model, micro-batches and loss."""

    def __init__(
        self, turns: Turns, workload: LlamaWorkload, cell: Cell, device: torch.device
    ) -> None:
        self.turns, self.workload, self.cell, self.device = turns, workload, cell, device
        made = tensors(cell, device)
        self.model = made.place(made.model(workload.model))
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
        last = index % loop.cell.accumulate == 0
        with nullcontext() if last else model.no_sync():
            (loop.loss(model, batch) / loop.cell.accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def fsdp2(loop: Loop) -> None:
    """``fully_shard`` on each block and the root; the last micro-batch of a window reduces."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = loop.model
    mesh = init_device_mesh(loop.device.type, (loop.cell.world_size,))
    for block in loop.workload.blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    optimizer = loop.optimizer(model)
    for index, batch in enumerate(loop.turns, start=1):
        last = index % loop.cell.accumulate == 0
        model.set_requires_gradient_sync(last)
        model.set_is_last_backward(last)
        (loop.loss(model, batch) / loop.cell.accumulate).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def deepspeed(loop: Loop) -> None:
    """ZeRO stage 2 as documented: ``backward`` and ``step`` of the engine for every micro-batch."""
    import deepspeed.ops
    from deepspeed import comm
    from deepspeed.utils.logging import logger

    logger.setLevel("ERROR")
    os.environ["LOCAL_SIZE"] = str(loop.cell.world_size)
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = (
        False  # would be compiled
    )
    comm.init_distributed(dist_init_required=False)
    bucket = sum(parameter.numel() for parameter in loop.model.parameters())  # less than 25 MiB
    config = {
        "train_micro_batch_size_per_gpu": loop.cell.micro_batch_size,
        "gradient_accumulation_steps": loop.cell.accumulate,
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
        devices=loop.cell.world_size,
        strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
        precision="32-true",
        accumulate_grad_batches=loop.cell.accumulate,
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


def batches(tokens: Tensor, rank: int, cell: Cell) -> list[Tensor]:
    """The micro-batches of a rank: number j of all ranks together is samples j M to (j + 1) M - 1."""
    return list(tokens.split(cell.micro_batch_size))[rank :: cell.world_size]


def means(losses: Sequence[Tensor], accumulate: int) -> list[float]:
    return torch.stack(list(losses)).double().cpu().view(-1, accumulate).mean(dim=1).tolist()


def train(
    backend: str, rank: int, cell: Cell, device: torch.device, turns: Callable[[Any], Turns]
) -> dict[str, list[float]]:
    """Train the windows of a cell in turn with another group: by window, seconds, and mean losses in nats per token."""
    spec = WorkloadSpec(
        model=cell.model, sequence_length=cell.sequence_length, seed=cell.seed, corpus=None
    )
    workload = LlamaWorkload(spec)
    tokens = workload.data(cell.windows * cell.global_batch_size).to(device)
    loop = Loop(turns(batches(tokens, rank, cell)), workload, cell, device)
    LOOPS[backend](loop)
    loop.turns.end()
    return {"seconds": loop.turns.seconds(), "losses": means(loop.losses, cell.accumulate)}
