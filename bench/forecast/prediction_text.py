"""What ``predict`` prints: the recommendation, tables and notes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import validation
from bench.forecast.choice import MARGIN, Choice, Choices, Question, Trade, trade
from bench.forecast.fit import reserves
from bench.forecast.footprint import model_of
from bench.formatting import digits, size
from bench.grouping import grouped
from bench.plan.cell import Cell, Device, among
from bench.tabular import Table
from bench.validation import Amount, Natural

GIB = 2**30
COLUMNS = {
    "param": ("parameters",),
    "grad": ("gradients",),
    "optim": ("optimizer_state",),
    "activ": ("activations",),
    "other": ("communication", "temporaries"),
}
"""Columns of the table, each with the categories of ``bench.forecast.footprint`` that it adds
up."""
HOST_COLUMNS = {
    "host": "host_bytes",
    "pinned": "pinned_bytes",
    "to dev": "copied_to_device",
    "to host": "copied_to_host",
}
"""Columns of backends that offload, each with its key."""
SECONDS = {"comm/s": "communication_s", "overlapped/s": "overlapped_s", "serial/s": "serial_s"}
"""Further columns, each with its key."""
RATES = {"tokens_per_s": "tok/s/{}", "mfu": "MFU (%)"}
"""Further columns by key, of which the least and the most are shown; with their titles, ``{}`` for
GPU or rank."""
LEVEL_KEYS = {"intra": "intra_bytes", "inter": "inter_bytes"}
"""Columns of a link with two levels, each with its key."""
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
    "= names wrappers that shard alike, reduce at the same times, and hold and send the same "
    "within 2 %; --all shows their rows."
)
PEAK = (
    "Peaks are a closed form: what is held, exactly, and at each moment of a window the "
    "activations that autograd saves (arXiv:2205.05198; a Llama block with fused attention) and "
    "the largest tensors of that moment (other: gathered and cast parameters, new gradients, "
    "buffers, work space). They are within 5 % in all measured cells of models from 135m on, and "
    "within 20 % in all of smaller ones (docs/memory-and-bytes.md, which also compares them with "
    "published peaks). --exact measures the peak of one backend on fake tensors."
)
"""tests/forecast/test_footprint.py checks these figures."""
ON_THE_HOST = (
    "host: GiB of a rank in the host's memory at the update; pinned: what of it is page-locked, "
    "in tensors, each of which torch rounds up to a power of two; to dev, to host: what one "
    "optimizer step copies between both. All four are closed forms (docs/memory-and-bytes.md). "
    "How long the copies and the update on the host take is not estimated, so no backend that "
    "offloads is recommended by time."
)
TIMES = (
    "overlapped = max(compute, communication): communication is hidden as far as it can be; "
    "serial = compute + communication: none is. communication = calls x latency + wire bytes / "
    "link, with the wire bytes of ring algorithms. Both are estimates, not bounds: they leave out "
    "what the host does between collectives and waiting for slower ranks."
)
LEVELS = (
    "intra, inter: GiB that a rank sends in one optimizer step within its node and to other "
    "nodes. inter is a rank's share of its node's network cards, all of which NCCL's rings are "
    "assumed to use: with m ranks per node, each sends 1/m of its bytes off its node. A "
    "collective takes as long as its slower level; overlapped, those of different levels run at "
    "once (docs/method.md)."
)
ACCURACY = Path(__file__).with_name("link_accuracy.json")
"""An ``EstimateAccuracy``, which ``python -m studies.links`` writes."""

Records = Sequence[Mapping[str, Any]]
"""Of ``bench.forecast.choice.answer``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateAccuracy:
    """How the estimates of steps agree with the steps of the CPU runs in results/."""

    num_steps: Natural
    num_below_overlapped: Natural
    """Steps that took less than overlapped."""
    num_above_serial: Natural
    """Steps that took longer than serial."""
    longest: Amount
    """Of all steps the longest in multiples of its serial one."""
    num_pairs: Natural
    """Pairs of backends that the estimates tell apart."""
    num_in_order: Natural
    """Those that were measured in that order."""

    @classmethod
    def stored(cls) -> EstimateAccuracy:
        """The one that is shipped."""
        return validation.read(
            cls, json.loads(ACCURACY.read_text(encoding="utf-8")), f"{ACCURACY.name}: "
        )

    @property
    def sentences(self) -> str:
        longer = "most"
        if self.num_above_serial <= self.num_steps / 2:
            longer = str(self.num_above_serial)
        return (
            f"In the CPU runs of results/ {self.num_below_overlapped} of {self.num_steps} steps "
            f"took less than overlapped, and {longer} took longer than serial, up to "
            f"{self.longest:.1f} times as long; {self.num_in_order} of {self.num_pairs} pairs of "
            "backends that the estimates tell apart were measured in that order "
            "(results/links/links.md). No GPU run has checked them yet."
        )


def printed_lines(question: Question, records: Records, choices: Choices) -> Iterator[str]:
    """All that is printed; wrappers have no lines of their own."""
    rows = [row for row in records if not row["equals"]]
    for row in rows:
        if row.get("exact_peak_bytes"):
            yield _exact_line(row)
    yield from _recommendation_lines(question, rows, choices)
    yield from ("", *setting_lines(question))
    yield from ("", "GiB of a rank at its peak, and one optimizer step:")
    yield _backend_table(question, records)
    for why, names in _names_by_text(_remarks_and_reasons(records)):
        yield from ("", f"{names}: {why}.")
    if choices:
        yield from ("", "The best by N and W (?: undecided, it leads):", _choice_table(choices))
    yield from ("", "Collectives of a step:")
    collectives = []
    for row in rows:
        if _is_predicted(row):
            collectives.append((_collectives_text(row), str(row["backend"])))
    for text, names in _names_by_text(collectives):
        yield f"  {names}: {text}"
    for note in _notes(question, records, is_timed=bool(choices)):
        yield from ("", note)


def _remarks_and_reasons(records: Records) -> Iterator[tuple[str, str]]:
    """What is said of backends that are refused, not predicted or wrong, with their names."""
    for row in records:
        if reason := _reason(row):
            yield f"{_remark(row)}: {reason}", row["backend"]


def _exact_line(row: Mapping[str, Any]) -> str:
    """The measured peak of a backend beside the predicted one."""
    exact, predicted = row["exact_peak_bytes"], row["peak_memory_bytes"]
    beside = f"predicted: {size(predicted)}, {100 * (predicted / exact - 1):+.1f} %"
    name = f"{row['backend']}: {size(exact)} at the peak of rank 0"
    return f"{name}, measured on fake tensors ({beside})."


def _names_by_text(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each text once, with all names that come with it."""
    found = []
    for text, names in grouped(pairs).items():
        found.append((text, ", ".join(names)))
    return found


def parameters_text(question: Question) -> str:
    """What is asked of the parameters, after a comma; empty if they are all trained in fp32."""
    text = ""
    if question.bf16_parameters:
        text += ", bf16 parameters without fp32 masters"
    if question.lora is not None:
        text += f", {question.lora}"
        if question.bf16_parameters and not question.lora.fp32:
            text += ", also in bf16 (peft's are fp32 by default: --lora-parameters fp32)"
    return text


def setting_lines(question: Question) -> Iterator[str]:
    """What is trained on how many ranks; then link, compute and memory."""
    cell = question.cell
    trained = (
        f"model {cell.model} ({model_of(cell).num_parameters / 1e9:.3g} G parameters), "
        f"{cell.precision}, {cell.optimizer}, {cell.device}"
    )
    trained += parameters_text(question)
    if cell.selective_checkpointing:
        trained += ", selective checkpointing"
    elif cell.activation_checkpointing:
        trained += ", activation checkpointing"
    ranks = f"W = {cell.world_size}"
    if cell.replicate:
        ranks += f", R = {cell.replicate} replicas in HSDP"
    yield (
        f"{trained}, micro-batches of {cell.micro_batch_size} x {cell.sequence_length} tokens; "
        f"{ranks}, N = {cell.accumulate}: B = {cell.global_batch_size} samples."
    )
    if parts := limits(question):
        yield "; ".join(parts) + "."


def limits(question: Question) -> list[str]:
    """Link, compute and memory."""
    link = question.link
    parts = []
    if link is not None:
        latency = "no latency"
        if link.latency_s:
            latency = f"{link.latency_s * 1e6:.4g} us"
        connected = f"link {link} per rank, {latency} per call"
        if link.source:
            connected += f" ({link.source})"
        parts.append(connected)
    if question.compute_s is not None:
        parts.append(
            f"compute {question.compute_s:.4g} s per optimizer step ({question.compute_from})"
        )
    if question.memory_bytes is not None:
        memory = f"memory {size(question.memory_bytes)}"
        if question.reserve_bytes:
            memory += f", {size(question.reserve_bytes)} of it reserved"
        parts.append(memory)
    return parts


def _has_levels(question: Question) -> bool:
    """Whether ranks of one node have a faster link."""
    return question.link is not None and question.link.node_size > 1


def _backend_table(question: Question, records: Records) -> str:
    """The table of backends; sizes in GiB. Wrappers are named beside what they equal."""
    wrappers = dict(_names_by_text((row["equals"], _name(row)) for row in records))
    columns = _columns(question, records)
    titles = [RATES.get(column, column).format(device_word(question)) for column in columns]
    found = []
    for row in records:
        if row["equals"]:
            continue
        values = ["-"] * len(columns)
        if _is_predicted(row):
            values = [_value(row, column) for column in columns]
        remarks = [_remark(row)]
        if row["backend"] in wrappers:
            remarks.append(f"= {wrappers[row['backend']]}")
        found.append([row["backend"], *values, "  ".join(filter(None, remarks))])
    return Table.from_rows(["backend", *titles, ""], found, range(1, len(titles) + 1)).text()


def _columns(question: Question, records: Records) -> list[str]:
    """The columns that have something to show."""
    columns = [*COLUMNS, "peak"]
    if question.memory_bytes is not None:
        columns.append("fits")
    if _has(records, "host_bytes"):
        columns += HOST_COLUMNS
    if _has_levels(question):
        columns += LEVEL_KEYS
    for name, key in SECONDS.items():
        if _has(records, key):
            columns.append(name)
    for key in RATES:
        if _has(records, key):
            columns.append(key)
    return columns


def device_word(question: Question) -> str:
    """What a rank runs on."""
    if question.cell.device is Device.CUDA:
        return "GPU"
    return "rank"


def _has(records: Records, key: str) -> bool:
    """Whether something is known of some backend."""
    return any(row[key] is not None for row in records)


def _name(row: Mapping[str, Any]) -> str:
    """The name of a backend, and whether it is known to be wrong."""
    if row["defect"]:
        return f"{row['backend']} (WRONG)"
    return str(row["backend"])


def _value(row: Mapping[str, Any], column: str) -> str:
    """What stands in a column of the table for a backend that is predicted."""
    if column in COLUMNS:
        return _gib(sum(row["memory"][part] for part in COLUMNS[column]))
    of_bytes = HOST_COLUMNS | LEVEL_KEYS | {"peak": "peak_memory_bytes"}
    if column in of_bytes:
        return _gib(row[of_bytes[column]])
    if column in SECONDS:
        seconds = row[SECONDS[column]]
        if seconds is None:
            return "-"
        return f"{seconds:.4g}"
    if column in RATES:
        return rates_text(column, row[column])
    return fits_text(fits=row["fits"], may_fit=row["may_fit"])


def rates_text(key: str, values: Sequence[float] | None) -> str:
    """The least and the most of RATES."""
    if values is None:
        return "-"
    least, most = values
    if key == "mfu":
        return f"{100 * least:.1f}-{100 * most:.1f}"
    return f"{least:,.0f}-{most:,.0f}"


def fits_text(*, fits: bool, may_fit: bool) -> str:
    """Whether a peak fits with what is reserved beside it."""
    if fits:
        return "yes"
    if may_fit:
        return "tight"
    return "NO"


def _is_predicted(row: Mapping[str, Any]) -> bool:
    return row["peak_memory_bytes"] is not None


def _gib(num_bytes: float | None) -> str:
    """GiB; a dash for nothing, and where a backend has no such number."""
    if num_bytes is None or num_bytes == 0:
        return "-"
    return digits(num_bytes / GIB)


def _remark(row: Mapping[str, Any]) -> str:
    """The first of REMARKS that holds; empty if none does."""
    for key, remark in REMARKS.items():
        if row[key]:
            return remark
    return ""


def _reason(row: Mapping[str, Any]) -> str:
    """Why a backend is refused, not predicted or wrong; empty if it is not."""
    for key in ("refusal", "not_predicted", "defect"):
        if row[key]:
            return str(row[key])
    return ""


def _choice_table(choices: Choices) -> str:
    sizes = sorted({world_size for _, world_size in choices})
    rows = []
    for accumulate in sorted({accumulate for accumulate, _ in choices}):
        row = [f"N = {accumulate}"]
        for world_size in sizes:
            row.append(_choice_text(choices[accumulate, world_size]))
        rows.append(row)
    return Table.from_rows(["", *(f"W = {world_size}" for world_size in sizes)], rows).text()


def _choice_text(choice: Choice) -> str:
    """The backend, how many are as good by all numbers, and whether it is undecided."""
    if not choice.best:
        return "nothing fits"
    text = choice.best
    if choice.equal:
        text += f" (and {len(choice.equal)} more)"
    if choice.rivals:
        text += " ?"
    return text


def _collectives_text(row: Mapping[str, Any]) -> str:
    """The collectives of one optimizer step."""
    if not row["collectives"]:
        return "none"
    found = []
    for sent in row["collectives"]:
        what = f"{sent['op']} {sent['dtype']}{among(sent['group'])} {sent['calls']} x"
        found.append(
            f"{what}, {size(sent['payload_bytes'])} payload, {size(sent['wire_bytes'])} on the wire"
        )
    return "; ".join(found)


def _notes(question: Question, records: Records, *, is_timed: bool) -> Iterator[str]:
    cell = question.cell
    if any(row["equals"] for row in records):
        yield WRAPPERS
    yield PEAK
    if _has(records, "host_bytes"):
        yield ON_THE_HOST
    if cell.selective_checkpointing:
        yield (
            "Selective checkpointing: blocks keep their input and the results of attention and of "
            "every second matrix product, and compute the rest once more."
        )
    elif cell.activation_checkpointing:
        yield (
            "Activation checkpointing: blocks keep their input, and compute their forward once "
            "more."
        )
    if text := reserve_text(question):
        yield text
    if cell.world_size == 1:
        yield (
            "One rank: the collectives that a framework still calls send nothing and take no time "
            "here."
        )
    if not is_timed:
        return
    if _has_levels(question):
        yield LEVELS
    yield f"{TIMES} {EstimateAccuracy.stored().sentences}"
    others = "any other backend that fits"
    if question.memory_bytes is None:
        others = "any other backend"
    yield (
        f"best: the serial step is at most {100 * MARGIN:g} % longer than the overlapped step of "
        f"{others}, and of such backends it needs the least memory. Otherwise it is undecided, and "
        "the shortest serial step leads. Compute grows in proportion to N; the micro-batch is "
        "fixed."
    )


TIGHT = "it fits only if less is reserved beside its peak than the most that was published"


def reserve_text(question: Question) -> str:
    """Which part of the memory is kept free, and why so much; empty without a limit."""
    if question.memory_bytes is None:
        return ""
    if question.reserve_bytes is not None:
        return f"Reserve: {size(question.reserve_bytes)} of a device's memory, as given."
    if question.cell.device is not Device.CUDA:
        return ""
    parts = []
    for kept in reserves(nccl=question.cell.world_size > 1):
        amount = size(kept.num_bytes)
        if kept.most:
            amount = f"{100 * kept.least:.0f} to {100 * kept.most:.0f} % of it"
        parts.append(f"{kept.what} {amount} ({kept.source})")
    if question.cell.replicate:
        parts.append("the second communicator of HSDP is not counted")
    return (
        "fits: with the most that is reserved beside a peak; tight: with the least. Reserved: "
        f"{'; '.join(parts)}. --reserve replaces all of it."
    )


def _trade_text(best: str, traded: Trade) -> str:
    """What needs less memory than the best for a time that is as good, and what that could buy."""
    least, most = traded.longer
    text = (
        f"Less memory: {traded.name} needs {size(traded.freed_bytes)} less, for {100 * least:.2g} "
        f"to {100 * most:.2g} % more time; the two estimates of {best} are {100 * traded.interval:.2g} % "
        "apart."
    )
    if traded.larger is None or traded.larger_step is None:
        return text
    cell, step = traded.larger.cell, traded.larger_step
    return (
        f"{text} With micro-batches of {cell.micro_batch_size} and N = {cell.accumulate} it needs "
        f"{size(traded.larger.memory.peak)} and takes {step.overlapped:.4g} to {step.serial:.4g} s."
    )


def _recommendation_lines(question: Question, rows: Records, choices: Choices) -> Iterator[str]:
    """What to take, with the reason; if that is undecided, also the command that decides it."""
    able, fitting = [], []
    for row in rows:
        if row["defect"] or not _is_predicted(row):
            continue
        able.append(row)
        if row["may_fit"] is not False:
            fitting.append(row)
    here = choices.get((question.cell.accumulate, question.cell.world_size))
    if not fitting or here is None or not here.best:
        yield f"Recommendation: {_recommendation_by_memory(question, fitting, able)}"
        return
    (best,) = (row for row in rows if row["backend"] == here.best)
    named = here.best
    if here.equal:
        named = f"{here.best} (equal: {', '.join(here.equal)})"
    takes = (
        f"{named}: {best['overlapped_s']:.4g} s (overlapped) to {best['serial_s']:.4g} s (serial) "
        f"per step, {size(best['peak_memory_bytes'])} of memory"
    )
    if here.is_tight:
        takes += f", which is tight: {TIGHT}"
    traded = trade(question, [str(row["backend"]) for row in rows], here.best)
    if not here.rivals:
        yield (
            f"Recommendation: {takes}. By these estimates no other is more than {100 * MARGIN:g} % "
            "faster."
        )
        if traded is not None:
            yield _trade_text(here.best, traded)
        return
    fastest = min(row["overlapped_s"] for row in rows if row["backend"] in here.rivals)
    longer = f"{100 * (best['serial_s'] / fastest - 1):.2g} % longer"
    yield (
        f"Recommendation until measured: {takes}. It has the shortest serial step, which is at "
        f"most {longer} than the overlapped step of any other."
    )
    if traded is not None:
        yield _trade_text(here.best, traded)
    yield (
        f"May be faster: {', '.join(here.rivals)}. How much of its communication each hides is not "
        "predicted; on the GPUs of one machine it is measured by: "
        f"{_measuring_command(question.cell, here)}"
    )


def _recommendation_by_memory(question: Question, fitting: Records, able: Records) -> str:
    """What to take where no time is known, or why nothing can be taken."""
    if not able:
        return (
            "none; every backend that was asked for is refused, not predicted, or known to be "
            "wrong."
        )
    on_device = [row for row in fitting if row["host_bytes"] is None]
    preferred = able
    if on_device:
        preferred = on_device
    elif fitting:
        preferred = fitting
    needs = _least_text(question, fitting, preferred, on_device)
    if not fitting:
        ways = "more ranks or a smaller micro-batch"
        if not question.cell.activation_checkpointing:
            ways += ", or --activation-checkpointing"
        return f"none fits; {needs}. Try {ways}."
    if not on_device:
        return f"{needs}. Without offload none fits; steps with it are not estimated."
    missing = []
    if question.link is None:
        missing.append("--link")
    if question.compute_s is None:
        missing.append("--peak")
    return f"{needs}. For one by time, add {' and '.join(missing)}."


def _least_text(question: Question, fitting: Records, rivals: Records, on_device: Records) -> str:
    """Which of ``rivals`` needs the least memory, how much, and how much there is."""
    least = min(rivals, key=lambda row: int(row["peak_memory_bytes"]))
    which = ""
    if on_device and len(on_device) < len(fitting):
        which = " without offload"
    memory = f"{size(least['peak_memory_bytes'])} of memory"
    needs = f"{least['backend']} needs the least{which}: {memory}"
    if question.memory_bytes is None:
        return needs
    needs += f", of {size(question.memory_bytes)}"
    if fitting and not on_device:
        needs += f", and {size(least['host_bytes'])} of the host's"
    if fitting and not least["fits"]:
        needs += f", which is tight: {TIGHT}"
    return needs


def _measuring_command(cell: Cell, here: Choice) -> str:
    """The command that measures what is undecided; the model is that of the matrix."""
    command = (
        f"python -m bench run --matrix gpu --backend {','.join([here.best, *here.rivals])} "
        f"--accumulate {cell.accumulate} --micro-batch {cell.micro_batch_size} --precision "
        f"{cell.precision}"
    )
    if cell.selective_checkpointing:
        return f"{command} --selective-checkpointing on"
    if cell.activation_checkpointing:
        return f"{command} --activation-checkpointing on"
    return command
