"""Rules, each one function for each kind of config, and what they find."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import bench
from bench.audit.lint.config_file import ConfigPart
from bench.findings import Level
from bench.formatting import plain


class Rule(NamedTuple):
    """One kind of finding."""

    level: Level
    """Unless a finding says otherwise. Errors and warnings make the exit status 1, a note does not.

    Error: training does not start, never ends, or optimizes something other than the config says.
    Warning: it runs, but steps, scales or logs differ from what the config's numbers suggest.
    Note: worth knowing, but nothing is wrong yet.
    """
    title: str
    """One line, for lists."""
    source: str
    """Where it can be checked: a file of the framework, or an issue."""
    stops: bool
    """Whether the framework refuses the config, so that training stops before its first step."""
    advisory: str = ""
    """Id of the known-bad version that it is about; empty for others."""


class Found(NamedTuple):
    """What the function of a rule finds."""

    place: ConfigPart
    what: str
    """What will happen, in the config's own numbers."""
    fix: str
    """What to write instead."""
    proof: str = ""
    """A command that shows it in small, or another way to see it; the rule's source if it is left
    out."""
    level: Level | None = None
    """None for the rule's."""
    code: str = ""
    """Of a function for several codes."""
    source: str = ""
    """Where this framework refuses the config, if the rule's source is that of another."""


STOPS = "training stops before its first step"
"""Beginning of the proof of what a framework refuses."""

SubjectT = TypeVar("SubjectT")
CheckT = TypeVar("CheckT", bound=Callable[..., Iterable[Found]])
_RULES: dict[str, Rule] = {}


class Example(NamedTuple):
    """A small config in which a rule finds something, as in tests/audit/lint_corpus.yaml."""

    code: str
    config: str
    also: tuple[str, ...]
    """Other codes that this config cannot avoid."""


EXAMPLES: list[Example] = []


class _Check(NamedTuple):
    """A function that judges subjects of one class, and the code of what it finds."""

    about: type
    function: Callable[[Any], Iterable[Found]]
    code: str


_CHECKS: list[_Check] = []


def rule(
    about: type[SubjectT], code: str, example: str, *also: str
) -> Callable[[Callable[[SubjectT], Iterable[Found]]], Callable[[SubjectT], Iterable[Found]]]:
    """Make a function a rule for subjects of a class.

    One for several codes names them in what it finds.
    """
    EXAMPLES.append(Example(code, example, also))

    def add(
        function: Callable[[SubjectT], Iterable[Found]],
    ) -> Callable[[SubjectT], Iterable[Found]]:
        if all(check.function is not function for check in _CHECKS):
            _CHECKS.append(_Check(about, function, code))
        return function

    return add


def says(
    level: Level, title: str, source: str, *, stops: bool = False, advisory: str = ""
) -> Callable[[CheckT], CheckT]:
    """The text of the rule above.

    Given once for a code, although there may be a function for each kind of config.
    """
    _RULES[EXAMPLES[-1].code] = Rule(level, title, source, stops, advisory)
    return lambda check: check


def rules() -> dict[str, Rule]:
    """All rules by code."""
    return dict(sorted(_RULES.items()))


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One finding at one place of one file; its texts are those of ``Found``."""

    code: str
    level: Level
    file: str
    line: int
    """Counted from 1."""
    key: str
    """Dotted."""
    what: str
    fix: str
    proof: str
    stops: bool
    """Whether training does not start, so that nothing else in the config matters yet."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with title and source of the rule."""
        return dataclasses.asdict(self) | {
            "title": _RULES[self.code].title,
            "source": _RULES[self.code].source,
        }

    def __str__(self) -> str:
        """The finding as a compiler would print it, in four lines, whatever is in the config."""
        key, what, fix, proof = map(plain, (self.key, self.what, self.fix, self.proof))
        head = f"{self.file}:{self.line}: {self.level} {self.code} {key}: {_RULES[self.code].title}"
        return f"{head}\n    what happens: {what}\n    fix: {fix}\n    proof: {proof}"


def findings(subjects: Iterable[object]) -> list[LintFinding]:
    """What the rules find in one training, whose parts are the subjects.

    Only what stops it, if anything does.
    """
    found: list[LintFinding] = []
    for subject in subjects:
        for check in _CHECKS:
            if isinstance(subject, check.about):
                found += [_finding(each, check) for each in check.function(subject)]
    stopping = [each for each in found if each.stops]
    if stopping:
        return stopping
    return found


def _finding(found: Found, check: _Check) -> LintFinding:
    """What a function has found, with what its rule says of all that it leaves out."""
    code = check.code
    if found.code:
        code = found.code
    rule = _RULES[code]
    level = rule.level
    if found.level is not None:
        level = found.level
    source = rule.source
    if found.source:
        source = found.source
    stops = rule.stops and not found.proof and level is Level.ERROR
    proof = rule.source
    if found.proof:
        proof = found.proof
    elif stops:
        proof = f"{STOPS}: {source}"
    place = found.place
    return LintFinding(
        code,
        level,
        place.file,
        place.line,
        place.key,
        found.what,
        found.fix,
        proof,
        stops,
    )


SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {Level.ERROR: "error", Level.WARNING: "warning", Level.NOTE: "note"}
"""What SARIF calls them."""


def sarif(findings: Sequence[LintFinding]) -> dict[str, Any]:
    """A SARIF log of one run (docs.oasis-open.org/sarif/sarif/v2.1.0), as plain values for JSON.

    Code hosts show it in pull requests. A relative path stays relative to the repository.
    """
    listed = [
        {
            "id": code,
            "shortDescription": {"text": rule.title},
            "help": {"text": f"Source: {rule.source}"},
            "defaultConfiguration": {"level": LEVELS[rule.level]},
        }
        for code, rule in rules().items()
    ]
    driver = {"name": "accumulation-bench lint", "version": bench.__version__, "rules": listed}
    run = {"tool": {"driver": driver}, "results": [_result(finding) for finding in findings]}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: LintFinding) -> dict[str, Any]:
    path = Path(finding.file)
    uri = quote(path.as_posix().encode(errors="surrogateescape"))
    if path.is_absolute():
        uri = path.as_uri()
    place = {"artifactLocation": {"uri": uri}, "region": {"startLine": finding.line}}
    logical = [{"fullyQualifiedName": finding.key}]
    return {
        "ruleId": finding.code,
        "ruleIndex": list(rules()).index(finding.code),
        "level": LEVELS[finding.level],
        "message": {"text": f"{finding.what}. Fix: {finding.fix}. Proof: {finding.proof}"},
        "locations": [{"physicalLocation": place, "logicalLocations": logical}],
    }
