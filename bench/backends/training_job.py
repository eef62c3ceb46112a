"""What a backend receives: one pass of a trial on a rank. Imports torch only where it is used."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from bench.plan.cell import Cell

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter
    from torch.optim import Optimizer


Item = TypeVar("Item")


class MicroBatches(Protocol):
    """The micro-batches of a rank, in order."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Tensor]: ...


class EndOfPassError(BaseException):
    """A pass has what it wants, and its training ends between two windows.

    Every pass is given the same windows, so that none can be told by their number. It is raised by
    the loader where a micro-batch is fetched after the last update, or by the loss. A backend need
    not catch it; one that has to end its training itself can (``ending``).
    """


def ending(loader: Iterable[Item]) -> Iterator[Item]:
    """The micro-batches of a job's loader, which ends where the pass does."""
    try:
        yield from loader
    except EndOfPassError:
        return


@dataclass(frozen=True, slots=True)
class Window:
    """The micro-batches of one optimizer step on this rank; can be iterated once."""

    size: int
    """Number of micro-batches: N, or fewer at the end of an epoch."""
    batches: Iterator[Tensor]

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        """Each micro-batch, fetched lazily, and whether it is the last of the window."""
        for index, batch in enumerate(self.batches, start=1):
            yield batch, index == self.size


@dataclass(kw_only=True)
class Job:
    """One pass of a trial on this rank: whole windows. The process group is already initialized."""

    cell: Cell
    rank: int
    world_size: int
    device: torch.device
    windows: int
    """Optimizer steps to take, unless the pass ends before (``EndOfPassError``)."""
    accumulate: int
    """N: micro-batches per optimizer step."""
    block_parameters: int
    """Elements of the largest block's parameters, which bounds how far ahead a sharded backend may
    gather."""
    num_parameters: int
    """Elements of all parameters."""
    build: Callable[[], nn.Module]
    """Build a new fp32 model on ``device``, with the same initial weights on every rank. Its blocks
    are already checkpointed and compiled if the cell asks for it (``bench.backends.blocks``)."""
    blocks: Callable[[nn.Module], Sequence[nn.Module]]
    """The submodules of a built model that are sharded as separate units."""
    loader: Any
    """``MicroBatches``: the ``windows * accumulate`` ones of this rank, on ``device``; can be
    iterated once, tapped. What else it offers is between an audit and its backends."""
    loss: Callable[[nn.Module, Tensor], Tensor]
    """``loss(model, micro_batch)``: the mean loss of a micro-batch from one forward of ``model``;
    tapped."""
    optimizer: Callable[[Iterable[Parameter]], Optimizer]
    """Creates the tapped optimizer. A framework may wrap it, but must step this one."""
    keep_parameters: bool = False
    """Whether ``full_parameters`` will be called after ``train``."""
    clip_norm: float = 0.0
    """Maximum L2 norm of the gradient in an update; 0 for no clipping."""

    @property
    def bf16(self) -> bool:
        return str(self.cell.precision) == "bf16"

    def autocast(self) -> AbstractContextManager[object]:
        """Autocast to the cell's precision, for backends with fp32 parameters; none in fp32."""
        import torch

        if self.bf16:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def clip(self, parameters: Iterable[Parameter]) -> None:
        """Clip gradients to ``clip_norm`` if it is set; sharded gradients by their global norm."""
        if self.clip_norm:
            from torch.nn.utils import clip_grad_norm_

            clip_grad_norm_(parameters, self.clip_norm)

    def each_window(self) -> Iterator[Window]:
        """The windows of the training; in ``bench.audit`` the last of an epoch may be smaller.

        Dividing every loss by the *window's* size makes each update equal that of one full batch.
        """
        batches = iter(self.loader)
        for _ in range(self.windows):
            yield Window(self.accumulate, itertools.islice(batches, self.accumulate))
