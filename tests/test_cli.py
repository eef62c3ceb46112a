"""The command line: bad input in one line with status 2, the plan, and whole runs on a fake launcher."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from bench import __version__, cli
from bench import files as bench_files
from bench.backends.plain import DDPDeferred
from bench.cli import main
from bench.errors import BAD, GOOD, INTERRUPTED, WRONG
from bench.judge.remarks import EXPECTED
from bench.launch import gpus as launch_gpus
from bench.launch import launcher as launch_launcher
from bench.launch.launcher import LauncherError
from bench.launch.outcome import Outcome
from bench.plan.cell import Status
from bench.plan.task import Spec
from bench.report import figures
from bench.run import start
from bench.run.journal import Journal, read_manifest, write_manifest
from tests.factories import FakeLauncher, Script, failed, make_rank

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = [
    "reference",
    "ddp-eager",
    "ddp-deferred",
    "fsdp2-eager",
    "fsdp2-deferred",
    "fsdp2-zero2-eager",
    "fsdp2-zero2-deferred",
    "fsdp2-deferred-resident",
    "reference-sharded",
    "deepspeed-zero2-eager",
    "deepspeed-zero3-eager",
    "deepspeed-zero2-deferred",
    "deepspeed-zero3-deferred",
    "lightning-ddp",
    "lightning-fsdp2",
    "lightning-deepspeed-zero2",
    "lightning-deepspeed-zero3",
    "lightning-deepspeed-zero2-corrected",
    "fabric-fsdp2-deferred",
]
MATRIX = """
device = "cpu"
repeats = 2
[workload]
sequence_length = 32
global_batch_size = 16
[axes]
backend = ["ddp-eager", "ddp-deferred"]
accumulate = [1, 2]
world_size = [2]
"""


@dataclass
class Place:
    """An empty folder to work in, on a machine without GPUs."""

    folder: Path
    capture: pytest.CaptureFixture[str]
    patch: pytest.MonkeyPatch

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def matrix(self, *changes: tuple[str, str]) -> str:
        """Write a small matrix file with parts of its text replaced; its name."""
        text = MATRIX
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        self.write("mine.toml", text)
        return "mine.toml"

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.folder.rglob("*")) if path.is_file()} | {
            str(path): b"" for path in self.folder.rglob("*") if path.is_dir()
        }

    def gpus(self, count: int) -> None:
        found = [{"index": i, "name": "NVIDIA H200", "uuid": f"GPU-{i}", "memory_bytes": 2**37} for i in range(count)]
        self.patch.setattr(launch_gpus, "gpus", lambda: found)

    def call(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        self.capture.readouterr()
        status = main(arguments)
        out, err = self.capture.readouterr()
        return status, out, err

    def refused(self, *arguments: str) -> str:
        """Check that these arguments are refused as all bad input must be; the one line that says why."""
        before = self.files()
        status, out, err = self.call(*arguments)
        assert (status, out) == (WRONG, "")
        assert err.startswith("bench: ") and err.endswith("\n") and err.count("\n") == 1
        assert self.files() == before, "nothing may be written"
        return err


@pytest.fixture
def place(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Place:
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    here = Place(folder, capsys, monkeypatch)
    here.gpus(0)

    def forbidden(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("bad input starts no launcher")

    monkeypatch.setattr(launch_launcher, "Launcher", forbidden)
    return here


CPU = ["--matrix", "cpu"]
BAD_OPTIONS: list[tuple[list[str], str]] = [
    ([*CPU, "--backend", "fsdp2-eagre"], r"--backend: 'fsdp2-eagre' is unknown; did you mean fsdp2-eager\?"),
    ([*CPU, "--backend", "ddp-eager,xyzzy"], r"--backend: 'xyzzy' is unknown; use one of reference, ddp-eager, "),
    ([*CPU, "--backend", ","], r"--backend is \[\]; it must be 'all' or a list of backend names"),
    (["--matrix", "cpuu"], r"--matrix cpuu: unknown; did you mean cpu\?"),
    (["--matrix", "no.toml"], r"--matrix no.toml: cannot be read \(No such file or directory\); name a TOML file"),
    ([*CPU, "--accumulate", "0"], r"--accumulate is \[0\]; it must be a list of integers of at least 1"),
    ([*CPU, "--accumulate", "1,-2"], r"--accumulate is \[1, -2\]; it must be a list of integers of at least 1"),
    ([*CPU, "--accumulate", "abc"], r"--accumulate: 'abc' is not a list of integers such as 1,4,8; see .* --help"),
    ([*CPU, "--accumulate", "1.5"], r"--accumulate: '1.5' is not a list of integers"),
    ([*CPU, "--accumulate"], r"--accumulate: expected one argument; see .* --help"),
    ([*CPU, "--world-size", "0"], r"--world-size is \[0\]; it must be a list of integers of at least 1"),
    ([*CPU, "--repeats", "-3"], r"--repeats is -3; it must be an integer of at least 1"),
    ([*CPU, "--repeats", "0"], r"--repeats is 0; it must be an integer of at least 1"),
    ([*CPU, "--repeats", "many"], r"--repeats: invalid int value: 'many'"),
    ([*CPU, "--seed", "-1"], r"--seed is -1; it must be an integer of at least 0"),
    ([*CPU, "--batch", "0"], r"--batch is 0; it must be an integer of at least 1"),
    ([*CPU, "--batch", "30"], r"--batch is 30, .* = 2 x 2 = 4; the nearest that do: 28 and 32"),
    ([*CPU, "--accumulate", "3"], r"cpu.toml: workload.global_batch_size is 16, .* = 3 x 2 = 6; .* 12 and 18"),
    ([*CPU, "--model", "tinny"], r"--model: 'tinny' is unknown; did you mean tiny\?"),
    ([*CPU, "--workload", "no_such_module:f"], r"--workload: workload 'no_such_module:f': No module named"),
    ([*CPU, "--workload", "json:no_such"], r"--workload: workload 'json:no_such': .* has no attribute 'no_such'"),
    ([*CPU, "--workload", "json"], r"--workload: workload 'json': unknown; use one of llama, 'package.module:factory'"),
    ([*CPU, "--precision", "fp8"], r"--precision is \['fp8'\]; it must be a list of fp32, bf16"),
    ([*CPU, "--optimizer", "adam"], r"--optimizer is \['adam'\]; it must be a list of adamw-foreach, adamw-fused, sgd"),
    ([*CPU, "--clip-norm", "-1"], r"--clip-norm is \[-1.0\]; it must be a list of positive numbers, or 0 for no"),
    ([*CPU, "--clip-norm", "nan"], r"--clip-norm is \[nan\]; it must be a list of positive numbers"),
    ([*CPU, "--clip-norm", "much"], r"--clip-norm: 'much' is not a list of numbers such as 0,1.5; see .* --help"),
    ([*CPU, "--timeout", "0"], r"--timeout is 0.0; it must be a positive number of seconds"),
    ([*CPU, "--timeout", "nan"], r"--timeout is nan; it must be a positive number of seconds"),
    ([*CPU, "--inactivity", "-1"], r"--inactivity is -1.0; it must be a positive number of seconds, or 0 for no limit"),
    ([*CPU, "--corpus", "missing.txt"], r"--corpus missing.txt: cannot be read \(No such file or directory\)"),
    ([*CPU, "--corpus", "empty.txt"], r"--corpus empty.txt: is empty; one sample needs .* = 65 bytes"),
    ([*CPU, "--corpus", "short.txt"], r"--corpus short.txt: has 64 bytes; one sample needs .* = 65 bytes"),
    ([*CPU, "--corpus", "."], r"--corpus .: cannot be read \(Is a directory\)"),
    ([*CPU, "--device", "tpu"], r"--device is 'tpu'; it must be one of cpu, cuda"),
    ([*CPU, "--device", "cuda"], r"--device is 'cuda', and no GPU is visible here; use --matrix cpu"),
    (["--matrix", "gpu"], r"gpu.toml: device is 'cuda', and no GPU is visible here; use --matrix cpu"),
    ([*CPU, "--colour", "red"], r"unrecognized arguments: --colour red; see .* --help"),
    ([*CPU, "stray"], r"unrecognized arguments: stray; see .* --help"),
]


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(("arguments", "words"), BAD_OPTIONS)
def test_bad_options(place: Place, command: str, arguments: list[str], words: str) -> None:
    place.write("empty.txt", "")
    place.write("short.txt", "x" * 64)
    assert re.search(words, place.refused(command, *arguments))


@pytest.mark.parametrize("command", ["run", "plan"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("this is [no TOML", r"bad.toml: is not TOML \(.*line 1"),
        (b"\xff\xfe\x00", r"bad.toml: is not TOML"),
        (MATRIX + "acumulate = [1]\n", r"bad.toml: axes.acumulate is unknown; did you mean axes.accumulate\?"),
        ("repeat = 3\n" + MATRIX, r"bad.toml: repeat is unknown; did you mean repeats\?"),
        (MATRIX.replace("[1, 2]", '"1"'), r"bad.toml: axes.accumulate is '1'; it must be a list of integers"),
        (MATRIX.replace("[1, 2]", "[0]"), r"bad.toml: axes.accumulate is \[0\]; it must be a list of integers"),
        (MATRIX.replace("accumulate = [1, 2]\n", ""), r"bad.toml: axes.accumulate is missing; it must be a list"),
        (MATRIX.replace("ddp-eager", "dpp-eager"), r"bad.toml: axes.backend: 'dpp-eager' is unknown; did you mean"),
        (MATRIX.replace("[2]\n", "[5]\n"), r"bad.toml: workload.global_batch_size is 16, .* the nearest"),
        ("", r"bad.toml: device is missing; it must be one of cpu, cuda"),
    ],
)
def test_bad_matrix_files(place: Place, command: str, content: str | bytes, words: str) -> None:
    place.write("bad.toml", content)
    assert re.search(words, place.refused(command, "--matrix", "bad.toml"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], r"the following arguments are required: COMMAND; see .* --help"),
        (["walk"], r"invalid choice: 'walk' .*run.*plan.*report.*backends"),
        (["--colour"], r"required: COMMAND|unrecognized arguments: --colour"),
        (["report"], r"the following arguments are required: RUN; see .* --help"),
        (["report", "nowhere"], r"nowhere: holds no run \(run.json: No such file or directory\); name a folder under"),
        (["run", "--resume", "nowhere"], r"nowhere: holds no run \(run.json: No such file or directory\)"),
        (["run", "--resume", "."], r"holds no run"),
        (["run", *CPU, "--out", "file"], r"--out file: cannot be written \(.*\); name a folder that can"),
        (["run", *CPU, "--out", "file/below"], r"--out file/below: cannot be written \(.*\); name a folder that can"),
        (["run", *CPU, "--out", "file/far/below"], r"--out file/far/below: cannot be written"),
    ],
)
def test_bad_commands_and_folders(place: Place, arguments: list[str], words: str) -> None:
    place.write("file", "")
    assert re.search(words, place.refused(*arguments))


@pytest.mark.parametrize("command", ["run", "plan"])
def test_more_ranks_than_gpus(place: Place, command: str) -> None:
    place.gpus(2)
    words = "--world-size: 4 ranks need as many GPUs; 2 are visible here"
    assert words in place.refused(command, "--matrix", "gpu", "--world-size", "1,4")


def test_plan_of_a_workload_of_ones_own(place: Place) -> None:
    place.patch.syspath_prepend(str(place.folder))
    place.patch.delitem(sys.modules, "planned_workload", raising=False)
    place.write("planned_workload.py", "def factory(spec): ...\n")
    status, out, _ = place.call("plan", *CPU, "--workload", "planned_workload:factory", "--model", "mine")
    assert status == GOOD
    assert "unknown" in out, "nobody knows how long it takes"


def test_a_reason_of_many_lines_becomes_one(place: Place) -> None:
    place.patch.syspath_prepend(str(place.folder))
    place.write("talkative_workload.py", "raise ImportError('first line\\n\\n  second line')\n")
    place.patch.setattr(sys, "dont_write_bytecode", True)
    assert "first line second line" in place.refused("plan", *CPU, "--workload", "talkative_workload:factory")


def test_resume_takes_no_other_options(place: Place) -> None:
    finished_run(place)
    assert "--repeats" in place.refused("run", "--resume", "out", "--repeats", "9")


@pytest.mark.parametrize(
    "arguments", [["--matrix", "cpu", "--backend", "all"], ["--matrix", "gpu", "--world-size", "all"]]
)
def test_all_can_be_asked_for_by_option(place: Place, arguments: list[str]) -> None:
    place.gpus(2)
    assert place.call("plan", *arguments)[0] == GOOD


def test_plan_shows_cells_skips_and_estimates(place: Place) -> None:
    place.patch.setattr(DDPDeferred, "missing", classmethod(lambda cls, device: "needs x: pip install x"))
    status, out, err = place.call("plan", "--matrix", place.matrix())
    assert (status, err) == (GOOD, "")
    lines = out.splitlines()
    assert len(lines) == 1 + 6 + 1
    assert [line.split()[1] for line in lines[1:-1]] == [
        "reference",
        "ddp-eager",
        "ddp-deferred",
        "ddp-eager",
        "ddp-deferred",
        "ddp-eager",
    ]
    assert lines[6].endswith("A/A twin")
    assert sum(line.endswith("skipped: needs x: pip install x") for line in lines) == 2
    assert re.match(r"\w{12} +ddp-deferred +2 +2 +4  fp32 +[\d.]+ s +\d+ MiB", lines[5])
    assert "6 cells x 2 repeats = 12 trials, 2 cells skipped, about " in lines[-1]
    assert list(place.files()) == [str(place.folder / "mine.toml")]


def test_plan_heeds_every_option(place: Place) -> None:
    place.write("text.txt", "x" * 100)
    options = ["--backend", "ddp-eager", "--backend", "fsdp2-eager,reference", "--accumulate", "3", "--world-size", "1"]
    options += ["--precision", "bf16", "--repeats", "4", "--seed", "1", "--batch", "9", "--model", "135m"]
    options += ["--corpus", "text.txt", "--device", "cpu", "--timeout", "5.5"]
    status, out, _ = place.call("plan", "--matrix", "cpu", *options)
    assert status == GOOD
    rows = [line.split()[1:6] for line in out.splitlines()[1:-1]]
    assert rows == [
        ["reference", "1", "1", "9", "fp32"],
        ["ddp-eager", "3", "1", "3", "bf16"],
        ["fsdp2-eager", "3", "1", "3", "bf16"],
        ["ddp-eager", "3", "1", "3", "bf16"],
    ]
    assert "4 cells x 4 repeats = 16 trials" in out


def test_plan_of_optimizers_and_clips(place: Place) -> None:
    options = ["--optimizer", "adamw-foreach,sgd", "--clip-norm", "0", "--clip-norm", "1,2.5"]
    status, out, _ = place.call("plan", "--matrix", "cpu", "--backend", "ddp-eager", "--accumulate", "4", *options)
    assert status == GOOD
    ids = [line.split()[0] for line in out.splitlines()[1:-2]]
    assert len(set(ids)) == len(ids) == 2 * 2 * 3 + 1


def test_auto_takes_the_matrix_that_fits_the_machine(place: Place) -> None:
    assert "matrix cpu: " in place.call("plan")[1]
    place.gpus(2)
    assert "matrix gpu: " in place.call("plan")[1]


PLAN = """
import sys

started = []
events = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.exec", "os.system")
sys.addaudithook(lambda event, arguments: started.append(event) if event in events else None)
from bench.cli import main
status = main(["plan", "--matrix", "cpu"])
heavy = {"torch", "pandas", "lightning", "deepspeed", "transformers", "matplotlib"}
print(status, sorted(heavy & sys.modules.keys()), started, file=sys.stderr)
"""


def test_plan_imports_no_torch_and_starts_no_process(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PLAN], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stderr.splitlines()[-1] == "0 [] []"
    assert "matrix cpu: " in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_repeats_precision_and_budget(place: Place) -> None:
    name = place.matrix()
    assert "then up to" not in place.call("plan", "--matrix", name)[1], "fixed repeats"
    out = place.call("plan", "--matrix", name, "--max-repeats", "40", "--precision", "5%,bf16", "--budget", "20m")[1]
    assert "x 2 repeats" in out and " bf16 " in out
    assert out.splitlines()[-1] == (
        "then up to 40 repeats of the cells whose intervals are wider than 5 %, as far as 20 min reach"
    )
    assert "x 1 repeat " in place.call("plan", "--matrix", name, "--max-repeats", "1")[1]
    for spelt in ("20min", "20 min", "1200s", "1200 sec"):
        last = place.call("plan", "--matrix", name, "--max-repeats", "40", "--budget", spelt)[1].splitlines()[-1]
        assert last.endswith("as far as 20 min reach"), spelt
    refused = [
        (["--budget", "3 minutes"], "'3 minutes' is not a time above 0 with its unit, such as 90s, 20m or 1h"),
        (["--repeats", "3", "--max-repeats", "2"], "--max-repeats is 2; it must be at least --repeats, 3"),
        (["--precision", "2%,3%"], "--precision: 2% and 3% are two widths; give one"),
        (["--precision", "200%"], "--precision is 2.0; it must be the width of an interval above 0 and below 1"),
        (["--budget", "20"], "'20' is not a time above 0 with its unit, such as 90s, 20m or 1h"),
        (["--baseline", "ddp-eage"], "--baseline: 'ddp-eage' is not run here; did you mean ddp-eager?"),
        (["--fake-tensors"], "--fake-tensors: is for a virtual world; give --virtual-world too"),
        (
            ["--share-gpu"],
            "--share-gpu: needs a GPU, and mine.toml: device is 'cpu'; leave it out, or use --matrix gpu",
        ),
        (["--share-gpu", "--device", "cuda"], "--share-gpu: needs a GPU, and none is visible here; leave it out"),
        (["--share-gpu", "--virtual-world", "8"], "--share-gpu: is for ranks that exist; give --world-size too"),
        (["--virtual-world", "0"], "--virtual-world is [0]; it must be a list of integers of at least 1"),
        (["--virtual-world", "8", "--fake-tensors"], "ddp-eager cannot run on fake tensors"),
    ]
    for options, words in refused:
        assert words in place.refused("plan", "--matrix", name, *options)


def test_virtual_worlds_alone_and_beside_real_ones(place: Place) -> None:
    name = place.matrix()
    rows = place.call("plan", "--matrix", name, "--virtual-world", "8,64")[1].splitlines()[1:-1]
    assert all("virtual" in row for row in rows) and len(rows) == 8 + 1
    both = place.call("plan", "--matrix", name, "--virtual-world", "8", "--world-size", "2")[1].splitlines()[1:-1]
    assert sum("virtual" in row for row in both) == 4 and len(both) == 1 + 4 + 4 + 1


def test_ranks_that_share_a_gpu_are_run_once(place: Place) -> None:
    place.gpus(1)
    options = ("--share-gpu", "--device", "cuda", "--world-size", "2,4")
    lines = place.call("plan", "--matrix", place.matrix(), *options)[1].splitlines()
    assert "9 cells x 1 repeat = 9 trials" in lines[-1]
    assert sum("shares GPU" in line for line in lines) == 8
    lines = place.call("plan", "--matrix", place.matrix(), *options, "--repeats", "3")[1].splitlines()
    # The reference is there for its values, and its device is a GPU: one trial of it, three of each other cell.
    assert "9 cells, up to 3 repeats of each = 25 trials" in lines[-1]


def test_plan_of_ten_thousand_cells(place: Place) -> None:
    divisors = [n for n in range(1, 5041) if 5040 % n == 0][:25]
    name = place.matrix(
        ("global_batch_size = 16", f"global_batch_size = {5040 * 5040}"),
        ('["ddp-eager", "ddp-deferred"]', '"all"'),
        ("[1, 2]", str(divisors)),
        ("[2]\n", f"{divisors}\n"),
    )
    status, out, _ = place.call("plan", "--matrix", name)
    assert status == GOOD
    ids = [line.split()[0] for line in out.splitlines()[1:-1]]
    assert len(ids) == len(set(ids)) == 1 + 17 * 25 * 25 + 1 >= 10_000
    assert f"{len(ids)} cells x 2 repeats" in out


def test_backends_lists_all(place: Place) -> None:
    status, out, _ = place.call("backends")
    lines = out.splitlines()
    assert status == GOOD
    assert lines[0].split()[:4] == ["backend", "framework", "sharding", "sync"]
    listed = [line.split()[0] for line in lines[1:]]
    assert len(BACKENDS) == len(set(listed)) == 19
    assert sorted(listed) == sorted(BACKENDS)
    assert all("no GPU here" in line for line in lines[1:])
    defects = {line.split()[0] for line in lines if "every update is 1/N of the right one" in line}
    assert defects == {"lightning-deepspeed-zero2", "lightning-deepspeed-zero3"}


@pytest.mark.parametrize("argument", ["--version", "--help"])
def test_version_and_help_exit_well(place: Place, argument: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main([argument])
    assert caught.value.code == 0
    out = place.capture.readouterr().out
    if argument == "--version":
        assert out == f"accumulation-bench {__version__}\n"
    else:
        assert all(command in out for command in ("run", "plan", "report", "backends"))


@pytest.mark.parametrize("command", ["run", "plan", "report", "backends"])
def test_help_tells_of_every_option(place: Place, command: str) -> None:
    parser = cli._parser()
    subparsers = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = place.capture.readouterr().out
    for action in subparsers.choices[command]._actions:
        assert action.help, f"{action.dest} has no help"
        assert all(option in out for option in action.option_strings)
        assert " ".join(action.help.split()[:3]) in " ".join(out.split())
    if command in ("run", "plan"):
        for option in ("--matrix", "--backend", "--accumulate", "--world-size", "--repeats", "--seed"):
            assert option in out
    if command == "run":
        assert "--out" in out and "--resume" in out and "--cold" in out


def with_launcher(place: Place, script: Script | None = None) -> list[FakeLauncher]:
    """Let runs use a fake launcher and draw no plots; the launchers that will have been made."""
    made: list[FakeLauncher] = []

    def launcher(device: Any, *, cold: bool = False) -> FakeLauncher:
        made.append(FakeLauncher(script))
        return made[-1]

    place.patch.setattr(launch_launcher, "Launcher", launcher)
    place.patch.setattr(figures, "draw", lambda judged, manifest, folder, found: [folder / "a.png"])
    return made


def finished_run(place: Place, script: Script | None = None, *arguments: str) -> tuple[int, str, str]:
    """Run the small matrix into ``out``."""
    with_launcher(place, script)
    return place.call("run", "--matrix", place.matrix(), "--out", "out", *arguments)


def test_a_good_run(place: Place) -> None:
    status, out, err = finished_run(place)
    assert (status, err) == (GOOD, "")
    assert len(Journal(place.folder / "out").read()) == 12
    trials = pd.read_parquet("out/trials.parquet")
    assert trials["status"].tolist() == ["ok"] * 12
    assert "run out: 6 cells; writing to out" in out
    assert "[12/12] " in out
    assert "tables: out/*.parquet" in out and "plots:  out/plots (1 files)" in out
    assert out.splitlines()[-1] == "report: out/report.html (in short: out/report.md)"
    assert {path.name for path in Path("out").iterdir()} == {
        *("run.json", "trials.jsonl", "plots", "report.html", "report.md"),
    } | {f"{name}.parquet" for name in ("trials", "steps", "losses", "collectives", "memory", "ratios")}


def test_a_run_without_out_goes_to_results_and_plots(place: Place) -> None:
    made = with_launcher(place)
    assert place.call("run", "--matrix", place.matrix())[0] == GOOD
    (folder,) = (place.folder / "results").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-mine", folder.name)
    assert [path.name for path in (place.folder / "plots").iterdir()] == [folder.name]
    assert made[0].closed == 1


def test_matrix_products_are_timed_once_per_run(place: Place) -> None:
    made = with_launcher(place, at(4, ctrl_c))
    out = place.call("run", "--matrix", place.matrix(), "--out", "out")[1]
    assert "matrix products on 2 ranks: 1 TFLOP/s in fp32" in out
    (task,) = made[0].products
    assert (task.world_size, [str(precision) for precision in task.precisions]) == (2, ["fp32"])
    entry = {"world_size": 2, "threads": task.threads, "flops_per_s": {"fp32": [5e11, 5e11]}, "reason": ""}
    assert read_manifest(Path("out"))["matmul"] == [entry]

    made = with_launcher(place)
    assert place.call("run", "--resume", "out")[0] == GOOD
    assert made[0].products == []
    assert read_manifest(Path("out"))["matmul"] == [entry]
    trials = pd.read_parquet("out/trials.parquet")
    known = trials["mfu_of_matmul"].notna()
    assert (known == (trials["world_size"] == 2)).all()


def test_a_failed_trial_makes_the_status_bad(place: Place) -> None:
    status, out, _ = finished_run(place, lambda spec, n: failed(Status.OOM, "rank 0: full") if n == 3 else None)
    assert status == BAD
    assert "rank 0: full" in out
    assert len(Journal(place.folder / "out").read()) == 12


def test_an_invalid_trial_makes_the_status_bad(place: Place) -> None:
    assert finished_run(place, wrong_update("ddp-deferred", scale=0.5, residual=0.0))[0] == BAD


def wrong_update(backend: str, scale: float, residual: float, **time: Any) -> Script:
    def script(spec: Spec, number: int) -> Outcome | None:
        if spec.cell.backend != backend or spec.cell.accumulate == 1:
            return None
        ranks = [make_rank(spec.cell, spec.passes, rank) for rank in range(spec.cell.world_size)]
        if "update" in spec.passes:
            ranks[0]["update"] = {"error": max(abs(1 - scale), residual), "scale": scale, "residual": residual}
        for rank in ranks:
            rank["time"] |= time
        return Outcome(status=Status.OK, reason="", ranks=ranks, wall_s=1.0)

    return script


LIGHTNING = ["--backend", "ddp-deferred,lightning-deepspeed-zero2"]


def test_a_known_defect_is_no_surprise(place: Place) -> None:
    status, out, _ = finished_run(place, wrong_update("lightning-deepspeed-zero2", 0.5, 0.0), *LIGHTNING)
    assert status == GOOD
    words = " ".join(out.split())
    assert "invalid" in words and "the loss is divided by N = 2 twice" in words
    progress, summary = words.split("steps due/taken/told", 1)
    assert f"s/step; invalid, {EXPECTED}: Lightning divides the loss by N" in progress
    assert f"This is {EXPECTED}: Lightning divides the loss by N" in summary
    assert "exit status 0: all invalid trials are due to documented defects" in summary
    for report in ("report.html", "report.md"):
        said = " ".join((place.folder / "out" / report).read_text().split())
        assert (
            f"Invalid because of {EXPECTED}: lightning-deepspeed-zero2 N=2" in said
        )  # among the sentences of the answer
        assert f"This is {EXPECTED}: Lightning divides the loss by N" in said  # beside the reason


def test_a_known_defect_excuses_nothing_else(place: Place) -> None:
    script = wrong_update("lightning-deepspeed-zero2", 0.5, 0.0, num_updates=3)
    status, out, _ = finished_run(place, script, *LIGHTNING)
    assert status == BAD
    assert "exit status 0" not in out and f"This is {EXPECTED}" not in " ".join(out.split())


def test_a_known_defect_excuses_no_other_wrong_update(place: Place) -> None:
    script = wrong_update("lightning-deepspeed-zero2", 0.9, 0.4)
    status, out, _ = finished_run(place, script, *LIGHTNING)
    assert status == BAD
    assert EXPECTED not in " ".join(out.split())


def at(stop: int, action: Callable[[], None]) -> Script:
    def script(spec: Spec, number: int) -> Outcome | None:
        if number == stop:
            action()
        return None

    return script


def ctrl_c() -> None:
    raise KeyboardInterrupt


def sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(5)  # the signal is taken before this ends


@pytest.mark.parametrize("action", [ctrl_c, sigterm])
def test_an_interrupted_run_says_how_to_go_on_and_does(place: Place, action: Callable[[], None]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    made = with_launcher(place, at(4, action))
    status, out, _ = place.call("run", "--matrix", place.matrix(), "--out", "out")
    assert status == INTERRUPTED
    assert out.splitlines()[-1].endswith("go on with: python -m bench run --resume out")
    assert made[0].closed == 1
    assert signal.getsignal(signal.SIGTERM) == handler
    assert [record["status"] for record in Journal(place.folder / "out").read()] == ["ok"] * 4 + ["interrupted"]

    made = with_launcher(place)
    status, out, _ = place.call("run", "--resume", "out")
    assert status == GOOD
    assert len(made[0].specs) == 8
    assert pd.read_parquet("out/trials.parquet")["status"].tolist() == ["ok"] * 12


def test_a_resumed_run_counts_only_what_is_left(place: Place) -> None:
    with_launcher(place, at(9, ctrl_c))
    assert place.call("run", "--matrix", place.matrix(), "--out", "out")[0] == INTERRUPTED
    with_launcher(place)
    out = place.call("run", "--resume", "out")[1]
    (line,) = [line for line in out.splitlines() if line.startswith("[12/12]")]
    assert line.endswith("about 0 s to go)")


def test_a_launcher_that_does_not_start(place: Place) -> None:
    def fail() -> None:
        raise LauncherError("the launcher did not start within 180 s: no message")

    status, _, err = finished_run(place, at(0, fail))
    assert (status, err) == (BAD, "bench: the launcher did not start within 180 s: no message\n")


def test_a_second_run_into_the_same_folder(place: Place) -> None:
    finished_run(place)
    words = "--out out: holds a run already; name another folder, or go on with --resume out"
    assert words in place.refused("run", "--matrix", "mine.toml", "--out", "out")


def test_a_run_whose_folder_is_in_use(place: Place) -> None:
    finished_run(place)
    busy = f"in use by process {os.getpid()} on {socket.gethostname()} since "
    with bench_files.run_folder(place.folder / "out", "here"):
        for arguments in (("--resume", "out"), ("--matrix", "mine.toml", "--out", "out")):
            assert busy in place.refused("run", *arguments)
        assert place.call("report", "out")[0] == GOOD, "what there is can be shown"
    assert not (place.folder / "out" / bench_files.FILE).exists()


def test_failed_trials_are_run_again_when_asked(place: Place) -> None:
    assert finished_run(place, lambda spec, n: failed(Status.OOM, "rank 0: full") if n == 3 else None)[0] == BAD
    made = with_launcher(place)
    assert place.call("run", "--resume", "out")[0] == BAD
    assert made[0].specs == []
    made = with_launcher(place)
    assert place.call("run", "--resume", "out", "--retry-failed")[0] == GOOD
    assert len(made[0].specs) == 1
    assert pd.read_parquet("out/trials.parquet")["status"].tolist() == ["ok"] * 12
    assert len(Journal(place.folder / "out").read()) == 13, "the failure is kept"


def test_retrying_needs_a_run(place: Place) -> None:
    assert "--retry-failed: works only with --resume RUN" in place.refused("run", *CPU, "--retry-failed")


def test_a_torn_line_is_moved_aside_and_told(place: Place) -> None:
    finished_run(place)
    path = place.folder / "out" / "trials.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    manifest = read_manifest(place.folder / "out")
    write_manifest(place.folder / "out", {key: value for key, value in manifest.items() if key != "finished"})
    made = with_launcher(place)
    status, out, _ = place.call("run", "--resume", "out")
    assert status == GOOD
    assert "was cut short, and never counted; the rest of it is in out/trials.torn-1" in out
    # The torn trial was of the last block, so it has an update, and the reference's has to be made again.
    assert made[0].specs[0].passes == ("update",) and len(made[0].specs) == 2


def no_space(*arguments: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_run_with_all_finished_trials(place: Place) -> None:
    with_launcher(place, at(4, no_space))
    status, _, err = place.call("run", "--matrix", place.matrix(), "--out", "out")
    assert status == WRONG
    assert err == (
        "bench: out: the disk is full; the finished trials are kept: free some space, and go on with: "
        "python -m bench run --resume out\n"
    )
    assert len(Journal(place.folder / "out").read()) == 4
    made = with_launcher(place)
    assert place.call("run", "--resume", "out")[0] == GOOD
    assert len(made[0].specs) == 8


def test_a_run_that_will_not_fit_is_not_begun(place: Place) -> None:
    place.patch.setattr(start, "free", lambda folder: 2**24)
    words = r"--out out: the run needs about \d+ MiB, and 16 MiB are free; free some, or name another folder"
    assert re.search(words, place.refused("run", "--matrix", place.matrix(), "--out", "out"))


def test_tables_are_rebuilt_from_the_journal_alone(place: Place) -> None:
    finished_run(place)
    before = {path.name: pd.read_parquet(path) for path in Path("out").glob("*.parquet")}
    for path in Path("out").glob("*.parquet"):
        path.write_bytes(b"no parquet")
    place.patch.setattr(figures, "draw", no_space)
    status, out, _ = place.call("report", "out", "--rebuild")
    assert status == GOOD
    assert sorted(out.split()) == sorted(f"out/{name}" for name in before)
    for name, frame in before.items():
        pd.testing.assert_frame_equal(pd.read_parquet(f"out/{name}"), frame)
    assert "--plots: cannot be combined with --rebuild" in place.refused("report", "out", "--rebuild", "--plots", "x")


def test_what_is_written_is_not_for_everybody_to_write(place: Place) -> None:
    before = os.umask(0)
    try:
        finished_run(place)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode for path in [place.folder / "out", *(place.folder / "out").rglob("*")]}
    assert not any(mode & 0o002 for mode in modes)


def test_resume_on_another_machine(place: Place) -> None:
    finished_run(place)
    place.gpus(1)
    words = "--resume out: machine 'gpus' was [] and is "
    assert words in place.refused("run", "--resume", "out")


@pytest.mark.parametrize("out", [".", "sub/.."])
def test_a_run_has_a_name(place: Place, out: str) -> None:
    with_launcher(place)
    place.folder.joinpath("sub").mkdir()
    place.call("run", "--matrix", place.matrix(), "--out", out)
    assert read_manifest(place.folder)["run_id"] == place.folder.name


def test_report_writes_the_tables_again(place: Place) -> None:
    finished_run(place)
    before = pd.read_parquet("out/trials.parquet")
    Path("out/trials.parquet").unlink()
    status, out, _ = place.call("report", "out", "--plots", "elsewhere")
    assert status == GOOD
    pd.testing.assert_frame_equal(pd.read_parquet("out/trials.parquet"), before)
    assert "plots:  elsewhere (1 files)" in out


def test_report_of_a_run_without_trials(place: Place) -> None:
    with_launcher(place)
    place.call("run", "--matrix", place.matrix(), "--out", "out")
    Path("out/trials.jsonl").unlink()
    words = "out: no trial has finished yet; go on with: python -m bench run --resume out"
    assert words in place.refused("report", "out")


def test_report_into_a_folder_that_cannot_be(place: Place) -> None:
    finished_run(place)
    place.write("file", "")
    assert "--plots file/below: cannot be written" in place.refused("report", "out", "--plots", "file/below")


def test_plots_of_a_run_lie_where_report_puts_them(place: Place) -> None:
    with_launcher(place)
    place.call("run", "--matrix", place.matrix(), "--out", str(place.folder / "results" / "mine"))
    before = place.files().keys()
    place.call("report", "results/mine")
    assert place.files().keys() == before


def test_as_a_program(tmp_path: Path) -> None:
    """The exit status of the process, and a reader that goes away early."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    script = textwrap.dedent(
        f"""
        {sys.executable} -m bench plan --matrix nope; echo "status $?"
        {sys.executable} -m bench plan --matrix cpu | head -1 > /dev/null; echo "status ${{PIPESTATUS[0]}}"
        """
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == "status 2\nstatus 0\n"
    assert done.stderr.startswith("bench: --matrix nope: unknown; ") and done.stderr.count("\n") == 1
