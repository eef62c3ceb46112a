"""Whether a run's records can be those of one run, and whether its manifest says what they say.

A checksum tells a line that was changed by accident. Whoever changes a run on purpose makes its
checksums again, so what stands in two places is compared here.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.findings import Finding, error, good, warning
from bench.formatting import plural, some
from bench.judge.loading import Run
from bench.plan.cell import Device, Status
from bench.run.trial_record import TrialRecord

TOPIC = "records"


def contradictions(run: Run) -> Iterator[Finding]:
    """What cannot be of one run; a good finding if there is nothing."""
    found = [*_writers(run), *_repeated(run), *_unlike_manifest(run)]
    yield from found
    if not found:
        yield good(
            TOPIC, "one process wrote them in this order, and they do not contradict run.json"
        )


def _writers(run: Run) -> Iterator[Finding]:
    """A runner numbers its records, from the number of those that it found.

    With two runners, numbers come twice.
    """
    for number, record in enumerate(run.records):
        if record.slot is not None and record.slot != number:
            text = (
                f"record {number + 1} of the journal was written as number {record.slot + 1}: "
                "records were removed or added, or two processes wrote at once"
            )
            yield error(TOPIC, text)
            return


def _repeated(run: Run) -> Iterator[Finding]:
    """A trial is run again after an interruption or a failure.

    A good one is only to check an update that it lacks.
    """
    good_ones: dict[tuple[str, int], TrialRecord] = {}
    twice: list[str] = []
    for record in run.records:
        before = good_ones.get(record.key)
        if before is not None and not _adds_update(before, record):
            twice.append(f"{run.labels[record.cell_id]}, repeat {record.repeat}")
        if record.status is Status.OK:
            good_ones[record.key] = record
    if twice:
        yield error(
            TOPIC, f"{plural(len(twice), 'trial')} ran again after a good record: {some(twice)}"
        )


def _adds_update(before: TrialRecord, after: TrialRecord) -> bool:
    return "update" not in before.passes and "update" in after.passes


def _unlike_manifest(run: Run) -> Iterator[Finding]:
    """What run.json says of the run beside what the records say."""
    planned = {cell.cell_id for cell in run.manifest.cells}
    strangers = [run.labels[cell_id] for cell_id in run.cells if cell_id not in planned]
    if strangers:
        cells = plural(len(strangers), "cell")
        yield error(TOPIC, f"run.json lacks {cells} of the journal: {some(strangers)}")
    begun = run.manifest.begun_sha256
    changed: list[int] = []
    for number, record in enumerate(run.records, 1):
        if record.begun_sha256 not in (None, begun):
            changed.append(number)
    if changed:
        text = (
            f"run.json was changed after trials had run: {plural(len(changed), 'record')}, "
            f"the first of them number {changed[0]}, name another SHA-256 of what it said of "
            f"machine, packages, code and matrix, now {begun}"
        )
        yield error(TOPIC, text)
    yield from _packages(run)
    yield from _devices(run)
    yield from _times(run)


def _packages(run: Run) -> Iterator[Finding]:
    """Versions stand in run.json twice: those that matter, and those of all distributions."""
    for name, version in run.manifest.packages.items():
        other = run.manifest.distributions.get(name, version)
        if other != version:
            yield error(
                TOPIC, f"run.json says {name} {version} and, of all distributions, {name} {other}"
            )


def _devices(run: Run) -> Iterator[Finding]:
    """The GPU of a rank is named by torch in each record, and in run.json by what found it."""
    known: set[str] = set()
    for node in (run.manifest.node, *run.manifest.nodes):
        for gpu in node.machine.gpus:
            known.add(gpu.name)
    for record in run.records:
        name = record.device_name
        if not name or not known or record.cell.device is not Device.CUDA:
            continue
        if not any(each in name or name in each for each in known):  # torch adds a MIG profile
            ran = f"{run.labels[record.cell_id]} ran on '{name}'"
            yield error(TOPIC, f"{ran}, and run.json says {some(sorted(known))}")
            return


def _times(run: Run) -> Iterator[Finding]:
    """Trials end between the run's start and its end, unless the clock was set meanwhile."""
    ended = [record.ended for record in run.records if record.ended]
    if not ended:
        return
    started, finished = run.manifest.started, run.manifest.finished
    why = "the clock was set meanwhile, or a date was changed"
    if started and min(ended) < started:
        yield warning(
            TOPIC, f"a trial ended at {min(ended)}, before the run started, at {started}: {why}"
        )
    if finished and max(ended) > finished:
        yield warning(
            TOPIC, f"a trial ended at {max(ended)}, after the run finished, at {finished}: {why}"
        )
