"""Watches a process from the moment at which it has imported torch: ``python -m bench audit`` puts this on PYTHONPATH.

Imports nothing of bench, and runs the sitecustomize that it hides.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDER = "_accumulation_audit"


class AfterTorch(importlib.abc.MetaPathFinder):
    """Installs the recorder when the import of torch has ended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec("torch")
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                self._install(module)
            except Exception as error:
                # An audit never stops a training.
                (self._folder / f"{os.getpid()}.error").write_text(f"{type(error).__name__}: {error}\n")

        spec.loader.exec_module = exec_module
        return spec

    def _install(self, torch: ModuleType) -> None:
        inside = HERE.parent / "inside"
        places = [str(inside)]
        found: Any = importlib.util.spec_from_file_location(
            RECORDER, inside / "__init__.py", submodule_search_locations=places
        )
        sys.modules[RECORDER] = recorder = importlib.util.module_from_spec(found)
        found.loader.exec_module(recorder)
        recorder.install(torch, self._folder)


def run_hidden_sitecustomize() -> None:
    """Run the sitecustomize that would have run without this one: the user's or the distribution's."""
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if hidden is not None and hidden.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(hidden)
        hidden.loader.exec_module(module)


if place := os.environ.get("BENCH_AUDIT_FOLDER"):
    (Path(place) / f"{os.getpid()}.python").touch()
    sys.meta_path.insert(0, AfterTorch(Path(place)))
run_hidden_sitecustomize()
