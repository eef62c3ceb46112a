"""Citations of simulated runs: what they say, that they survive their formats, and that a changed one is found out."""

from __future__ import annotations

import io
import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import cli
from bench.errors import InputError
from bench.files import RESULTS
from bench.findings import Level
from bench.formatting import digits
from bench.judge.analysis import Analysis
from bench.judge.caveats import GLOO_SCATTERS
from bench.judge.integrity import check
from bench.judge.loading import load
from bench.plan.cell import Cell
from bench.report.citation import check_citations, cite, cite_plot
from bench.run.journal import JOURNAL, MANIFEST, Journal, encode, run_sha256, write_document
from tests.conftest import ROOT
from tests.pages import COMMIT, MIB, write_run

FORMATS = ("markdown", "bibtex", "text")
HOSTILE = r"a|b`<b>**{c}_%\x} $&#~^[d](e)" + "\x1b[31m\u202e"


def wrong_update(cell: Cell, repeat: int) -> dict[str, Any]:
    return (
        {"update": {"error": 0.5, "scale": 0.5, "residual": 1e-7}}
        if cell.backend == "wrong"
        else {}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of clean code, with a backend that is slower, one that is not, and one that is wrong."""
    backends = {"base": 1.0, "slow": 1.1, "equal": 1.0, "wrong": 1.0}
    path = tmp_path_factory.mktemp("citation") / "a run_1"
    return write_run(path, backends, changes=wrong_update, accumulate=(2, 4))


@pytest.fixture(scope="module")
def data(folder: Path) -> Analysis:
    return Analysis(run=load(folder), folder=folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """The same run, to be spoilt; a run is named by its manifest, not by its folder."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def id_of(data: Analysis, backend: str, accumulate: int = 2, twin: str = "") -> str:
    (found,) = [
        cell_id
        for cell_id, cell in data.run.cells.items()
        if (cell.backend, cell.accumulate, cell.twin) == (backend, accumulate, twin)
    ]
    return found


def errors(data: Analysis, text: str) -> list[str]:
    found = check_citations(data, text)
    return [finding.text for finding in found if finding.level is Level.ERROR]


def clean(data: Analysis, text: str, count: int = 1) -> bool:
    every = check_citations(data, text)
    found = [finding for finding in every if finding.topic == "citation"]
    return len(found) == count and all(finding.level is Level.GOOD for finding in found)


def test_a_cell_is_cited_with_all_that_it_needs(data: Analysis, folder: Path) -> None:
    text = cite(data, id_of(data, "slow")).text
    trials = data.run.tables.trials[data.run.tables.trials["cell_id"] == id_of(data, "slow")]
    value = statistics.geometric_mean(trials["step_time_s"])
    assert text.startswith(f"slow N=2 W=2 fp32: {digits(value)} s per ")
    assert "in this run (95 % interval 0." in text and "n = 10 trials" in text
    assert "49.50 MiB (51904512 bytes, tracked tensors)" in text
    line = text.splitlines()[1]
    assert line.startswith(
        f"accumulation-bench:a%20run_1:{data.run.pin[:12]}/{id_of(data, 'slow')} value={digits(value)} low=0."
    )
    payload = data.payloads[id_of(data, "slow")]
    assert f"; {digits(payload / MIB)} MiB ({payload} bytes) per step" in text
    assert payload == 2 * 12 * MIB + MIB
    assert line.endswith(f" n=10 bytes=51904512 payload={payload} sha256={run_sha256(folder)}")
    assert (
        data.run.manifest.machine.cpu in text
        and f"torch {data.run.manifest.packages['torch']}" in text
    )
    assert text.endswith(f"Commit: {COMMIT}.")
    noted = [each.rstrip(".") for each in data.caveats(id_of(data, "slow"))]
    assert f"Note: {'; '.join(noted)}" in text
    assert "gloo over loopback" in noted[0] and "was not measured" in noted[1]


def test_citations_of_what_reduce_scatters_over_gloo_say_whose_cost_that_is() -> None:
    data = Analysis(run=load(ROOT / "results" / "cpu"))
    for name, scatters in (("fsdp2-deferred", True), ("ddp-deferred", False)):
        text = cite(data, data.run.find(f"{name} N=8 W=2 fp32").cell_id).text
        assert (GLOO_SCATTERS in text) == scatters, name


def test_a_citation_carries_the_warnings_of_check_on_its_cells_alone(tmp_path: Path) -> None:
    """All cells are slower in the later blocks, and one of them ever more; another run has no A/A pair."""

    def slower(cell: Cell, repeat: int) -> dict[str, Any]:
        return {"slower": 1 + 0.2 * (repeat > 6) + 0.02 * repeat * (cell.backend == "slow")}

    write_run(
        tmp_path / "run",
        {"base": 1.0, "slow": 1.3, "other": 1.2},
        changes=slower,
        accumulate=(2,),
        repeats=12,
    )
    warned = [finding for finding in check(tmp_path / "run") if finding.level is Level.WARNING]
    assert {"blocks", "drift", "machine"} <= {finding.topic for finding in warned}
    data = Analysis(run=load(tmp_path / "run"))
    texts = {name: cite(data, id_of(data, name)).text for name in ("base", "slow", "other")}
    for name, text in texts.items():
        of_cell = {
            finding.brief
            for finding in warned
            if not finding.cells or id_of(data, name) in finding.cells
        }
        assert {
            brief for brief in {finding.brief for finding in warned} if brief in text
        } == of_cell, name
    assert "blocks of the run differ over all cells" in texts["base"]
    untimed = Analysis(run=load(RESULTS / "bytes-8b"))
    of_fsdp2 = next(i for i, c in untimed.run.cells.items() if c.backend == "fsdp2-deferred")
    assert "nothing was timed. Method" in cite(untimed, of_fsdp2).text
    alone = Analysis(
        run=load(write_run(tmp_path / "alone", {"base": 1.0}, accumulate=(2,), twin=False))
    )
    assert "the run has no A/A pair" in cite(alone, id_of(alone, "base")).text
    drift = next(
        finding
        for finding in warned
        if finding.topic == "drift" and finding.subject.startswith("slow")
    )
    assert (
        f"slow N=2 W=2 fp32: {drift.brief}"
        in cite(data, id_of(data, "slow"), id_of(data, "base")).text
    )


@pytest.mark.parametrize("form", FORMATS)
def test_every_citation_is_found_right_in_every_format(data: Analysis, form: str) -> None:
    pairs: list[tuple[str, ...]] = [(cell_id,) for cell_id in data.run.cells]
    pairs += [(id_of(data, name), id_of(data, "base")) for name in ("slow", "equal", "wrong")]
    pairs += [
        (id_of(data, "base"), id_of(data, "slow")),
        (id_of(data, "slow", 4), id_of(data, "slow")),
        (id_of(data, "base", 4), *pairs[0]),
    ]
    texts = [getattr(cite(data, *pair), form) for pair in pairs] + [
        getattr(cite_plot(data.pool, "step_time"), form)
    ]
    assert clean(data, "\n\n".join(texts), len(texts))
    assert all(clean(data, text) for text in texts[:2])


def changed(text: str, pattern: str, by: str | Callable[[re.Match[str]], str]) -> str:
    found = re.sub(pattern, by, text, count=1)
    assert found != text, "the test changes nothing"
    return found


def last_digit(match: re.Match[str]) -> str:
    return match[1] + str((int(match[2]) + 5) % 10)


CHANGES = {
    "value is": (r"(value=0\.\d+)(\d)", last_digit),
    "value is none": (r" value=[\d.]+", ""),
    "low is": (r"(low=0\.\d+)(\d)", last_digit),
    "low is 0.x": (r"low=[\d.]+", "low=0.x"),
    "n is": ("n=10", "n=100"),
    "bytes is": ("bytes=51904512", "bytes=51904513"),
    "more is 1, and none follows": (" n=10", " more=1 n=10"),
    "is of the run": ("a%20run_1", "another"),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("form", FORMATS)
def test_whatever_is_changed_in_a_citation_is_named(data: Analysis, what: str, form: str) -> None:
    text = getattr(cite(data, id_of(data, "slow")), form)
    pattern, by = CHANGES[what]
    escaped = {"a%20run_1": r"a\\%20run\\_1" if form == "bibtex" else pattern}.get(pattern, pattern)
    found = errors(
        data, changed(text.rpartition("\n  note")[2] if form == "bibtex" else text, escaped, by)
    )
    assert len(found) == 1 and what in found[0]


def test_a_wrong_hash_is_named_where_it_stands(data: Analysis) -> None:
    text = cite(data, id_of(data, "slow")).text
    (found,) = errors(data, changed(text, r"(sha256=)\w", r"\1"))
    assert "sha256 is" in found
    assert clean(data, changed(text, r" sha256=\w+", "")), "the id has its beginning"


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_in_the_words_are_held_against_the_run_too(data: Analysis, form: str) -> None:
    """Each number of a copied sentence; the line for machines stays as it was."""
    ids = id_of(data, "slow"), id_of(data, "base")
    cell, ratio = (getattr(cite(data, *some), form) for some in (ids[:1], ids))
    for text, pattern in (
        (ratio, r"(\d\.\d+)(?= times the step time)"),
        (ratio, r"(?<=interval )(\d\.\d+)"),
        (ratio, r"(\d\.\d+)(?= times the peak memory)"),
        (cell, r"(\d\.\d+)(?= s per optimizer step)"),
        (cell, r"(\d+)(?= bytes, tracked)"),
    ):
        spoilt = changed(text, pattern, lambda match: mistyped(match[1]))
        found = [each for each in errors(data, spoilt) if "its words say" in each]
        assert len(found) == 1, (pattern, errors(data, spoilt))


def mistyped(number: str) -> str:
    """The number with another first decimal, or another first digit."""
    place = number.find(".") + 1
    return number[:place] + str((int(number[place]) + 1) % 10) + number[place + 1 :]


def test_a_sentence_of_ones_own_may_round_but_not_mistype(data: Analysis) -> None:
    ids = id_of(data, "slow"), id_of(data, "base")
    citation = cite(data, *ids)
    value = citation.machine_fields["value"]
    line = citation.text.splitlines()[1]
    for words in (
        f"Eager sync takes {value} times as long",
        f"Eager sync takes {float(value):.2f}x as long, with 16 samples",
        f"Eager sync takes {100 * float(value) - 100:.1f} % longer",
        "We trained 3.08 M parameters. Eager sync is slower",
    ):
        assert clean(data, f"{words} ({line})."), words
    (found,) = errors(data, f"Eager sync takes {mistyped(value)} times as long ({line}).")
    assert f"its sentence says {mistyped(value)}, and {value} follows" in found
    levels = [
        each.level for each in check_citations(data, f"Each is 7.654 times as slow ({line}).")
    ]
    assert levels == [Level.WARNING, Level.GOOD]


def test_the_note_of_a_bibtex_entry_is_short(data: Analysis) -> None:
    ids = id_of(data, "slow"), id_of(data, "base")
    for citation in (cite(data, *ids), cite(data, *ids[:1]), cite_plot(data.pool, "noise")):
        for shown in (citation, citation.in_spite_of(["the journal was changed " * 20])):
            (note,) = re.findall(r"^  note = \{(.*)\},$", shown.bibtex, re.MULTILINE)
            assert len(note) <= 400 and "accumulation-bench:" in note
            assert note.startswith("DO NOT CITE THIS") == bool(shown.warning)
        assert "Commit: " in citation.bibtex and citation.digest in citation.bibtex


def test_a_busy_machine_takes_the_time_and_leaves_memory_and_bytes(tmp_path: Path) -> None:
    busy = {"time": {"host": {"num_cpus": 4, "foreign_cores": 1.6, "stolen_cores": 0.0}}}
    folder = write_run(
        tmp_path / "run", {"base": 1.0, "lean": 0.5}, accumulate=(2,), changes=lambda *_: busy
    )
    data = Analysis(run=load(folder))
    lean, base = id_of(data, "lean"), id_of(data, "base")
    cell, ratio = cite(data, lean), cite(data, lean, base)
    assert "NOT COMPARABLE" in cell.statement and "peak memory 22.50 MiB" in cell.statement
    assert "NOT COMPARABLE (machine disturbed)" in ratio.statement
    assert "; 0.5000 times the peak memory (" in ratio.statement
    assert "; 1.000 times the bytes to collectives (" in ratio.statement
    assert ratio.machine_fields == {"value": "none", "memory": "0.5000", "payload": "1.000"}
    assert clean(data, f"{cell.text}\n\n{ratio.bibtex}", 2)


def test_older_citations_still_resolve(data: Analysis) -> None:
    """Ids with the hash of the journal alone or with none, and without the fields that came later."""
    text = cite(data, id_of(data, "slow")).text
    older = re.sub(r" payload=\d+ sha256=\w+", f" sha256={data.run.digest}", text)
    older = older.replace("; 25.00 MiB (26214400 bytes) per step to collectives", "")
    for hashes in (f":{data.run.digest[:12]}", ""):
        assert clean(data, older.replace(f":{data.run.pin[:12]}", hashes))
    (found,) = errors(data, text.replace(f":{data.run.pin[:12]}", f":{'0' * 12}"))
    assert "the run with the hash 000000000000" in found


def test_a_citation_pins_the_manifest_too(copy: Path, data: Analysis) -> None:
    text = cite(data, id_of(data, "slow")).text
    document = json.loads((copy / MANIFEST).read_text())
    document["machine"]["cpu"] = "Another CPU"
    write_document(copy, document)
    (found,) = errors(Analysis(run=load(copy)), text)
    assert "is of the run with the hash" in found


def test_a_ratio_is_that_of_the_report(data: Analysis) -> None:
    row = data.pairs[id_of(data, "slow")]
    assert row.time is not None and row.time.low is not None and row.time.high is not None
    text = cite(data, id_of(data, "slow"), id_of(data, "base")).text
    assert text.startswith("slow N=2 W=2 fp32 against base N=2 W=2 fp32: ")
    assert f": {digits(row.time.ratio)} times the step time" in text
    assert f"95 % interval {digits(row.time.low)} - {digits(row.time.high)}" in text
    assert "n = 10 blocks" in text and "verdict: slower in this run" in text
    assert re.search(r"A/A pair at N=\d+: \d\.\d+ - \d\.\d+", text)
    back = cite(data, id_of(data, "base"), id_of(data, "slow")).text
    assert (
        f": {digits(1 / row.time.ratio)} times the step time" in back and "verdict: faster" in back
    )
    same = cite(data, id_of(data, "equal"), id_of(data, "base")).text
    equal = data.pairs[id_of(data, "equal")]
    assert f"verdict: {equal.verdict} " in same
    for pattern, by, what in (
        ("verdict=slower", "verdict=faster", "verdict is faster, and slower"),
        (r"value=1\.\d+", "value=1.5", "value is 1.5"),
    ):
        assert any(what in error for error in errors(data, changed(text, pattern, by)))


def test_what_is_not_comparable_has_no_number(data: Analysis) -> None:
    for text in (
        cite(data, id_of(data, "wrong")).text,
        cite(data, id_of(data, "wrong"), id_of(data, "base")).text,
    ):
        assert "NOT COMPARABLE" in text and "divided by N = 2 twice" in text
        assert (
            " s per optimizer step" not in text.splitlines()[0]
            and "times the step time" not in text
        )
        assert any(
            "value is 0.1, and none" in error
            for error in errors(data, changed(text, "value=none", "value=0.1"))
        )


def test_a_changed_journal_is_not_what_was_cited(
    copy: Path, data: Analysis, capsys: pytest.CaptureFixture[str]
) -> None:
    cell_id = id_of(data, "slow")
    text = cite(data, cell_id).text
    records = Journal(copy).read()
    for record in records:
        if record["cell_id"] == cell_id:
            for name in ("step_seconds", "rank_step_seconds"):
                record["time"].pop(name)
            record["time"]["step_seconds"] = [0.05] * record["cell"]["timed_windows"]
    (copy / JOURNAL).write_bytes(b"".join(map(encode, records)))  # with checksums that are right
    assert cli.main(["cite", str(copy), cell_id]) == 1
    found = errors(Analysis(run=load(copy)), text)
    assert "was changed after the run" in capsys.readouterr().err
    (error,) = found
    assert f"the run with the hash {data.run.pin[:12]}" in error
    older = errors(Analysis(run=load(copy)), text.replace(f":{data.run.pin[:12]}/", "/"))
    assert any("value is" in text and "0.05000 follows" in text for text in older)
    assert any("sha256 is" in text for text in older)


def test_cells_are_found_by_id_beginning_and_label(data: Analysis) -> None:
    cell = data.run.cells[id_of(data, "slow")]
    assert data.run.find(cell.cell_id) is cell and data.run.find(cell.label) is cell
    ids = sorted(data.run.cells)
    for cell_id in ids:
        short = next(
            cell_id[:n]
            for n in range(1, 13)
            if sum(other.startswith(cell_id[:n]) for other in ids) == 1
        )
        assert data.run.find(short).cell_id == cell_id
    with pytest.raises(InputError, match="did you mean 'slow N=2 W=2 fp32'"):
        data.run.find("slow N=2 W=3 fp32")
    with pytest.raises(InputError, match="use one of"):
        data.run.find("?")


def test_the_commands(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Analysis(run=load(copy))
    assert cli.main(["cite", str(copy), "slow N=2 W=2 fp32"]) == 0
    everything = capsys.readouterr().out
    assert [everything.count(title) for title in ("Markdown:", "BibTeX:", "Plain text:")] == [
        1,
        1,
        1,
    ]
    for form in FORMATS:
        assert (
            cli.main(
                ["cite", str(copy), id_of(data, "slow"), id_of(data, "base"), "--format", form]
            )
            == 0
        )
        assert (
            capsys.readouterr().out
            == getattr(cite(data, id_of(data, "slow"), id_of(data, "base")), form) + "\n"
        )
    (copy / "plots").mkdir(exist_ok=True)
    (copy / "plots" / "step_time.png").touch()
    assert cli.main(["cite", str(copy), "--plot", "step_time", "--format", "text"]) == 0
    assert capsys.readouterr().out == cite_plot(data.pool, "step_time").text + "\n"
    (copy / "paper.txt").write_text(everything)
    assert cli.main(["check", str(copy), "--citation", str(copy / "paper.txt")]) == 0
    assert "it matches the data" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO(everything.replace("n=10", "n=11")))
    assert cli.main(["check", str(copy), "--citation", "-", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["errors"] == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["cite", "{}"],
        ["cite", "{}", "a", "b", "c"],
        ["cite", "{}", "no-such"],
        ["cite", "{}", "--plot", "nothing"],
        ["cite", "{}", "--format", "html", "x"],
        ["check", "{}", "--citation", "no/such/file"],
        ["check", "{}", "--citation", "a\0b"],
    ],
)
def test_a_wrong_command_is_one_line(
    folder: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([argument.format(folder) for argument in arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
