"""What ``predict`` says: the recommendation, tables and notes, as text and as a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.forecast.choice import Answer, Choice, Question
from bench.forecast.fit import reserves
from bench.forecast.prediction import NOT_PREDICTED
from bench.plan.cell import among
from bench.plan.models import SIZES
from bench.words import size, table

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
    "Peaks are a closed form: what is held, exactly, and at each moment of a window the activations that autograd saves "
    "(arXiv:2205.05198; a Llama block with fused attention) and the largest tensors of that moment (other: gathered and "
    f"cast parameters, new gradients, buffers, work space). They are {ACCURACY}, and up to 15 % off in smaller ones. "
    "--exact measures the peak of one backend on fake tensors."
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


@dataclass(frozen=True, kw_only=True)
class Prognosis:
    """What was asked, where that comes from, and what was found."""

    question: Question
    link_from: str = ""
    """Where the link's rates and latency come from; empty if they were given."""
    latency_known: bool = False
    compute_from: str = ""
    device_bytes: int | None = None
    """Memory of a device, with what is kept free."""
    reserve_given: bool = False
    activations_given: bool = False
    rows: Sequence[Mapping[str, Any]]
    """Those that are shown, of ``bench.forecast.choice.records``."""
    wrappers: Mapping[str, Sequence[str]]
    """By mechanism, the wrappers that equal it and have no row."""
    answer: Answer | None

    @property
    def reserve_bytes(self) -> int:
        """What is kept free of a device's memory."""
        usable = self.question.memory_bytes
        return 0 if self.device_bytes is None or usable is None else self.device_bytes - usable

    @property
    def setting(self) -> str:
        """What is trained, on how many ranks."""
        cell = self.question.cell
        checkpointed = ", activation checkpointing" * cell.activation_checkpointing
        return (
            f"model {cell.model} ({SIZES[cell.model].num_parameters / 1e9:.3g} G parameters), {cell.precision}, "
            f"{cell.optimizer}, {cell.device}{checkpointed}, micro-batches of {cell.micro_batch_size} x "
            f"{cell.sequence_length} tokens; W = {cell.world_size}"
            + f", R = {cell.replicate} replicas in HSDP" * bool(cell.replicate)
            + f", N = {cell.accumulate}: B = {cell.global_batch_size} samples"
        )

    @property
    def limits(self) -> str:
        """Link, compute and memory."""
        parts, link, compute_s = [], self.question.link, self.question.compute_s
        if link is not None:
            latency = f"{link.latency_s * 1e6:.4g} us" if self.latency_known else "no latency (none was given)"
            measured = f" ({self.link_from})" * bool(self.link_from)
            parts.append(f"link {link} per rank, {latency} per call{measured}")
        if compute_s is not None:
            parts.append(f"compute {compute_s:.4g} s per optimizer step ({self.compute_from})")
        if self.device_bytes is not None:
            kept = f", {gib(self.reserve_bytes)} of it reserved" * bool(self.reserve_bytes)
            parts.append(f"memory {gib(self.device_bytes)}{kept}")
        return "; ".join(parts)

    @property
    def has_levels(self) -> bool:
        """Whether ranks of one node have a faster link."""
        return self.question.link is not None and self.question.link.node_size > 1


def gib(number: float) -> str:
    """``74.6 GiB``."""
    return f"{number / GIB:.3g} GiB"


def lines(asked: Prognosis) -> list[str]:
    """All that is printed."""
    return [line for title, *body in _sections(asked) for line in (title, *body, "")][:-1]


def markdown(asked: Prognosis) -> str:
    """The same as a page; tables, which are a section's lines below the first, keep their columns."""
    found = ["# Prediction"]
    for title, *body in _sections(asked):
        found += [title, "```text\n" + "\n".join(body) + "\n```"] if body else [title]
    return "\n\n".join(found) + "\n"


def _sections(asked: Prognosis) -> Iterator[list[str]]:
    """Sentences, or a title with the lines of its table."""
    yield from ([sentence] for sentence in recommendation(asked))
    yield from ([line] for line in (f"{asked.setting}.", asked.limits) if line)
    yield ["GiB of a rank at its peak, and one optimizer step:", *_backends(asked).splitlines()]
    yield from ([sentence] for sentence in _reasons(asked))
    if asked.answer is not None:
        yield ["The best by N and W (?: undecided, it leads):", *_elsewhere(asked.answer).splitlines()]
    yield ["Collectives of a step:", *_collectives(asked.rows)]
    yield from ([note] for note in _notes(asked))


def _backends(asked: Prognosis) -> str:
    """The table of backends; sizes in GiB."""
    names = ["backend", *COLUMNS, "peak"]
    names += ["fits"] if asked.device_bytes is not None else []
    names += ["intra", "inter"] if asked.has_levels else []
    names += ["comm/s"] if asked.question.link is not None else []
    names += ["lower/s", "upper/s"] if asked.answer is not None else []
    rows: list[list[str]] = [[*names, ""]]
    for row in asked.rows:
        found = ["-"] * (len(names) - 1)
        if not row["refusal"]:
            found = [_short(sum(row["memory"][c] for c in of)) for of in COLUMNS.values()]
            found.append(_short(row["peak_memory_bytes"]))
            found += [] if asked.device_bytes is None else ["yes" if row["fits"] else "NO"]
            found += [_short(row["intra_bytes"]), _short(row["inter_bytes"])] if asked.has_levels else []
            seconds = ("communication_s", "lower_s", "upper_s")
            found += [f"{row[name]:.4g}" for name in seconds if row[name] is not None]
        wrappers = asked.wrappers.get(row["backend"], ())
        remarks = [_remark(row), f"= {', '.join(wrappers)}" * bool(wrappers)]
        rows.append([row["backend"], *found, "  ".join(filter(None, remarks))])
    return table(rows, right=range(1, len(names)))


def _remark(row: Mapping[str, Any]) -> str:
    if row["refusal"]:
        return NOT_PREDICTED if row["refusal"].startswith(NOT_PREDICTED) else "refused"
    if row["defect"]:
        return "WRONG"
    remarks = {"may_be_fastest": "may be the fastest", "best": "best", "recommended": "recommended"}
    return next((remark for key, remark in remarks.items() if row[key]), "")


def _reasons(asked: Prognosis) -> list[str]:
    """Why backends are refused, not predicted or wrong; those with the same reason in one line."""
    groups: dict[str, list[str]] = {}
    for row in asked.rows:
        if why := row["refusal"].removeprefix(f"{NOT_PREDICTED}: ") or row["defect"]:
            names = [row["backend"], *asked.wrappers.get(row["backend"], ())] if row["refusal"] else [row["backend"]]
            groups.setdefault(f"{_remark(row)}: {why}", []).extend(names)
    return [f"{', '.join(names)}: {why}." for why, names in groups.items()]


def _short(number: float) -> str:
    """GiB with three digits, or as many as the whole part has; a dash for nothing."""
    value = number / GIB
    if not number:
        return "-"
    if value < 0.01:
        return "<0.01"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def _elsewhere(answer: Answer) -> str:
    """The table over N and W."""
    sizes = sorted({world_size for _, world_size in answer.elsewhere})
    rows = [["", *(f"W = {world_size}" for world_size in sizes)]]
    for accumulate in sorted({accumulate for accumulate, _ in answer.elsewhere}):
        found = (answer.elsewhere[accumulate, world_size] for world_size in sizes)
        rows.append([f"N = {accumulate}", *(_best(choice) + " ?" * bool(choice.rivals) for choice in found)])
    return table(rows)


def _best(choice: Choice) -> str:
    """The backend, and how many are as good by all numbers."""
    if not choice.best:
        return "nothing fits"
    return choice.best + f" (and {len(choice.equal)} more)" * bool(choice.equal)


def _collectives(rows: Sequence[Mapping[str, Any]]) -> list[str]:
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


def _notes(asked: Prognosis) -> Iterator[str]:
    """What is assumed."""
    cell = asked.question.cell
    if asked.wrappers:
        yield (
            "= names wrappers that shard alike, reduce at the same times, and hold and send the same within 2 %; --all "
            "shows their rows."
        )
    yield PEAK
    if asked.activations_given:
        yield GIVEN
    if cell.activation_checkpointing:
        yield "Activation checkpointing: blocks keep their input, and compute their forward once more."
    if asked.device_bytes is not None:
        yield _reserved(asked)
    if cell.world_size == 1:
        yield "One rank: the collectives that a framework still calls send nothing and take no time here."
    if asked.answer is None:
        return
    if asked.has_levels:
        yield LEVELS
    within = f"{100 * asked.question.margin:g} %"
    yield BOUNDS
    yield (
        f"best: no other backend{' that fits' * (asked.device_bytes is not None)} can be more than {within} faster, "
        f"whatever is hidden, and of those within {within} it needs the least memory. Otherwise it is undecided, and "
        "the smallest upper bound leads. Compute grows in proportion to N; the micro-batch is fixed."
    )


def _reserved(asked: Prognosis) -> str:
    """Which part of the memory is kept free, and why so much."""
    if asked.reserve_given or not asked.reserve_bytes:
        how = "as given" if asked.reserve_given else "none"
        return f"Reserve: {gib(asked.reserve_bytes)} of a device's memory, {how}."
    assert asked.device_bytes is not None
    cell = asked.question.cell
    parts = "; ".join(
        f"{one.what} {gib(one.num_bytes + one.share * asked.device_bytes)} ({one.source})"
        for one in reserves(nccl=cell.world_size > 1)
    )
    second = "; the second communicator of HSDP is not counted" * bool(cell.replicate)
    return f"Reserve: {parts}{second}. --reserve changes the sum."


def recommendation(asked: Prognosis) -> Iterator[str]:
    """What to take, with the reason; if that is undecided, also the command that decides it."""
    rows = asked.rows
    able = [row for row in rows if not row["refusal"] and not row["defect"]]
    fitting = [row for row in able if row["fits"] is not False]
    if not fitting or asked.answer is None:
        yield f"Recommendation: {_by_memory(asked, fitting, able)}"
        return
    here = asked.answer.here
    (best,) = (row for row in rows if row["backend"] == here.best)
    equal = f" (equal: {', '.join(here.equal)})" if here.equal else ""
    takes = f"{here.best}{equal}: {best['lower_s']:.4g} to {best['upper_s']:.4g} s per step"
    takes += f", {gib(best['peak_memory_bytes'])} of memory"
    if not here.rivals:
        why = f"No other can be more than {100 * asked.question.margin:g} % faster, whatever communication is hidden."
        yield f"Recommendation: {takes}. {why}"
        return
    fastest = min(row["lower_s"] for row in rows if row["backend"] in here.rivals)
    slower = f"{100 * (best['upper_s'] / fastest - 1):.2g} % slower than the best case of any other"
    yield f"Recommendation until measured: {takes}. It is the fastest if nothing is hidden, and at most {slower}."
    yield (
        f"May be faster: {', '.join(here.rivals)}. How much of its communication each hides is not predicted; on the "
        f"GPUs of one machine it is measured by: {_measure(asked, here)}"
    )


def _by_memory(asked: Prognosis, fitting: Sequence[Mapping[str, Any]], able: Sequence[Mapping[str, Any]]) -> str:
    """What to take where no time is known, or why nothing can be taken."""
    question = asked.question
    if not able:
        return "none; every backend that was asked for is refused, not predicted, or known to be wrong."
    least = min(fitting or able, key=lambda row: int(row["peak_memory_bytes"]))
    needs = f"{gib(least['peak_memory_bytes'])} of memory"
    if question.memory_bytes is not None:
        needs += f", of {gib(question.memory_bytes)} that can be used"
    if not fitting:
        cure = "more ranks or a smaller micro-batch"
        cure += "" if question.cell.activation_checkpointing else ", or --activation-checkpointing"
        return f"none fits; {least['backend']} needs the least: {needs}. Try {cure}."
    missing = [name for name, value in (("--link", question.link), ("--peak", question.compute_s)) if value is None]
    return f"{least['backend']} needs the least: {needs}. For one by time, add {' and '.join(missing)}."


def _measure(asked: Prognosis, here: Choice) -> str:
    """The command that measures the backends between which it is undecided; the model is that of the matrix."""
    cell = asked.question.cell
    checkpointed = " --activation-checkpointing on" * cell.activation_checkpointing
    return (
        f"python -m bench run --matrix gpu --backend {','.join([here.best, *here.rivals])} --accumulate "
        f"{cell.accumulate} --micro-batch {cell.micro_batch_size} --precision {cell.precision}{checkpointed}"
    )
