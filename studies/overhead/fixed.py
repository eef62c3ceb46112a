"""Times again what of docs/performance.md is not beside bare loops: ``nox -s overhead -- --fixed``."""

from __future__ import annotations

import json
import os
import sys
import time

from bench.judge.caveats import BARE_LOOPS
from bench.run import machine, start
from studies import ROOT
from studies.overhead.__main__ import DATA, busy, fixed
from studies.overhead.page import bare_loops, page


def main() -> None:
    began = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"  # in all processes alike
    made = {"date": start.now(), "git": machine.git_state(), "busy": busy()}
    made |= {"machine": machine.machine(), "packages": machine.packages()}
    last = json.loads((ROOT / "docs" / DATA).read_text(encoding="utf-8"))
    data = last | {"times": fixed(sys.argv[1:]), "fixed": made}
    made["busy"] = max(made["busy"], busy())
    made["minutes"] = (time.monotonic() - began) / 60
    (ROOT / "docs" / DATA).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    BARE_LOOPS.write_text(json.dumps(bare_loops(data["loops"])) + "\n", encoding="utf-8")
    (ROOT / "docs" / "performance.md").write_text(page(data, last), encoding="utf-8")


if __name__ == "__main__":
    main()
