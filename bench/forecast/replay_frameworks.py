"""The tensors that a framework makes and frees around forward and backward: the interface, DDP and FSDP2."""

from __future__ import annotations

from bench.backends.base import Backend
from bench.backends.lightning import LightningBackend
from bench.forecast.live import Live
from bench.judge import formulas
from bench.plan.cell import Cell, Precision, RankGroup, Sharding, Sync
from bench.workload.layout import ROOT, Layout


class Framework:
    """What a framework does with parameters and gradients; the base class holds the optimizer's state alone.

    The decoder calls the methods where frameworks hook into a model, in the order of a window. Units are ROOT and the
    blocks from 1. When ``gradient`` is called, the parameter's new gradient is alive as ``new_gradient(p)``.
    """

    def __init__(self, live: Live, cell: Cell, layout: Layout, backend: type[Backend], state: int) -> None:
        """``state``: bytes of the optimizer's state."""
        self.live, self.cell, self.layout, self.backend = live, cell, layout, backend
        self.element = 2 if cell.precision is Precision.BF16 else 4
        """Bytes per element of the dtype of computation, where there is no autocast."""
        self.last = False
        """Whether this micro-batch is the window's last."""
        self._state = state
        self._first = True
        self._numels = [parameter.numel for parameter in layout.parameters]
        self.live.make("optimizer", "optimizer_state", state)

    @property
    def zeroes_late(self) -> bool:
        """Whether gradients are zeroed after a window's first forward: Lightning (loops/optimization/automatic.py)."""
        return issubclass(self.backend, LightningBackend)

    def start(self, *, first: bool, last: bool) -> None:
        """A micro-batch begins."""
        self._first, self.last = first, last

    def enter(self, unit: int) -> None:
        """Before a unit's forward."""

    def leave(self, unit: int) -> None:
        """After a unit's forward."""

    def use(self, parameter: int) -> None:
        """The forward of the module that owns a parameter begins."""

    def used(self, parameter: int) -> None:
        """That forward is over."""

    def zero(self) -> None:
        """After the loss: the gradients of the window before are freed, if ``zeroes_late``."""

    def reach(self, unit: int) -> None:
        """Autograd has made the gradient of a unit's output."""

    def use_again(self, parameter: int) -> None:
        """The backward of the module that owns a parameter begins."""

    def used_again(self, parameter: int) -> None:
        """That backward is over, the gradient of the module's input included."""

    def gradient(self, parameter: int) -> None:
        """Autograd has made a parameter's gradient of this micro-batch."""

    def finish(self, unit: int) -> None:
        """Autograd has made the gradient of a block's input; for the root, the backward is over."""

    def end(self) -> None:
        """The window's last backward is over, and the optimizer is about to step."""

    def step(self) -> None:
        """AdamW with ``foreach`` takes the square root of the second moment of all parameters at once.

        torch/optim/adam.py:_multi_tensor_adam, ``exp_avg_sq_sqrt``: half the size of the two moments.
        """
        if self.cell.optimizer == "adamw-foreach":
            self.live.make("root of the second moment", "temporaries", self._state // 2)

    def numel(self, parameter: int) -> int:
        """Elements of a parameter."""
        return self._numels[parameter]

    def of_unit(self, unit: int) -> list[int]:
        """The parameters of a unit."""
        return [index for index, p in enumerate(self.layout.parameters) if p.unit == unit]

    def add(self, parameter: int, category: str) -> None:
        """Accumulate as autograd does: the first gradient becomes the sum, and later ones are added to it in place.

        torch/csrc/autograd/functions/accumulate_grad.h:accumulateGrad.
        """
        if whole_gradient(parameter) in self.live:
            self.live.drop(new_gradient(parameter))
        else:
            self.live.rename(new_gradient(parameter), whole_gradient(parameter), category)


def new_gradient(parameter: int) -> str:
    """The name of a gradient that the backward has just made."""
    return f"new gradient {parameter}"


def whole_gradient(parameter: int) -> str:
    """The name of the tensor in a whole parameter's ``grad``."""
    return f"gradient {parameter}"


class Whole(Framework):
    """Whole parameters and gradients, and nothing else: one process."""

    def __init__(self, live: Live, cell: Cell, layout: Layout, backend: type[Backend], state: int) -> None:
        super().__init__(live, cell, layout, backend, state)
        live.make("parameters", "parameters", 4 * layout.num_parameters)
        if self.zeroes_late:
            for index in range(len(layout.parameters)):
                live.make(whole_gradient(index), "gradients", 4 * self.numel(index))

    def zero(self) -> None:
        if self._first and self.zeroes_late:
            self.live.drop(*map(whole_gradient, range(len(self.layout.parameters))))

    def gradient(self, parameter: int) -> None:
        self.add(parameter, "gradients")


class DDP(Whole):
    """Whole parameters and gradients, and the reducer's buckets (bench/judge/formulas.py:ddp_held)."""

    def __init__(self, live: Live, cell: Cell, layout: Layout, backend: type[Backend], state: int) -> None:
        super().__init__(live, cell, layout, backend, state)
        live.make("buckets", "communication", 4 * layout.num_parameters)


class FSDP2(Framework):
    """Units that are gathered and reduced, line by line as torch/distributed/fsdp/_fully_shard does it.

    An all-gather has its own output, from which the unit's parameters are copied (_fsdp_collectives.py:
    foreach_all_gather, foreach_all_gather_copy_out). In the forward that output lives until the next unit is copied. In
    the backward it is freed at once, but the next unit is gathered ahead (_fsdp_param_group.py:wait_for_unshard,
    _backward_prefetch). At W = 1 parameters are copied from the shards. HSDP does the same in each shard group.
    """

    def __init__(self, live: Live, cell: Cell, layout: Layout, backend: type[Backend], state: int) -> None:
        super().__init__(live, cell, layout, backend, state)
        self._ranks = cell.group_size(RankGroup.SHARD)
        units = {unit: formulas.padded(parameters, self._ranks) for unit, parameters in layout.units.items()}
        self._padded = units
        self._blocks = [unit for unit in units if unit != ROOT]
        self._gathering: set[int] = set()
        self._kept: int | None = None
        self._reduced: int | None = None
        live.make("shards", "parameters", 4 * sum(units.values()) // self._ranks)
        if self.zeroes_late:
            for unit in units:
                live.make(f"shard gradients {unit}", "gradients", self._shard(unit))

    @property
    def _syncs(self) -> bool:
        """Whether this micro-batch's backward reduces."""
        return self.last or self.backend.sync is not Sync.DEFERRED

    def _shard(self, unit: int) -> int:
        """Bytes of the shard of a unit's gradient, in fp32 and padded."""
        return 4 * self._padded[unit] // self._ranks

    def zero(self) -> None:
        if self._first and self.zeroes_late:
            self.live.drop(*(f"shard gradients {unit}" for unit in self._padded))

    def enter(self, unit: int) -> None:
        self._gather(unit)
        self._copy_out(unit, forward=True)

    def leave(self, unit: int) -> None:
        """Blocks are resharded if parameters are sharded; the root never is (fully_shard's default for a root)."""
        if unit == ROOT:
            self._free_kept()
        elif self.backend.sharding is Sharding.PARAMS:
            self.live.drop(f"gathered {unit}")

    def _gather(self, unit: int) -> None:
        """``unshard``, unless the unit is gathered or in flight. In bf16 the shards are cast before they are sent."""
        if f"gathered {unit}" in self.live or unit in self._gathering:
            return
        self._gathering.add(unit)
        if self._ranks > 1:
            size = self.element * self._padded[unit]
            cast = size // self._ranks if self.element < 4 else 0
            self.live.make("cast shards", "communication", cast)
            self.live.make(f"gather {unit}", "communication", size)
            self.live.drop("cast shards")

    def _copy_out(self, unit: int, *, forward: bool) -> None:
        """``wait_for_unshard``."""
        if unit not in self._gathering:
            return
        self._gathering.discard(unit)
        held = self.backend.sharding is Sharding.OPTIMIZER  # for the window
        category = "parameters" if held else "parameters_transient"
        self.live.make(f"gathered {unit}", category, self.element * self._padded[unit])
        if self._ranks > 1 and forward:
            self._free_kept()  # only now: ``prev_all_gather_state`` refers to it
            self._kept = unit
        else:
            self.live.forget(f"gather {unit}")

    def _free_kept(self) -> None:
        """``comm_ctx.all_gather_state``: the last gather's output."""
        if self._kept is not None:
            self.live.drop(f"gather {self._kept}")
            self._kept = None

    def reach(self, unit: int) -> None:
        self._gather(unit)
        self._copy_out(unit, forward=False)
        before = self._blocks[-1] if unit == ROOT else unit - 1
        if before != ROOT:
            self._gather(before)

    def gradient(self, parameter: int) -> None:
        """In bf16 the new gradient lives beside the fp32 sum until its unit's backward is over."""
        sums = self.backend.sync is Sync.DEFERRED and self.element == 4
        self.add(parameter, "gradients" if sums else "gradients_transient")

    def finish(self, unit: int) -> None:
        """The root's ``post_backward`` comes last, in the callback at the end of the backward."""
        self._post_backward(unit)
        if unit == ROOT:
            self._end_backward()

    def _post_backward(self, unit: int) -> None:
        own = self.of_unit(unit)
        for p in own:  # accumulate_unsharded_grad_if_needed
            if _sum(p) in self.live:
                self.live.drop(whole_gradient(p))
        if self.last or self.backend.sharding is not Sharding.OPTIMIZER:
            self.live.drop(f"gathered {unit}")
        if self._syncs:
            self._reduce(unit, own)
        elif self.element < 4:
            for p in own:  # to_accumulated_grad_if_needed
                if _sum(p) not in self.live:
                    self.live.make(_sum(p), "gradients", 4 * self.numel(p))
                    self.live.drop(whole_gradient(p))

    def _reduce(self, unit: int, own: list[int]) -> None:
        """``foreach_reduce``: its fp32 input lives until that of the next unit, its output is the shards' gradient."""
        self._free_reduced()
        self.live.make(f"reduce {unit}", "communication", 4 * self._padded[unit])
        self._reduced = unit
        self.live.forget(*(name for p in own for name in (whole_gradient(p), _sum(p))))
        name, partial = f"shard gradients {unit}", f"partial {unit}"
        if self.backend.sync is Sync.DEFERRED_ALL_REDUCE and not self.last:
            name = partial  # ``partial_reduce_output``, to which the last micro-batch's output adds it
        held = name in self.live
        self.live.make(_summand(unit), "communication", self._shard(unit))
        if not held:
            self.live.rename(_summand(unit), name, "gradients")
        elif not self.cell.replicate or name == partial:
            self.live.drop(_summand(unit))
        # Otherwise the all-reduce's input is kept until the end of the backward (``_all_reduce_state``).
        if name != partial:
            self.live.forget(partial)

    def _end_backward(self) -> None:
        self._free_reduced()
        self.live.forget(*map(_summand, self._padded))

    def _free_reduced(self) -> None:
        """``comm_ctx.reduce_scatter_states``."""
        if self._reduced is not None:
            self.live.drop(f"reduce {self._reduced}")
            self._reduced = None


class CarvedFSDP2(FSDP2):
    """FSDP2 in Accelerate's units: the embedding is one, gathered and reduced as blocks are; norm and head are another.

    The latter is ROOT here (bench/judge/formulas.py:accelerate_units). No gradient passes the embedding's input, so
    that its ``post_backward`` is the last.
    """

    def __init__(self, live: Live, cell: Cell, layout: Layout, backend: type[Backend], state: int) -> None:
        super().__init__(live, cell, formulas.accelerate_units(layout), backend, state)
        *self._blocks, self._embedding = self._blocks

    def enter(self, unit: int) -> None:
        super().enter(self._embedding if unit == ROOT else unit)

    def used(self, parameter: int) -> None:
        if self.layout.parameters[parameter].unit == self._embedding:
            self.leave(self._embedding)

    def use(self, parameter: int) -> None:
        if self.layout.parameters[parameter].unit == ROOT:
            super().enter(ROOT)

    def reach(self, unit: int) -> None:
        if unit == self._blocks[-1]:
            self._post_backward(ROOT)
        super().reach(unit)
        if unit == self._blocks[0]:
            self._gather(self._embedding)

    def finish(self, unit: int) -> None:
        if unit == self._blocks[0]:
            self._copy_out(self._embedding, forward=False)
        self._post_backward(self._embedding if unit == ROOT else unit)
        if unit == ROOT:
            self._end_backward()


def _summand(unit: int) -> str:
    """The name of a reduce-scatter's output."""
    return f"reduced {unit}"


def _sum(parameter: int) -> str:
    """The name of FSDP2's ``unsharded_accumulated_grad``."""
    return f"sum {parameter}"
