"""The page on memory and bytes: what was counted in real and virtual worlds, beside what formulas say.

``python -m studies.bytes_page`` writes it from the runs in results; nothing is measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bench.backends.base import Offloading
from bench.forecast.fit import peaks
from bench.judge.formulas import BUILT_IN, expect, layout_of
from bench.judge.loading import Run, load
from bench.judge.offload import USES
from bench.judge.tables import rows_of
from bench.plan.categories import COPIED_TO_DEVICE, COPIED_TO_HOST, HELD, ON_HOST, PEAK, PINNED
from bench.plan.cell import Cell, Device, Precision, RankGroup, Status
from bench.plan.models import SIZES
from bench.plan.world import World
from bench.tabular import markdown_table
from studies import ROOT, published_peaks
from studies.families import together

RUNS = ("results/bytes", "results/bytes-8b")
SUMMED = "results/bytes/accumulation.jsonl"
"""What ``accumulation --errors --json`` printed."""
PEAKS = "tests/forecast/peaks.jsonl"
"""More virtual worlds on the CPU, with their exact peaks in bytes: on fake tensors, and DDP's on real ones."""
DOCS = "docs/memory-and-bytes.md"
MIB, GIB = 2**20, 2**30
LIMITS = (0.05, 0.2)
"""Errors of predicted peaks up to which the page counts cells."""
KINDS = {World.REAL: "real", World.VIRTUAL: "virtual", World.FAKE: "fake tensors"}
"""Worlds in words, in order."""
OFFLOADED = Cell(
    backend="",
    model="8b",
    accumulate=4,
    world_size=8,
    global_batch_size=32,
    sequence_length=4096,
    precision=Precision.BF16,
    optimizer="adamw-fused",
    device=Device.CUDA,
)
"""For which the page lists what rests on the host."""
LEAST_SHOWN = 0.05 * MIB
"""Bytes of an operation in a step, below which the page leaves it out."""
SHOWN_MODEL, SHOWN_WORLD, SHOWN_N = "tiny", 4, 4
"""Model, world and N of the collectives that the page lists, and of what is held."""
MOST_SHOWN = 8
"""Ranks of the largest small world whose held gradients the page lists."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The tables of all runs that the page is about, one row per cell and thing."""

    trials: pd.DataFrame
    collectives: pd.DataFrame
    memory: pd.DataFrame

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Measured:
        """The first good trial of each cell, with everything that a formula was held against."""
        trials = pd.concat([run.tables.trials for run in runs], ignore_index=True)
        good = trials[
            trials["status"].isin([Status.OK, Status.INVALID]) & (trials["twin"].fillna("") == "")
        ]
        first = good.sort_values("repeat").drop_duplicates("cell_id")
        cells = {cell_id: cell for run in runs for cell_id, cell in run.cells.items()}
        first = first.assign(cell=[cells[cell_id] for cell_id in first["cell_id"]])
        first = first.assign(world=first["cell"].map(_world))
        keys = first[["cell_id", "repeat", "backend", "accumulate", "world_size", "world", "model"]]
        collectives, memory = (
            pd.concat([getattr(run.tables, name) for run in runs], ignore_index=True).merge(
                keys, on=["cell_id", "repeat"]
            )
            for name in ("collectives", "memory")
        )
        return cls(first, collectives, memory)


def _world(cell: Cell) -> str:
    """Which kind of world a cell is in, in words."""
    return f"{KINDS[cell.world]}, W = {cell.world_size}, {cell.model}"


def _place(world: str) -> tuple[int, int]:
    """Where a world stands among others: real ones first, and each kind by its size."""
    kind, size, _ = world.split(", ")
    return list(KINDS.values()).index(kind), int(size.removeprefix("W = "))


def exact_peaks(runs: Sequence[Run] = ()) -> dict[Cell, int]:
    """Peaks in bytes as measured, of the cells of PEAKS and of runs."""
    rows = map(json.loads, (ROOT / PEAKS).read_text(encoding="utf-8").splitlines())
    found = {Cell.from_dict(row["cell"]): int(row["bytes"]) for row in rows}
    for run in runs:
        memory = run.tables.memory[run.tables.memory["category"] == PEAK]
        found |= {run.cells[row["cell_id"]]: row["bytes"] for row in rows_of(memory)}
    return found


def peak_errors(exact: Mapping[Cell, int]) -> pd.DataFrame:
    """The relative ``error`` of the predicted peak of each cell, if it has one, with its ``model`` and ``label``."""
    predicted = peaks([*exact])
    return pd.DataFrame(
        {"model": cell.model, "label": cell.label, "error": predicted[cell.cell_id] / peak - 1}
        for cell, peak in exact.items()
        if cell.cell_id in predicted and not cell.twin
    )


def page(runs: Sequence[Run], accumulation: Sequence[Mapping[str, Any]]) -> str:
    measured = Measured.of(runs)
    lines = [
        "# Where the memory and the bytes go",
        "",
        "Written by `nox -s results -- memory`.",
        "",
        "Collectives are counted where they are handed to the process group; memory is a ledger of live tensors. Both "
        "are calculated too ([formulas.py](../bench/judge/formulas.py), with sources), and a difference makes a cell "
        "`invalid`. Real worlds are process groups over gloo on the CPU. In a virtual one a single process is rank 0 "
        "of W and pretends to communicate; with fake tensors nothing is allocated either. Only the published peaks are "
        "from GPUs; [GPUs](gpu.md) has what was measured on one.",
        "",
        "## Measured against formula",
        "",
        *_agreement(measured),
        *_peaks(peak_errors(exact_peaks(runs))),
        *published_peaks.section(),
        *_collectives(measured),
        *_held(measured),
        *_offload(),
        *_large(measured),
        *_accumulation(accumulation),
    ]
    return "\n".join(lines)


def _agreement(measured: Measured) -> list[str]:
    """How many counts and held bytes are as calculated, by kind of world."""
    counted = measured.collectives.dropna(subset=["expected_calls"])
    same = (counted["calls"] == counted["expected_calls"]) & (
        counted["payload_bytes"] == counted["expected_payload_bytes"]
    )
    memory = measured.memory.dropna(subset=["expected_bytes"])
    held = memory[memory["category"].str.startswith(HELD)]
    is_equal = held["bytes"] == held["expected_bytes"]
    rows = []
    for kind in KINDS.values():
        trials = _of_kind(measured.trials, kind)
        if trials.empty:
            continue
        models = ", ".join(sorted(set(trials["model"])))
        sizes = ", ".join(str(size) for size in sorted(set(trials["world_size"])))
        of_kind = _of_kind(counted, kind).index
        held_of_kind = _of_kind(held, kind).index
        rows.append(
            (
                f"{kind}, {models}, W = {sizes}",
                str(len(trials)),
                f"{int(same[of_kind].sum())} of {len(of_kind)}",
                f"{int(is_equal[held_of_kind].sum())} of {len(held_of_kind)}",
            )
        )
    return [
        *markdown_table(
            ("worlds", "cells", "operations with equal calls and bytes", "held bytes equal"), rows
        ),
        "Held, to the byte and with the padding of uneven shards, are parameters, gradients, optimizer state and "
        "communication buffers between two micro-batches; at N = 1 there is no such moment.",
        "",
    ]


def _of_kind(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows of worlds of one kind."""
    return frame[frame["world"].str.startswith(f"{kind}, ")]


def _peaks(errors: pd.DataFrame) -> list[str]:
    rows = []
    for model in [name for name in SIZES if name in set(errors["model"])]:
        found = errors[errors["model"] == model]
        farthest = found.loc[found["error"].abs().idxmax()]
        shares = (f"{100 * (found['error'].abs() <= limit).mean():.1f} %" for limit in LIMITS)
        rows.append(
            (
                model,
                str(len(found)),
                *shares,
                f"{100 * farthest['error']:+.2f} %, {farthest['label']}",
            )
        )
    return [
        "## Predicted peaks against exact ones",
        "",
        "`predict` calculates a rank's peak by a closed form in which nothing is fitted "
        "([footprint.py](../bench/forecast/footprint.py)); it omits tensors of a few tokens, which matter in tiny. "
        "Exact peaks are of all live tensors but the tokens of all windows and the model's buffers. Cells of tiny are "
        "those above; the others vary backend, N, W, precision, length and checkpointing, on fake tensors as by "
        "`predict --exact`, DDP's on real ones.",
        "",
        *markdown_table(
            ("model", "cells", *(f"within {100 * limit:g} %" for limit in LIMITS), "farthest"), rows
        ),
    ]


def _collectives(measured: Measured) -> list[str]:
    shown = measured.collectives
    shown = shown[(shown["world"].str.startswith("real")) & (shown["world_size"] == SHOWN_WORLD)]
    shown = shown[shown["accumulate"] == SHOWN_N]
    sent: dict[str, list[str]] = {}
    for row in rows_of(shown.sort_values(["backend", "op", "dtype", "group"])):
        texts = sent.setdefault(str(row["backend"]), [])
        if row["payload_bytes"] >= LEAST_SHOWN:
            texts.append(_amount(row))
    rows = _merged((backend, "<br>".join(texts)) for backend, texts in sent.items())
    return [
        f"## Collectives of one optimizer step, {SHOWN_MODEL}, W = {SHOWN_WORLD}",
        "",
        "Calls, operation and MiB of payload, fp32 unless said: the whole tensor, which each rank of the group has "
        "after a gather or before a reduction. HSDP has two replicas. Operations below 0.05 MiB, such as broadcasts "
        "of buffers, norms and counts of tokens, N = 1 and all other worlds are in "
        "[collectives.parquet](../results/bytes/collectives.parquet).",
        "",
        *markdown_table(("backend", f"N = {SHOWN_N}"), rows),
    ]


def _merged(rows: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Rows of backends, those with equal values as one, in the order in which the bench lists backends."""
    names: dict[tuple[Any, ...], list[str]] = {}
    found = sorted(rows, key=lambda row: list(BUILT_IN).index(row[0]))
    for backend, *values in found:
        names.setdefault(tuple(values), []).append(backend)
    every = list(dict.fromkeys(row[0] for row in found))
    return [(", ".join(together(shared, every)), *values) for values, shared in names.items()]


def _amount(row: Mapping[str, Any]) -> str:
    """``9 all_gather 23.0``."""
    size = row["payload_bytes"] / MIB
    dtype = "" if row["dtype"] == "float32" else f" of {row['dtype']}"
    ranks = "" if row["group"] == RankGroup.WORLD else f" ({row['group']})"
    return f"{row['calls']} {row['op']}{dtype}{ranks} {size:.1f}"


def _held(measured: Measured) -> list[str]:
    memory = measured.memory[
        (measured.memory["category"] == "held_gradients")
        & (measured.memory["accumulate"] == SHOWN_N)
    ]
    memory = memory[~memory["world"].str.startswith("fake") & (memory["world_size"] <= MOST_SHOWN)]
    worlds = sorted(memory["world"].unique(), key=_place)
    rows = []
    for backend, part in memory.groupby("backend"):
        by_world = part.set_index("world")["bytes"]
        rows.append(
            (str(backend), *(f"{by_world[w] / MIB:.2f}" if w in by_world else "-" for w in worlds))
        )
    return [
        f"## Gradients held between micro-batches, {SHOWN_MODEL}, N = {SHOWN_N}, MiB per rank",
        "",
        "Where gradients are sharded, a rank holds its shard under eager sync (ZeRO-2 in fp32: each parameter that "
        "overlaps it, whole), and all of them under deferred sync, whatever W (DeepSpeed's ZeRO-3 a shard "
        "besides). DeepSpeed's offload holds one more, on the host. DDP holds all gradients, and under deferred sync "
        "twice: unreduced sums, and buckets of which reduced ones are views. HF Trainer's has no views; its buckets "
        "count as communication. On one rank Accelerate defers nothing under DDP.",
        "",
        *markdown_table(
            ("backend", *(w.removesuffix(f", {SHOWN_MODEL}") for w in worlds)), _merged(rows)
        ),
    ]


def _offload() -> list[str]:
    """What rests on the host, by formula; tests/cuda/test_offload.py holds it against trials over a stub of CUDA."""
    rows = []
    for name, backend in BUILT_IN.items():
        if not issubclass(backend, Offloading):
            continue
        cell = dataclasses.replace(OFFLOADED, backend=name)
        if backend.refuses.bf16:
            cell = dataclasses.replace(cell, precision=Precision.FP32)
        layout = layout_of(cell)
        assert layout is not None, "it is a shipped model"
        expectation = expect(cell, layout)
        assert expectation is not None, "every backend here has a formula"
        on_host = expectation.beside
        parts = [
            [expectation.held[use] for use in ("parameters", "gradients", "communication")],
            [on_host[f"{ON_HOST}_{HELD}_{use}"] for use in USES],
            *([on_host[key]] for key in (PINNED, COPIED_TO_DEVICE, COPIED_TO_HOST)),
        ]
        cells = (", ".join(f"{size / GIB:.2f}" for size in sizes) for sizes in parts)
        precision = "" if cell.precision == OFFLOADED.precision else f" ({cell.precision})"
        rows.append((f"{name}{precision}", *cells))
    cell = OFFLOADED
    return [
        f"## Offload: {cell.model} on {cell.world_size} GPUs, N = {cell.accumulate}, {cell.precision}, GiB per rank",
        "",
        "By formula ([offload.py](../bench/judge/offload.py)); not measured on a GPU. Small models over a stub of "
        "CUDA, with DeepSpeed and torch as they are, hold and copy the same to the byte "
        "([test_offload.py](../tests/cuda/test_offload.py)). *Device* and *host* hold parameters, gradients, the "
        "optimizer state (host alone) and buffers between micro-batches; torch rounds each *pinned* tensor up to a "
        "power of two. The last two columns are copied per optimizer step: by FSDP2 shards in fp32 whatever the "
        "precision, by ZeRO-3 its sums in every micro-batch. On a CPU nothing is copied, ZeRO holds both sides, and "
        "FSDP2 what it holds without offload.",
        "",
        *markdown_table(("backend", "device", "host", "pinned", "to device", "to host"), rows),
    ]


def _large(measured: Measured) -> list[str]:
    fake = measured.trials[[cell.world is World.FAKE for cell in measured.trials["cell"]]]
    if fake.empty:
        return []
    memory = measured.memory.pivot_table(
        index="cell_id", columns="category", values="bytes", aggfunc="max"
    )
    gradients: dict[tuple[int, str], float] = {}
    texts: dict[str, dict[int, str]] = {}
    for trial in fake.sort_values(["world_size", "backend"]).to_dict("records"):
        held = memory.loc[trial["cell_id"]]
        gradients[trial["world_size"], trial["backend"]] = held["held_gradients"]
        sizes = (
            held[f"held_{use}"] / GIB for use in ("parameters", "gradients", "optimizer_state")
        )
        of_worlds = texts.setdefault(trial["backend"], {})
        of_worlds[trial["world_size"]] = ", ".join(f"{size:.2f}" for size in sizes)
    worlds = sorted({min(fake["world_size"]), max(fake["world_size"])})
    rows = [
        (backend, *(of_worlds.get(world, "-") for world in worlds))
        for backend, of_worlds in texts.items()
    ]
    (model,), (n,) = set(fake["model"]), set(fake["accumulate"])
    return [
        f"## At scale: {model}, fake tensors, GiB held per rank",
        "",
        f"Parameters, gradients and optimizer state, N = {n}:",
        "",
        *markdown_table(("backend", *(f"W = {world}" for world in worlds)), rows),
        *_unsharded(fake, gradients),
    ]


def _unsharded(fake: pd.DataFrame, gradients: Mapping[tuple[int, str], float]) -> list[str]:
    """How much more gradients FSDP2 holds deferred than eager, and whether that follows from the formula."""
    worlds, more, due = [], [], []
    for world_size in sorted({w for w, _ in gradients}):
        pair = [gradients.get((world_size, name)) for name in ("fsdp2-deferred", "fsdp2-eager")]
        if pair[0] is None or pair[1] is None:
            continue
        cell: Cell = fake[fake["world_size"] == world_size].iloc[0]["cell"]
        layout = layout_of(cell)
        assert layout is not None, "fake tensors are of shipped models"
        whole = 4 * layout.num_parameters
        worlds.append(str(world_size))
        more.append(f"{(pair[0] - pair[1]) / GIB:.4f}")
        due.append(f"{whole * (1 - 1 / world_size) / GIB:.4f}")
    if not worlds:
        return []
    sentence = "Of P parameters `fsdp2-deferred` holds 4P(1 - 1/W) bytes more gradients than `fsdp2-eager`."
    if more != due:
        sentence = (
            f"At W = {', '.join(worlds)} `fsdp2-deferred` holds {', '.join(more)} GiB more gradients than "
            f"`fsdp2-eager`; 4P(1 - 1/W), without the padding of shards, is {', '.join(due)}."
        )
    return [sentence, ""]


def _accumulation(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """In which dtype backends sum, and the largest error at the largest N; backends with one dtype share a row."""
    if not rows:
        return []
    found: dict[tuple[str, str], dict[str, float | None]] = {}
    without: dict[str, list[str]] = {}
    every: dict[str, list[str]] = {}
    most = max(e["accumulate"] for row in rows for e in row.get("errors", ()) if e)
    for row in rows:
        name, precision = row["backend"], row["precision"]
        every.setdefault(precision, []).append(name)
        if row.get("reason"):
            without.setdefault(row["reason"], []).append(f"{name} in {precision}")
        errors = [e["error"] for e in row.get("errors", ()) if e and e["accumulate"] == most]
        found.setdefault((precision, row["dtype"]), {})[name] = max(errors, default=None)
    table = []
    for (precision, dtype), by_name in found.items():
        known = [error for error in by_name.values() if error is not None]
        largest = f"{max(known):.1e}" if known else "-"
        table.append((_named(list(by_name), every[precision]), precision, dtype, largest))
    return [
        "## In which dtype gradients are summed",
        "",
        "*Summed in* is found with gradients that fp32 sums exactly and bf16 does not (`python -m bench accumulation "
        f"--errors`, W = 2). The error is relative (L2), of other sums against fp64 ([by N](../{SUMMED})).",
        "",
        *markdown_table(("backend", "precision", "summed in", f"largest error, N = {most}"), table),
        *(f"- {reason}: {', '.join(who)}." for reason, who in without.items()),
        "",
    ]


def _named(names: Sequence[str], every: Sequence[str]) -> str:
    """Backends, by those that are missing where these are few."""
    shown = together(names, every)
    others = together([name for name in every if name not in names], every)
    if 2 * len(others) >= len(shown):
        return ", ".join(shown)
    if not others:
        return "all"
    return f"all but {', '.join(others)}"


def written(runs: Sequence[Run]) -> str:
    """The page on the committed runs, which are RUNS."""
    rows = [json.loads(line) for line in (ROOT / SUMMED).read_text(encoding="utf-8").splitlines()]
    return page(runs, rows)


if __name__ == "__main__":
    (ROOT / DOCS).write_text(written([load(ROOT / run) for run in RUNS]), encoding="utf-8")
    compared = published_peaks.compared()
    (ROOT / published_peaks.COMPARED).write_text(compared, encoding="utf-8")
