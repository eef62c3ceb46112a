"""The wheelhouse with a pretended pip, and the bench run from a checkout that nobody installed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from bench import wheelhouse
from bench.errors import InputError
from bench.wheelhouse import REQUIREMENTS, collect, main, needed, pins, platforms, roots
from tests.conftest import ROOT


def make_wheel(folder: Path, name: str, version: str = "1.0", *requires: str) -> Path:
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    described = {
        "METADATA": "\n".join(lines) + "\n\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in described.items():
            archive.writestr(f"{name.replace('-', '_')}-{version}.dist-info/{file}", text)
    return path


def test_older_platforms_are_named_one_by_one() -> None:
    tags = platforms("manylinux_2_28_x86_64")
    assert tags[0] == "manylinux_2_28_x86_64" and tags[-1] == "manylinux1_x86_64" and len(tags) == 24 + 3
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux2010_x86_64"} <= set(tags)
    assert platforms("win_amd64") == ["win_amd64"]


def test_the_projects_own_files_can_be_read() -> None:
    pinned = pins((ROOT / "constraints.txt").read_text())
    asked = roots((ROOT / "pyproject.toml").read_text())
    assert {"torch", "deepspeed", "nvidia-ml-py", "pytest"} <= {one.name for one in asked}
    assert all(one.specifier.contains(pinned[one.name]) for one in asked)
    assert "ruff" in pinned and "ruff" not in {one.name for one in asked}


def test_what_is_needed_is_followed_by_markers_and_extras_but_not_through_what_is_excluded(tmp_path: Path) -> None:
    a = make_wheel(tmp_path, "a", "1.0", "b[x]>=1", "torch", "old; python_version < '3.12'")
    b = make_wheel(tmp_path, "b", "1.0", "c; extra == 'x'", "d; extra == 'y'", "a")
    c, old, sympy = (make_wheel(tmp_path, name) for name in ("c", "old", "sympy"))
    for name in ("d", "tool"):
        make_wheel(tmp_path, name)
    torch = make_wheel(tmp_path, "torch", "2.0", "sympy")
    wheels, asked = list(tmp_path.glob("*.whl")), [Requirement("A")]
    assert needed(asked, wheels, "3.12", ["torch"]) == {a, b, c}
    assert needed(asked, wheels, "3.11", []) == {a, b, c, old, torch, sympy}
    c.unlink()
    with pytest.raises(InputError, match="no version of c"):
        needed(asked, tmp_path.glob("*.whl"), "3.12", ["torch"])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "project"
    root.mkdir()
    (root / "constraints.txt").write_text("# all\ntorch==2.0\ndeepspeed==0.19\nb-c==1.5  # why\nlinter==9\nsympy==1\n")
    (root / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch>=2", "deepspeed"]\n[dependency-groups]\nlint = ["linter"]\ntest = ["B_c"]\n'
    )
    monkeypatch.setattr(wheelhouse, "ROOT", root)
    return root


class FakePip:
    """Puts wheels where pip would."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self.calls.append((list(arguments), environment))
        folder = Path(arguments[arguments.index("--dest" if "--dest" in arguments else "--wheel-dir") + 1])
        for name, _, version in (word.partition("==") for word in arguments if "==" in word):
            more = {"deepspeed": ("torch", "b-c"), "torch": ("sympy", "nvidia-nccl")}.get(name, ())
            make_wheel(folder, name, version, *more)
            if name == "torch" and "--no-deps" not in arguments:
                make_wheel(folder, "nvidia-nccl", "3")


def test_the_folder_holds_what_the_machine_lacks_and_no_more(project: Path, tmp_path: Path) -> None:
    pip = FakePip()
    found = collect(tmp_path / "out", "3.12", "manylinux_2_28_x86_64", ["torch"], pip)
    assert [path.name.partition("-")[0] for path in found] == ["b_c", "deepspeed"]
    assert (tmp_path / "out" / REQUIREMENTS).read_text() == "torch>=2\ndeepspeed\nB_c\n"
    (built, environment), (downloaded, _) = pip.calls
    assert built[0] == "wheel" and built[-1] == "deepspeed==0.19" and environment == {"DS_BUILD_OPS": "0"}
    assert downloaded[:3] == ["download", "--no-deps", "--only-binary=:all:"]
    assert "manylinux2014_x86_64" in downloaded and downloaded[downloaded.index("--python-version") + 1] == "3.12"
    assert "torch==2.0" not in downloaded and "deepspeed==0.19" not in downloaded


def test_pip_leaves_there_what_is_new_enough_and_says_what_is_too_old(project: Path, tmp_path: Path) -> None:
    """The one test with the real pip: a machine has b-c in another version than the one that is collected."""
    collect(tmp_path / "out", "3.12", "manylinux_2_28_x86_64", ["torch"], FakePip())
    machine = tmp_path / "machine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", machine], check=True)
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(machine / "bin" / "python")]
    install = [*pip, "install", "--no-index", "--no-deps"]
    there = {name: make_wheel(tmp_path, name, version) for name, version in (("b-c", "1.4"), ("torch", "2.11+cu130"))}
    subprocess.run([*install, *there.values()], check=True)
    told = [*pip, "install", "--no-index", "--find-links", tmp_path / "out", "-r", tmp_path / "out" / REQUIREMENTS]
    subprocess.run(told, check=True)
    listed = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout
    assert {line.partition(" @ ")[0] for line in listed.split("\n") if line} == {"b-c", "torch", "deepspeed==0.19"}
    assert [*machine.glob("lib/*/site-packages/b_c-1.4.dist-info")], listed

    subprocess.run([*install, make_wheel(tmp_path, "torch", "1.13")], check=True)
    refused = subprocess.run(told, capture_output=True, text=True)
    assert refused.returncode == 1 and "torch>=2" in refused.stderr


def test_without_an_exclusion_torch_comes_with_what_it_pins(project: Path, tmp_path: Path) -> None:
    pip = FakePip()
    found = collect(tmp_path / "out", "3.12", "manylinux_2_28_x86_64", [], pip)
    names = {path.name.partition("-")[0] for path in found}
    assert names == {"b_c", "deepspeed", "torch", "sympy", "nvidia_nccl"}
    assert pip.calls[-1][0][1] == "-c" and "--no-deps" not in pip.calls[-1][0]


@pytest.mark.parametrize("arguments", [["--exclude", "torhc"], ["--python", "3"], ["--python", "2.7"]])
def test_a_wrong_command_is_one_line(
    project: Path, tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture(scope="module")
def packages_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is installed but the bench itself: its metadata and what makes an editable install."""
    folder = tmp_path_factory.mktemp("site")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(place).iterdir():
            if not path.name.startswith(("accumulation_bench", "_editable_impl", "__editable__", "bench")):
                (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("command", [["plan", "--matrix", "smoke"], ["backends"], ["--version"]])
def test_a_checkout_runs_without_being_installed(packages_alone: Path, command: list[str]) -> None:
    """-S keeps the interpreter from its own packages, so that the bench has no metadata and no entry points."""
    asked = "import importlib.metadata as m; print([d.name for d in m.distributions() if 'accum' in d.name])"
    environment = os.environ | {"PYTHONPATH": str(packages_alone)}
    run = [sys.executable, "-S"]
    seen = subprocess.run([*run, "-c", asked], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"
    done = subprocess.run([*run, "-m", "bench", *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fsdp2-deferred" in done.stdout or command == ["--version"]
