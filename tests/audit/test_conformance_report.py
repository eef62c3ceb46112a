"""What is told of handmade observations: the tables, the pages, and what is stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from bench.audit import conformance, semantics_files
from bench.errors import InputError
from bench.report import style
from tests.factories import make_observation
from tests.studies import semantics

WHOLE = {"name": "whole", "title": "whole windows", "samples": 8}
PARTIAL = {"name": "partial", "title": "half a window | left over", "samples": 12, "epochs": 2}
LIMITED = {"name": "limited", "title": "two steps", "samples": 12, "epochs": None, "max_steps": 2}
CLIPPED = {"name": "clipped", "title": "clipped", "samples": 8, "clip_norm": 0.1}
DROPPED = {"name": "dropped", "title": "drop_last", "samples": 9, "drop_last": True}
Coefficients = dict[int, dict[int, float]]


def window(start: int, stop: int, coefficient: float, epoch: int = 0) -> Coefficients:
    return {epoch: dict.fromkeys(range(start, stop), coefficient)}


def engine(
    name: str, part: float, *, words: list[tuple[str, str]], steps: int = 1, **more: Any
) -> list[dict[str, Any]]:
    """A backend with a Trainer's counters and an engine's, whose updates have this part of the right weight."""

    def reported(updates: int, trainer: int, calls: int) -> dict[str, int]:
        return {
            "trainer.global_step": trainer,
            "on_before_optimizer_step": calls,
            "strategy.optimizer_step": calls,
            "engine.global_steps": updates,
        }

    crossing = [window(0, 8, part / 8), window(8, 12, part / 8) | window(0, 4, part / 8, 1)]
    seen = [
        make_observation(name, [window(0, 8, part / 8)], words, scenario=WHOLE, steps_reported=reported(1, 1, 4)),
        make_observation(
            name,
            crossing,
            [*words, ("miscounted", "wrong"), ("carried over", "note")],
            scenario=PARTIAL,
            steps_reported=reported(2, 1, 8),
            lost={"1": [4, 5]},
        ),
        make_observation(
            name,
            crossing * 2,
            [("never stops", "wrong"), *words],
            scenario=LIMITED,
            steps_reported=reported(4, 0, 16),
            stopped="bound",
        ),
    ]
    clipped = make_observation(name, [window(0, 8, 0.4 / 8)], words, scenario=CLIPPED, steps_reported=reported(1, 1, 4))
    clipped["updates"][0]["right_sum"] = 0.4 / part
    return [*seen, clipped]


def by_hand(name: str, **changes: Any) -> list[dict[str, Any]]:
    return [
        make_observation(name, [window(0, 8, 1 / 8)], scenario=WHOLE),
        make_observation(
            name, [window(0, 8, 1 / 8), window(8, 12, 1 / 8)], [("under-weighted", "wrong")], scenario=PARTIAL
        ),
        make_observation(name, [window(0, 8, 1 / 8), window(8, 12, 1 / 4)], scenario=LIMITED),
        make_observation(name, [window(0, 8, 1 / 8)], scenario=CLIPPED, **changes),
        make_observation(
            name, [window(0, 8, 1 / 8)], [("dropped", "detail")], scenario=DROPPED, samples_never_fetched=1
        ),
    ]


ENGINE = engine("twice", 1 / 4, words=[("divided twice", "wrong")])
SOME = [*by_hand("loop-a"), *by_hand("loop-b"), *ENGINE, *engine("once", 1.0, words=[])]
ODD = make_observation(
    "o|dd_*name*<b>`$",
    scenario={"name": "odd", "title": "<i>|`"},
    diagnosis="breaks | the\ntable <script> `x` *y* $z$",
    findings=[("mean of | means", "wrong")],
)


def cells(markdown: str) -> list[list[str]]:
    """The rows of the table, split where GitHub splits them."""
    rows = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def test_backends_that_behave_alike_everywhere_are_one_column() -> None:
    assert [group.backends for group in conformance.groups(SOME)] == [["loop-a", "loop-b"], ["twice"], ["once"]]
    other = [*by_hand("loop-a"), *by_hand("loop-b", samples_left_open=1)]
    assert len(conformance.groups(other)) == 2
    assert len(conformance.groups(SOME[:-1])) == 3
    header, rule, *rows = cells(conformance.markdown(SOME))
    assert header == ["scenario", "loop-a +1", "twice", "once"] and set(rule) == {"---"}
    assert [row[0] for row in rows] == ["*What the backend does*", "whole", "partial", "limited", "clipped", "dropped"]
    assert "- loop-a +1: loop-a, loop-b" in conformance.markdown(SOME)


def test_families_have_tables_of_their_own_below_one_overview() -> None:
    seen = [
        *by_hand("hf-trainer-ddp"),
        *by_hand("ddp-eager"),
        *by_hand("mine"),
        *engine("lightning-ddp", 1.0, words=[]),
    ]
    assert list(conformance.families(seen)) == ["PyTorch", "Lightning", "Hugging Face", "Others"]
    _, _, *rows = cells(conformance.overview([*seen, *by_hand("accelerate-ddp")]))
    assert rows[0] == ["ddp-eager", "4", "0", "1", "under-weighted 1"]
    assert [row[0] for row in rows[1:]] == ["lightning-ddp", "hf-trainer-ddp, accelerate-ddp", "mine"]


def test_what_the_loss_causes_is_told_apart_from_what_the_backend_does() -> None:
    findings = [("mean of means", "wrong"), ("under-weighted", "wrong")]
    seen = [make_observation("loop", findings=findings[:1]), make_observation("trainer", findings=findings)]
    _, _, backend, of_backend, loss, common = cells(conformance.markdown(seen))
    assert [backend[0], loss[0]] == [f"*{cause}*" for cause in conformance.CAUSES]
    assert of_backend[1] == "right" and of_backend[2].startswith("**under-weighted")
    assert [cell.startswith("**mean of means") for cell in common[1:]] == [True, True]
    seen.append(make_observation("picky", findings=[("unsupported", "note")]))
    assert (
        "Of 2 backends that can run every scenario, these are wrong in the fewest, 0 of 1: `loop`."
        in semantics.best(seen)
    )


@pytest.mark.parametrize(
    ("word", "changes", "expected"),
    [
        ("lost", {"lost": {"0": [1, 2]}}, "2 of 8"),
        ("left open", {"left_open": {"1": [1, 2]}}, "2 of 16"),
        ("repeated", {"samples_duplicated": 3}, "3 of 8"),
        ("skipped", {"samples_never_fetched": 4}, "4 of 8"),
        ("over-weighted", {"updates": [window(0, 8, 1.5 / 8)]}, "1.5"),
        ("cleared", {"updates": [window(0, 8, 0.5 / 8), window(0, 8, 1 / 8)]}, "0.5"),
        ("leaks", {"updates": [window(0, 8, 0.1) | window(0, 2, 0.1, 1)]}, "(1 in an update)"),
        ("carried over", {"updates": [window(0, 4, 0.25), window(4, 8, 0.125) | window(0, 4, 0.125, 1)]}, "1 of 2"),
        ("mean of means", {"updates": [{0: {0: 0.25, 1: 0.75}}]}, "x 2"),
        ("hooks too often", {"steps_reported": {"on_before_optimizer_step": 4}}, "(4 for 1 update)"),
        ("misestimated", {"steps_reported": {"trainer.estimated_stepping_batches": 3}}, "(3, not 1)"),
        ("never stops", {}, "(1 update)"),
        ("stops late", {"scenario": LIMITED, "updates": [window(0, 4, 0.25)] * 3}, "(3 updates, not 2)"),
        ("crashed", {"micro_batches": 7}, "(after 7 micro-batches)"),
        ("refused", {"updates": []}, ""),
        ("cleared", {"updates": []}, ""),
        ("unheard of", {}, ""),
    ],
)
def test_a_finding_has_its_most_telling_number(word: str, changes: dict[str, Any], expected: str) -> None:
    seen = make_observation(findings=[(word, "wrong")], **changes)
    assert conformance.with_number(seen, word) == f"{word} {expected}".rstrip()
    assert conformance.summary(seen) == [f"{word} {expected}".rstrip()]


ABOUT = {
    "command": ["bench", "semantics"],
    "packages": {"torch": "2.13"},
    "machine": {"python": "3.11"},
    "device": "cpu",
    "date": "2026-01-01",
}


def test_weight_maps_are_written_and_the_same_every_time(tmp_path: Path) -> None:
    written = [semantics_files.write_pictures(SOME, ABOUT, tmp_path / name) for name in "ab"]
    assert sorted(written[0]) == ["clipped", "dropped", "limited", "partial", "whole"]
    assert written[0]["partial"].name == "weights-partial.png"
    for name, first in written[0].items():
        assert first.read_bytes() == written[1][name].read_bytes()
        assert matplotlib.image.imread(first).shape[1] == round(style.WIDTH * style.DPI)
    assert semantics_files.write_pictures([make_observation(updates=[])], ABOUT, tmp_path / "c") == {}


def test_observations_are_read_as_they_were_written(tmp_path: Path) -> None:
    semantics_files.store([*SOME, ODD], ABOUT, tmp_path / "observations.json")
    about, found = semantics_files.load(tmp_path / "observations.json")
    assert about == ABOUT and found == json.loads(json.dumps([*SOME, ODD]))
    text = (tmp_path / "observations.json").read_text()
    assert '"0-7":0.125' in text and text.count("half a window") == 1
    (tmp_path / "old.json").write_text(text.replace('"schema_version":2', '"schema_version":1'))
    with pytest.raises(InputError, match="is of version 1, not 2; run the suite again"):
        semantics_files.load(tmp_path / "old.json")


def test_the_suites_own_page_has_every_table_and_diagnosis() -> None:
    text = semantics_files.page([*SOME, ODD], ABOUT)
    assert "Written by `bench semantics` with torch 2.13, python 3.11, device cpu" in text
    assert conformance.markdown([*SOME, ODD]) in text and conformance.overview([*SOME, ODD]) in text
    assert "<details><summary>twice: 4 wrong</summary>" in text
    assert text.count("\n- ") >= len(SOME) + 1 and "<script>" not in text and "<b>" not in text


def test_the_committed_pages_are_those_of_the_committed_observations() -> None:
    """docs/semantics.md begins with questions, and is short."""
    about, observations = semantics_files.load(semantics.SUITE / semantics_files.OBSERVATIONS)
    assert (semantics.SUITE / semantics_files.MARKDOWN).read_text() == semantics_files.page(observations, about)
    page = semantics.DOCS.read_text()
    assert page == semantics.page(observations, about, semantics.throughput()), "nox -s results -- semantics-page"
    assert len(page.split()) < 4000 and page.index("## Questions") < page.index("| backends that behave alike")
    for link in re.findall(r"\]\((\.\./[^)]*)\)", page):
        assert (semantics.DOCS.parent / link).exists(), link
