"""The link of a run: fitted to what it timed, used by ``predict``, and held against its steps in the report."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from bench.cli import main
from bench.errors import GOOD, WRONG
from bench.forecast.from_run import measured_link
from bench.plan.models import SIZES
from bench.run.journal import write_document
from tests import pages
from tests.factories import make_cell, make_manifest, make_record, manifest_of
from tests.pages import read

RATE, WITHIN, LATENCY_S = 2e7, 4e8, 5e-3
"""Bytes per second between nodes and within one, and seconds per call."""
COMPUTE_S = 0.5
P = 4 * SIZES["tiny"].num_parameters
NODES = ["--from-run", "RUN", "--world-size", "4", "--accumulate", "4", "--device", "cpu"]


def entry(world_size: int, num_nodes: int, rate: float) -> dict[str, Any]:
    """Collectives that follow the alpha-beta model; gloo's reduce-scatter sends as much as its all-reduce."""
    passes = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 2}
    share = (world_size - 1) / world_size
    links = [
        {"op": op, "bytes": size, "seconds": LATENCY_S + times * share * size / rate}
        for size in (2**16, 2**20, 2**22)
        for op, times in passes.items()
    ]
    ranks = {"world_size": world_size, "num_nodes": num_nodes, "threads": 1}
    return {**ranks, "flops_per_s": {"fp32": [1e12] * world_size}, "links": links, "reason": ""}


def sent_s(rate: float) -> float:
    """Seconds of a reduction of DDP on 2 x 2 ranks: all-reduces of two buckets, and a broadcast of 256 bytes."""
    return 3 * LATENCY_S + (2 * 0.75 * P + 256) / rate


def write(folder: Path, rate: float, slower: float) -> Path:
    """A run of DDP on 2 x 2 ranks: steps without anything hidden, and with eager sync and N = 4 so much slower."""
    cells = [
        make_cell(backend=f"ddp-{sync}", accumulate=n, world_size=4, ranks_per_node=2)
        for n in (1, 4)
        for sync in ("deferred", "eager")
    ]
    records = []
    for repeat, cell in itertools.product(range(5), [cells[0].reference(), *cells]):
        reductions = cell.accumulate if cell.backend == "ddp-eager" else 1
        step = (COMPUTE_S + reductions * sent_s(rate)) * (slower if reductions == 4 else 1)
        records.append(
            make_record(cell, repeat, time={"step_seconds": [step] * cell.timed_windows})
        )
    return pages.write(folder, records, matmul=[entry(2, 1, WITHIN), entry(4, 2, rate)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "made", RATE, 1.2)


def predict(run: Path, *changes: str) -> int:
    asked = [str(run) if word == "RUN" else word for word in NODES]
    return main(
        ["predict", "--model", "tiny", "--sequence", "32", "--precision", "fp32", *asked, *changes]
    )


def test_predict_takes_latency_and_both_rates_from_the_run(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["ddp-eager", "fsdp2-eager", "hsdp-deferred-all-reduce"]
    assert predict(run, "--backend", ",".join(names), "--json") == GOOD
    ddp, fsdp2, hsdp = json.loads(capsys.readouterr().out)
    assert ddp["communication_s"] == pytest.approx(4 * sent_s(RATE))
    calls, wire = fsdp2["num_calls"], fsdp2["wire_bytes"]
    assert fsdp2["communication_s"] == pytest.approx(calls * LATENCY_S + wire / RATE)
    # Two all-reduces, of the two halves of the gradients, share the link between two nodes.
    between, inside = hsdp["inter_bytes"], hsdp["intra_bytes"]
    assert between == pytest.approx(P / 2)
    assert hsdp["communication_s"] == pytest.approx(
        hsdp["num_calls"] * LATENCY_S + between / (RATE / 2) + inside / WITHIN
    )
    assert predict(run, "--backend", "ddp-eager", "--compute-time", "1s") == GOOD
    shown = capsys.readouterr().out
    assert "400 MB/s within nodes of 2 and 10 MB/s" in shown and "5000 us per call" in shown
    assert "that made timed between 4 ranks on 2 nodes" in shown


def test_the_report_holds_steps_against_the_link(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run)]) == GOOD
    capsys.readouterr()
    (section,) = read(run / "report.html").find("section", aria_labelledby="prediction")
    rows = [[cell.text for cell in row.find("td", "th")] for row in section.find("tr")]
    found = {row[0]: row[1:] for row in rows if "N=4" in row[0]}
    sent = 4 * sent_s(RATE)
    eager = [1.2 * (COMPUTE_S + sent), COMPUTE_S, sent, sent, COMPUTE_S + sent, 20.0]
    assert [float(text) for text in found["ddp-eager N=4 W=4 (2x2) fp32"]] == pytest.approx(
        eager, rel=1e-3
    )
    assert found["ddp-deferred N=4 W=4 (2x2) fp32"][-1] == "-", (
        "compute is what is left of its own step"
    )
    assert "10 MB/s between" in section.text and "5000 us per call" in section.text
    assert "+0 %, +10 %, +20 % (least, median, most)" in section.text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["--link", "1GB/s"], "argument --link: not allowed with argument --from-run"),
        (["--node-size", "2"], "--node-size: says more about --link"),
        (["--world-size", "3"], "--world-size: 3 ranks do not fill"),
        (["--device", "cuda"], "its ranks ran on cpu; add --device cpu"),
        (["--from-run", "nowhere"], "nowhere"),
    ],
)
def test_what_does_not_fit_the_run_is_one_line(
    run: Path, changes: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert predict(run, *changes) == WRONG
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "matmul",
    [
        [{**entry(4, 2, RATE), "links": []}],
        [entry(2, 1, WITHIN), entry(4, 2, math.inf)],
        [entry(2, 1, RATE), entry(4, 2, WITHIN)],
    ],
    ids=["not timed", "nothing but latency", "faster between nodes than within"],
)
def test_a_run_that_no_link_fits_is_refused(
    run: Path, matmul: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_document(run, json.loads((run / "run.json").read_text()) | {"matmul": matmul})
    assert predict(run) == WRONG
    assert "holds no collectives that a link fits" in capsys.readouterr().err


def test_a_slow_outlier_hardly_moves_the_link() -> None:
    timed = entry(2, 1, RATE)
    timed["links"][-1]["seconds"] *= 5
    link = measured_link(manifest_of(make_manifest([make_cell()], matmul=[timed])))
    assert link is not None and [link.bytes_per_s, link.latency_s] == pytest.approx(
        [RATE, LATENCY_S], rel=0.05
    )
