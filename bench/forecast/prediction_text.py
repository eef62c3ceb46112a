"""What ``predict`` says: the recommendation, tables and notes, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.forecast.choice import Choice, Choices, Question
from bench.forecast.fit import reserves
from bench.forecast.prediction import NOT_PREDICTED
from bench.formatting import size, table
from bench.plan.cell import among
from bench.plan.models import SIZES

GIB = 2**30
COLUMNS = {
    "param": ("parameters",),
    "grad": ("gradients",),
    "optim": ("optimizer_state",),
    "activ": ("activations",),
    "other": ("communication", "temporaries"),
}
"""Columns of the table, each with the categories of ``bench.forecast.footprint`` that it adds up."""
ACCURACY = "within 5 % in 95 % of the cells of models from 135m on"
"""How far peaks are from those of trials on fake tensors: tests/forecast/test_footprint.py."""
PEAK = (
    "Peaks are a closed form: what is held, exactly, and at each moment of a window the activations that autograd "
    "saves (arXiv:2205.05198; a Llama block with fused attention) and the largest tensors of that moment (other: "
    "gathered and cast parameters, new gradients, buffers, work space). They are "
    f"{ACCURACY}, and up to 15 % off in smaller ones. --exact measures the peak of one backend on fake tensors."
)
GIVEN = "Activations are those of --activations."
BOUNDS = (
    "lower = max(compute, communication): all that can be hidden is hidden; upper = compute + communication: nothing "
    "is. communication = calls x latency + wire bytes / link, with the wire bytes of ring algorithms."
)
LEVELS = (
    "intra, inter: GiB that a rank sends in one optimizer step within its node and to other nodes. inter is a rank's "
    "share of its node's network cards, all of which NCCL's rings are assumed to use: of a group with m ranks per node "
    "each sends 1/m of its bytes to another node. A collective takes as long as its slower level; in the lower bound "
    "collectives of different levels run at once (docs/method.md)."
)


Rows = Sequence[Mapping[str, Any]]
"""Of ``bench.forecast.choice.ask``."""


def gib(number: float) -> str:
    """``74.6 GiB``."""
    return f"{number / GIB:.3g} GiB"


def lines(question: Question, rows: Rows, choices: Choices) -> list[str]:
    """All that is printed."""
    sections = _sections(question, rows, choices)
    return [line for section in sections for line in (*section, "")][:-1]


def markdown(question: Question, rows: Rows, choices: Choices) -> str:
    """The same as a page; tables, the lines of a section below its first, keep their columns."""
    found = ["# Prediction"]
    for title, *body in _sections(question, rows, choices):
        found += [title, "```text\n" + "\n".join(body) + "\n```"] if body else [title]
    return "\n\n".join(found) + "\n"


def _sections(question: Question, every: Rows, choices: Choices) -> Iterator[list[str]]:
    """Sentences, or a title with the lines of its table."""
    rows = [row for row in every if not row["equals"]]
    equal: dict[str, list[str]] = {}
    for row in every:
        if row["equals"]:
            equal.setdefault(row["equals"], []).append(row["backend"] + " (WRONG)" * bool(row["defect"]))
    for row in rows:
        if peak := row.get("exact_peak_bytes"):
            apart = f"predicted: {gib(row['peak_memory_bytes'])}, {100 * (row['peak_memory_bytes'] / peak - 1):+.1f} %"
            yield [f"{row['backend']}: {gib(peak)} at the peak of rank 0, measured on fake tensors ({apart})."]
    yield from ([sentence] for sentence in recommendation(question, rows, choices))
    yield from ([line] for line in _setting(question))
    yield ["GiB of a rank at its peak, and one optimizer step:", *_backends(question, rows, equal).splitlines()]
    yield from ([sentence] for sentence in _reasons(every))
    if choices:
        yield ["The best by N and W (?: undecided, it leads):", *_table(choices).splitlines()]
    yield ["Collectives of a step:", *_collectives(rows)]
    yield from ([note] for note in _notes(question, bool(equal), bool(choices)))


def _setting(question: Question) -> Iterator[str]:
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
        kept = f", {gib(question.reserve_bytes)} of it reserved" * bool(question.reserve_bytes)
        parts.append(f"memory {gib(question.memory_bytes)}{kept}")
    if parts:
        yield "; ".join(parts) + "."


def _has_levels(question: Question) -> bool:
    """Whether ranks of one node have a faster link."""
    return question.link is not None and question.link.node_size > 1


def _backends(question: Question, rows: Rows, equal: Mapping[str, Sequence[str]]) -> str:
    """The table of backends; sizes in GiB."""
    is_limited, has_link, has_levels = (
        question.memory_bytes is not None,
        question.link is not None,
        _has_levels(question),
    )
    names = ["backend", *COLUMNS, "peak", *["fits"] * is_limited, *["intra", "inter"] * has_levels]
    names += ["comm/s"] * has_link + ["lower/s", "upper/s"] * (has_link and question.compute_s is not None)
    lines = [[*names, ""]]
    for row in rows:
        found = ["-"] * (len(names) - 1)
        if not row["refusal"]:
            found = [_short(sum(row["memory"][c] for c in of)) for of in COLUMNS.values()]
            found.append(_short(row["peak_memory_bytes"]))
            found += ["yes" if row["fits"] else "NO"] * is_limited
            found += [_short(row["intra_bytes"]), _short(row["inter_bytes"])] if has_levels else []
            seconds = ("communication_s", "lower_s", "upper_s")
            found += [f"{row[name]:.4g}" for name in seconds if row[name] is not None]
        wrappers = ", ".join(equal.get(row["backend"], ()))
        remarks = "  ".join(filter(None, [_remark(row), wrappers and f"= {wrappers}"]))
        lines.append([row["backend"], *found, remarks])
    return table(lines, right=range(1, len(names)))


def _remark(row: Mapping[str, Any]) -> str:
    if row["refusal"]:
        return NOT_PREDICTED if row["refusal"].startswith(NOT_PREDICTED) else "refused"
    if row["defect"]:
        return "WRONG"
    remarks = {"may_be_fastest": "may be the fastest", "best": "best", "recommended": "recommended"}
    return next((remark for key, remark in remarks.items() if row[key]), "")


def _reasons(rows: Rows) -> list[str]:
    """Why backends are refused, not predicted or wrong; those with the same reason in one line."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if why := row["refusal"].removeprefix(f"{NOT_PREDICTED}: ") or row["defect"]:
            groups.setdefault(f"{_remark(row)}: {why}", []).append(row["backend"])
    return [f"{', '.join(names)}: {why}." for why, names in groups.items()]


def _short(number: float) -> str:
    """GiB with three digits, or as many as the whole part has; a dash for nothing."""
    value = number / GIB
    if not number:
        return "-"
    if value < 0.01:
        return "<0.01"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _table(choices: Choices) -> str:
    """The table over N and W."""
    sizes = sorted({world_size for _, world_size in choices})
    rows = [["", *(f"W = {world_size}" for world_size in sizes)]]
    for accumulate in sorted({accumulate for accumulate, _ in choices}):
        found = (choices[accumulate, world_size] for world_size in sizes)
        rows.append([f"N = {accumulate}", *(_best(choice) + " ?" * bool(choice.rivals) for choice in found)])
    return table(rows)


def _best(choice: Choice) -> str:
    """The backend, and how many are as good by all numbers."""
    if not choice.best:
        return "nothing fits"
    return choice.best + f" (and {len(choice.equal)} more)" * bool(choice.equal)


def _collectives(rows: Rows) -> list[str]:
    """The collectives of a step in words, backends with equal ones in one line."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["refusal"]:
            continue
        text = "; ".join(
            f"{one['op']} {one['dtype']}{among(one['group'])} {one['calls']} x, {size(one['payload_bytes'])} payload, "
            f"{size(one['wire_bytes'])} on the wire"
            for one in row["collectives"]
        )
        groups.setdefault(text or "none", []).append(row["backend"])
    return [f"  {', '.join(names)}: {text}" for text, names in groups.items()]


def _notes(question: Question, has_wrappers: bool, is_timed: bool) -> Iterator[str]:
    """What is assumed."""
    cell = question.cell
    if has_wrappers:
        yield (
            "= names wrappers that shard alike, reduce at the same times, and hold and send the same within 2 %; --all "
            "shows their rows."
        )
    yield PEAK
    if question.activation_bytes is not None:
        yield GIVEN
    if cell.activation_checkpointing:
        yield "Activation checkpointing: blocks keep their input, and compute their forward once more."
    if question.memory_bytes is not None:
        yield _reserved(question)
    if cell.world_size == 1:
        yield "One rank: the collectives that a framework still calls send nothing and take no time here."
    if not is_timed:
        return
    if _has_levels(question):
        yield LEVELS
    within = f"{100 * question.margin:g} %"
    yield BOUNDS
    yield (
        f"best: no other backend{' that fits' * (question.memory_bytes is not None)} can be more than {within} faster, "
        f"whatever is hidden, and of those within {within} it needs the least memory. Otherwise it is undecided, and "
        "the smallest upper bound leads. Compute grows in proportion to N; the micro-batch is fixed."
    )


def _reserved(question: Question) -> str:
    """Which part of the memory is kept free, and why so much."""
    given = question.given_reserve_bytes is not None
    if given or not question.reserve_bytes:
        return f"Reserve: {gib(question.reserve_bytes)} of a device's memory, {'as given' if given else 'none'}."
    assert question.memory_bytes is not None
    cell = question.cell
    parts = "; ".join(
        f"{one.what} {gib(one.num_bytes + one.share * question.memory_bytes)} ({one.source})"
        for one in reserves(nccl=cell.world_size > 1)
    )
    second = "; the second communicator of HSDP is not counted" * bool(cell.replicate)
    return f"Reserve: {parts}{second}. --reserve changes the sum."


def recommendation(question: Question, rows: Rows, choices: Choices) -> Iterator[str]:
    """What to take, with the reason; if that is undecided, also the command that decides it."""
    able = [row for row in rows if not row["refusal"] and not row["defect"]]
    fitting = [row for row in able if row["fits"] is not False]
    if not fitting or not choices:
        yield f"Recommendation: {_by_memory(question, fitting, able)}"
        return
    here = choices[question.cell.accumulate, question.cell.world_size]
    (best,) = (row for row in rows if row["backend"] == here.best)
    equal = f" (equal: {', '.join(here.equal)})" if here.equal else ""
    takes = f"{here.best}{equal}: {best['lower_s']:.4g} to {best['upper_s']:.4g} s per step"
    takes += f", {gib(best['peak_memory_bytes'])} of memory"
    if not here.rivals:
        why = f"No other can be more than {100 * question.margin:g} % faster, whatever communication is hidden."
        yield f"Recommendation: {takes}. {why}"
        return
    fastest = min(row["lower_s"] for row in rows if row["backend"] in here.rivals)
    slower = f"{100 * (best['upper_s'] / fastest - 1):.2g} % slower than the best case of any other"
    yield f"Recommendation until measured: {takes}. It is the fastest if nothing is hidden, and at most {slower}."
    yield (
        f"May be faster: {', '.join(here.rivals)}. How much of its communication each hides is not predicted; on the "
        f"GPUs of one machine it is measured by: {_measure(question, here)}"
    )


def _by_memory(question: Question, fitting: Rows, able: Rows) -> str:
    """What to take where no time is known, or why nothing can be taken."""
    if not able:
        return "none; every backend that was asked for is refused, not predicted, or known to be wrong."
    least = min(fitting or able, key=lambda row: int(row["peak_memory_bytes"]))
    needs = f"{gib(least['peak_memory_bytes'])} of memory"
    if question.memory_bytes is not None:
        needs += f", of {gib(question.memory_bytes - question.reserve_bytes)} that can be used"
    if not fitting:
        cure = "more ranks or a smaller micro-batch"
        cure += "" if question.cell.activation_checkpointing else ", or --activation-checkpointing"
        return f"none fits; {least['backend']} needs the least: {needs}. Try {cure}."
    missing = [name for name, value in (("--link", question.link), ("--peak", question.compute_s)) if value is None]
    return f"{least['backend']} needs the least: {needs}. For one by time, add {' and '.join(missing)}."


def _measure(question: Question, here: Choice) -> str:
    """The command that measures the backends between which it is undecided; the model is that of the matrix."""
    cell = question.cell
    checkpointed = " --activation-checkpointing on" * cell.activation_checkpointing
    return (
        f"python -m bench run --matrix gpu --backend {','.join([here.best, *here.rivals])} --accumulate "
        f"{cell.accumulate} --micro-batch {cell.micro_batch_size} --precision {cell.precision}{checkpointed}"
    )
