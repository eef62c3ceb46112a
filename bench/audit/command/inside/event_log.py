"""The file of events of a process: one line of JSON per event."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
"""Variables of launchers that tell one training from another."""

WRITTEN_AT = ("probes", "step", "skip", "error", "end")
"""Events at which all lines until then are written: a training that is killed loses its open window alone."""


class EventLog:
    """Appends events. Samples of an accelerator stay there until ``flush``, which waits for it once."""

    def __init__(self, torch: Any, folder: Path) -> None:
        self._torch = torch
        self._folder = folder
        self.restart()

    def restart(self) -> None:
        """Begin a file of this process, also after a fork."""
        self._waiting: list[dict[str, Any]] = []
        self._file: TextIO | None = None
        self.on_device = False
        """Whether samples are on an accelerator."""

    def write(self, event: str, **values: Any) -> None:
        """Add an event with rank and world size: of the process group, or else of the launcher."""
        distributed = self._torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            rank, world = distributed.get_rank(), distributed.get_world_size()
        else:
            rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        job = ":".join(os.environ.get(name, "") for name in JOB)
        self._waiting.append({"event": event, "job": job, "rank": rank, "world": world, **values})
        if event in WRITTEN_AT and not self.on_device:
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        if self._waiting:
            self._file = self._file or (self._folder / f"{os.getpid()}.jsonl").open("a", encoding="utf-8")
            lines = [json.dumps(line, default=lambda tensor: tensor.tolist()) + "\n" for line in self._waiting]
            self._waiting.clear()
            self._file.write("".join(lines))
            self._file.flush()
