"""The page on settings: what it says of patches and of objections follows from the code and the stored run."""

from __future__ import annotations

import ast
import json
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.judge.as_benched import as_benched
from bench.plan.cell import Device
from studies import objections, settings, variants
from tests.conftest import ROOT
from tests.factories import make_cell

BACKENDS = ROOT / "bench" / "backends"
FRAMEWORKS = tomllib.loads(settings.ABOUT.read_text(encoding="utf-8"))["frameworks"]
AS_DOCUMENTED = {
    "lightning.py: _module": "LightningModule is there to be subclassed",
    "hugging_face.py: _model": "so is nn.Module",
    "torchtitan.py: batches": "sets nothing of torchtitan's",
}
"""Functions that subclass what a framework has for that."""


def replacing(path: Path) -> Iterator[str]:
    """The functions of a module that set something of another package, or make a class of one of its classes."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    own = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for function in functions:
        where = f"{path.name}: {function.name}"
        imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        aliases = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and isinstance(node.value, ast.Attribute | ast.Name)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name) and root_of(node.value) in imported
        }
        foreign = imported | aliases | {argument.arg for argument in function.args.args} - {"self"}
        for node in ast.walk(function):
            if isinstance(node, ast.ClassDef):
                if any(root_of(base) in foreign - own for base in node.bases):
                    yield where
            elif isinstance(node, ast.Assign):
                targets = [t for t in node.targets if isinstance(t, ast.Attribute | ast.Subscript)]
                if any(root_of(target) in (imported | aliases | {"sys"}) for target in targets):
                    yield where
            elif isinstance(node, ast.Attribute) and node.attr == "__new__":
                yield where


def root_of(node: ast.expr) -> str:
    """The name with which an expression begins: ``a`` of ``a.b[c]`` and of ``vars(a.b)``."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            if node.func.id != "vars":
                return ""
            node = node.args[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            node = node.func.value
        else:
            return ""
    return node.id


def test_every_patch_of_a_framework_is_listed_and_no_other() -> None:
    found = {where for path in BACKENDS.glob("*.py") for where in replacing(path)}
    listed = {row[2] for framework in FRAMEWORKS for row in framework.get("patched", ())}
    private = {"plain.py: disable_runtime_statistics"}  # calls what is private, but sets nothing
    assert found - AS_DOCUMENTED.keys() == listed - private
    for where in listed:
        module, _, name = where.partition(": ")
        assert f"def {name}(" in (BACKENDS / module).read_text(encoding="utf-8"), where


UNTIMED = {
    "deepspeed.py: prepare": "no training calls the operator",
    "deepspeed.py: short_parameter_repr": "while an engine is built",
    "torchtitan.py: load": "when it is imported, and after the training",
}
"""Patches that no timed window has."""
TIMED = {
    "plain.py: disable_runtime_statistics": ("ddp-deferred", "cuda"),
    "lightning.py: on_cpu": ("lightning-deepspeed-zero2", "cpu"),
    "accelerate.py: set_up_state": ("accelerate-fsdp2", "cpu"),
    "hugging_face.py: _trainer": ("hf-trainer-fsdp2", "cuda"),
    "torchtitan.py: train": ("torchtitan-eager", "cpu"),
}
"""All others, each with a backend and device that have it."""


def test_every_patch_that_is_timed_is_noted_in_tables() -> None:
    listed = {row[2] for framework in FRAMEWORKS for row in framework.get("patched", ())}
    assert listed == UNTIMED.keys() | TIMED.keys()
    for where, (backend, device) in TIMED.items():
        assert as_benched(make_cell(backend=backend, device=Device(device))), where


def test_every_framework_has_its_objection_with_what_was_measured() -> None:
    words = objections.words()
    for framework in FRAMEWORKS:
        text = framework["objection"].format(**words)
        assert text != framework["objection"], framework["title"]


def test_every_variant_is_compared_with_what_it_varies() -> None:
    pairs = dict(objections.PAIRS.values())
    for kind in variants.EVERY:
        assert kind.name in pairs, kind.name
    stored = json.loads(objections.STORED.read_text(encoding="utf-8"))
    assert stored["pairs"].keys() == objections.PAIRS.keys()


def test_times_of_a_busy_machine_are_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = json.loads(objections.STORED.read_text(encoding="utf-8"))
    timed = {"ratio": 1.0234, "low": 0.9876, "high": 1.0621, "blocks": 5, "peak_mib": [1.0, 2.0]}
    monkeypatch.setattr(objections, "STORED", tmp_path / "objections.json")
    for taken, told in ((0.02, "1.02 (0.99 to 1.06)"), (0.5, objections.UNKNOWN)):
        changed = stored | {"taken": taken, "pairs": dict.fromkeys(stored["pairs"], timed)}
        objections.STORED.write_text(json.dumps(changed), encoding="utf-8")
        words = objections.words()
        assert words["views"] == told and words["views_peak"] == "1.0 MiB instead of 2.0"
        assert (objections.UNKNOWN in words["ms_all_reduce"]) == (told == objections.UNKNOWN)


@pytest.mark.torch
def test_an_all_to_all_reduces_as_gloo_does() -> None:
    """Bit for bit, on two ranks."""
    costs = objections.time_collectives((2**12,), rounds=1)
    assert costs["4096"].keys() == {"all_reduce", "reduce_scatter", "all_to_all"}
