"""The exact loader: which samples each rank sees, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Loader:
    """Micro-batches of one rank, in order; sized, and iterable again from the start.

    The samples of update t are t*B ... (t+1)*B - 1, whatever N and W. Micro-batch j of rank r in that window is the
    contiguous piece number j*W + r of them, each B / (N*W) samples long.
    """

    def __init__(
        self,
        fetch: Callable[[range], Tensor],
        *,
        windows: int,
        accumulate: int,
        world_size: int,
        rank: int,
        global_batch_size: int,
    ) -> None:
        micro_batch_size, rest = divmod(global_batch_size, accumulate * world_size)
        assert rest == 0 and micro_batch_size > 0, "the matrix refuses a batch that does not divide"
        self._fetch = fetch
        self._ranges = [
            range(start, start + micro_batch_size)
            for window in range(windows)
            for piece in range(accumulate)
            for start in [window * global_batch_size + (piece * world_size + rank) * micro_batch_size]
        ]

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[Tensor]:
        return map(self._fetch, self._ranges)
