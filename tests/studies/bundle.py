"""``python -m tests.studies.bundle``: bundle what the suite found at an epoch's end for the report of timed runs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.audit.semantics_files import OBSERVATIONS, load
from bench.files import RESULTS
from bench.report.sections import EPOCH_END

SCENARIO = "partial-window"
PACKAGES = ("torch", "lightning", "deepspeed")


def bundle(about: Mapping[str, Any], observations: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What ``bench.report.sections`` shows of a suite's observations."""
    chosen = [one for one in observations if one["scenario"]["name"] == SCENARIO]
    scenario = chosen[0]["scenario"]
    (n,) = scenario["accumulate"]
    ranks, epochs = scenario["world_size"], scenario["epochs"]
    batches = math.ceil(scenario["samples"] / (scenario["batch_size"] * ranks))
    return {
        "packages": {name: about["packages"][name] for name in PACKAGES},
        "scenario": f"{epochs} epochs of {batches} micro-batches on each of {ranks} ranks, N = {n}",
        "due": epochs * math.ceil(batches / n),
        "backends": {
            one["backend"]: {
                "finding": one["diagnosis"],
                "taken": one["optimizer_steps_observed"],
                "reported": one["steps_reported"],
            }
            for one in chosen
        },
    }


def main(folder: Path = RESULTS / "semantics") -> None:
    """Write the bundle from the folder of a suite."""
    text = json.dumps(bundle(*load(folder / OBSERVATIONS)), indent=1)
    EPOCH_END.write_text(f"{text}\n", encoding="utf-8")
    print(EPOCH_END)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
