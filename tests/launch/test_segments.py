"""NCCL's shared memory: what ended ranks had mapped is removed, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.launch import stragglers

MAP = """
import mmap, sys, time
with open(sys.argv[1], "r+b") as file:
    kept = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
time.sleep(60)
"""


@pytest.fixture
def files() -> Iterator[list[Path]]:
    made = [Path(f"{stragglers.SEGMENT_PREFIX}test-{uuid.uuid4().hex}") for _ in range(2)]
    for path in made:
        path.write_bytes(bytes(4096))
    yield made
    for path in made:
        path.unlink(missing_ok=True)


def mapping(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", MAP, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "mapped\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_what_an_ended_process_had_is_removed_and_nothing_else(files: list[Path]) -> None:
    own, other = mapping(files[0]), mapping(files[1])
    try:
        found = stragglers.mapped([own.pid])
        assert [one.path for one in found] == [str(files[0])]
        assert found < stragglers.mapped([own.pid, other.pid])
    finally:
        end(own)
    stragglers.remove(found)
    assert not files[0].exists() and files[1].exists()
    end(other)


def test_what_somebody_still_has_stays(files: list[Path]) -> None:
    own, peer = mapping(files[0]), mapping(files[0])
    found = stragglers.mapped([own.pid])
    end(own)
    stragglers.remove(found)
    assert files[0].exists()
    end(peer)
    stragglers.remove(found)
    assert not files[0].exists()
