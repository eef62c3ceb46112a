"""Citations read again and held against their run: whether every number still follows from its journal."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.errors import InputError
from bench.judge.integrity import Finding, Level, journal_findings
from bench.judge.loading import Run, load
from bench.judge.quoting import SCHEME, Quotes
from bench.judge.remarks import WAYS
from bench.report.citation import (
    NOT_STORED,
    CitedWords,
    formats,
    words_of_cell,
    words_of_plot,
    words_of_ratio,
)
from bench.run.journal import Journal
from bench.words import bibtex

TOPIC = "citation"
KEPT = re.compile(r"[^\w.,:;()/%=+\- ]")
"""What is markup in one of the formats; a citation is read without it."""
ID = re.compile(rf"{SCHEME}:([\w.%-]+)/(plots/[\w.%-]*[\w%]|[0-9a-f]+(?:/[0-9a-f]+)?)")
DIGEST = re.compile(rf", journal SHA-256 ([0-9a-f]{{64}}|{NOT_STORED})")
COMMIT = re.compile(r"Commit: ([0-9a-f]{7,40})\b")
NUMBER = r"\d+(?:\.\d+)?"
INTERVAL = rf"(?:95 % interval (?P<low>{NUMBER}) - (?P<high>{NUMBER})|no interval: [^;()]*)"
COUNT = r"n = (?P<n>\d+(?: of \d+)?)"
MEMORY = rf"(?:; peak memory {NUMBER} MiB \((?P<bytes>\d+) bytes, [\w ,]+\))?"
STATEMENTS = tuple(
    re.compile(rf"{pattern}; id ?$")
    for pattern in (
        rf"(?P<value>{NUMBER}) s per optimizer step \({INTERVAL}, {COUNT} trials?\){MEMORY}",
        rf"(?P<none>NOT COMPARABLE, no step time is given) \({COUNT} trials?\)",
        rf"(?P<none>no step time) \({COUNT} trials?\){MEMORY}",
        rf"(?P<value>{NUMBER}) times the step time \({INTERVAL}, {COUNT} (?:block|trial)s?\); "
        rf"verdict: (?P<verdict>[a-z ]+?)(?: \([^;]*\))?; noise floor: (?P<floor>{NUMBER} %|unknown)",
        r"(?P<none>NOT COMPARABLE \([a-z ]+\), no ratio of step times is given)",
        r"(?P<none>a figure of this run)",
    )
)
NAMES = {
    "value": "value",
    "low": "lower end of the interval",
    "high": "upper end of the interval",
    "n": "n",
    "bytes": "peak memory",
    "verdict": "verdict",
    "floor": "noise floor",
    "none": "statement in place of a number",
}
"""Of the parts of a statement."""


def verify(folder: Path, text: str) -> list[Finding]:
    """What was found of each citation in a text, in any of the formats. Raises InputError if the folder is no run."""
    run = load(folder)
    journal = Journal(folder)
    found = list(journal_findings(folder, run, len(journal.read())))
    # What was cited is held against the journal as it is, not as the manifest says it was.
    now = replace(run, manifest={**run.manifest, "journal_sha256": journal.digest()})
    return [*found, *differences(now, text)]


def _normal(text: str) -> str:
    """In one line, with plain hyphens and without markup."""
    return " ".join(KEPT.sub("", " ".join(text.translate({0x2013: "-", 0x2212: "-"}).split())).split())


def differences(run: Run, text: str) -> Iterator[Finding]:
    """What was found of each citation in a text, held against the run as its manifest says that its journal is."""
    text = _normal(text)
    ids = list(ID.finditer(text))
    if not ids:
        yield Finding(Level.ERROR, TOPIC, f"the text holds no id of the form {SCHEME}:RUN/CELL, so it cites nothing")
    quotes = Quotes(run)
    begin = 0
    for i, match in enumerate(ids):
        end = ids[i + 1].start() if i + 1 < len(ids) else len(text)
        wrong, lacking = _differences(quotes, match, text[begin : match.start()], text[match.end() : end])
        begin = match.end()
        for words in wrong:
            yield Finding(Level.ERROR, TOPIC, f"{match[0]}: {words}")
        if lacking and not wrong:
            yield Finding(
                Level.WARNING, TOPIC, f"{match[0]}: differs from what cite prints: it lacks its {', '.join(lacking)}"
            )
        if not wrong:
            yield Finding(Level.GOOD, TOPIC, f"{match[0]}: every number follows from the journal")


def _differences(quotes: Quotes, match: re.Match[str], before: str, after: str) -> tuple[list[str], list[str]]:
    """What is wrong with one citation, and what it left out that does not make it wrong."""
    try:
        words = _words_of(quotes, match[1], match[2])
    except InputError as error:
        return [str(error)], []
    wrong = []
    due = _statement(_normal(formats(words).text.partition(words.place)[0]))
    said = _statement(before)
    assert due is not None, "what cite says can be read"
    if said is None:
        wrong.append("the words before the id are not those that cite prints, so no number can be read; cite it again")
    else:
        parts = due.groupdict().keys() | said.groupdict().keys()
        pairs = [(name, said.groupdict().get(name), due.groupdict().get(name)) for name in NAMES if name in parts]
        wrong += [
            f"the {NAMES[name]} is {_or_none(ours)}, and {_or_none(theirs)} follows from the journal"
            for name, ours, theirs in pairs
            if not _same(name, ours, theirs)
        ]
        if not before[: said.start()].rstrip(" :").endswith(tuple(_variants(words.subject))):
            wrong.append(f"describes something other than {words.subject}")
    digest = DIGEST.match(after)
    if digest is None:
        wrong.append("has no hash of the journal behind its id; cite it again")
    elif digest[1] != words.digest:
        wrong.append(f"the journal's SHA-256 is {digest[1]}, and that of this run is {words.digest}")
    # Runs that know of no remarks were cited without them.
    due_texts = [text for text in words.caveats if "remarks" in quotes.run.manifest or not text.startswith(WAYS)]
    wrong += [f"leaves out: {text}" for text in due_texts if not _holds(after, text)]
    commits = COMMIT.search(after), COMMIT.search(words.details[-1])
    if commits[0] and commits[1] and not commits[1][1].startswith(commits[0][1]):
        wrong.append(f"the commit is {commits[0][1]}, and was {commits[1][1]}")
    return wrong, [text.partition(":")[0].lower() for text in words.details if not _holds(after, text)]


def _words_of(quotes: Quotes, name: str, rest: str) -> CitedWords:
    run = quotes.run
    if urllib.parse.unquote(name) != run.name:
        raise InputError(f"is of the run '{urllib.parse.unquote(name)}', and this is '{run.name}'")
    if rest.startswith("plots/"):
        return words_of_plot(run, urllib.parse.unquote(rest.removeprefix("plots/")))
    cell_id, _, other_id = rest.partition("/")
    return words_of_ratio(quotes, cell_id, other_id) if other_id else words_of_cell(quotes, cell_id)


def _statement(text: str) -> re.Match[str] | None:
    """The statement that ends a text; numbers that stand anywhere else do not count."""
    return next((found for pattern in STATEMENTS if (found := pattern.search(text))), None)


def _same(name: str, ours: str | None, theirs: str | None) -> bool:
    """Whether two numbers are the same as they are written.

    Ends of an interval, and the floor that is made of one, may differ by one in the last digit: they are resampled,
    and another version of numpy or scipy may draw otherwise.
    """
    if ours == theirs:
        return True
    if ours is None or theirs is None or name not in {"low", "high", "floor"} or "unknown" in {ours, theirs}:
        return False
    values = [number.removesuffix(" %") for number in (ours, theirs)]
    unit = max(10.0 ** -len(value.partition(".")[2]) for value in values)
    return abs(float(values[0]) - float(values[1])) < 1.5 * unit


def _or_none(value: str | None) -> str:
    return "none" if value is None else value


def _variants(text: str) -> set[str]:
    return {_normal(text), _normal(bibtex(text))}


def _holds(text: str, part: str) -> bool:
    return any(variant in text for variant in _variants(part))
