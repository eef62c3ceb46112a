"""What the settings are worth that the maintainers of a framework could object to: each beside its alternative.

``python -m studies.objections`` trains the backends of ``studies.variants`` beside those that they vary, in the blocks
of one run of a few minutes, times gloo's collectives, and keeps what docs/settings.md says of it in
results/objections.json. ``--budget S`` limits the trials; an idle machine needs eleven minutes. It needs a C++ compiler
for DeepSpeed's operators.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from bench import files
from bench.backends.base import EXTRA_BACKENDS, registry
from bench.formatting import plural
from bench.judge.baseline import interim_analysis
from bench.judge.loading import Run, load
from bench.judge.statistics import Interval, ratio
from bench.launch.launcher import Launcher
from bench.measure.host import IDLE_SHARE
from bench.plan import matrix as matrix_file
from bench.plan.cell import Cell, Device
from bench.plan.expand import expand
from bench.report.progress import Display
from bench.run import start
from bench.run.machine import FRAMEWORKS
from bench.run.runner import Runner
from bench.run.start import Planned
from studies import ROOT, variants

STORED = ROOT / "results" / "objections.json"
SCRATCH = ROOT / ".nox" / "objections"
BUDGET_S = 660
PAIRS: Mapping[str, tuple[str, str]] = {
    "barebones": ("lightning-ddp-barebones", "lightning-ddp"),
    "lightning": ("lightning-ddp", "ddp-deferred"),
    "shm": ("deepspeed-zero2-shm", "deepspeed-zero2-eager"),
    "cpu_adam": ("deepspeed-zero2-cpu-adam", "deepspeed-zero2-eager"),
    "bucket": ("deepspeed-zero2-small-bucket-eager", "deepspeed-zero2-eager"),
    "zero2": ("deepspeed-zero2-deferred", "deepspeed-zero2-eager"),
    "zero2_small": (
        "deepspeed-zero2-small-bucket-deferred",
        "deepspeed-zero2-small-bucket-eager",
    ),
    "loader": ("hf-trainer-ddp-own-loader", "hf-trainer-ddp"),
    "views": ("hf-trainer-ddp-views", "hf-trainer-ddp"),
    "places": ("accelerate-ddp-places", "accelerate-ddp"),
    "init": ("torchtitan-own-init", "torchtitan-eager"),
    "gloo": ("fsdp2-deferred", "fsdp2-eager"),
    "all_to_all": ("fsdp2-deferred-all-to-all", "fsdp2-eager-all-to-all"),
    "eager": ("fsdp2-eager-all-to-all", "fsdp2-eager"),
    "deferred": ("fsdp2-deferred-all-to-all", "fsdp2-deferred"),
}
"""What is compared with what, by the name that settings.toml has for it."""
ONCE = (
    "deepspeed-zero2-shm",
    "deepspeed-zero2-deferred",
    "deepspeed-zero2-small-bucket-deferred",
)
"""Of which only peaks and calls are told, so that one trial will do."""
DOCUMENT: dict[str, Any] = {
    "description": "what maintainers could object to, beside its alternative",
    "device": "cpu",
    "repeats": 5,
    "max_repeats": 50,
    "precision": 0.02,
    "baseline": "ddp-deferred",
    "workload": {"model": "tiny", "sequence_length": 64, "global_batch_size": 16},
    "training": {"warmup_windows": 2, "timed_windows": 4, "seed": 0},
    "axes": {
        "backend": list(dict.fromkeys(itertools.chain(*PAIRS.values()))),
        "accumulate": [4],
        "world_size": [2],
    },
}
"""The model, the ranks, the batch and the windows of the matrix ``popular``."""
SIZES = (2**18, 2**20, 2**22, 2**24)
"""Bytes of the collectives that are timed."""
ROUNDS = 40
MIB = 2**20
UNKNOWN = "(?)"
"""Stands for a time that was not measured well enough."""


def build_operators() -> None:
    """Build DeepSpeed's operators for the CPU, once, where the ranks will find them. Raises CalledProcessError."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(SCRATCH.with_name("torch-extensions"))
    program = (
        "from deepspeed.ops.op_builder import CPUAdamBuilder;"
        "from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder;"
        "CPUAdamBuilder().load(); ShareMemCommBuilder().load()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def train(folder: Path, budget_s: float) -> Run:
    """The run: all backends of PAIRS in blocks."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ[EXTRA_BACKENDS] = variants.PLACES
    backends = registry()
    document = DOCUMENT | {"budget_s": budget_s}
    chosen = matrix_file.parse(document, name="objections", source="studies/objections.py")
    cells = expand(chosen, backends, 0).cells
    once = [cell.cell_id for cell in cells if cell.backend in ONCE]
    planned = Planned(chosen, backends, cells, once)
    manifest = start.create(folder, planned, cold=False)
    with (
        Display(Console(stderr=True), {}) as display,
        files.run_folder(folder, str(folder)),
        Launcher(Device.CPU) as launcher,
    ):
        Runner(folder, manifest, backends, launcher, display, interim_analysis).run()
    return load(folder)


def summary(run: Run) -> dict[str, Any]:
    """What is kept of the run: its machine and packages, and of each pair the ratio of times, and both peaks."""
    cells = {cell.backend: cell for cell in run.cells.values() if not cell.twin}
    machine = run.manifest.machine
    trials = run.tables.trials
    taken = (trials["foreign_cores"] + trials["stolen_cores"]) / machine.cores
    packages = {
        name: version for name, version in run.manifest.packages.items() if name in FRAMEWORKS
    }
    return {
        "date": run.manifest.started[:10],
        "model": cells[DOCUMENT["baseline"]].model,
        "cpu": machine.cpu,
        "cores": machine.cores,
        "packages": packages,
        "taken": round(float(taken.median()), 3),
        "pairs": {
            name: _pair(run, *(cells[each] for each in pair)) for name, pair in PAIRS.items()
        },
        "shm_calls": _setting(run, cells["deepspeed-zero2-shm"], "shm_calls"),
    }


def _pair(run: Run, cell: Cell, base: Cell) -> dict[str, Any]:
    sides = [run.evidence.of(each) for each in (cell, base)]
    wrong = [side.outcome for side in sides if side.status != "ok"]
    if wrong:
        return {"failed": f"{wrong[0]}: {next(side.reason for side in sides if side.reason)}"}
    time: Interval = ratio(*(side.sample for side in sides))
    ends = [None if end is None else round(end, 4) for end in (time.ratio, time.low, time.high)]
    return {
        "ratio": ends[0],
        "low": ends[1],
        "high": ends[2],
        "blocks": time.num_trials,
        "peak_mib": [round((side.peak_memory_bytes or 0) / MIB, 2) for side in sides],
    }


def _setting(run: Run, cell: Cell, name: str) -> Any:
    """A setting that the first trial of a cell has recorded; None if it failed."""
    for record in run.records:
        if record.cell == cell and record.time is not None:
            return record.time.settings.get(name)
    return None


def time_collectives(
    sizes: Sequence[int] = SIZES, rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """The median seconds of gloo's collectives on two ranks by bytes, the slower rank's, each in turn with the others.

    Raises AssertionError if the two ways to reduce and scatter differ.
    """
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_time_collectives, (folder, sizes, rounds), nprocs=2)
        found: dict[str, dict[str, float]] = json.loads(
            (Path(folder) / "seconds.json").read_text(encoding="utf-8")
        )
    return found


def _time_collectives(rank: int, folder: str, sizes: Sequence[int], rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found: dict[str, dict[str, float]] = {}
    for size in sizes:
        calls = dict(_collectives(size // 4))
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 2):
            for name, call in calls.items():
                dist.barrier()
                begin = time.perf_counter()
                call()
                took = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
                dist.all_reduce(took, dist.ReduceOp.MAX)
                if number >= 2:  # the first open connections
                    seconds[name].append(float(took))
        found[str(size)] = {name: median(values) for name, values in seconds.items()}
    if rank == 0:
        (Path(folder) / "seconds.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def _collectives(elements: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """The all-reduce of a gradient, and two ways to reduce and scatter it."""
    import torch
    import torch.distributed as dist

    generator = torch.Generator().manual_seed(dist.get_rank())
    whole = torch.randn(elements, generator=generator)
    part, other = torch.empty(elements // 2), torch.empty(elements // 2)
    group, op = dist.group.WORLD, dist.ReduceOp.SUM
    assert group is not None
    comm = variants.AllToAllReduceScatter()
    comm(other, whole, group, op)
    dist.reduce_scatter_single(part, whole)
    assert torch.equal(part, other)
    yield "all_reduce", functools.partial(dist.all_reduce, torch.ones(elements))
    yield "reduce_scatter", functools.partial(dist.reduce_scatter_single, part, whole)
    yield "all_to_all", functools.partial(comm, other, whole, group, op)


def words() -> dict[str, str]:
    """What docs/settings.md may name, in words: of each pair the ratio of times, and both peaks as ``NAME_peak``.

    gloo's milliseconds for 4 MiB are ``ms_OPERATION``. What a busy machine has timed, or fewer blocks than an interval
    needs, is UNKNOWN.
    """
    stored = json.loads(STORED.read_text(encoding="utf-8"))
    is_idle = stored["taken"] <= IDLE_SHARE
    found: dict[str, str] = {}
    for name, pair in stored["pairs"].items():
        found[name] = UNKNOWN
        if is_idle and pair.get("low") is not None:
            found[name] = f"{pair['ratio']:.2f} ({pair['low']:.2f} to {pair['high']:.2f})"
        if "peak_mib" in pair:
            mine, other = pair["peak_mib"]
            found[f"{name}_peak"] = f"{mine:.1f} MiB instead of {other:.1f}"
            found[f"{name}_peaks"] = f"{mine:.1f} and {other:.1f} MiB"
    whole, small = (stored["pairs"][name]["peak_mib"] for name in ("zero2", "zero2_small"))
    is_other = (whole[0] < whole[1]) != (small[0] < small[1])
    found["zero2_order"] = "the other order" if is_other else "the same order"
    for name, seconds in stored["collectives"][str(4 * MIB)].items():
        found[f"ms_{name}"] = f"{1e3 * seconds:.1f}" if is_idle else UNKNOWN
    return found | {"shm_calls": str(stored["shm_calls"]), "about": _about(stored, is_idle=is_idle)}


def _about(stored: Mapping[str, Any], *, is_idle: bool) -> str:
    blocks = max(pair.get("blocks", 0) for pair in stored["pairs"].values())
    text = (
        f"{stored['date']}, model {stored['model']}, {stored['cpu']}, {stored['cores']} cores, "
        f"{plural(blocks, 'block')}"
    )
    if is_idle:
        return text
    return f"{text}. {UNKNOWN}: not measured, other programs took {100 * stored['taken']:.0f} % of the CPUs"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m studies.objections", description=__doc__)
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="S")
    arguments = parser.parse_args(argv)
    build_operators()
    shutil.rmtree(SCRATCH, ignore_errors=True)
    found = summary(train(SCRATCH, arguments.budget)) | {"collectives": time_collectives()}
    STORED.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(STORED.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
