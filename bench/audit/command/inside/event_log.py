"""The file of events of a process: one line of JSON per event."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist

JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables of launchers that tell one training from another."""


class EventLog:
    """Events wait for ``flush``: their samples may be on an accelerator, for which that waits once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[dict[str, Any]] = []
        self._file: TextIO | None = None

    def write(self, event: str, **values: Any) -> None:
        """Add an event with rank and world size: of the process group, or else of the launcher."""
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        else:
            rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        job = ":".join(os.environ.get(name, "") for name in JOB)
        self._waiting.append({"event": event, "job": job, "rank": rank, "world": world, **values})

    def flush(self) -> None:
        """Write what waits to a file of this process."""
        if self._waiting:
            self._file = self._file or (self._folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
            lines = [json.dumps(line, default=lambda tensor: tensor.tolist()) + "\n" for line in self._waiting]
            self._waiting.clear()
            self._file.write("".join(lines))
            self._file.flush()
