"""One rank that trains a backend of the bench and a bare loop in turn, window by window. Run by speed.py.

Both run in the same process on the same machine within the same second, so what is left between them is the bench. On
GPUs both are timed by events on the one stream that they share, as trials are; nothing waits for the device.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

from bench.backends.base import registry
from bench.launch import rank
from bench.measure.taps import EventKind, HostClock, Taps, clock_for, updates
from bench.measure.trial import RankTrial
from bench.plan.task import Spec


class BareLoop:
    """DDP or FSDP2 with the reduction deferred to the window's last micro-batch."""

    def __init__(self, kind: str, device: torch.device) -> None:
        shape = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=704, vocab_size=256, use_cache=False))
        model = model.float().to(device)
        if kind == "fsdp2":
            mesh = init_device_mesh(device.type, (dist.get_world_size(),))
            for block in model.model.layers:
                fully_shard(block, mesh=mesh, reshard_after_forward=True)
            fully_shard(model, mesh=mesh)
        else:
            model = DistributedDataParallel(model)
        self.kind, self.model = kind, model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

    def window(self, micro_batches: list[Tensor]) -> None:
        """One optimizer step over token ids of shape [samples, length + 1] per micro-batch."""
        for index, tokens in enumerate(micro_batches, start=1):
            last = index == len(micro_batches)
            if self.kind == "fsdp2":
                self.model.set_requires_gradient_sync(last)
            else:
                self.model.require_backward_grad_sync = last
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / len(micro_batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class InTurn(Taps):
    """Taps whose loader runs a bare window before each of the backend's; ``around`` has the clock before and after."""

    def __init__(self, bare: BareLoop, accumulate: int, clock: HostClock) -> None:
        super().__init__(mark=clock.mark)
        self.bare, self.accumulate, self.clock = bare, accumulate, clock
        self.around: list[tuple[Any, Any]] = []

    def loader(self, loader: Any) -> Any:
        tapped = super().loader(loader)
        batches = list(loader)

        class Loader:
            def __len__(_) -> int:  # noqa: N805
                return len(tapped)

            def __iter__(_) -> Iterator[Any]:  # noqa: N805
                for index, batch in enumerate(tapped):
                    if index % self.accumulate == 0:
                        before = self.clock.mark()
                        self.bare.window(batches[index : index + self.accumulate])
                        self.around.append((before, self.clock.mark()))
                    yield batch

        return Loader()


def main() -> None:
    """Write the seconds of each window of both, in order, to ``<folder>/<rank>.json``."""
    spec, kind = Spec.from_json(sys.argv[1]), sys.argv[2]
    number, cell = int(os.environ["RANK"]), spec.cell
    device = rank.join(spec)
    clock = clock_for(device)
    trial = RankTrial(spec, number, device, registry([cell.backend])[cell.backend])
    taps = InTurn(BareLoop(kind, device), cell.accumulate, clock)
    trial.train(taps, cell.windows)
    bare = [clock.intervals(pair)[0] for pair in taps.around]
    steps = clock.intervals([update.mark for update in updates(taps.events)])
    # From one step to the next there is one bare window, whose time is taken off.
    ours = [step - pause for step, pause in zip(steps, bare[1:], strict=True)]
    assert taps.count(EventKind.STEP) == cell.windows == len(ours) + 1
    result = {"bench": ours[cell.warmup_windows - 1 :], "bare": bare[cell.warmup_windows :]}
    Path(spec.folder, f"{number}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
