"""What is published, held against the journals by code that imports nothing of the bench."""

from __future__ import annotations

import csv
import fnmatch
import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.recomputed import (
    ROOT,
    UNITS,
    Groups,
    Interval,
    Run,
    pool_of,
    shows,
    shows_interval,
    shows_size,
)
from tests.sentences import MIB, RULES, as_expected, compiled

RUNS = ("cpu", "popular", "curves", "h100-1b")
POOLED = {name: pool_of(name) for name in ("cpu", "popular")}
"""The other runs in the reports of a run, and in README."""
CITED = {
    "cpu": ("fsdp2-deferred N=8 W=2 fp32", "fsdp2-eager N=8 W=2 fp32"),
    "popular": ("lightning-ddp N=4 W=2 fp32",),
}
TOLD = {
    "cpu": ("\nMatrix [cpu]", "\n### ", "at N = 8"),
    "h100-1b": ("\n> **On one H100**", "\nMatrix [", "at N = 4"),
}
"""Between which words README tells of a run, and of which cells."""
LEFT_OVER = re.compile(
    r"(?<![A-Za-z\d])\d[\d.]*|\b(?:fast(?:er|est)|slow(?:er|est)|saves?|costs?|cuts|least|less|more|most|fewer|short(?:er|est)"
    r"|long(?:er|est)|larger|largest|smaller|smallest|wider|widest|better|best|worse|worst|times|twice|half"
    r"|indistinguishable|undecided|invalid)\b",
    re.IGNORECASE,
)


def audit(run: Run, body: str, where: str) -> list[str]:
    """What the journal does not bear out in a text, and what no rule accounts for."""
    errors, rest = [], body
    for pattern, check in RULES:
        for match in compiled(pattern, run).finditer(body):
            try:
                right = check(
                    run,
                    body + where,
                    {name: text or "" for name, text in match.groupdict().items()},
                )
            except (LookupError, ValueError):  # it names no cell, or one that has no such number
                right = False
            errors += [] if right else [f"'{match[0]}' is wrong in: {body}"]
            rest = rest[: match.start()] + " " * len(match[0]) + rest[match.end() :]
    return errors + [
        f"'{left[0]}' is not accounted for in: {body}" for left in LEFT_OVER.finditer(rest)
    ]


@cache
def run_of(name: str) -> Run:
    return Run(name, POOLED.get(name, ()))


def plain(text: str) -> str:
    return " ".join(re.sub(r"[*`]|\[([^]]*)\]\([^)]*\)", r"\1", text).split())


Source = Callable[[str], Iterator[tuple[str, str]]]


def of_report(name: str) -> Iterator[tuple[str, str]]:
    """The items of a report, all about the group of its first one, and the texts between its tables."""
    text = (ROOT / "results" / name / "report.md").read_text(encoding="utf-8")
    text = re.sub(r"\n  ```sh\n +(.*)\n  ```", r" \1", re.sub(r"(?m)^(\|.*|```.*)\n", "\n", text))
    parts = [plain(part) for part in re.split(r"\n(?=- )|\n\n+", text)]
    where = next((found[0] for part in parts if (found := re.search(r"at N=.*", part))), "")
    yield from ((part, where) for part in parts)


def of_plots(name: str) -> Iterator[tuple[str, str]]:
    """Titles and notes of the figures, as their files hold them."""
    paths = sorted((ROOT / "plots" / name).glob("*.png"))
    assert paths, name
    for path in paths:
        data, at, words = path.read_bytes(), 8, {}
        while at < len(data):
            (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
            if kind in (b"tEXt", b"iTXt"):
                key, _, value = data[at + 8 : at + 8 + size].partition(b"\0")
                words[key] = value.split(b"\0")[-1].decode(
                    "latin-1" if kind == b"tEXt" else "utf-8"
                )
            at += 12 + size
        yield from ((plain(words[key]), words[b"Title"]) for key in (b"Title", b"Description"))


def of_readme(name: str) -> Iterator[tuple[str, str]]:
    """What it says of a run."""
    whole = (ROOT / "README.md").read_text(encoding="utf-8")
    first, last, where = TOLD[name]
    _, begin, rest = whole.partition(first)
    text, end, _ = rest.partition(last)
    assert begin and end, f"README has no part on {name}"
    text = re.sub(r"(?m)^> ", "", text)
    yield from ((plain(part.lstrip("\n!")), where) for part in re.split(r"\n(?=- )|\n\n+", text))


def places(name: str) -> list[str]:
    """The folders of a run and of those that are pooled with it."""
    return [f"results/{each}" for each in (name, *POOLED.get(name, ()))]


def of_citations(name: str) -> Iterator[tuple[str, str]]:
    command = [sys.executable, "-m", "bench", "cite", *places(name), *CITED[name]]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    _, title, text = printed.partition("Plain text:")
    assert title, printed
    yield from ((plain(part), CITED[name][0]) for part in text.split("\n"))


SOURCES: list[tuple[Source, str]] = [
    (source, name) for source in (of_report, of_plots) for name in RUNS
]
SOURCES += [*((of_readme, name) for name in TOLD), *((of_citations, name) for name in CITED)]


@pytest.mark.parametrize(("source", "name"), SOURCES)
def test_what_is_published_follows_from_the_journal(source: Source, name: str) -> None:
    parts = list(source(name))
    assert any(re.search(r"\d", body) for body, _ in parts)
    errors = [error for body, where in parts for error in audit(run_of(name), body, where)]
    assert not errors, "\n".join(errors)


def rows_of(path: Path) -> Iterator[tuple[str, Groups]]:
    """The rows of a page's tables with their heading; the second of two columns of a name has a mark."""
    heading, columns = "", list[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("#"):
            heading = line
        elif line.startswith("| backend |"):
            columns = [f"{cell}'" if cell in cells[:at] else cell for at, cell in enumerate(cells)]
        elif line.startswith("| ") and "---" not in line and len(cells) == len(columns):
            yield heading, dict(zip(columns, cells, strict=True))


def row_is_right(run: Run, heading: str, row: Groups) -> bool:
    cell = run.find(row["backend"], heading)
    base = run.partner(cell, run.baseline)
    verdict = "baseline" if cell is base else run.verdict(cell, base)
    told = row["correct?"], row["n"], row.get("verdict", verdict)
    if not run.is_correct(cell):
        numbers = set(row) - {"backend", "verdict", "n", "correct?", "note"}
        is_blank = {row[column] for column in numbers} <= {"-"}
        return is_blank and told == (run.outcome(cell), "0", verdict)
    if cell is not base and run.may_differ(cell, base):
        verdict += ", may differ"
    right = told == (run.outcome(cell), str(len(run.times(cell))), verdict)
    right = right and shows_size(row["memory"], run.memory(cell))
    if "MFU" in row:
        right = right and shows(row["tokens/s per GPU"], run.tokens(cell))
        right = right and shows(row["MFU"].removesuffix(" %"), 100 * run.mfu(cell))
        right = right and shows_size(row["reserved"], run.allocated(cell, "reserved"))
    of_memory = "ratio'" if "s/step" in row else "ratio"
    right = right and shows(row[of_memory], run.memory(cell) / run.memory(base))
    if row.get("next run", "-") != "-":
        low, _, high = row["next run"].partition("-")
        right = right and shows_interval(run.ratio(cell, base), {"nlow": low, "nhigh": high}, 0)
    for centre, ends, found in (
        ("s/step", "95 %", run.time(cell)),
        ("ratio", "95 %'", run.ratio(cell, base)),
    ):
        if "s/step" in row:
            low, _, high = row[ends].partition("-")
            right = right and shows_interval(found, {"x": row[centre], "low": low, "high": high}, 0)
    return right and ("s/step" not in row or cell is base or row["95 %'"] != "-")


@pytest.mark.parametrize("name", RUNS)
def test_every_row_of_a_table_follows_from_the_journal(name: str) -> None:
    rows = list(rows_of(ROOT / "results" / name / "report.md"))
    assert (
        rows
        and [row for heading, row in rows if not row_is_right(run_of(name), heading, row)] == []
    )


def test_every_row_on_the_h100_follows_from_the_journal() -> None:
    """The table of docs/gpu.md."""
    run, gib = run_of("h100-1b"), UNITS["GiB"]
    rows = [row for heading, row in rows_of(ROOT / "docs" / "gpu.md") if "1.2 G" in heading]
    assert {row["backend"] for row in rows} == {cell["backend"] for cell in run.cells}
    for row in rows:
        cell = run.find(row["backend"], "N = 4")
        assert shows(row["peak (GiB)"], run.allocated(cell) / gib), row
        predicted = run.about["predicted"]["peak_bytes"][cell["id"]]
        assert shows(row["predicted"], predicted / gib), row
        if not run.is_correct(cell):
            assert row["s/step"] == run.outcome(cell)
            continue
        times = [math.exp(time) for time in run.times(cell).values()]
        assert shows(row["s/step"], math.exp(run.time(cell).centre)), row
        assert shows(row["slowest / fastest trial"], max(times) / min(times)), row
        assert shows(row["GPU busy (s)"], run.first(cell, "exposure")["compute_s"]), row
        assert shows(row["host's CPU time (s)"], run.first(cell, "dispatch")["cpu_s"]), row


Point = dict[str, str]
"""A row of the data of a figure."""


def points_of(name: str) -> Iterator[tuple[str, Point]]:
    for path in sorted((ROOT / "plots" / name).glob("*.csv")):
        with path.open(encoding="utf-8") as file:
            yield from ((path.stem, row) for row in csv.DictReader(file))


def point_is_right(run: Run, figure: str, point: Point) -> bool:
    cells = {cell["id"]: cell for cell in run.everything}
    known: dict[str, float] = {}
    if figure == "step_time_ratio":
        cell, base = cells[point["cell_id_b"]], cells[point["cell_id_a"]]
        if run.is_correct(cell):
            known = told_of(run.ratio(cell, base), ("ratio", "low", "high"))
            known |= {
                "peak_memory_b_bytes": run.memory(cell),
                "peak_memory_a_bytes": run.memory(base),
            }
        verdict = f"{point['verdict']}: {point['reason']}"
        return verdict.startswith(run.verdict(cell, base)) and as_told(point, known)
    cell = cells[point["cell_id"]]
    if "repeat" in point:
        time, centre = run.times(cell)[int(point["repeat"])], run.time_alone(cell).centre
        known = {
            "step_time_s": math.exp(time),
            "deviation_percent": 100 * math.expm1(time - centre),
        }
    elif "loss" in point:
        step, truth = int(point["step"]), run.reference(cell)
        losses = [run.first(each, "time")["losses"][step] for each in (cell, truth)]
        known = {
            "loss": losses[0],
            "reference_loss": losses[1],
            "deviation": abs(losses[0] - losses[1]),
        }
    elif figure == "communication":
        sent = dict.fromkeys(SENT, 0)
        for row in run.first(cell, "collectives"):
            sent[row["op"]] += row["payload_bytes"]
        known = sent | {"payload_bytes": run.handed(cell), "other": 0}
    elif run.is_correct(cell):
        known = told_of(run.time(cell), ("step_time_s", "step_time_low_s", "step_time_high_s"))
        memory = run.first(cell, "memory")
        known |= {"peak_memory_bytes": run.memory(cell), "live_bytes": memory["peak"]}
        known |= {key.removeprefix("peak_"): memory[key] for key in memory}
    return as_told(point, known)


SENT = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def told_of(time: Interval, columns: tuple[str, str, str]) -> dict[str, float]:
    logs = zip(columns, (time.centre, time.low, time.high), strict=True)
    return {column: math.exp(log) for column, log in logs if not math.isnan(log)}


BLANK = ("ratio", "step_time_s", "peak_memory_bytes")
"""Columns of numbers that only correct cells have."""


def as_told(point: Point, known: dict[str, float]) -> bool:
    """Whether a row has these numbers, and where they are not known none."""
    if any(point.get(column) for column in BLANK if column not in known):
        return False
    told = {column: float(text) for column, text in point.items() if text and column in known}
    return all(
        math.isclose(
            number,
            known[column],
            rel_tol=1e-6,
            abs_tol=1e-6 if column.endswith("percent") else 1e-12,
        )
        for column, number in told.items()
    )


@pytest.mark.parametrize("name", RUNS)
def test_the_data_of_every_figure_follows_from_the_journal(name: str) -> None:
    points = list(points_of(name))
    wrong = [
        (figure, point)
        for figure, point in points
        if not point_is_right(run_of(name), figure, point)
    ]
    assert points and not wrong, wrong[:3]


MEASURED = re.compile(
    "ratio|low|high|step_time.*|deviation.*|loss|reference_loss|.*_bytes|verdict"
    "|parameters_.*|gradients_.*|optimizer_state|activations|temporaries|all_.*|reduce_scatter"
)


@pytest.mark.parametrize("name", RUNS)
def test_a_changed_number_of_a_figure_is_found(name: str) -> None:
    """The first digit of each that is not 0, and each verdict."""
    num_changed = 0
    for figure, point in points_of(name):
        for column in filter(MEASURED.fullmatch, point):
            value = re.sub(r"[1-9]", lambda m: str(int(m[0]) % 9 + 1), point[column], count=1)
            value = SWAPPED.get(value, value)
            is_known = run_of(name).is_correct(cell_of(run_of(name), point)) or "loss" in point
            if value != point[column] and is_known:
                num_changed += 1
                changed = point | {column: value}
                assert not point_is_right(run_of(name), figure, changed), (figure, column, point)
    assert num_changed > 50


def cell_of(run: Run, point: Point) -> dict[str, Any]:
    key = point.get("cell_id") or point["cell_id_b"]
    return next(cell for cell in run.everything if cell["id"] == key)


@pytest.mark.parametrize("name", [*RUNS, "h100-rest"])
def test_every_number_of_an_export_follows_from_the_journal(name: str, tmp_path: Path) -> None:
    """What the code says today: step times, ratios to every baseline, ends of intervals, and verdicts."""
    command = ["export", f"results/{name}", "--format", "csv", "--out", str(tmp_path)]
    subprocess.run(
        [sys.executable, "-m", "bench", *command], cwd=ROOT, check=True, capture_output=True
    )
    cells, ratios = (
        list(csv.DictReader((tmp_path / f"{frame}.csv").open())) for frame in ("cells", "ratios")
    )
    run = Run(name)
    by_id = {cell["id"]: cell for cell in run.everything}
    assert {row["cell_id"] for row in cells} == by_id.keys()
    is_timed_by_events = run.everything[0]["device"] == "cuda"
    near = 1e-6 if is_timed_by_events else 1e-9  # the times of CUDA events are fp32

    def follows(interval: Interval, *told: str) -> bool:
        logs = (interval.centre, interval.low, interval.high)
        pairs = [(float(text), math.exp(log)) for text, log in zip(told, logs, strict=True) if text]
        return all(math.isclose(*pair, rel_tol=near) for pair in pairs) and len(pairs) == (
            1 if math.isnan(interval.low) else 3
        )

    timed = [row for row in cells if row["comparable"] == "True"]
    for row in timed:
        cell = by_id[row["cell_id"]]
        assert follows(
            run.time(cell), row["step_time_s"], row["step_time_low_s"], row["step_time_high_s"]
        ), row
        assert row["num_ok"] == str(len(run.times(cell)))
    assert timed and ratios
    for row in ratios:
        base, cell = by_id[row["cell_id_a"]], by_id[row["cell_id_b"]]
        found, verdict = run.ratio(cell, base), run.verdicts(base["backend"])[cell["id"]]
        if row["verdict"] != "not comparable":
            assert follows(found, row["ratio"], row["low"], row["high"]), row
            verdict = "ambiguous: few trials" if math.isnan(found.low) else verdict
        assert f"{row['verdict']}: {row['reason']}".startswith(verdict.removesuffix(": gate")), (
            row,
            verdict,
        )


def held(record: dict[str, Any], use: str) -> int:
    """Bytes between two micro-batches."""
    return sum(size for key, size in record["memory"].items() if key.startswith(f"held_{use}"))


def sent(record: dict[str, Any]) -> str:
    """Calls, operations and MiB, as the page has them: those of at least 0.05 MiB."""
    texts = []
    for row in sorted(
        record["collectives"], key=lambda row: (row["op"], row["dtype"], row["group"])
    ):
        if row["payload_bytes"] < 0.05 * MIB:
            continue
        dtype = "" if row["dtype"] == "float32" else f" of {row['dtype']}"
        ranks = "" if row["group"] == "world" else f" ({row['group']})"
        texts.append(f"{row['calls']} {row['op']}{dtype}{ranks} {row['payload_bytes'] / MIB:.1f}")
    return "<br>".join(texts)


def members(names: str, known: Collection[str]) -> Iterator[str]:
    """The backends that a cell names; those that match a pattern such as ```accelerate-*``` as one."""
    for name in names.split(", "):
        if name.startswith("`"):
            yield from fnmatch.filter(known, name.strip("`"))
        else:
            yield name


def test_the_page_on_bytes_follows_from_the_journals() -> None:
    """Collectives, and what is held, in real and virtual worlds and on fake tensors."""
    records: dict[tuple[str, int, int], dict[str, Any]] = {}
    for name in ("bytes", "bytes-8b"):
        for trial in (
            json.loads(line)
            for line in (ROOT / "results" / name / "trials.jsonl").open(encoding="utf-8")
        ):
            cell = trial["cell"]
            if not cell["twin"]:
                place = (
                    cell["backend"],
                    cell["accumulate"],
                    cell["world_size"] * (1 if name == "bytes" else -1),
                )
                records.setdefault(place, trial)
    compared = 0
    for heading, row in rows_of(ROOT / "docs" / "memory-and-bytes.md"):
        expected: dict[str, str] = {}
        for backend in members(row["backend"], {name for name, _, _ in records}):
            if heading.startswith("## Collectives"):
                expected = {"N = 4": sent(records[backend, 4, 4])}
            elif heading.startswith("## Gradients held"):
                worlds = {
                    column: int(column.split()[3].strip(",")) for column in row if "W = " in column
                }
                known = {column: records.get((backend, 4, size)) for column, size in worlds.items()}
                expected = {
                    c: f"{held(trial, 'gradients') / MIB:.2f}" if trial else "-"
                    for c, trial in known.items()
                }
            elif heading.startswith("## At scale"):
                uses = ("parameters", "gradients", "optimizer_state")
                for column in row:
                    if column.startswith("W = "):
                        trial = records[backend, 2, -int(column.removeprefix("W = "))]
                        sizes = (f"{held(trial, use) / 2**30:.2f}" for use in uses)
                        expected[column] = ", ".join(sizes)
            assert expected == {column: row[column] for column in expected}, (heading, backend)
            compared += sum(len(re.findall(r"\d+(?:\.\d+)?", text)) for text in expected.values())
    assert compared > 280


SWAPPED = {
    "faster": "slower",
    "slower": "faster",
    "fastest": "slowest",
    "less": "more",
    "saves": "costs",
    "cuts": "adds",
}
SWAPPED |= {
    "Least": "Most",
    "least": "most",
    "shortest": "longest",
    "widest": "narrowest",
    "Next": "Last",
}


@pytest.mark.parametrize(("source", "name"), [s for s in SOURCES if s[0] is not of_citations])
def test_a_changed_number_or_word_is_found(source: Source, name: str) -> None:
    """The first digit of each number, and each comparative word, changed in turn."""
    missed, words = (
        [],
        re.compile(rf"(?<![A-Za-z\d.])\d|(?<![\w-])(?:{'|'.join(SWAPPED)})(?![\w-])"),
    )
    for body, where in source(name):
        for found in words.finditer(body):
            other = SWAPPED.get(found[0]) or str(int(found[0]) % 9 + 1)
            changed = body[: found.start()] + other + body[found.end() :]
            if not audit(run_of(name), changed, where):
                missed.append(f"{found[0]} -> {other} in: {changed}")
    assert not missed, "\n".join(missed)


def test_the_recomputation_imports_nothing_of_the_bench() -> None:
    for name in ("recomputed", "sentences", "test_recomputation"):
        text = (ROOT / "tests" / f"{name}.py").read_text(encoding="utf-8")
        imported = re.findall(r"^(?:from|import) (\w+)(?:\.(\w+))?", text, re.MULTILINE)
        assert "bench" not in {top for top, _ in imported}
        assert {module for top, module in imported if top == "tests"} <= {"recomputed", "sentences"}


@pytest.mark.parametrize("name", RUNS)
def test_a_changed_cell_of_a_table_is_found(name: str) -> None:
    """The first digit of each cell, or its verdict."""
    for heading, row in rows_of(ROOT / "results" / name / "report.md"):
        for column in set(row) - {"backend"}:
            value = re.sub(r"\d", lambda m: str(int(m[0]) % 9 + 1), row[column], count=1)
            value = {"slower": "faster", "ambiguous: wide interval": "same", "yes": "invalid"}.get(
                value, value
            )
            if value != row[column]:
                assert not row_is_right(run_of(name), heading, row | {column: value}), (
                    heading,
                    row,
                    column,
                )


def interval_pattern(prefix: str) -> str:
    return rf"(?P<{prefix}low>[\d.]+)-(?P<{prefix}high>[\d.]+)"


ELSEWHERE_RUN = re.compile(
    r"^\| \[(?P<name>[\w-]+)\]\(\.\./results/(?P<folder>elsewhere/cpu/[\w-]+)/run\.json\) "
    r"\| (?P<processor>[^|]+), (?P<cores>\d+) cores \| (?P<expected>\d+) "
)
ELSEWHERE_ROW = re.compile(
    rf"^\| (?P<cell>[\w-]+) / (?P<base>[\w-]+) \| (?P<x>[\d.]+) \({interval_pattern('')}\) "
    rf"\| {interval_pattern('n')} \| (?P<there>.*) \|$"
)
ELSEWHERE_RATIO = re.compile(rf"(?P<x>[\d.]+) \({interval_pattern('')}\)(?P<outside>, outside)?")


def test_ratios_on_another_processor_follow_from_the_journals() -> None:
    """Of docs/statistics.md: each row, and how many ratios are where the kept runs expect a next one."""
    text = (ROOT / "docs" / "statistics.md").read_text(encoding="utf-8")
    part = text.partition("\n## On other processors\n")[2].partition("\n## ")[0]
    kept = run_of("cpu")
    runs = {}
    rows = 0
    for line in part.splitlines():
        if named_run := ELSEWHERE_RUN.match(line):
            runs[named_run["name"]] = there = Run(named_run["folder"])
            assert int(named_run["expected"]) == sum(as_expected(kept, there)), line
            machine = there.about["machine"]
            assert named_run["processor"] == machine["cpu"], line
            assert int(named_run["cores"]) == machine["cores"], line
        elif row := ELSEWHERE_ROW.match(line):
            named = row.groupdict()
            cell, base = (kept.find(named[side], "N=8 W=2") for side in ("cell", "base"))
            of_kept = kept.ratio(cell, base)
            assert shows_interval(of_kept, named, 0), line
            ratios = named["there"].split(" | ")
            for there, text_there in zip(runs.values(), ratios, strict=True):
                again = ELSEWHERE_RATIO.fullmatch(text_there)
                of_there = there.ratio(cell, base)
                assert again and shows_interval(of_there, again.groupdict(), 0), line
                is_within = of_kept.next_low <= of_there.centre <= of_kept.next_high
                assert bool(again["outside"]) != is_within, line
            rows += 1
    assert f"| step times | kept runs | next run | {' | '.join(runs)} |" in part
    assert rows and rows + len(runs) == part.count("\n| ") - 4
