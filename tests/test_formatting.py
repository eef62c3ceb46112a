"""Counts have their nouns in the right number, wherever a run is told of."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.cli import main
from bench.formatting import at_most
from bench.judge.loading import load
from tests.pages import report, write_run

ONE_OF_MANY = re.compile(
    r"(?<![\d.,=/])\b1 (repeats|trials|blocks|cells|errors|warnings|rows|cores|comparisons|ranks|samples)\b"
)


def test_one_of_a_thing_is_not_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"cpu": "made", "cores": 1}
    looks = [{"repeats": 1, "widest": None, "refused": "", "open": []}]
    folder = write_run(
        tmp_path / "one", {"alpha": 1.0}, accumulate=(1,), world_size=(1,), repeats=1, twin=False,
        ended_by="max-repeats", looks=looks, machine=machine,
    )  # fmt: skip
    assert len(load(folder).cells) == 2
    texts = [report(folder, drawn=False)[1], (folder / "report.md").read_text(), (folder / "report.html").read_text()]
    for command in (["check", str(folder)], ["export", str(folder)], ["cite", str(folder), "alpha N=1 W=1 fp32"]):
        main(command)
        texts.append(capsys.readouterr().out)
    assert any(re.search(r"\b1 (cell|trial|repeat|warning)\b", text) for text in texts)
    assert any("1 core" in text for text in texts)
    for text in texts:
        assert not ONE_OF_MANY.findall(re.sub(r"<svg.*?</svg>", "", text, flags=re.DOTALL)), text[:2000]


@pytest.mark.parametrize(("value", "words"), [(1.4e-6, "2e-06"), (1e-6, "1e-06"), (0.00016, "0.0002"), (0.0, "0")])
def test_a_bound_is_rounded_up(value: float, words: str) -> None:
    assert at_most(value) == words
