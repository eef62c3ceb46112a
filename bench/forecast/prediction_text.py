"""What ``predict`` prints: the recommendation, tables and notes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import validation
from bench.forecast.backend_forecast import BackendForecast
from bench.forecast.choice import MARGIN, Choice, Choices, Question, StepRates, Trade, trade
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
TOKENS, MFU = "tok/s/{}", "MFU (%)"
"""Titles of columns; ``{}`` is for GPU or rank."""
TITLES = (
    *COLUMNS,
    *("peak", "fits"),
    *("host", "pinned", "to dev", "to host"),
    *("intra", "inter"),
    *("comm/s", "overlapped/s", "serial/s", TOKENS, MFU),
)
"""All columns that the table may have, in order."""
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


def printed_lines(
    question: Question, rows: Sequence[BackendForecast], choices: Choices
) -> Iterator[str]:
    """All that is printed; wrappers have no lines of their own."""
    shown = [row for row in rows if not row.equals]
    for row in shown:
        if row.exact_peak_bytes is not None:
            yield _exact_line(row, row.exact_peak_bytes)
    yield from _recommendation_lines(question, shown, choices)
    yield from ("", *setting_lines(question))
    yield from ("", "GiB of a rank at its peak, and one optimizer step:")
    yield _backend_table(question, rows)
    for why, names in _names_by_text(_remarks_and_reasons(rows)):
        yield from ("", f"{names}: {why}.")
    if choices:
        yield from ("", "The best by N and W (?: undecided, it leads):", _choice_table(choices))
    yield from ("", "Collectives of a step:")
    collectives = [(_collectives_text(row), row.name) for row in shown if row.is_predicted]
    for text, names in _names_by_text(collectives):
        yield f"  {names}: {text}"
    for note in _notes(question, rows, is_timed=bool(choices)):
        yield from ("", note)


def _remarks_and_reasons(rows: Sequence[BackendForecast]) -> Iterator[tuple[str, str]]:
    """What is said of backends that are refused, not predicted or wrong, with their names."""
    for row in rows:
        if row.reason:
            yield f"{_remark(row)}: {row.reason}", row.name


def _exact_line(row: BackendForecast, exact: int) -> str:
    """The measured peak of a backend beside the predicted one."""
    beside = f"predicted: {size(row.peak)}, {100 * (row.peak / exact - 1):+.1f} %"
    name = f"{row.name}: {size(exact)} at the peak of rank 0"
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


def _backend_table(question: Question, rows: Sequence[BackendForecast]) -> str:
    """The table of backends, with the columns of which something is known; sizes in GiB.

    Wrappers are named beside what they equal.
    """
    wrappers = dict(_names_by_text((row.equals, _name(row)) for row in rows))
    shown = [row for row in rows if not row.equals]
    values = {row.name: _values(row) for row in shown}
    titles = []
    for title in TITLES:
        if any(title in known for known in values.values()):
            titles.append(title)
    found = []
    for row in shown:
        cells = [values[row.name].get(title, "-") for title in titles]
        remarks = [_remark(row)]
        if row.name in wrappers:
            remarks.append(f"= {wrappers[row.name]}")
        found.append([row.name, *cells, "  ".join(filter(None, remarks))])
    header = ["backend", *(title.format(device_word(question)) for title in titles), ""]
    return Table.from_rows(header, found, range(1, len(titles) + 1)).text()


def _values(row: BackendForecast) -> dict[str, str]:
    """What is known of a backend, by the title of its column."""
    if not row.is_predicted:
        return {}
    values = {}
    for title, categories in COLUMNS.items():
        values[title] = _gib(sum(row.prediction.memory.parts[name] for name in categories))
    values["peak"] = _gib(row.peak)
    if row.fits is not None and row.may_fit is not None:
        values["fits"] = fits_text(fits=row.fits, may_fit=row.may_fit)
    if row.prediction.host is not None:
        host = row.prediction.host
        values["host"], values["pinned"] = _gib(host.peak), _gib(host.pinned)
        values["to dev"], values["to host"] = _gib(host.to_device), _gib(host.to_host)
    if row.levels is not None:
        values["intra"] = _gib(row.levels.intra_bytes)
        values["inter"] = _gib(row.levels.inter_bytes)
    if row.communication_s is not None:
        values["comm/s"] = f"{row.communication_s:.4g}"
    if row.step is not None:
        values["overlapped/s"] = f"{row.step.overlapped:.4g}"
        values["serial/s"] = f"{row.step.serial:.4g}"
    if row.rates is not None:
        values[TOKENS] = tokens_text(row.rates)
        if row.rates.mfu is not None:
            values[MFU] = mfu_text(row.rates.mfu)
    return values


def device_word(question: Question) -> str:
    """What a rank runs on."""
    if question.cell.device is Device.CUDA:
        return "GPU"
    return "rank"


def _name(row: BackendForecast) -> str:
    """The name of a backend, and whether it is known to be wrong."""
    if row.prediction.defect:
        return f"{row.name} (WRONG)"
    return row.name


def _gib(num_bytes: float) -> str:
    """GiB; a dash for nothing."""
    if num_bytes == 0:
        return "-"
    return digits(num_bytes / GIB)


def tokens_text(rates: StepRates) -> str:
    """The rates of a serial and of an overlapped step."""
    least, most = rates.tokens_per_s
    return f"{least:,.0f}-{most:,.0f}"


def mfu_text(mfu: tuple[float, float]) -> str:
    """The shares of a serial and of an overlapped step, in percent."""
    least, most = mfu
    return f"{100 * least:.1f}-{100 * most:.1f}"


def fits_text(*, fits: bool, may_fit: bool) -> str:
    """Whether a peak fits with what is reserved beside it."""
    if fits:
        return "yes"
    if may_fit:
        return "tight"
    return "NO"


def _remark(row: BackendForecast) -> str:
    """What is said beside a row: the first that holds; empty for nothing."""
    remarks = {
        "refused": bool(row.prediction.refusal),
        "not predicted": bool(row.prediction.not_predicted),
        "WRONG": bool(row.prediction.defect),
    }
    if row.standing is not None:
        remarks["may be the fastest"] = row.standing.may_be_fastest
        remarks["best"] = row.standing.best
        remarks["recommended"] = row.standing.recommended
    for remark, holds in remarks.items():
        if holds:
            return remark
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


def _collectives_text(row: BackendForecast) -> str:
    """The collectives of one optimizer step."""
    if not row.sent:
        return "none"
    found = []
    for sent in row.sent:
        found.append(
            f"{sent.op} {sent.dtype}{among(sent.group)} {sent.calls} x, "
            f"{size(sent.payload_bytes)} payload, {size(sent.wire_bytes)} on the wire"
        )
    return "; ".join(found)


def _notes(question: Question, rows: Sequence[BackendForecast], *, is_timed: bool) -> Iterator[str]:
    cell = question.cell
    if any(row.equals for row in rows):
        yield WRAPPERS
    yield PEAK
    if any(row.offloads for row in rows):
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


def _recommendation_lines(
    question: Question, rows: Sequence[BackendForecast], choices: Choices
) -> Iterator[str]:
    """What to take, with the reason; if that is undecided, also the command that decides it."""
    able, fitting = [], []
    for row in rows:
        if row.prediction.defect or not row.is_predicted:
            continue
        able.append(row)
        if row.may_fit is not False:
            fitting.append(row)
    here = choices.get((question.cell.accumulate, question.cell.world_size))
    if not fitting or here is None or not here.best:
        yield f"Recommendation: {_recommendation_by_memory(question, fitting, able)}"
        return
    by_name = {row.name: row for row in rows}
    best = by_name[here.best]
    step = question.step(best.prediction)
    named = here.best
    if here.equal:
        named = f"{here.best} (equal: {', '.join(here.equal)})"
    takes = (
        f"{named}: {step.overlapped:.4g} s (overlapped) to {step.serial:.4g} s (serial) per step, "
        f"{size(best.peak)} of memory"
    )
    if here.is_tight:
        takes += f", which is tight: {TIGHT}"
    traded = trade(question, list(by_name), here.best)
    if not here.rivals:
        yield (
            f"Recommendation: {takes}. By these estimates no other is more than {100 * MARGIN:g} % "
            "faster."
        )
        if traded is not None:
            yield _trade_text(here.best, traded)
        return
    fastest = min(question.step(by_name[name].prediction).overlapped for name in here.rivals)
    longer = f"{100 * (step.serial / fastest - 1):.2g} % longer"
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


def _recommendation_by_memory(
    question: Question, fitting: Sequence[BackendForecast], able: Sequence[BackendForecast]
) -> str:
    """What to take where no time is known, or why nothing can be taken."""
    if not able:
        return (
            "none; every backend that was asked for is refused, not predicted, or known to be "
            "wrong."
        )
    on_device = [row for row in fitting if not row.offloads]
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


def _least_text(
    question: Question,
    fitting: Sequence[BackendForecast],
    rivals: Sequence[BackendForecast],
    on_device: Sequence[BackendForecast],
) -> str:
    """Which of ``rivals`` needs the least memory, how much, and how much there is."""
    least = min(rivals, key=lambda row: row.peak)
    which = ""
    if on_device and len(on_device) < len(fitting):
        which = " without offload"
    needs = f"{least.name} needs the least{which}: {size(least.peak)} of memory"
    if question.memory_bytes is None:
        return needs
    needs += f", of {size(question.memory_bytes)}"
    if fitting and least.prediction.host is not None and not on_device:
        needs += f", and {size(least.prediction.host.peak)} of the host's"
    if fitting and not least.fits:
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
