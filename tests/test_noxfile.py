"""What the sessions of nox say before they are silent for long."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cuda_stub import build


@functools.cache
def load_noxfile() -> Any:
    pytest.importorskip("nox", reason="nox runs the sessions; the tests themselves do without")
    path = Path(__file__).parents[1] / "noxfile.py"
    spec = importlib.util.spec_from_file_location("the_noxfile", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_minutes_of_pip_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_noxfile()
    for name in module.INSTALLED_FROM:
        (tmp_path / name).write_text("made")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin")
    done: list[str] = []
    session = SimpleNamespace(
        bin=str(tmp_path),
        virtualenv=SimpleNamespace(location=str(tmp_path)),
        log=done.append,
        install=lambda *_, **__: done.append("pip"),
    )
    for _ in range(2):
        module.install.func(session)
    said, then, again = done
    assert then == "pip" and "torch" in said and "minutes" in said, "before pip, what is installed"
    assert "are as they were" in again and "minutes" not in again, "nothing is installed twice"


def test_a_machine_that_cannot_build_the_cuda_stub_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> str:
        assert build.main([str(tmp_path)]) == build.SKIPPED
        return capsys.readouterr().err

    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert "no C compiler" in said()
    monkeypatch.setattr(build.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(build.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    assert "1.0 GB are free" in said() and not (tmp_path / "torch-cuda").exists()
    monkeypatch.setattr(build.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**11))
    answer = SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution found for torch")
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: answer)
    assert "there is no CUDA wheel: ERROR: No matching distribution" in said()


def test_only_what_a_machine_lacks_skips_the_session_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load_noxfile()
    done: list[str] = []
    session = SimpleNamespace(
        posargs=["--slow"],
        skip=lambda why: done.append(f"skipped: {why}"),
        error=lambda why: done.append(f"failed: {why}"),
        run=lambda *command: done.append(" ".join(command)),
    )

    def nox_cuda(status: int, words: str) -> str:
        answer = SimpleNamespace(returncode=status, stderr=words)
        monkeypatch.setattr(module.subprocess, "run", lambda *_, **__: answer)
        done.clear()
        module.cuda.func(session)
        return done[0]

    monkeypatch.setenv("CUDA_STUB", "/elsewhere")
    assert nox_cuda(0, "") == "python -m pytest tests/cuda --cuda-stub /elsewhere --slow"
    assert nox_cuda(build.SKIPPED, "there is no C compiler\n") == "skipped: there is no C compiler"
    assert nox_cuda(1, "error: expected ';'").startswith("failed: ")
