"""What ``predict`` says: tables and sentences, as text and as a page. Plain strings: nothing slow is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.forecast.best import Answer, Choice, Stretch
from bench.forecast.footprint import ACCURACY
from bench.forecast.prediction import NOT_PREDICTED, Link
from bench.plan.cell import Cell
from bench.plan.models import SIZES

GIB = 2**30
COLUMNS = (
    ("param", ("parameters",)),
    ("gathered*", ("parameters_transient",)),
    ("grad", ("gradients",)),
    ("new grad*", ("gradients_transient",)),
    ("optim", ("optimizer_state",)),
    ("buffers*", ("communication",)),
    ("activ.*", ("activations",)),
    ("work*", ("temporaries",)),
)
"""Columns of the table, each with the categories of ``bench.forecast.footprint`` that it shows."""
ESTIMATE = (
    "* estimated: ACTIVATIONS ARE ESTIMATED by counting the tensors that autograd saves (Korthikanti et al., "
    "arXiv:2205.05198, for a Llama block with fused attention, nothing recomputed), and so is what comes and goes: "
    "gathered or cast parameters, new gradients, buffers, and the work space, in the loss three fp32 tensors of tokens "
    "x vocabulary. param, grad and optim are exact by formula where they are held. The CUDA context, NCCL and the "
    "allocator's fragments are not counted."
)
ACCURATE = f"Accuracy of the peaks: {ACCURACY} (docs/memory-and-bytes.md); CUDA was not checked."
BOUNDS = (
    "lower = max(compute, communication), as if all of it could be hidden; upper = their sum, nothing hidden; "
    "communication = calls x latency + wire bytes / link, wire bytes derived for ring algorithms"
)


@dataclass(frozen=True, kw_only=True)
class About:
    """What was asked, and the answer to it."""

    cell: Cell
    """With an empty backend."""
    link: Link | None
    latency_given: bool
    compute_s: float | None
    compute_from: str
    memory_bytes: int | None
    activations_given: bool
    margin: float
    answer: Answer | None

    @property
    def setting(self) -> str:
        """What is trained, on how many ranks."""
        cell, parameters = self.cell, SIZES[self.cell.model].num_parameters
        checkpointed = ", activation checkpointing" * cell.activation_checkpointing
        return (
            f"model {cell.model} ({parameters / 1e9:.3g} G parameters), {cell.precision}, {cell.optimizer}, "
            f"{cell.device}{checkpointed}; W = {cell.world_size} ranks, N = {cell.accumulate} micro-batches of "
            f"{cell.micro_batch_size} x {cell.sequence_length} tokens on each: B = {cell.global_batch_size} samples"
        )

    @property
    def limits(self) -> str:
        """Link, compute and memory."""
        parts = []
        if self.link is not None:
            latency = f"{self.link.latency_s * 1e6:g} us" if self.latency_given else "no latency (none was given)"
            parts.append(f"link {rate(self.link.bytes_per_s)} per rank, {latency} per call")
        if self.compute_s is not None:
            parts.append(f"compute {self.compute_s:.4g} s per optimizer step ({self.compute_from})")
        if self.memory_bytes is not None:
            parts.append(f"memory {self.memory_bytes / GIB:.4g} GiB")
        return "; ".join(parts)


def rate(bytes_per_s: float) -> str:
    """``50 GB/s``."""
    for size, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_s >= size:
            return f"{bytes_per_s / size:.3g} {unit}"
    return f"{bytes_per_s:.3g} B/s"


def header(about: About) -> tuple[str, ...]:
    """Of the table."""
    names = ["backend", *(name for name, _ in COLUMNS), "peak", "at"]
    names += ["fits"] if about.memory_bytes is not None else []
    names += ["calls", "wire"]
    names += ["comm/s"] if about.link is not None else []
    return (*names, *(("lower/s", "upper/s") if about.answer is not None else ()), "")


def cells_of(about: About, row: Mapping[str, Any]) -> tuple[str, ...]:
    """One backend's row; sizes in GiB."""
    width = len(header(about)) - 2
    if row["refusal"]:
        refused = "" if row["refusal"].startswith(NOT_PREDICTED) else "refused: "
        return (row["backend"], *["-"] * width, f"{refused}{row['refusal']}")
    found = [row["backend"], *(_gib(sum(row["memory"][c] for c in of)) for _, of in COLUMNS)]
    found += [_gib(row["peak_memory_bytes"]), row["peak_at"]]
    if about.memory_bytes is not None:
        found.append("yes" if row["fits"] else "NO")
    found += [f"{row['num_calls']}", _gib(row["wire_bytes"])]
    if about.link is not None:
        found.append(f"{row['communication_s']:.4g}")
    if about.answer is not None:
        found += [f"{row['lower_s']:.4g}", f"{row['upper_s']:.4g}"]
    remark = f"WRONG: {row['defect']}; cannot be the best" if row["defect"] else "best" if row["best"] else ""
    return (*found, remark)


def _gib(size: float) -> str:
    """Three digits, or as many as the whole part has; a dash for nothing."""
    if not size:
        return "-"
    value = size / GIB
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
        if value >= 0.01
        else "<0.01"
    )


def lines(about: About, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """All that is printed."""
    table = [header(about), *(cells_of(about, row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]) - 1)]
    found = [
        about.setting,
        *([about.limits] if about.limits else []),
        "",
        "GiB of a rank at the peak, and one optimizer step:",
    ]
    for row in table:
        first = row[0].ljust(widths[0])
        rest = [text.rjust(width) for text, width in zip(row[1:-1], widths[1:], strict=True)]
        found.append("  ".join([first, *rest, row[-1]]).rstrip())
    return [*found, "", *collectives(rows), "", *notes(about)]


def collectives(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The collectives of a step in words, backends with equal ones in one line."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        if row["refusal"]:
            continue
        said = "; ".join(
            f"{one['op']} {one['dtype']} {one['calls']} x, {_size(one['payload_bytes'])} payload, "
            f"{_size(one['wire_bytes'])} on the wire"
            for one in row["collectives"]
        )
        groups.setdefault(said or "none", []).append(row["backend"])
    return ["Collectives of a step:", *(f"  {', '.join(names)}: {said}" for said, names in groups.items())]


def _size(size: float) -> str:
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size:.4g} B"


def notes(about: About) -> list[str]:
    """What is assumed, and which backend is best where."""
    words = ESTIMATE
    if about.activations_given:
        words = words.replace("ACTIVATIONS ARE ESTIMATED by counting", "activations are as given, without counting")
    if about.cell.activation_checkpointing:
        words = words.replace("nothing recomputed", "of each block its input, and of one block all: it is recomputed")
    found = [words, ACCURATE]
    if about.cell.world_size == 1:
        found.append("One rank: what collectives a framework still calls send nothing and take no time here.")
    if about.link is None:
        found.append("No --link: no time of communication, and no best backend.")
    elif about.compute_s is None:
        found.append(
            "--compute-time is needed for the bounds of a step and the best backend; or --peak, to guess it from FLOPs."
        )
    if about.answer is None:
        return found
    found.append(BOUNDS + ".")
    found.append(
        "best = the smallest upper bound among those that "
        + ("fit and " if about.memory_bytes is not None else "")
        + f"are not refused or known to be wrong; within {100 * about.margin:g} % the lower bound decides, then the "
        "memory."
    )
    return [*found, *verdicts(about, about.answer)]


def verdicts(about: About, answer: Answer) -> list[str]:
    """Which is best, and where the answer flips."""
    assert about.link is not None
    here = f"N = {about.cell.accumulate} and {rate(about.link.bytes_per_s)}"
    found = [f"Best at {here}: {named(answer.here)}."]
    found.append(_flips("N", answer.along_n, lambda n: f"{n:.0f}", f"at {rate(about.link.bytes_per_s)}"))
    found.append(_flips("link", answer.along_link, rate, f"at N = {about.cell.accumulate}"))
    return found


def named(choice: Choice) -> str:
    """The backend, and those that are as good by all numbers."""
    if not choice.best:
        return "none: nothing fits"
    return choice.best + (f" (equal: {', '.join(choice.equal)})" if choice.equal else "")


def _flips(what: str, stretches: Sequence[Stretch], show: Any, where: str) -> str:
    ends = f"{show(stretches[0].low)} to {show(stretches[-1].high)}"
    fixed = ", with the micro-batch fixed and compute in proportion to N" if what == "N" else ""
    if len(stretches) == 1:
        return f"Over {what} from {ends} {where}{fixed}: the answer does not flip: {named(stretches[0].choice)}."
    said = "; ".join(f"from {show(one.low)} on {named(one.choice)}" for one in stretches)
    return f"Over {what} from {ends} {where}{fixed}: {said}."


def markdown(about: About, rows: Sequence[Mapping[str, Any]]) -> str:
    """The same as a page."""
    names = header(about)
    found = ["# Prediction", "", about.setting + ".", "", about.limits, "", "Sizes in GiB.", ""]
    found += [f"| {' | '.join(name or 'remark' for name in names)} |", "|" + " --- |" * len(names)]
    found += [f"| {' | '.join(cells_of(about, row))} |" for row in rows]
    found += ["", *(line if line.endswith(":") else f"- {line.strip()}" for line in collectives(rows)), ""]
    return "\n".join([*found, *(f"- {note}" for note in notes(about)), ""])
