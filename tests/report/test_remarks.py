"""What has to be said beside numbers is said wherever they are shown, once, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from bench import cli
from bench.backends.base import BF16_AUTOCAST, BF16_PARAMETERS
from bench.judge.analysis import Analysis
from bench.judge.analysis import read as read_frames
from bench.judge.loading import load
from bench.report.citation import cite
from bench.run.journal import read_document, write_document
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
