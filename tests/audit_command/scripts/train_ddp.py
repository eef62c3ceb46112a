"""A plain loop with DistributedDataParallel: train_ddp.py VARIANT."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from small_lm import ACCUMULATE, BATCH, SmallLM, Tokens, save_losses
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler

variant = sys.argv[1]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0 if variant not in ("unsynchronized", "ensemble") else rank)
model = SmallLM()
if variant == "ensemble":  # whose members have some values that are the same, those of a norm
    model.head = torch.nn.Sequential(torch.nn.LayerNorm(model.head.in_features), model.head)
if variant == "bf16":
    model = model.to(torch.bfloat16)
if variant == "sparse":
    model.embedding.sparse = True
if variant == "compile":
    model = torch.compile(model)
unwrapped = variant in (
    *("unreduced", "manual", "manual-sum"),
    *("unsynchronized", "ensemble", "average-parameters"),
)
if variant == "expert":
    model.head.bias.allreduce = False
if variant in ("ignored", "expert"):
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.bias"])
if variant == "loss-inside":
    forward = model.forward

    def forward_and_loss(x, y):
        logits = forward(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten()), logits

    model.forward = forward_and_loss
net = (
    model
    if unwrapped
    else DistributedDataParallel(model, find_unused_parameters=variant == "loss-inside")
)
call = net.module if variant == "unwrapped" else net
uneven = variant in ("dropped", "underweight", "flush-right")
data = Tokens((20 if uneven else 16) * world)
workers = 2 if variant == "workers" else 0
loader = DataLoader(
    data, BATCH, sampler=DistributedSampler(data, shuffle=False), num_workers=workers
)
optimizer = (torch.optim.SGD if variant == "sparse" else torch.optim.AdamW)(
    net.parameters(), lr=1e-2
)
window = {"differ": 4 if rank == 0 else 2, "n-is-w": 2}.get(variant, ACCUMULATE)
each = variant in ("each-step", "each-step-divided")
losses = []
for _ in range(2):
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        last = (i + 1) % window == 0 or (
            variant in ("flush-right", "underweight") and i + 1 == len(loader)
        )
        sync = last or variant == "eager" or each
        if variant == "differ":  # as often on both ranks
            sync = i % ACCUMULATE == ACCUMULATE - 1
        if variant == "late":  # FunASR 3472
            sync = i % window == 0
        if variant == "zero-before":  # RAE 67
            optimizer.zero_grad()
        flag_only = variant in ("nanogpt", "backward-only")
        with contextlib.nullcontext() if sync or unwrapped or flag_only else net.no_sync():
            if variant == "loss-inside":
                loss, _ = net(x, y)
            else:
                loss = F.cross_entropy(call(x).flatten(0, 1).float(), y.flatten())
            divisor = {"twice": window**2}.get(variant, window)
            if variant in ("undivided", "n-is-w", "clip-divide", "each-step"):
                divisor = 1
            if variant == "flush-right":
                divisor = window if i < len(loader) // window * window else len(loader) % window
            scaled = loss / divisor
            if variant == "backward-only" and not last:
                with net.no_sync():
                    scaled.backward()
            else:
                if (
                    variant == "nanogpt"
                ):  # build-nanogpt 30: the flag is set between forward and backward
                    net.require_backward_grad_sync = last
                scaled.backward()
        losses.append(loss.detach())
        if variant == "clip-early":  # lingua 59
            clip_grad_norm_(net.parameters(), 0.05)
        if last or each:
            if variant in ("manual", "manual-sum"):
                for parameter in net.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= world if variant == "manual" else 1
            if variant == "clip":
                clip_grad_norm_(net.parameters(), 0.05)
            if variant == "clip-divide":  # the sum is clipped, and divided then
                clip_grad_norm_(net.parameters(), 0.05)
                for parameter in net.parameters():
                    parameter.grad /= window
            if variant == "clip-with-norm":  # as torchtitan
                norm = torch.nn.utils.get_total_norm(
                    [parameter.grad for parameter in net.parameters()]
                )
                torch.nn.utils.clip_grads_with_norm_(net.parameters(), 0.05, norm)
            if variant == "clip-value":
                torch.nn.utils.clip_grad_value_(net.parameters(), 1e-3)
            if variant != "idle" or rank == 0:
                optimizer.step()
            if variant == "average-parameters":
                for parameter in net.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= world
            if variant != "uncleared":
                optimizer.zero_grad()
save_losses(losses)
dist.destroy_process_group()
