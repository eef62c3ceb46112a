"""The taps: events grouped into updates, and what a real model and a real optimizer leave behind."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bench.measure.taps import Event, EventKind, Taps, Update, updates

KINDS = {"f": EventKind.FETCH, "l": EventKind.LOSS, "s": EventKind.STEP}


def stream(letters: str) -> list[Event]:
    """Events by their first letters; the mark of a step is its place in the stream."""
    return [
        Event(KINDS[letter], place if letter == "s" else None)
        for place, letter in enumerate(letters)
    ]


@given(st.text(alphabet="fls", max_size=60))
def test_updates_against_a_naive_model(letters: str) -> None:
    naive = [
        Update(num_micro_batches=run[1].count("l"), mark=run.end() - 1, num_inner_steps=len(run[2]))
        for run in re.finditer("([fl]*)(s+)", letters)
    ]
    assert updates(stream(letters)) == naive


def mean_of_squares(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


class Trained:
    """Three windows of four micro-batches on a model of two layers, with an optimizer for each, as ZeRO has."""

    def __init__(self, step: Callable[[list[torch.optim.Optimizer]], Any], **more: Any) -> None:
        ticks = itertools.count()
        self.taps = Taps(lambda: next(ticks), **more)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        optimizers = [
            self.taps.optimizer(torch.optim.SGD(layer.parameters(), lr=0.1)) for layer in self.model
        ]
        loss = self.taps.loss(mean_of_squares)
        data = torch.randn(12, 5, 3)
        self.plain = []
        for index, batch in enumerate(self.taps.loader(data), start=1):
            self.plain.append(mean_of_squares(self.model, batch).item())
            value = loss(self.model, batch)
            assert value.requires_grad, "the framework still has to go backward through it"
            value.backward()
            if index % 4 == 0:
                step(optimizers)
        self.updates = updates(self.taps.events)


def test_inner_steps_with_no_micro_batch_between_are_one_update() -> None:
    trained = Trained(lambda optimizers: [optimizer.step() for optimizer in optimizers])
    assert trained.updates == [
        Update(num_micro_batches=4, mark=mark, num_inner_steps=2) for mark in (1, 3, 5)
    ]
    assert [
        trained.taps.count(kind) for kind in (EventKind.FETCH, EventKind.LOSS, EventKind.STEP)
    ] == [12, 12, 6]


def test_a_wrapped_optimizer_is_seen_where_it_steps() -> None:
    """A scheduler wraps ``step`` of the optimizer that it is given; the hook stands further inside."""
    schedulers: list[Any] = []

    def step(optimizers: list[torch.optim.Optimizer]) -> None:
        if not schedulers:
            schedulers.append(torch.optim.lr_scheduler.ConstantLR(optimizers[0]))
        optimizers[0].step()
        schedulers[0].step()

    assert [update.num_inner_steps for update in Trained(step).updates] == [1, 1, 1]


def test_hook_comes_after_the_update_of_the_parameters() -> None:
    taps = Taps(lambda: weight.detach().item())
    weight = nn.Parameter(torch.tensor(1.0))
    optimizer = taps.optimizer(torch.optim.SGD([weight], lr=1.0))
    weight.grad = torch.tensor(0.25)
    optimizer.step()
    assert [event.mark for event in taps.events] == [0.75]


def test_training_seconds_run_from_the_first_fetch_to_the_last_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([1.0, 4.0, 11.0])
    monkeypatch.setattr("bench.measure.taps.perf_counter", lambda: next(times))
    taps = Taps(lambda: None)
    for event in stream("flsflsf"):
        taps.record(event.kind)
    assert taps.training_seconds == 10.0
