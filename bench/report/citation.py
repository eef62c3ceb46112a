"""Citations of one number of a run: value, interval, trials, machine, versions, commit and hash, in three formats.

Beside its sentences, which people read, a citation has one line that ``check_citations`` reads again, for example
``accumulation-bench:RUN:HASH/CELL value=0.4022 low=0.3965 high=0.4081 n=19 sha256=...``. It begins with the permanent
id, which has the beginning of the journal's hash, of several runs of each with ``+`` between; ids without it are older
and still found. ``RUN:HASH/CELL/BASELINE`` is a ratio, ``RUN:HASH/plots/NAME`` a figure. ``value`` is the step time in
seconds, or the ratio of two; ``low`` and ``high`` are the ends of its 95 % interval; ``n`` is the number of good
trials, or of blocks; ``runs`` is that of several runs, and ``nextlow`` and ``nexthigh`` are where the next one falls;
``bytes`` is the peak memory; ``sha256`` is the hash of the journal that all of this follows from, or of each.
"""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.errors import InputError
from bench.findings import Finding, error, good
from bench.formatting import bibtex, digits, markdown, plain, plural
from bench.judge.analysis import SCHEME, Analysis, CellRow, hashes_of, permanent_id, quoted
from bench.judge.columns import AXES, WAYS, phrases
from bench.judge.pairs import ComparedPair
from bench.judge.pool import Pool
from bench.judge.statistics import MIN_RUNS, too_few
from bench.judge.verdicts import NEXT, Verdict, scope_words
from bench.report.descriptions import machine_words
from bench.run.machine import FRAMEWORKS, unlike_nodes
from bench.run.manifest import Manifest

VERSIONS = (*FRAMEWORKS, "numpy")
"""Packages whose versions are cited."""
NONE = "none"
"""Stands for a value that does not exist."""
METHOD_OVER_RUNS = "over runs the geometric mean of these, with Student's t"
METHOD = "Method: geometric mean over trials of the median step after warm-up, the slowest rank's"
ESCAPES: dict[str, Callable[[object], str]] = {"markdown": markdown, "bibtex": bibtex, "text": plain}
"""Formats, and how words from outside become harmless in each."""
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


@dataclass(frozen=True, kw_only=True, slots=True)
class Citation:
    """The parts of a citation as plain text, and the whole of it in each format."""

    subject: str
    statement: str
    """The numbers."""
    permanent_id: str
    machine_fields: Mapping[str, str]
    """By name, in the line for machines."""
    details: Sequence[str]
    """Sentences on caveats, work, machine, versions and commit, without their full stops."""
    started: str

    def in_spite_of(self, errors: Sequence[str]) -> Citation:
        """The same, with a first sentence that says what forbids citing it."""
        warned = f"DO NOT CITE THIS: check found {'; '.join(errors)}"
        return replace(self, details=[harmless(warned), *self.details])

    @property
    def markdown(self) -> str:
        return self._formatted(markdown, "**", "`")

    @property
    def text(self) -> str:
        return self._formatted(plain)

    @property
    def bibtex(self) -> str:
        date = re.match(r"(\d{4})-(0[1-9]|1[0-2])-", self.started)
        fields = {
            "author": "{{{The accumulation-bench authors}}}",
            "title": f"{{{{{bibtex(self.subject)}}}}}",
            **({} if date is None else {"year": f"{{{date[1]}}}", "month": MONTHS[int(date[2]) - 1]}),
            "howpublished": f"{{{bibtex(f'{SCHEME}, a benchmark of gradient accumulation')}}}",
            "note": f"{{{self._formatted(bibtex)}}}",
        }
        key = re.sub(r"[^A-Za-z0-9.-]+", "-", urllib.parse.unquote(self.permanent_id)).strip("-")
        return "@misc{" + ",\n".join([key, *(f"  {name} = {value}" for name, value in fields.items())]) + ",\n}"

    def _formatted(self, escape: Callable[[object], str], bold: str = "", code: str = "") -> str:
        """The whole, with these marks around its subject and around the line for machines."""
        identifier = bibtex(self.permanent_id) if escape is bibtex else self.permanent_id
        line = f"{code}{identifier} {fields_text(self.machine_fields)}{code}"
        details = " ".join(f"{escape(sentence)}." for sentence in self.details)
        return f"{bold}{escape(self.subject)}{bold}: {escape(self.statement)}.\n{line}\n{details}"


def cite(data: Analysis, cell_id: str, other_id: str | None = None) -> Citation:
    """The citation of a cell's step time; with another cell, of its ratio to that one's.

    A cell that is not comparable is cited with that said and without a number. Raises InputError if the run lacks one
    of the two.
    """
    run, ids = data.run, [cell_id] if other_id is None else [cell_id, other_id]
    if unknown := [name for name in ids if name not in run.cells]:
        raise InputError(f"{unknown[0]}: is not a cell of the run {run.name}")
    cell = data.every_row[cell_id]
    caveats = data.caveats(*ids)
    if other_id is None:
        statement, fields = _cell_numbers(data, cell)
    else:
        pair = data.ratio(cell_id, other_id)
        statement, fields = _ratio_numbers(pair, data.control)
        told = data.control.details if data.control and not data.control.has_interval else ()
        if pair.blocked and not {*pair.details} <= {*told}:
            caveats.insert(0, f"{pair.reason}: {pair.detail}")
    limits = [f"Note: {'; '.join(text.rstrip('.') for text in caveats)}"] if caveats else []
    subject = " against ".join(harmless(run.labels[each]) for each in ids)
    method = METHOD if data.pool.is_single else f"{METHOD}; {METHOD_OVER_RUNS}"
    details = [*limits, method, _work_sentence(cell)]
    return _citation(data.pool, "/".join(ids), subject, statement, fields, details)


def cite_plot(pool: Pool, name: str) -> Citation:
    """The citation of a figure of the run, by the name of its file without the ending."""
    statement = "a figure of this run" if pool.is_single else f"a figure of {len(pool.runs)} runs"
    return _citation(pool, f"plots/{quoted(name)}", f"Figure {name}", statement, {}, [])


def _citation(
    pool: Pool, path: str, subject: str, statement: str, fields: Mapping[str, str], details: Sequence[str]
) -> Citation:
    about = pool.first.manifest
    return Citation(
        subject=harmless(subject),
        statement=statement,
        permanent_id=permanent_id(pool, path),
        machine_fields={**fields, "sha256": "+".join(pool.digests) or NONE},
        details=[
            harmless(text)
            for text in (*details, _machine_sentence(about), _versions_sentence(about), commit_sentence(about))
        ],
        started=about.started,
    )


def harmless(text: str) -> str:
    """Foreign text, changed so that it cannot pass for another id."""
    return plain(text).replace(f"{SCHEME}:", f"{SCHEME} ")


def _cell_numbers(data: Analysis, row: CellRow) -> tuple[str, dict[str, str]]:
    """The numbers of a cell, as a sentence and as fields."""
    num_ok, trials = row.num_ok, plural(row.num_trials, "trial")
    if data.run.evidence.of(row.cell).barred:
        return f"NOT COMPARABLE, no step time is given (n = 0 of {trials})", {"value": NONE, "n": "0"}
    counted = f"n = {trials}" if num_ok == row.num_trials else f"n = {num_ok} of {trials}"
    if not data.pool.is_single:
        counted = f"over {len(data.pool.runs)} runs"
    seconds, low, high = row.step_time_s, row.step_time_low_s, row.step_time_high_s
    found, fields = f"no step time ({counted})", {"value": NONE}
    if seconds is not None:
        why = too_few(num_ok)
        if not data.pool.is_single:
            why = too_few(len(data.pool.runs), "run", least=MIN_RUNS)
        found = f"{digits(seconds)} s per optimizer step{scope_words(1) * data.pool.is_single} "
        found += f"({_interval(low, high, why)}, {counted})"
        fields = _estimate_fields(seconds, low, high)
    if data.pool.is_single:
        fields["n"] = str(num_ok)
    else:
        fields["runs"] = str(len(data.pool.runs))
    if (peak := row.peak_memory_bytes) is not None:
        found += f"; peak memory {digits(peak / 2**20)} MiB ({peak} bytes, {row.peak_memory_source})"
        fields["bytes"] = str(peak)
    return found, fields


def _ratio_numbers(pair: ComparedPair, control_pair: ComparedPair | None) -> tuple[str, dict[str, str]]:
    """The numbers of a ratio, or that it has none, as a sentence and as fields."""
    time, control = pair.time, pair.control
    if pair.verdict is Verdict.NOT_COMPARABLE or time is None:
        return f"NOT COMPARABLE ({pair.reason}), no ratio of step times is given", {"value": NONE}
    verdict = pair.words
    if pair.verdict is Verdict.SAME:
        verdict += f" (within the margin of {100 * pair.margin:g} %)"
    elif pair.verdict is Verdict.AMBIGUOUS:
        verdict += f" ({pair.reason}: {NEXT[pair.reason]})"
    interval = _interval(time.low, time.high, time.reason)
    counted = f"n = {plural(time.num_trials, 'block' if time.paired else 'trial')}"
    around = "unknown" if control is None else _ends(control.low, control.high) or "unknown"
    where = "" if control_pair is None else f" at N={control_pair.a.accumulate}"
    fields = _estimate_fields(time.ratio, time.low, time.high)
    amount = digits(time.ratio)
    if not time.runs:
        fields["n"] = str(time.num_trials)
    else:
        counted = f"over {plural(len(time.runs), 'run')}"
        fields["runs"] = str(len(time.runs))
        if time.next_low is None or time.next_high is None:
            amount, interval = " and ".join(map(digits, time.runs)), "no interval"
        else:
            counted += f"; next run {_ends(time.next_low, time.next_high)}"
            fields |= {"nextlow": digits(time.next_low), "nexthigh": digits(time.next_high)}
    found = f"{amount} times the step time ({interval}, {counted}); verdict: {verdict}; A/A pair{where}: {around}"
    return found, fields | {"verdict": str(pair.verdict)}


def _estimate_fields(value: float, low: float | None, high: float | None) -> dict[str, str]:
    ends = {} if low is None or high is None else {"low": digits(low), "high": digits(high)}
    return {"value": digits(value), **ends}


def _ends(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f"{digits(low)} - {digits(high)}"


def _interval(low: float | None, high: float | None, reason: str) -> str:
    return f"95 % interval {ends}" if (ends := _ends(low, high)) else reason.partition(";")[0]


def _work_sentence(row: CellRow) -> str:
    cell, parameters = row.cell, ""
    if row.num_parameters is not None:
        parameters = f" ({digits(row.num_parameters / 1e6)} M parameters)"
    phrased = [name for name in WAYS if len(AXES[name].phrasing) > 1]
    how = "".join(f", {phrase}" for phrase in phrases(cell, [name for name in phrased if getattr(cell, name)]))
    return (
        f"Work: {cell.workload} {cell.model}{parameters}, {cell.global_batch_size} samples of "
        f"{cell.sequence_length} tokens per optimizer step, {cell.optimizer}{how}, "
        f"gradients summed in {cell.accumulation_dtype}, on {cell.device}"
    )


def _machine_sentence(manifest: Manifest) -> str:
    machine = manifest.machine
    words = [machine_words(machine)]
    words += [f"driver {name}" for name in dict.fromkeys(gpu.driver for gpu in machine.gpus if gpu.driver)]
    if machine.system:
        words.append(machine.system)
    if manifest.nodes:
        words.append(f"node 0 of {1 + len(manifest.nodes)} nodes")
    return f"Machine: {', '.join([*words, *unlike_nodes(manifest)])}"


def _versions_sentence(manifest: Manifest) -> str:
    known = {SCHEME: manifest.distributions.get(SCHEME), "Python": manifest.machine.python}
    known |= {name: version for name, version in manifest.packages.items() if name in VERSIONS}
    found = [f"{name} {version}" for name, version in known.items() if version]
    return f"Versions: {', '.join(found) or 'not stored'}"


def commit_sentence(manifest: Manifest) -> str:
    """The commit of the bench, and whether there were changes on top of it."""
    git = manifest.git
    if not git.commit:
        return "Commit: unknown"
    return f"Commit: {git.commit}" + ("" if git.clean else " with uncommitted changes")


def fields_text(fields: Mapping[str, str]) -> str:
    """The fields of the line for machines, as they follow its id."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


ENDS = frozenset({"low", "high", "nextlow", "nexthigh"})
"""Fields of the ends of intervals."""
TOPIC = "citation"
MARKUP = re.compile(r"[^\w.,:;()/%=+\- ]")
"""Markup of the formats, which is removed before a citation is read."""
ID = re.compile(
    rf"{SCHEME}:([\w.%-]+)(?::([0-9a-f]+(?:\+[0-9a-f]+)*|none))?/(plots/[\w.%-]*[\w%]|[0-9a-f]+(?:/[0-9a-f]+)?)"
)
FIELD = re.compile(r" ([a-z0-9]+)=([\w.+-]*\w)")


def check_citations(data: Analysis, text: str) -> Iterator[Finding]:
    """The findings on each citation in a text, in any of the formats: whether its fields follow from the journal.

    Only the lines for machines are read, not the sentences around them.
    """
    text = " ".join(MARKUP.sub("", " ".join(text.split())).split())
    ids = list(ID.finditer(text))
    if not ids:
        yield error(TOPIC, f"the text holds no id of the form {SCHEME}:RUN/CELL, so it cites nothing")
    for match in ids:
        cited = _fields_after(text, match.end())
        try:
            right = _named_by(data, match[1], match[2], match[3]).machine_fields
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


def _named_by(data: Analysis, name: str, hashes: str | None, rest: str) -> Citation:
    """The citation with an id; ``hashes`` is None in an older one, which any run of that name resolves."""
    if urllib.parse.unquote(name) != data.run.name:
        raise InputError(f"is of the run '{urllib.parse.unquote(name)}', and this is '{data.run.name}'")
    here = hashes_of(data.pool)
    if hashes not in (None, here):
        raise InputError(f"is of the journal {hashes}, and this is {here}")
    if rest.startswith("plots/"):
        return cite_plot(data.pool, urllib.parse.unquote(rest.removeprefix("plots/")))
    return cite(data, *rest.split("/"))


def _same(name: str, ours: str, theirs: str) -> bool:
    """Whether two values are written the same.

    Ends of an interval may differ by one in the last digit, as another version of numpy or scipy may round them.
    """
    if ours == theirs or name not in ENDS:
        return ours == theirs
    unit = max(10.0 ** -len(value.partition(".")[2]) for value in (ours, theirs))
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=0, abs_tol=1.4 * unit)
    except ValueError:
        return False
