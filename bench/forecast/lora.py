"""LoRA: a few trained weights beside those of a model, which are frozen.

Beside a frozen matrix W stand A of rank x inputs and B of outputs x rank (Hu et al.,
arXiv:2106.09685, section 4.1). Frozen weights have no gradient, no moments and no reduction. Of a
product with one of them autograd keeps W, for the gradient of the input, and not the input
(tools/autograd/derivatives.yaml of PyTorch: ``mm``, ``mul``). A needs the input, and B what A
returns (peft: tuners/lora/layer.py, ``Linear.forward``). With dropout each A has an input of its
own, and autograd keeps which elements were dropped: bools on a GPU, on the CPU the factors in the
dtype of the input (aten/src/ATen/native/Dropout.cpp). Where A and B are in fp32 and W is not, as
peft makes them by default (autocast_adapter_dtype), what each A reads is cast for it alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from bench.plan.models import LlamaSize
from bench.workload.layout import Layout, Parameter, llama_parameters

HEAD = "lm_head"
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", HEAD)
"""The matrices of a block, as transformers calls them, and the output head."""
OF_NORMS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Those that read what a block's first norm returns, and its second."""
DEFAULT_TARGETS = ("q_proj", "v_proj")
"""Those of peft for Llama (peft/utils/constants.py)."""


@dataclass(frozen=True, slots=True)
class LoRA:
    """Which matrices of each block have two of a low rank beside them."""

    rank: int
    targets: tuple[str, ...] = DEFAULT_TARGETS
    """Of MATRICES."""
    dropout: bool = False
    """Whether some of what A reads is dropped."""
    fp32: bool = False
    """Whether A and B are in fp32 although the other parameters are not, without autocast."""

    def __str__(self) -> str:
        text = f"LoRA of rank {self.rank} on {', '.join(self.targets)}"
        if self.dropout:
            text += ", with dropout"
        if self.fp32:
            text += ", in fp32"
        return text

    @property
    def copies_inputs(self) -> bool:
        """Whether each A has an input of its own."""
        return self.dropout or self.fp32

    @property
    def in_blocks(self) -> tuple[str, ...]:
        """The targets of a block."""
        return tuple(name for name in self.targets if name != HEAD)

    def num_parameters(self, size: LlamaSize) -> int:
        """The parameters that are trained."""
        return sum(parameter.numel for parameter in self._beside(llama_parameters(size)))

    def trained(self, layout: Layout) -> Layout:
        """The layout of the trained parameters alone; gradients are finished from last to first."""
        parameters = tuple(self._beside(layout.parameters))
        return Layout(
            parameters=parameters,
            buffers=layout.buffers,
            gradients=tuple(reversed(range(len(parameters)))),
        )

    def whole(self, layout: Layout) -> Layout:
        """The layout with the trained parameters, as far as sharding depends on it."""
        every = (*layout.parameters, *self._beside(layout.parameters))
        return dataclasses.replace(layout, parameters=every)

    def num_inputs(self, *, each: bool) -> int:
        """How many copies of what norms return are kept: one of each norm, or one for each product.

        The latter under autocast, which casts it anew.
        """
        found = 0
        for readers in OF_NORMS:
            read = len({*readers} & {*self.targets})
            if each:
                found += read
            else:
                found += min(read, 1)
        return found

    def _beside(self, parameters: tuple[Parameter, ...]) -> Iterator[Parameter]:
        """The two matrices of each target."""
        for parameter in parameters:
            place, _, name = parameter.name.removesuffix(".weight").rpartition(".")
            if name not in self.targets or len(parameter.shape) != 2:
                continue
            outputs, inputs = parameter.shape
            for matrix, shape in (("A", (self.rank, inputs)), ("B", (outputs, self.rank))):
                full_name = f"{place}.{name}.lora_{matrix}.weight".removeprefix(".")
                yield Parameter(name=full_name, shape=shape, unit=parameter.unit)
