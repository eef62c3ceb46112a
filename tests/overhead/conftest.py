"""What is stored of the machine: no host name, and of the CPU what can be compared."""

from __future__ import annotations

from typing import Any

CPU = ("arch", "brand_raw", "count")


def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    machine_info["node"] = ""
    machine_info["cpu"] = {name: machine_info["cpu"].get(name) for name in CPU}
