"""The loader: update t sees samples t*B ... (t+1)*B - 1, each once, whatever N and W."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.workload import Loader


def make_loader(fetch: Callable[[range], Any], **changes: int) -> Loader:
    values = {"windows": 2, "accumulate": 2, "world_size": 2, "rank": 0, "global_batch_size": 8}
    return Loader(fetch, **(values | changes))


SIZES = {
    "accumulate": st.integers(1, 6),
    "world_size": st.integers(1, 6),
    "micro_batch": st.integers(1, 4),
    "windows": st.integers(1, 4),
}


@given(**SIZES)
def test_micro_batch_j_of_rank_r_is_piece_j_w_plus_r(
    accumulate: int, world_size: int, micro_batch: int, windows: int
) -> None:
    batch = accumulate * world_size * micro_batch
    shape = {
        "windows": windows,
        "accumulate": accumulate,
        "world_size": world_size,
        "global_batch_size": batch,
    }
    loaders = [list(make_loader(list, rank=rank, **shape)) for rank in range(world_size)]
    # Read across ranks, micro-batch after micro-batch, the samples stand in their order.
    across = [
        sample for pieces in zip(*loaders, strict=True) for piece in pieces for sample in piece
    ]
    assert across == list(range(windows * batch))


def test_fetches_one_at_a_time() -> None:
    asked: list[range] = []
    next(iter(make_loader(asked.append)))
    assert len(asked) == 1


@pytest.mark.parametrize("batch", [7, 2], ids=["does not divide", "too small"])
def test_a_batch_that_does_not_divide_is_a_bug(batch: int) -> None:
    with pytest.raises(AssertionError):
        make_loader(list, global_batch_size=batch)
