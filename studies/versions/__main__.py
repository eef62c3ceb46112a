"""``python -m studies.versions [PACKAGE==VERSION ...]``: measure versions; write versions.json and .md.

With ``--weights`` the weights of micro-batches and the reproducers of all advisories are measured instead, in
environments that are kept; versions that are in version-weights.jsonl already are left out unless they are named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from packaging.version import InvalidVersion, Version

from bench.errors import GOOD, INTERRUPTED, WRONG, InputError
from studies.versions import bounds, versions_page
from studies.versions.environment import EXTRAS, FailedError, measure
from studies.versions.grid import RECORDS, every_version, measure_grid
from studies.versions.grid import VERSIONS as WEIGHED
from studies.versions.grid_page import spelled, weights_section
from studies.versions.versions_page import Smoke

VERSIONS = (
    "lightning==2.2.0",
    "lightning==2.2.1",
    "lightning==2.5.6",
    "lightning==2.6.6",
    "deepspeed==0.17.5",
    "deepspeed==0.17.6",
    "deepspeed==0.18.2",
    "deepspeed==0.18.3",
    "deepspeed==0.19.2",
    "deepspeed==0.19.3",
    "deepspeed==0.19.7",
    "deepspeed==0.19.8",
)
"""The last version before and the first after each change, and the newest."""


def parsed(text: str) -> tuple[str, str]:
    """Package and version of ``PACKAGE==VERSION``. Raises InputError for anything else."""
    package, equals, number = text.partition("==")
    try:
        good = bool(equals) and package in EXTRAS and bool(Version(number))
    except InvalidVersion:
        good = False
    if not good:
        raise InputError(
            f"'{text}' is no version of {' or '.join(EXTRAS)}; write it like {VERSIONS[0]}"
        )
    return package, number


def weigh(names: Sequence[str]) -> None:
    """Measure the weights for these versions again, or for all that have none. Raises InputError for an unknown one."""
    every = list(every_version())
    known = {asked[0] if asked else package: (package, asked) for package, asked in every}
    for name in names:
        if name not in known:
            raise InputError(
                f"'{name}' is not among the versions of {', '.join(WEIGHED)} in studies/versions/grid.py"
            )
    wanted = [known[name] for name in names] or every
    for record in measure_grid(wanted, RECORDS, again=bool(names)):
        verdict = "right" if record.is_right else "BAD  "
        asked = " ".join(record.asked)
        print(
            f"{asked}  {verdict}  {record.script} {record.case}: {record.error or spelled(record.measured)}",
            flush=True,
        )


def _wanted(arguments: argparse.Namespace, *, every: bool) -> list[tuple[str, str]]:
    """The packages and versions to measure: all, those that are named, or none beside weights."""
    named: Sequence[str] = arguments.versions
    if every:
        named = VERSIONS
    elif arguments.weights:
        named = ()
    return [parsed(text) for text in named]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the given versions, or all and the smoke runs; the entries of other versions stay."""
    parser = argparse.ArgumentParser(prog="python -m studies.versions", description=__doc__)
    parser.add_argument(
        "versions", nargs="*", metavar="PACKAGE==VERSION", help=f"default: {', '.join(VERSIONS)}"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="only run the lowest and the newest versions"
    )
    parser.add_argument(
        "--weights", action="store_true", help="measure the weights of micro-batches instead"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs"), metavar="DIR", help="default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    try:
        if arguments.weights:
            weigh(arguments.versions)
        every = not (arguments.versions or arguments.smoke or arguments.weights)
        wanted = _wanted(arguments, every=every)
        entries, smokes = versions_page.read(arguments.out / "versions.json")
        weights = weights_section()
        if arguments.weights:
            versions_page.write(entries, smokes, weights, arguments.out)
        for package, number in wanted:
            print(f"{package} {number}", flush=True)
            with tempfile.TemporaryDirectory(prefix="bench-versions-") as folder:
                entry = measure(package, number, Path(folder))
            for _, finding, _, measured, good in versions_page.rows([entry]):
                print(f"  {'good' if good == 'yes' else 'BAD '}  {finding}: {measured}", flush=True)
            entries = versions_page.merged(entries, [entry])
            # After each version, so that an interrupted session loses none.
            versions_page.write(entries, smokes, weights, arguments.out)
        found: list[Smoke] = []
        for smoke in bounds.smokes() if every or arguments.smoke else ():
            found.append(smoke)
            print(f"{', '.join(map(' '.join, smoke.packages.items()))}: {smoke.result}", flush=True)
            versions_page.write(entries, found, weights, arguments.out)
    except (InputError, FailedError) as error:
        print(f"bench: {' '.join(str(error).split())}", file=sys.stderr)
        return WRONG
    except OSError as error:
        print(
            f"bench: --out {arguments.out}: cannot be written ({error.strerror}); name another",
            file=sys.stderr,
        )
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED
    return GOOD


if __name__ == "__main__":
    sys.exit(main())
