"""The pages written by hand: their length, links, commands, keys and examples agree with the code."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Self

import pytest
import yaml

import bench
from bench.cli import _parser, main
from bench.commands import COMMANDS
from bench.judge.columns import FRAMES
from bench.plan.matrix import KEYS
from tests.conftest import ROOT

PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    *(
        f"docs/{name}.md"
        for name in (
            "architecture",
            "ci",
            "commands",
            "gpu",
            "matrix",
            "method",
            "offline",
            "others",
            "results",
        )
    ),
]
WORKFLOWS = [".github/examples/history.yml"]
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"\bpython -m bench ((?:\\\n|[^`\n])+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def examples(page: str, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(TEXTS[page]) if kind == language]


def commands() -> list[tuple[str, list[str]]]:
    """Every call of the bench that a page shows, with its arguments."""
    lines = [
        (page, line.replace("\\\n", " "))
        for page, text in itertools.chain(
            TEXTS.items(), ((name, (ROOT / name).read_text(encoding="utf-8")) for name in WORKFLOWS)
        )
        for line in COMMAND.findall(text)
    ]
    found = [(page, shlex.split(line, comments=True)) for page, line in lines]
    return [(page, words) for page, words in found if words[0] != "COMMAND"]


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len(TEXTS["README.md"].split()) <= 900


def test_version_and_date_of_a_release_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == bench.__version__
    newest = re.search(
        r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert newest is not None
    heading = "[Unreleased]"
    if "date-released" in citation:
        heading = f"[{bench.__version__}] - {citation['date-released']}"
    assert newest[1] == heading


def test_links_lead_somewhere() -> None:
    for page, link in [(page, link) for page, text in TEXTS.items() for link in LINK.findall(text)]:
        if not link.startswith("http"):
            name, _, anchor = link.partition("#")
            target = (ROOT / page).parent / name if name else ROOT / page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors(target.read_text(encoding="utf-8")), (page, link)


def test_the_readme_leads_to_every_page() -> None:
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(LINK.findall(TEXTS["README.md"]))


@pytest.fixture
def shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the pages show."""
    (tmp_path / "own.toml").write_text(
        "".join(examples("docs/matrix.md", "toml")), encoding="utf-8"
    )
    (tmp_path / "my_model.py").write_text(examples("docs/matrix.md", "python")[0], encoding="utf-8")
    shutil.copy(ROOT / "studies" / "my_vit.py", tmp_path)
    (tmp_path / "mine.py").write_text(examples("CONTRIBUTING.md", "python")[0], encoding="utf-8")
    (tmp_path / "declared.py").write_text(
        examples("CONTRIBUTING.md", "python")[1], encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("BENCH_BACKENDS", "")  # what --backend module:Class adds to it is taken back
    for name in ("my_model", "my_vit", "mine", "declared"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("shown")
def test_the_commands_of_the_pages_are_accepted() -> None:
    for _, words in commands():
        _parser().parse_args(words)


def test_every_command_and_table_is_described() -> None:
    row = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)
    assert sorted(row.findall(TEXTS["docs/commands.md"])) == sorted(
        itertools.chain(*COMMANDS.values())
    )
    assert row.findall(TEXTS["docs/results.md"]) == list(FRAMES)


def test_every_key_of_a_matrix_is_described() -> None:
    described, table = set(), ""
    for line in TEXTS["docs/matrix.md"].splitlines():
        if heading := re.match(r"\| (?:`\[(\w+)\]`|key) \| default", line):
            table = f"{heading[1]}." if heading[1] else ""
        elif row := re.match(r"\| `(\w+)` \|", line):
            described.add(table + row[1])
    assert described == set(KEYS)


@pytest.mark.usefixtures("shown")
def test_what_the_pages_show_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The matrix, the model and the backend."""
    assert main(["plan", "--matrix", "own.toml"]) == 0
    for workload in ("my_model:MyWorkload", "my_vit:ViT"):
        assert main(["plan", "--matrix", "own.toml", "--workload", workload]) == 0
    own = "mine:MyDDP,declared:MyCompressedDDP"
    assert main(["plan", "--matrix", "smoke", "--backend", own]) == 0
    out = capsys.readouterr().out
    assert "  my-ddp  " in out and "  my-compressed-ddp  " in out


class Tracker:
    """Stands for a run of Weights & Biases and for TensorBoard's writer."""

    logged: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, folder: str = "", *, project: str = "", name: str = "") -> None:
        self.values = self.logged.setdefault(name or folder, [])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def log(self, row: dict[str, float]) -> None:
        self.values += row.values()

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.values.append(value)


@pytest.mark.parametrize("recipe", examples("docs/ci.md", "python"), ids=["wandb", "tensorboard"])
def test_the_recipes_for_trackers_run(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    monkeypatch.chdir(ROOT)
    for name in ("wandb", "torch", "torch.utils", "torch.utils.tensorboard"):
        module = ModuleType(name)
        vars(module).update(init=Tracker, SummaryWriter=Tracker)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Tracker, "logged", {})
    exec(recipe, {})
    assert len(Tracker.logged) > 20  # cells, or trials
    assert all(values and all(map(math.isfinite, values)) for values in Tracker.logged.values())


def test_the_python_for_results_that_is_shown_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    cells = bench.load("results/cpu").cells.set_index("label")
    seconds = f"{cells.loc['fsdp2-deferred N=8 W=2 fp32', 'step_time_s']:.6f}"
    for code in examples("docs/results.md", "python"):
        exec(code, {})
        assert seconds in capsys.readouterr().out
