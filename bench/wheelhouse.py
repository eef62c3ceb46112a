"""``nox -s wheelhouse``: the wheels that a machine without network lacks, collected into one folder on one that has it.

Versions are those of constraints.txt, which names all that is needed, so nothing is resolved and no excluded package is
downloaded to read its metadata. DeepSpeed has no wheel on the index: a pure one is built, without its operators.
What the machine is told to install has the bounds of pyproject.toml instead: pip leaves there what is new enough, and
takes the rest from the folder, which has one version of each. Needs pip and packaging, and none of what it collects.
"""

from __future__ import annotations

import argparse
import email.parser
import os
import platform
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from bench.errors import GOOD, WRONG, InputError

ROOT = Path(__file__).resolve().parent.parent
GROUPS = ("test",)
"""Dependency groups that are collected too, so that the tests can tell whether all is well there."""
BUILT = {"deepspeed": {"DS_BUILD_OPS": "0"}}
"""Packages without wheels, and the environment in which one that fits any machine is built."""
LEGACY = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
"""Older names of manylinux_2_<number>: PEP 600."""
UNPINNED = ("torch",)
"""Packages some of whose requirements constraints.txt does not have: the packages of CUDA, which torch itself pins."""
REQUIREMENTS = "requirements.txt"
Pip = Callable[[Sequence[str], dict[str, str]], None]
"""Runs pip with these arguments and environment variables; raises InputError if it fails."""


def platforms(name: str) -> list[str]:
    """The platform tags of wheels that run where ``name`` does, best first: pip takes each only as it is given."""
    found = re.fullmatch(r"manylinux_2_(\d+)_(\w+)", name)
    if found is None:
        return [name]
    tags = []
    for minor in range(int(found[1]), 4, -1):
        tags.append(f"manylinux_2_{minor}_{found[2]}")
        if minor in LEGACY:
            tags.append(f"{LEGACY[minor]}_{found[2]}")
    return tags


def pins(text: str) -> dict[str, str]:
    """The versions in constraints.txt by canonical name."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    pairs = [line.partition(";")[0].partition("==") for line in lines if "==" in line]
    return {canonicalize_name(name.strip()): version.strip() for name, _, version in pairs}


def roots(document: str) -> list[Requirement]:
    """What pyproject.toml asks for by itself: the dependencies, and those of GROUPS."""
    project = tomllib.loads(document)
    groups = project.get("dependency-groups", {})
    asked = [*project["project"]["dependencies"], *(line for group in GROUPS for line in groups.get(group, ()))]
    return [Requirement(line) for line in asked]


def needed(asked: Iterable[Requirement], wheels: Iterable[Path], python: str, excluded: Iterable[str]) -> set[Path]:
    """Those of the wheels that are asked for, or that one of these asks for, on a Python of that version.

    Nothing is followed through excluded packages: what they need is on the machine with them. Raises InputError for
    what is asked for and not there.
    """
    found = {parse_wheel_filename(path.name)[0]: path for path in wheels}
    environment: dict[str, Any] = {**default_environment()}
    environment |= {"python_version": python, "python_full_version": f"{python}.0"}
    left = [(one, "") for one in asked]
    done: set[tuple[str, str]] = set()
    kept: set[Path] = set()
    while left:
        requirement, extra = left.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        if name in set(excluded):
            continue
        if name not in found:
            raise InputError(f"constraints.txt: has no version of {name}, which is needed on Python {python}; add it")
        kept.add(found[name])
        for wanted in ("", *sorted(requirement.extras)):
            if (name, wanted) not in done:
                done.add((name, wanted))
                left += [(one, wanted) for one in requires(found[name])]
    return kept


def requires(wheel: Path) -> list[Requirement]:
    """What a wheel's metadata asks for."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA") and one.count("/") == 1)
        metadata = email.parser.Parser().parsestr(archive.read(name).decode())
    return [Requirement(line) for line in metadata.get_all("Requires-Dist") or ()]


def collect(folder: Path, python: str, target: str, excluded: Sequence[str], pip: Pip) -> list[Path]:
    """Fill the folder; returns its wheels. Raises InputError for a name that is unknown, or if pip fails."""
    pinned = pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    asked = roots((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    without = [canonicalize_name(name) for name in excluded]
    if unknown := [name for name in without if name not in pinned]:
        raise InputError(f"--exclude: '{unknown[0]}' is not in constraints.txt, so it is not collected anyway")
    folder.mkdir(parents=True, exist_ok=True)
    where = ["--dest", str(folder)]
    for name, environment in BUILT.items():
        if name not in without:
            pip(["wheel", "--no-deps", "--wheel-dir", str(folder), f"{name}=={pinned[name]}"], environment)
    tags = [part for tag in platforms(target) for part in ("--platform", tag)]
    kind = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python, *tags]
    wanted = [f"{name}=={version}" for name, version in pinned.items() if name not in {*without, *BUILT, *UNPINNED}]
    pip(["download", "--no-deps", *kind, *where, *wanted], {})
    for name in (name for name in UNPINNED if name not in without):
        pip(["download", "-c", str(ROOT / "constraints.txt"), *kind, *where, f"{name}=={pinned[name]}"], {})
    kept = needed(asked, folder.glob("*.whl"), python, without)
    for path in set(folder.glob("*.whl")) - kept:
        path.unlink()  # tools that only the lint session needs, and what excluded packages need
    # With what is excluded among it: a machine that lacks that, or has it too old, is told so by pip.
    (folder / REQUIREMENTS).write_text("".join(f"{one}\n" for one in asked), encoding="utf-8")
    return sorted(kept)


def run_pip(arguments: Sequence[str], environment: dict[str, str]) -> None:
    """pip of this interpreter."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    if subprocess.run(command, env=os.environ | environment, check=False).returncode:
        raise InputError(
            "pip could not get all of it, see above; --exclude what the machine has, or name another --platform"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(
        prog="nox -s wheelhouse --", description="Collect wheels for a machine without network."
    )
    option = parser.add_argument
    here = ".".join(platform.python_version_tuple()[:2])
    option("--python", default=here, metavar="3.N", help=f"the machine's Python (default: {here}, as here)")
    option("--platform", default=f"manylinux_2_28_{platform.machine()}", help="its platform tag (default: %(default)s)")
    option("--exclude", action="append", default=[], metavar="NAME[,NAME]", help="what it has already, such as torch")
    option("--out", type=Path, default=Path("wheelhouse"), metavar="DIR", help="where to (default: wheelhouse)")
    arguments = parser.parse_args(argv)
    excluded = [name.strip() for names in arguments.exclude for name in names.split(",") if name.strip()]
    try:
        if not re.fullmatch(r"3\.\d+", arguments.python):
            raise InputError(f"--python '{arguments.python}': name a version such as 3.12")
        found = collect(arguments.out, arguments.python, arguments.platform, excluded, run_pip)
    except InputError as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return WRONG
    size = sum(path.stat().st_size for path in found) / 2**20
    print(
        f"{len(found)} wheels, {size:,.0f} MiB in {arguments.out}. Take it and the checkout to the machine, and there:"
    )
    print(f"  python -m pip install --no-index --find-links {arguments.out} -r {arguments.out / REQUIREMENTS}")
    print("  python -m bench doctor && python -m bench run --matrix smoke")
    return GOOD


if __name__ == "__main__":
    raise SystemExit(main())
