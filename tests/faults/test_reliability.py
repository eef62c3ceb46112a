"""The page of what the full form found: never more than was measured, and never in silence about the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.faults import page
from tests.varied_table import varied_table

DISK = {"cells": ["a full disk", "the run ends", "it ended", "nothing"]}
KILLS = {"cells": ["SIGKILL", "real trials", "3", "1", "24", "0", "0", "1.0", "nothing"]}


def test_a_page_of_a_part_says_what_is_not_there(tmp_path: Path) -> None:
    file = tmp_path / "docs" / "page.md"
    page.write(file, {"machine": {"disk": DISK}}, {"test_one": "passed", "test_two": "failed"})
    text = file.read_text()
    assert (
        "**The page is not complete. Not measured: faults: f-sleeps;" in text
        and "; null: real.**" in text
    )
    assert (
        "machine: disk" not in text and "- **test_two: failed**" in text and "test_one" not in text
    )
    page.write(file, {"kills": {"real SIGKILL": KILLS}}, {"test_two": "passed"})
    text = file.read_text()
    assert "- a full disk: it ended\n" in text, "what was measured before is kept"
    assert "kills: real SIGKILL" not in text and "kills: real SIGTERM" in text
    assert "These tests did not pass" not in text


def test_a_page_of_all_says_nothing_of_the_kind_nor_of_rows_that_are_gone(
    tmp_path: Path, monkeypatch: Any
) -> None:
    file = tmp_path / "page.md"
    page.write(file, {"machine": {"disk": DISK}}, {})
    monkeypatch.setattr(page, "expected_rows", lambda: [("kills", "real SIGKILL")])
    page.write(file, {"kills": {"real SIGKILL": KILLS}}, {})
    text = file.read_text()
    assert "not complete" not in text and "real trials" in text and "a full disk" not in text


def test_what_is_written_by_hand_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    page.write(file, {"machine": {"disk": DISK}}, {})
    text = file.read_text()
    assert text.startswith("# Reliability\n\n## What `nox -s faults` found\n")
    file.write_text(text.replace("# Reliability\n", "# Reliability\n\nBy hand.\n", 1))
    page.write(file, {"kills": {"real SIGKILL": KILLS}}, {})
    assert file.read_text().startswith(
        "# Reliability\n\nBy hand.\n\n## What `nox -s faults` found\n"
    )


def test_a_table_says_once_what_is_the_same_in_all_rows() -> None:
    head, rows = ("signal", "kills", "lost"), [("SIGINT", "50", "0"), ("SIGKILL", "40", "0")]
    assert varied_table(head, rows)[2:] == [
        "| SIGINT | 50 |",
        "| SIGKILL | 40 |",
        "",
        "The same in all: *lost* 0.",
        "",
    ]
    assert varied_table(head, rows[:1])[2:] == ["| SIGINT | 50 | 0 |", ""]
    same = [("SIGINT", "50", "0"), ("SIGKILL", "50", "0")]
    assert varied_table(head, same) == [
        "*signal* SIGINT, SIGKILL.",
        "",
        "The same in all: *kills* 50; *lost* 0.",
        "",
    ]
