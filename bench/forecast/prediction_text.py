"""What ``predict`` says: tables and sentences, as text and as a page. Plain strings: nothing slow is imported."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.forecast.best import Choice, Recommendation, Stretch
from bench.forecast.fit import reserves
from bench.forecast.prediction import NOT_PREDICTED, Link
from bench.plan.cell import Cell, among
from bench.plan.models import SIZES
from bench.words import rate, size, table

GIB = 2**30
COLUMNS = {
    "param": ("parameters",),
    "grad": ("gradients",),
    "optim": ("optimizer_state",),
    "activ.*": ("activations",),
    "other*": ("parameters_transient", "gradients_transient", "communication", "temporaries"),
}
"""Columns of the table, each with the categories of ``bench.forecast.live`` that it adds up."""
COUNTED = (
    "activations are estimated by counting the tensors that autograd saves (Korthikanti et al., arXiv:2205.05198; a "
    "Llama block with fused attention)"
)
GIVEN = "activations are those of --activations"
REST = (
    "other, estimated too: gathered and cast parameters, new gradients, buffers and work space, in the loss three fp32 "
    "tensors of tokens x vocabulary. param, grad and optim are exact where they are held."
)
ACCURACY = "within 2.3 % of the measured one in every cell, tiny in fp32 and 8b in bf16 on fake tensors, on the CPU"
"""How far peaks are from measured ones: docs/memory-and-bytes.md, checked by tests/studies/test_bytes_page.py."""
ACCURATE = f"Accuracy of the peaks: {ACCURACY} (docs/memory-and-bytes.md); CUDA was not checked."
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
class About:
    """What was asked, and the answer to it."""

    cell: Cell
    """With an empty backend."""
    link: Link | None
    link_from: str
    """Where its rates and latency come from; empty if they were given."""
    latency_known: bool
    compute_s: float | None
    compute_from: str
    memory_bytes: int | None
    reserve_bytes: int
    """What is kept free of ``memory_bytes``."""
    reserve_given: bool
    activations_given: bool
    margin: float
    answer: Recommendation | None

    @property
    def setting(self) -> str:
        """What is trained, on how many ranks."""
        cell = self.cell
        return f"{self.work}; {self.ranks}, N = {cell.accumulate}: B = {cell.global_batch_size} samples"

    @property
    def ranks(self) -> str:
        """W and, for HSDP, R."""
        cell = self.cell
        return f"W = {cell.world_size}" + f", R = {cell.replicate} replicas in HSDP" * bool(cell.replicate)

    @property
    def work(self) -> str:
        """What is trained, whatever N is."""
        cell, parameters = self.cell, SIZES[self.cell.model].num_parameters
        checkpointed = ", activation checkpointing" * cell.activation_checkpointing
        return (
            f"model {cell.model} ({parameters / 1e9:.3g} G parameters), {cell.precision}, {cell.optimizer}, "
            f"{cell.device}{checkpointed}, micro-batches of {cell.micro_batch_size} x {cell.sequence_length} tokens"
        )

    @property
    def limits(self) -> str:
        """Link, compute and memory."""
        parts = []
        if self.link is not None:
            latency = f"{self.link.latency_s * 1e6:.4g} us" if self.latency_known else "no latency (none was given)"
            measured = f" ({self.link_from})" * bool(self.link_from)
            parts.append(f"link {self.link} per rank, {latency} per call{measured}")
        if self.compute_s is not None:
            parts.append(f"compute {self.compute_s:.4g} s per optimizer step ({self.compute_from})")
        if self.memory_bytes is not None:
            kept = f", {gib(self.reserve_bytes)} of it reserved" * bool(self.reserve_bytes)
            parts.append(f"memory {gib(self.memory_bytes)}{kept}")
        return "; ".join(parts)

    @property
    def two_levels(self) -> bool:
        """Whether ranks of one node have a faster link."""
        return self.link is not None and self.link.node_size > 1

    @property
    def usable_bytes(self) -> int | None:
        """What a prediction may fill; None for no limit."""
        return None if self.memory_bytes is None else self.memory_bytes - self.reserve_bytes


def gib(number: float) -> str:
    """``74.6 GiB``."""
    return f"{number / GIB:.3g} GiB"


def header(about: About) -> tuple[str, ...]:
    """The names of the table's columns; that of the remarks is empty."""
    names = ["backend", *COLUMNS, "peak"]
    names += ["fits"] if about.memory_bytes is not None else []
    names += ["intra", "inter"] if about.two_levels else []
    names += ["comm/s"] if about.link is not None else []
    return (*names, *(("lower/s", "upper/s") if about.answer is not None else ()), "")


def cells_of(about: About, row: Mapping[str, Any]) -> tuple[str, ...]:
    """One backend's row; sizes in GiB."""
    if row["refusal"]:
        return (row["backend"], *["-"] * (len(header(about)) - 2), _remark(about, row))
    found = [row["backend"], *(_short(sum(row["memory"][c] for c in of)) for of in COLUMNS.values())]
    found.append(_short(row["peak_memory_bytes"]))
    if about.memory_bytes is not None:
        found.append("yes" if row["fits"] else "NO")
    if about.two_levels:
        found += [_short(row["intra_bytes"]), _short(row["inter_bytes"])]
    if about.link is not None:
        found.append(f"{row['communication_s']:.4g}")
    if about.answer is not None:
        found += [f"{row['lower_s']:.4g}", f"{row['upper_s']:.4g}"]
    return (*found, _remark(about, row))


def _remark(about: About, row: Mapping[str, Any]) -> str:
    if row["refusal"]:
        return NOT_PREDICTED if row["refusal"].startswith(NOT_PREDICTED) else "refused"
    if row["defect"]:
        return "WRONG"
    if about.answer is not None and row["backend"] in about.answer.rivals:
        return "may be the fastest"
    return "best" if row["best"] else "recommended" if row["recommended"] else ""


def _reasons(about: About, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why backends are refused, not predicted or wrong; those with the same reason in one line."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if why := row["refusal"].removeprefix(f"{NOT_PREDICTED}: ") or row["defect"]:
            groups.setdefault(f"{_remark(about, row)}: {why}", []).append(row["backend"])
    return [f"{', '.join(names)}: {why}." for why, names in groups.items()]


def _short(number: float) -> str:
    """GiB with three digits, or as many as the whole part has; a dash for nothing."""
    value = number / GIB
    if not number:
        return "-"
    if value < 0.01:
        return "<0.01"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def lines(about: About, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """All that is printed."""
    found = [about.setting, *filter(None, [about.limits]), "", "GiB of a rank at its peak, and one optimizer step:"]
    shown = [header(about), *(cells_of(about, row) for row in rows)]
    return [
        *(*found, table(shown, right=range(1, len(shown[0]) - 1)), *_reasons(about, rows), ""),
        *(*collectives(rows), "", *notes(about), "", *recommendation(about, rows)),
    ]


def collectives(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The collectives of a step in words, backends with equal ones in one line."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["refusal"]:
            continue
        said = "; ".join(
            f"{one['op']} {one['dtype']}{among(one['group'])} {one['calls']} x, {size(one['payload_bytes'])} payload, "
            f"{size(one['wire_bytes'])} on the wire"
            for one in row["collectives"]
        )
        groups.setdefault(said or "none", []).append(row["backend"])
    return ["Collectives of a step:", *(f"  {', '.join(names)}: {said}" for said, names in groups.items())]


def notes(about: About) -> list[str]:
    """What is assumed, and which backend is best where."""
    found = [f"* {GIVEN if about.activations_given else COUNTED}; {REST}", ACCURATE]
    if about.cell.activation_checkpointing:
        found.append("Activation checkpointing: blocks keep their input, and compute their forward once more.")
    if about.memory_bytes is not None:
        found.append(_reserved(about))
    if about.cell.world_size == 1:
        found.append("One rank: the collectives that a framework still calls send nothing and take no time here.")
    if about.answer is None:
        return found
    assert about.link is not None
    within = f"{100 * about.margin:g} %"
    at, n = str(about.link), about.cell.accumulate
    between = " between nodes" * about.two_levels
    found += [LEVELS] * about.two_levels
    over_w = [_flips("W", about.answer.along_w, _whole, f"at N = {n} and {at}")] if about.answer.along_w else []
    return [
        *found,
        BOUNDS,
        f"best: no other backend{' that fits' * (about.memory_bytes is not None)} can be more than {within} faster, "
        f"whatever is hidden, and of those within {within} it needs the least memory. Otherwise it is undecided, and "
        "the smallest upper bound leads.",
        _flips("N", about.answer.along_n, _whole, f"at {at}, with compute in proportion to N"),
        *over_w,
        _flips(f"the link{between}", about.answer.along_link, rate, f"at N = {n}"),
    ]


def _reserved(about: About) -> str:
    """Which part of the memory is kept free, and why so much."""
    if about.reserve_given or not about.reserve_bytes:
        return (
            f"Reserve: {gib(about.reserve_bytes)} of a device's memory, {'as given' * about.reserve_given or 'none'}."
        )
    assert about.memory_bytes is not None
    parts = "; ".join(
        f"{one.what} {gib(one.num_bytes + one.share * about.memory_bytes)} ({one.source})"
        for one in reserves(nccl=about.cell.world_size > 1)
    )
    second = "; the second communicator of HSDP is not counted" * bool(about.cell.replicate)
    return f"Reserve: {parts}{second}. --reserve changes the sum."


def named(choice: Choice) -> str:
    """The backend, those that are as good by all numbers, and whether that is certain."""
    if not choice.best:
        return "nothing fits"
    equal = f" (equal: {', '.join(choice.equal)})" if choice.equal else ""
    return f"undecided, {choice.best} leads{equal}" if choice.undecided else f"{choice.best}{equal}"


def _whole(number: float) -> str:
    return f"{number:.0f}"


def _flips(what: str, stretches: Sequence[Stretch], show: Callable[[float], str], where: str) -> str:
    said = "; ".join(f"from {show(one.low)} on {named(one.choice)}" for one in stretches)
    if len(stretches) == 1:
        said = f"always {named(stretches[0].choice)}"
    return f"Over {what} from {show(stretches[0].low)} to {show(stretches[-1].high)} {where}: {said}."


def recommendation(about: About, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to take, with the reason; if that is undecided, also the command that decides it."""
    unknown = [row["backend"] for row in rows if row["refusal"].startswith(NOT_PREDICTED)]
    found = [f"Not predicted, and so not considered: {', '.join(unknown)}."] if unknown else []
    able = [row for row in rows if not row["refusal"] and not row["defect"]]
    fitting = [row for row in able if row["fits"] is not False]
    if not fitting or about.answer is None:
        return [*found, f"Recommendation: {_by_memory(about, fitting, able)}"]
    here = about.answer.here
    (best,) = (row for row in rows if row["backend"] == here.best)
    equal = f" (equal: {', '.join(here.equal)})" if here.equal else ""
    takes = f"{here.best}{equal}: {best['lower_s']:.4g} to {best['upper_s']:.4g} s per step"
    takes += f", {gib(best['peak_memory_bytes'])} of memory"
    if not here.undecided:
        why = f"no other can be more than {100 * about.margin:g} % faster, whatever communication is hidden"
        return [*found, f"Recommendation: {takes}; {why}."]
    fastest = min(row["lower_s"] for row in rows if row["backend"] in about.answer.rivals)
    return [
        *found,
        f"Undecided between {', '.join([here.best, *about.answer.rivals])}: their bounds overlap, and how much of its "
        "communication each hides is not predicted.",
        f"How much each hides on the GPUs of one machine is measured by: {_measure(about)}",
        f"Recommendation until then: {takes}; the fastest if nothing is hidden, and at most "
        f"{100 * (best['upper_s'] / fastest - 1):.2g} % slower than the best case of any other.",
    ]


def _by_memory(about: About, fitting: Sequence[Mapping[str, Any]], able: Sequence[Mapping[str, Any]]) -> str:
    """What to take where no time is known, or why nothing can be taken."""
    if not able:
        return "none; every backend that was asked for is refused, not predicted, or known to be wrong."
    least = min(fitting or able, key=lambda row: int(row["peak_memory_bytes"]))
    needs = f"{gib(least['peak_memory_bytes'])} of memory"
    if about.usable_bytes is not None:
        needs += f", of {gib(about.usable_bytes)} that can be used"
    if not fitting:
        cure = "more ranks or a smaller micro-batch"
        cure += "" if about.cell.activation_checkpointing else ", or --activation-checkpointing"
        return f"none fits; {least['backend']} needs the least: {needs}. Try {cure}."
    missing = [name for name, value in (("--link", about.link), ("--peak", about.compute_s)) if value is None]
    return f"{least['backend']} needs the least: {needs}. For one by time, add {' and '.join(missing)}."


def _measure(about: About) -> str:
    """The command that measures the backends between which it is undecided; the model is that of the matrix."""
    assert about.answer is not None
    cell, names = about.cell, ",".join([about.answer.here.best, *about.answer.rivals])
    checkpointed = " --activation-checkpointing on" * cell.activation_checkpointing
    return (
        f"python -m bench run --matrix gpu --backend {names} --accumulate {cell.accumulate} --micro-batch "
        f"{cell.micro_batch_size} --precision {cell.precision}{checkpointed}"
    )


def markdown(about: About, rows: Sequence[Mapping[str, Any]]) -> str:
    """The same as a page."""
    names = header(about)
    found = [
        "# Prediction",
        "",
        f"{about.setting}.",
        "",
        about.limits,
        "",
        *(f"{line}\n" for line in recommendation(about, rows)),
        "GiB of a rank at its peak, and one optimizer step:",
        "",
    ]
    found += [f"| {' | '.join(name or 'remark' for name in names)} |", "|" + " --- |" * len(names)]
    found += [f"| {' | '.join(cells_of(about, row))} |" for row in rows]
    found += ["", *(f"- {line}" for line in _reasons(about, rows)), ""]
    found += [*(line if line.endswith(":") else f"- {line.strip()}" for line in collectives(rows)), ""]
    return "\n".join([*found, *(f"- {note}" for note in notes(about)), ""])
