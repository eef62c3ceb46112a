"""What ``predict`` prints: the recommendation, tables and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.forecast.choice import MARGIN, Choice, Choices, Question
from bench.forecast.fit import reserve_bytes, reserves
from bench.formatting import digits, size
from bench.grouping import grouped
from bench.plan.cell import Cell, among
from bench.plan.models import SIZES
from bench.tabular import Table

GIB = 2**30
COLUMNS = {
    "param": ("parameters",),
    "grad": ("gradients",),
    "optim": ("optimizer_state",),
    "activ": ("activations",),
    "other": ("communication", "temporaries"),
}
"""Columns of the table, each with the categories of ``bench.forecast.footprint`` that it adds up."""
SECONDS = {"comm/s": "communication_s", "overlapped/s": "overlapped_s", "serial/s": "serial_s"}
"""Further columns, each with its key."""
REMARKS = {
    "refusal": "refused",
    "not_predicted": "not predicted",
    "defect": "WRONG",
    "may_be_fastest": "may be the fastest",
    "best": "best",
    "recommended": "recommended",
}
"""What is said beside a row, by the key that must be set."""
WRAPPERS = (
    "= names wrappers that shard alike, reduce at the same times, and hold and send the same within 2 %; --all shows "
    "their rows."
)
PEAK = (
    "Peaks are a closed form: what is held, exactly, and at each moment of a window the activations that autograd "
    "saves (arXiv:2205.05198; a Llama block with fused attention) and the largest tensors of that moment (other: "
    "gathered and cast parameters, new gradients, buffers, work space). They are within 5 % in 95 % of the cells of "
    "models from 135m on, and up to 20 % off in smaller ones (docs/memory-and-bytes.md). --exact measures the peak of "
    "one backend on fake tensors."
)
"""tests/forecast/test_footprint.py checks these figures."""
TIMES = (
    "overlapped = max(compute, communication): communication is hidden as far as it can be; serial = compute + "
    "communication: none is. communication = calls x latency + wire bytes / link, with the wire bytes of ring "
    "algorithms. Both are estimates, not bounds: they leave out what the host does between collectives and waiting for "
    "slower ranks. In the CPU runs of results/ 0 of 120 steps took less than overlapped, and most took longer than "
    "serial, up to 2.4 times as long; 158 of 159 pairs of backends that the estimates tell apart were measured in "
    "that order (results/links/links.md). No GPU run has checked them yet."
)
"""tests/studies/test_links.py checks these figures."""
LEVELS = (
    "intra, inter: GiB that a rank sends in one optimizer step within its node and to other nodes. inter is a rank's "
    "share of its node's network cards, all of which NCCL's rings are assumed to use: of a group with m ranks per node "
    "each sends 1/m of its bytes to another node. A collective takes as long as its slower level; overlapped, those of "
    "different levels run at once (docs/method.md)."
)

Records = Sequence[Mapping[str, Any]]
"""Of ``bench.forecast.choice.answer``."""


def printed_lines(question: Question, records: Records, choices: Choices) -> Iterator[str]:
    """All that is printed; wrappers have no lines of their own."""
    rows = [row for row in records if not row["equals"]]
    for row in rows:
        if peak := row.get("exact_peak_bytes"):
            apart = f"predicted: {size(row['peak_memory_bytes'])}, {100 * (row['peak_memory_bytes'] / peak - 1):+.1f} %"
            yield f"{row['backend']}: {size(peak)} at the peak of rank 0, measured on fake tensors ({apart})."
    yield from _recommendation_lines(question, rows, choices)
    yield from ("", *_setting_lines(question))
    yield from ("", "GiB of a rank at its peak, and one optimizer step:", _backend_table(question, records))
    reasons = _names_by_text((f"{_remark(row)}: {_reason(row)}", row["backend"]) for row in records if _reason(row))
    for why, names in reasons:
        yield from ("", f"{names}: {why}.")
    if choices:
        yield from ("", "The best by N and W (?: undecided, it leads):", _choice_table(choices))
    sent = ((_collectives_text(row), row["backend"]) for row in rows if _is_predicted(row))
    yield from ("", "Collectives of a step:", *(f"  {names}: {text}" for text, names in _names_by_text(sent)))
    for note in _notes(question, len(rows) < len(records), bool(choices)):
        yield from ("", note)


def _names_by_text(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each text once, with all names that come with it."""
    return [(text, ", ".join(names)) for text, names in grouped(pairs).items()]


def _setting_lines(question: Question) -> Iterator[str]:
    """What is trained on how many ranks; then link, compute and memory."""
    cell, link = question.cell, question.link
    checkpointed = ", activation checkpointing" * cell.activation_checkpointing
    replicas = f", R = {cell.replicate} replicas in HSDP" * bool(cell.replicate)
    yield (
        f"model {cell.model} ({SIZES[cell.model].num_parameters / 1e9:.3g} G parameters), {cell.precision}, "
        f"{cell.optimizer}, {cell.device}{checkpointed}, micro-batches of {cell.micro_batch_size} x "
        f"{cell.sequence_length} tokens; W = {cell.world_size}{replicas}, N = {cell.accumulate}: "
        f"B = {cell.global_batch_size} samples."
    )
    parts = []
    if link is not None:
        latency = f"{link.latency_s * 1e6:.4g} us" if link.latency_s else "no latency"
        parts.append(f"link {link} per rank, {latency} per call{f' ({link.source})' * bool(link.source)}")
    if question.compute_s is not None:
        parts.append(f"compute {question.compute_s:.4g} s per optimizer step ({question.compute_from})")
    if question.memory_bytes is not None:
        kept = f", {size(question.reserve_bytes)} of it reserved" * bool(question.reserve_bytes)
        parts.append(f"memory {size(question.memory_bytes)}{kept}")
    if parts:
        yield "; ".join(parts) + "."


def _has_levels(question: Question) -> bool:
    """Whether ranks of one node have a faster link."""
    return question.link is not None and question.link.node_size > 1


def _backend_table(question: Question, records: Records) -> str:
    """The table of backends; sizes in GiB. Wrappers are named beside the mechanism that they equal."""
    named = ((row["equals"], row["backend"] + " (WRONG)" * bool(row["defect"])) for row in records)
    wrappers = dict(_names_by_text(named))
    fits = ["fits"] * (question.memory_bytes is not None)
    levels = {"intra": "intra_bytes", "inter": "inter_bytes"} if _has_levels(question) else {}
    seconds = [name for name, key in SECONDS.items() if any(row[key] is not None for row in records)]
    names = ["backend", *COLUMNS, "peak", *fits, *levels, *seconds]
    found = []
    for row in (row for row in records if not row["equals"]):
        values = ["-"] * (len(names) - 1)
        if _is_predicted(row):
            sizes = [sum(row["memory"][part] for part in parts) for parts in COLUMNS.values()]
            values = [*map(_gib, [*sizes, row["peak_memory_bytes"]]), *["yes" if row["fits"] else "NO" for _ in fits]]
            values += [_gib(row[key]) for key in levels.values()]
            values += [f"{row[SECONDS[name]]:.4g}" for name in seconds]
        equal = wrappers.get(row["backend"])
        found.append([row["backend"], *values, "  ".join(filter(None, [_remark(row), equal and f"= {equal}"]))])
    return Table.from_rows([*names, ""], found, range(1, len(names))).text()


def _is_predicted(row: Mapping[str, Any]) -> bool:
    return row["peak_memory_bytes"] is not None


def _gib(number: float) -> str:
    """GiB; a dash for nothing."""
    return digits(number / GIB) if number else "-"


def _remark(row: Mapping[str, Any]) -> str:
    """The first of REMARKS that holds; empty if none does."""
    return next((remark for key, remark in REMARKS.items() if row[key]), "")


def _reason(row: Mapping[str, Any]) -> str:
    """Why a backend is refused, not predicted or wrong; empty if it is not."""
    return str(row["refusal"] or row["not_predicted"] or row["defect"])


def _choice_table(choices: Choices) -> str:
    sizes = sorted({world_size for _, world_size in choices})
    rows = [
        [f"N = {accumulate}", *(_choice_text(choices[accumulate, world_size]) for world_size in sizes)]
        for accumulate in sorted({accumulate for accumulate, _ in choices})
    ]
    return Table.from_rows(["", *(f"W = {world_size}" for world_size in sizes)], rows).text()


def _choice_text(choice: Choice) -> str:
    """The backend, how many are as good by all numbers, and whether it is undecided."""
    more = f" (and {len(choice.equal)} more)" * bool(choice.equal)
    return f"{choice.best}{more}{' ?' * bool(choice.rivals)}" if choice.best else "nothing fits"


def _collectives_text(row: Mapping[str, Any]) -> str:
    found = [
        f"{sent['op']} {sent['dtype']}{among(sent['group'])} {sent['calls']} x, {size(sent['payload_bytes'])} payload, "
        f"{size(sent['wire_bytes'])} on the wire"
        for sent in row["collectives"]
    ]
    return "; ".join(found) or "none"


def _notes(question: Question, has_wrappers: bool, is_timed: bool) -> Iterator[str]:
    cell, is_limited = question.cell, question.memory_bytes is not None
    if has_wrappers:
        yield WRAPPERS
    yield PEAK
    if cell.activation_checkpointing:
        yield "Activation checkpointing: blocks keep their input, and compute their forward once more."
    if question.reserve_bytes:
        yield _reserve_text(question)
    if cell.world_size == 1:
        yield "One rank: the collectives that a framework still calls send nothing and take no time here."
    if is_timed and _has_levels(question):
        yield LEVELS
    if is_timed:
        yield TIMES
        within = f"{100 * MARGIN:g} %"
        yield (
            f"best: the serial step is at most {within} longer than the overlapped step of any other backend"
            f"{' that fits' * is_limited}, and of such backends it needs the least memory. Otherwise it is undecided, "
            "and the shortest serial step leads. Compute grows in proportion to N; the micro-batch is fixed."
        )


def _reserve_text(question: Question) -> str:
    """Which part of the memory is kept free, and why so much."""
    memory, nccl = question.memory_bytes or 0, question.cell.world_size > 1
    if question.reserve_bytes != reserve_bytes(memory, nccl=nccl):
        return f"Reserve: {size(question.reserve_bytes)} of a device's memory, as given."
    parts = "; ".join(f"{r.what} {size(r.num_bytes + r.share * memory)} ({r.source})" for r in reserves(nccl=nccl))
    second = "; the second communicator of HSDP is not counted" * bool(question.cell.replicate)
    return f"Reserve: {parts}{second}. --reserve changes the sum."


def _recommendation_lines(question: Question, rows: Records, choices: Choices) -> Iterator[str]:
    """What to take, with the reason; if that is undecided, also the command that decides it."""
    able = [row for row in rows if _is_predicted(row) and not row["defect"]]
    fitting = [row for row in able if row["fits"] is not False]
    if not fitting or not choices:
        yield f"Recommendation: {_recommendation_by_memory(question, fitting, able)}"
        return
    here = choices[question.cell.accumulate, question.cell.world_size]
    (best,) = (row for row in rows if row["backend"] == here.best)
    equal = f" (equal: {', '.join(here.equal)})" * bool(here.equal)
    takes = (
        f"{here.best}{equal}: {best['overlapped_s']:.4g} s (overlapped) to {best['serial_s']:.4g} s (serial) per step"
    )
    takes += f", {size(best['peak_memory_bytes'])} of memory"
    if not here.rivals:
        yield f"Recommendation: {takes}. By these estimates no other is more than {100 * MARGIN:g} % faster."
        return
    fastest = min(row["overlapped_s"] for row in rows if row["backend"] in here.rivals)
    longer = f"{100 * (best['serial_s'] / fastest - 1):.2g} % longer than the overlapped step of any other"
    yield f"Recommendation until measured: {takes}. It has the shortest serial step, which is at most {longer}."
    yield (
        f"May be faster: {', '.join(here.rivals)}. How much of its communication each hides is not predicted; on the "
        f"GPUs of one machine it is measured by: {_measuring_command(question.cell, here)}"
    )


def _recommendation_by_memory(question: Question, fitting: Records, able: Records) -> str:
    """What to take where no time is known, or why nothing can be taken."""
    if not able:
        return "none; every backend that was asked for is refused, not predicted, or known to be wrong."
    least = min(fitting or able, key=lambda row: int(row["peak_memory_bytes"]))
    needs = f"{least['backend']} needs the least: {size(least['peak_memory_bytes'])} of memory"
    if question.memory_bytes is not None:
        needs += f", of {size(question.memory_bytes - question.reserve_bytes)} that can be used"
    if not fitting:
        recompute = ", or --activation-checkpointing" * (not question.cell.activation_checkpointing)
        return f"none fits; {needs}. Try more ranks or a smaller micro-batch{recompute}."
    missing = [name for name, value in (("--link", question.link), ("--peak", question.compute_s)) if value is None]
    return f"{needs}. For one by time, add {' and '.join(missing)}."


def _measuring_command(cell: Cell, here: Choice) -> str:
    """The command that measures the backends between which it is undecided; the model is that of the matrix."""
    checkpointed = " --activation-checkpointing on" * cell.activation_checkpointing
    return (
        f"python -m bench run --matrix gpu --backend {','.join([here.best, *here.rivals])} --accumulate "
        f"{cell.accumulate} --micro-batch {cell.micro_batch_size} --precision {cell.precision}{checkpointed}"
    )
