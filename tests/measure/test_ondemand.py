"""Views made on demand: the very views that torch would have made, and no operators for those that nobody uses."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from bench.measure.ledger import TensorLedger
from bench.measure.views import LOOPS, OnDemand, View, loops, on_demand

NUMEL = 12


@pytest.fixture(autouse=True)
def fake() -> Iterator[None]:
    """Tensors are fake."""
    with FakeTensorMode():
        yield


class Operators(TorchDispatchMode):
    """Notes which operators of aten are dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":  # a fake tensor is asked for its device in each
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def place(view: Any) -> tuple[Any, ...]:
    """What tells a view from another: where it lies, and what it is."""
    tensor = view.tensor() if isinstance(view, View) else view
    assert isinstance(tensor, FakeTensor)
    storage = tensor.untyped_storage()._cdata
    return tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, storage


CUTS: dict[str, Callable[[Tensor], Any]] = {
    **{f"narrow {start}, {n}": lambda t, s=start, n=n: [t.narrow(0, s, n)] for start, n in ((0, 4), (3, 4), (12, 0))},
    **{
        f"slice {index}": lambda t, i=index: [t[i]]
        for index in (slice(2, 5), slice(5), slice(None), slice(4, 99), slice(50, 60), slice(-3, None), slice(1, 9, 2))
    },
    **{f"chunk {n}": lambda t, n=n: torch.chunk(t, n) for n in (1, 2, 3, 5, 7, 12, 40)},
    "chunk by name": lambda t: torch.chunk(t, 3, dim=0),
    "index": lambda t: [t[3]],
    "mask": lambda t: [t[None, 2:]],
    "view of a view": lambda t: [t.narrow(0, 4, 6).narrow(0, 1, 3)],
    "slice of a view": lambda t: [t[4:10][1:3]],
}
"""Ways to cut a tensor of ``NUMEL`` elements."""


@pytest.mark.parametrize("way", CUTS)
def test_views_on_demand_are_those_that_torch_makes(way: str) -> None:
    whole = torch.empty(NUMEL, dtype=torch.bfloat16)
    right = CUTS[way](whole)
    with OnDemand():
        found = CUTS[way](whole)
    assert [place(view) for view in found] == [place(view) for view in right]
    assert [view.numel() for view in found] == [view.numel() for view in right]
    assert {view.dtype for view in found} == {torch.bfloat16}
    assert {view.device for view in found} == {whole.device}


def test_the_first_of_them_is_a_tensor_at_once_and_the_others_when_they_are_used() -> None:
    whole = torch.empty(NUMEL)
    with OnDemand(), Operators() as seen:
        first, *others = [whole.narrow(0, start, 3) for start in range(0, NUMEL, 3)]
        assert isinstance(first, FakeTensor)
        assert all(type(view) is View for view in others)
        assert sum(view.numel() for view in others) == 9
        assert seen.names == ["aten::slice.Tensor"]
        assert others[1].view(3, 1).shape == (3, 1)
        assert seen.names == ["aten::slice.Tensor", "aten::slice.Tensor", "aten::view"]
    target = torch.empty(3)
    target.copy_(others[0])  # type: ignore[call-overload]
    assert torch.add(target, others[0]).shape == (3,)  # type: ignore[call-overload]
    assert others[2].tensor() is others[2].tensor()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(4, 3), "of two dimensions"),
        (lambda: torch.empty(NUMEL, requires_grad=True), "followed by autograd"),
    ],
)
def test_other_tensors_are_cut_by_torch(make: Callable[[], Tensor], why: str) -> None:
    whole = make()
    with OnDemand():
        assert isinstance(whole.narrow(0, 1, 2), FakeTensor), why
        assert isinstance(whole[1:3], FakeTensor), why
        assert all(isinstance(part, FakeTensor) for part in torch.chunk(whole, 2)), why


def test_wrong_cuts_fail_as_torch_fails() -> None:
    whole = torch.empty(NUMEL)
    with OnDemand():
        view = whole.narrow(0, 4, 4)
        for cut in (lambda: whole.narrow(0, 10, 3), lambda: view.narrow(0, 3, 2), lambda: torch.chunk(whole, 0)):
            with pytest.raises((RuntimeError, IndexError)):
                cut()


def test_views_are_joined_into_new_memory_without_being_made() -> None:
    with OnDemand(), TensorLedger("cpu") as ledger, Operators() as seen:
        whole = torch.empty(NUMEL, dtype=torch.bfloat16)
        parts = [whole.narrow(0, start, 3) for start in range(0, NUMEL, 3)]
        assert ledger.live == 2 * NUMEL
        joined = torch.cat([*parts, torch.empty(2, dtype=torch.bfloat16)])
    assert (joined.shape, joined.dtype, joined.requires_grad) == ((NUMEL + 2,), torch.bfloat16, False)
    assert place(joined)[-1] != place(parts[0])[-1]
    assert ledger.peak == 2 * (NUMEL + 2) + 2 * (NUMEL + 2)
    assert len(seen.names) == 4  # the whole, rank 0's view, two more elements, all of them joined


def test_other_joins_are_left_to_torch() -> None:
    whole = torch.empty(NUMEL)
    with OnDemand():
        part = whole.narrow(0, 3, 3)
    assert torch.cat([part, torch.empty(2, dtype=torch.float64)]).dtype is torch.float64  # type: ignore[list-item]
    assert torch.cat([part, part], dim=-1).shape == (6,)  # type: ignore[list-item]
    assert torch.stack([part, part]).shape == (2, 3)  # type: ignore[list-item]
    out = torch.empty(6)
    assert torch.cat([part, part], out=out) is out  # type: ignore[list-item]
    with pytest.raises(RuntimeError):
        torch.cat([part, torch.empty(2, 2)])  # type: ignore[list-item]


def test_a_view_keeps_the_memory_that_it_is_of_and_no_longer() -> None:
    with TensorLedger("cpu") as ledger:
        whole = torch.empty(NUMEL)
        with OnDemand():
            part = whole.narrow(0, 3, 3)
        del whole
        assert ledger.live == 4 * NUMEL
        del part
        assert ledger.live == 0


def test_what_a_function_returns_are_tensors() -> None:
    whole = torch.empty(NUMEL)
    cut = on_demand(lambda tensor: {"views": [tensor[0:2], tensor[2:4]], "number": 3})(whole)
    assert all(isinstance(view, FakeTensor) for view in cut["views"])
    assert cut["number"] == 3
    assert isinstance(whole[2:4], FakeTensor)


def test_a_package_without_such_functions_has_none() -> None:
    assert loops(("lightning",)) == []
    assert loops(()) == []


# DeepSpeed's own loops.

pytest.importorskip("deepspeed")


def test_the_installed_deepspeed_has_all_functions_that_are_listed() -> None:
    assert len(loops(("deepspeed",))) == len(LOOPS["deepspeed"])


def reduce(world_size: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, wrap: Any) -> dict[str, Any]:
    """What DeepSpeed's coalesced reduce-scatter hands to the group, returns, and takes, on rank 0 of so many."""
    from deepspeed.runtime.comm import coalesced_collectives as module

    sent: list[tuple[Any, ...]] = []

    def reduce_scatter(output: Tensor, whole: Tensor, group: Any, async_op: bool) -> None:
        assert type(output) is type(whole) is FakeTensor
        assert output.untyped_storage()._cdata == whole.untyped_storage()._cdata
        sent.append((output.storage_offset(), tuple(output.shape), tuple(whole.shape), whole.dtype))

    group = SimpleNamespace(
        get_rank=lambda group: 0, get_world_size=lambda group: world_size, reduce_scatter_fn=reduce_scatter
    )
    monkeypatch.setattr(module, "dist", group)
    gradients = [torch.empty(size) for size in sizes]
    with TensorLedger("cpu") as ledger, Operators() as seen:
        parts = wrap(module.reduce_scatter_coalesced)(gradients)
    assert all(type(part) is FakeTensor for part in parts)
    found = [(part.storage_offset(), tuple(part.shape), part.dtype) for part in parts]
    return {"sent": sent, "parts": found, "peak": ledger.peak, "live": ledger.live, "operators": len(seen.names)}


@pytest.mark.parametrize("sizes", [(64,), (7,), (64, 128, 8), (5, 64, 63, 1)])
@pytest.mark.parametrize("world_size", [1, 2, 4, 8, 64])
def test_a_reduce_scatter_of_deepspeed_is_the_same(
    monkeypatch: pytest.MonkeyPatch, world_size: int, sizes: tuple[int, ...]
) -> None:
    """What rank 0 sends and gets, the peak of memory, and what is left of it; with fewer operators."""
    plain = reduce(world_size, sizes, monkeypatch, lambda function: function)
    faster = reduce(world_size, sizes, monkeypatch, on_demand)
    before, after = plain.pop("operators"), faster.pop("operators")
    assert faster == plain
    assert after <= before
    assert plain["parts"][0][1] == (min(math.ceil(sizes[0] / world_size), sizes[0]),)


def test_its_operators_do_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        wrap: [reduce(size, (1024, 2048), monkeypatch, wrap)["operators"] for size in (8, 512)]
        for wrap in (on_demand, lambda function: function)
    }
    (small, large), (before_small, before_large) = found.values()
    assert large == small
    assert before_large - before_small > 500
