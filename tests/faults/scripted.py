"""``python -m tests.faults.scripted``: the bench with a launcher that trains nothing, so that a trial takes no time.

All else is real: the command line, the runner, the journal, the lock; only the report at the end is left out. So of the
moments at which such a run is killed, many lie in the writing of the journal.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

from bench import cli
from bench.errors import GOOD, INTERRUPTED
from bench.launch import launcher
from bench.launch.outcome import Outcome
from bench.plan.task import Spec
from tests.factories import FakeLauncher

TRIAL_S = 0.002


class ScriptedLauncher(FakeLauncher):
    """Takes the real launcher's place, and its arguments."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def run(self, spec: Spec, *limits: Any, **more: Any) -> Outcome:
        time.sleep(TRIAL_S)
        # What it remembers is for other tests; here the memory of the process is looked at.
        self.specs.clear()
        self.timeouts.clear()
        return super().run(spec, *limits, **more)


if __name__ == "__main__":
    launcher.Launcher = ScriptedLauncher  # type: ignore[assignment,misc]
    outputs: Any = SimpleNamespace(write_outputs=lambda *_, **__: GOOD)
    sys.modules["bench.report.outputs"] = outputs
    try:
        sys.exit(cli.main())
    except KeyboardInterrupt:  # as in bench/__main__.py
        sys.exit(INTERRUPTED)
