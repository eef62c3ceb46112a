"""Wheels made without a build, and a third-party package of backends that is installed from one.

Beside one sound backend the package holds faulty ones, each with a fault that a runner has to survive or a gate has to
catch.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from tests import extra_backends

CLASSES = {
    cls.name: cls.__name__
    for cls in vars(extra_backends).values()
    if str(getattr(cls, "name", "")).startswith("x-")
}
"""The package's backends."""


def make_wheel(
    folder: Path,
    name: str,
    version: str,
    *requires: str,
    files: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A wheel of these files in the folder; ``entry_points.txt`` goes to its metadata."""
    metadata = [
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    about = {
        "METADATA": "\n".join(metadata) + "\n\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    stem = f"{name.replace('-', '_')}-{version}"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in {**about, **files}.items():
            archive.writestr(file if file.endswith(".py") else f"{stem}.dist-info/{file}", text)
    return path


def install(folder: Path) -> Path:
    """Build the package's wheel in ``folder`` and unpack it; the folder to put on PYTHONPATH."""
    points = [f"{name} = extra_backends:{cls}" for name, cls in CLASSES.items()]
    files = {
        "extra_backends.py": (Path(__file__).parent / "extra_backends.py").read_text(),
        "entry_points.txt": "\n".join(["[bench.backends]", *points]),
    }
    wheel = make_wheel(folder, "extra-backends", "1.0", files=files)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")  # all that pip does with a wheel of Python alone
    return folder / "site"
