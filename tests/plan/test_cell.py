"""Cells: ids that are stable, unique and made of the whole content; the reference of a cell; plain values."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from bench.errors import InputError
from bench.plan.cell import ADDED_FIELDS, REFERENCE, SHARDED_REFERENCE, Cell, Device, Precision
from tests.factories import make_cell

CANONICAL = (
    '{"accumulate":4,"accumulation_dtype":"fp32","backend":"ddp-deferred","corpus":"markov","device":"cpu",'
    '"global_batch_size":16,"learning_rate":0.001,"model":"tiny","optimizer":"adamw-foreach","precision":"fp32",'
    '"seed":0,"sequence_length":32,"timed_windows":3,"warmup_windows":2,"workload":"llama","world_size":2}'
)
"""What the golden cell's id is a hash of; if it changes, old runs cannot be compared with new ones."""

OTHERS = {
    "backend": "fsdp2-eager",
    "accumulate": 2,
    "world_size": 4,
    "global_batch_size": 32,
    "sequence_length": 33,
    "workload": "package.module:factory",
    "model": "135m",
    "corpus": "text@sha256:0123",
    "precision": Precision.BF16,
    "accumulation_dtype": "bf16",
    "optimizer": "adamw-fused",
    "learning_rate": 1e-4,
    "warmup_windows": 3,
    "timed_windows": 4,
    "seed": 1,
    "device": Device.CUDA,
    "clip_norm": 1.0,
    "twin": "again",
    "virtual": True,
    "fake_tensors": True,
    "shared_gpu": True,
    "shared_nccl": True,
    "activation_checkpointing": True,
    "selective_checkpointing": True,
    "compiled": True,
    "replicate": 2,
    "ranks_per_node": 1,
}
COMMITTED = Path(__file__).parents[2] / "results" / "cpu" / "trials.jsonl"


def test_golden_id() -> None:
    assert make_cell().cell_id == "e1abc0ac9cce"
    assert hashlib.sha256(CANONICAL.encode()).hexdigest()[:12] == "e1abc0ac9cce"


def test_ids_of_a_committed_run_are_for_ever() -> None:
    """Fields that came later must not change the id of a cell that has their defaults."""
    records = [json.loads(line) for line in COMMITTED.read_text().splitlines()]
    first = next(record for record in records if record["cell"]["backend"] == "reference")
    assert first["cell_id"] == "b4f02074bf8d"
    for record in records:
        assert Cell.from_dict(record["cell"]).cell_id == record["cell_id"]
        assert Cell.from_dict(Cell.from_dict(record["cell"]).to_dict()).cell_id == record["cell_id"]


def test_every_field_is_of_the_first_release_or_has_its_default_named() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Cell)}
    assert {name: defaults[name] for name in ADDED_FIELDS} == ADDED_FIELDS
    assert json.loads(CANONICAL).keys() | ADDED_FIELDS.keys() == defaults.keys()


def test_others_changes_every_field() -> None:
    assert OTHERS.keys() == {field.name for field in dataclasses.fields(Cell)}
    assert all(getattr(make_cell(), name) != value for name, value in OTHERS.items())


@pytest.mark.parametrize("name", OTHERS)
def test_id_depends_on_every_field(name: str) -> None:
    assert make_cell(**{name: OTHERS[name]}).cell_id != make_cell().cell_id


def test_from_dict_refuses_what_it_does_not_know() -> None:
    values = make_cell().to_dict()
    with pytest.raises(InputError, match="colour is unknown"):
        Cell.from_dict({**values, "colour": "red"})
    with pytest.raises(InputError, match="precision is 'fp8'; it must be 'fp32' or 'bf16'"):
        Cell.from_dict({**values, "precision": "fp8"})
    with pytest.raises(InputError, match="device is 'tpu'; it must be"):
        Cell.from_dict({**values, "device": "tpu"})
    del values["backend"]
    with pytest.raises(InputError, match="backend is missing"):
        Cell.from_dict(values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", 7),
        ("world_size", 0),
        ("accumulate", -1),
        ("accumulate", True),
        ("sequence_length", 2**63),
        ("learning_rate", float("nan")),
        ("learning_rate", "1"),
        ("virtual", 1),
    ],
)
def test_from_dict_refuses_values_that_cannot_be(field: str, value: object) -> None:
    with pytest.raises(InputError, match=f"{field} is .*; it must be "):
        Cell.from_dict({**make_cell().to_dict(), field: value})
    with pytest.raises(InputError, match="it must be a table"):
        Cell.from_dict([value])  # type: ignore[arg-type]


def test_reference_is_one_process_with_the_whole_batch_in_fp32() -> None:
    cell = make_cell(precision=Precision.BF16)
    truth = cell.reference()
    assert (truth.backend, truth.accumulate, truth.world_size, truth.precision) == (
        REFERENCE,
        1,
        1,
        "fp32",
    )
    assert truth.micro_batch_size == cell.global_batch_size
    assert truth.reference() == truth


def gpu_cell(model: str, world_size: int = 8, samples: int = 2, **changes: Any) -> Cell:
    """Some samples of 2048 tokens for each of the GPUs."""
    values = {
        "model": model,
        "device": Device.CUDA,
        "world_size": world_size,
        "accumulate": samples,
    }
    values |= {
        "sequence_length": 2048,
        "global_batch_size": samples * world_size,
        "precision": Precision.BF16,
    }
    return make_cell(**(values | changes))


def test_where_one_gpu_cannot_hold_the_model_its_reference_is_sharded_over_as_many() -> None:
    truth = gpu_cell("8b").reference()
    assert (truth.backend, truth.accumulate, truth.world_size, truth.precision) == (
        SHARDED_REFERENCE,
        2,
        8,
        "fp32",
    )
    assert truth.micro_batch_size == 1, "a slice of 2048 tokens"
    assert gpu_cell("8b", samples=3, sequence_length=1024).reference().accumulate == 3, (
        "two do not divide three"
    )
    assert truth.activation_checkpointing and truth.is_reference and truth.reference() == truth
    for other in (
        gpu_cell("3b"),
        gpu_cell("8b", world_size=1),
        gpu_cell("8b", shared_gpu=True),
        gpu_cell("8b", device=Device.CPU),
        gpu_cell("8b", workload="mine:Own"),
    ):
        assert (other.reference().backend, other.reference().world_size) == (REFERENCE, 1)
    checked = gpu_cell("135m").reference(sharded=True)
    assert checked.is_reference and checked.backend == SHARDED_REFERENCE
    assert checked.reference() == gpu_cell("135m").reference(), (
        "what is held against the single process"
    )
    assert gpu_cell("135m", world_size=1).reference(sharded=True).backend == REFERENCE, (
        "there is nothing to shard"
    )


@pytest.mark.parametrize("name", OTHERS)
def test_cells_share_a_reference_only_if_they_train_the_same(name: str) -> None:
    shares = make_cell(**{name: OTHERS[name]}).reference() == make_cell().reference()
    alike = (
        "backend",
        "accumulate",
        "world_size",
        "precision",
        "twin",
        "shared_gpu",
        "shared_nccl",
        "activation_checkpointing",
        "selective_checkpointing",
        "compiled",
        "replicate",
        "ranks_per_node",
    )
    assert shares == (name in alike)
