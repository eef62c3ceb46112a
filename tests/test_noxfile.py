"""What the sessions of nox say before they are silent for long."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest


def test_minutes_of_pip_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nox", reason="nox runs the sessions; the tests themselves do without")
    path = Path(__file__).parents[1] / "noxfile.py"
    spec = importlib.util.spec_from_file_location("the_noxfile", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
