"""A third-party package with backends, built as a real wheel and installed into a folder of its own.

Beside one sound backend it holds faulty ones, each with one of the faults that a runner has to survive or a gate has
to catch.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

LOOPS = {
    "x-divides-twice": "DividesTwice",
    "x-syncs-too-early": "SyncsTooEarly",
    "x-steps-one-late": "StepsOneLate",
    "x-modulo": "Modulo",
    "x-clears-first": "ClearsFirst",
    "x-never-clears": "NeverClears",
}
"""Backends for semantic scenarios."""
NAMES = {
    "x-sound": "Sound",
    "x-last-only": "LastOnly",
    "x-steps-too-often": "StepsTooOften",
    "x-summed": "NotReduced",
    "x-raises": "Raises",
    "x-killed": "Killed",
    "x-hangs": "Hangs",
    "x-unsupported": "Unsupported",
    "x-aborts-afterwards": "AbortsAfterwards",
    "x-needs-missing": "NeedsMissing",
}


def install(folder: Path) -> Path:
    """Build the wheel in ``folder`` and install it with pip; the folder to put on PYTHONPATH."""
    info = "extra_backends-1.0.dist-info"
    backends = {**NAMES, **LOOPS}.items()
    entry_points = "\n".join(["[bench.backends]", *(f"{name} = extra_backends:{cls}" for name, cls in backends)])
    files = {
        "extra_backends.py": (Path(__file__).parent / "extra_backends.py").read_text(),
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: extra-backends\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": entry_points,
    }
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,", ""])
    wheel = folder / "extra_backends-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    target = folder / "site"
    command = [sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", "--target", str(target)]
    subprocess.run([*command, str(wheel)], check=True, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    return target


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
