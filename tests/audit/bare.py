"""The newer scenarios written without the bench; ``python bare.py torch|torchtitan|deepspeed|lightning`` prints them.

One weight per sample and SGD with learning rate 1, so an update lowers each weight by its sample's coefficient. Prints
JSON by scenario and backend: the coefficients of every update by sample, the counters, and the inner steps of a load.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import ScriptObject, Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, DistributedSampler

W, M, N, EPOCHS = 2, 2, 4, 2
SCENARIOS: dict[str, dict[str, Any]] = {
    "keep-last": {"samples": 37},
    "sampler-drop-last": {"samples": 37, "sampler_drop_last": True},
    "limit-batches": {"samples": 40, "limit": 6},
    "resume-epoch": {"samples": 40, "checkpoint": True},
    "exception-epoch-2": {"samples": 32, "raises": 6},  # in the second epoch
    "validation": {"samples": 32, "validate": 3},
    "clip-hard": {"samples": 32, "clip": 0.05, "epochs": 1},
}


class Weights(nn.Module):
    def __init__(self, samples: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(samples))

    def forward(self, batch: Tensor) -> Tensor:
        return self.weight[batch].mean()


class Seen:
    """The updates of one training."""

    def __init__(self, samples: int) -> None:
        self.before = torch.zeros(samples)
        self.updates: list[dict[str, float]] = []
        self.counters: dict[str, int] = {}
        self.inner_steps = 0

    def look(self, weight: Tensor) -> None:
        """Note an update if the weights have changed."""
        after = weight.full_tensor() if isinstance(weight, DTensor) else weight
        after = after.detach().float().cpu().clone()
        change, self.before = self.before - after, after
        if used := change.nonzero().flatten().tolist():
            self.updates.append({str(sample): change[sample].item() for sample in used})


def loader(given: dict[str, Any]) -> DataLoader[int]:
    data: Any = range(given["samples"])
    dropping = given.get("sampler_drop_last", False)
    return DataLoader(data, M, sampler=DistributedSampler(data, shuffle=False, drop_last=dropping))


class MicroBatchError(RuntimeError):
    pass


def epochs_of(given: dict[str, Any]) -> Iterator[tuple[int, Iterator[Tensor], int]]:
    """Epoch, its micro-batches and their number; the second epoch comes again if it raises."""
    whole = loader(given)
    length = min(len(whole), given.get("limit", len(whole)))
    numbers = [0, 1, 1] if "raises" in given else range(given.get("epochs", EPOCHS))
    for epoch in numbers:
        yield epoch, islice(iter(whole), length), length


def by_hand(seen: Seen, given: dict[str, Any], kind: str) -> None:
    """DDP with ``no_sync``, or FSDP2 with deferred reduction; the optimizer's state goes through torch's checkpoint."""

    def build() -> tuple[Any, torch.optim.Optimizer]:
        model: Any = Weights(given["samples"])
        if kind == "ddp-deferred":
            model = DistributedDataParallel(model)
        else:
            model = fully_shard(model, mesh=init_device_mesh("cpu", (W,)))
        return model, torch.optim.SGD(model.parameters(), lr=1.0)

    model, optimizer = build()
    number, is_aborted = 0, False
    for epoch, batches, length in epochs_of(given):
        if epoch == 1 and given.get("checkpoint"):
            saved, options = (
                {name: value.clone() for name, value in model.state_dict().items()},
                optimizer.param_groups,
            )
            model, optimizer = build()
            model.load_state_dict(saved)
            optimizer.param_groups[0]["lr"] = options[0]["lr"]
            optimizer.register_step_post_hook(
                lambda *_: setattr(seen, "inner_steps", seen.inner_steps + 1)
            )
            if kind != "ddp-deferred":
                template = get_optimizer_state_dict(model, optimizer)
                set_optimizer_state_dict(model, optimizer, template)
            seen.counters["inner_steps_of_loading"] = seen.inner_steps
        try:
            for index, batch in enumerate(batches):
                size = min(N, length - index // N * N)
                is_last = index % N == size - 1
                if kind == "ddp-deferred":
                    model.require_backward_grad_sync = is_last
                else:
                    model.set_requires_gradient_sync(is_last)
                loss = model(batch)
                if epoch == 1 and index + 1 == given.get("raises") and not is_aborted:
                    is_aborted = True
                    raise MicroBatchError
                (loss / size).backward()
                if is_last:
                    if "clip" in given:
                        nn.utils.clip_grad_norm_(model.parameters(), given["clip"])
                    optimizer.step()
                    optimizer.zero_grad()
                    seen.look(next(model.parameters()))
                number += 1
                if number % given.get("validate", sys.maxsize) == 0:
                    model.eval()
                    with torch.no_grad():
                        model(torch.tensor([0]))
                    model.train()
        except MicroBatchError:
            optimizer.zero_grad()


def titan_trainer() -> Any:
    """The module ``torchtitan.trainer`` on a machine without a GPU and without Triton."""
    torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
    sys.modules["torchtitan.distributed.minimal_async_ep"] = MagicMock()
    from torchtitan import trainer

    trainer.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)
    trainer.dist_utils.set_pg_timeouts = lambda **_: (
        None
    )  # a barrier with a device number, for NCCL alone
    return trainer


def torchtitan(seen: Seen, given: dict[str, Any], kind: str) -> None:
    """torchtitan's own Trainer, its ``__init__`` left out; all epochs are one stream, whose number of steps it is told.

    The loss is the sum over tokens, here one per sample, over the number of tokens in the window on all ranks.
    """
    from torchtitan.distributed.fsdp import disable_fsdp_gradient_division

    titan = titan_trainer()

    class PerSample(Weights):
        def forward(self, batch: Tensor) -> Tensor:
            return self.weight[batch]

    trainer = titan.Trainer.__new__(titan.Trainer)
    trainer.parallel_dims = dims = titan.ParallelDims(
        dp_replicate=1,
        dp_shard=W,
        cp=1,
        tp=1,
        pp=1,
        ep=1,
        world_size=W,
        spmd_backend="partial_dtensor",
    )
    model: Any = fully_shard(PerSample(given["samples"]), mesh=dims.get_mesh("fsdp"))
    disable_fsdp_gradient_division(model)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_post_hook(lambda *_: seen.look(next(model.parameters())))
    config = titan.Trainer.Config(
        training=titan.TrainingConfig(
            steps=math.ceil(given["samples"] / (W * M * N)) * given.get("epochs", EPOCHS),
            max_norm=given.get("clip", 1e9),
            disable_cuda_graphs=True,
        ),
        parallelism=titan.ParallelismConfig(spmd_backend="partial_dtensor"),
    )
    parts = {
        "config": config,
        "model_parts": [model],
        "optimizers": optimizer,
        "lr_schedulers": MagicMock(),
        "metrics_processor": MagicMock(should_log=lambda step: False, ntokens_since_last_log=0),
        "checkpointer": MagicMock(),
        "gc_handler": MagicMock(),
        "train_context": contextlib.nullcontext,
        "loss_fn": lambda losses, labels, tokens: (losses.sum() / tokens, {}),
        "fwd_bwd_fn": trainer._forward_backward_body,
        "device": torch.device("cpu"),
        "model_config": None,
        "gradient_accumulation_steps": N,
        "num_pipeline_parallel_microbatches": 1,
        "step": 0,
        "ntokens_seen": 0,
        "dataloader": (
            ({"input": b}, torch.ones_like(b))
            for _, batches, _ in epochs_of(given)
            for b in batches
        ),
    }
    vars(trainer).update(parts)
    trainer.train()
    seen.counters["trainer.step"] = trainer.step


def deepspeed_config(stage: int, given: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": M,
        "gradient_clipping": given.get("clip", 0.0),
        "zero_allow_untested_optimizer": True,
        # A bucket as small as the model: with the default, the hooks that an exception leaves behind never reduce.
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 40,
            "stage3_param_persistence_threshold": 0,
        },
    }


def whole_weight(engine: Any) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    return safe_get_full_fp32_param(next(engine.module.parameters()))


def engine(seen: Seen, given: dict[str, Any], kind: str) -> None:
    """DeepSpeed as documented; the exception is caught and the epoch trained again."""
    import deepspeed

    stage = 2 if "zero2" in kind else 3

    def build() -> Any:
        model = Weights(given["samples"])
        config = deepspeed_config(stage, given) | {"gradient_accumulation_steps": N}
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )[0]

    trained = build()
    number, is_aborted = 0, False
    for epoch, batches, _ in epochs_of(given):
        if epoch == 1 and given.get("checkpoint"):
            folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(folder)
            trained.save_checkpoint(folder[0], tag="epoch")
            trained = build()
            trained.load_checkpoint(folder[0], tag="epoch")
        with contextlib.suppress(MicroBatchError):
            for index, batch in enumerate(batches):
                loss = trained(batch)
                if epoch == 1 and index + 1 == given.get("raises") and not is_aborted:
                    is_aborted = True
                    raise MicroBatchError
                trained.backward(loss)
                trained.step()
                seen.look(whole_weight(trained))
                number += 1
                if number % given.get("validate", sys.maxsize) == 0:
                    trained.eval()
                    with torch.no_grad():
                        trained(torch.tensor([0]))
                    trained.train()
    seen.counters["engine.global_steps"] = trained.global_steps
    trained.destroy()


def lightning(seen: Seen, given: dict[str, Any], kind: str) -> None:
    """The Trainer; an exception leaves ``fit``, which is called again. None where that fails."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy

    class OnCPU(DeepSpeedStrategy):
        """Without the check for CUDA."""

        def setup_environment(self) -> None:
            DDPStrategy.setup_environment(self)

        def setup_distributed(self) -> None:
            self.parallel_devices = [torch.device("cpu", 0)] * self.num_processes
            self.set_world_ranks()
            self._init_deepspeed_distributed()

        def _get_process_group_backend(self) -> str:
            return "gloo"

    class Module(LightningModule):
        is_aborted = False

        def __init__(self) -> None:
            super().__init__()
            self.model = Weights(given["samples"])

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss: Tensor = self.model(batch)
            if (
                self.current_epoch == 1
                and batch_idx + 1 == given.get("raises")
                and not self.is_aborted
            ):
                self.is_aborted = True
                raise MicroBatchError
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.model(batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    class NoteUpdates(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            is_engine = "deepspeed" in kind
            seen.look(
                whole_weight(trainer.strategy.model)
                if is_engine
                else next(trainer.model.parameters())
            )
            seen.counters["trainer.global_step"] = trainer.global_step
            if is_engine:
                seen.counters["engine.global_steps"] = trainer.strategy.model.global_steps

        def on_train_epoch_start(self, trainer: Any, *_: Any) -> None:
            if given.get("checkpoint") and trainer.current_epoch == 1 and trainer.ckpt_path is None:
                raise MicroBatchError  # the checkpoint of the first epoch is written

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)

    def trainer() -> Any:
        stage = 2 if "zero2" in kind else 3
        strategy = (
            OnCPU(config=deepspeed_config(stage, given)) if "deepspeed" in kind else DDPStrategy()
        )
        saves = (
            [ModelCheckpoint(folder[0], filename="first", save_top_k=-1)]
            if given.get("checkpoint")
            else []
        )
        validation = {"val_check_interval": given.get("validate"), "check_val_every_n_epoch": None}
        return Trainer(
            accelerator="cpu",
            devices=W,
            strategy=strategy,
            max_epochs=given.get("epochs", EPOCHS),
            accumulate_grad_batches=N,
            gradient_clip_val=given.get("clip"),
            limit_train_batches=given.get("limit"),
            use_distributed_sampler=False,
            callbacks=[NoteUpdates(), *saves],
            enable_checkpointing=bool(saves),
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            **(validation if "validate" in given else {}),
        )

    validation = DataLoader(range(1)) if "validate" in given else None
    module, first = Module(), trainer()
    try:
        first.fit(module, loader(given), validation)
    except MicroBatchError:
        if given.get("checkpoint"):
            dist.barrier()
            path = str(next(Path(folder[0]).glob("first*.ckpt")))
            trainer().fit(Module(), loader(given), ckpt_path=path)
        else:
            with contextlib.suppress(
                AssertionError, AttributeError
            ):  # DeepSpeed's, after the exception
                first.fit(module, loader(given))


KINDS: dict[str, tuple[Any, ...]] = {
    "torch": (by_hand, "ddp-deferred", "fsdp2-deferred"),
    "torchtitan": (torchtitan, "torchtitan-eager"),
    "deepspeed": (engine, "deepspeed-zero2-eager", "deepspeed-zero3-eager"),
    "lightning": (
        lightning,
        "lightning-ddp",
        "lightning-deepspeed-zero2",
        "lightning-deepspeed-zero3",
    ),
}
"""Who trains, and the backends."""


def scenarios(
    kinds: Any, given: dict[str, dict[str, Any]], train: Callable[..., None]
) -> dict[str, Any]:
    """What each kind computes and counts, by scenario."""
    found: dict[str, Any] = {}
    for kind in kinds:
        for name, scenario in given.items():
            seen = Seen(scenario["samples"])
            train(seen, scenario, kind)
            found.setdefault(name, {})[kind] = {"updates": seen.updates, "reported": seen.counters}
    return found


class Calls(TorchDispatchMode):
    """Collectives by operator, and where asked by the description of their process group."""

    def __init__(self, *, by_group: bool = False) -> None:
        super().__init__()
        self.by_group, self.calls = by_group, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            group = (
                next(arg for arg in args if isinstance(arg, ScriptObject))
                if self.by_group
                else None
            )
            self.calls[
                func._opname
                + (f" {dist.ProcessGroup.unbox(group).group_desc}" if group is not None else "")
            ] += 1
        return func(*args, **(kwargs or {}))


def launch(work: Callable[[], dict[str, Any]], *, engine: bool, ranks: int = W) -> None:
    """Print what ``work`` returns on the first rank of some over gloo, forked from here; ``engine``: of DeepSpeed."""
    torch.set_num_threads(1)
    if engine:
        import deepspeed  # noqa: F401 - once, before the fork
    with tempfile.TemporaryDirectory() as temporary:
        store = str(Path(temporary) / "store")
        torch.multiprocessing.start_processes(
            _rank, (store, ranks, work, engine), nprocs=ranks, start_method="fork"
        )
        print(Path(store + ".json").read_text())


def _rank(
    number: int, store: str, ranks: int, work: Callable[[], dict[str, Any]], engine: bool
) -> None:
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), f"{number}")
    # Without LOCAL_SIZE, DeepSpeed calls numactl.
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE"), f"{ranks}")
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, ranks), rank=number, world_size=ranks
    )
    if engine:
        import deepspeed.ops
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        torch.serialization.add_safe_globals([LossScaler, ZeroStageEnum, fragment_address])
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = (
            False  # it would be compiled
        )
        deepspeed.comm.init_distributed(dist_init_required=False)
    found = work()
    if number == 0:
        Path(store + ".json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # some frameworks' threads outlive the group


def main(framework: str) -> None:
    warnings.simplefilter("ignore")
    given = SCENARIOS
    if (
        framework == "torchtitan"
    ):  # its trainer ends with the process, and writes no checkpoint within a window
        titan_trainer()
        given = {
            name: facts
            for name, facts in SCENARIOS.items()
            if not {"raises", "checkpoint"} & facts.keys()
        }
    if framework == "lightning":
        import lightning.pytorch  # noqa: F401 - once, before the fork

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    train, *kinds = KINDS[framework]
    launch(lambda: scenarios(kinds, given, train), engine=framework in ("deepspeed", "lightning"))


if __name__ == "__main__":
    main(sys.argv[1])
