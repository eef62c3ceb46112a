"""Collectives as counted on real process groups: equal to the formulas, on every rank, for every built-in backend."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from bench.backends.base import registry
from bench.judge import expected
from bench.judge.formulas import expect
from bench.measure.collectives import CollectiveCounter
from bench.plan.cell import REFERENCES, Cell, Device
from bench.workload.layout import Layout, Parameter
from tests import worlds
from tests.factories import make_cell, make_manifest, make_record, make_tables, parsed_records

BACKENDS = [name for name in registry() if name not in REFERENCES]


def formula(cell: Cell, layout: Layout | None = None) -> dict[tuple[str, str], tuple[int, int]]:
    """The expected calls and bytes of a built-in backend's cell."""
    expectation = expect(cell, layout or worlds.layout(cell))
    assert expectation is not None
    return {(row.op, row.dtype): (row.calls, row.payload_bytes) for row in expectation.collectives}


@pytest.mark.usefixtures("lonely_group")
def test_the_self_test_finds_a_group_that_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"^collectives cannot be counted: .* is seen as \[\]$"):
        CollectiveCounter().self_test(torch.device("cpu"))


@pytest.mark.usefixtures("lonely_group")
@pytest.mark.parametrize("world_size", [5, 6, 7, 64])
def test_the_self_test_allows_for_how_nccl_averages(
    monkeypatch: pytest.MonkeyPatch, world_size: int
) -> None:
    """NCCL multiplies by the fp32 that is nearest to 1/W, then sums, beginning with any rank of the ring."""
    issue = dist.all_reduce
    parts = [
        torch.tensor(float(number)) * torch.tensor(1 / world_size) for number in range(world_size)
    ]
    averages = {float(sum(parts[first:] + parts[:first])) for first in range(world_size)}
    assert (world_size == 64) == (averages == {(world_size - 1) / 2})
    for average in averages:
        monkeypatch.setattr(
            dist, "all_reduce", lambda v, op, average=average: (issue(v, op=op), v.fill_(average))
        )
        monkeypatch.setattr(dist, "get_world_size", lambda: world_size)
        CollectiveCounter().self_test(torch.device("cpu"))


@pytest.mark.usefixtures("lonely_group")
def test_counter_counts_only_while_counting_and_by_dtype() -> None:
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    counter = CollectiveCounter()
    with counter:
        dist.all_reduce(torch.zeros(10))
        counter.counting = True
        wait_tensor(all_reduce(torch.zeros(10), "sum", dist.group.WORLD))  # type: ignore[arg-type]
        dist.all_reduce(torch.zeros(10, dtype=torch.bfloat16))
        dist.all_reduce(torch.zeros(6))
        dist.broadcast(torch.zeros(3), src=0)
        torch.zeros(5) + 1
    assert counter.rows() == [
        {
            "op": "all_reduce",
            "group": "world",
            "dtype": "bfloat16",
            "calls": 1,
            "payload_bytes": 20,
        },
        {"op": "all_reduce", "group": "world", "dtype": "float32", "calls": 2, "payload_bytes": 64},
        {"op": "broadcast", "group": "world", "dtype": "float32", "calls": 1, "payload_bytes": 12},
    ]


def test_counter_takes_the_whole_of_gathers_and_scatters_and_names_their_group() -> None:
    from torch.distributed._functional_collectives import all_reduce, wait_tensor
    from torch.distributed.device_mesh import init_device_mesh

    with worlds.pretended(4):
        mesh = init_device_mesh("cpu", (2, 2))
        counter = CollectiveCounter()
        counter.counting = True
        with counter:
            dist.all_gather_into_tensor(torch.zeros(40), torch.zeros(10))
            dist.reduce_scatter_tensor(torch.zeros(10), torch.zeros(40))
            dist.all_gather([torch.zeros(5) for _ in range(4)], torch.zeros(5))
            for dimension in (0, 1):
                group = mesh.get_group(dimension)
                dist.reduce_scatter_tensor(torch.zeros(10), torch.zeros(20), group=group)
                wait_tensor(all_reduce(torch.zeros(10), "sum", group))
    assert counter.rows() == [
        {"op": op, "group": group, "dtype": "float32", "calls": calls, "payload_bytes": size}
        for op, group, calls, size in (
            ("all_gather", "world", 2, 160 + 80),
            ("all_reduce", "replicate", 1, 40),
            ("all_reduce", "shard", 1, 40),
            ("reduce_scatter", "replicate", 1, 80),
            ("reduce_scatter", "shard", 1, 80),
            ("reduce_scatter", "world", 1, 160),
        )
    ]


@pytest.mark.parametrize("tensors", [contextlib.nullcontext, FakeTensorMode])
def test_counter_sees_what_distributed_tensors_reduce_within_an_operator(tensors: Any) -> None:
    """torch calls it below the keys of autograd, and on fake tensors without the operators of c10d."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    with worlds.pretended(4):
        mesh = init_device_mesh("cpu", (4,))
        counter = CollectiveCounter()
        counter.counting = True
        with tensors(), counter:
            parameter = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Shard(0)]))
            parameter.grad = DTensor.from_local(torch.ones(4), mesh, [Shard(0)])
            torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert counter.rows() == [
        {"op": "all_reduce", "group": "world", "dtype": "float32", "calls": 1, "payload_bytes": 4}
    ]


def test_other_models_and_backends_are_left_empty_unless_a_rank_tells() -> None:
    users = make_cell(backend="fsdp2-eager", workload="mine:Own")
    plugin = make_cell(backend="somebodys")
    rows = [{"op": "all_gather", "dtype": "float32", "calls": 14, "payload_bytes": 7 * 8 * 8}]
    records = [make_record(cell, collectives=rows) for cell in (users, plugin)]
    layout = Layout(
        parameters=(
            Parameter(name="a", shape=(7,), unit=0),
            Parameter(name="b", shape=(2, 3), unit=1),
        ),
        gradients=(1, 0),
    )
    records[0]["layout"] = json.loads(json.dumps(layout.to_json()))
    tables = make_tables(records, make_manifest([users, plugin]))
    assert expected.fill(tables)[0].collectives["expected_calls"].isna().all()
    filled, findings = expected.fill(tables, parsed_records(records))
    frame = filled.collectives
    assert frame[frame["cell_id"] == plugin.cell_id]["expected_calls"].isna().all()
    row = frame[(frame["cell_id"] == users.cell_id) & (frame["op"] == "all_gather")].iloc[0]
    assert (row["expected_calls"], row["expected_payload_bytes"]) == (4 * 3, 4 * 4 * (8 + 2 * 6))
    assert "all_gather" in findings[users.cell_id][0]


def test_on_cuda_what_was_not_counted_at_this_n_is_no_finding_and_what_sends_nothing_is() -> None:
    cell = make_cell(backend="fsdp2-eager", device=Device.CUDA)
    record = make_record(cell, passes=["time", "update", "exposure"])
    del record["collectives"], record["memory"]
    assert not expected.fill(make_tables([record], make_manifest([cell])))[1]
    _, findings = expected.fill(
        make_tables([make_record(cell, collectives=[])], make_manifest([cell]))
    )
    assert "all_gather of float32: 0 calls" in findings[cell.cell_id][0]
