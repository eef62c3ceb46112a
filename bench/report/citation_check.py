"""Checks citations: whether every field of a citation's line follows from the journal of the run.

Only these lines are read, not the sentences around them.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.errors import InputError
from bench.findings import Finding, Level
from bench.judge.integrity import journal_findings
from bench.judge.loading import Run, load
from bench.judge.quotes import SCHEME, Quotes
from bench.report.citation import NONE, CitedWords, joined, words_of_cell, words_of_plot, words_of_ratio
from bench.run.journal import Journal

TOPIC = "citation"
MARKUP = re.compile(r"[^\w.,:;()/%=+\- ]")
"""Markup of the formats, which is removed before a citation is read."""
ID = re.compile(rf"{SCHEME}:([\w.%-]+)/(plots/[\w.%-]*[\w%]|[0-9a-f]+(?:/[0-9a-f]+)?)")
FIELD = re.compile(r" ([a-z0-9]+)=([\w.-]*\w)")


def verify(folder: Path, text: str) -> list[Finding]:
    """The findings on each citation in a text, in any of the formats. Raises InputError if the folder is no run."""
    run = load(folder)
    journal = Journal(folder)
    found = list(journal_findings(folder, run, len(journal.read())))
    # Citations are compared with the journal as it is, not as the manifest says it was.
    now = replace(run, manifest={**run.manifest, "journal_sha256": journal.digest()})
    return [*found, *differences(now, text)]


def differences(run: Run, text: str) -> Iterator[Finding]:
    """The findings on each citation in a text, compared with the run, whose manifest has the hash of the journal."""
    text = " ".join(MARKUP.sub("", " ".join(text.split())).split())
    ids = list(ID.finditer(text))
    if not ids:
        yield Finding(Level.ERROR, TOPIC, f"the text holds no id of the form {SCHEME}:RUN/CELL, so it cites nothing")
    quotes = Quotes(run)
    for match in ids:
        said = _fields(text, match.end())
        try:
            due = dict(_words_of(quotes, match[1], match[2]).fields)
        except InputError as error:
            yield Finding(Level.ERROR, TOPIC, f"{match[0]}: {error}")
            continue
        wrong = [name for name in due | said if not _same(name, said.get(name, NONE), due.get(name, NONE))]
        for name in wrong:
            what = f"{name} is {said.get(name, NONE)}, and {due.get(name, NONE)} follows from the journal"
            yield Finding(Level.ERROR, TOPIC, f"{match[0]}: {what}")
        if not wrong:
            yield Finding(Level.GOOD, TOPIC, f"{match[0]} {joined(said)}: follows from the journal")


def _fields(text: str, begin: int) -> dict[str, str]:
    """The fields that follow an id."""
    found = {}
    while match := FIELD.match(text, begin):
        found[match[1]] = "said twice" if match[1] in found else match[2]
        begin = match.end()
    return found


def _words_of(quotes: Quotes, name: str, rest: str) -> CitedWords:
    run = quotes.run
    if urllib.parse.unquote(name) != run.name:
        raise InputError(f"is of the run '{urllib.parse.unquote(name)}', and this is '{run.name}'")
    if rest.startswith("plots/"):
        return words_of_plot(run, urllib.parse.unquote(rest.removeprefix("plots/")))
    cell_id, _, other_id = rest.partition("/")
    return words_of_ratio(quotes, cell_id, other_id) if other_id else words_of_cell(quotes, cell_id)


def _same(name: str, ours: str, theirs: str) -> bool:
    """Whether two values are written the same.

    Ends of an interval may differ by one in the last digit: they are bootstrapped, and another version of numpy or
    scipy may resample differently.
    """
    if ours == theirs or name not in {"low", "high"} or NONE in {ours, theirs}:
        return ours == theirs
    unit = max(10.0 ** -len(value.partition(".")[2]) for value in (ours, theirs))
    try:
        return abs(float(ours) - float(theirs)) < 1.5 * unit
    except ValueError:
        return False
