"""Installs a recorder when a process has imported torch.

``audit`` and ``invariance`` put this on PYTHONPATH.

Imports nothing of bench, and runs the sitecustomize that it hides: the user's or the
distribution's.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDERS = {
    "audit": "audit.command.inside.watched_calls",
    "invariance": "audit.invariance.inside.watched_steps",
}
"""By the command that asks for them."""


class AfterTorch:
    """Finds torch as others do, and installs the recorder when its import has ended.

    It stays until then: a library may look for torch, and import it later or never.
    """

    def __init__(self) -> None:
        self._is_looking = False

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        if name != "torch" or self._is_looking:
            return None
        self._is_looking = True
        try:
            spec: Any = importlib.util.find_spec("torch")
        finally:
            self._is_looking = False
        if spec is not None:
            spec.loader.exec_module = functools.partial(
                execute_and_install, spec.loader.exec_module
            )
        return spec


def execute_and_install(execute: Any, torch: ModuleType) -> None:
    """Load the recorder, from here and not from an installed bench; a failure stops no training."""
    execute(torch)
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, AfterTorch)]
    try:
        sys.modules["_bench_audit"] = package = ModuleType("_bench_audit")
        package.__path__ = [str(HERE.parents[2])]
        recorder = RECORDERS[os.environ.get("BENCH_AUDIT_FOR", "audit")]
        importlib.import_module(f"_bench_audit.{recorder}").install()
    except Exception as error:
        print(
            f"audit: this process is not watched: {type(error).__name__}: {error}", file=sys.stderr
        )


if "BENCH_AUDIT_FOLDER" in os.environ:
    try:
        Path(os.environ["BENCH_AUDIT_FOLDER"], f"{os.getpid()}.python").touch()
        sys.meta_path.insert(0, AfterTorch())
    except OSError as error:
        folder = os.environ["BENCH_AUDIT_FOLDER"]
        print(f"audit: cannot record in {folder} (TMPDIR): {error.strerror}", file=sys.stderr)
others = [entry for entry in sys.path if Path(entry).resolve() != HERE]
hidden = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
if hidden is not None and hidden.loader is not None:
    sys.modules["sitecustomize"] = importlib.util.module_from_spec(hidden)
    hidden.loader.exec_module(sys.modules["sitecustomize"])
