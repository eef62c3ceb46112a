"""Locks: the second bench is refused with the name of the first, and what a dead one left is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bench import files
from bench.errors import InputError
from bench.launch import gpus
from tests.conftest import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from bench import files
with files.run_folder(Path(sys.argv[1]), "here"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_is_told_of_the_first_and_takes_over_when_it_is_dead(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command, environment = (
        [sys.executable, "-c", HOLDER, str(folder)],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    first = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None and first.stdout.readline() == "held\n"
    host = re.escape(socket.gethostname())
    words = rf"^--out x: .* process {first.pid} on {host} since \d{{4}}-.*; wait"
    with pytest.raises(files.BusyError, match=words), files.run_folder(folder, "--out x"):
        pytest.fail("two hold it")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert (folder / files.FILE).exists(), "it could not tidy up"
    with files.run_folder(folder, "--out x"):
        assert json.loads((folder / files.FILE).read_text())["pid"] == os.getpid()
    assert list(folder.iterdir()) == []


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(number: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(InputError, match="cannot be locked"), files.run_folder(tmp_path, "here"):
        pytest.fail("it is not held")


def test_gpus_are_held_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with gpus.hold_gpus(["GPU-1", "GPU-2"]):
        words = f"GPU GPU-2: .* process {os.getpid()} .*CUDA_VISIBLE_DEVICES"
        with pytest.raises(files.BusyError, match=words), gpus.hold_gpus(["GPU-0", "GPU-2"]):
            pytest.fail("two hold it")
        with gpus.hold_gpus(["GPU-0", "../../GPU-3"]):
            names = {path.name for path in (tmp_path / "accumulation-bench").iterdir()}
    assert names == {"gpu-GPU-0.lock", "gpu-GPU-1.lock", "gpu-GPU-2.lock", "gpu-______GPU-3.lock"}
    assert list((tmp_path / "accumulation-bench").iterdir()) == []


@pytest.mark.parametrize("spoil", ["open", "file"])
def test_a_runtime_folder_of_others_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "accumulation-bench"
    if spoil == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.write_text("")
    with pytest.raises(InputError, match="XDG_RUNTIME_DIR"):
        gpus.runtime_folder()


def test_a_runtime_folder_without_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(gpus.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = gpus.runtime_folder()
    assert folder == tmp_path / f"accumulation-bench-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
