"""``nox -s overhead``: time the hot paths, store the times, and print them beside the last committed ones.

Further arguments go to pytest. The times are stored in results/overhead/<time>.json; ``git add -f`` makes them the ones
to compare with. No ratio makes the exit status bad.
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys

from tests.overhead.beside import FOLDER, last_committed, table


def main(arguments: list[str]) -> int:
    """The exit status of pytest."""
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    path = FOLDER / f"{stamp}.json"
    FOLDER.mkdir(parents=True, exist_ok=True)
    timed = ["--benchmark-enable", "--benchmark-only", "--benchmark-disable-gc", f"--benchmark-json={path}"]
    status = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/overhead", *timed, *arguments]).returncode
    if not path.exists() or path.stat().st_size == 0:
        return status or 1
    now = json.loads(path.read_text())
    for one in now["benchmarks"]:
        del one["stats"]["data"]  # thousands of rounds; their quartiles stay
    path.write_text(json.dumps(now, indent=1) + "\n")
    found = last_committed()
    named, then = found if found is not None else ("then", None)
    print("\n".join(table(then, now, named)))
    print(f"stored: {path}")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
