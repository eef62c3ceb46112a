"""Counts operators where torch dispatches them, and compares them with those of the plain model.

Under every framework, forward and backward of a micro-batch should run the operators of the plain
model: the workload's, with parameters in the cell's precision and no framework around it. Both are
counted by name and input shapes. ``is_work`` defines what is left out.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

from bench import files
from bench.backends import blocks
from bench.measure.local_mode import LocalMode
from bench.measure.taps import Taps
from bench.measure.tensors import FakeTensors, RealTensors
from bench.plan.cell import REFERENCE, Cell, Precision
from bench.plan.models import LLAMA
from bench.workload import Batch, Loss, Workload
from bench.workload.batches import device_of, length, part, zeros_like

if TYPE_CHECKING:
    from bench.measure.local_mode import Arguments, Operator, Options

MARKS = "profiler"
"""Namespace of operators that only mark ranges for a profiler; torch wraps every optimizer step in
them."""
COMMUNICATION = ("c10d", "fsdp")
"""Namespaces of collectives, and of FSDP2's copies before and after them."""
PRODUCTS = frozenset({"aten.mm.default", "aten.bmm.default"})
"""Matrix products; ``_named`` calls one with a bias so, too."""
SHAPE = re.compile(r"\[[^\]]*\]")
"""A shape in the name of a counted operator."""
UNMARKED = (torch.ops.aten._to_copy.default, torch.ops.aten._unsafe_view.default)
"""Casts, and a view that torch's schema does not mark as one; ZeRO-3's own linear layer has one
more."""


class OperatorCounter(LocalMode):
    """Counts operators below autograd while the mode is active."""

    def __init__(self, taps: Taps | None = None) -> None:
        """``taps`` of the training tell when a loss is computed; ``work`` is empty without them."""
        super().__init__()
        self.count = 0
        self.work: Counter[str] = Counter()
        """Operators of forward and backward as compared by ``is_work``, in order of first
        occurrence."""
        self.micro_batches = 0
        """Micro-batches while the mode was active: more than N in a window if the framework skipped
        a step."""
        self.ended = False
        """Whether a window was counted to its end."""
        self._taps = taps

    def start(self) -> None:
        self.micro_batches -= self._num_losses
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)
        self.micro_batches += self._num_losses
        self.ended = True

    @property
    def _num_losses(self) -> int:
        if self._taps:
            return len(self._taps.losses)
        return 0

    def run(self, func: Operator, args: Arguments, kwargs: Options) -> object:
        self.count += func.namespace != MARKS
        result: object = func(*args, **kwargs)
        if self._taps and is_work(func, result, in_loss=self._taps.in_loss):
            taken = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.work[_named(func, taken)] += 1
        return result


def _named(func: Operator, taken: list[Tensor]) -> str:
    """The operator and its input shapes; a product with a bias counts as the product alone.

    torch's linear layer adds the bias inside the product's operator, ZeRO-3's afterwards in place
    if its input has three dimensions.
    """
    if func is torch.ops.aten.addmm.default and taken[0].dim() == 1:
        func, taken = torch.ops.aten.mm.default, taken[1:]
    if not taken:
        return f"{func} of nothing"
    shapes = " ".join(str(list(tensor.shape)) for tensor in taken)
    return f"{func} of {shapes}"


def is_work(func: Operator, result: object, *, in_loss: bool) -> bool:
    """Whether an operator that just returned must be equal under all backends of a precision.

    Backends may differ in the following, which is left out:

    - what runs neither in the loss function nor in the backward of its operators: scaling,
      clipping, the optimizer, and the sums, buckets and flat buffers at parameters
      (``AccumulateGrad`` and its hooks);
    - communication and FSDP2's copies around it, which the collectives pass counts;
    - casts: autocast casts an operator's inputs, others compute with cast copies;
    - views, which compute nothing, and in-place writes: gathered parameters, summed gradients, also
      a model's own in-place operators;
    - results with fewer than two dimensions larger than 1: the scaled loss, ZeRO's flat buffers of
      parameters, and bias gradients, which ZeRO-3's own linear layer sums differently.

    How much a checkpointed block recomputes may differ too: see ``plain_work``.
    """
    node: Any = torch._C._current_autograd_node()  # None outside of a backward
    if not in_loss and (node is None or node.name() == "torch::autograd::AccumulateGrad"):
        return False
    if (
        func.namespace in {*COMMUNICATION, MARKS}
        or func in UNMARKED
        or func.is_view
        or func._schema.is_mutable
    ):
        return False
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and sum(size > 1 for size in leaf.shape) > 1:
            return True
    return False


@dataclass(frozen=True, slots=True)
class PlainWork:
    """The operators of one micro-batch of the plain model, by name and input shapes."""

    least: Counter[str]
    most: Counter[str]
    """They differ if blocks are checkpointed: torch stops recomputing a block once all saved
    tensors are restored, and ZeRO-3's linear layer saves after its product, torch's before."""
    varying: frozenset[str] = frozenset()
    """Names of operators whose shapes or number follow from the values of a micro-batch, as in a
    mixture of experts that gathers the tokens of each one. They are not compared."""

    def other(self, found: Counter[str], micro_batches: int) -> str:
        """The first operator whose number of runs in the micro-batches differs, in words.

        Empty if there is none. The order is the plain model's, then that of ``found``.
        """
        for operator in {**self.most, **found}:
            if _name(operator) in self.varying:
                continue
            expected = self.least[operator] * micro_batches
            without_stop = self.most[operator] * micro_batches
            if not min(expected, without_stop) <= found[operator] <= max(expected, without_stop):
                were_due = str(expected)
                if without_stop != expected:
                    were_due = f"{expected} to {without_stop}"
                ran = f"{operator} ran {found[operator]} times in {micro_batches} micro-batches"
                return f"{ran}, {were_due} were due"
        return ""

    @property
    def product_flops(self) -> int:
        """FLOPs of the matrix products, 2 for each product of two elements.

        Those inside attention kernels do not count.
        """
        return sum(_flops(operator) * count for operator, count in self.least.items())

    def to_json(self) -> list[object]:
        return [self.least, self.most, sorted(self.varying)]

    @classmethod
    def from_json(cls, stored: list[Any]) -> PlainWork:
        return cls(Counter(stored[0]), Counter(stored[1]), frozenset(stored[2]))


def plain_work(
    cell: Cell, workload: Workload, loss: Loss, samples: Batch, folder: Path | None, *, keep: bool
) -> PlainWork | None:
    """The work of the first micro-batch of ``samples``, by the plain model on the cell's device.

    None for a model of one's own that cannot run so, for example as one of its operators takes no
    bf16. Call this before any framework is used, because DeepSpeed replaces torch's linear function
    permanently. It is read from ``folder``, if a trial with the same micro-batches has kept it
    there, as one does with ``keep``.
    """
    kept = None
    if folder is not None:
        kept = folder / f"plain-{_plain_cell(cell).cell_id}.json"
        if kept.exists():
            stored = json.loads(kept.read_text(encoding="utf-8"))
            if stored is None:
                return None
            return PlainWork.from_json(stored)
    found = None
    try:
        found = _count(cell, workload, loss, samples)
    except RuntimeError:
        if cell.workload == LLAMA:
            raise
    if kept is not None and keep:
        stored = None
        if found is not None:
            stored = found.to_json()
        files.write(kept, json.dumps(stored))
    return found


def _count(cell: Cell, workload: Workload, loss: Loss, samples: Batch) -> PlainWork:
    """Run the plain model for ``plain_work``.

    The shipped model, and any in a world of fake tensors, runs on fake ones: its operators are the
    same there. Others' are not: transformers builds an attention mask on fake tensors, and none on
    real ones. They run on real tensors, on two micro-batches if there are as many.
    """
    is_fake = cell.workload == LLAMA or not cell.world.computes
    size, device = cell.micro_batch_size, device_of(samples)

    def work(number: int, *, stops: bool) -> Counter[str]:
        tensors: RealTensors | FakeTensors = RealTensors(cell, device)
        if is_fake:
            tensors = FakeTensors(device)
        taps = Taps(lambda: None)
        counter = OperatorCounter(taps)
        with tensors, set_checkpoint_early_stop(stops):
            model = tensors.place(tensors.model(workload.model))
            if cell.precision is Precision.BF16:
                model = model.bfloat16()
            blocks.prepare(workload.blocks(model), cell)
            batch = part(samples, range(number * size, (number + 1) * size))
            if is_fake:
                batch = zeros_like(batch)
            with counter:
                taps.loss(loss)(model, batch).backward()
        return counter.work

    least = most = work(0, stops=True)
    if cell.activation_checkpointing:
        most = work(0, stops=False)
    varying: frozenset[str] = frozenset()
    if not is_fake and length(samples) >= 2 * size:
        varying = _varying(least, work(1, stops=True))
    if device.type != "cpu" and not is_fake:
        gc.collect()
        torch.accelerator.empty_cache()  # or the passes would find the model's memory reserved
    return PlainWork(least, most, varying)


def _varying(first: Counter[str], second: Counter[str]) -> frozenset[str]:
    """Names of the operators that two micro-batches run with other shapes or another number."""
    found: set[str] = set()
    for operator in {**first, **second}:
        if first[operator] != second[operator]:
            found.add(_name(operator))
    return frozenset(found)


def _flops(operator: str) -> int:
    """FLOPs of one run of a matrix product; 0 of any other operator."""
    if _name(operator) not in PRODUCTS:
        return 0
    left, right = SHAPE.findall(operator)[-2:]
    rows: list[int] = json.loads(left)
    columns: list[int] = json.loads(right)
    return 2 * math.prod(rows) * columns[-1]


def _name(operator: str) -> str:
    """The name of an operator, without its input shapes."""
    return operator.partition(" of ")[0]


def _plain_cell(cell: Cell) -> Cell:
    """What is equal of the cells with the same plain model and micro-batches."""
    backend = ""
    if cell.backend == REFERENCE:
        backend = REFERENCE  # its loss is computed in slices
    return dataclasses.replace(
        cell,
        backend=backend,
        accumulate=1,
        world_size=1,
        global_batch_size=cell.micro_batch_size,
        twin="",
        ranks_per_node=0,
        replicate=0,
    )
