"""Where backends come from: what installed packages offer is imported only if it is named."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import bench.backends
from bench import cli
from bench.backends import base
from bench.backends.base import EXTRA_BACKENDS, installed_backends, only, place_of, registry
from bench.errors import InputError
from bench.plan.cell import Device
from tests.factories import make_backend, make_cell

CODE = """
from pathlib import Path

from bench.backends.plain import DDPDeferred

Path("{folder}", "imported").touch()


class Mine(DDPDeferred):
    name = "{name}"
"""
FAILS = "raise RuntimeError('needs a licence')"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a package that offers one backend, and another that cannot be imported."""
    folder = tmp_path / "site"
    for number, (package, code) in enumerate({"mine_package": CODE, "bad_package": FAILS}.items()):
        name = ("mine", "bad")[number]
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[bench.backends]\n{name} = {package}:Mine\n")
        (folder / f"{package}.py").write_text(code.format(folder=tmp_path, name=name))
    monkeypatch.syspath_prepend(str(folder))
    for package in ("mine_package", "bad_package"):
        monkeypatch.delitem(sys.modules, package, raising=False)
    return folder


def entry(name: str, value: str) -> importlib.metadata.EntryPoint:
    return importlib.metadata.EntryPoint(name, value, base.ENTRY_POINTS)


def test_nothing_is_imported_that_is_not_named(site: Path, tmp_path: Path) -> None:
    assert installed_backends()["mine"] == "mine_package:Mine"
    assert not {"mine", "bad"} & registry().keys()
    assert not {"mine", "bad"} & registry(["all", "ddp-eager", "no-such"]).keys()
    assert not (tmp_path / "imported").exists()
    found = registry(["mine", "ddp-eager"])
    assert found["mine"].name == "mine" and found.keys() == registry().keys() | {"mine"}
    assert (tmp_path / "imported").exists()
    with pytest.raises(
        InputError, match=r"'bad' \(bad_package:Mine\) .* cannot be loaded \(needs a licence"
    ):
        registry(["bad"])


def test_a_file_in_the_folder_of_backends_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "another.py").write_text(CODE.format(folder=tmp_path, name="another"))
    monkeypatch.setattr(bench.backends, "__path__", [*bench.backends.__path__, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "bench.backends.another", raising=False)
    found = base.built_in.__wrapped__()
    assert found["another"].framework == "torch DDP" and found.keys() == base.built_in().keys() | {
        "another"
    }
    assert (
        list(found).index("ddp-deferred")
        < list(found).index("another")
        < list(found).index("deepspeed-zero2-eager")
    )


def test_a_framework_has_a_colour_of_its_own_and_its_parts_exist() -> None:
    colours: dict[str, set[str]] = {}
    frameworks: dict[str, set[str]] = {}
    for backend in registry().values():
        colours.setdefault(backend.framework, set()).add(backend.colour)
        frameworks.setdefault(backend.colour, set()).add(backend.framework)
    assert {name: found for name, found in colours.items() if len(found) > 1} == {}
    assert {name: found for name, found in frameworks.items() if len(found) > 1} == {}
    for backend in registry().values():
        assert backend.family is not base.BackendFamily.OTHER, backend.name


def test_what_has_never_run_must_be_named_and_says_so() -> None:
    assert "megatron-fsdp" in installed_backends() and "megatron-fsdp" not in registry(["all"])
    untried = registry(["megatron-fsdp"])["megatron-fsdp"]
    assert "untried" in untried.framework and "never run" in untried.remark(
        make_cell(backend=untried.name)
    )
    assert untried.missing(Device.CPU) == "needs CUDA: --device cuda"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (
            [entry("other", "mine_package:Mine")],
            "its backend's name is 'mine'",
        ),
        (
            [entry("mine", "mine_package:Mine"), entry("mine", "x:Mine")],
            "mine_package:Mine and x:Mine both offer it",
        ),
    ],
)
def test_entry_points_that_cannot_be(
    site: Path,
    monkeypatch: pytest.MonkeyPatch,
    entries: list[importlib.metadata.EntryPoint],
    words: str,
) -> None:
    monkeypatch.setattr(base, "_entry_points", lambda: entries)
    with pytest.raises(InputError, match=words):
        registry([entries[0].name])


@pytest.mark.parametrize(
    "name", ["", "../x", "a/b", "=1+1", "a|b", "<b>", "a\nb", "a b", ".x", "x" * 81, "-x", None]
)
def test_a_name_that_cannot_be_that_of_a_file_or_a_cell_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered = SimpleNamespace(name="entry", value="module:Class", load=lambda: make_backend(name))
    monkeypatch.setattr(base, "_entry_points", lambda: [offered])
    with pytest.raises(InputError, match="may only contain letters, digits"):
        registry(["entry"])


def test_no_package_takes_the_name_of_a_built_in_backend(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_entry_points", lambda: [entry("ddp-eager", "mine_package:Mine")])
    assert registry(["ddp-eager"])["ddp-eager"].__module__ == "bench.backends.plain"
    assert not (tmp_path / "imported").exists()


def test_the_environment_names_backends_too(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(EXTRA_BACKENDS, "mine_package:Mine, ")
    assert "mine" in registry()
    monkeypatch.setenv(EXTRA_BACKENDS, "mine_package:Mine,mine_package:Mine")
    with pytest.raises(
        InputError, match=f"{EXTRA_BACKENDS}: 'mine_package:Mine': the name 'mine' is taken"
    ):
        registry()


def test_the_command_lists_what_it_does_not_load(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if "not loaded" in line} == {"mine", "bad"}
    assert not (tmp_path / "imported").exists()
    assert cli.main(["backends", "mine"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["backend", "mine"]
    assert (tmp_path / "imported").exists()
    for command in (["backends", "mini"], ["plan", "--matrix", "smoke", "--backend", "mini"]):
        assert cli.main(command) == 2
        error = capsys.readouterr().err
        assert "'mini' is unknown" in error and "mine" in error


def test_a_rank_imports_the_module_of_its_own_backend_alone(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(EXTRA_BACKENDS, "mine_package:Mine,bad_package:Mine")
    assert only("reference", place_of("reference")).name == "reference"
    assert not (tmp_path / "imported").exists()
    assert place_of("mine") == "mine_package:Mine"
    for module in ("mine_package", "bad_package"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert only("mine", "mine_package:Mine").name == "mine"
    assert "bad_package" not in sys.modules


def test_a_backend_of_a_package_has_the_place_of_its_entry_point(site: Path) -> None:
    assert place_of("mine") == "mine_package:Mine"
    assert place_of("no-such") == ""
