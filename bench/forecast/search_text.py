"""What ``predict --batch`` prints: a recommendation, and the front of time against memory."""

from __future__ import annotations

from collections.abc import Iterator

from bench.forecast.choice import MARGIN, Question
from bench.forecast.prediction_text import (
    MFU,
    TIGHT,
    TOKENS,
    device_word,
    fits_text,
    limits,
    mfu_text,
    parameters_text,
    reserve_text,
    tokens_text,
)
from bench.forecast.search import CHECKPOINTING, Combination, Search
from bench.formatting import digits, plural, size
from bench.tabular import Table

GIB = 2**30
HEADER = ("micro-batch", "N", "backend", "checkpointing", "peak (GiB)", "fits")
SECONDS = ("overlapped/s", "serial/s")
NOTES = (
    "On the front is what nothing else beats: by peak memory, by the overlapped step and by the "
    "serial one. Every combination computes at the same rate, recomputation included: that a "
    "small micro-batch may leave a GPU partly idle, and what the host does between kernels, is "
    "not predicted. Wrappers are left out unless --all or --backend names them, and so is what is "
    "known to be wrong or not predicted, and what offloads, since the time of its copies is not "
    "estimated (--accumulate N instead of --batch shows its memory)."
)


def search_lines(question: Question, found: Search) -> Iterator[str]:
    """All that is printed."""
    cell = question.cell
    yield f"Recommendation: {_recommendation(found)}"
    yield ""
    tokens = cell.global_batch_size * cell.sequence_length
    yield (
        f"model {cell.model}, {cell.precision}, {cell.optimizer}, {cell.device}"
        f"{parameters_text(question)}, W = "
        f"{cell.world_size}: B = {cell.global_batch_size} samples of {cell.sequence_length} "
        f"tokens, {tokens / 1e6:.3g} M tokens, per optimizer step."
    )
    yield "; ".join(limits(question)) + "."
    num_fitting = sum(combination.fits for combination in found.combinations)
    counted = plural(len(found.combinations), "combination")
    counted += f" of micro-batch, N, backend and checkpointing ({', '.join(CHECKPOINTING)})"
    if question.memory_bytes is not None:
        counted += f", of which {num_fitting} fit"
    yield f"{counted}."
    if found.front:
        yield ""
        yield "The front, the least memory first:"
        yield _front_table(question, found)
    for note in (NOTES, reserve_text(question)):
        if note:
            yield from ("", note)


def _recommendation(found: Search) -> str:
    """The fastest of the front by its serial step, and what needs less memory for as much time."""
    if not found.combinations:
        return (
            "none; every backend is refused, not predicted, known to be wrong, or offloads, of "
            "which no time is estimated."
        )
    if not found.front:
        return (
            "none; nothing fits without offload. Try more ranks, a shorter sequence, or bf16 "
            "parameters (--parameters)."
        )
    fastest = min(found.front, key=lambda each: (each.step.serial, each.peak))
    text = f"{_named(fastest)}: {_needs(fastest)}. By serial steps it is the fastest that fits"
    if found.is_tight:
        text += f", which is tight: {TIGHT}"
    limit = fastest.step.serial * (1 + MARGIN)
    close = [each for each in found.front if each.step.serial <= limit]
    least = min(close, key=lambda each: each.peak)
    if least is fastest:
        return f"{text}."
    sparing = f"the least memory is needed by {_named(least)}: {_needs(least)}"
    return f"{text}; within {100 * MARGIN:g} % of it {sparing}."


def _named(combination: Combination) -> str:
    cell = combination.cell
    checkpointing = f"{combination.checkpointing} checkpointing"
    if combination.checkpointing == "none":
        checkpointing = "no checkpointing"
    return (
        f"{combination.prediction.name} with micro-batches of {cell.micro_batch_size}, N = "
        f"{cell.accumulate} and {checkpointing}"
    )


def _needs(combination: Combination) -> str:
    step = combination.step
    return (
        f"{step.overlapped:.4g} s (overlapped) to {step.serial:.4g} s (serial) per step, "
        f"{size(combination.peak)} of memory"
    )


def _front_table(question: Question, found: Search) -> str:
    header = [*HEADER, *SECONDS, TOKENS.format(device_word(question))]
    if question.peak_flops is not None:
        header.append(MFU)
    rows = []
    for combination in found.front:
        cell, step = combination.cell, combination.step
        rates = question.rates(cell, step)
        row = [
            str(cell.micro_batch_size),
            str(cell.accumulate),
            combination.prediction.name,
            combination.checkpointing,
            digits(combination.peak / GIB),
            fits_text(fits=combination.fits, may_fit=combination.may_fit),
            f"{step.overlapped:.4g}",
            f"{step.serial:.4g}",
            tokens_text(rates),
        ]
        if rates.mfu is not None:
            row.append(mfu_text(rates.mfu))
        rows.append(row)
    numbers = [place for place in range(len(header)) if place not in (2, 3, 5)]
    return Table.from_rows(header, rows, numbers).text()
