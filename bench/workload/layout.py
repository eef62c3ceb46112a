"""The layout of a model: its parameters by sharding unit, and the order in which it uses them.

For the shipped decoders it follows from their size (``llama_layout``), so a model of any size can
be predicted without torch and without being built. For other workloads ``record`` observes it on a
built model.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from bench import validation
from bench.grouping import grouped
from bench.plan.models import LlamaSize
from bench.workload import Batch, Loss

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.parameter import Parameter as Parameter_
    from torch.utils.hooks import RemovableHandle

ROOT = 0
"""The unit of everything outside the blocks; block i is unit i, counted from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter; tied parameters are listed once."""

    name: str
    """Its first name in ``model.named_parameters()``."""
    shape: tuple[int, ...]
    unit: int
    """ROOT, or the number of the block."""
    special: str = ""
    """What distinguishes it from parameters in fp32 with a dense gradient, as a predicate: ``is
    frozen``."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What sharding and bucketing depend on in a model."""

    parameters: tuple[Parameter, ...]
    """In the order of ``model.named_parameters()``."""
    buffers: tuple[tuple[str, int], ...] = ()
    """dtype and bytes of each buffer, in the order of ``model.named_buffers()``."""
    gradients: tuple[int, ...]
    """Indices of parameters, in the order in which a backward finishes their gradients."""
    modules: tuple[tuple[int, ...], ...] = ()
    """For each called module: the ascending indices of its own parameters."""
    forward: tuple[int, ...] = ()
    """The modules in the order in which one forward enters (m) and leaves (~m) them."""
    backward: tuple[int, ...] = ()
    """The modules in the order in which one backward reaches their outputs (m) and finishes their
    inputs (~m)."""
    read_elsewhere: tuple[int, ...] = ()
    """Indices of parameters that a forward reads while their own module does not run, if only to
    see a dtype. ZeRO-3 gathers them for the module that does."""
    gradient_overhang: int = 0
    """Bytes of the storages of all gradients less those of the gradients, as ``overhang`` finds."""

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def units(self) -> dict[int, list[Parameter]]:
        """The parameters of each unit: blocks in order, then the root."""
        found = grouped((parameter.unit, parameter) for parameter in self.parameters)
        root = found.pop(ROOT, [])
        ordered = dict(sorted(found.items()))
        if root:
            ordered[ROOT] = root
        return ordered

    @property
    def block_parameters(self) -> int:
        """Elements of the largest block's parameters; 0 without blocks."""
        sizes = Counter[int]()
        for parameter in self.parameters:
            if parameter.unit != ROOT:
                sizes[parameter.unit] += parameter.numel
        return max(sizes.values(), default=0)

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, object]) -> Layout:
        """The inverse of ``to_json``. Raises InputError for other values."""
        return validation.read(cls, values)


def llama_parameters(size: LlamaSize) -> tuple[Parameter, ...]:
    """The parameters of a ``LlamaForCausalLM`` or a relative of it, in order."""
    hidden = size.hidden_size
    block = _block_shapes(size)
    found = [
        Parameter(name="model.embed_tokens.weight", shape=(size.vocab_size, hidden), unit=ROOT)
    ]
    for layer in range(size.num_layers):
        prefix = f"model.layers.{layer}"
        found += [
            Parameter(name=f"{prefix}.{name}", shape=shape, unit=layer + 1)
            for name, shape in block.items()
        ]
    found.append(Parameter(name="model.norm.weight", shape=(hidden,), unit=ROOT))
    if not size.tied:
        found.append(Parameter(name="lm_head.weight", shape=(size.vocab_size, hidden), unit=ROOT))
    return tuple(found)


def _block_shapes(size: LlamaSize) -> dict[str, tuple[int, ...]]:
    """The parameters of a decoder block and their shapes, in order.

    Experts are in one tensor, as in transformers 5.
    """
    hidden, inner, heads = size.hidden_size, size.intermediate_size, size.num_heads * size.head_size
    kv = size.num_kv_heads * size.head_size
    found: dict[str, tuple[int, ...]] = {}
    for name, width in (("q_proj", heads), ("k_proj", kv), ("v_proj", kv)):
        found[f"self_attn.{name}.weight"] = (width, hidden)
        if size.qkv_bias:
            found[f"self_attn.{name}.bias"] = (width,)
    found["self_attn.o_proj.weight"] = (hidden, heads)
    if size.norms_heads:
        found["self_attn.q_norm.weight"] = found["self_attn.k_norm.weight"] = (size.head_size,)
    if size.num_experts:
        router: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (size.num_experts, hidden)}
        experts: dict[str, tuple[int, ...]] = {
            "mlp.experts.gate_up_proj": (size.num_experts, 2 * inner, hidden),
            "mlp.experts.down_proj": (size.num_experts, hidden, inner),
        }
        if size.norms_heads:  # in Qwen3 the router is the second
            found |= experts | router
        else:
            found |= router | experts
    else:
        found["mlp.gate_proj.weight"] = found["mlp.up_proj.weight"] = (inner, hidden)
        found["mlp.down_proj.weight"] = (hidden, inner)
    found["input_layernorm.weight"] = found["post_attention_layernorm.weight"] = (hidden,)
    return found


_Visit = tuple[str, bool]
"""A module, and whether a pass leaves it (True) or enters it."""


def _through(*modules: str) -> list[_Visit]:
    """Enter and leave each of these modules in turn."""
    found: list[_Visit] = []
    for module in modules:
        found += [(module, False), (module, True)]
    return found


@cache
def llama_layout(size: LlamaSize) -> Layout:
    """The layout of the shipped decoder or a relative of it, as transformers implements it."""
    forward: list[_Visit] = [
        ("root", False),
        ("model", False),
        *_through("model.embed_tokens", "model.rotary_emb"),
    ]
    backward: list[_Visit] = [
        ("root", False),
        *_through("lm_head"),
        ("model", False),
        *_through("model.norm"),
    ]
    finished = ["lm_head", "model.norm"]
    if size.tied:
        finished = ["model.norm"]
    in_attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if size.norms_heads:
        in_attention = ["q_proj", "q_norm", "k_proj", "k_norm", "v_proj", "o_proj"]
    in_mlp = ["gate_proj", "act_fn", "up_proj", "down_proj"]
    if size.num_experts:
        in_mlp = ["gate", "experts"]
    for layer in range(size.num_layers):
        block = f"model.layers.{layer}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        forward += [(block, False), *_through(f"{block}.input_layernorm"), (attention, False)]
        forward += _through(*(f"{attention}.{name}" for name in in_attention))
        forward.append((attention, True))
        forward += [*_through(f"{block}.post_attention_layernorm"), (mlp, False)]
        forward += _through(*(f"{mlp}.{name}" for name in in_mlp))
        forward += [(mlp, True), (block, True)]
    for layer in reversed(range(size.num_layers)):
        block = f"model.layers.{layer}"
        attention, mlp = f"{block}.self_attn", f"{block}.mlp"
        of_attention = [f"{attention}.{name}" for name in reversed(in_attention)]
        of_mlp = [f"{mlp}.{name}" for name in reversed(in_mlp)]
        backward += [(block, False), (mlp, False)]
        backward += _through(*of_mlp)
        backward += [
            (mlp, True),
            *_through(f"{block}.post_attention_layernorm"),
            (attention, False),
        ]
        backward += [*_through(*of_attention, f"{block}.input_layernorm"), (block, True)]
        finished += [name for name in of_mlp if not name.endswith(".act_fn")]
        finished += [
            f"{block}.post_attention_layernorm",
            *of_attention,
            f"{block}.input_layernorm",
        ]
    forward += [*_through("model.norm"), ("model", True), *_through("lm_head"), ("root", True)]
    backward.append(("model.embed_tokens", False))
    finished.append("model.embed_tokens")

    parameters = llama_parameters(size)
    owned = grouped((p.name.rpartition(".")[0], place) for place, p in enumerate(parameters))
    if size.tied:
        owned["lm_head"] = owned["model.embed_tokens"]
    number: dict[str, int] = {}
    modules: list[tuple[int, ...]] = []
    for module, _ in forward:
        if module not in number:
            number[module] = len(modules)
            modules.append(tuple(owned.get(module, ())))
    gradients: list[int] = []
    for module in finished:
        gradients += reversed(owned[module])
    rotary = 4 * (size.head_size // 2)
    return Layout(
        parameters=parameters,
        buffers=(("float32", rotary), ("float32", rotary)),  # inv_freq and original_inv_freq
        gradients=tuple(gradients),
        modules=tuple(modules),
        forward=_numbered(forward, number),
        backward=_numbered(backward, number),
    )


def _numbered(visits: Sequence[_Visit], number: Mapping[str, int]) -> tuple[int, ...]:
    """The visits as ``Layout`` has them."""
    found = []
    for module, leaves in visits:
        found.append(~number[module] if leaves else number[module])
    return tuple(found)


def record(model: nn.Module, blocks: Sequence[nn.Module], loss: Loss, batch: Batch) -> Layout:
    """Record the layout of a built model while it computes one loss and its backward.

    Gradients are cleared and hooks are removed afterwards. Hooks are placed as in DeepSpeed's stage
    3 (deepspeed/runtime/zero/parameter_offload.py:_register_deepspeed_module): on positional inputs
    and on all output tensors.
    """
    import torch

    named = dict(model.named_parameters())
    unit_of: dict[int, int] = {}
    for unit, block in enumerate(blocks, start=1):
        unit_of |= dict.fromkeys(map(id, block.parameters()), unit)
    index = {id(p): i for i, p in enumerate(named.values())}
    recorder = _Recorder(index)
    gradients: list[int] = []
    sparse: set[int] = set()
    handles: list[RemovableHandle] = []

    def accumulated(parameter: Tensor) -> None:
        gradients.append(index[id(parameter)])
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            sparse.add(index[id(parameter)])

    stored = {module: module._parameters for module in model.modules()}
    for module in model.modules():
        handles += recorder.hook(module)
        module._parameters = recorder.reading(module)
    for p in named.values():
        if p.requires_grad:
            handles.append(p.register_post_accumulate_grad_hook(accumulated))
    loss(model, batch).backward()
    for handle in handles:
        handle.remove()
    for module, parameters in stored.items():
        module._parameters = parameters
    model.zero_grad()
    return Layout(
        parameters=tuple(
            Parameter(
                name=name,
                shape=tuple(p.shape),
                unit=unit_of.get(id(p), ROOT),
                special=_special(
                    p, is_used=index[id(p)] in gradients, is_sparse=index[id(p)] in sparse
                ),
            )
            for name, p in named.items()
        ),
        buffers=tuple((str(b.dtype).removeprefix("torch."), b.nbytes) for b in model.buffers()),
        gradients=tuple(gradients),
        modules=tuple(recorder.modules),
        forward=tuple(recorder.forward),
        backward=tuple(recorder.backward),
        read_elsewhere=tuple(sorted(recorder.read_elsewhere)),
    )


def overhang(model: nn.Module, loss: Loss, batch: Batch) -> int:
    """Bytes of the storages of all gradients, less those of the gradients, after one backward.

    Autograd keeps an incoming gradient that it need not copy, also a view of a larger tensor, such
    as the gradient of a class token in a micro-batch of 1 sample (torch/csrc/autograd/functions/
    accumulate_grad.h:accumulateGrad). Negative where gradients share a storage. Those in other
    layouts than strided do not count. Gradients are cleared afterwards.
    """
    import torch

    loss(model, batch).backward()
    storages: dict[int, int] = {}
    gradients = 0
    for parameter in model.parameters():
        gradient = parameter.grad
        if gradient is not None and gradient.layout is torch.strided:
            storage = gradient.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
            gradients += gradient.nbytes
    model.zero_grad()
    return sum(storages.values()) - gradients


def _special(parameter: Tensor, *, is_used: bool, is_sparse: bool) -> str:
    """``Parameter.special`` of a parameter after a backward."""
    dtype = str(parameter.dtype).removeprefix("torch.")
    if dtype != "float32":
        return f"is {dtype}"
    if not parameter.requires_grad:
        return "is frozen"
    if not is_used:
        return "has no gradient"
    if is_sparse:
        return "has a sparse gradient"
    return ""


class _Recorder:
    """Numbers modules in call order, and records what forward and backward do with them."""

    def __init__(self, index: Mapping[int, int]) -> None:
        self._index = index
        self._numbers: dict[int, int] = {}
        self._inputs: Counter[int] = Counter()
        self.modules: list[tuple[int, ...]] = []
        self.forward: list[int] = []
        self.backward: list[int] = []
        self.read_elsewhere: set[int] = set()
        self._running: Counter[nn.Module] = Counter()

    def reading(self, module: nn.Module) -> dict[str, Parameter_ | None]:
        """The module's parameters, which notes those that are read while it does not run."""
        recorder = self

        class Reading(dict[str, "Parameter_ | None"]):
            def __getitem__(self, name: str) -> Parameter_ | None:
                parameter = super().__getitem__(name)
                is_inside = recorder._running[module] or not recorder._running.total()
                if parameter is not None and not is_inside:
                    recorder.read_elsewhere.add(recorder._index[id(parameter)])
                return parameter

        return Reading(module._parameters)

    def hook(self, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave),
        ]

    def _enter(self, module: nn.Module, inputs: tuple[object, ...]) -> object:
        if id(module) not in self._numbers:
            self._numbers[id(module)] = len(self.modules)
            self.modules.append(
                tuple(sorted({self._index[id(p)] for p in module.parameters(recurse=False)}))
            )
        self._running[module] += 1
        number = self._numbers[id(module)]
        self.forward.append(number)
        self._inputs[number] = sum(getattr(leaf, "requires_grad", False) for leaf in inputs)
        return _watched(inputs, lambda: self._finish(number))

    def _leave(self, module: nn.Module, inputs: object, output: object) -> object:
        self._running[module] -= 1
        number = self._numbers[id(module)]
        self.forward.append(~number)
        return _watched(output, lambda: self.backward.append(number))

    def _finish(self, number: int) -> None:
        self._inputs[number] -= 1
        if self._inputs[number] == 0:
            self.backward.append(~number)


def _watched(value: object, passed: Callable[[], None]) -> object:
    """The value with views for its tensors, which call ``passed`` when a gradient passes them."""
    import torch
    from torch.utils._pytree import tree_map_only

    def watch(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        view.register_hook(lambda _: passed())
        return view

    return tree_map_only(torch.Tensor, watch, value)
