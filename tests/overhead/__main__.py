"""``nox -s overhead``: time the hot paths, store the times, and print them beside the last committed ones.

Further arguments go to pytest. The times are stored in results/overhead/<time>.json, unless a hot path failed;
``git add -f`` makes them the ones to compare with. No ratio makes the exit status bad.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.overhead.beside import FOLDER, last_committed, table


def main(arguments: list[str]) -> int:
    """The exit status of pytest."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    with tempfile.TemporaryDirectory() as place:
        timings = Path(place) / "timings.json"
        timed = ["--benchmark-enable", "--benchmark-only", "--benchmark-disable-gc", f"--benchmark-json={timings}"]
        command = [sys.executable, "-m", "pytest", "-q", "tests/overhead", *timed, *arguments]
        status = subprocess.run(command).returncode
        if status or not timings.exists() or not timings.stat().st_size:
            print("bench: a hot path failed or none was timed, so nothing is stored", file=sys.stderr)
            return status or 1
        now = json.loads(timings.read_text(encoding="utf-8"))
    for one in now["benchmarks"]:
        one["stats"].pop("data", None)  # thousands of rounds; their quartiles stay
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{stamp}.json"
    path.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    found = last_committed()
    named, then = found if found is not None else ("then", None)
    print("\n".join(table(then, now, named)))
    print(f"stored: {path}")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
