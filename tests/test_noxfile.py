"""The sessions of nox that do more than call a program, and the bench run from a checkout that nobody installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.plugin import make_wheel


@pytest.fixture
def noxfile(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, over a stand-in for nox, which runs the tests and is not there itself."""
    nox, command = ModuleType("nox"), ModuleType("nox.command")
    vars(command)["CommandFailed"] = RuntimeError
    vars(nox).update(
        options=SimpleNamespace(),
        session=lambda function=None, **_: function or (lambda decorated: decorated),
        project=SimpleNamespace(load_toml=lambda path: tomllib.loads(Path(path).read_text())),
        Session=None,
    )
    monkeypatch.setitem(sys.modules, "nox", nox)
    monkeypatch.setitem(sys.modules, "nox.command", command)
    spec = importlib.util.spec_from_file_location("the_noxfile", ROOT / "noxfile.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Refused(Exception):  # noqa: N818 - as nox's own
    """What ``session.error`` raises."""


class FakeSession:
    """A session whose pip puts empty wheels where the real one would put what it built or downloaded."""

    def __init__(self, *posargs: str) -> None:
        self.posargs = posargs
        self.calls: list[tuple[tuple[str, ...], dict[str, str]]] = []

    def run(self, *command: str, env: dict[str, str] | None = None) -> None:
        assert command[:3] == ("python", "-m", "pip")
        self.calls.append((command[4:], env or {}))
        where = command.index("--wheel-dir") + 1 if "--wheel-dir" in command else None
        dest = next(
            (word.removeprefix("--dest=") for word in command if word.startswith("--dest=")), ""
        )
        folder = Path(command[where] if where else dest)
        for name, _, version in (word.partition("==") for word in command if "==" in word):
            make_wheel(folder, name, version, *(("torch", "b-c") if name == "deepspeed" else ()))

    def error(self, words: str) -> None:
        raise Refused(words)

    def log(self, words: str) -> None:
        self.words = words


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the two files that say what is collected, and where it is."""
    (tmp_path / "constraints.txt").write_text(
        "# all\ntorch==2.0\ndeepspeed==0.19\nb-c==1.5\nextra==3\nlinter==9\nhatchling==1\n"
    )
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch>=2", "deepspeed"]\n[project.optional-dependencies]\nmore = ["extra"]\n'
        '[dependency-groups]\nlint = ["linter", "hatchling"]\ntest = ["b-c"]\n'
    )
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_wheelhouse_holds_what_the_machine_lacks(noxfile: Any, project: Path) -> None:
    session = FakeSession(
        "--out",
        "out",
        "--python",
        "3.12",
        "--platform",
        "manylinux_2_28_x86_64",
        "--exclude",
        "torch",
    )
    noxfile.wheelhouse(session)
    assert sorted(path.name.partition("-")[0] for path in (project / "out").glob("*.whl")) == [
        "b_c",
        "deepspeed",
        "extra",
        "hatchling",
    ]
    assert (project / "out" / "requirements.txt").read_text() == "torch>=2\ndeepspeed\nextra\nb-c\n"
    (built, environment), (downloaded, _) = session.calls
    assert (
        built[0] == "wheel"
        and built[-1] == "deepspeed==0.19"
        and environment == {"DS_BUILD_OPS": "0"}
    )
    assert downloaded[:2] == ("download", "--no-deps") and "--only-binary=:all:" in downloaded
    assert {"--platform=manylinux_2_17_x86_64", "--platform=manylinux2014_x86_64"} <= set(
        downloaded
    )
    assert "--python-version=3.12" in downloaded


@pytest.mark.slow
def test_pip_leaves_there_what_is_new_enough_and_says_what_is_too_old(
    noxfile: Any, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one test with the real pip: a machine has b-c in another version than the one that is collected."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    noxfile.wheelhouse(FakeSession("--out", "out", "--exclude", "torch"))
    machine = project / "machine"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", machine], check=True)
    pip = [sys.executable, "-m", "pip", "--isolated", "--python", str(machine / "bin" / "python")]
    install = [*pip, "install", "--no-index", "--no-deps"]
    there = {
        name: make_wheel(project, name, version)
        for name, version in (("b-c", "1.4"), ("torch", "2.11+cu130"))
    }
    subprocess.run([*install, *there.values()], check=True)
    told = [*pip, "install", "--no-index", "--find-links", "out", "-r", "out/requirements.txt"]
    subprocess.run(told, check=True)
    listed = subprocess.run([*pip, "freeze"], capture_output=True, text=True, check=True).stdout
    assert {line.partition(" @ ")[0] for line in listed.split("\n") if line} == {
        "b-c",
        "torch",
        "deepspeed==0.19",
        "extra==3",
    }
    assert [*machine.glob("lib/*/site-packages/b_c-1.4.dist-info")], listed

    subprocess.run([*install, make_wheel(project, "torch", "1.13")], check=True)
    refused = subprocess.run(told, capture_output=True, text=True)
    assert refused.returncode == 1 and "torch>=2" in refused.stderr


def test_uv_finds_packages_where_pip_is_told_to(
    noxfile: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nfind-links = /wheels\nextra-index-url = https://a/simple https://b/simple\ntimeout = 3\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://cpu/simple")
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    found = noxfile.pip_settings()
    assert found["UV_FIND_LINKS"] == "/wheels"
    assert found["UV_EXTRA_INDEX_URL"] == "https://cpu/simple"  # a variable counts more than a file
    assert found["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert noxfile.pip_settings() == {}  # no pip, so no settings of pip


@pytest.fixture(scope="module")
def packages_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that is installed but the bench's extras and the bench itself, with what makes an editable install."""
    left_out = (
        "accumulation_bench",
        "_editable_impl",
        "__editable__",
        "bench",
        "accelerate",
        "torchtitan",
    )
    folder = tmp_path_factory.mktemp("site")
    for place in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for path in Path(place).iterdir():
            if not path.name.startswith(left_out):
                (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("command", [["plan", "--matrix", "smoke"], ["backends"], ["--version"]])
def test_a_checkout_runs_without_being_installed_and_without_extras(
    packages_alone: Path, command: list[str]
) -> None:
    """-S keeps the interpreter from its own packages, so that the bench has no metadata and no entry points."""
    assert not [
        name
        for each in metadata.distributions(path=[str(packages_alone)])
        if "accum" in (name := each.name)
    ]
    environment = os.environ | {"PYTHONPATH": str(packages_alone)}
    run = [sys.executable, "-S", "-m", "bench", *command]
    done = subprocess.run(run, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if command != ["--version"]:
        assert "fsdp2-deferred" in done.stdout
        about = [line for line in done.stdout.splitlines() if "torchtitan-eager" in line]
        assert about and all("needs torchtitan: pip install torchtitan" in line for line in about)
