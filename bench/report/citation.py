"""Citations of one number of a run: value, interval, trials, machine, versions, commit and hash, in three formats.

Beside its sentences, which people read, a citation has one line that ``bench.report.citation_check``
reads again, for example
``accumulation-bench:RUN/CELL value=0.4022 low=0.3965 high=0.4081 n=19 sha256=...``. It begins with the permanent id,
``RUN/CELL/BASELINE`` for a ratio or ``RUN/plots/NAME`` for a figure. ``value`` is the step time in seconds, or the
ratio of two; ``low`` and ``high`` are the ends of its 95 % interval; ``n`` is the number of good trials, or of blocks;
``bytes`` is the peak memory; ``sha256`` is the hash of the journal that all of this follows from.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.formatting import bibtex, digits, markdown, plain, plural
from bench.judge.loading import Run
from bench.judge.quotes import SCHEME, CellQuote, Quotes, RatioQuote, place_of, quoted
from bench.judge.statistics import Interval
from bench.judge.verdicts import NEXT, Verdict
from bench.plan.columns import AXES, WAYS
from bench.report.report_data import machine_words
from bench.run.machine import FRAMEWORKS, unlike_nodes

VERSIONS = (*FRAMEWORKS, "numpy")
"""Packages whose versions are cited."""
NOT_STORED = "not stored"
NONE = "none"
"""Stands for a value that does not exist."""
HASH = re.compile(r"[0-9a-f]{64}")
METHOD = "Method: 20 % trimmed geometric mean over trials of the median step after warm-up, the slowest rank's"
AGAINST = " against "
AUTHORS = "The accumulation-bench authors"
ESCAPES: dict[str, Callable[[object], str]] = {"markdown": markdown, "bibtex": bibtex, "text": plain}
"""Formats, and how words from outside become harmless in each."""
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


@dataclass(frozen=True, slots=True)
class Citation:
    """What to paste."""

    markdown: str
    bibtex: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CitedWords:
    """A citation before it is formatted, as parts of plain text."""

    subject: str
    statement: str
    """The numbers."""
    place: str
    """The id."""
    fields: Mapping[str, str]
    """What follows the id in the line for machines."""
    caveats: tuple[str, ...]
    details: tuple[str, ...]
    """Sentences on work, machine, versions and commit."""
    started: str


def cite(run: Run, cell_id: str, other_id: str | None = None) -> Citation:
    """The citation of a cell's step time; with another cell, of its ratio to that one's.

    A cell that is not comparable is cited with that said and without a number. Raises InputError if the run lacks one
    of the two.
    """
    quotes = Quotes(run)
    return formats(words_of_cell(quotes, cell_id) if other_id is None else words_of_ratio(quotes, cell_id, other_id))


def cite_plot(run: Run, name: str) -> Citation:
    """The citation of a figure of the run, by the name of its file without the ending."""
    return formats(words_of_plot(run, name))


def words_of_cell(quotes: Quotes, cell_id: str) -> CitedWords:
    """What is said of one cell."""
    run, quote = quotes.run, quotes.cell(cell_id)
    return _words(run, cell_id, run.labels[cell_id], _time(quote), _fields(quote), quote.caveats, quote.trial)


def words_of_ratio(quotes: Quotes, cell_id: str, other_id: str) -> CitedWords:
    """What is said of one cell against another."""
    run, quote = quotes.run, quotes.ratio(cell_id, other_id)
    subject = AGAINST.join(harmless(run.labels[one]) for one in (cell_id, other_id))
    place, fields = f"{cell_id}/{other_id}", fields_of(quote)
    return _words(run, place, subject, statement_of(quote), fields, quote.caveats, quote.trial)


def words_of_plot(run: Run, name: str) -> CitedWords:
    """What is said of a figure."""
    return _words(run, f"plots/{quoted(name)}", f"Figure {name}", "a figure of this run", {}, (), None)


def _words(
    run: Run,
    place: str,
    subject: str,
    statement: str,
    fields: Mapping[str, str],
    caveats: tuple[str, ...],
    trial: Any,
) -> CitedWords:
    manifest = run.manifest
    details = [] if trial is None else [METHOD, _work(trial)]
    return CitedWords(
        subject=harmless(subject),
        statement=statement,
        place=place_of(run.name, place),
        fields={**fields, **hash_of(manifest)},
        caveats=tuple(harmless(text).rstrip(".") for text in caveats),
        details=tuple(map(harmless, [*details, _machine(manifest), _versions(manifest), commit(manifest)])),
        started=str(manifest.get("started", "")),
    )


def harmless(text: str) -> str:
    """Foreign text, changed so that it cannot pass for another id."""
    return plain(text).replace(f"{SCHEME}:", f"{SCHEME} ")


def _time(quote: CellQuote) -> str:
    time, trials = quote.time, plural(quote.num_trials, "trial")
    if quote.barred:
        return f"NOT COMPARABLE, no step time is given (n = 0 of {trials})"
    counted = f"n = {trials}" if quote.num_ok == quote.num_trials else f"n = {quote.num_ok} of {trials}"
    if time is None:
        found = f"no step time ({counted})"
    else:
        interval = _interval(time.low, time.high, time.reason)
        found = f"{digits(time.seconds)} s per optimizer step ({interval}, {counted})"
    if quote.peak_memory_bytes is not None:
        peak = quote.peak_memory_bytes
        found += f"; peak memory {digits(peak / 2**20)} MiB ({peak} bytes, {quote.peak_memory_source})"
    return found


def _fields(quote: CellQuote) -> dict[str, str]:
    """The fields of a cell in the line for machines."""
    if quote.barred:
        return {"value": NONE, "n": "0"}
    time = quote.time
    found = {"value": NONE} if time is None else _estimated(time.seconds, time.low, time.high)
    peak = {} if quote.peak_memory_bytes is None else {"bytes": str(quote.peak_memory_bytes)}
    return found | {"n": str(quote.num_ok)} | peak


def fields_of(quote: RatioQuote) -> dict[str, str]:
    """The fields of a ratio in the line for machines."""
    time = _time_of(quote)
    if time is None:
        return {"value": NONE}
    counted = {"n": str(time.num_trials), "verdict": str(quote.row.judgement.verdict)}
    return _estimated(time.ratio, time.low, time.high) | counted


def hash_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """The last field of every line for machines."""
    digest = str(manifest.get("journal_sha256"))
    return {"sha256": digest if HASH.fullmatch(digest) else NONE}


def _estimated(value: float, low: float | None, high: float | None) -> dict[str, str]:
    ends = {} if low is None or high is None else {"low": digits(low), "high": digits(high)}
    return {"value": digits(value), **ends}


def _time_of(quote: RatioQuote) -> Interval | None:
    """The ratio of step times; None if no such number may be cited."""
    return None if quote.row.judgement.verdict is Verdict.NOT_COMPARABLE else quote.row.time


def statement_of(quote: RatioQuote) -> str:
    """The numbers of a ratio, or that it has none."""
    judgement, time = quote.row.judgement, _time_of(quote)
    if time is None:
        return f"NOT COMPARABLE ({judgement.reason}), no ratio of step times is given"
    interval = _interval(time.low, time.high, time.reason)
    counted = f"n = {plural(time.num_trials, 'block' if time.paired else 'trial')}"
    verdict = str(judgement.verdict)
    if judgement.verdict is Verdict.SAME:
        verdict += f" (within the margin of {100 * judgement.comparison.margin:g} %)"
    elif judgement.verdict is Verdict.AMBIGUOUS:
        verdict += f" ({judgement.reason}: {NEXT[judgement.reason].partition(';')[0]})"
    found = f"{digits(time.ratio)} times the step time ({interval}, {counted})"
    return f"{found}; verdict: {verdict}; A/A pair: {_control(quote)}"


def _control(quote: RatioQuote) -> str:
    """The interval of the A/A pair."""
    control = quote.row.judgement.comparison.control
    if control is None or control.low is None or control.high is None:
        return "unknown"
    return f"{digits(control.low)} - {digits(control.high)}"


def _interval(low: float | None, high: float | None, reason: str) -> str:
    return reason.replace(",", "") if low is None or high is None else f"95 % interval {digits(low)} - {digits(high)}"


def _work(trial: Any) -> str:
    size = trial["num_parameters"]
    parameters = "" if pd.isna(size) else f" ({digits(size / 1e6)} M parameters)"
    asked = [name for name in WAYS if len(AXES[name].phrasing) > 1 and pd.notna(trial[name]) and trial[name]]
    how = "".join(f", {AXES[name].phrase(trial[name])}" for name in asked)
    return (
        f"Work: {trial['workload']} {trial['model']}{parameters}, {trial['global_batch_size']} samples of "
        f"{trial['sequence_length']} tokens per optimizer step, {trial['optimizer']}{how}, "
        f"gradients summed in {trial['accumulation_dtype']}, on {trial['device']}"
    )


def _machine(manifest: Mapping[str, Any]) -> str:
    machine = manifest.get("machine") or {}
    drivers = dict.fromkeys(gpu["driver"] for gpu in machine.get("gpus") or [] if gpu.get("driver"))
    system = [str(machine["system"])] if machine.get("system") else []
    nodes = [f"node 0 of {1 + len(others)} nodes"] if (others := manifest.get("nodes")) else []
    words = [machine_words(manifest), *(f"driver {one}" for one in drivers), *system, *nodes, *unlike_nodes(manifest)]
    return f"Machine: {', '.join(words)}"


def _versions(manifest: Mapping[str, Any]) -> str:
    packages = manifest.get("packages") or {}
    python = (manifest.get("machine") or {}).get("python")
    ours = (manifest.get("distributions") or {}).get(SCHEME)
    found = [f"{SCHEME} {ours}"] if ours else []
    found += [f"Python {python}"] if python else []
    found += [f"{name} {version}" for name, version in packages.items() if name in VERSIONS]
    return f"Versions: {', '.join(found) or NOT_STORED}"


def commit(manifest: Mapping[str, Any]) -> str:
    """The commit of the bench, and whether there were changes on top of it."""
    git = manifest.get("git") or {}
    if not git.get("commit"):
        return "Commit: unknown"
    return f"Commit: {git['commit']}" + ("" if git.get("clean") else " with uncommitted changes")


def formats(words: CitedWords) -> Citation:
    """The words in all formats."""
    return Citation(**{form: _render(form, words) for form in ESCAPES})


def _render(form: str, words: CitedWords) -> str:
    """A citation in one format."""
    escape = ESCAPES[form]
    subject, statement = escape(words.subject), escape(words.statement)
    place = bibtex(words.place) if form == "bibtex" else words.place
    said = [f"Note: {'; '.join(words.caveats)}"] if words.caveats else []
    tail = " ".join(f"{escape(sentence)}." for sentence in [*said, *words.details])
    if form == "markdown":
        return f"**{subject}**: {statement}.\n`{place} {joined(words.fields)}`\n{tail}"
    text = f"{subject}: {statement}.\n{place} {joined(words.fields)}\n{tail}"
    return text if form == "text" else _entry(words, subject, text)


def joined(fields: Mapping[str, str]) -> str:
    """The fields of the line for machines, as they follow its id."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


def _entry(words: CitedWords, subject: str, text: str) -> str:
    """A BibTeX entry with the text as its note."""
    date = re.match(r"(\d{4})-(0[1-9]|1[0-2])-", words.started)
    fields = {
        "author": f"{{{{{AUTHORS}}}}}",
        "title": f"{{{{{subject}}}}}",
        **({} if date is None else {"year": f"{{{date[1]}}}", "month": MONTHS[int(date[2]) - 1]}),
        "howpublished": f"{{{bibtex(f'{SCHEME}, a benchmark of gradient accumulation')}}}",
        "note": f"{{{text}}}",
    }
    key = re.sub(r"[^A-Za-z0-9.-]+", "-", urllib.parse.unquote(words.place)).strip("-")
    return "@misc{" + ",\n".join([key, *(f"  {name} = {value}" for name, value in fields.items())]) + ",\n}"
