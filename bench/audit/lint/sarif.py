"""Findings as SARIF 2.1.0, which code hosts show in pull requests (docs.oasis-open.org/sarif/sarif/v2.1.0)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import bench
from bench.audit.lint.rules import LintFinding, Severity, rules

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def log(findings: Sequence[LintFinding]) -> dict[str, Any]:
    """A SARIF log of one run, as plain values for JSON."""
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
    place = {"artifactLocation": {"uri": _uri(finding.file)}, "region": {"startLine": finding.line}}
    logical = [{"fullyQualifiedName": finding.key}]
    return {
        "ruleId": finding.code,
        "ruleIndex": list(rules()).index(finding.code),
        "level": LEVELS[finding.severity],
        "message": {"text": f"{finding.what}. Fix: {finding.fix}. Proof: {finding.proof}"},
        "locations": [{"physicalLocation": place, "logicalLocations": logical}],
    }


def _uri(file: str) -> str:
    """A relative path stays relative to the repository; an absolute one becomes a file URI."""
    path = Path(file)
    return path.as_uri() if path.is_absolute() else quote(path.as_posix().encode(errors="surrogateescape"))
