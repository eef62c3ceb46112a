"""Workloads of one's own, which count: a small perceptron, and a model that nothing divides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from bench.backends.plain import DDPEager
from bench.workload import WorkloadSpec

TOKENS, WIDTH, HIDDEN = 37, 9, 11
"""Sizes of the model that nothing divides."""


class Cycle:
    """Sample i counts up from i, modulo 16; nothing is known of its floor or its FLOPs."""

    entropy_floor: float | None = None
    flops_per_sample: float | None = None
    tokens: ClassVar[int] = 16

    def __init__(self, spec: WorkloadSpec) -> None:
        self._spec = spec
        self.tokens_per_sample = spec.sequence_length

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._spec.seed)
            return self.make()

    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(self.tokens, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, self.tokens)
        )

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return [model[1], model[3]]  # type: ignore[index]

    def data(self, num_samples: int) -> Tensor:
        return (
            torch.arange(num_samples)[:, None] + torch.arange(self._spec.sequence_length + 1)
        ) % self.tokens

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return cross_entropy(model(batch[:, :-1]).float().flatten(0, 1), batch[:, 1:].flatten())


class Untold(Cycle):
    """Does not say how many tokens a sample has."""

    def __init__(self, spec: WorkloadSpec) -> None:
        super().__init__(spec)
        del self.tokens_per_sample


class Block(nn.Module):
    """A residual perceptron; its scale is a parameter of the block itself and has one row only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1, WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.scale * self.down(torch.tanh(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Blocks between a table and a head, which are one parameter if ``tied``; odd widths, biases, buffers.

    The table is larger than any bucket.
    """

    def __init__(self, num_blocks: int, *, tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS * 20, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, TOKENS * 20, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        self.register_buffer("position", torch.arange(5))
        self.register_buffer("gain", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) * self.gain[0]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


class Uneven(Cycle):
    """The model that nothing divides; its size is the number of blocks, with ``tied`` behind it to share the table."""

    tokens = TOKENS

    def make(self) -> nn.Module:
        return Model(
            int(self._spec.model.removesuffix("tied")), tied=self._spec.model.endswith("tied")
        )

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.blocks)  # type: ignore[arg-type]


class Odd(Uneven):
    """What a user's model may have: samples in a dict, buffers of bool, frozen and unused parameters, tied ones."""

    def make(self) -> nn.Module:
        model = Model(2, tied=True)
        model.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        model.blocks[0].up.weight.requires_grad_(False)  # type: ignore[union-attr, index]
        return model

    def data(self, num_samples: int) -> Any:
        tokens = super().data(num_samples)
        return {"input": tokens[:, :-1], "more": (tokens[:, 1:],)}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        (labels,) = batch["more"]
        return cross_entropy(model(batch["input"]).float().flatten(0, 1), labels.flatten())


class Buffered(Uneven):
    """A float buffer that is the only one of its dtype, and one of bool: DDP broadcasts both as they are."""

    def make(self) -> nn.Module:
        model = Model(2, tied=False)
        model.gain = torch.ones(300)
        model.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        return model


class Prefixed(Uneven):
    """A learned first token, whose gradient is a view of that of the sequence if a micro-batch has one sample."""

    def make(self) -> nn.Module:
        return _Prefixed(2, tied=False)


class _Prefixed(Model):
    def __init__(self, num_blocks: int, *, tied: bool) -> None:
        super().__init__(num_blocks, tied=tied)
        self.prefix = nn.Parameter(torch.ones(1, 1, WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.table(tokens) * self.gain[0]
        hidden = torch.cat([self.prefix.expand(len(tokens), -1, -1), hidden], dim=1)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden[:, 1:] + hidden[:, :1])  # type: ignore[no-any-return]


class WrongAlone(Cycle):
    """Its backward is another if there are fewer than 4 samples."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        loss = super().loss(model, batch)
        if len(batch) < 4:
            loss.register_hook(lambda gradient: 2 * gradient)
        return loss


class Regression(Cycle):
    """A mean squared error times a factor, which is the name of the model."""

    def make(self) -> nn.Module:
        return nn.Sequential(
            nn.Embedding(self.tokens, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)
        )

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        wanted = torch.sin(batch[:, 1:].float())
        apart = model(batch[:, :-1]).float().squeeze(-1) - wanted
        return float(self._spec.model) * apart.square().mean()


class DropsOut(Cycle):
    """Draws random numbers in a module."""

    def make(self) -> nn.Module:
        model = super().make()
        model[2] = nn.Dropout(0.1)  # type: ignore[index, operator]
        return model


class Noisy(Cycle):
    """Draws random numbers in its loss."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return super().loss(model, batch) * torch.rand(())


class Summed(Cycle):
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return super().loss(model, batch) * len(batch)


class NotANumber(Cycle):
    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return super().loss(model, batch) * torch.nan


class Counts(Cycle):
    """Depends on how often it was asked."""

    calls = 0

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        self.calls += 1
        return super().loss(model, batch) + self.calls


class Short(Cycle):
    def data(self, num_samples: int) -> Tensor:
        return super().data(num_samples)[1:]


class Unsharded(Cycle):
    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return []


class Random(Cycle):
    """Its weights have no seed."""

    def model(self) -> nn.Module:
        return self.make()


class _NormInFp32(nn.LayerNorm):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden.float()).to(hidden.dtype)


class NormInFp32(Cycle):
    """A norm that is called in fp32, which is right under autocast and not on bf16 weights."""

    def make(self) -> nn.Module:
        model = super().make()
        model[2] = _NormInFp32(64)  # type: ignore[index, operator]
        return model


class _Rotated(nn.Linear):
    """A linear layer with a trained complex factor of its pairs of outputs."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.turn = nn.Parameter(torch.ones(outputs // 2, dtype=torch.complex64))

    def forward(self, hidden: Tensor) -> Tensor:
        pairs = super().forward(hidden).float().unflatten(-1, (-1, 2))
        turned = torch.view_as_complex(pairs) * self.turn
        return torch.view_as_real(turned).flatten(-2).to(hidden.dtype)


class TrainedComplex(Cycle):
    """A parameter of another dtype beside those in fp32."""

    def make(self) -> nn.Module:
        model = super().make()
        model[1] = _Rotated(32, 64)  # type: ignore[index, operator]
        return model


class StateDict(DDPEager):
    """Returns a state dict, as a user does: with buffers, and tied parameters under both names."""

    name = "returns-state-dict"

    def full_parameters(self) -> Mapping[str, Tensor]:
        found: Mapping[str, Tensor] = self.model.module.state_dict()
        return found
