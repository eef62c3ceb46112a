"""One process that splits the same windows of 8 rows: train_state.py VARIANT --gas N --micro-batch B.

A variant with a fault has its right form under the name before the dash: ``ema-each`` and ``ema``.
"""

import argparse
import copy
import itertools
import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("variant")
parser.add_argument("--gas", type=int, default=int(os.environ.get("ACCUMULATE", "1")))
parser.add_argument("--micro-batch", type=int, default=int(os.environ.get("BATCH", "8")))
parser.add_argument("--number", type=int, default=0)
options = parser.parse_args()
variant, N, B = options.variant, options.gas, options.micro_batch
VOCABULARY, WIDTH, ROWS, UPDATES = 32, 24, 8, 4


class Router(nn.Module):
    """Four experts; a bias that is moved towards those that get fewer tokens, and an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("tokens", torch.zeros(4))

    def forward(self, hidden):
        scores = self.gate(hidden)
        self.auxiliary = scores.logsumexp(-1).square().mean()
        shares = scores.softmax(-1)
        best = (shares + self.bias).argmax(-1)
        with torch.no_grad():
            self.tokens += torch.bincount(best.flatten(), minlength=4)
        chosen = F.one_hot(best, 4).to(shares) * shares
        outputs = torch.stack([expert(hidden) for expert in self.experts], -2)
        return hidden + (chosen.unsqueeze(-1) * outputs).sum(-2)

    def balance(self):
        self.bias += 0.001 * (self.tokens.mean() - self.tokens).sign()
        self.tokens.zero_()


class Lookup(torch.autograd.Function):
    """An embedding whose graph does not show its tokens."""

    @staticmethod
    def forward(ctx, weight, tokens):
        ctx.save_for_backward(tokens)
        return weight[tokens]

    @staticmethod
    def backward(ctx, gradient):
        (tokens,) = ctx.saved_tensors
        total = torch.zeros(VOCABULARY, WIDTH)
        return total.index_add(0, tokens.flatten(), gradient.flatten(0, 1)), None


class Codes(torch.Tensor):
    """A quantized state of an optimizer, which knows none of torch's functions."""

    @staticmethod
    def __new__(cls, codes):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)

    def __init__(self, codes):
        self.codes = codes

    def __tensor_flatten__(self):
        return ["codes"], None

    @classmethod
    def __torch_dispatch__(cls, function, *_):
        raise NotImplementedError(str(function))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, sparse=variant == "sparse")
        self.block = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.norm = nn.BatchNorm1d(WIDTH) if variant == "batchnorm" else nn.LayerNorm(WIDTH)
        self.router = Router() if variant.startswith("moe") else nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if variant == "spectral":
            nn.utils.parametrizations.spectral_norm(self.head)

    def forward(self, tokens):
        if variant == "carried":
            hidden = Lookup.apply(self.embedding.weight, tokens)
        else:
            hidden = self.embedding(tokens)
        if variant == "checkpoint":
            hidden = hidden + checkpoint(self.block, hidden, use_reentrant=False)
        else:
            hidden = hidden + self.block(hidden)
        if variant == "quantized":
            scale = float(hidden.detach().abs().max()) / 7
            hidden = torch.fake_quantize_per_tensor_affine(hidden, scale, 0, -8, 7)
        if variant == "dropout":
            hidden = F.dropout(F.dropout(hidden, 0.1), 0.1)
        if variant == "batchnorm":
            hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        elif variant == "batchnorm-by-hand":
            rows = F.batch_norm(hidden.flatten(0, 1), None, None, training=True)
            hidden = self.norm(rows.view_as(hidden))
        else:
            hidden = self.norm(hidden)
        return self.head(self.router(hidden))


torch.manual_seed(0)
if variant == "unseeded":
    torch.seed()
net = Net()
if variant == "double":
    net = net.double()
if variant.startswith("bfloat16"):
    net = net.bfloat16()
if variant == "lora":
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("block.2" in name)
if variant == "tied":
    net.head.weight = net.embedding.weight
parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
if variant in ("sgd", "sparse", "swa", "swa-each", "counts", "codes"):
    optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.0 if variant == "sparse" else 0.9)
elif variant in ("adafactor", "rmsprop", "adagrad", "nadam"):
    kinds = {"adafactor": "Adafactor", "rmsprop": "RMSprop", "adagrad": "Adagrad", "nadam": "NAdam"}
    optimizer = getattr(torch.optim, kinds[variant])(parameters, 1e-2)
elif variant == "lbfgs":
    optimizer = torch.optim.LBFGS(parameters, 0.1, max_iter=3)
elif variant == "muon":
    optimizer = torch.optim.Muon([each for each in parameters if each.dim() == 2], 1e-2)
else:
    optimizer = torch.optim.AdamW(parameters, 1e-2)
if variant == "codes":
    for parameter in parameters:
        optimizer.state[parameter]["quantized"] = Codes(torch.zeros(4, dtype=torch.uint8))
if variant == "counts":
    for parameter in parameters:
        optimizer.state[parameter]["count"] = torch.tensor([options.number])
shadow = copy.deepcopy(net).requires_grad_(False)
average = [parameter.detach().clone() for parameter in parameters]
mean_model = torch.optim.swa_utils.AveragedModel(net)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=variant.startswith("scaler"))
draws = torch.Generator().manual_seed(2)
rows = torch.randint(VOCABULARY, (ROWS * UPDATES, 9), generator=torch.Generator().manual_seed(1))
if variant.startswith("lengths"):  # rows of a window have from 2 to 9 tokens that count
    kept = torch.arange(ROWS * UPDATES) * 5 % 8 + 1
    labels = rows.masked_fill(torch.arange(9) > kept[:, None], -100)
elif variant.startswith("empty"):
    # Of 4 micro-batches of a window the second has no token that counts.
    is_empty = torch.arange(ROWS * UPDATES) % ROWS // 2 == 1
    labels = rows.masked_fill(is_empty[:, None], -100)
else:
    labels = rows
data = TensorDataset(rows, labels)
if variant in ("partial-divided", "partial", "carried"):
    data = TensorDataset(rows[:20], labels[:20])
generator = torch.Generator().manual_seed(3)
if variant == "sampler":
    generator.seed()
shuffled = variant in ("shuffle", "sampler")
loader = DataLoader(
    data, B, shuffle=shuffled, generator=generator, num_workers=2 * (variant == "workers")
)


def orthogonal(gradient):
    """A few steps of Newton and Schulz, as Muon's: they lift small singular values by a bounded factor."""
    x = gradient / gradient.norm()
    for _ in range(3):
        x = 1.5 * x - 0.5 * x @ x.T @ x
    return x


def low_rank(gradient):
    u, s, v = torch.linalg.svd(gradient, full_matrices=False)
    return (u[:, :4] * s[:4]) @ v[:4]


def loss_of(x, y, size):
    with torch.autocast("cpu", enabled=variant.startswith("autocast")):
        logits = net(x[:, :-1])
    scores, targets = logits.flatten(0, 1).float(), y[:, 1:].flatten()
    if variant == "double":
        scores = logits.flatten(0, 1)
    if variant in ("lengths", "empty"):
        loss = F.cross_entropy(scores, targets, reduction="sum") / size
    elif variant == "smoothing":
        loss = F.cross_entropy(scores, targets, label_smoothing=0.1) / N
    elif variant == "contrastive":
        features = F.normalize(logits[:, 0]), F.normalize(logits[:, -1])
        loss = F.cross_entropy(features[0] @ features[1].T, torch.arange(len(x))) / N
    elif variant == "contrastive-by-hand":
        features = F.normalize(logits[:, 0]), F.normalize(logits[:, -1])
        products = features[0] @ features[1].T
        loss = (products.logsumexp(1) - products.diagonal()).mean() / N
    else:
        loss = F.cross_entropy(scores, targets) / (1 if variant == "plain-undivided" else size)
    if variant == "plain-twice":
        loss = loss / N
    if variant == "penalty":
        loss = loss + 0.01 * sum(each.pow(2).sum() for each in parameters) / N
    if variant == "penalty-each":
        loss = loss + 0.01 * sum(each.pow(2).sum() for each in parameters)
    if variant.startswith("moe"):
        loss = loss + 0.1 * net.router.auxiliary / (1 if variant == "moe-auxiliary" else N)
    return loss


def after_backward(last):
    """What a script does to gradients or state at each micro-batch, or once."""
    each = variant.endswith("-each")
    if not (each or last):
        return
    kind = variant.removesuffix("-each")
    if kind == "noise":
        for parameter in parameters:
            parameter.grad += 1e-3 * torch.randn(parameter.shape, generator=draws)
    if kind == "clip":
        nn.utils.clip_grad_norm_(parameters, 0.05)
    if kind == "clip-value":
        nn.utils.clip_grad_value_(parameters, 1e-3)
    if kind in ("orthogonal", "galore", "sign"):
        change = {"orthogonal": orthogonal, "galore": low_rank, "sign": torch.sign}[kind]
        for parameter in parameters:
            if parameter.dim() == 2:
                parameter.grad.copy_(change(parameter.grad))
    if kind == "decay":
        for parameter in parameters:
            parameter.data.mul_(1 - 1e-3)
    if kind == "divide":
        for parameter in parameters:
            parameter.grad /= 2


def after_step(last):
    each = variant.endswith("-each")
    if not (each or last):
        return
    kind = variant.removesuffix("-each")
    if kind == "schedule":
        schedule.step()
    if kind == "ema":
        for copied, parameter in zip(shadow.parameters(), net.parameters(), strict=True):
            copied.lerp_(parameter.data, 0.1)
    if kind == "average":
        for place, parameter in enumerate(parameters):
            average[place] = 0.9 * average[place] + 0.1 * parameter.detach()
    if kind == "swa":
        mean_model.update_parameters(net)
    if kind.startswith("moe"):
        with torch.no_grad():
            net.router.balance()


batches = itertools.chain(loader, loader if variant == "carried" else ())
for i, (x, y) in enumerate(batches):
    if variant == "crash" and N > 1 and i == 2:
        raise SystemExit(5)
    if variant == "ends" and i == N:
        break
    last = i % N == N - 1
    size = N
    if variant == "partial":
        last = last or i + 1 == len(loader)
        size = min(N, len(loader) - i // N * N)
    if variant == "partial-divided":
        last = last or i + 1 == len(loader)
    if variant == "offbyone":
        last = (i + 2) % N == 0 if N > 1 else True
    if variant in ("lengths", "empty"):
        window = y if N == 1 else labels[i // N * ROWS : i // N * ROWS + ROWS]
        size = (window[:, 1:] != -100).sum()
    if variant == "lost":
        optimizer.zero_grad()
    if variant == "lbfgs":

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = loss_of(x, y, 1)
            loss.backward()
            return loss

        optimizer.step(closure)
        continue
    scaler.scale(loss_of(x, y, size)).backward()
    if variant == "scaler-each":
        for parameter in parameters:
            parameter.grad /= scaler.get_scale()
    after_backward(last)
    if last or variant == "stepout":
        if variant == "scaler":
            scaler.unscale_(optimizer)
        if variant.startswith("scaler"):
            nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    after_step(last)
