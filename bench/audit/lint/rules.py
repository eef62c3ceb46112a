"""Rules, each one function for each kind of config, and what they find."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import bench
from bench.audit.lint.config_file import ConfigPart
from bench.formatting import plain


class Severity(StrEnum):
    """How bad a finding is. Errors and warnings make the exit status 1, an info does not."""

    ERROR = "error"
    """Training does not start, never ends, or optimizes something other than the config says."""
    WARNING = "warning"
    """Training runs, but steps, scales or logs differ from what the config's numbers suggest."""
    INFO = "info"
    """Worth knowing, but nothing is wrong yet."""


ERROR, WARNING, INFO = Severity


class Rule(NamedTuple):
    """One kind of finding."""

    severity: Severity
    """Unless a finding says otherwise."""
    title: str
    """One line, for lists."""
    source: str
    """Where it can be checked: a file of the framework, or an issue."""
    stops: bool
    """Whether the framework refuses the config, so that training stops before its first step."""


class Found(NamedTuple):
    """What the function of a rule finds."""

    place: ConfigPart
    what: str
    """What will happen, in the config's own numbers."""
    fix: str
    """What to write instead."""
    proof: str = ""
    """A command that shows it in small, or another way to see it; the rule's source if it is left out."""
    severity: Severity | None = None
    """None for the rule's."""
    code: str = ""
    """Of a function for several codes."""


Check = Callable[[Any], Iterable[Found]]
CheckT = TypeVar("CheckT", bound=Check)
_RULES: dict[str, Rule] = {}
EXAMPLES: list[tuple[str, str, tuple[str, ...]]] = []
"""Of every rule: its code, a config, and the codes that are found there too."""
_CHECKS: dict[str, dict[Check, str]] = defaultdict(dict)
"""The functions by the class that they are about, with their codes."""


def rule(code: str, example: str, *also: str) -> Callable[[CheckT], CheckT]:
    """Make a function a rule for what its parameter's type says. One for several codes names them in what it finds.

    The example is a small config in which it finds the code, written as in tests/audit/lint_corpus.yaml, and ``also``
    are the codes that this config cannot avoid.
    """
    EXAMPLES.append((code, example, also))

    def add(check: CheckT) -> CheckT:
        _CHECKS[next(iter(check.__annotations__.values()))][check] = code
        return check

    return add


def says(severity: Severity, title: str, source: str, *, stops: bool = False) -> Callable[[CheckT], CheckT]:
    """The text of the rule above; given once for a code, although there may be a function for each kind of config."""
    _RULES[EXAMPLES[-1][0]] = Rule(severity, title, source, stops)
    return lambda check: check


def rules() -> dict[str, Rule]:
    """All rules by code."""
    return dict(sorted(_RULES.items()))


@dataclass(frozen=True, slots=True)
class LintFinding:
    """One finding at one place of one file; its texts are those of ``Found``."""

    code: str
    severity: Severity
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
        return dataclasses.asdict(self) | {"title": _RULES[self.code].title, "source": _RULES[self.code].source}

    def __str__(self) -> str:
        """The finding as a compiler would print it, in four lines, whatever is in the config."""
        key, what, fix, proof = map(plain, (self.key, self.what, self.fix, self.proof))
        head = f"{self.file}:{self.line}: {self.severity} {self.code} {key}: {_RULES[self.code].title}"
        return f"{head}\n    what happens: {what}\n    fix: {fix}\n    proof: {proof}"


def findings(subjects: Iterable[object]) -> list[LintFinding]:
    """What the rules find in one training, whose parts are the subjects; only what stops it, if anything does."""
    found = []
    for subject in subjects:
        for check, default in _CHECKS[type(subject).__name__].items():
            for place, what, fix, proof, severity, given in check(subject):
                code = given or default
                level, _, source, refused = _RULES[code]
                stops = refused and not proof
                shown = proof or f"{'training stops before its first step: ' if stops else ''}{source}"
                at = (place.file, place.line, place.key)
                found.append(LintFinding(code, severity or level, *at, what, fix, shown, stops))
    return [each for each in found if each.stops] or found


SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def sarif(findings: Sequence[LintFinding]) -> dict[str, Any]:
    """A SARIF log of one run (docs.oasis-open.org/sarif/sarif/v2.1.0), as plain values for JSON.

    Code hosts show it in pull requests. A relative path stays relative to the repository.
    """
    listed = [
        {
            "id": code,
            "shortDescription": {"text": rule.title},
            "help": {"text": f"Source: {rule.source}"},
            "defaultConfiguration": {"level": LEVELS[rule.severity]},
        }
        for code, rule in rules().items()
    ]
    driver = {"name": "accumulation-bench lint", "version": bench.__version__, "rules": listed}
    run = {"tool": {"driver": driver}, "results": [_result(finding) for finding in findings]}
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


def _result(finding: LintFinding) -> dict[str, Any]:
    path = Path(finding.file)
    uri = path.as_uri() if path.is_absolute() else quote(path.as_posix().encode(errors="surrogateescape"))
    place = {"artifactLocation": {"uri": uri}, "region": {"startLine": finding.line}}
    logical = [{"fullyQualifiedName": finding.key}]
    return {
        "ruleId": finding.code,
        "ruleIndex": list(rules()).index(finding.code),
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.what}. Fix: {finding.fix}. Proof: {finding.proof}"},
        "locations": [{"physicalLocation": place, "logicalLocations": logical}],
    }
