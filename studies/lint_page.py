"""The page on ``lint``: what it finds in the configs of public repositories, judged by rule and repository.

``python -m studies.lint_page FOLDER`` reads the repositories in a folder, one git directory each, named owner+name or
owner+name/repo, and adds them to those of docs/lint.json; without a folder the page is written again from that. No file
of a repository is kept: the data are counts, and the commit that has the files. studies/lint_judged.toml says which
findings are right, and why, and what a second judge said of each finding of two rules.
Status 1: fewer than 95 % of errors and warnings are right, or fewer than 80 % of a rule's.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.audit import lint as lint_package
from bench.audit.lint import lint
from bench.audit.lint.config_kinds import recognize
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import rules
from bench.audit.lint.version_facts import UsedVersion
from bench.errors import InputError
from bench.findings import Level
from bench.tabular import markdown_table
from studies import ROOT

PAGE, DATA, JUDGED = (
    ROOT / "docs/lint.md",
    ROOT / "docs/lint.json",
    ROOT / "studies/lint_judged.toml",
)
REPOSITORIES = "results/lint.csv"
COMMAND = "python -m studies.lint_page"
VERSIONS = {"deepspeed": UsedVersion((0, 19, 8)), "lightning": UsedVersion((2, 6, 6))}
SUFFIXES = {"json", "yaml", "yml", "toml", "sh"}
LARGEST = 300_000
"""Bytes of a file that is looked at."""
ABOUT_TRAINING = re.compile(
    rb"accumulat|grad_accum|zero_optimization|train_batch_size|train_micro_batch|compute_environment|distributed_type"
    rb"|per_device_train|^trainer\s*:|\"trainer\"\s*:|micro_?batch|deepspeed|num_train_epochs|gradient_clip_val",
    re.MULTILINE,
)
LEAST, LEAST_OF_RULE = 0.95, 0.8
"""Shares of errors and warnings that must be right: of all, and of each rule."""


@dataclass(frozen=True)
class Judgement:
    """Whether the findings of a rule in a repository are right."""

    rule: str
    repository: str
    verdict: str
    """``right``, ``wrong`` or ``doubtful``."""
    why: str
    wrong: int = 0
    """How many of them are not right although the others are."""


@dataclass(frozen=True)
class SecondJudgement:
    """How many findings of a rule are right by a program that knows nothing of the rule."""

    rule: str
    repositories: int
    findings: int
    right: int
    how: str


@dataclass(frozen=True)
class FirstReading:
    """How many findings were right in repositories that no rule had been changed for."""

    read: str
    repositories: str
    """How many, and how they were chosen."""
    right: int
    findings: int


KINDS_SHOWN = 4
"""The kinds of which most files are, which the page names."""


def main(argv: Sequence[str] | None = None) -> int:
    """Lint the repositories of a folder, if one is given, and write the page."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="git directories of repositories")
    folder = parser.parse_args(argv).folder
    if folder is not None:
        found = json.loads(DATA.read_text()) | linted(folder)
        DATA.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    data = json.loads(DATA.read_text())
    judged = tomllib.loads(JUDGED.read_text())
    PAGE.write_text(page(data, judged), encoding="utf-8")
    (ROOT / REPOSITORIES).write_text(repositories(data, judged), encoding="utf-8")
    missed = misses(data, judged)
    print("\n".join(missed) or "all shares are met", file=sys.stderr)
    return int(bool(missed))


def linted(folder: Path) -> dict[str, Any]:
    """By repository: the day, its commit, files by kind, and findings by rule and level."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found: dict[str, Any] = {}
    seen: set[str] = set()
    for place in sorted(folder.iterdir()):
        git = place / "repo" if (place / "repo").exists() else place
        if not (git / "objects").is_dir():
            continue
        name = place.name.replace("+", "/", 1)
        with tempfile.TemporaryDirectory() as work:
            files = list(_written(git, Path(work), seen))
            if files:
                found[name] = {"read": today, "commit": _commit(git)} | _counts(files)
    return found


def _written(git: Path, work: Path, seen: set[str]) -> Iterator[Path]:
    """The files about training of a repository's newest commit, written to a folder; each content once."""
    tree = _git(git, "ls-tree", "-r", "-l", "-z", _commit(git))
    listed = []
    for entry in filter(None, tree.split(b"\0")):
        meta, path = entry.split(b"\t", 1)
        _, kind, sha, size = meta.split()
        name = path.decode("utf-8", "replace")
        if (
            kind == b"blob"
            and name.rpartition(".")[2].lower() in SUFFIXES
            and size.isdigit()
            and int(size) <= LARGEST
        ):
            listed.append((sha, name))
    asked = b"".join(sha + b"\n" for sha, _ in listed)
    answer = subprocess.run(
        ["git", "--git-dir", str(git), "cat-file", "--batch"],
        input=asked,
        capture_output=True,
        check=True,
    ).stdout
    written, place = [], 0
    for _, name in listed:
        end = answer.index(b"\n", place)
        head, place = answer[place:end], end + 1
        if head.endswith(b"missing"):
            continue
        end = place + int(head.split()[2])
        content, place = answer[place:end], end + 1
        digest = hashlib.sha1(content).hexdigest()
        if not ABOUT_TRAINING.search(content):
            continue
        copy = work / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(content)  # a config may name a file that another repository has too
        if digest not in seen:
            seen.add(digest)
            written.append(copy)
    yield from sorted(written)


def _counts(files: Sequence[Path]) -> dict[str, Any]:
    kinds: Counter[str] = Counter()
    findings: Counter[str] = Counter()
    for file in files:
        titles: list[str] = []

        def noted(root: Any, suffix: str, launcher: str = "", titles: list[str] = titles) -> Any:
            config = recognize(root, suffix, launcher)
            if config is not None:
                titles.append(config.title)
            return config

        lint_package.recognize = noted  # type: ignore[attr-defined]
        try:
            found = lint([file], LintOptions(**VERSIONS))
        except InputError:
            kinds["unreadable" if titles else "unknown"] += 1
            continue
        finally:
            lint_package.recognize = recognize  # type: ignore[attr-defined]
        kinds[titles[0] if titles else "unknown"] += 1
        findings.update(f"{each.code} {each.level}" for each in found)
    return {"files": len(files), "kinds": kinds, "findings": findings}


def _commit(git: Path) -> str:
    """The newest commit; a snapshot may have no HEAD."""
    for reference in ("HEAD", *_git(git, "for-each-ref", "--format=%(refname)").decode().split()):
        done = subprocess.run(
            ["git", "--git-dir", str(git), "rev-parse", "--verify", f"{reference}^{{commit}}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return done.stdout.strip()
    raise SystemExit(f"{git}: has no commit")


def _git(git: Path, *command: str) -> bytes:
    return subprocess.run(
        ["git", "--git-dir", str(git), *command], capture_output=True, check=True
    ).stdout


def judgement_of(rule: str, repository: str, judged: dict[str, Any]) -> Judgement:
    """That on a rule's findings in a repository: its own, or else that on the rule."""
    judgements = [Judgement(**each) for each in judged["judged"]]
    for each in judgements:
        if (each.rule, each.repository) == (rule, repository):
            return each
    return next(
        (each for each in judgements if (each.rule, each.repository) == (rule, "*")),
        Judgement(rule, "*", "doubtful", "not judged"),
    )


def tallies(
    data: dict[str, Any], judged: dict[str, Any], names: set[str]
) -> dict[str, Counter[str]]:
    """By rule: its errors and warnings in these repositories, by verdict."""
    found: dict[str, Counter[str]] = {}
    for name in names & data.keys():
        for key, number in data[name]["findings"].items():
            rule, level = key.split()
            if level != Level.NOTE:
                judgement = judgement_of(rule, name, judged)
                tally = found.setdefault(rule, Counter())
                tally[judgement.verdict] += number - judgement.wrong
                tally["wrong"] += judgement.wrong
    return dict(sorted(found.items()))


def misses(data: dict[str, Any], judged: dict[str, Any]) -> list[str]:
    """What does not meet its share."""
    by_rule = tallies(data, judged, set(data))
    found = [
        f"{rule}: {share(tally)}" for rule, tally in by_rule.items() if share(tally) < LEAST_OF_RULE
    ]
    whole = sum(by_rule.values(), Counter())
    return found + ([f"all: {share(whole)}"] if share(whole) < LEAST else [])


def share(tally: Counter[str]) -> float:
    """The share of findings that are right; a doubtful one is not."""
    return tally["right"] / tally.total() if tally else 1.0


def page(data: dict[str, Any], judged: dict[str, Any]) -> str:
    fresh = {*judged["fresh"]} & data.keys()
    titles = rules()
    by_rule = tallies(data, judged, set(data))
    rows = [(rule, titles[rule].title, _right(tally)) for rule, tally in by_rule.items()]
    wrong = [
        f"- {rule}: {_reasons(rule, judged)}" for rule, tally in by_rule.items() if share(tally) < 1
    ]
    if wrong:
        wrong.append("")
    kinds: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for repository in data.values():
        kinds.update(repository["kinds"])
        for key, number in repository["findings"].items():
            if key.endswith(f" {Level.NOTE}"):
                notes[key.split()[0]] += number
    unknown, unreadable = kinds.pop("unknown", 0), kinds.pop("unreadable", 0)
    sets = [
        (name, *_of_set(data, judged, names))
        for name, names in (("known", {*data} - fresh), ("others", fresh))
    ]
    return "\n".join(
        [
            "# Lint on public configs",
            "",
            f"Written by `{COMMAND}` from [lint.json](lint.json).",
            "",
            "How many errors and warnings of `lint` are right, on files not written for it: "
            f"{unknown + unreadable + kinds.total():,} files of {len(data)} public repositories, those of "
            "one commit that are about training, identical files once per reading, linted without options for "
            f"DeepSpeed 0.19.8 and Lightning 2.6.6. {unknown:,} are of no kind that `lint` knows, "
            f"{unreadable} have a value that it refuses, and {kinds.total():,} are of "
            f"{', '.join(kind for kind, _ in kinds.most_common(KINDS_SHOWN))} and {len(kinds) - KINDS_SHOWN} other "
            "kinds.",
            "",
            "The project judged its findings, by rule and repository "
            "([with reasons](../studies/lint_judged.toml)). A finding is right if what it says happens with these "
            "versions in the program that reads the file; if that could not be checked, it is not. What `lint` misses "
            "was not measured.",
            "",
            *markdown_table(
                ("repositories", "number", "files", "repositories with findings", "right"),
                sets,
                range(1, 5),
            ),
            "Rules were changed until they were right in the known ones; copies of these count as known too. So only "
            "first readings are an estimate. Counts are of the linter of each reading, not of the present rules: these "
            "were corrected on 2026-11-30 after a review of their code, and no file was linted again since. "
            f"[Each repository](../{REPOSITORIES}) has its commit and findings.",
            "",
            "## First readings",
            "",
            *markdown_table(
                ("read", "repositories", "right"),
                [
                    (each.read, each.repositories, f"{each.right} of {each.findings}")
                    for each in (FirstReading(**values) for values in judged["first"])
                ],
                [2],
            ),
            judged["changed"],
            "",
            "## A second judge",
            "",
            "A program that shares no code with `lint` had the frameworks read findings of 2026-11-28.",
            "",
            *markdown_table(
                ("rule", "repositories", "right", "how"),
                [
                    (
                        each.rule,
                        str(each.repositories),
                        f"{each.right} of {each.findings}",
                        each.how,
                    )
                    for each in (SecondJudgement(**values) for values in judged["again"])
                ],
                range(1, 3),
            ),
            "## By rule",
            "",
            *markdown_table(("rule", "title", "right"), rows, [2]),
            *wrong,
            f"{notes.total():,} notes of {len(notes)} rules are not judged.",
            "",
        ]
    )


def _of_set(data: dict[str, Any], judged: dict[str, Any], names: set[str]) -> tuple[str, ...]:
    """How many repositories, files, repositories with findings, and findings that are right."""
    files = sum(data[name]["files"] for name in names)
    found = sum(bool(_listed(data[name]["findings"])) for name in names)
    tally = sum(tallies(data, judged, names).values(), Counter())
    return (str(len(names)), f"{files:,}", str(found), _right(tally))


def _right(tally: Counter[str]) -> str:
    """``9 of 9``."""
    return f"{tally['right']} of {tally.total()}"


def _reasons(rule: str, judged: dict[str, Any]) -> str:
    """Why findings of a rule are not right, with the repository."""
    reasons = []
    for each in judged["judged"]:
        if each["rule"] == rule and (each["verdict"] != "right" or each.get("wrong")):
            where = "" if each["repository"] == "*" else f"{each['repository']}: "
            reasons.append(f"{where}{each['why']}")
    return "; ".join(reasons)


def repositories(data: dict[str, Any], judged: dict[str, Any]) -> str:
    """Each repository with its commit, files, and errors and warnings by rule, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("repository", "read", "commit", "seen before", "files", "errors and warnings"))
    for name, each in sorted(data.items()):
        seen = "no" if name in judged["fresh"] else "yes"
        found = _listed(each["findings"])
        writer.writerow((name, each["read"], each["commit"], seen, each["files"], found))
    return text.getvalue()


def _listed(findings: dict[str, int]) -> str:
    shown = [
        f"{key.split()[0]} {number}"
        for key, number in sorted(findings.items())
        if not key.endswith(f" {Level.NOTE}")
    ]
    return ", ".join(shown)


if __name__ == "__main__":
    raise SystemExit(main())
