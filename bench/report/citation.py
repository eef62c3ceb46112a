"""Citations of one number of a run, in three formats: value, interval, machine, commit and hash.

Beside its sentences, which people read, a citation has one line that ``check_citations`` reads
again, for example ``accumulation-bench:RUN:HASH/CELL value=0.4022 low=0.3965 high=0.4081 n=19
sha256=...``. It begins with the permanent id, which has the beginning of the hash that pins
run.json and the journal, of several runs of each with ``+`` between. Older ids have the hash of the
journal alone, or none, and are still found. ``RUN:HASH/CELL/BASELINE`` is a ratio,
``RUN:HASH/plots/NAME`` a figure. ``value`` is the step time in seconds, or the ratio of two;
``low`` and ``high`` are the ends of its 95 % interval; ``n`` is the number of good trials, or of
blocks; ``runs`` is that of several runs, and ``nextlow`` and ``nexthigh`` are where the next one
falls; ``bytes`` is the peak memory, and ``payload`` what a rank hands to collectives in a step; of
a ratio, ``memory`` and ``payload`` are the ratios of these. ``sha256`` is the whole hash, or of
each run; a BibTeX entry has it in ``annote``.
"""

from __future__ import annotations

import difflib
import math
import re
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from bench.errors import InputError
from bench.findings import Finding, Level, error, good, warning
from bench.formatting import bibtex, digits, markdown, plain, plural
from bench.judge.analysis import (
    SCHEME,
    Analysis,
    CellRow,
    hashes_of,
    older_hashes_of,
    permanent_id,
    quoted,
)
from bench.judge.columns import AXES, WAYS
from bench.judge.pairs import ComparedPair
from bench.judge.pool import Pool
from bench.judge.statistics import MIN_RUNS, too_few
from bench.judge.verdicts import NEXT, Reason, Verdict, scope_words
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
NOTE, WARNED = 400, 90
"""Characters of the note of a BibTeX entry, and of a warning in it."""
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")


@dataclass(frozen=True, kw_only=True, slots=True)
class Citation:
    """The parts of a citation as plain text, and the whole of it in each format."""

    subject: str
    statement: str
    """The numbers."""
    brief: Sequence[str]
    """The numbers alone, the most important first: as many as a note has room for."""
    permanent_id: str
    machine_fields: Mapping[str, str]
    """By name, in the line for machines."""
    digest: str
    """Of all that it follows from."""
    details: Sequence[str]
    """Sentences on caveats, work, machine, versions and commit, without their full stops."""
    started: str
    warning: str = ""
    """What forbids citing it."""

    def in_spite_of(self, errors: Sequence[str]) -> Citation:
        """The same, with a first sentence that says what forbids citing it."""
        warned = f"DO NOT CITE THIS: check found {'; '.join(errors)}"
        return replace(self, warning=harmless(warned))

    @property
    def markdown(self) -> str:
        return self._formatted(markdown, "**", "`")

    @property
    def text(self) -> str:
        return self._formatted(plain)

    @property
    def bibtex(self) -> str:
        """An entry whose note bibliographies print; what they do not is in ``annote``."""
        fields = {
            "author": "{{{The accumulation-bench authors}}}",
            "title": f"{{{{{bibtex(self.subject)}}}}}",
        }
        date = re.match(r"(\d{4})-(0[1-9]|1[0-2])-", self.started)
        if date is not None:
            fields["year"] = f"{{{date[1]}}}"
            fields["month"] = MONTHS[int(date[2]) - 1]
        fields["howpublished"] = f"{{{bibtex(f'{SCHEME}, a benchmark of gradient accumulation')}}}"
        fields["note"] = f"{{{self._note()}}}"
        sentences = []
        for sentence in (self.statement, *self.details, f"SHA-256: {self.digest}"):
            sentences.append(f"{bibtex(sentence)}.")
        fields["annote"] = f"{{{' '.join(sentences)}}}"
        identifier = urllib.parse.unquote(self.permanent_id)
        lines = [re.sub(r"[^A-Za-z0-9.-]+", "-", identifier).strip("-")]
        for name, value in fields.items():
            lines.append(f"  {name} = {value}")
        return "@misc{" + ",\n".join(lines) + ",\n}"

    def _note(self) -> str:
        """As many of the numbers as NOTE characters have room for, and the line for machines.

        That goes without the whole hash, of which the id has the beginning.
        """
        line = f"{bibtex(self.permanent_id)} {fields_text(self.machine_fields)}".strip()
        warned = bibtex(self.warning[:WARNED])
        if warned:
            warned += ". "
        parts = list(map(bibtex, self.brief))
        while len(parts) > 1 and len(warned) + len("; ".join(parts)) + 2 + len(line) > NOTE:
            parts.pop()
        return f"{warned}{'; '.join(parts)}. {line}"

    def _formatted(
        self,
        escape: Callable[[object], str],
        bold: str = "",
        code: str = "",
    ) -> str:
        """The whole, with these marks around its subject and around the line for machines."""
        fields = fields_text({**self.machine_fields, "sha256": self.digest})
        line = f"{code}{self.permanent_id} {fields}{code}"
        sentences = list(self.details)
        if self.warning:
            sentences.insert(0, self.warning)
        details = [f"{escape(sentence)}." for sentence in sentences]
        subject = f"{bold}{escape(self.subject)}{bold}"
        return f"{subject}: {escape(self.statement)}.\n{line}\n{' '.join(details)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """The numbers of a cell or a ratio."""

    parts: Sequence[str]
    """Of the statement, in clauses: time first, then memory and bytes."""
    brief: str
    """The first of them without what is no number."""
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
        numbers = _ratio_numbers(data, pair)
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
    numbers = Numbers(parts=[statement], brief=statement, fields={})
    return _citation(pool, f"plots/{quoted(name)}", f"Figure {name}", numbers, [])


def _citation(
    pool: Pool,
    path: str,
    subject: str,
    numbers: Numbers,
    details: Sequence[str],
) -> Citation:
    about = pool.first.manifest
    digest = "+".join(pool.pins)
    if not digest:
        digest = NONE
    every = [*details, _machine_sentence(about), _versions_sentence(about), commit_sentence(about)]
    return Citation(
        subject=harmless(subject),
        statement="; ".join(numbers.parts),
        brief=[numbers.brief, *numbers.parts[1:]],
        permanent_id=permanent_id(pool, path),
        machine_fields=numbers.fields,
        digest=digest,
        details=list(map(harmless, every)),
        started=about.started,
    )


def harmless(text: str) -> str:
    """Foreign text, changed so that it cannot pass for another id."""
    return plain(text).replace(f"{SCHEME}:", f"{SCHEME} ")


def _cell_numbers(data: Analysis, row: CellRow) -> Numbers:
    """The numbers of a cell, or that it has none.

    What others do on the machine takes the time away, and neither memory nor bytes.
    """
    time = _cell_time(data, row)
    parts, fields = list(time.parts), dict(time.fields)
    peak = row.peak_memory_bytes
    if peak is not None:
        text = f"peak memory {digits(peak / 2**20)} MiB ({peak} bytes, {row.peak_memory_source})"
        parts.append(text)
        fields["bytes"] = str(peak)
    payload = data.payloads.get(row.cell_id)
    if payload is not None:
        text = f"{digits(payload / 2**20)} MiB ({payload} bytes) per step to collectives"
        parts.append(text)
        fields["payload"] = str(payload)
    return Numbers(parts=parts, brief=time.brief, fields=fields)


def _cell_time(data: Analysis, row: CellRow) -> Numbers:
    """The step time of a cell, or that it has none."""
    trials = plural(row.num_trials, "trial")
    if data.is_barred(row.cell):
        text = f"NOT COMPARABLE, no step time is given (n = 0 of {trials})"
        return Numbers(parts=[text], brief=text, fields={"value": NONE, "n": "0"})
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
    return Numbers(parts=[text], brief=text, fields=fields | counts)


def _ratio_numbers(data: Analysis, pair: ComparedPair) -> Numbers:
    """The numbers of a ratio, or that it has none.

    Those of memory and of bytes have no noise, so they are given beside other programs, too.
    """
    time = _ratio_of_times(pair, data.control)
    parts, fields = list(time.parts), dict(time.fields)
    base, cell = pair.memory
    if pair.memory_ratio is not None:
        ratio = digits(pair.memory_ratio)
        parts.append(f"{ratio} times the peak memory ({cell} / {base} bytes)")
        fields["memory"] = ratio
    handed, by_base = data.payloads.get(pair.b.cell_id), data.payloads.get(pair.a.cell_id)
    is_alike = pair.verdict is not Verdict.NOT_COMPARABLE or pair.reason is Reason.DISTURBED
    if handed and by_base and is_alike:
        ratio = digits(handed / by_base)
        parts.append(f"{ratio} times the bytes to collectives ({handed} / {by_base})")
        fields["payload"] = ratio
    return Numbers(parts=parts, brief=time.brief, fields=fields)


def _ratio_of_times(pair: ComparedPair, control_pair: ComparedPair | None) -> Numbers:
    time = pair.time
    if pair.verdict is Verdict.NOT_COMPARABLE or time is None:
        text = f"NOT COMPARABLE ({pair.reason}), no ratio of step times is given"
        return Numbers(parts=[text], brief=text, fields={"value": NONE})
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
    ratio = f"{amount} times the step time ({interval}, {counted})"
    text = f"{ratio}; verdict: {_verdict_words(pair)}; {_control_words(pair, control_pair)}"
    return Numbers(parts=[text], brief=f"{ratio}; verdict: {pair.words}", fields=fields)


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
    if not around:
        around = "unknown"
    where = ""
    if control_pair is not None:
        where = f" at N={control_pair.a.accumulate}"
    return f"A/A pair{where}: {around}"


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
    for driver in dict.fromkeys(gpu.driver for gpu in machine.gpus if gpu.driver):
        words.append(f"driver {driver}")
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
    if not found:
        return "Versions: not stored"
    return f"Versions: {', '.join(found)}"


def commit_sentence(manifest: Manifest) -> str:
    """The commit of the bench, and whether there were changes on top of it."""
    git = manifest.git
    if not git.commit:
        return "Commit: unknown"
    if git.clean:
        return f"Commit: {git.commit}"
    if git.clean is None:
        return f"Commit: {git.commit}, perhaps with uncommitted changes"
    return f"Commit: {git.commit} with uncommitted changes"


def fields_text(fields: Mapping[str, str]) -> str:
    """The fields of the line for machines, as they follow its id."""
    return " ".join(f"{name}={value}" for name, value in fields.items())


ENDS = frozenset({"low", "high", "nextlow", "nexthigh"})
"""Fields of the ends of intervals."""
NEWER = frozenset({"payload", "memory"})
"""Fields that citations made by older versions lack."""
DIGEST = "sha256"
"""Field of the whole hash, which may be left out beside an id that has its beginning."""
TOPIC = "citation"
MARKUP = re.compile(r"[^\w.,:;()/%=+\- ]")
"""Markup of the formats, which is removed before a citation is read."""
ID = re.compile(
    rf"{SCHEME}:([\w.%-]+)(?::([0-9a-f]+(?:\+[0-9a-f]+)*|none))?"
    r"/(plots/[\w.%-]*[\w%]|[0-9a-f]+(?:/[0-9a-f]+)?)"
)
FIELD = re.compile(r" ([a-z0-9]+)=([\w.+-]*\w)")
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
COPIED = 0.6
"""Share of the words of a statement from which on the words before an id are taken for a copy of
it."""
OWN_DIGITS = 3
"""Digits from which on a number in a sentence of one's own is held against those of its
citation."""


def check_citations(data: Analysis, text: str) -> Iterator[Finding]:
    """The findings on each citation in a text, in any of the formats.

    They say whether its fields follow from the journal, and so do the numbers in the words before
    it: in a copy of what ``cite`` printed each, in a sentence of one's own those that look like
    one.
    """
    text = _without_markup(text)
    ids = list(ID.finditer(text))
    if not ids:
        form = f"{SCHEME}:RUN/CELL"
        yield error(TOPIC, f"the text holds no id of the form {form}, so it cites nothing")
    end = 0
    for match in ids:
        before = text[end : match.start()]
        cited, end = _fields_after(text, match.end())
        try:
            right = _named_by(data, match[1], match[2], match[3])
        except InputError as problem:
            yield error(TOPIC, f"{match[0]}: {problem}")
            continue
        found = [*_wrong_fields(data, right, cited, match[2]), *_wrong_words(right, before)]
        for finding in found:
            yield replace(finding, text=f"{match[0]}: {finding.text}")
        if not any(finding.level is Level.ERROR for finding in found):
            yield good(TOPIC, f"{match[0]} {fields_text(cited)}: follows from the journal")


def _without_markup(text: str) -> str:
    return " ".join(MARKUP.sub("", " ".join(text.split())).split())


def _fields_after(text: str, begin: int) -> tuple[dict[str, str], int]:
    """The fields from there on, and where they end."""
    found: dict[str, str] = {}
    while match := FIELD.match(text, begin):
        name, value = match[1], match[2]
        if name in found:
            value = "given twice"
        found[name] = value
        begin = match.end()
    return found, begin


def _named_by(data: Analysis, name: str, hashes: str | None, rest: str) -> Citation:
    """The citation with an id.

    An older id has the hashes of journals alone, or none: then any run of that name resolves it.
    """
    cited = urllib.parse.unquote(name)
    if cited != data.run.name:
        raise InputError(f"is of the run '{cited}', and this is '{data.run.name}'")
    here = hashes_of(data.pool)
    if hashes not in (None, here, older_hashes_of(data.pool)):
        raise InputError(f"is of the run with the hash {hashes}, and this one's is {here}")
    if rest.startswith("plots/"):
        return cite_plot(data.pool, urllib.parse.unquote(rest.removeprefix("plots/")))
    return cite(data, *rest.split("/"))


def _wrong_fields(
    data: Analysis, right: Citation, cited: Mapping[str, str], hashes: str | None
) -> Iterator[Finding]:
    """The fields of the line for machines that do not follow from the run."""
    follow = {**right.machine_fields, DIGEST: right.digest}
    of_journals = "+".join(data.pool.digests)
    if cited.get(DIGEST) == of_journals:  # as older citations have it
        follow[DIGEST] = of_journals
    optional = set(NEWER)
    if hashes is not None:
        optional.add(DIGEST)
    for name in {**follow, **cited}:
        if name in optional and name not in cited:
            continue
        ours, theirs = cited.get(name, NONE), follow.get(name, NONE)
        if not _same(name, ours, theirs):
            yield error(TOPIC, f"{name} is {ours}, and {theirs} follows from the journal")


def _wrong_words(right: Citation, before: str) -> Iterator[Finding]:
    """The numbers in the words before an id that do not follow from the run."""
    statements = [f"{right.subject}: {right.statement}", "; ".join(right.brief)]
    copies = [_Copy.of(_without_markup(statement), before) for statement in statements]
    copy = max(copies, key=lambda copy: copy.share)
    if copy.share >= COPIED:
        exact = {value for name, value in right.machine_fields.items() if name not in ENDS}
        for ours, theirs in copy.numbers:
            if ours != theirs and (theirs in exact or not _same("low", ours, theirs)):
                yield error(TOPIC, f"its words say {ours}, and {theirs} follows from the journal")
        return
    sentence = re.split(r"[.;:?!] ", before)[-1]
    known = NUMBER.findall(" ".join(map(_without_markup, statements)))
    for number in NUMBER.findall(sentence):
        digits_of_it = number.replace(".", "").strip("-0")
        if "." in number and len(digits_of_it) >= OWN_DIGITS:
            yield from _unlike_all(number, known)


def _unlike_all(number: str, known: Sequence[str]) -> Iterator[Finding]:
    """Whether a number is none of these, rounded, nor the per cent by which one is off 1."""
    unit = _last_digit(number)
    for text in known:
        value = float(text)
        derived = (value, 100 * value, 100 * (value - 1), 100 * (1 - value))
        if any(abs(each - float(number)) <= 0.51 * unit for each in derived):
            return
    mistaken = [text for text in known if _differs_in_a_digit(number, text)]
    if mistaken:
        yield error(
            TOPIC, f"its sentence says {number}, and {mistaken[0]} follows from the journal"
        )
    else:
        yield warning(TOPIC, f"{number} in its sentence is none of its numbers")


def _differs_in_a_digit(ours: str, theirs: str) -> bool:
    """Whether one digit is another one, or two neighbours have changed places."""
    if len(ours) != len(theirs):
        return False
    places = [i for i in range(len(ours)) if ours[i] != theirs[i]]
    if len(places) == 1:
        return True
    is_swapped = sorted(ours) == sorted(theirs)
    return is_swapped and len(places) == 2 and places[1] == places[0] + 1


@dataclass(frozen=True, slots=True)
class _Copy:
    """How much of a statement the words before an id have, and the numbers that differ."""

    share: float
    numbers: Sequence[tuple[str, str]]
    """Ours, then the statement's."""

    @classmethod
    def of(cls, statement: str, before: str) -> _Copy:
        wanted, found = statement.split(), before.split()
        found = found[-2 * len(wanted) :]
        numbers = []
        matcher = difflib.SequenceMatcher(None, wanted, found, autojunk=False)
        num_same = 0
        for kind, first, last, begin, end in matcher.get_opcodes():
            if kind == "equal":
                num_same += last - first
            elif kind == "replace":
                # Before the beginning of a copy there may be other words: pairs are made from the
                # end.
                pairs = zip(reversed(wanted[first:last]), reversed(found[begin:end]), strict=False)
                for theirs, ours in pairs:
                    mine, right = NUMBER.search(ours), NUMBER.search(theirs)
                    if mine is not None and right is not None:
                        numbers.append((mine[0], right[0]))
        return cls(num_same / len(wanted), numbers)


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
