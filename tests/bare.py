"""Training without the bench, to hold the bench's own times against: one model, one optimizer, one window at a time."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM


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
