"""``python -m studies.lease SECONDS``: what is worth measuring on a GPU that is there for minutes, in order of value.

Every step has a time without which it is not started, and one at which it is ended. A second call goes on where the
first stopped: with the run that was cut off, then with the next step. After each step, and every minute of a run,
results are packed into one file per step in --out, so that they are there however this program ends. Before anything is
trained it is checked that packages, GPU and memory are as the steps need them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from studies import ROOT

GRACE_S = 15.0
"""How long a step may take to end after SIGTERM: a run writes what its finished trials came to."""
RESERVED_S = GRACE_S + 5.0
"""Kept free at the end of SECONDS: to end a step and to pack it."""
PACK_EVERY_S = 60.0
LARGEST_BYTES = 16 * 2**20
"""Of a packed file. Of a run that would be larger only its truth is packed (TRUTH)."""
TRUTH = ("run.json", "trials.jsonl")
"""The files of a run from which all others follow."""
ROOMY_BYTES = 12 * 10**9
"""Free memory in /dev/shm from which on steps are run there: the reference's update of 1b has 5 GB, and writing it to a
disk takes longer."""
CUT_OFF = 124
"""Exit status of a step that was ended, as of timeout(1)."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing to measure."""

    name: str
    """What --steps takes; with the kind of GPU before it, its folder and its packed file."""
    command: Sequence[str]
    needs_s: float
    """Not started with less time left."""
    limit_s: float
    """When it is ended."""
    is_run: bool = False
    """Whether it is a run of the bench, which has a folder and can be resumed."""
    matrix: str = ""
    """The matrix whose cells have to fit into the GPU."""


def _run(*options: str) -> list[str]:
    return [sys.executable, "-m", "bench", "run", *options]


def each(commands: Iterable[str]) -> list[str]:
    """A command that runs all of these; of one that fails or is not there it prints the name, and goes on."""
    return ["sh", "-c", "; ".join(f"{command} || echo no: {command}" for command in commands)]


def steps() -> list[Step]:
    """In order of value. On 2026-11-28 an H100 took 650 s for 1b, 105 of them after a resume, and 89 s for two-ranks;
    the other seconds are estimates (``bench.forecast.estimate``).
    """
    facts = (
        "nvidia-smi",
        "nvidia-smi -q -d CLOCK,POWER,COMPUTE",
        "lscpu",
        "free -g",
        "df -h /tmp /dev/shm",
        "ip -br a",
    )
    few = "ddp-deferred,fsdp2-eager,fsdp2-deferred,deepspeed-zero2-eager,deepspeed-zero3-eager"
    two_ranks = _run(
        "--matrix",
        "smoke",
        "--device",
        "cuda",
        "--world-size",
        "2",
        "--share-gpu",
        "--backend",
        few,
    )
    virtual = _run(
        "--matrix", "llama8b", "--virtual-world", "8", "--accumulate", "4", "--repeats", "1"
    )
    virtual += ["--selective-checkpointing", "on", "--backend", "fsdp2-eager,fsdp2-deferred"]
    small = _run("--matrix", "quick-gpu", "--backend", f"{few},lightning-ddp")
    other_n = _run(
        "--matrix", "h100-15min", "--accumulate", "1,8", "--baseline", "fsdp2-deferred", "--backend"
    )
    other_n += ["fsdp2-deferred,fsdp2-eager,deepspeed-zero2-eager,lightning-ddp"]
    race = [sys.executable, "-m", "tests.cuda.plain_zero3", "--gpu"]
    bare = [sys.executable, "-m", "studies.overhead.on_gpu"]
    return [
        Step(name="facts", command=each(facts), needs_s=5, limit_s=10),
        Step(
            name="1b",
            command=_run("--matrix", "h100-15min"),
            needs_s=90,
            limit_s=840,
            is_run=True,
            matrix="h100-15min",
        ),
        Step(name="two-ranks", command=two_ranks, needs_s=90, limit_s=180, is_run=True),
        Step(name="zero3", command=race, needs_s=90, limit_s=150),
        Step(name="bare-loops", command=bare, needs_s=75, limit_s=150),
        Step(name="virtual", command=virtual, needs_s=110, limit_s=240, is_run=True),
        Step(name="135m", command=small, needs_s=200, limit_s=540, is_run=True),
        Step(
            name="1b-other-n",
            command=other_n,
            needs_s=300,
            limit_s=840,
            is_run=True,
            matrix="h100-15min",
        ),
    ]


class Lease:
    """The steps that are done in a folder within a time, and packed into another folder."""

    def __init__(self, seconds: float, folder: Path, out: Path) -> None:
        self._ends = time.monotonic() + seconds - RESERVED_S
        self._folder, self._out = folder, out
        self._mark = uuid.uuid4().hex
        """In the environment of the processes of all steps, so that none outlives its step."""
        for needed in (folder, out):
            needed.mkdir(parents=True, exist_ok=True)

    def run(self, asked: Iterable[Step]) -> int:
        """Do as many steps as fit, and say how each ended; 1 if one of them failed."""
        failed = False
        for step in asked:
            if self._status(step) is not None:
                _say(f"{step.name}: was done by an earlier call")
                continue
            left = self._ends - time.monotonic()
            if left < step.needs_s:
                _say(
                    f"{step.name}: needs {step.needs_s:.0f} s, and {max(0.0, left):.0f} s are left"
                )
                continue
            began = time.monotonic()
            try:
                status = self._do(step, min(left, step.limit_s))
            finally:
                self._pack(step)
            is_at_own_limit = status == CUT_OFF and step.limit_s <= left
            # What the end of the lease cut off goes on in the next call, and so does a run.
            if status != CUT_OFF or (is_at_own_limit and not step.is_run):
                self._file(step, "status").write_text(str(status))
            failed = failed or status not in (0, CUT_OFF)
            ended = "was ended" if status == CUT_OFF else f"exit status {status}"
            _say(
                f"{step.name}: {ended} after {time.monotonic() - began:.0f} s",
                *self._last_lines(step),
            )
        return int(failed)

    def _file(self, step: Step, kind: str) -> Path:
        return self._folder / f"{step.name}.{kind}"

    def _status(self, step: Step) -> int | None:
        """How a step ended that is done; None if it is not."""
        path = self._file(step, "status")
        return int(path.read_text()) if path.exists() else None

    def _do(self, step: Step, seconds: float) -> int:
        """Do a step, or go on with it; its exit status, or CUT_OFF if it was ended after ``seconds``."""
        from bench.launch import stragglers  # its packages are there: that was checked

        command, folder = list(step.command), self._folder / step.name
        if step.is_run:
            has_begun = (folder / "run.json").exists()
            command = (
                _run("--resume", str(folder)) if has_begun else [*command, "--out", str(folder)]
            )
        until = time.monotonic() + seconds
        with self._file(step, "log").open("ab") as log:
            environment = os.environ | {stragglers.MARK: self._mark}
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                while (left := until - time.monotonic()) > 0:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        return process.wait(min(left, PACK_EVERY_S))
                    self._pack(step)
                return CUT_OFF
            finally:
                if process.poll() is None:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_S)
                stragglers.kill(lambda: stragglers.family(process.pid, self._mark))
                process.wait()

    def _pack(self, step: Step) -> None:
        """Put all of a step but its scratch files into one file, which is replaced as a whole."""
        packed = self._out / f"{step.name}.tar.gz"
        folder = self._folder / step.name
        files = [
            path for path in folder.rglob("*") if path.is_file() and "scratch" not in path.parts
        ]
        self._write(packed, [self._file(step, "log"), *files])
        if packed.stat().st_size > LARGEST_BYTES:
            self._write(packed, [self._file(step, "log"), *(folder / name for name in TRUTH)])

    def _write(self, packed: Path, files: Sequence[Path]) -> None:
        draft = packed.with_suffix(".draft")
        with tarfile.open(draft, "w:gz", compresslevel=3) as tar:
            for path in sorted(files):
                with contextlib.suppress(
                    FileNotFoundError
                ):  # it was replaced meanwhile, or the step has not begun
                    tar.add(path, path.relative_to(self._folder))
        draft.replace(packed)

    def _last_lines(self, step: Step) -> list[str]:
        text = self._file(step, "log").read_bytes()[-2000:].decode(errors="replace")
        return text.strip().splitlines()[-4:]


def _say(text: str, *more: str) -> None:
    print(f"lease: {text}", *more, sep="\n  ", flush=True)


def missing_packages() -> list[str]:
    """The dependencies of the bench that are not installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [
        re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in project["dependencies"]
    ]
    found = []
    for name in names:
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.append(name)
    return found


def problems(asked: Sequence[Step]) -> Iterator[str]:
    """What keeps the steps from being done on this machine, each in one line."""
    if missing := missing_packages():
        yield f"not installed: {', '.join(missing)}; install them (docs/offline.md says how without a network)"
        return
    from bench.findings import Level
    from bench.launch import gpu_checks
    from bench.launch.torch_facts import ask_torch

    facts = gpu_checks.gather(ask_torch()[0])
    if facts.nvml_error:
        what = f"NVML does not answer ({facts.nvml_error}), so nobody knows who else uses the GPU"
        yield f"{what}; install the driver's libnvidia-ml and nvidia-ml-py"
        return
    if not facts.visible:
        yield "no GPU is visible; see nvidia-smi and CUDA_VISIBLE_DEVICES"
        return
    for finding in (finding for check in gpu_checks.USABLE for finding in check(facts)):
        if finding.level is Level.ERROR:
            yield f"{finding.topic}: {finding.text}"
    if any(gpu["num_processes"] for gpu in facts.visible):
        yield from (finding.text for finding in gpu_checks.alone(facts))
    for matrix in filter(None, dict.fromkeys(step.matrix for step in asked)):
        yield from _too_large(matrix)


def _too_large(matrix: str) -> Iterator[str]:
    """Why the cells of a matrix do not fit into the GPU, if one does not."""
    from bench.backends.base import registry
    from bench.forecast import fit
    from bench.launch import gpus
    from bench.plan import matrix as matrix_file
    from bench.plan.expand import expand

    visible = gpus.gpus()
    cells = expand(matrix_file.load(matrix), registry(), len(visible)).cells
    reasons = fit.too_large(cells, min(int(gpu["memory_bytes"]) for gpu in visible), len(visible))
    if reasons:
        yield f"matrix {matrix} is for a larger GPU: {next(iter(reasons.values()))}; leave its step out with --steps"


def chosen(names: str) -> list[Step]:
    """The steps of these names, in the order in which they are named; all of them without names."""
    every = {step.name: step for step in steps()}
    asked = list(filter(None, names.split(","))) or list(every)
    if unknown := [name for name in asked if name not in every]:
        raise SystemExit(
            f"lease: --steps: '{unknown[0]}' is not a step; there are {', '.join(every)}"
        )
    return [every[name] for name in asked]


def named_after_gpu(asked: Iterable[Step]) -> list[Step]:
    """The steps with the kind of the first visible GPU in their names: ``1b`` on an H200 is ``h200-1b``."""
    from bench.launch import gpus  # its packages are there: that was checked
    from bench.plan.gpu_kinds import kind_of

    name = str(gpus.gpus()[0]["name"])
    words = re.findall(r"[a-z0-9]+", (kind_of(name) or name).lower())
    return [replace(step, name="-".join([*words, step.name])) for step in asked]


def default_folder() -> Path:
    """Where steps are run: in memory, if there is room, otherwise in the folder for temporary files."""
    shm = Path("/dev/shm")
    has_room = shm.is_dir() and shutil.disk_usage(shm).free > ROOMY_BYTES
    return (shm if has_room else Path(tempfile.gettempdir())) / "lease"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.lease", description=__doc__)
    option = parser.add_argument
    option("seconds", type=float, metavar="SECONDS", help="how long this call may take in all")
    option(
        "--steps",
        default="",
        metavar="NAME,...",
        help="do only these, in this order (default: all)",
    )
    option(
        "--folder",
        type=Path,
        metavar="DIR",
        help="where steps are run (default: in /dev/shm or /tmp)",
    )
    out = Path(os.environ.get("OUT", "."))
    option(
        "--out",
        type=Path,
        default=out,
        metavar="DIR",
        help="where packed results go (default: $OUT or .)",
    )
    arguments = parser.parse_args(argv)
    began = time.monotonic()
    asked = chosen(arguments.steps)
    found = list(problems(asked))
    for problem in found:
        print(f"lease: {problem}", file=sys.stderr)
    if found:
        return 2
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that what is begun is packed
    seconds = arguments.seconds - (time.monotonic() - began)
    return Lease(seconds, arguments.folder or default_folder(), arguments.out).run(
        named_after_gpu(asked)
    )


if __name__ == "__main__":
    raise SystemExit(main())
