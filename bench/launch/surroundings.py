"""What around the processes of a run would make every trial fail.

It is told once, by ``doctor`` and when a run starts.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.errors import InputError, reason_of
from bench.findings import Finding, error
from bench.formatting import size
from bench.launch import job_nodes

SHARED_MEMORY = Path("/dev/shm")
SHARED_BYTES = 2**20
"""Free shared memory without which no process group starts."""
CONNECT_S = 2.0
"""How long a connection to this very machine may take."""


def broken() -> Iterator[Finding]:
    """What is wrong; each finding is an error."""
    if sys.flags.optimize > 1:
        how = "unset PYTHONOPTIMIZE, and start Python without -OO"
        yield error("python", f"leaves out docstrings, without which torch does not start: {how}")
    reason = loopback_error()
    if reason:
        yield error(
            "loopback",
            f"127.0.0.1 does not work ({reason}): ip link set lo up, or allow it in the firewall",
        )
    free = shared_memory_bytes()
    if free is not None and free < SHARED_BYTES:
        fix = "remove files there, or give it more (--shm-size)"
        yield error("memory", f"{SHARED_MEMORY} has {size(free)} free: {fix}")
    try:
        job_nodes.check_interfaces()
    except InputError as found:
        yield error("network", f"{found}: name one of them, or unset it")


def require_sound() -> None:
    """Raise InputError with the first thing that is wrong."""
    for finding in broken():
        raise InputError(f"{finding.topic}: {finding.text}")


def loopback_error() -> str:
    """Why connections over 127.0.0.1 do not work; empty if they do."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=CONNECT_S),
        ):
            server.settimeout(CONNECT_S)
            server.accept()[0].close()
    except OSError as problem:
        return reason_of(problem)
    return ""


def shared_memory_bytes() -> int | None:
    """Free bytes of the shared memory; None if this system has none."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
