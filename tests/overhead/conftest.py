"""What is stored of machine and commit: no names of host, folder or branch, and of the CPU what can be compared."""

from __future__ import annotations

from typing import Any

CPU = ("arch", "brand_raw", "count")
COMMIT = ("id", "time", "author_time", "dirty")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["node"] = ""
    machine_info["cpu"] = {name: machine_info["cpu"].get(name) for name in CPU}


def pytest_benchmark_update_commit_info(commit_info: dict[str, Any]) -> None:
    for name in commit_info.keys() - COMMIT:
        del commit_info[name]
    commit_info["project"] = "accumulation-bench"
