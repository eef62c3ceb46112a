"""Accelerate's loop written without the bench: ``python bare_accelerate.py`` prints what happened, as ``bare.py`` does.

State, splitting and checkpoints are Accelerate's own. Under ``collectives`` are the calls of c10d's operators in one
window, and under ``fallbacks`` what Accelerate makes of an ``fsdp_plugin`` on the CPU unless it is taught better.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from typing import Any

import bare
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
from accelerate.utils import (
    DeepSpeedPlugin,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from bare import Calls, M, MicroBatchError, N, Seen, W, Weights, deepspeed_config, whole_weight
from torch.utils.data import DataLoader

SCENARIOS: dict[str, dict[str, Any]] = {
    "partial-window": {"samples": 40},
    "own-loader": {"samples": 40, "own": True},
    "prepared-scheduler": {"samples": 32, "schedules": True},
    "resume": {"samples": 32, "n": [N], "saves": 5},  # the sixth is fetched, but not trained on
    "exception": {"samples": 32, "raises": 6},  # the epoch is trained again
    "zero-grad": {"samples": 32, "n": [N], "clears": 2},
    "n-by-epoch": {"samples": 32, "n": [1, 4, 2]},
    "clip-hard": {"samples": 32, "n": [N], "clip": 0.05},
}
KINDS = [
    f"accelerate-{name}"
    for name in ("ddp", "ddp-eager", "fsdp2", "fsdp2-eager", "deepspeed-zero2", "deepspeed-zero3")
]
ORIGINAL = {name: getattr(PartialState, name) for name in ("_prepare_backend", "set_device")}
ON_CPU = {
    "_prepare_backend": lambda *_, **__: ("gloo", DistributedType.MULTI_GPU),
    "set_device": lambda self: setattr(self, "device", torch.device("cpu")),
}


def accelerator(n: int, *, teach: bool, **how: Any) -> Any:
    """An ``Accelerator`` with a state of its own; ``teach`` FSDP2 the CPU."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ |= {"ACCELERATE_USE_DEEPSPEED": "false", "ACCELERATE_USE_FSDP": "false"}
    for name, method in (ON_CPU if teach else ORIGINAL).items():
        setattr(PartialState, name, method)
    eager = how.pop("eager", False)
    return Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(n, sync_each_batch=eager), **how
    )


class Training:
    def __init__(self, given: dict[str, Any], kind: str, seen: Seen) -> None:
        n, how = given.get("n", [N])[0], {"eager": kind.endswith("eager")}
        if "deepspeed" in kind:
            config = deepspeed_config(int(kind[-1]), given) | {"gradient_accumulation_steps": n}
            plugin = DeepSpeedPlugin(hf_ds_config=config)
            how |= {
                "deepspeed_plugin": plugin,
                "kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")],
            }
        else:
            is_fsdp = "fsdp2" in kind
            how |= (
                {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
                if is_fsdp
                else {"cpu": True}
            )
        self.accelerator = accelerator(n, teach="fsdp2" in kind, **how)
        self.given, self.kind, self.seen = given, kind, seen
        model = Weights(given["samples"])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        schedules = (
            [torch.optim.lr_scheduler.LambdaLR(inner, lambda _: 1.0)]
            if given.get("schedules")
            else []
        )
        self.model, self.optimizer, *schedulers = self.accelerator.prepare(model, inner, *schedules)
        self.scheduler: Any = schedulers[0] if schedulers else None
        data: Any = range(given["samples"])
        self.loader = (
            bare.loader(given)
            if given.get("own")
            else self.accelerator.prepare(DataLoader(data, M))
        )

    def step(self, batch: torch.Tensor, *, raises: bool = False) -> None:
        with self.accelerator.accumulate(self.model):
            loss = self.model(batch)
            if raises:
                raise MicroBatchError
            self.accelerator.backward(loss)
            if "clip" in self.given and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.given["clip"])
            self.optimizer.step()
            if self.scheduler:
                self.scheduler.step()
            self.optimizer.zero_grad()

    def epoch(self, batches: Any, trained: int = 0) -> None:
        """One epoch, or up to its checkpoint."""
        for index, batch in enumerate(batches, start=trained + 1):
            self.step(batch, raises=index == self.given.get("raises"))
            weight = (
                whole_weight(self.model)
                if "deepspeed" in self.kind
                else next(self.model.parameters())
            )
            self.seen.look(weight)
            if index == self.given.get("clears"):
                self.optimizer.zero_grad()
            if index == self.given.get("saves") and not trained:
                return

    def end(self) -> None:
        if "deepspeed" in self.kind:
            self.seen.counters["engine.global_steps"] = self.model.global_steps
            self.model.destroy()
        if self.scheduler:
            self.seen.counters["lr_scheduler.last_epoch"] = self.scheduler.scheduler.last_epoch


def train(seen: Seen, given: dict[str, Any], kind: str) -> None:
    training = Training(given, kind, seen)
    for n in given.get("n", [N, N]):
        training.accelerator.gradient_accumulation_steps = n
        with contextlib.suppress(MicroBatchError):
            training.epoch(training.loader)
        training.given = {name: value for name, value in given.items() if name != "raises"}
    if trained := given.get("saves"):
        folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folder)
        training.accelerator.save_state(folder[0])
        training = Training(given, kind, seen)
        training.accelerator.load_state(folder[0])
        training.epoch(training.accelerator.skip_first_batches(training.loader, trained), trained)
    training.end()


def collectives(kind: str) -> dict[str, int]:
    """The calls in the third of four windows."""
    training, calls = Training({"samples": 4 * N * M * W}, kind, Seen(4 * N * M * W)), Calls()
    for index, batch in enumerate(training.loader):
        with calls if index // N == 2 else contextlib.nullcontext():
            training.step(batch)
    training.end()
    return dict(calls.calls)


def fallbacks() -> dict[str, str]:
    """How the model ends up that was to be sharded on the CPU, by the arguments of ``Accelerator``."""
    found = {}
    for name, more in (("cpu=True", {"cpu": True}), ("neither", {})):
        fallback = accelerator(
            N, teach=False, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2), **more
        )
        model = Weights(8)
        prepared, _ = fallback.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        found[name] = f"{type(prepared).__name__} on {fallback.num_processes}"
    return found


def work() -> dict[str, Any]:
    found = {"fallbacks": fallbacks(), "collectives": {kind: collectives(kind) for kind in KINDS}}
    return found | bare.scenarios(KINDS, SCENARIOS, train)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    bare.launch(work, engine=True)
