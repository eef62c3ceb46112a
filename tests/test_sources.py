"""The sources that formulas and replays name: each is in the installed packages, and has what is said to be there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

CITING = [ROOT / "bench" / "judge" / f"{name}.py" for name in ("formulas", "zero", "gathers")]
CITING += [
    path for folder in ("forecast", "backends") for path in (ROOT / "bench" / folder).glob("*.py")
]
CITED = re.compile(r"((?:\w+/)*\w+\.(?:py|hpp|cpp)): ?(\w+)")
"""A file and a name in it, as docstrings have them: ``stage3.py:get_grad_norm_direct``."""
HOMES = (
    "",
    "torch/include",
    "torch/nn/parallel",
    "torch/distributed/fsdp/_fully_shard",
    "deepspeed",
    "deepspeed/accelerator",
    "deepspeed/runtime",
    "deepspeed/runtime/comm",
    "deepspeed/runtime/zero",
    "lightning/pytorch",
    "transformers/models/llama",
)
"""Folders from which files are named, within the installed packages."""
NOT_INSTALLED = {"reducer.cpp", "engine.cpp", "ProcessGroupGloo.cpp", "megatron_fsdp.py"}
"""C++ of torch, of which only headers are installed, and the package of the extra megatron."""


def citations() -> set[tuple[str, str]]:
    """Every file and name that is cited; a citation may go on in the next line."""
    texts = [re.sub(r"\n\s+(?:# )?", " ", path.read_text(encoding="utf-8")) for path in CITING]
    return {found for text in texts for found in CITED.findall(text)}


def test_there_are_sources_to_look_for() -> None:
    files = {Path(file).name for file, _ in citations()}
    assert {
        "stage3.py",
        "_fsdp_collectives.py",
        "distributed.py",
        "reducer.hpp",
        "adam.py",
    } <= files, citations()


@pytest.mark.parametrize(
    ("file", "name"),
    sorted(found for found in citations() if Path(found[0]).name not in NOT_INSTALLED),
)
def test_a_cited_source_is_where_it_is_said_to_be(file: str, name: str) -> None:
    if file.startswith("bench/"):
        places = [ROOT / file]
    else:
        places = [
            path
            for home in HOMES
            if (path := Path(torch.__file__).parents[1] / home / file).is_file()
        ]
    assert places, f"no installed package has {file}"
    assert any(re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")) for path in places), (
        places
    )
