"""Checks citations: whether every field of a citation's line follows from the journal of the run.

Only these lines are read, not the sentences around them.
"""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Iterator

from bench.errors import InputError
from bench.findings import Finding, error, good
from bench.judge.analysis import SCHEME, Analysis
from bench.report.citation import NONE, Citation, cite, cite_plot, fields_text

TOPIC = "citation"
MARKUP = re.compile(r"[^\w.,:;()/%=+\- ]")
"""Markup of the formats, which is removed before a citation is read."""
ID = re.compile(rf"{SCHEME}:([\w.%-]+)/(plots/[\w.%-]*[\w%]|[0-9a-f]+(?:/[0-9a-f]+)?)")
FIELD = re.compile(r" ([a-z0-9]+)=([\w.-]*\w)")


def check_citations(data: Analysis, text: str) -> Iterator[Finding]:
    """The findings on each citation in a text, in any of the formats."""
    text = " ".join(MARKUP.sub("", " ".join(text.split())).split())
    ids = list(ID.finditer(text))
    if not ids:
        yield error(TOPIC, f"the text holds no id of the form {SCHEME}:RUN/CELL, so it cites nothing")
    for match in ids:
        cited = _fields_after(text, match.end())
        try:
            right = _citation(data, match[1], match[2]).machine_fields
        except InputError as problem:
            yield error(TOPIC, f"{match[0]}: {problem}")
            continue
        pairs = {name: (cited.get(name, NONE), right.get(name, NONE)) for name in {**right, **cited}}
        wrong = {name: pair for name, pair in pairs.items() if not _same(name, *pair)}
        for name, (ours, theirs) in wrong.items():
            yield error(TOPIC, f"{match[0]}: {name} is {ours}, and {theirs} follows from the journal")
        if not wrong:
            yield good(TOPIC, f"{match[0]} {fields_text(cited)}: follows from the journal")


def _fields_after(text: str, begin: int) -> dict[str, str]:
    found = {}
    while match := FIELD.match(text, begin):
        found[match[1]] = "given twice" if match[1] in found else match[2]
        begin = match.end()
    return found


def _citation(data: Analysis, name: str, rest: str) -> Citation:
    if urllib.parse.unquote(name) != data.run.name:
        raise InputError(f"is of the run '{urllib.parse.unquote(name)}', and this is '{data.run.name}'")
    if rest.startswith("plots/"):
        return cite_plot(data.run, urllib.parse.unquote(rest.removeprefix("plots/")))
    return cite(data, *rest.split("/"))


def _same(name: str, ours: str, theirs: str) -> bool:
    """Whether two values are written the same.

    Ends of an interval may differ by one in the last digit, as another version of numpy or scipy may round them.
    """
    if ours == theirs or name not in {"low", "high"}:
        return ours == theirs
    unit = max(10.0 ** -len(value.partition(".")[2]) for value in (ours, theirs))
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=0, abs_tol=1.4 * unit)
    except ValueError:
        return False
