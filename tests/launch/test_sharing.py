"""Ranks that share GPUs: what is run, what each rank is told, and that no time of theirs is kept or judged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.backends.base import registry
from bench.errors import InputError
from bench.judge.gates import judge
from bench.launch import gpus, rank, shared_nccl
from bench.plan.cell import REFERENCE, Device
from bench.plan.expand import expand
from bench.plan.task import Task
from bench.plan.world import World
from tests.factories import (
    make_cell,
    make_gpu,
    make_manifest,
    make_matrix,
    make_record,
    make_tables,
)

BACKENDS = registry()
GPUS: list[dict[str, Any]] = [
    {"index": i, "name": "NVIDIA H100", "uuid": f"GPU-{i}", "instances": [{"mig": f"MIG-{i}"}]}
    for i in range(2)
]
SHARED = make_cell(device=Device.CUDA, shared_gpu=True)
CUDA_MEMORY = {"allocated": 5, "active": 6, "reserved": 7, "num_alloc_retries": 0, "num_ooms": 0}


# What is run.


def shared(num_gpus: int, **axes: Any) -> list[Any]:
    made = make_matrix({"device": "cuda", "share_gpu": True}, **axes)
    return expand(made, BACKENDS, num_gpus).cells


def test_more_ranks_than_gpus_are_cells_of_their_own() -> None:
    cells = shared(1, world_size=[2, 4])
    alone = expand(make_matrix({"device": "cuda"}, world_size=[2, 4]), BACKENDS, 4).cells
    (reference,) = [cell for cell in cells if cell.backend == REFERENCE]
    others = [cell for cell in cells if cell.backend != REFERENCE]
    assert others and all(cell.world.shares_gpus for cell in others)
    assert {cell.world_size for cell in others} == {2, 4}
    assert not any(cell.twin for cell in cells), "there is no noise to be measured"
    assert not reference.world.shares_gpus and reference in alone, (
        "the reference has the GPU for itself"
    )
    assert not {cell.cell_id for cell in others} & {cell.cell_id for cell in alone}
    assert all(cell.label.endswith(" shared GPU") for cell in others)


def test_one_rank_for_each_gpu_shares_none() -> None:
    with pytest.raises(InputError, match=r"world_size is 'all', .* with share_gpu"):
        shared(1, world_size="all")


# What a rank is told.


def test_ranks_are_dealt_out_to_the_gpus() -> None:
    environments = [rank.shared_gpu_environment(number, 5, GPUS) for number in range(5)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in environments] == [
        "GPU-0",
        "GPU-1",
        "GPU-0",
        "GPU-1",
        "GPU-0",
    ]
    assert [each["GROUP_RANK"] for each in environments] == list("01234")
    assert {each["LOCAL_RANK"] for each in environments} == {"0"}
    assert {(each["LOCAL_WORLD_SIZE"], each["GROUP_WORLD_SIZE"]) for each in environments} == {
        ("1", "5")
    }
    instance = {**GPUS[1], "mig": "MIG-7"}
    assert rank.shared_gpu_environment(3, 4, [instance])["CUDA_VISIBLE_DEVICES"] == "MIG-7"
    with pytest.raises(RuntimeError, match="no GPU is visible"):
        rank.shared_gpu_environment(0, 2, [])


def cuda_task(world_size: int, world: World = World.REAL) -> Task:
    return Task(backend="", world_size=world_size, folder="", device=Device.CUDA, world=world)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called on the way into a process group on pretended GPUs, of rank 3 of 4."""
    calls: list[Any] = []
    visible = lambda: os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: E731
    monkeypatch.setattr(
        os, "environ", {**os.environ, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3"}
    )
    monkeypatch.setattr(gpus, "gpus", lambda: gpus._visible(GPUS, visible()))
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(
        torch.accelerator,
        "set_device_index",
        lambda device: calls.append(f"{device} of {visible()}"),
    )
    monkeypatch.setattr(
        dist, "init_process_group", lambda *given, **named: calls.append((given, named))
    )
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("barrier"))
    return calls


def test_a_rank_that_shares_joins_over_gloo_on_its_only_device(joined: list[Any]) -> None:
    device = rank.join(cuda_task(4, World.SHARED_GPU))
    assert device == torch.device("cuda", 0)
    assert joined == ["cuda:0 of GPU-1", ((rank.SHARED_GPU_GROUP,), {}), "barrier"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1", (
        "CUDA has read the UUID; DeepSpeed reads indices only"
    )
    assert os.environ["GROUP_RANK"] == "3"


def test_over_nccl_each_rank_is_a_host_of_its_own_and_leaves_protocols_to_nccl(
    joined: list[Any],
) -> None:
    os.environ |= {"NCCL_PROTO": "LL128", "NCCL_ALGO": "Tree", "NCCL_DEBUG": "WARN"}
    device = rank.join(replace(cuda_task(4, World.SHARED_GPU), shared_nccl=True))
    assert joined == ["cuda:0 of GPU-1", (("nccl",), {"device_id": device})]
    assert os.environ["NCCL_HOSTID"] == "rank 3" != shared_nccl.environment(2)["NCCL_HOSTID"]
    assert os.environ["NCCL_NET"] == "Socket" and os.environ["NCCL_DEBUG"] == "WARN"
    assert not {"NCCL_PROTO", "NCCL_ALGO"} & os.environ.keys()


def test_a_rank_with_a_gpu_of_its_own_joins_over_nccl(joined: list[Any]) -> None:
    device = rank.join(cuda_task(4))
    assert device == torch.device("cuda", 3)
    assert joined == ["cuda:3 of None", (("nccl",), {"device_id": device})]
    assert os.environ["LOCAL_RANK"] == "3"


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        ("GPU-1,GPU-0", "1,0"),
        ("MIG-1", "1"),
        ("1,0", "1,0"),
        (
            "GPU-unknown",
            "GPU-unknown",
        ),  # also where there is no nvidia-ml-py, without which DeepSpeed reads nothing
    ],
)
def test_frameworks_read_indices_where_the_user_gave_uuids(
    joined: list[Any], given: str, becomes: str
) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = given
    rank.join(cuda_task(4))
    assert joined[0] == f"cuda:3 of {given}", "CUDA is told what the user said"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == becomes


def test_the_group_is_not_one_that_a_mesh_replaces_by_nccl(tmp_path: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(rank.SHARED_GPU_GROUP, store=store, rank=0, world_size=1)
    try:
        assert dist.get_backend() != "gloo"  # DeviceMesh asks for that name
        values = torch.ones(2)
        dist.all_reduce(values, op=dist.ReduceOp.AVG)
        assert values.tolist() == [1.0, 1.0]
        assert dist.get_backend_config() == rank.SHARED_GPU_GROUP
    finally:
        dist.destroy_process_group()


# What is kept.


@pytest.mark.parametrize("over_nccl", [False, True])
def test_no_time_is_kept_and_everything_else_is(*, over_nccl: bool) -> None:
    shared = replace(SHARED, shared_nccl=over_nccl)
    cells = [
        shared.reference(),
        shared,
        make_cell(backend="fsdp2-eager", device=Device.CUDA, shared_gpu=True),
    ]
    told = {"time": {"cuda_memory": CUDA_MEMORY}, "gpus": {"gpus": [make_gpu()], "notes": []}}
    records = [
        make_record(cell, repeat, **{name: dict(value) for name, value in told.items()})
        for cell in cells
        for repeat in range(6)
    ]
    made = judge(make_tables(records, make_manifest([SHARED], baseline="ddp-deferred")))
    alone, shares = made.trials.iloc[0], made.trials.iloc[6]
    assert (alone["shared_gpu"], shares["shared_gpu"]) == (False, True)
    times = [
        "step_time_s",
        "num_warmup_steps",
        "tokens_per_s",
        "mfu",
        "mfu_of_matmul",
        "cpu_s_per_micro_batch",
    ]
    times += [
        "energy_j_per_step",
        "energy_j_per_token",
        "power_w",
        "sm_clock_mhz",
        "collective_s",
        "exposed_s",
    ]
    assert shares[times].isna().all()
    assert alone[["step_time_s", "tokens_per_s", "power_w", "cpu_s_per_micro_batch"]].notna().all()
    assert (shares["optimizer_steps_observed"], shares["peak_memory_bytes"]) == (5, 5)
    assert shares["update_error"] == 1e-7 and shares["num_operators_per_micro_batch"] == 500
    assert set(made.steps["cell_id"]) == {SHARED.reference().cell_id}
    assert shared.cell_id in set(made.losses["cell_id"])
