"""What looks like one window, and is several; and the opposite: train_kinds.py VARIANT, on one process."""

import gc
import sys
import weakref

import torch
import torch.nn.functional as F
from torch import nn

variant, ACCUMULATE = sys.argv[1], 4
torch.manual_seed(0)
encoder, head = nn.Sequential(nn.Linear(12, 24), nn.Tanh()), nn.Linear(24, 10)
net = nn.Sequential(encoder, head)
parameters = list(net.parameters())
optimizer = torch.optim.SGD(parameters, 0.05)
generator = torch.Generator().manual_seed(1)


def batch(rows=6):
    return torch.randn(rows, 12, generator=generator), torch.randint(
        10, (rows,), generator=generator
    )


def loss_of(rows=6):
    x, y = batch(rows)
    if variant == "sequences":
        return F.cross_entropy(net(x.unsqueeze(0)).squeeze(0), y)
    if variant == "lengths-squares":
        return F.mse_loss(net(x), F.one_hot(y, 10).float())
    return F.cross_entropy(net(x), y)


def two_optimizers():
    """The encoder steps at each micro-batch, the head at each fourth."""
    of_encoder, of_head = (torch.optim.SGD(part.parameters(), 0.05) for part in (encoder, head))
    for i in range(32):
        loss_of().backward()
        of_encoder.step()
        of_encoder.zero_grad()
        if i % ACCUMULATE == ACCUMULATE - 1:
            for parameter in head.parameters():
                parameter.grad /= ACCUMULATE
            of_head.step()
            if variant == "two-optimizers":
                of_head.zero_grad()


def cached():
    """Rows of the window without a gradient stand beside those of the micro-batch."""
    for _ in range(8):
        window = [batch()[0] for _ in range(ACCUMULATE)]
        with torch.no_grad():
            keys = [encoder(x) for x in window]
        for i, x in enumerate(window):
            rows = torch.cat([*keys[:i], encoder(x), *keys[i + 1 :]])
            loss = F.cross_entropy(rows @ rows.T, torch.arange(len(rows)))
            (loss / ACCUMULATE if variant == "cached-divided" else loss).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharpness_aware():
    """A first backward moves the parameters, and a second one trains them."""
    for _ in range(8):
        x, y = batch()
        F.cross_entropy(net(x), y).backward()
        moves = [0.05 * parameter.grad for parameter in parameters]
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        with torch.no_grad():
            for parameter, move in zip(parameters, moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def loop():  # noqa: PLR0912 - a script has all of its variants in one place
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=variant.startswith("scaler"))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    if variant == "hooks":
        for parameter in parameters:
            parameter.register_hook(lambda gradient: gradient / ACCUMULATE)
    for i in range(40):
        last = i % ACCUMULATE == ACCUMULATE - 1
        if variant == "tasks":
            x, y = batch()
            for shift in range(ACCUMULATE):
                F.cross_entropy(net(x), y.roll(shift)).backward()
            last = True
        elif variant in ("hooks", "output-hook", "divide-later", "divide-sum"):
            x, y = batch()
            scores = net(x)
            if variant == "output-hook":
                scores.register_hook(lambda gradient: gradient / ACCUMULATE)
            F.cross_entropy(scores, y).backward()
        else:
            lengths = (6,) * ACCUMULATE
            if variant.startswith("lengths") or variant == "sequences":
                lengths = (2, 20, 5, 9)
            scaler.scale(loss_of(lengths[i % ACCUMULATE]) / ACCUMULATE).backward()
        if variant == "second-loss":
            F.mse_loss(encoder(batch()[0]), torch.zeros(6, 24)).backward()
        if variant in ("clip-infinite", "clip-each"):
            nn.utils.clip_grad_norm_(parameters, torch.inf if variant == "clip-infinite" else 0.01)
        if variant == "divide-sum" or (variant == "divide-later" and last):
            for parameter in parameters:
                parameter.grad /= ACCUMULATE
        if variant == "schedule":
            schedule.step()
        if last:
            if variant == "scaler-unscaled":
                scaler.unscale_(optimizer)
            if scaler.is_enabled():
                nn.utils.clip_grad_norm_(parameters, 0.1)
            if variant == "head-later":
                for parameter in head.parameters():
                    parameter.grad *= 0.1
            scaler.step(optimizer)
            scaler.update()
            if variant == "steps-twice":
                optimizer.step()
            (encoder if variant == "head-uncleared" else net).zero_grad()


def adversarial():
    """Attacks the input by three backwards that reach the model too, and trains on the result."""
    for _ in range(8):
        x, y = batch()
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            F.cross_entropy(net(x + delta), y).backward()
            delta.data += 0.1 * delta.grad.sign()
            delta.grad.zero_()
        optimizer.zero_grad()
        F.cross_entropy(net(x + delta.detach()), y).backward()
        optimizer.step()


def clip_samples():
    """DP-SGD by hand: the gradient of each sample is clipped and put away."""
    for _ in range(8):
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for _ in range(ACCUMULATE):
            loss_of(1).backward()
            nn.utils.clip_grad_norm_(parameters, 0.01)
            for put_away, parameter in zip(total, parameters, strict=True):
                put_away.add_(parameter.grad)
            net.zero_grad(set_to_none=variant == "clip-samples")
        for put_away, parameter in zip(total, parameters, strict=True):
            parameter.grad = put_away / ACCUMULATE
        optimizer.step()
        optimizer.zero_grad()


def meta_tasks():
    """The sum over tasks of the loss after a step on each, as MAML has it."""
    for _ in range(8):
        for _ in range(ACCUMULATE):
            inner = torch.autograd.grad(loss_of(), parameters, create_graph=True)
            names = [name for name, _ in net.named_parameters()]
            moved = [
                parameter - 0.1 * step for parameter, step in zip(parameters, inner, strict=True)
            ]
            x, y = batch()
            scores = torch.func.functional_call(net, dict(zip(names, moved, strict=True)), (x,))
            F.cross_entropy(scores, y).backward()
        optimizer.step()
        optimizer.zero_grad()


def branches():
    """Two micro-batches with a backward in each branch, and a loss that is not divided."""
    for i in range(16):
        if i % 2 == 0:
            loss_of().backward()
        else:
            loss_of().backward()
            optimizer.step()
            optimizer.zero_grad()


def later():
    """A second optimizer begins when the first has made all updates that are sampled."""
    for _ in range(12):
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()
    second = torch.optim.Adam(parameters)
    for i in range(48):
        loss_of().backward()
        if i % ACCUMULATE == ACCUMULATE - 1:
            second.step()
            second.zero_grad()


def each_epoch():
    """A new optimizer for each epoch."""
    for _ in range(6):
        new = torch.optim.SGD(parameters, 0.05)
        for i in range(8):
            (loss_of() / ACCUMULATE).backward()
            if i % ACCUMULATE == ACCUMULATE - 1:
                new.step()
                new.zero_grad()


def deleted():
    """Fails unless a model that is deleted after training is gone."""
    model = nn.Linear(12, 10)
    trainer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(12):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
        trainer.step()
        trainer.zero_grad()
    held = weakref.ref(model)
    del model, trainer
    gc.collect()
    assert held() is None


def one_cycle():
    """The schedule steps once per update, and its length is the number of micro-batches."""
    data = torch.utils.data.TensorDataset(*batch(48))
    loader = torch.utils.data.DataLoader(data, 3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=2 * len(loader))
    for _ in range(2):
        for i, (x, y) in enumerate(loader):
            (F.cross_entropy(net(x), y) / ACCUMULATE).backward()
            if i % ACCUMULATE == ACCUMULATE - 1:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()


LOOPS = {
    "two-optimizers": two_optimizers,
    "two-optimizers-uncleared": two_optimizers,
    "cached": cached,
    "cached-divided": cached,
    "clip-samples": clip_samples,
    "clip-samples-zeroed": clip_samples,
    "one-cycle": one_cycle,
    "adversarial": adversarial,
    "meta-tasks": meta_tasks,
    "branches": branches,
    "each-epoch": each_epoch,
    "later": later,
    "deleted": deleted,
    "sharpness-aware": sharpness_aware,
}
"""By variant; all others have the usual loop."""
LOOPS.get(variant, loop)()
