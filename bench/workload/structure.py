"""The layout of any built model, recorded during one forward and backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bench.workload.layout import ROOT, Layout, Parameter


def record(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    loss: Callable[[nn.Module, Tensor], Tensor],
    batch: Tensor,
) -> Layout:
    """Record the layout of a model while computing one loss and its backward.

    Gradients are cleared and hooks are removed afterwards. Hooks are placed as in DeepSpeed's stage 3
    (deepspeed/runtime/zero/parameter_offload.py:_register_deepspeed_module): on positional inputs and on all output
    tensors.
    """
    named = dict(model.named_parameters())
    unit_of = {id(p): i for i, block in enumerate(blocks, start=1) for p in block.parameters()}
    index = {id(p): i for i, p in enumerate(named.values())}
    recorder = _Recorder(index)
    gradients: list[int] = []
    handles = [h for module in model.modules() for h in recorder.hook(module)]
    handles += [
        p.register_post_accumulate_grad_hook(lambda p: gradients.append(index[id(p)]))
        for p in named.values()
        if p.requires_grad
    ]
    loss(model, batch).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return Layout(
        parameters=tuple(
            Parameter(name=name, shape=tuple(p.shape), unit=unit_of.get(id(p), ROOT)) for name, p in named.items()
        ),
        buffers=tuple((str(b.dtype).removeprefix("torch."), b.nbytes) for b in model.buffers()),
        gradients=tuple(gradients),
        modules=tuple(recorder.modules),
        forward=tuple(recorder.forward),
        backward=tuple(recorder.backward),
    )


class _Recorder:
    """Numbers modules in call order, and records what forward and backward do with them."""

    def __init__(self, index: Mapping[int, int]) -> None:
        self._index = index
        self._numbers: dict[int, int] = {}
        self._inputs: Counter[int] = Counter()
        self.modules: list[tuple[int, ...]] = []
        self.forward: list[int] = []
        self.backward: list[int] = []

    def hook(self, module: nn.Module) -> list[Any]:
        """Hook a module; returns the handles."""
        return [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]

    def _enter(self, module: nn.Module, inputs: Any) -> Any:
        if id(module) not in self._numbers:
            self._numbers[id(module)] = len(self.modules)
            self.modules.append(tuple(sorted({self._index[id(p)] for p in module.parameters(recurse=False)})))
        number = self._numbers[id(module)]
        self.forward.append(number)
        self._inputs[number] = sum(leaf.requires_grad for leaf in inputs if isinstance(leaf, Tensor))
        return _apply(lambda tensor: _Watch.apply(tensor, lambda: self._finish(number)), inputs)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        number = self._numbers[id(module)]
        self.forward.append(~number)
        return _apply(lambda tensor: _Watch.apply(tensor, lambda: self.backward.append(number)), output)

    def _finish(self, number: int) -> None:
        self._inputs[number] -= 1
        if self._inputs[number] == 0:
            self.backward.append(~number)


class _Watch(torch.autograd.Function):
    """The identity; calls a function when the gradient passes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, passed: Callable[[], None]) -> Tensor:
        ctx.passed = passed
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.passed()
        return gradient, None


def _apply(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The value with every tensor in it replaced; dicts change in place, because subclasses may not be copyable."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        new = [_apply(function, item) for item in value]
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, dict):
        for key in value:
            value[key] = _apply(function, value[key])
    return value
