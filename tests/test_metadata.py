"""Metadata of distributed checkpoints: read whole, and without running what stands in the file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint import filesystem

from bench.backends import metadata
from bench.backends.base import Job
from bench.backends.lightning import LightningFSDP2


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "pickle", pickle)


def state(factor: int) -> dict[str, Any]:
    return {
        "fp32": torch.ones(3, 4) * factor,
        "bf16": torch.ones(2, dtype=torch.bfloat16) * factor,
        "int64": torch.arange(5) * factor,
        "bool": torch.tensor([True, factor > 1]),
        "step": factor,
    }


def test_what_torch_writes_is_read_whole(tmp_path: Path) -> None:
    checkpoint.save(state(3), checkpoint_id=tmp_path, no_dist=True)
    found = state(1)
    metadata.restrict()
    checkpoint.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert found.keys() == state(3).keys()
    assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(value)) for key, value in state(3).items())
    checkpoint.save(state(2), checkpoint_id=tmp_path / "again", no_dist=True)  # writing is as before
    assert (tmp_path / "again" / ".metadata").is_file()


class Trap:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.does = (function, arguments)

    def __reduce__(self) -> Any:
        return self.does


TRAPS = {
    "os": Trap(os.mkdir, "ran"),
    "eval": Trap(eval, "__import__('os').mkdir('ran')"),
    "torch": Trap(torch.save, 1, "ran"),
    "a name alone": os.mkdir,
}


@pytest.mark.parametrize("trap", TRAPS.values(), ids=TRAPS)
def test_what_is_not_metadata_is_not_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trap: Any) -> None:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(state(3), checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(trap))
    metadata.restrict()
    with pytest.raises(checkpoint.api.CheckpointException, match="is no part of a checkpoint's metadata"):
        checkpoint.load(state(1), checkpoint_id=tmp_path, no_dist=True)
    assert not (tmp_path / "ran").exists()


def test_lightning_resumes_with_the_restricted_reader(tmp_path: Path) -> None:
    readers = []
    backend = LightningFSDP2()
    backend.module = cast(Any, None)
    backend.trainer = SimpleNamespace(fit=lambda *_, **__: readers.append(filesystem.pickle.load))
    backend.again(cast(Job, SimpleNamespace(resume=None, loader=[], unsharded=None)))
    backend.again(cast(Job, SimpleNamespace(resume=tmp_path, loader=[], unsharded=None)))
    assert readers == [pickle.load, metadata.load]
