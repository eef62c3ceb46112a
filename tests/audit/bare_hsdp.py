"""HSDP on four ranks without the bench: ``python bare_hsdp.py`` prints what torch does, as JSON by mode.

One weight per sample and SGD with learning rate 1, so an update lowers each weight by its sample's coefficient. Two
epochs of ten micro-batches of a sample per rank with N = 4, so the last window of an epoch has two.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from bare import Calls, launch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

W, R, N, SAMPLES, EPOCHS = 4, 2, 4, 40, 2
MODES = ("hsdp-eager", "hsdp-deferred-all-reduce", "hsdp-deferred")


def train(mode: str, rank: int) -> dict[str, Any]:
    """The coefficients and the collectives of each window, and elements of gradients after the first micro-batch."""
    weights: Any = nn.Embedding(SAMPLES, 1)
    nn.init.zeros_(weights.weight)
    fully_shard(
        weights, mesh=init_device_mesh("cpu", (R, W // R), mesh_dim_names=("replicate", "shard"))
    )
    optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)
    samples = list(range(rank, SAMPLES, W))
    found: dict[str, Any] = {"updates": [], "calls": []}
    for first in [*range(0, len(samples), N)] * EPOCHS:
        window, counter = samples[first : first + N], Calls(by_group=True)
        before = weights.weight.full_tensor().detach().clone()
        with counter:
            for sample in window:
                last = sample == window[-1]
                if mode == "hsdp-deferred-all-reduce":
                    weights.set_requires_all_reduce(last)
                if mode == "hsdp-deferred":
                    weights.set_requires_gradient_sync(last)
                    weights.set_is_last_backward(last)
                (weights(torch.tensor([sample])).mean() / len(window)).backward()
                if "held" not in found:
                    found["held"] = held(weights)
        optimizer.step()
        optimizer.zero_grad()
        change = (before - weights.weight.full_tensor().detach()).flatten()
        found["updates"].append(
            {str(i): change[i].item() for i in change.nonzero().flatten().tolist()}
        )
        found["calls"].append(counter.calls)
    return found


def held(weights: Any) -> int:
    """Elements of the gradient, wherever torch keeps it."""
    (group,) = weights._get_fsdp_state()._fsdp_param_groups
    (parameter,) = group.fsdp_params
    sharded = [parameter.sharded_param.grad, group._partial_reduce_output]
    whole = [parameter.unsharded_accumulated_grad, parameter._unsharded_param.grad]
    local = [
        getattr(gradient, "_local_tensor", gradient)
        for gradient in (*sharded, *whole)
        if gradient is not None
    ]
    return sum(gradient.untyped_storage().nbytes() // 4 for gradient in local)


def work() -> dict[str, Any]:
    return {mode: train(mode, dist.get_rank()) for mode in MODES}


if __name__ == "__main__":
    launch(work, engine=False, ranks=W)
