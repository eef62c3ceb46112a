"""``backends``: lists the backends, and whether this machine can run them.

Backends of installed packages are listed, but loaded only if they are named, since loading runs the
package's code.
"""

from __future__ import annotations

import argparse

from bench.backends.base import Backend, built_in, installed_backends, registry
from bench.commands.options import CommandParsers
from bench.errors import GOOD, InputError, suggest
from bench.plan.cell import Device
from bench.tabular import Table


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "backends", help="list the backends, and whether this machine can run them"
    )
    words = "list only these, and load those of installed packages"
    parser.add_argument("names", nargs="*", metavar="B", help=words)


def run(arguments: argparse.Namespace) -> int:
    from bench.launch import gpus

    header = ("backend", "framework", "sharding", "sync", "cpu", "cuda", "known defect")
    rows: list[tuple[str, ...]] = []
    has_gpu = bool(gpus.gpus())
    wanted = arguments.names
    if not wanted:
        wanted = list(built_in())
    known, others = registry(wanted), installed_backends()
    for name in arguments.names:
        if name not in known:
            raise InputError(f"'{name}' is unknown; {suggest(name, [*known, *others])}")
    for name, backend in known.items():
        if arguments.names and name not in arguments.names:
            continue
        cpu = _can_run(backend, Device.CPU)
        cuda = "no GPU here"
        if has_gpu:
            cuda = _can_run(backend, Device.CUDA)
        sharding, sync = str(backend.sharding), str(backend.sync)
        rows.append((name, backend.framework, sharding, sync, cpu, cuda, backend.defect))
    if not arguments.names:
        for name, value in others.items():
            if name in known:
                continue
            what = f"not loaded: {value}"
            rows.append((name, what, "", "", "", "", ""))
    print(Table.from_rows(header, rows).text())
    return GOOD


def _can_run(backend: type[Backend], device: Device) -> str:
    """``yes`` if this machine can run the backend on such a device, else what it lacks."""
    lack = backend.missing(device)
    if lack:
        return lack
    return "yes"
