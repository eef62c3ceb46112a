"""Wraps what torch calls in every training, and reports it to the recorder of states."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data

from ...command.inside.watched_calls import watch
from .state_recorder import StateRecorder


def install() -> None:
    """Watch this process, and the processes that it forks."""
    recorder = StateRecorder()
    _wrap_loaders(recorder)
    watch(recorder)


def _wrap_loaders(recorder: StateRecorder) -> None:
    """A loader draws the indices of a batch before it hands it out.

    With workers it does so some batches before.
    """
    iterator: Any = torch.utils.data.dataloader._BaseDataLoaderIter
    draw: Callable[[object], object] = iterator._next_index
    hand_out: Callable[[object], object] = iterator.__next__
    numbers: dict[int, int] = {}

    @functools.wraps(draw)
    def next_index(loader: object) -> object:
        samples = draw(loader)
        if recorder.active and recorder.sampling:
            drawn = vars(loader).setdefault("_bench_drawn", deque())
            drawn.append(_indices(samples))
        return samples

    @functools.wraps(hand_out)
    def next_batch(loader: object) -> object:
        batch = hand_out(loader)
        if recorder.active and recorder.sampling:
            drawn = vars(loader).get("_bench_drawn")
            samples = None
            if drawn:
                samples = drawn.popleft()
            number = numbers.setdefault(id(getattr(loader, "_dataset", loader)), len(numbers))
            recorder.guard(recorder.on_batch, number, samples)
        return batch

    iterator._next_index = next_index
    iterator.__next__ = next_batch


def _indices(samples: object) -> list[int] | None:
    """What a sampler gives, if these are numbers of samples."""
    if isinstance(samples, int):
        return [samples]
    if not isinstance(samples, (list, tuple)):
        return None
    numbers = []
    for sample in samples:
        if not isinstance(sample, int):
            return None
        numbers.append(sample)
    return numbers
