"""Citations of one number of a run, in three formats: value, interval, machine, commit and hash.

Beside its sentences, which people read, a citation has one line that ``check_citations`` reads
again, for example ``accumulation-bench:RUN:HASH/CELL value=0.4022 low=0.3965 high=0.4081 n=19
sha256=...``. It begins with the permanent id, which has the beginning of the journal's hash, of
several runs of each with ``+`` between; ids without it are older and still found.
``RUN:HASH/CELL/BASELINE`` is a ratio, ``RUN:HASH/plots/NAME`` a figure. ``value`` is the step time
in seconds, or the ratio of two; ``low`` and ``high`` are the ends of its 95 % interval; ``n`` is
the number of good trials, or of blocks; ``runs`` is that of several runs, and ``nextlow`` and
``nexthigh`` are where the next one falls; ``bytes`` is the peak memory; ``sha256`` is the hash of
the journal that all of this follows from, or of each.
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
from bench.judge.columns import AXES, WAYS
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
ESCAPES: dict[str, Callable[[object], str]] = {
    "markdown": markdown,
    "bibtex": bibtex,
    "text": plain,
}
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
        fields = {
            "author": "{{{The accumulation-bench authors}}}",
            "title": f"{{{{{bibtex(self.subject)}}}}}",
        }
        date = re.match(r"(\d{4})-(0[1-9]|1[0-2])-", self.started)
        if date is not None:
            fields["year"] = f"{{{date[1]}}}"
            fields["month"] = MONTHS[int(date[2]) - 1]
        fields["howpublished"] = f"{{{bibtex(f'{SCHEME}, a benchmark of gradient accumulation')}}}"
        fields["note"] = f"{{{self._formatted(bibtex)}}}"
        identifier = urllib.parse.unquote(self.permanent_id)
        lines = [re.sub(r"[^A-Za-z0-9.-]+", "-", identifier).strip("-")]
        lines += [f"  {name} = {value}" for name, value in fields.items()]
        return "@misc{" + ",\n".join(lines) + ",\n}"

    def _formatted(
        self,
        escape: Callable[[object], str],
        bold: str = "",
        code: str = "",
    ) -> str:
        """The whole, with these marks around its subject and around the line for machines."""
        identifier = self.permanent_id
        if escape is bibtex:
            identifier = bibtex(identifier)
        line = f"{code}{identifier} {fields_text(self.machine_fields)}{code}"
        details = " ".join(f"{escape(sentence)}." for sentence in self.details)
        subject = f"{bold}{escape(self.subject)}{bold}"
        return f"{subject}: {escape(self.statement)}.\n{line}\n{details}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """The numbers of a cell or a ratio."""

    statement: str
    fields: Mapping[str, str]
    """By name, in the line for machines."""


def cite(data: Analysis, cell_id: str, other_id: str | None = None) -> Citation:
    """The citation of a cell's step time; with another cell, of its ratio to that one's.

    A cell that is not comparable is cited with that said and without a number. Raises InputError if
    the run lacks one of the two.
    """
    run, ids = data.run, [cell_id]
    if other_id is not None:
        ids.append(other_id)
    for each in ids:
        if each not in run.cells:
            raise InputError(f"{each}: is not a cell of the run {run.name}")
    cell = data.every_row[cell_id]
    caveats = data.caveats(*ids)
    if other_id is None:
        numbers = _cell_numbers(data, cell)
    else:
        pair = data.ratio(cell_id, other_id)
        numbers = _ratio_numbers(pair, data.control)
        if pair.blocked and not _is_told_by_control(data, pair):
            caveats.insert(0, f"{pair.reason}: {pair.detail}")
    details = []
    if caveats:
        texts = [text.rstrip(".") for text in caveats]
        details.append(f"Note: {'; '.join(texts)}")
    method = METHOD
    if not data.pool.is_single:
        method += f"; {METHOD_OVER_RUNS}"
    details += [method, _work_sentence(cell)]
    subject = " against ".join(harmless(run.labels[each]) for each in ids)
    return _citation(data.pool, "/".join(ids), subject, numbers, details)


def _is_told_by_control(data: Analysis, pair: ComparedPair) -> bool:
    """Whether a pair is blocked for want of an A/A pair's interval, which a caveat says anyway."""
    told: Sequence[str] = ()
    if data.control and not data.control.has_interval:
        told = data.control.details
    return set(pair.details) <= set(told)


def cite_plot(pool: Pool, name: str) -> Citation:
    """The citation of a figure of the run, by the name of its file without the ending."""
    statement = "a figure of this run"
    if not pool.is_single:
        statement = f"a figure of {len(pool.runs)} runs"
    numbers = Numbers(statement=statement, fields={})
    return _citation(pool, f"plots/{quoted(name)}", f"Figure {name}", numbers, [])


def _citation(
    pool: Pool,
    path: str,
    subject: str,
    numbers: Numbers,
    details: Sequence[str],
) -> Citation:
    about = pool.first.manifest
    every = [*details, _machine_sentence(about), _versions_sentence(about), commit_sentence(about)]
    return Citation(
        subject=harmless(subject),
        statement=numbers.statement,
        permanent_id=permanent_id(pool, path),
        machine_fields={**numbers.fields, "sha256": "+".join(pool.digests) or NONE},
        details=list(map(harmless, every)),
        started=about.started,
    )


def harmless(text: str) -> str:
    """Foreign text, changed so that it cannot pass for another id."""
    return plain(text).replace(f"{SCHEME}:", f"{SCHEME} ")


def _cell_numbers(data: Analysis, row: CellRow) -> Numbers:
    """The numbers of a cell, or that it has none."""
    trials = plural(row.num_trials, "trial")
    if data.run.evidence.of(row.cell).barred:
        text = f"NOT COMPARABLE, no step time is given (n = 0 of {trials})"
        return Numbers(statement=text, fields={"value": NONE, "n": "0"})
    if data.pool.is_single:
        scope, why = scope_words(1), too_few(row.num_ok)
        counted, counts = f"n = {trials}", {"n": str(row.num_ok)}
        if row.num_ok < row.num_trials:
            counted = f"n = {row.num_ok} of {trials}"
    else:
        num_runs = len(data.pool.runs)
        scope, why = "", too_few(num_runs, "run", least=MIN_RUNS)
        counted, counts = f"over {num_runs} runs", {"runs": str(num_runs)}
    text, fields = f"no step time ({counted})", {"value": NONE}
    seconds, low, high = row.step_time_s, row.step_time_low_s, row.step_time_high_s
    if seconds is not None:
        interval = _interval(low, high, why)
        text = f"{digits(seconds)} s per optimizer step{scope} ({interval}, {counted})"
        fields = _estimate_fields(seconds, low, high)
    fields |= counts
    peak = row.peak_memory_bytes
    if peak is not None:
        text += f"; peak memory {digits(peak / 2**20)} MiB ({peak} bytes, {row.peak_memory_source})"
        fields["bytes"] = str(peak)
    return Numbers(statement=text, fields=fields)


def _ratio_numbers(pair: ComparedPair, control_pair: ComparedPair | None) -> Numbers:
    """The numbers of a ratio, or that it has none."""
    time = pair.time
    if pair.verdict is Verdict.NOT_COMPARABLE or time is None:
        text = f"NOT COMPARABLE ({pair.reason}), no ratio of step times is given"
        return Numbers(statement=text, fields={"value": NONE})
    amount = digits(time.ratio)
    interval = _interval(time.low, time.high, time.reason)
    fields = _estimate_fields(time.ratio, time.low, time.high)
    if not time.runs:
        kind = "trial"
        if time.paired:
            kind = "block"
        counted = f"n = {plural(time.num_trials, kind)}"
        fields["n"] = str(time.num_trials)
    else:
        counted = f"over {plural(len(time.runs), 'run')}"
        fields["runs"] = str(len(time.runs))
        if time.next_low is None or time.next_high is None:
            amount, interval = " and ".join(map(digits, time.runs)), "no interval"
        else:
            counted += f"; next run {_ends(time.next_low, time.next_high)}"
            fields["nextlow"] = digits(time.next_low)
            fields["nexthigh"] = digits(time.next_high)
    fields["verdict"] = str(pair.verdict)
    text = (
        f"{amount} times the step time ({interval}, {counted}); verdict: {_verdict_words(pair)}; "
        f"{_control_words(pair, control_pair)}"
    )
    return Numbers(statement=text, fields=fields)


def _verdict_words(pair: ComparedPair) -> str:
    if pair.verdict is Verdict.SAME:
        return f"{pair.words} (within the margin of {100 * pair.margin:g} %)"
    if pair.verdict is Verdict.AMBIGUOUS:
        return f"{pair.words} ({pair.reason}: {NEXT[pair.reason]})"
    return pair.words


def _control_words(pair: ComparedPair, control_pair: ComparedPair | None) -> str:
    """The A/A pair, and at which N it was measured."""
    around = ""
    if pair.control is not None:
        around = _ends(pair.control.low, pair.control.high)
    where = ""
    if control_pair is not None:
        where = f" at N={control_pair.a.accumulate}"
    return f"A/A pair{where}: {around or 'unknown'}"


def _estimate_fields(value: float, low: float | None, high: float | None) -> dict[str, str]:
    fields = {"value": digits(value)}
    if low is not None and high is not None:
        fields["low"] = digits(low)
        fields["high"] = digits(high)
    return fields


def _ends(low: float | None, high: float | None) -> str:
    if low is None or high is None:
        return ""
    return f"{digits(low)} - {digits(high)}"


def _interval(low: float | None, high: float | None, reason: str) -> str:
    """The interval, or the first part of the reason why there is none."""
    ends = _ends(low, high)
    if not ends:
        return reason.partition(";")[0]
    return f"95 % interval {ends}"


def _work_sentence(row: CellRow) -> str:
    cell = row.cell
    model = f"{cell.workload} {cell.model}"
    if row.num_parameters is not None:
        model += f" ({digits(row.num_parameters / 1e6)} M parameters)"
    optimizer = cell.optimizer
    for name in WAYS:
        if len(AXES[name].phrasing) > 1 and getattr(cell, name):
            optimizer += f", {AXES[name].phrase(getattr(cell, name))}"
    return (
        f"Work: {model}, {cell.global_batch_size} samples of {cell.sequence_length} tokens per "
        f"optimizer step, {optimizer}, gradients summed in {cell.accumulation_dtype}, on "
        f"{cell.device}"
    )


def _machine_sentence(manifest: Manifest) -> str:
    machine = manifest.machine
    words = [machine_words(machine)]
    drivers = dict.fromkeys(gpu.driver for gpu in machine.gpus if gpu.driver)
    words += [f"driver {name}" for name in drivers]
    if machine.system:
        words.append(machine.system)
    if manifest.nodes:
        words.append(f"node 0 of {1 + len(manifest.nodes)} nodes")
    words += unlike_nodes(manifest)
    return f"Machine: {', '.join(words)}"


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
    if git.clean:
        return f"Commit: {git.commit}"
    return f"Commit: {git.commit} with uncommitted changes"


def fields_text(fields: Mapping[str, str]) -> str:
    """The fields of the line for machines, as they follow its id."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


ENDS = frozenset({"low", "high", "nextlow", "nexthigh"})
"""Fields of the ends of intervals."""
TOPIC = "citation"
MARKUP = re.compile(r"[^\w.,:;()/%=+\- ]")
"""Markup of the formats, which is removed before a citation is read."""
ID = re.compile(
    rf"{SCHEME}:([\w.%-]+)(?::([0-9a-f]+(?:\+[0-9a-f]+)*|none))?"
    r"/(plots/[\w.%-]*[\w%]|[0-9a-f]+(?:/[0-9a-f]+)?)"
)
FIELD = re.compile(r" ([a-z0-9]+)=([\w.+-]*\w)")


def check_citations(data: Analysis, text: str) -> Iterator[Finding]:
    """The findings on each citation in a text, in any of the formats.

    They say whether its fields follow from the journal. Only the lines for machines are read, not
    the sentences around them.
    """
    text = " ".join(MARKUP.sub("", " ".join(text.split())).split())
    ids = list(ID.finditer(text))
    if not ids:
        form = f"{SCHEME}:RUN/CELL"
        yield error(TOPIC, f"the text holds no id of the form {form}, so it cites nothing")
    for match in ids:
        cited = _fields_after(text, match.end())
        try:
            right = _named_by(data, match[1], match[2], match[3]).machine_fields
        except InputError as problem:
            yield error(TOPIC, f"{match[0]}: {problem}")
            continue
        is_right = True
        for name in {**right, **cited}:
            ours, theirs = cited.get(name, NONE), right.get(name, NONE)
            if not _same(name, ours, theirs):
                is_right = False
                wrong = f"{name} is {ours}, and {theirs} follows from the journal"
                yield error(TOPIC, f"{match[0]}: {wrong}")
        if is_right:
            yield good(TOPIC, f"{match[0]} {fields_text(cited)}: follows from the journal")


def _fields_after(text: str, begin: int) -> dict[str, str]:
    found: dict[str, str] = {}
    while match := FIELD.match(text, begin):
        name, value = match[1], match[2]
        if name in found:
            value = "given twice"
        found[name] = value
        begin = match.end()
    return found


def _named_by(data: Analysis, name: str, hashes: str | None, rest: str) -> Citation:
    """The citation with an id.

    ``hashes`` is None in an older one, which any run of that name resolves.
    """
    cited = urllib.parse.unquote(name)
    if cited != data.run.name:
        raise InputError(f"is of the run '{cited}', and this is '{data.run.name}'")
    here = hashes_of(data.pool)
    if hashes not in (None, here):
        raise InputError(f"is of the journal {hashes}, and this is {here}")
    if rest.startswith("plots/"):
        return cite_plot(data.pool, urllib.parse.unquote(rest.removeprefix("plots/")))
    return cite(data, *rest.split("/"))


def _same(name: str, ours: str, theirs: str) -> bool:
    """Whether two values are written the same.

    Ends of an interval may differ by one in the last digit, as another version of numpy or scipy
    may round them.
    """
    if ours == theirs:
        return True
    if name not in ENDS:
        return False
    unit = max(_last_digit(ours), _last_digit(theirs))
    try:
        return math.isclose(float(ours), float(theirs), rel_tol=0, abs_tol=1.4 * unit)
    except ValueError:
        return False


def _last_digit(number: str) -> float:
    """What the last decimal of a number counts: 0.001 of ``0.402``."""
    _, _, decimals = number.partition(".")
    return 10.0 ** -len(decimals)
