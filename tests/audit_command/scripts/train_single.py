"""One process, in ways that look wrong; only ``masked``, a mean of means, is wrong: train_single.py VARIANT."""

import os
import sys

import torch
import torch.nn.functional as F
from small_lm import ACCUMULATE, BATCH, VOCABULARY, SmallLM, save_losses
from torch.utils.checkpoint import checkpoint

variant = sys.argv[1]
torch.manual_seed(0)
model = SmallLM()
if variant == "lora":
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("blocks.1.2" in name)
if variant == "tied":
    model.head.weight = model.embedding.weight
if variant in ("checkpoint", "reentrant"):
    plain = model.blocks[0].forward
    model.blocks[0].forward = lambda hidden: checkpoint(
        plain, hidden, use_reentrant=variant == "reentrant"
    )
parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
if variant == "lbfgs":
    optimizer = torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
else:
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
overflows = variant == "overflow"
scaler = torch.amp.GradScaler("cpu", enabled=variant == "scaler" or overflows, init_scale=2.0**16)
generator = torch.Generator().manual_seed(1)
same = torch.randint(VOCABULARY, (BATCH, 9), generator=generator)


def loss_of(rows):
    logits, labels = model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
    if variant == "smoothing":
        return F.cross_entropy(logits, labels, label_smoothing=0.1)
    loss = F.cross_entropy(logits, labels)
    if variant == "auxiliary":
        return loss + 0.01 * logits.pow(2).mean()
    if variant == "halves":
        return 0.5 * loss + 0.5 * logits.pow(2).mean()
    if variant == "masked":
        mask = (labels % 3 > 0).float()
        return (F.cross_entropy(logits, labels, reduction="none") * mask).sum() / mask.sum()
    return 0.7 * loss if variant == "weighted" else loss


if variant == "compiled-criterion":
    loss_of = torch.compile(loss_of, backend="aot_eager")
if variant == "meta":
    with torch.device("meta"):
        SmallLM()(torch.zeros(BATCH, 8, dtype=torch.long)).sum().backward()
losses = []
for i in range(16):
    rows = (
        same
        if variant == "identical"
        else torch.randint(VOCABULARY, (BATCH, 9), generator=generator)
    )

    def closure(rows=rows):
        if variant == "lbfgs":
            optimizer.zero_grad()
        loss = loss_of(rows) / ACCUMULATE
        loss.backward()
        return loss

    last = i % ACCUMULATE == ACCUMULATE - 1
    if variant == "lbfgs" or (variant == "closure" and last):
        optimizer.step(closure)
        optimizer.zero_grad()
        continue
    loss = loss_of(rows) / ACCUMULATE
    losses.append(loss.detach())
    scaler.scale(loss * float("inf") if overflows and i < ACCUMULATE else loss).backward()
    if variant == "penalty" and i % ACCUMULATE == 0:
        torch.autograd.grad(loss_of(rows), parameters[-1])
    if variant == "evaluation" and i % ACCUMULATE == 2:
        with torch.no_grad():
            loss_of(rows)
    if variant == "crash" and i == 9:
        raise SystemExit(7)
    if variant == "killed" and i == 9:
        os.kill(os.getpid(), 9)
    if variant == "one-backward":
        break
    if last:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
save_losses(losses)
