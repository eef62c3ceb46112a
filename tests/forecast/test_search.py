"""``predict --batch``: every combination, the front, and what is printed and drawn of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.errors import GOOD

ASKED = [
    "predict",
    "--model",
    "8b",
    "--world-size",
    "8",
    "--sequence",
    "2048",
    "--precision",
    "bf16",
]
ASKED += ["--link", "H100", "--peak", "H100", "--batch", "64"]
SOME = ["--backend", "fsdp2-eager,fsdp2-deferred,ddp-eager"]


def found(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main([*ASKED, *arguments, "--json"]) == GOOD
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_every_combination_gives_the_batch_and_nothing_beats_the_front(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = found(capsys, *SOME, "--memory", "80GiB")
    assert {(row["micro_batch"], row["accumulate"]) for row in rows} == {
        (1, 8),
        (2, 4),
        (4, 2),
        (8, 1),
    }
    assert {row["checkpointing"] for row in rows} == {"none", "selective", "full"}
    assert len(rows) == 4 * 3 * 3

    def place(row: dict[str, Any]) -> tuple[float, ...]:
        return row["peak_memory_bytes"], row["overlapped_s"], row["serial_s"]

    front = [row for row in rows if row["on_front"]]
    for row in rows:
        beaten_by = [
            other
            for other in rows
            if other["fits"]
            and place(other) != place(row)
            and all(a <= b for a, b in zip(place(other), place(row), strict=True))
        ]
        assert row["on_front"] == (row["fits"] and not beaten_by)
    assert {row["checkpointing"] for row in front} > {"full"}, "less memory for more time"
    assert not any(row["backend"] == "ddp-eager" for row in front), "its state does not fit"


def test_a_combination_is_predicted_as_it_is_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = (
        row
        for row in found(capsys, *SOME)
        if (row["backend"], row["micro_batch"], row["checkpointing"])
        == ("fsdp2-eager", 2, "selective")
    )
    alone = [argument for argument in ASKED if argument not in ("--batch", "64")]
    alone += ["--accumulate", "4", "--micro-batch", "2", "--selective-checkpointing"]
    assert main([*alone, "--backend", "fsdp2-eager", "--json"]) == GOOD
    (same,) = json.loads(capsys.readouterr().out)
    for key in ("peak_memory_bytes", "overlapped_s", "serial_s", "tokens_per_s", "mfu"):
        assert row[key] == pytest.approx(same[key]), key


def test_the_front_is_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "front.png"
    assert main([*ASKED, "--memory", "80GiB", "--plot", str(plot)]) == GOOD
    out = capsys.readouterr().out
    front = [row for row in found(capsys, "--memory", "80GiB") if row["on_front"]]
    _, _, table = out.partition("least memory first:\n")
    lines = table.partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[:4] for line in lines] == [
        [str(row["micro_batch"]), str(row["accumulate"]), row["backend"], row["checkpointing"]]
        for row in sorted(front, key=lambda row: (row["peak_memory_bytes"], row["serial_s"]))
    ]
    fastest = min(front, key=lambda row: row["serial_s"])
    assert out.startswith(
        f"Recommendation: {fastest['backend']} with micro-batches of {fastest['micro_batch']}, N = "
        f"{fastest['accumulate']} and "
    )
    assert plot.read_bytes().startswith(b"\x89PNG") and plot.stat().st_size > 20_000


def test_what_offloads_is_left_out_since_its_copies_are_in_no_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = found(capsys, "--memory", "80GiB")
    assert "fsdp2-eager" in {row["backend"] for row in rows}
    assert not [row for row in rows if "offload" in row["backend"]]


def test_where_nothing_fits_the_front_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *SOME, "--memory", "8GiB"]) == GOOD
    assert capsys.readouterr().out.startswith("Recommendation: none; nothing fits")
    assert not any(row["on_front"] for row in found(capsys, *SOME, "--memory", "8GiB"))
