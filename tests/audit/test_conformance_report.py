"""What is told of observations: the committed ones, whose pages have every table, and handmade ones that are odd."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from bench.audit import conformance, semantics_files
from bench.errors import InputError
from bench.report import style
from studies import semantics
from tests.factories import make_observation

COMMITTED = semantics.SUITE / semantics_files.OBSERVATIONS
LIMITED = {"name": "limited", "title": "two steps", "samples": 12, "epochs": None, "max_steps": 2}
ODD = make_observation(
    "o|dd_*name*<b>`$",
    scenario={"name": "odd", "title": "<i>|`"},
    diagnosis="breaks | the\ntable <script> `x` *y* $z$",
    findings=[("mean of | means", "wrong")],
)


@pytest.mark.parametrize(
    ("word", "changes", "expected"),
    [
        ("lost", {"lost": {"0": [1, 2]}}, "2 of 8"),
        ("repeated", {"samples_duplicated": 3}, "3 of 8"),
        ("skipped", {"samples_never_fetched": 4}, "4 of 8"),
        (
            "stops early",
            {"scenario": LIMITED, "updates": [{0: dict.fromkeys(range(4), 0.25)}]},
            "(1 update, not 2)",
        ),
        ("never stops", {}, "(1 update)"),
        ("crashed", {"micro_batches": 7}, "(after 7 micro-batches)"),
        ("refused", {"updates": []}, ""),
        ("cleared", {"updates": []}, ""),
        ("unheard of", {}, ""),
    ],
)
def test_a_finding_has_its_most_telling_number(
    word: str, changes: dict[str, Any], expected: str
) -> None:
    """Those that the committed pages do not have."""
    seen = make_observation(findings=[(word, "wrong")], **changes)
    assert conformance.summary(seen) == [f"{word} {expected}".rstrip()]


@pytest.mark.parametrize(
    "changes", [{}, {"weight_ratio": 0.5}, {"samples_left_open": 1}, {"micro_batches": 7}], ids=str
)
def test_backends_that_differ_in_one_thing_are_no_group(changes: dict[str, Any]) -> None:
    found = conformance.groups([make_observation("loop-a"), make_observation("loop-b", **changes)])
    assert [len(group.backends) for group in found] == ([1, 1] if changes else [2])


def test_weight_maps_are_written_and_the_same_every_time(tmp_path: Path) -> None:
    about, observations = semantics_files.load(COMMITTED)
    seen = [each for each in observations if each["scenario"]["name"] == "clip"][:4]
    written = [semantics_files.write_pictures(seen, about, tmp_path / name) for name in "ab"]
    first, again = (paths["clip"] for paths in written)
    assert first.name == "weights-clip.png" and first.read_bytes() == again.read_bytes()
    assert matplotlib.image.imread(first).shape[1] == round(style.WIDTH * style.DPI)
    assert (
        semantics_files.write_pictures([make_observation(updates=[])], about, tmp_path / "c") == {}
    )


def test_names_and_diagnoses_stay_in_their_cells() -> None:
    about, _ = semantics_files.load(COMMITTED)
    text = semantics_files.page([ODD], about)
    rows = [
        re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")
    ]
    assert {len(row) for row in rows} == {5, 2}, "of the overview, and of the table"
    assert text.count("\n- ") == 1 and not any(tag in text for tag in ("<script>", "<b>", "<i>"))


def test_the_committed_pages_are_those_of_the_committed_observations(tmp_path: Path) -> None:
    """And these are written as they were read. docs/semantics.md begins with questions, and is short."""
    about, observations = semantics_files.load(COMMITTED)
    assert (semantics.SUITE / semantics_files.MARKDOWN).read_text() == semantics_files.page(
        observations, about
    )
    page = semantics.DOCS.read_text()
    assert page == semantics.page(observations, about, semantics.throughput()), (
        "nox -s results -- semantics-page"
    )
    assert len(page.split()) < 4000 and page.index("## Questions") < page.index("| backends |")
    for link in re.findall(r"\]\((\.\./[^)]*)\)", page):
        assert (semantics.DOCS.parent / link).exists(), link
    semantics_files.store(observations, about, stored := tmp_path / "observations.json")
    text = COMMITTED.read_text()
    assert stored.read_text() == text
    stored.write_text(text.replace('"schema_version":2', '"schema_version":1', 1))
    with pytest.raises(InputError, match="is of version 1, not 2; run the suite again"):
        semantics_files.load(stored)
