"""``nox -s results``: which committed runs and pages are older than the code they are made by, and how to make them.

Without a name it lists all that made.toml has, with the errors of ``python -m bench check``; with names it makes these,
with ``--all`` all that are out of date, each after what it is made from. Comments and docstrings count as no change.
Exit status: 1 if something is out of date, has an error, or could not be made.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.errors import BAD, GOOD, INTERRUPTED, WRONG, InputError
from bench.findings import Finding, Level
from bench.judge.integrity import check
from bench.run import trial_code
from bench.run.journal import JOURNAL, MANIFEST
from studies import ROOT

RECORDS = "results/made.json"
"""When and at which commit each page was made. Runs say this themselves."""
CODE = ("bench", "tests")
"""Must be committed before anything is made."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One thing that is committed and can be made again: a row of made.toml, which says what each value is."""

    name: str
    paths: Sequence[str]
    commands: Sequence[str]
    code: Sequence[str]
    sources: Sequence[str] = ()
    minutes: float
    is_run: bool = False


def rows() -> tuple[Made, ...]:
    """The rows of made.toml, with the sets of code that they name."""
    read = tomllib.loads(Path(__file__).with_name("made.toml").read_text(encoding="utf-8"))
    sets: dict[str, list[str]] = read["sets"] | {"training": training()}
    found = []
    for row in read["made"]:
        code: list[str] = []
        for name in row["code"]:
            code += sets.get(name, [name])
        found.append(Made(**row | {"code": code}))
    return tuple(found)


def training() -> list[str]:
    """The code that a trial runs: what makes ``run --resume`` refuse makes a committed run out of date."""
    return [str(path.relative_to(ROOT)) for path in trial_code.modules()]


ROWS = rows()


def main(argv: Sequence[str] | None = None) -> int:
    """List, or make."""
    parser = argparse.ArgumentParser(prog="nox -s results --", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"make these: {', '.join(row.name for row in ROWS)}",
    )
    parser.add_argument(
        "--all", action="store_true", help="make all that are out of date; wants an idle machine"
    )
    arguments = parser.parse_args(argv)
    try:
        if unknown := sorted(set(arguments.names) - {row.name for row in ROWS}):
            raise InputError(
                f"'{unknown[0]}' is not made here; use one of {', '.join(row.name for row in ROWS)}"
            )
        return make(arguments.names, arguments.all) if arguments.names or arguments.all else show()
    except InputError as error:
        print(f"bench: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        return INTERRUPTED


def show() -> int:
    late: dict[str, Made] = {}
    bad = 0
    for row in ROWS:
        if why := reasons(row, late):
            late[row.name] = row
        print(f"{row.name:<11}  {row.minutes:4.0f} min  {'; '.join(why) or 'up to date'}")
        for error in _errors(row):
            print(f"{'':<23}ERROR, {error.topic}: {error.text}")
            bad += 1
    if late:
        total = sum(row.minutes for row in late.values())
        print(
            f"out of date: {len(late)}; to make them, about {total:.0f} min: nox -s results -- --all"
        )
    return BAD if late or bad else GOOD


def _errors(row: Made) -> list[Finding]:
    """What ``python -m bench check`` calls an error in the runs of a row."""
    if not row.is_run:
        return []
    return [
        found
        for folder in _runs(row.paths)
        for found in check(folder)
        if found.level is Level.ERROR
    ]


def make(names: Collection[str], every: bool) -> int:
    """Make what was named, or what is out of date; 1 if something failed."""
    if changed := _git("status", "--porcelain", "--", *CODE):
        raise InputError(
            f"{changed.split()[1]}: has changes that are not committed; commit them first, then make it"
        )
    late: dict[str, Made] = {}
    for row in ROWS:
        if row.name in names or (every and reasons(row, late)):
            print(f"== {row.name}, about {row.minutes:.0f} min", flush=True)
            if not _make(row):
                late[row.name] = row
    if late:
        print(f"failed: {', '.join(late)}")
        return BAD
    print("all were made: read the differences, then commit them")
    return GOOD


def _make(row: Made) -> bool:
    begun, commit = time.time(), _git("rev-parse", "HEAD").strip()
    for path in row.paths if row.is_run else ():
        shutil.rmtree(ROOT / path, ignore_errors=True)
    programs = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    for command in row.commands:
        print(f"$ {command}", flush=True)
        process = subprocess.Popen(
            command, shell=True, cwd=ROOT, env={**os.environ, "PATH": programs}
        )
        try:
            status = process.wait()
        except KeyboardInterrupt:  # the command has it too, ends its trials, and writes what it has
            process.wait()
            raise
        # Exit status 1 of the bench says that something measured is wrong: known defects are among it.
        if status not in ((GOOD, BAD) if command.startswith("python -m bench ") else (GOOD,)):
            print(f"exit status {status}: {command}", flush=True)
            return False
    if not any(file.stat().st_mtime > begun - 1 for file in _files(row)):
        print(f"wrote nothing into {', '.join(row.paths)}: {'; '.join(row.commands)}", flush=True)
        return False
    finished, minutes = datetime.now(UTC).isoformat(timespec="seconds"), (time.time() - begun) / 60
    stored = _stored() | {
        row.name: {"commit": commit, "finished": finished, "minutes": round(minutes, 1)}
    }
    (ROOT / RECORDS).write_text(
        json.dumps(stored, indent=1, sort_keys=True) + "\n", encoding="utf-8"
    )
    paths = " ".join(path for path in row.paths if (ROOT / path).exists())
    print(
        f"took {minutes:.0f} min; to commit it: git add -f {paths} {RECORDS} ':!*.html'", flush=True
    )
    return True


def _files(row: Made) -> list[Path]:
    tops = [ROOT / path for path in row.paths]
    return [path for top in tops for path in (top, *top.rglob("*")) if path.is_file()]


def reasons(row: Made, late: Collection[str]) -> list[str]:
    """Why it is out of date, if it is; ``late`` has the names of the things before it that are."""
    records = _records(row)
    if not records:
        return ["is missing" if row.is_run else f"{RECORDS} does not say when it was made"]
    found = []
    for commit in dict.fromkeys(record["commit"] for record in records):
        changed = _changed(commit, [*row.code, *(f":!{path}" for path in row.paths)])
        if changed is None:
            found.append(f"was made at commit {str(commit)[:12]}, which is not in this repository")
        elif changed:
            more = f" and {len(changed) - 1} more files" if len(changed) > 1 else ""
            found.append(f"is older than {changed[0]}{more} (made at {commit[:12]})")
    if not all(record["clean"] for record in records):
        found.append("was made from code with uncommitted changes")
    if not all(record["finished"] for record in records):
        found.append("was not finished")
    for name in row.sources:
        (source,) = [row for row in ROWS if row.name == name]
        newest = max((record["finished"] for record in _records(source)), default="")
        if name in late or newest > min(record["finished"] for record in records):
            found.append(
                f"is made from {name}, which is {'out of date' if name in late else 'newer'}"
            )
    return found


def _records(row: Made) -> list[dict[str, Any]]:
    """When and from which code it was made: one record for each run, or one."""
    if not row.is_run:
        return [{"clean": True, **_stored()[row.name]}] if row.name in _stored() else []
    manifests = [
        json.loads((folder / MANIFEST).read_text(encoding="utf-8")) for folder in _runs(row.paths)
    ]
    return [
        {**manifest["git"], "finished": manifest.get("finished") or ""} for manifest in manifests
    ]


def _stored() -> dict[str, Any]:
    path = ROOT / RECORDS
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _runs(paths: Sequence[str]) -> list[Path]:
    return sorted(path.parent for folder in paths for path in (ROOT / folder).rglob(JOURNAL))


class _Bare(ast.NodeTransformer):
    """Removes docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else node


MEANINGS: dict[str, Callable[[str], object]] = {
    ".py": lambda text: ast.dump(_Bare().visit(ast.parse(text))),
    ".toml": tomllib.loads,
}
"""What of a file counts, by its ending; of others everything does."""


def _changed(commit: str | None, code: Sequence[str]) -> list[str] | None:
    """The files that differ in more than comments from those of a commit; None if the commit is unknown."""
    if not commit or not _git("cat-file", "-t", commit):
        return None
    names = _git("diff", "--name-only", "--no-renames", commit, "--", *code).splitlines()
    return [
        name
        for name in names
        if _meaning(name, _git("show", f"{commit}:{name}")) != _meaning(name, _now(name))
    ]


def _now(name: str) -> str:
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _meaning(name: str, text: str) -> object:
    return MEANINGS.get(Path(name).suffix, str)(text)


def _git(*arguments: str) -> str:
    """What git prints; nothing if it fails."""
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
