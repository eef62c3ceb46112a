"""The page of what the full form found: never more than was measured, and never in silence about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.faults import page

CUTS = {"what": "cut", "must": "every whole line is read", "count": 7, "wrong": 0, "more": ""}
KILLS = {
    "what": "real trials",
    "signal": "SIGKILL",
    "kills": 3,
    "runs": 1,
    "trials": 24,
    "lost": 0,
    "differing": 0,
    "slowest_s": 1.0,
    "left": [],
}


def test_a_page_of_a_part_says_what_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "docs" / "page.md"
    page.write(file, {"damage": {"cuts": CUTS}}, {"test_one": "passed", "test_two": "failed"})
    text = file.read_text()
    assert "**The page is not complete. Not measured: faults: f-sleeps;" in text and "; null: real.**" in text
    assert "damage: cuts" not in text and "- **test_two: failed**" in text and "test_one" not in text
    page.write(file, {"kills": {"real SIGKILL": KILLS}}, {"test_two": "passed"})
    text = file.read_text()
    assert "| cut | every whole line is read | 7 | 0 |" in text, "what was measured before is kept"
    assert "|  |" not in text.replace("| 0 |  |", ""), "no column without a name"
    assert "kills: real SIGKILL" not in text and "kills: real SIGTERM" in text
    assert "These tests did not pass" not in text


def test_a_page_of_all_says_nothing_of_the_kind_nor_of_rows_that_are_gone(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "page.md"
    page.write(file, {"damage": {"flips": CUTS | {"what": "gone"}}}, {})
    monkeypatch.setattr(page, "expected_rows", lambda: [("damage", "cuts")])
    page.write(file, {"damage": {"cuts": CUTS | {"wrong": 2}}}, {})
    text = file.read_text()
    assert "not complete" not in text and "**2**" in text and "gone" not in text
