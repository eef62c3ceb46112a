from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench.cli import main
from bench.judge.loading import Run
from bench.judge.pairs import ComparedPair, judge_pairs, pairs_of_backends
from bench.judge.pool import Pool
from bench.judge.verdicts import Reason, Verdict
from bench.plan.cell import Cell
from bench.run.journal import JOURNAL, MANIFEST, Journal, encode, write_document
from tests.factories import PEAK_BYTES, judged_run, make_cell, make_failure, make_manifest
from tests.pages import Changes, records_of, write

EAGER, DEFERRED = make_cell(backend="ddp-eager", timed_windows=8), make_cell(timed_windows=8)
Speeds = Mapping[Cell, float]
DAYS = {"first": 0.5, "second": 1.0}
"""Names of runs, and the seconds of a step."""


def records(
    speeds: Speeds, trials: int = 12, seed: int = 0, changes: Changes = lambda *_: {}
) -> list[dict[str, Any]]:
    return records_of(speeds, trials, noise=0.005, seed=seed, changes=changes)


def make_run(
    speeds: Speeds, changes: Changes = lambda *_: {}, failed: Sequence[dict[str, Any]] = ()
) -> Run:
    return judged_run([*records(speeds, changes=changes), *failed], make_manifest())


def judged(run: Run, **options: Any) -> list[ComparedPair]:
    pool = Pool(runs=(run,))
    return judge_pairs(pool, pool, pairs_of_backends(run, "ddp-eager", "ddp-deferred"), **options)


def memory(size: int) -> dict[str, Any]:
    return {"memory": {"peak": size, "held": 2**20}}


@pytest.fixture
def two(tmp_path: Path) -> tuple[str, str]:
    """Three runs in a folder, and one of the same cells, in which a backend takes 5 % longer and needs 10 % more."""
    for seed, day in enumerate(("monday", "tuesday", "friday")):
        write(tmp_path / "old" / day, records({EAGER: 0.5, DEFERRED: 0.4}, seed=10 + seed))
    changes = lambda cell, _: memory(PEAK_BYTES * 11 // 10) if cell == EAGER else {}  # noqa: E731
    second = records({EAGER: 0.525, DEFERRED: 0.4}, seed=1, changes=changes)
    return str(tmp_path / "old"), str(write(tmp_path / "new", second))


def output(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


class TestEvidence:
    def test_memory_is_exact(self) -> None:
        run = make_run(
            {EAGER: 0.5, DEFERRED: 0.5}, changes=lambda c, _: memory(PEAK_BYTES + (c == DEFERRED))
        )
        (row,) = judged(run, thresholds={"memory": 0.0})
        assert row.regressions == ("memory",) and row.memory == (PEAK_BYTES, PEAK_BYTES + 1)
        assert judged(run, thresholds={"memory": 0.02})[0].regressions == ()
        assert row.steps == (DEFERRED.windows, DEFERRED.windows)

    def test_a_failed_gate_is_not_comparable(self) -> None:
        wrong = {"update": {"error": 0.5, "scale": 0.25, "residual": 1e-7}}
        run = make_run(
            {EAGER: 0.5, DEFERRED: 0.6}, changes=lambda c, _: wrong if c == DEFERRED else {}
        )
        (row,) = judged(run, thresholds={"slower": 0.05, "memory": 0.0})
        assert (row.verdict, row.reason) == (Verdict.NOT_COMPARABLE, Reason.GATE)
        assert (
            row.time is None
            and row.memory == (None, None)
            and row.unchecked == ("slower", "memory")
        )


class TestCommand:
    def test_two_runs(self, two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compare", *two]) == 0
        text = output(capsys)
        assert (
            "no A/A pair on both sides" in text
            and "the runs were made at different times" in text
            and "DIFFERENT" not in text
        )
        assert "ddp-eager N=4 W=2 fp32 ambiguous 1.0" in text and "reference" not in text

    @pytest.mark.parametrize(
        ("fail_on", "status"),
        [
            ("slower=2%", 1),
            ("slower=0.02", 1),
            ("slower=8%", 0),
            ("memory=2%", 1),
            ("slower=8%,memory=20%", 0),
        ],
    )
    def test_exit_status(
        self, two: tuple[str, str], fail_on: str, status: int, capsys: Any
    ) -> None:
        assert main(["compare", *two, "--fail-on", fail_on]) == status
        text = output(capsys)
        assert ("REGRESSED" in text) == bool(status) and (
            "1 of 2 cells regressed: ddp-eager" in text
        ) == bool(status)

    def test_a_busy_cpu_leaves_times_unchecked_and_no_bytes(
        self, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "150")
        host = {"host": {"num_cpus": 4, "foreign_cores": 2.0, "stolen_cores": 0.0}}

        def busy(name: str, size: int) -> str:
            return str(
                write(
                    tmp_path / name,
                    records({EAGER: 0.5}, changes=lambda *_: memory(size) | {"time": host}),
                )
            )

        a, b, c = busy("a", PEAK_BYTES), busy("b", PEAK_BYTES * 11 // 10), busy("c", PEAK_BYTES + 4)
        assert main(["compare", a, c, "--fail-on", "slower=5%"]) == 3
        text = output(capsys)
        assert "1 NOT CHECKED: ddp-eager" in text and "(exit status 3)" in text
        assert main(["compare", a, c, "--fail-on", "slower=5%", "--allow-unchecked"]) == 0
        assert main(["compare", a, c, "--fail-on", "memory=2%"]) == 0
        assert main(["compare", a, b, "--fail-on", "memory=2%"]) == 1
        assert "not comparable; REGRESSED - - - 1.1000" in output(capsys)
        assert main(["compare", a, b, "--fail-on", "slower=5%,memory=2%"]) == 1, (
            "a certain regression comes first"
        )

    def test_what_is_missing_in_b_does_not_pass(self, tmp_path: Path, capsys: Any) -> None:
        twin = dataclasses.replace(EAGER, twin="again")
        a = str(write(tmp_path / "a", records({EAGER: 0.5, DEFERRED: 0.5, twin: 0.5})))
        b = str(write(tmp_path / "b", records({EAGER: 0.5, twin: 0.5}, seed=1)))
        assert main(["compare", a, b, "--fail-on", "memory=2%"]) == 3
        text = output(capsys)
        assert "only in A: ddp-deferred N=4 W=2 fp32 gate:" in text and "A/A again" not in text
        assert main(["compare", a, b, "--fail-on", "memory=2%", "--allow-unchecked"]) == 0
        assert main(["compare", b, a, "--fail-on", "memory=2%"]) == 0, (
            "more than was asked for is no harm"
        )

    def test_what_newly_fails_in_b_does_not_pass(self, tmp_path: Path, capsys: Any) -> None:
        good = records({EAGER: 0.5})
        slow = [
            record
            for record in good
            if record["repeat"] < 11 or record["cell"]["backend"] == "reference"
        ]
        a = str(write(tmp_path / "a", good))
        b = str(write(tmp_path / "b", [*slow, make_failure(EAGER, 11, "timeout", "took too long")]))
        for more in ([], ["--allow-unchecked"]):
            assert main(["compare", a, b, "--fail-on", "memory=2%", *more]) == 3
            assert "ddp-eager N=4 W=2 fp32 (timeout, 11 of 12 ok)" in output(capsys)
        assert main(["compare", b, a, "--fail-on", "memory=2%"]) == 0
        assert main(["compare", a, b]) == 0, "without a gate it is only told"
        capsys.readouterr()
        assert main(["compare", a, b, "--json", "--fail-on", "memory=2%"]) == 3
        facts = json.loads(capsys.readouterr().out)
        assert (
            facts["gate"] == "unchecked"
            and len(facts["newly_failed"]) == 1
            and not facts["regressed"]
        )

    def test_two_single_runs_of_an_unknown_machine_decide_nothing(
        self, tmp_path: Path, capsys: Any
    ) -> None:
        """Twice as slow: it may have been the day."""
        a, b = (
            str(write(tmp_path / name, records({EAGER: s}, seed=i)))
            for i, (name, s) in enumerate(DAYS.items())
        )
        assert main(["compare", a, b, "--fail-on", "slower=5%"]) == 3
        told = output(capsys)
        assert "is not known" in told and "is not in any interval" in told
        assert "allow for what" not in told
        known = {"machine": {"cpu": "AMD EPYC", "cores": 2}}
        c, d = (
            str(write(tmp_path / f"known-{name}", records({EAGER: s}, seed=i), **known))
            for i, (name, s) in enumerate(DAYS.items())
        )
        assert main(["compare", c, d, "--fail-on", "slower=5%"]) == 0, (
            "days differ by as much on these machines"
        )

    def test_a_run_against_itself(
        self, two: tuple[str, str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["compare", two[0], two[0]]) == 0
        assert "the same run, friday" in capsys.readouterr().out
        assert main(["compare", two[0], two[0], "--fail-on", "slower=5%"]) == 3

    def test_one_table_that_fits_the_terminal(
        self, two: tuple[str, str], capsys: Any, monkeypatch: Any
    ) -> None:
        for columns, headers in (
            (60, "time B/A memory B/A"),
            (150, "time B/A 95 % interval n memory B/A steps reason"),
        ):
            monkeypatch.setenv("COLUMNS", str(columns))
            assert main(["compare", *two]) == 0
            lines = capsys.readouterr().out.splitlines()
            (header,) = (number for number, line in enumerate(lines) if " verdict " in line)
            assert " ".join(lines[header].split()) == f"cell verdict {headers}"
            assert max(map(len, lines[header : header + 3])) <= columns
            assert [line.split()[0] for line in lines[header + 1 : header + 3]] == [
                "ddp-deferred",
                "ddp-eager",
            ]

    def test_json(self, two: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["compare", *two, "--json", "--fail-on", "slower=2%", "--margin", "3%"]) == 1
        facts = json.loads(capsys.readouterr().out)
        assert (
            facts["regressed"]
            and facts["margin"] == 0.03
            and facts["thresholds"] == {"slower": 0.02}
        )
        assert [c["regressions"] for c in facts["cells"]] == [[], ["slower"]]
        assert facts["a"] == {"run_id": "friday", "backend": None} and facts["fingerprint"] == []

    def test_different_fingerprints_are_one_loud_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        a = write(tmp_path / "a", records({EAGER: 0.5}))
        b = write(tmp_path / "b", records({EAGER: 0.5}, seed=1), packages={"torch": "2.12.0"})
        assert main(["compare", str(a), str(b)]) == 0
        warning = (
            "WARNING: DIFFERENT MACHINES OR SOFTWARE, so a ratio may have nothing to do with the "
            'code: packages.torch: A "2.11.0", B "2.12.0"'
        )
        assert warning in capsys.readouterr().out.splitlines()

    @pytest.mark.parametrize(
        ("memory", "is_another"),
        [(25_276_514_304, False), (25_176_502_016, True)],
        ids=["another start of the machine", "another machine"],
    )
    def test_memory_that_differs_by_less_than_a_thousandth_is_the_same(
        self, memory: int, is_another: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        a = write(tmp_path / "a", records({EAGER: 0.5}), machine={"memory_bytes": 25_276_502_016})
        b = write(tmp_path / "b", records({EAGER: 0.5}, seed=1), machine={"memory_bytes": memory})
        assert main(["compare", str(a), str(b)]) == 0
        assert ("DIFFERENT MACHINES" in capsys.readouterr().out) == is_another

    def test_other_precisions_have_no_partner(self, tmp_path: Path, capsys: Any) -> None:
        a = str(write(tmp_path / "a", records({make_cell(): 0.5})))
        b = str(write(tmp_path / "b", records({make_cell(accumulation_dtype="bf16"): 0.5}, seed=1)))
        assert main(["compare", a, b]) == 2
        assert "no common cell; " in capsys.readouterr().err

    def test_out(self, two: tuple[str, str], tmp_path: Path) -> None:
        out = tmp_path / "out" / "deep"
        assert main(["compare", *two, "--out", str(out)]) == 0
        assert sorted(path.name for path in out.iterdir()) == [
            "compare.md",
            "compare.parquet",
            "compare.png",
        ]
        frame = pd.read_parquet(out / "compare.parquet")
        assert (
            list(frame["backend_b"]) == ["ddp-deferred", "ddp-eager"]
            and frame["ratio"].dtype == "Float64"
        )
        page = (out / "compare.md").read_text()
        assert "![" in page and "no A/A pair on both sides" in page and str(tmp_path) not in page


class TestBadInput:
    @pytest.fixture
    def run(self, tmp_path: Path) -> str:
        return str(write(tmp_path / "run", records({EAGER: 0.5, DEFERRED: 0.5}, 2), finished=None))

    def fails(self, capsys: Any, words: str, *arguments: str) -> None:
        capsys.readouterr()
        assert main(["compare", *arguments]) == 2
        found = capsys.readouterr()
        assert found.out == "" and found.err.count("\n") == 1 and words in found.err, found.err

    def test_folders(self, run: str, tmp_path: Path, capsys: Any) -> None:
        (tmp_path / "empty").mkdir()
        self.fails(capsys, "holds no run", str(tmp_path / "empty"), run)
        self.fails(capsys, "holds no run", run, str(tmp_path / "nowhere"))
        self.fails(capsys, "is one run; name a second one", run)
        self.fails(capsys, "--allow-unchecked: is for a gate", run, run, "--allow-unchecked")
        self.fails(
            capsys,
            "is the same run as",
            run,
            run,
            "--backend",
            "ddp-eager",
            "--against",
            "ddp-deferred",
        )
        self.fails(capsys, "is a third run, and two are compared", run, run, run)
        (tmp_path / "file").write_text("")
        other = str(write(tmp_path / "other", records({EAGER: 0.5, DEFERRED: 0.5}, 2, seed=1)))
        self.fails(capsys, "--out", run, other, "--out", str(tmp_path / "file" / "x"))

    def test_journals(self, run: str, capsys: Any) -> None:
        path = Path(run) / JOURNAL
        good = path.read_text()
        lines = good.splitlines(keepends=True)
        path.write_text(lines[0] + lines[1][:40] + "\n" + "".join(lines[2:]))
        self.fails(capsys, f"{JOURNAL}:2: is not a JSON object", run, run)
        edited = lines[1].replace('"accumulate":4', '"accumulate":2')
        path.write_text(lines[0] + edited + "".join(lines[2:]))
        self.fails(capsys, f"{JOURNAL}:2: is not", run, run)

        def signed(record: dict[str, Any]) -> str:
            return encode({k: v for k, v in record.items() if k != "sha256"}).decode()

        path.write_text(lines[0] + signed(json.loads(edited)) + "".join(lines[2:]))
        self.fails(capsys, "trial 2 was edited", run, run)
        record = json.loads(lines[1])
        path.write_text(lines[0] + signed({k: v for k, v in record.items() if k != "status"}))
        self.fails(capsys, "trial 2 was edited: status is missing", run, run)
        path.write_text("")
        self.fails(capsys, "holds no trial", run, run)
        path.write_text(good[:-50])
        assert (
            Journal(Path(run)).read() and main(["compare", run, run]) == 0
        )  # a run that goes on may end so
        manifest = json.loads((Path(run) / MANIFEST).read_text())
        write_document(Path(run), manifest | {"finished": "2025-01-01T00:00:00+00:00"})
        self.fails(capsys, "is truncated", run, run)
        path.write_text(good)
        write_document(Path(run), manifest | {"matrix": {}})
        self.fails(capsys, f"{MANIFEST}: matrix: device is missing", run, run)
        del manifest["backends"]
        write_document(Path(run), manifest)
        self.fails(capsys, "has no key 'backends'", run, run)
