"""What has to be said beside numbers is said wherever they are shown, once, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from bench import cli
from bench.backends.base import BF16_AUTOCAST, BF16_PARAMETERS, built_in
from bench.judge.analysis import Analysis
from bench.judge.analysis import read as read_frames
from bench.judge.as_benched import AS_BENCHED, as_benched
from bench.judge.loading import load
from bench.plan.cell import Device
from bench.report.citation import cite
from bench.run.journal import read_document, write_document
from tests.factories import make_cell
from tests.pages import kind, read, report, write_run

DDP, FSDP2 = "like-ddp", "like-fsdp2"
"""Made up, so that no formula of a real backend says that the made-up numbers are wrong."""
BEGINNING = "bf16 is computed in different ways"
BF16 = (
    f"{BEGINNING}, which by itself changes time and memory: autocast over fp32 parameters, which keeps the residual "
    f"stream and norms in fp32 ({DDP}); bf16 copies of fp32 parameters ({FSDP2})"
)
ALONE = "on one rank this backend waits, which it does not on several"


def write(
    folder: Path, precision: str = "bf16", way: str = BF16_PARAMETERS, *, remarks: bool = True
) -> Path:
    """A run of two backends, the second of which computes bf16 in this way, and has a remark on it if asked."""
    path = write_run(
        folder, {DDP: 1.0, FSDP2: 0.8}, repeats=6, accumulate=(2,), precision=(precision,)
    )
    about = read_document(path)
    about["backends"] |= {
        DDP: kind(DDP) | {"bf16_as": BF16_AUTOCAST},
        FSDP2: kind(FSDP2) | {"bf16_as": way},
    }
    if remarks:
        about["remarks"] = {load(path).find(f"{FSDP2} N=2 W=2 {precision}").cell_id: ALONE}
    write_document(path, about)
    return path


def texts_by_place(folder: Path, *, drawn: bool = False) -> dict[str, str]:
    """What a report says in each place that shows numbers, each in one line."""
    _, printed = report(folder, drawn=drawn)
    page = read(folder / "report.html")
    (cells,) = page.find("section", aria_labelledby="cells")
    found = {"terminal": printed, "table": cells.text}
    found |= {"pull request": (folder / "report.md").read_text()}
    found |= {
        path.stem: described(path)
        for path in (folder / "plots").glob("*.png")
        if path.stem != "noise"
    }
    return {name: " ".join(text.split()) for name, text in found.items()}


def described(picture: Path) -> str:
    """The words below a picture, which it also has as plain text."""
    with Image.open(picture) as image:
        return str(image.info["Description"])


def compared(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert (
        cli.main(["compare", str(folder), "--backend", FSDP2, "--against", DDP, "--out", str(out)])
        == 0
    )
    found = {path.name: path.read_text() for path in out.glob("*.md")} | {
        "compare": capsys.readouterr().out
    }
    found |= {path.name: described(path) for path in out.glob("*.png")}
    return {name: " ".join(text.split()) for name, text in found.items()}


def citations(folder: Path) -> tuple[str, str, str]:
    """Of the second backend alone, of the first, and of the second against the first."""
    data = Analysis(run=load(folder))
    ids = [
        next(id_ for id_, cell in data.run.cells.items() if cell.backend == name)
        for name in (FSDP2, DDP)
    ]
    return cite(data, ids[0]).text, cite(data, ids[1]).text, cite(data, *ids).text


def test_two_ways_of_bf16_and_a_backends_own_remark_are_said_once_in_each_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(tmp_path / "run")
    alone = f"{FSDP2} N=2 W=2 bf16: {ALONE}"
    for name, text in (
        texts_by_place(folder, drawn=True) | compared(folder, tmp_path / "out", capsys)
    ).items():
        assert [text.count(sentence) for sentence in (BF16, alone)] == [1, 1], name
    of_fsdp2, of_ddp, of_both = citations(folder)
    assert [text.count(BEGINNING) for text in (of_fsdp2, of_ddp, of_both)] == [0, 0, 1]
    assert [text.count(ALONE) for text in (of_fsdp2, of_ddp, of_both)] == [1, 0, 1]
    assert BF16 in of_both and alone in of_both
    caveats = read_frames(folder).cells.set_index("backend")["caveats"]
    assert ALONE in caveats[FSDP2] and ALONE not in caveats[DDP]


@pytest.mark.parametrize(("precision", "way"), [("bf16", BF16_AUTOCAST), ("fp32", BF16_PARAMETERS)])
def test_nothing_is_said_where_the_ways_are_alike_or_in_fp32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, way: str
) -> None:
    folder = write(tmp_path / "run", precision, way, remarks=False)
    every = [
        *texts_by_place(folder).values(),
        *compared(folder, tmp_path / "out", capsys).values(),
        *citations(folder),
    ]
    assert len(every) > 5 and not any(BEGINNING in text for text in every)


HF, DDP_DEFERRED = "hf-trainer-ddp", "ddp-deferred"


def test_what_the_bench_changes_in_a_framework_is_noted_at_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", {DDP_DEFERRED: 1.0, HF: 0.8}, repeats=6, accumulate=(2, 4))
    data = Analysis(run=load(folder))
    cells = {id_: cell for id_, cell in data.run.cells.items() if not cell.twin}
    ids = {cell.backend: id_ for id_, cell in cells.items() if cell.accumulate == 4}
    changes = as_benched(cells[ids[HF]])
    assert len(changes) == 2 and not as_benched(cells[ids[DDP_DEFERRED]])
    places = texts_by_place(folder)
    for name, count in (
        ("terminal", 1),
        ("table", 1),
        ("pull request", 2),
    ):  # of a table for each N
        for letter, words in zip("ab", changes, strict=True):
            assert places[name].count(f"({letter}) {words}") == count, name
    lines = (folder / "report.md").read_text().splitlines()
    notes = {line.split(" | ")[0]: line.split(" | ")[-1] for line in lines if line[:2] == "| "}
    assert notes[f"| {HF}"] == "a, b |" and notes[f"| {DDP_DEFERRED}"] == " |"
    (overview,) = read(folder / "report.html").find("table", id="overview")
    marks = [mark.text for mark in overview.find("td", data_key="note")]
    assert sorted(marks) == ["", "", "a, b", "a, b"]

    of_both = cite(data, ids[HF], ids[DDP_DEFERRED]).text
    caveats = read_frames(folder).cells.set_index("backend")["caveats"]
    for words in changes:
        assert f"{HF} N=4 W=2 fp32: {AS_BENCHED}, {words}" in of_both
        assert f"{AS_BENCHED}, {words}" in cite(data, ids[HF]).text
        assert words not in cite(data, ids[DDP_DEFERRED]).text
        assert words in caveats[HF].iloc[0] and words not in caveats[DDP_DEFERRED].iloc[0]
        assert f"{AS_BENCHED}, {words}" in [finding.text for finding in data.findings]
    cli.main(["compare", str(folder), "--backend", HF, "--against", DDP_DEFERRED])
    told = " ".join(capsys.readouterr().out.split())
    assert all(told.count(f"{AS_BENCHED}, {HF}: {words}") == 1 for words in changes)


def test_a_run_in_which_nothing_is_changed_has_no_notes(tmp_path: Path) -> None:
    """Nor is anything known of a backend that is not one of the bench's."""
    folder = write_run(tmp_path / "run", {DDP_DEFERRED: 1.0, FSDP2: 0.8}, repeats=6, twin=False)
    for name, text in texts_by_place(folder).items():
        assert "note" not in text.split() and "docs/settings.md)" not in text, name


def test_notes_on_a_backend_are_short_and_hold_on_its_device() -> None:
    found: dict[str, set[str]] = {}
    for name in built_in():
        for device in Device:
            words = as_benched(make_cell(backend=name, device=device))
            assert all(len(each.split()) <= 12 for each in words), words
            found[f"{name} {device}"] = set(words)
    of_lightning = found["lightning-deepspeed-zero2 cpu"] - found["lightning-deepspeed-zero2 cuda"]
    assert ["DeepSpeedStrategy" in words for words in of_lightning] == [True]
    corrected = found["lightning-deepspeed-zero2-corrected cuda"]
    assert len(corrected - found["lightning-deepspeed-zero2 cuda"]) == 1
    assert any("AdamW" in words for words in found["deepspeed-zero2-defaults-eager cpu"])
    sgd = as_benched(make_cell(backend="deepspeed-zero2-eager", optimizer="sgd"))
    assert not any("AdamW" in words for words in sgd)
    assert found["hf-trainer-ddp cpu"] and found["torchtitan-eager cpu"]
    assert not found["fsdp2-eager cpu"] | found["fsdp2-eager cuda"] | found["ddp-eager cpu"]
