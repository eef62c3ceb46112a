"""The command line: bad input in one line with status 2, the plan, and whole runs on a fake launcher."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from bench import cli
from bench import files as bench_files
from bench.backends.base import built_in, registry
from bench.backends.plain import DDPDeferred
from bench.cli import main
from bench.commands import COMMANDS, TRAINING
from bench.errors import BAD, DEFECT, GOOD, INTERRUPTED, WRONG
from bench.judge.gates import EXPECTED
from bench.launch import gpus as launch_gpus
from bench.launch import launcher as launch_launcher
from bench.launch.launcher import LauncherError
from bench.launch.outcome import Outcome
from bench.plan.cell import Status
from bench.plan.task import Spec
from bench.report import figures
from bench.run import start
from bench.run.journal import Journal, read_document, write_document
from tests.conftest import ROOT
from tests.factories import ALL_PASSES, FakeLauncher, GoneReader, Script, failed, make_rank

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

    def write(self, name: str, content: str) -> None:
        (self.folder / name).write_text(content)

    def matrix(self) -> str:
        """Write a small matrix file; its name."""
        self.write("mine.toml", MATRIX)
        return "mine.toml"

    def files(self) -> dict[str, bytes]:
        return {
            str(path): path.read_bytes()
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        } | {str(path): b"" for path in self.folder.rglob("*") if path.is_dir()}

    def gpus(self, count: int) -> None:
        found = [
            {"index": i, "name": "NVIDIA H200", "uuid": f"GPU-{i}", "memory_bytes": 2**37}
            for i in range(count)
        ]
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
def place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Place:
    folder = tmp_path / "place"
    folder.mkdir()
    monkeypatch.chdir(folder)
    here = Place(folder, capsys, monkeypatch)
    here.gpus(0)
    monkeypatch.setattr(
        launch_launcher, "Launcher", lambda *_, **__: pytest.fail("bad input starts no launcher")
    )
    return here


FILES = {
    "mine.toml": MATRIX,
    "broken.toml": "this is [no TOML",
    "unknown.toml": MATRIX + "acumulate = [1]\n",
    "zero.toml": MATRIX.replace("[1, 2]", "[0]"),
    "uneven.toml": MATRIX.replace("[2]\n", "[5]\n"),
    "auto.toml": MATRIX.replace("[1, 2]", '"auto"'),
    "empty.toml": "",
    "short.txt": "x" * 64,
    "ds.json": '{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}',
    "gpt2.json": '{"model_type": "gpt2"}',
    "llama.json": '{"model_type": "llama", "hidden_size": "wide", "num_attention_heads": 2}',
}
BAD_INPUT = {
    "run --matrix cpu": [
        (
            "--backend fsdp2-eagre",
            r"--backend: 'fsdp2-eagre' is unknown; did you mean fsdp2-eager\?",
        ),
        (
            "--backend ddp-eager,xyzzy",
            r"--backend: 'xyzzy' is unknown; use one of reference, ddp-eager, ",
        ),
        (
            "--accumulate abc",
            r"--accumulate: 'abc' is not a list of integers .* --help",
        ),
        ("--repeats many", r"--repeats: invalid int value: 'many'"),
        ("--repeats 3 --max-repeats 2", r"--max-repeats is 2; .* at least --repeats, 3"),
        (
            "--budget '3 minutes'",
            r"'3 minutes' is not a time .* 20m",
        ),
        (
            "--interval-width 200%",
            r"--interval-width is 2.0; it must be",
        ),
        ("--batch 30", r"--batch is 30, .* = 8 x 2 = 16; .*: 16 and 32"),
        ("--micro-batch 1 --accumulate 2 --batch 9", r"--batch: follows from --micro-batch and"),
        (
            "--workload no_such_module:f",
            r"--workload: workload 'no_such_module:f': No module named",
        ),
        (
            "--workload json:no_such",
            r"--workload: workload 'json:no_such': .* has no attribute 'no_such'",
        ),
        ("--precision fp8", r"--precision is \['fp8'\]; .* fp32, bf16"),
        (
            "--inactivity -1",
            r"--inactivity is -1.0; it must be .* seconds",
        ),
        (
            "--corpus missing.txt",
            r"--corpus missing.txt: cannot be read",
        ),
        ("--corpus short.txt", r"--corpus short.txt: has 64 bytes; .* = 65"),
        ("--device cuda", r"--device is 'cuda', .*; use --matrix cpu"),
        ("--fake-tensors", r"--fake-tensors: .*; give --virtual-world"),
        (
            "--share-gpu --device cuda",
            r"--share-gpu: needs a GPU, and none",
        ),
        (
            "--share-gpu --virtual-world 8",
            r"--share-gpu: .*; give --world-size",
        ),
        ("--colour red", r"unrecognized arguments: --colour red; see .* --help"),
        ("--repaets 3", r"--repaets is unknown; did you mean --repeats\?; see .* run --help"),
        ("--out short.txt", r"--out short.txt: cannot be written \("),
        (
            "--out short.txt/below",
            r"--out short.txt/below: cannot be written \(",
        ),
        ("--out \udcff", r"'.udcff': this argument is not UTF-8"),
    ],
    "run --matrix mine.toml": [
        ("--model Llama-3.1-8B", r"--model.* did you mean 8b\?"),
        (
            "--baseline ddp-eage",
            r"--baseline: 'ddp-eage' is .*; did you mean ddp",
        ),
        (
            "--micro-batch 3",
            r"is 16, .* = 3 x 2 = 6",
        ),
        ("--virtual-world 8 --fake-tensors", r"ddp-eager cannot run on fake tensors"),
        (
            "--share-gpu",
            r"--share-gpu: needs a GPU, .*: device is 'cpu'",
        ),
    ],
    "run": [
        ("--matrix cpuu", r"--matrix cpuu: unknown; did you mean cpu\?"),
        ("--matrix broken.toml", r"broken.toml: is not TOML \(.*line 1"),
        (
            "--matrix unknown.toml",
            r"unknown.toml: axes.acumulate is unknown; did you mean axes.accumulate\?",
        ),
        (
            "--matrix zero.toml",
            r"zero.toml: axes.accumulate is \[0\]; it must be",
        ),
        ("--matrix uneven.toml", r"uneven.toml: workload.global_batch_size is 16, .* the nearest"),
        ("--matrix auto.toml", r"axes.accumulate is 'auto', which needs axes.micro_batch_size"),
        ("--matrix empty.toml", r"empty.toml: device is missing; .* cpu, cuda"),
        ("--resume nowhere", r"nowhere: holds no run \(run.json: "),
        ("--against ''", r"--against: the name is empty"),
    ],
    "": [
        ("walk", r"invalid choice: 'walk' .*run.*plan.*backends.*report"),
        (f"check {'n' * 300} --debug", r"'n+\.\.\.: no file has so long a name"),
        (
            "report nowhere",
            r"nowhere: holds no run \(run.json: ",
        ),
        ("cite ''", r"RUN.*: the name is empty"),
        ("lint", r"name at least one config"),
        ("lint ds.json --sarif .", r"--sarif .: cannot be written \(Is a directory\)"),
        ("lint x --samples 0", r"argument --samples: '0' is .* from 1 to"),
        ("lint x --world-size two", r"argument --world-size: 'two'"),
        ("lint x --deepspeed-version new", r"'new' is no version such as 0.18.2"),
    ],
    "audit": [
        ("", r"name the training command after --"),
        ("-- no-such-program", r"no-such-program: No such file or directory"),
        ("--updates 0 -- true", r"--updates: '0' is not an integer from 1"),
    ],
    "plan": [
        (
            "--matrix xyzzy",
            r"--matrix xyzzy: unknown; .* auto, bytes, .*, smoke, ",
        ),
        (
            "--matrix no.toml",
            r"--matrix no.toml: cannot be read",
        ),
        *(
            (
                f"--matrix gpu --on '{gpus}'",
                f"--on: '{gpus}' does not name GPUs, such as '1 x H100 80GiB'",
            )
            for gpus in (
                *("", "H100", "80GiB", "0 x H100 80GiB", "2 x H100", "H100 80", "H100 0GiB"),
                f"H100 {'9' * 400}GiB",
            )
        ),
    ],
    "semantics": [
        ("--samples 0 --micro-batch 1 --accumulate 2", r"--samples is 0; it must be"),
        ("--samples 4 --micro-batch 1", r"--accumulate: is missing"),
        (
            "--samples 4 --micro-batch 1 --accumulate x",
            r"--accumulate: 'x' is not a list of integers",
        ),
        ("--suite --samples 4", r"--samples: describes one scenario"),
        (
            "--suite --scenario nope",
            r"--scenario nope: .* no such scenario; use one of",
        ),
        (
            "--samples 4 --micro-batch 1 --accumulate 2 --backend nope",
            r"--backend: 'nope' is unknown",
        ),
        ("--samples 4 --micro-batch 1 --accumulate 2 --clip -1", r"--clip is -1.0; it must be"),
    ],
    "steps": [
        ("--micro-batch 4", r"the following arguments are required: --samples"),
        ("--samples 0 --micro-batch 4", r"--samples is 0; it must be"),
        (
            "--samples 9 --micro-batch 4 --accumulate 0",
            r"--accumulate is \[0\]; .* from 1 to 1000000,",
        ),
        (
            "--samples 9 --micro-batch 4 --accumulate 1,x",
            r"'1,x' is not a list of integers",
        ),
        (
            "--samples 2 --micro-batch 1 --world-size 3 --sampler-drop-last",
            r"--samples is 2, fewer than the 3 ranks",
        ),
        (
            "--samples 9 --micro-batch 4 --max-steps -2",
            r"--max-steps is -2; .* at least 0",
        ),
        (
            "--samples 9 --micro-batch 6 --world-size 2 --drop-last",
            r"--micro-batch is 6, but a rank has only 5",
        ),
        (
            "--samples 9 --micro-batch 4 --backend ddp-eagre",
            r"'ddp-eagre' is unknown; did you mean ddp-eager\?",
        ),
        (
            "--samples 9 --micro-batch 4 --backend ,",
            r"--backend: no name is given",
        ),
    ],
    "throughput": [
        ("--micro-batches 0", r"--micro-batches: '0' is not an integer from 1"),
        ("--epochs 2", r"--epochs: goes with --micro-batches; add it"),
        ("--micro-batches 8 --epoch whole", r"--micro-batches: does not go with --epoch"),
        ("--micro-batches 8 --out out", r"--micro-batches: does not go with --out"),
        ("--window-size 1,5", r"--window-size: '1,5' is .* from 2 on"),
        ("--epoch half", r"--epoch: 'half' is not of whole, partial, short"),
        ("--optimizer-time -1", r"--optimizer-time: '-1' is not a number above 0"),
        ("--optimizer-time x", r"--optimizer-time: 'x' is not a number above 0"),
        ("--out ''", r"--out: the name is empty"),
        ("--strategy fsdp", r"--strategy: invalid choice: 'fsdp'"),
        ("--accumulate 1 --epoch short", r"--accumulate 1: has no partial"),
        ("--out /dev/null/out", r"--out /dev/null/out: cannot be written"),
    ],
    "predict --world-size 64 --accumulate 16 --sequence 8192 --precision bf16 --model tiny": [
        ("--model 9b", r"--model: '9b' is unknown; use one of micro, .*, hf:CONFIG"),
        ("--model llama-3-8b", r"did you mean 8b\?"),
        ("--model meta-llama/Llama-3.1-8B-Instruct", r"did you mean 8b\?"),
        ("--model llama3", r"did you mean 8b\?"),
        ("--model Qwen3_8B", r"did you mean qwen3-8b\?"),
        ("--model llama-3.1-405b", r"use one of micro"),
        ("--peak h300", r"--peak: 'h300' is unknown; use one of A10, .*, or a rate such as"),
        ("--memory 80gib", "--memory"),
        ("--reserve 4GiB", "--reserve"),
        ("--reserve 4GiB --memory 4GiB", "--reserve"),
        ("--link 400gbps", "--link"),
        ("--link intra=450GB/s", "--link"),
        ("--link intra=450GB/s,inter=50", "--link"),
        ("--link intra=450GB/s,inter=50GB/s,20us", "--link"),
        ("--link intra=450GB/s,intra=9GB/s,inter=50GB/s", "--link"),
        ("--link intra=450GB/s,inter=50GB/s", "--node-size"),
        ("--link 50GB/s --node-size 8", "--node-size"),
        ("--link intra=450GB/s,inter=50GB/s --node-size 7", "--node-size"),
        ("--node-size 8", "--node-size"),
        ("--replicate 3", "--replicate"),
        ("--replicate 64", "--replicate"),
        (
            "--link intra=450GB/s,inter=50GB/s --node-size 32 --world-size 96 --replicate 4",
            "--replicate",
        ),
        ("--backend hsdp-eager", "--replicate"),
        ("--compute-time nans", "--compute-time"),
        ("--peak H100 --compute-time 1s", "--compute-time"),
        ("--exact --json", r"--exact: measures one backend; name it with --backend"),
        ("--exact --backend fsdp2-eager", r"--exact: no GPU is visible; add --device cpu"),
        (
            "--exact --backend ddp-eager --device cpu",
            r"--exact: ddp-eager cannot run on fake tensors",
        ),
        ("--mfu 140% --peak H100", "--mfu"),
        ("--model hf:nowhere", r"hf:nowhere': nowhere"),
        (
            "--model hf:gpt2.json",
            r"gpt2.json: .* model_type 'gpt2' is unknown; .* llama",
        ),
        (
            "--model hf:llama.json",
            r"llama.json: hidden_size is 'wide'; it must be",
        ),
        ("--link H100 --world-size 12", r"--link: .* 8 does not divide the 12 ranks"),
        ("--link H300", r"--link: 'H300' is not .* or one of A100"),
        ("--parameters fp8", "--parameters"),
        ("--plot front.png", r"--plot: says more about --batch"),
        ("--batch 64", r"--accumulate: --batch searches it"),
        (
            "--exact --device cpu --backend fsdp2-eager --parameters bf16",
            r"--exact: no backend trains without fp32 masters",
        ),
    ],
    "predict --world-size 64 --sequence 8192 --precision bf16 --model tiny": [
        ("", r"--accumulate: is missing"),
        (
            "--batch 100 --link H100 --peak H100",
            r"--batch: 100 samples .* 64 ranks",
        ),
        ("--batch 128", r"--batch: compares times; give --link"),
        ("--batch 128 --link H100", r"--batch: compares times; give --peak"),
        (
            "--batch 128 --link H100 --peak H100 --micro-batch 2",
            r"--micro-batch: --batch searches it",
        ),
        (
            "--batch 128 --link H100 --peak H100 --exact --backend fsdp2-eager",
            r"--exact: measures one cell",
        ),
        (
            "--batch 128 --link H100 --peak H100 --plot front.svg",
            r"--plot front.svg: must end in .png",
        ),
        (
            "--batch 128 --link H100 --peak H100 --plot no/front.png",
            r"--plot no/front.png: cannot be",
        ),
    ],
}
"""By the beginning of a command, what is wrong in it and what is said of that."""


@pytest.mark.parametrize(
    ("line", "words"),
    [(f"{begin} {rest}", words) for begin, rows in BAD_INPUT.items() for rest, words in rows],
)
def test_bad_input_is_one_line_and_writes_nothing(place: Place, line: str, words: str) -> None:
    for name, content in FILES.items():
        place.write(name, content)
    assert re.search(words, place.refused(*shlex.split(line)))


def test_a_defect_of_the_bench_is_one_line_that_says_where_to_report_it(place: Place) -> None:
    def broken() -> Any:
        raise ZeroDivisionError("first line\nsecond line")

    place.patch.setattr(launch_gpus, "gpus", broken)
    status, out, err = place.call("plan")
    assert (status, out, err.count("\n")) == (DEFECT, "", 1) and DEFECT not in (
        GOOD,
        BAD,
        WRONG,
        INTERRUPTED,
    )
    assert err.startswith("bench: ZeroDivisionError: first line second line (test_cli.py:")
    assert "traceback of --debug to the project's issue tracker\n" in err
    status, _, err = place.call("plan", "--debug")
    assert (
        status == DEFECT
        and err.startswith("Traceback (most recent call last):")
        and "report it" in err
    )


@pytest.mark.parametrize("command", sorted(TRAINING))
def test_other_systems_are_told_in_one_line_what_works_there(
    place: Place, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli.sys, "platform", "darwin")
    operands = ("RUN", "CELL") if command == "trace" else ()
    assert f"{command} trains, which needs Linux" in place.refused(command, *operands)


def test_windows_is_told_so_in_one_line() -> None:
    code = "import sys; sys.platform = 'win32'; import bench.cli"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and done.stderr.startswith("bench: does not run on Windows")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("file:///a/check%20out", "'/a/check out[frameworks]'"),
        ("https://example.com/x.whl", "'accumulation-bench[frameworks]'"),
    ],
)
def test_what_is_missing_is_installed_from_where_the_bench_came_from(
    url: str, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(read_text=lambda _: json.dumps({"url": url}))
    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: found)
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "bench" / "cli.py"))
    assert cli._lacking("torch").endswith(f"-m pip install {named}")


def test_a_python_without_the_packages_is_told_where_they_are() -> None:
    command = [
        sys.executable,
        "-S",
        "-m",
        "bench",
        "lint",
        "config.yaml",
    ]  # -S: without site-packages
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": os.defpath}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (WRONG, "", 1)
    assert "lacks the package pydantic; " in done.stderr


def test_a_finished_run_is_not_written_over_and_resumes_without_other_options(place: Place) -> None:
    finished_run(place)
    assert "--repeats" in place.refused("run", "--resume", "out", "--repeats", "9")
    words = "--out out: holds a run already; "
    assert words in place.refused("run", "--matrix", "mine.toml", "--out", "out")


def test_plan_shows_cells_skips_and_estimates(place: Place) -> None:
    place.patch.setattr(
        DDPDeferred, "missing", classmethod(lambda cls, device: "needs x: pip install x")
    )
    status, out, err = place.call("plan", "--matrix", place.matrix())
    assert (status, err) == (GOOD, "")
    lines = out.splitlines()
    assert [line.split()[1] for line in lines[1:7]] == [
        "reference",
        "ddp-eager",
        "ddp-deferred",
        "ddp-eager",
        "ddp-deferred",
        "ddp-eager",
    ]
    assert lines[6].endswith("A/A twin")
    assert sum(line.endswith("skipped: needs x: pip install x") for line in lines) == 2
    assert re.match(r"\w{12} +ddp-deferred +2 +2 +4  fp32 +[\d.]+ s +[\d.]+ MiB", lines[5])
    matrix, trials, time, memory = lines[7:]
    assert re.findall(r"\d+", matrix) == ["6", "2", "2", "1", "1", "2"], matrix
    assert matrix.startswith("matrix mine: 6 cells: ") and matrix.endswith("; 2 cells skipped")
    assert trials.startswith("12 trials, 2 repeats of each cell: about ") and time.startswith(
        "time: per trial"
    )
    assert memory == "memory: predicted peak of a rank"
    assert list(place.files()) == [str(place.folder / "mine.toml")]


def test_plan_heeds_every_option(place: Place) -> None:
    place.write("text.txt", "x" * 100)
    options = [
        "--backend",
        "ddp-eager",
        "--backend",
        "fsdp2-eager,reference",
        "--accumulate",
        "3",
        "--world-size",
        "1",
    ]
    options += [
        "--precision",
        "bf16",
        "--repeats",
        "4",
        "--seed",
        "1",
        "--batch",
        "9",
        "--model",
        "135m",
    ]
    options += ["--corpus", "text.txt", "--device", "cpu", "--timeout", "5.5"]
    status, out, _ = place.call("plan", "--matrix", "cpu", *options)
    assert status == GOOD
    rows = [line.split()[1:6] for line in out.splitlines()[1:5]]
    assert rows == [
        ["reference", "1", "1", "9", "fp32"],
        ["ddp-eager", "3", "1", "3", "bf16"],
        ["fsdp2-eager", "3", "1", "3", "bf16"],
        ["ddp-eager", "3", "1", "3", "bf16"],
    ]
    assert "16 trials, 4 repeats of each cell" in out


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
        [sys.executable, "-c", PLAN], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.stderr.splitlines()[-1] == "0 [] []"
    assert "matrix cpu: " in done.stdout


def test_repeats_precision_and_budget(place: Place) -> None:
    name = place.matrix()
    assert "then up to" not in place.call("plan", "--matrix", name)[1], "fixed repeats"
    more = (
        "--max-repeats",
        "40",
        "--interval-width",
        "5%",
        "--precision",
        "bf16",
        "--budget",
        "20m",
    )
    out = place.call("plan", "--matrix", name, *more)[1]
    assert ", 2 repeats of each cell" in out and " bf16 " in out
    assert re.search(r"then up to 40 repeats .* 5 %", out)
    assert (
        ", 1 repeat of each cell" in place.call("plan", "--matrix", name, "--max-repeats", "1")[1]
    )
    for spelt in ("20min", "20 min", "1200s", "1200 sec"):
        out = place.call("plan", "--matrix", name, "--max-repeats", "40", "--budget", spelt)[1]
        assert "would exceed its budget of 20 min" in out, spelt


def test_micro_batches_are_an_axis(place: Place) -> None:
    """Either the global batch is held, and N follows; or it follows from both."""
    name = place.matrix()

    def planned(*options: str) -> tuple[list[list[str]], str]:
        out = place.call("plan", "--matrix", name, "--backend", "ddp-eager", *options)[
            1
        ].splitlines()
        rows = [line.split()[2:5] for line in out if " ddp-eager " in line and "A/A" not in line]
        return rows, next(line for line in out if line.startswith("the global batch"))

    rows, held = planned("--micro-batch", "1,4")
    assert rows == [["8", "2", "1"], ["2", "2", "4"]]
    assert held.endswith("N = B / (micro-batch x W)")
    assert planned("--micro-batch", "4", "--batch", "32")[0] == [["4", "2", "4"]]
    rows, held = planned("--micro-batch", "1,4", "--accumulate", "2,3")
    assert rows == [["2", "2", "1"], ["2", "2", "4"], ["3", "2", "1"], ["3", "2", "4"]]
    assert held.endswith("B = micro-batch x N x W")
    assert planned("--micro-batch", "3", "--virtual-world", "8")[0] == [
        ["1", "8", "3"],
        ["2", "8", "3"],
    ]
    place.write(
        "held.toml",
        MATRIX.replace("accumulate = [1, 2]", 'accumulate = "auto"\nmicro_batch_size = [2]'),
    )
    assert "  4  2            2  fp32" in place.call("plan", "--matrix", "held.toml")[1]


MY_BACKENDS = """
from bench.backends.plain import DDPEager

class Mine(DDPEager):
    name = "mine"
"""


def test_a_class_of_ones_own_is_a_backend(place: Place) -> None:
    """It works in a run, in its resumption, which finds it in run.json, and in commands that look at backends."""
    place.patch.syspath_prepend(str(place.folder))
    place.patch.setattr(sys, "dont_write_bytecode", True)
    place.patch.delitem(sys.modules, "my_backends", raising=False)
    place.patch.setenv("BENCH_BACKENDS", "")
    place.write("my_backends.py", MY_BACKENDS)
    assert finished_run(place, None, "--backend", "ddp-eager,my_backends:Mine")[0] == GOOD
    trials = pd.read_parquet("out/trials.parquet")
    assert set(trials["backend"]) == {"reference", "ddp-eager", "mine"}
    place.patch.setenv("BENCH_BACKENDS", "")
    assert place.call("run", "--resume", "out")[0] == GOOD
    place.patch.setenv("BENCH_BACKENDS", "")
    printed = " ".join(
        place.call(
            "run", "--matrix", "mine.toml", "--out", "alone", "--backend", "my_backends:Mine"
        )[1].split()
    )
    assert "--backend my_backends:Mine,ddp-deferred --repeats" in printed, (
        "the whole next command, ready to paste"
    )
    place.patch.setenv("BENCH_BACKENDS", "")
    plan = ["--samples", "8", "--micro-batch", "1", "--backend", "my_backends:Mine"]
    assert "mine" in place.call("steps", *plan)[1]
    for named, words in (
        ("my_backends:Other", "has no attribute 'Other'"),
        ("json:loads", "is not a subclass of"),
    ):
        assert words in place.refused("plan", "--matrix", place.matrix(), "--backend", named)


def test_the_commands_are_listed_in_groups(place: Place) -> None:
    status, out, err = place.call()
    assert (status, err) == (GOOD, "")
    groups = re.findall(r"^(\w+):\n((?:  \S.*\n)+)", out, re.MULTILINE)
    listed = {
        name: [line.split()[0] for line in lines.splitlines()]
        for name, lines in groups
        if name != "options"
    }
    assert listed == {name: list(names) for name, names in COMMANDS.items()} and len(listed) == 3
    assert "  predict       predict memory, collectives " in out


def test_backends_lists_all(place: Place) -> None:
    status, out, _ = place.call("backends")
    lines = out.splitlines()
    assert status == GOOD
    assert lines[0].split()[:4] == ["backend", "framework", "sharding", "sync"]
    assert [line.split()[0] for line in lines[1:]] == list(registry(built_in()))
    assert all("no GPU here" in line for line in lines[1:])
    known = {name: kind.defect for name, kind in registry(built_in()).items() if kind.defect}
    told = {line.split()[0] for line in lines[1:] if line.endswith(tuple(known.values()))}
    assert told == known.keys() == {"lightning-deepspeed-zero2", "lightning-deepspeed-zero3"}


def with_launcher(place: Place, script: Script | None = None) -> list[FakeLauncher]:
    """Let runs use a fake launcher and draw no plots; the launchers that will have been made."""
    made: list[FakeLauncher] = []

    def launcher(device: Any, **options: Any) -> FakeLauncher:
        made.append(FakeLauncher(script))
        return made[-1]

    place.patch.setattr(launch_launcher, "Launcher", launcher)
    place.patch.setattr(figures, "draw", lambda *_: [])
    return made


def finished_run(
    place: Place, script: Script | None = None, *arguments: str
) -> tuple[int, str, str]:
    with_launcher(place, script)
    return place.call("run", "--matrix", place.matrix(), "--out", "out", *arguments)


def test_a_good_run(place: Place) -> None:
    status, out, err = finished_run(place)
    assert (status, err) == (GOOD, "")
    assert len(Journal(place.folder / "out").read()) == 12
    trials = pd.read_parquet("out/trials.parquet")
    assert trials["status"].tolist() == ["ok"] * 12
    assert "run out: 6 cells: 2 compared with " in out and "; writing to out" in out
    assert "[12/12] " in out
    assert "tables: out/*.parquet" in out and "plots:  out/plots (0 files)" in out
    assert out.splitlines()[-1] == "report: out/report.html (in short: out/report.md)"
    assert {path.name for path in Path("out").iterdir()} == {
        *("run.json", "trials.jsonl", "plots", "report.html", "report.md")
    } | {
        f"{name}.parquet"
        for name in ("trials", "steps", "losses", "collectives", "memory", "ratios")
    }


def test_a_run_whose_baseline_is_the_reference_says_how_to_compare_times(place: Place) -> None:
    both = ("--backend", "reference,ddp-deferred,fsdp2-deferred")
    status, out, _ = finished_run(place, None, *both, "--baseline", "reference")
    assert status == GOOD
    assert "The baseline is a reference" in out and "--baseline ddp-deferred" in out


def wrong_update(backend: str, scale: float, residual: float, **time: Any) -> Script:
    def script(spec: Spec, number: int) -> Outcome | None:
        if spec.cell.backend != backend or spec.cell.accumulate == 1:
            return None
        ranks = [make_rank(spec.cell, spec.passes, rank) for rank in range(spec.cell.world_size)]
        if "update" in spec.passes:
            ranks[0]["update"] = {
                "error": max(abs(1 - scale), residual),
                "scale": scale,
                "residual": residual,
            }
        for rank in ranks:
            rank["time"] |= time
        return Outcome(status=Status.OK, reason="", ranks=ranks, wall_s=1.0)

    return script


LIGHTNING = ["--backend", "ddp-deferred,lightning-deepspeed-zero2"]


def test_a_known_defect_is_no_surprise(place: Place) -> None:
    status, out, _ = finished_run(
        place, wrong_update("lightning-deepspeed-zero2", 0.5, 0.0), *LIGHTNING
    )
    assert status == GOOD
    words = " ".join(out.split())
    progress, summary = words.split("backend memory ratio n correct?", 1)
    assert f"s/step; invalid: its update shows {EXPECTED}: " in progress
    assert "lightning-deepspeed-zero2 - - 0 invalid" in summary
    assert "Do not use lightning-deepspeed-zero2 (N = 2): " in summary
    assert "exit status 0: all invalid trials" in summary
    for report in ("report.html", "report.md"):
        short = " ".join((place.folder / "out" / report).read_text().split())
        assert registry()["lightning-deepspeed-zero2"].defect in short
        assert EXPECTED.partition(",")[0] in short


def test_a_known_defect_excuses_nothing_else(place: Place) -> None:
    script = wrong_update("lightning-deepspeed-zero2", 0.5, 0.0, num_updates=3)
    status, out, _ = finished_run(place, script, *LIGHTNING)
    assert status == BAD
    _, summary = " ".join(out.split()).split("backend memory ratio n correct?", 1)
    assert "exit status 0" not in out and EXPECTED not in summary


def at_trial(stop: int, action: Callable[[], None]) -> Script:
    def script(spec: Spec, number: int) -> Outcome | None:
        if number == stop:
            action()
        return None

    return script


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_says_how_to_go_on_and_does(
    place: Place, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    made = with_launcher(place, at_trial(4, lambda: signal.raise_signal(number)))
    status, out, _ = place.call("run", "--matrix", place.matrix(), "--out", "out")
    assert status == INTERRUPTED
    assert out.splitlines()[-1].endswith("go on with: python -m bench run --resume out")
    assert made[0].closed == 1
    assert signal.getsignal(number) == before
    assert [record["status"] for record in Journal(place.folder / "out").read()] == ["ok"] * 4 + [
        "interrupted"
    ]

    made = with_launcher(place)
    status, out, _ = place.call("run", "--resume", "out")
    assert status == GOOD
    assert len(made[0].specs) == 8
    assert pd.read_parquet("out/trials.parquet")["status"].tolist() == ["ok"] * 12


def raises(error: Exception) -> Callable[..., Any]:
    def fail(*_: Any) -> Any:
        raise error

    return fail


def test_a_launcher_that_does_not_start(place: Place) -> None:
    status, _, err = finished_run(
        place, at_trial(0, raises(LauncherError("the launcher did not start")))
    )
    assert (status, err) == (BAD, "bench: the launcher did not start\n")


def test_a_run_whose_folder_is_in_use(place: Place) -> None:
    finished_run(place)
    busy = f"in use by process {os.getpid()} on {socket.gethostname()} since "
    with bench_files.run_folder(place.folder / "out", "here"):
        for arguments in (("--resume", "out"), ("--matrix", "mine.toml", "--out", "out")):
            assert busy in place.refused("run", *arguments)
        assert place.call("report", "out")[0] == GOOD, "what there is can be shown"
    assert not (place.folder / "out" / bench_files.FILE).exists()


def test_a_quiet_run_prints_the_answer_alone(place: Place) -> None:
    loud = finished_run(place)[1]
    with_launcher(place)
    status, quiet, err = place.call("run", "--matrix", place.matrix(), "--out", "odd", "--quiet")
    assert (status, err) == (GOOD, "")
    assert "[12/12]" in loud and "run out: " in loud and "matrix products on" in loud
    assert "/12]" not in quiet and "run odd: " not in quiet and "matrix products on" not in quiet
    assert loud.endswith(quiet.replace("odd/", "out/")), "the same answer"


def test_a_run_in_json_lines(place: Place) -> None:
    """Each line is an event, the last one the answer, which has the exit status."""
    status, out, _ = finished_run(place, None, "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert events[-1]["event"] == "report" and events[-1]["status"] == status == GOOD
    assert sum(each["event"] == "finished" for each in events) == 12


def test_a_failed_trial_makes_the_status_bad_and_is_run_again_when_asked(place: Place) -> None:
    status, out, _ = finished_run(
        place, lambda spec, n: failed(Status.OOM, "rank 0: full") if n == 3 else None
    )
    assert status == BAD and "rank 0: full" in out
    made = with_launcher(place)
    assert place.call("run", "--resume", "out")[0] == BAD
    assert made[0].specs == []
    made = with_launcher(place)
    assert place.call("run", "--resume", "out", "--retry-failed")[0] == GOOD
    # It was of the first block, so it is compared with the reference, whose training has to be made again.
    assert [spec.passes for spec in made[0].specs] == [("time", "update"), ALL_PASSES]
    assert pd.read_parquet("out/trials.parquet")["status"].tolist() == ["ok"] * 12
    assert len(Journal(place.folder / "out").read()) == 13, "the failure is kept"


def test_a_torn_line_is_moved_aside_and_told(place: Place) -> None:
    finished_run(place)
    path = place.folder / "out" / "trials.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    manifest = read_document(place.folder / "out")
    write_document(
        place.folder / "out", {key: value for key, value in manifest.items() if key != "finished"}
    )
    made = with_launcher(place)
    status, out, _ = place.call("run", "--resume", "out")
    assert status == GOOD
    assert "was cut short" in out and "out/trials.torn-1" in out
    assert [spec.passes for spec in made[0].specs] == [("time",)]


def close_twice() -> None:
    """What shutil.rmtree does if it is interrupted just after it has closed a folder."""
    number = os.open(os.curdir, os.O_RDONLY)
    try:
        os.close(number)
        raise KeyboardInterrupt
    finally:
        os.close(number)


class Named:
    """An interrupt comes while a class is made: Python 3.11 raises RuntimeError from it, later ones the interrupt."""

    def __set_name__(self, owner: type, name: str) -> None:
        raise KeyboardInterrupt


def make_a_class() -> None:
    type("Owner", (), {"one": Named()})


@pytest.mark.parametrize("action", [close_twice, make_a_class])
def test_an_interrupt_that_becomes_an_error_on_its_way_is_one(
    place: Place, action: Callable[[], None]
) -> None:
    with_launcher(place, at_trial(4, action))
    status, out, err = place.call("run", "--matrix", place.matrix(), "--out", "out")
    assert (status, err) == (INTERRUPTED, "")
    assert out.splitlines()[-1].endswith("go on with: python -m bench run --resume out")


def fail_at_the_end() -> None:
    """The disk fails while an interrupted trial is recorded."""
    try:
        raise KeyboardInterrupt
    finally:
        raise OSError(errno.EIO, "Input/output error")


def test_an_error_on_top_of_an_interrupt_is_told(place: Place) -> None:
    with_launcher(place, at_trial(4, fail_at_the_end))
    status, _, err = place.call("run", "--matrix", place.matrix(), "--out", "out")
    assert status == WRONG
    assert err.startswith("bench: out: [Errno 5] Input/output error; ")
    assert "go on with: " in err


NO_SPACE = raises(OSError(errno.ENOSPC, "No space left on device"))


def test_a_full_disk_ends_the_run_with_all_finished_trials(place: Place) -> None:
    with_launcher(place, at_trial(4, NO_SPACE))
    status, _, err = place.call("run", "--matrix", place.matrix(), "--out", "out")
    assert status == WRONG
    assert err.startswith("bench: out: the disk is full; ") and err.count("\n") == 1
    assert err.endswith("go on with: python -m bench run --resume out\n")
    assert len(Journal(place.folder / "out").read()) == 4


def test_a_run_that_will_not_fit_is_not_begun(place: Place) -> None:
    place.patch.setattr(start, "free", lambda folder: 2**24)
    words = r"--out out: .* needs about \d+ MiB, .* 16 MiB are free"
    assert re.search(words, place.refused("run", "--matrix", place.matrix(), "--out", "out"))


def test_tables_are_rebuilt_from_the_journal_alone(place: Place) -> None:
    finished_run(place)
    before = {path.name: pd.read_parquet(path) for path in Path("out").glob("*.parquet")}
    for path in Path("out").glob("*.parquet"):
        path.write_bytes(b"no parquet")
    place.patch.setattr(figures, "draw", NO_SPACE)
    status, out, _ = place.call("report", "out", "--rebuild")
    assert status == GOOD
    assert sorted(out.split()) == sorted(f"out/{name}" for name in before)
    for name, frame in before.items():
        pd.testing.assert_frame_equal(pd.read_parquet(f"out/{name}"), frame)
    assert "--plots: cannot be combined with --rebuild" in place.refused(
        "report", "out", "--rebuild", "--plots", "x"
    )


def test_a_failed_trace_leaves_files_as_they_were(place: Place) -> None:
    finished_run(place)
    label = "ddp-deferred N=2 W=2 fp32"
    place.refused("trace", "out", label, "--out", "out")
    Path("folder.json.gz").mkdir()
    assert "Is a directory" in place.refused("trace", "out", label, "--out", "folder.json.gz")
    with_launcher(place, lambda spec, number: failed(reason="no luck"))
    Path("old.json.gz").write_bytes(b"an earlier trace")
    before = place.files()
    for name in ("old.json.gz", "new.json.gz"):
        status, _, err = place.call("trace", "out", label, "--out", name)
        assert status == BAD and "no luck" in err
    assert place.files() == before


def test_a_run_whose_reader_has_gone_says_how_to_go_on(place: Place) -> None:
    with_launcher(place)
    place.patch.setattr(sys, "stdout", GoneReader())
    assert main(["run", "--matrix", place.matrix(), "--out", "out"]) == INTERRUPTED
    assert "go on with: python -m bench run --resume out" in place.capture.readouterr().err


def test_as_a_program(tmp_path: Path) -> None:
    """The exit status of the process, a reader that goes away early, and a full disk."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    script = textwrap.dedent(
        f"""
        {sys.executable} -m bench plan --matrix nope; echo "status $?"
        {sys.executable} -m bench plan --matrix cpu | head -1 > /dev/null; echo "status ${{PIPESTATUS[0]}}"
        {sys.executable} -m bench check {ROOT}/results/cpu | true; echo "status ${{PIPESTATUS[0]}}"
        {sys.executable} -m bench backends > /dev/full; echo "status $?"
        {sys.executable} -m bench check {ROOT}/results/cpu --citation - <&-; echo "status $?"
        {sys.executable} -m bench check {ROOT}/results/cpu >&-; echo "status $?"
        """
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert re.findall("[0-9]+", done.stdout) == ["2", "0", "0", "2", "2", "0"]
    unknown, full, closed = done.stderr.splitlines()
    assert unknown.startswith("bench: --matrix nope: unknown; ")
    assert full.startswith("bench: the disk is full")
    assert closed.startswith("bench: --citation -: standard input is closed")
