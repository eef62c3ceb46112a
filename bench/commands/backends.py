"""``backends``: what there is, and what this machine can run."""

from __future__ import annotations

import argparse
from typing import Any

from bench import machine
from bench.backends.base import registry
from bench.cell import Device
from bench.errors import GOOD


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser("backends", help="list the backends and what this machine can run")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Show the list."""
    rows = [("backend", "framework", "sharding", "sync", "cpu", "cuda", "known defect")]
    has_gpu = bool(machine.gpus())
    for name, backend in registry().items():
        cpu = backend.missing(Device.CPU) or "yes"
        cuda = (backend.missing(Device.CUDA) or "yes") if has_gpu else "no GPU here"
        rows.append((name, backend.framework, str(backend.sharding), str(backend.sync), cpu, cuda, backend.defect))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        print("  ".join([*(text.ljust(width) for text, width in zip(row, widths, strict=False)), row[-1]]).rstrip())
    return GOOD
