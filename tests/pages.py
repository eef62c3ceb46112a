"""The maker of runs that are written as they would be on disk, and a reader of the pages that come of them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bench.judge.baseline import interim_analysis
from bench.judge.loading import Run, load
from bench.launch.outcome import Outcome
from bench.plan.categories import HELD, PEAK, Category
from bench.plan.cell import REFERENCE, Cell, Status
from bench.plan.expand import expand
from bench.plan.task import Spec
from bench.report import figures
from bench.report.outputs import write_outputs
from bench.run import start
from bench.run.journal import JOURNAL, encode, write_document
from bench.run.runner import Runner
from tests import factories
from tests.factories import (
    FakeLauncher,
    make_cell,
    make_manifest,
    make_matrix,
    make_record,
    make_time,
)

STEP_S = 0.1
MIB = 2**20
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "=1+1",
    "../../x",
    "x" * 120,
    "مرحبا-بالعالم",
    "a\u202eb|`c`*d*[e](f) {{ 7 * 7 }} $G$ &amp; \"q\" 'q'",
)
"""Names of backends that try to be something else."""
VOID = {"meta", "br", "img", "link", "hr", "input", "base", "source", "col", "wbr", "embed", "area"}
Changes = Callable[[Cell, int], Mapping[str, Any]]
"""How a trial of a cell and repeat differs from a sound one: fields of its record, among them ``time``; a ``status``
and ``reason`` if it failed; and ``slower``, by how many times."""


def steps_of(generator: random.Random, cell: Cell, seconds: float, noise: float) -> list[float]:
    """Step times of a trial; ``noise`` is the standard deviation of the logarithms of trials and of steps."""
    trial = seconds * math.exp(generator.gauss(0, noise))
    return [trial * math.exp(generator.gauss(0, noise)) for _ in range(cell.timed_windows)]


def records_of(
    speeds: Mapping[Cell, float],
    repeats: int = 10,
    noise: float = 0.003,
    seed: int = 7,
    changes: Changes = lambda cell, repeat: {},
) -> list[dict[str, Any]]:
    """The records of cells that take these seconds per step, block by block, each block with the references first."""
    generator, records = random.Random(seed), []
    every = {**dict.fromkeys((cell.reference() for cell in speeds), 2 * STEP_S), **speeds}
    for repeat, (cell, seconds) in itertools.product(range(repeats), every.items()):
        changed = dict(changes(cell, repeat))
        steps = steps_of(generator, cell, seconds * changed.pop("slower", 1.0), noise)
        if changed.get("status"):
            record = factories.make_failure(cell, repeat, changed["status"], changed["reason"])
        else:
            time = {"step_seconds": steps, **changed.pop("time", {})}
            record = make_record(cell, repeat, time=time, **changed)
        records.append(record | {"slot": len(records)})
    return records


def write(folder: Path, records: Sequence[Mapping[str, Any]], **manifest: Any) -> Path:
    """The journal and manifest of a finished run; with ``finished=None`` of one that goes on."""
    cells = list({record["cell_id"]: Cell.from_dict(record["cell"]) for record in records}.values())
    about = make_manifest(
        cells,
        run_id=folder.name,
        started="2026-01-02T03:04:05+00:00",
        finished="2026-01-02T04:04:05+00:00",
        command=["python", "-m", "bench", "run", "--out", str(folder.name)],
        git={"commit": COMMIT, "clean": True},
        matrix=make_matrix({"repeats": 1 + max(record["repeat"] for record in records)}).to_dict(),
    )
    journal = b"".join(encode(dict(record)) for record in records)
    about |= {"journal_sha256": hashlib.sha256(journal).hexdigest(), **manifest}
    folder.mkdir(parents=True)
    (folder / JOURNAL).write_bytes(journal)
    write_document(folder, {key: value for key, value in about.items() if value is not None})
    return folder


def kind(name: str) -> dict[str, str]:
    """What a manifest says of a made-up backend: by its name eager or deferred, of the framework before that word."""
    framework, _, sync = name.rpartition("-")
    known = sync in {"eager", "deferred"}
    return {
        "framework": f"made {framework}" if known else "made",
        "sync": sync if known else "eager",
        "sharding": "none",
        "bf16_as": "bf16 copies",
        "defect": "",
    }


def write_run(
    folder: Path,
    backends: Mapping[str, float],
    *,
    accumulate: tuple[int, ...] = (1, 4),
    world_size: tuple[int, ...] = (2,),
    precision: tuple[str, ...] = ("fp32",),
    repeats: int = 10,
    noise: float = 0.003,
    twin: bool = True,
    changes: Changes = lambda cell, repeat: {},
    **manifest: Any,
) -> Path:
    """A run of made-up backends that take STEP_S times their factor; the first is the baseline."""
    batch = max(accumulate) * max(world_size) * 2
    speeds = {
        make_cell(
            backend=name, accumulate=n, world_size=w, precision=p, global_batch_size=batch
        ): STEP_S * factor
        for p, w, n, (name, factor) in itertools.product(
            precision, world_size, accumulate, backends.items()
        )
    }
    first = next(iter(backends))
    base = max(
        (cell for cell in speeds if cell.backend == first),
        key=lambda cell: (cell.world_size, cell.accumulate),
    )
    if twin:
        speeds[dataclasses.replace(base, twin="again")] = speeds[base]

    def changed(cell: Cell, repeat: int) -> dict[str, Any]:
        made = {} if cell.backend == REFERENCE else _facts(cell, repeat, backends[cell.backend])
        return made | changes(cell, repeat)

    about = {"baseline": first, "backends": {name: kind(name) for name in ["reference", *backends]}}
    return write(folder, records_of(speeds, repeats, noise, changes=changed), **about | manifest)


def write_large_run(folder: Path) -> Path:
    """A run of 500 cells: 12 backends, 7 N, 3 world sizes and 2 precisions, and their references."""
    backends = {
        f"backend-{i}-{sync}": 1 + i / 20 for i in range(6) for sync in ("eager", "deferred")
    }
    axes: dict[str, Any] = {"world_size": (1, 2, 4), "precision": ("fp32", "bf16")}
    return write_run(folder, backends, accumulate=(1, 2, 4, 8, 16, 32, 64), **axes)


def _facts(cell: Cell, repeat: int, factor: float) -> dict[str, Any]:
    """Memory by category, and collectives."""
    memory = {}
    for total in (PEAK, HELD):
        parts = {
            f"{total}_{name}": round((i + 1) * factor * MIB) for i, name in enumerate(Category)
        }
        memory |= {total: sum(parts.values()), **parts}
    sent = {"all_reduce": (cell.accumulate, cell.accumulate * 12 * MIB), "broadcast": (1, MIB)}
    collectives = [
        {"op": op, "group": "world", "dtype": "float32", "calls": calls, "payload_bytes": size}
        for op, (calls, size) in sent.items()
    ]
    return {
        "memory": None if repeat else memory,
        "collectives": collectives if cell.world_size > 1 else [],
    }


def simulate(
    folder: Path, factors: Mapping[str, float], *, once: Collection[str] = (), **values: Any
) -> Run:
    """A run for which all is real but the launcher, which makes up the step times; ``values`` are keys of the matrix.

    ``once`` are the backends of one trial.
    """
    backends = {name: factories.make_backend(name) for name in [REFERENCE, *factors]}
    overrides = {"training.timed_windows": 8, "training.warmup_windows": 2} | values
    cells = expand(
        matrix := make_matrix(overrides, backend=list(factors), accumulate=[2]), backends, 0
    ).cells
    alone = [cell.cell_id for cell in cells if cell.backend in once]
    manifest = start.create(folder, start.Planned(matrix, backends, cells, alone), cold=False)
    generator = random.Random(0)

    def script(spec: Spec, number: int) -> Outcome | None:
        if (cell := spec.cell).backend == REFERENCE:
            return None
        time = make_time(
            cell, step_seconds=steps_of(generator, cell, STEP_S * factors[cell.backend], 0.004)
        )
        ranks = [
            factories.make_rank(cell, spec.passes, rank, time=time)
            for rank in range(cell.world_size)
        ]
        return Outcome(status=Status.OK, reason="", ranks=ranks, wall_s=1.0)

    Runner(folder, manifest, backends, FakeLauncher(script), Mock(), interim_analysis).run()  # type: ignore[arg-type]
    return load(folder)


def report(folder: Path, *, drawn: bool = True) -> tuple[int, str]:
    """Write the report, with plots or without; the exit status, and what was printed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(figures, "draw", lambda *_: [])
        status = write_outputs(folder, folder / "plots")
    return status, text.getvalue()


class Element:
    """One element of a page."""

    def __init__(self, tag: str, attributes: Mapping[str, str | None]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Element | str] = []

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def find(self, *tags: str, **attributes: str) -> list[Element]:
        wanted = {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()}
        return [
            tag
            for tag in self.walk()
            if (not tags or tag.tag in tags)
            and all(tag.attributes.get(key) == v for key, v in wanted.items())
        ]

    @property
    def text(self) -> str:
        return "".join(child if isinstance(child, str) else child.text for child in self.children)


class Reader(HTMLParser):
    """Reads a page into elements, and fails where one is not closed."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("page", {})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        assert len(element.attributes) == len(attrs), f"{tag} has an attribute twice: {attrs}"
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> closes <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def read(path: Path) -> Element:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    return reader.root


def data_of(page: Element) -> Any:
    (found,) = page.find("script", id="data")
    return json.loads(found.text)
