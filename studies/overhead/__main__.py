"""Measures what the bench costs and writes docs/performance.md: ``nox -s overhead``.

Other arguments go to pytest, which times the fixed costs: ``-k journal`` times a few.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import permutations, product
from pathlib import Path
from typing import Any

from bench.judge.caveats import BARE_LOOPS
from bench.launch.launcher import Launcher
from bench.measure import host
from bench.measure.host import HostLoad
from bench.plan.cell import Device
from bench.run import machine, start
from studies import ROOT
from studies.overhead import bare, in_turn
from studies.overhead.page import bare_loops, page

DATA, LOOK_S = "performance.json", 5.0


def busy() -> float:
    """Share of the CPUs that others take, over LOOK_S."""
    with HostLoad() as load:
        time.sleep(LOOK_S)
    found = host.merge([load.result])
    assert found is not None, "there is no /proc/stat"
    return float((found["foreign_cores"] + found["stolen_cores"]) / found["num_cpus"])


def beside_bare_loops(groups: int, windows: int) -> dict[str, dict[str, list[float]]]:
    """By backend, the median window of each group in seconds, by loop and processes; and the share of a core to watch.

    Where a group begins with the bench, the next begins with the bare loop.
    """
    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in bare.LOOPS}
    with Launcher(Device.CPU) as launcher:
        for number, (backend, measured) in product(range(groups), found.items()):
            began, used = time.monotonic(), time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                is_bench_first = number % 2 == 0
                cell = in_turn.on_cpu(backend, windows)
                steps = in_turn.steps(
                    launcher, cell, backend, Path(folder), is_bench_first=is_bench_first
                )
            measured["watching"].append((time.process_time() - used) / (time.monotonic() - began))
            for (processes, loop), seconds in steps.items():
                measured[f"{loop}, {processes}"].append(statistics.median(seconds))
            ratios = (
                measured[f"bench, {a}"][-1] / measured[f"bare, {b}"][-1]
                for a, b in permutations(in_turn.PROCESSES)
            )
            words = " and ".join(f"{ratio:.4f}" for ratio in ratios)
            print(f"group {number + 1} of {groups}: {backend}: bench / bare {words}", flush=True)
            launcher.close()
    return found


def fixed(arguments: list[str]) -> dict[str, dict[str, Any]]:
    """By name, the median seconds of what the tests of this folder time, and how often it was run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "times.json")
        names = ("enable", "only", "disable-gc", f"json={report}", "columns=median,rounds")
        options = ["--all", *(f"--benchmark-{name}" for name in names), *arguments]
        subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.conftest", "studies/overhead", *options],
            check=True,
            cwd=ROOT,
        )
        timed = json.loads(report.read_text())["benchmarks"]
    return {
        test["name"].removeprefix("test_").replace("_", " "): {
            "seconds": test["stats"]["median"],
            "runs": test["stats"]["rounds"],
        }
        for test in timed
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="nox -s overhead --", description=__doc__)
    option = parser.add_argument
    option(
        "--groups",
        type=int,
        default=16,
        help="groups of processes per bare loop and side (default: %(default)s)",
    )
    option("--windows", type=int, default=80, help="timed windows of each (default: %(default)s)")
    option(
        "--out", type=Path, default=ROOT / "docs", metavar="DIR", help="where to (default: docs)"
    )
    options, others = parser.parse_known_args()
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # in all processes alike
    data: dict[str, Any] = {"date": start.now(), "git": machine.git_state(), "busy": busy()}
    data |= {"machine": machine.machine(), "packages": machine.packages()}
    data["loops"] = beside_bare_loops(options.groups, options.windows)
    data["times"] = fixed(others)
    data["busy"] = max(data["busy"], busy())
    data["minutes"] = (time.monotonic() - began) / 60
    committed = ("git", "show", f"HEAD:docs/{DATA}")
    last = subprocess.run(committed, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / DATA).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    BARE_LOOPS.write_text(json.dumps(bare_loops(data["loops"])) + "\n", encoding="utf-8")
    text = page(data, json.loads(last or "{}"))
    (options.out / "performance.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
