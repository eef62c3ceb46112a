"""The trace of a cell of a run: ranges on the host, and what NCCL's and torch's work on the GPU belongs to."""

from __future__ import annotations

import gzip
import json
from collections import Counter

from bench.report.trace_file import RANK_IDS
from tests.cuda.conftest import Machine

RUN = [
    "--matrix",
    "smoke",
    "--device",
    "cuda",
    "--world-size",
    "2",
    "--accumulate",
    "2",
    "--batch",
    "8",
]


def test_a_window_on_two_gpus_has_its_micro_batches_and_collectives(machine: Machine) -> None:
    command = ["run", *RUN, "--backend", "fsdp2-deferred", "--out", "run"]
    process = machine.bench(*command, gpus=2)
    assert process.returncode == 0, process.stderr
    (cell_id,) = {
        record["cell_id"]
        for record in machine.records()
        if record["cell"]["backend"] == "fsdp2-deferred" and not record["cell"].get("twin")
    }
    process = machine.bench("trace", "run", cell_id, "--out", "step.json.gz", gpus=2)
    assert process.returncode == 0, process.stderr
    content = json.loads(gzip.decompress((machine.folder / "step.json.gz").read_bytes()))
    for rank in range(2):
        names = Counter(
            event["name"].partition(" of ")[0]
            for event in content["traceEvents"]
            if event.get("cat") == "user_annotation" and event["pid"] // RANK_IDS == rank
        )
        assert names["window"] == names["micro-batch 1"] == names["micro-batch 2"] == 1
        assert names["collective: all_gather"] > 0 and names["collective: reduce_scatter"] > 0
