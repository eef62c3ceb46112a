"""Operators where torch dispatches them to a backend: all are counted, those of forward and backward also compared.

Whatever the framework, forward and backward of a micro-batch are to be those of the plain model: the workload's, with
parameters in the cell's precision and no framework around it. Operators of both are counted by name and the shapes of
the tensors that they take. ``is_work`` says what is left out, and why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.backends import blocks
from bench.measure.taps import Taps
from bench.plan.cell import Cell, Precision

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bench.workload import Workload

MARKS = "profiler"
"""Namespace of operators that only mark ranges for a profiler; torch wraps every optimizer step in them."""
COMMUNICATION = ("c10d", "fsdp")
"""Namespaces of collectives, and of FSDP2's copies before and after them."""
UNMARKED = (torch.ops.aten._to_copy.default, torch.ops.aten._unsafe_view.default)
"""Casts; and the view that torch's schema does not call one, of which ZeRO-3's own linear layer has one more."""


class OperatorCounter(TorchDispatchMode):
    """Counts operators below autograd while the mode is on; one on DTensors as those on its local tensors."""

    def __init__(self, taps: Taps | None = None) -> None:
        """``taps`` are those of the training, and tell when a loss is computed; without them no work is told."""
        super().__init__()
        self.count = 0
        self.work: Counter[str] = Counter()
        """Operators of forward and backward by what ``is_work`` compares, in the order in which each came first."""
        self._taps = taps

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as operations on the local tensors
        self.count += func.namespace != MARKS
        result = func(*args, **(kwargs or {}))
        if self._taps and is_work(func, result, in_loss=self._taps.in_loss):
            taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.work[_named(func, taken)] += 1
        return result


def _named(func: Any, taken: list[Tensor]) -> str:
    """The operator and the shapes that it takes; a product that a bias is added to is that product.

    torch's linear layer adds the bias in the operator of the product, ZeRO-3's in place afterwards if its input has
    three dimensions.
    """
    if func is torch.ops.aten.addmm.default and taken[0].dim() == 1:
        func, taken = torch.ops.aten.mm.default, taken[1:]
    return f"{func} of {' '.join(str(list(tensor.shape)) for tensor in taken) or 'nothing'}"


def is_work(func: Any, result: Any, *, in_loss: bool) -> bool:
    """Whether an operator that has just returned is to be the same under all backends of a precision.

    Backends may differ in, so these are left out:

    - what runs neither in the loss function nor in the backward of one of its operators: scaling and clipping, the
      optimizer, and where a gradient has arrived at its parameter (``AccumulateGrad`` and the hooks on it) its sum,
      buckets and flat buffers;
    - communication and FSDP2's copies around it, which the collectives pass counts;
    - casts: autocast casts what an operator takes, and others compute with copies that were cast before;
    - views, which compute nothing, and what writes into a tensor that it is given: gathered parameters, summed
      gradients. A model's own operators in place are not compared either;
    - results of fewer than two dimensions, those of size 1 not counted: the loss that is scaled by N, ZeRO's flat
      buffers of parameters, and the gradient of a bias, whose sum ZeRO-3's own linear layer writes differently.

    And of a checkpointed block how much is computed once more: see ``plain_work``.
    """
    node: Any = torch._C._current_autograd_node()
    if not in_loss and (node is None or node.name() == "torch::autograd::AccumulateGrad"):
        return False
    if func.namespace in {*COMMUNICATION, MARKS} or func in UNMARKED or func.is_view or func._schema.is_mutable:
        return False
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return any(sum(size > 1 for size in leaf.shape) > 1 for leaf in results)


def plain_work(
    cell: Cell, workload: Workload, loss: Callable[[nn.Module, Tensor], Tensor], samples: Tensor
) -> tuple[Counter[str], Counter[str]] | None:
    """The least and the most work of one micro-batch of the plain model, on fake tensors: no memory of the device.

    The two differ if blocks are checkpointed. torch stops computing a block once more when all that was saved is there
    again, and what is saved last depends on who saves it: ZeRO-3's linear layer does after its product, torch's before.

    ``samples`` are some on the cell's device, of which shape and dtype are taken. None for a workload that is not
    shipped and that fake tensors cannot run, as if it reads values. To be called before a framework was used, since
    DeepSpeed replaces torch's linear function for good.
    """
    from torch.utils.checkpoint import set_checkpoint_early_stop

    def work(*, stops: bool) -> Counter[str]:
        from bench.measure.tensors import FakeTensors

        fakes, taps = FakeTensors(samples.device), Taps(lambda: None)
        counter = OperatorCounter(taps)
        with fakes, set_checkpoint_early_stop(stops):
            model = fakes.place(fakes.model(workload.model))
            if cell.precision is Precision.BF16:
                model = model.bfloat16()
            blocks.prepare(workload.blocks(model), cell)
            shape = (cell.micro_batch_size, *samples.shape[1:])
            batch = torch.zeros(shape, dtype=samples.dtype, device=samples.device)
            with counter:
                taps.loss(loss)(model, batch).backward()
        return counter.work

    try:
        least = work(stops=True)
        return least, work(stops=False) if cell.activation_checkpointing else least
    except RuntimeError:
        if cell.workload == "llama":
            raise
        return None


def other_work(least: Counter[str], most: Counter[str], found: Counter[str], micro_batches: int) -> str:
    """The first operator that so many micro-batches do not run so many times as often as the plain model runs it.

    First in the order of the plain model, then in their own; in words, empty if there is none.
    """
    for operator in {**most, **found}:
        due = [times * micro_batches for times in dict.fromkeys((least[operator], most[operator]))]
        if not min(due) <= found[operator] <= max(due):
            ran = f"{operator} ran {found[operator]} times in {micro_batches} micro-batches"
            return f"{ran}, {' to '.join(map(str, due))} were due"
    return ""
