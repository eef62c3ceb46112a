"""An environment for one version, on top of the one that this runs in, and a probe run in it."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import sysconfig
import venv
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.audit.versions.versions_page import Entry, VersionFact, last_line, without_paths

EXTRAS = {"lightning": ("setuptools<81",), "deepspeed": ()}
"""Installed too: pkg_resources, which old Lightning imports without asking for it and setuptools 81 dropped."""
INSTALL_TIMEOUT_S, PROBE_TIMEOUT_S = 600, 600


class FailedError(Exception):
    """A version could not be installed or probed; the message is what its row says."""


def measure(package: str, number: str, folder: Path) -> Entry:
    """Install one version into the empty ``folder`` and run its probes; whatever fails is in the entry."""
    about: dict[str, Any] = {
        "package": package,
        "version": number,
        "torch": _version("torch"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    try:
        python = install(package, number, folder)
        found = probe(package, python, folder)
        if found["version"] != number or not found["own"]:
            where = "" if found["own"] else " of the environment above"
            return Entry(**about, error=f"not probed: {found['version']}{where} was imported instead")
    except FailedError as failure:
        return Entry(**about, error=str(failure))
    return Entry(
        **{**about, "torch": found["torch"], "python": found["python"]},
        departures=tuple(found["departures"]),
        findings=tuple(
            VersionFact(each["finding"], without_paths(each["measured"]), each["good"]) for each in found["findings"]
        ),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def install(package: str, number: str, folder: Path) -> Path:
    """The interpreter of a new environment that has this version, and all else from the environment above it."""
    venv.EnvBuilder(symlinks=True).create(folder)
    own = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    above = dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib"))
    # Read after the environment's own packages, so those come first.
    (own / "above.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in above))
    python = folder / "bin" / "python"
    # Without dependencies: torch stays what it is, and today's other packages are used, whatever the metadata asks for.
    # Ignoring what is installed: the environment above may have this very version.
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--no-deps",
        "--ignore-installed",
        "--quiet",
    ]
    for requirement in (*EXTRAS[package], f"{package}=={number}"):
        # DeepSpeed comes as source; with its operators off, nothing is compiled.
        _run([*pip, requirement], folder, INSTALL_TIMEOUT_S, "not installed", {"DS_BUILD_OPS": "0"})
    return python


def probe(package: str, python: Path, folder: Path) -> dict[str, Any]:
    """What ``bench.audit.versions.probe`` found in the environment."""
    answer = folder / "answer.json"
    command = [str(python), "-m", "bench.audit.versions.probe", package, str(answer)]
    variables = {
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    _run(command, folder, PROBE_TIMEOUT_S, "not probed", variables)
    found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    return found


def _run(command: list[str], folder: Path, timeout_s: float, failed: str, variables: dict[str, str]) -> None:
    environment = {**os.environ, **variables}
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"{failed}: still running after {timeout_s:g} s") from None
    if done.returncode:
        raise FailedError(f"{failed}: {last_line(done.stderr or done.stdout)}")
