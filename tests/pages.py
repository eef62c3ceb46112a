"""Runs to be reported that are written as they would be on disk, and a reader of the pages that come of them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from bench.plan.categories import HELD, PEAK, Category
from bench.plan.cell import REFERENCE, Cell
from bench.report import figures
from bench.report.outputs import finish
from bench.run.journal import JOURNAL, encode, write_manifest
from tests.factories import make_cell, make_failure, make_manifest, make_record

STEP_S = 0.1
MIB = 2**20
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
Fate = Callable[[Cell, int], tuple[str, str] | None]
"""How a trial of a cell and repeat fails: status and reason; None if it is sound."""


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


def cells_of(
    backends: Mapping[str, float], accumulate: tuple[int, ...], world_size: tuple[int, ...], precision: tuple[str, ...]
) -> list[Cell]:
    batch = max(accumulate) * max(world_size) * 2
    return [
        make_cell(backend=name, accumulate=n, world_size=w, precision=p, global_batch_size=batch)
        for p, w, n, name in itertools.product(precision, world_size, accumulate, backends)
    ]


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
    fate: Fate = lambda cell, repeat: None,
    host: Mapping[str, Any] | None = None,
    **manifest: Any,
) -> Path:
    """The journal and manifest of a run whose backends take STEP_S times their factor; the first is the baseline."""
    cells = cells_of(backends, accumulate, world_size, precision)
    base = max((c for c in cells if c.backend == next(iter(backends))), key=lambda c: (c.world_size, c.accumulate))
    twins = [dataclasses.replace(base, twin="again")] if twin else []
    references = list(dict.fromkeys(cell.reference() for cell in cells))
    random_ = random.Random(7)
    records: list[dict[str, Any]] = []
    for repeat in range(repeats):
        for cell in [*references, *cells, *twins]:
            failed = fate(cell, repeat)
            if failed is not None:
                record = make_failure(cell, repeat, *failed)
            else:
                record = _sound(cell, repeat, backends.get(cell.backend, 2.0), random_, noise)
                record["time"]["host"] = host
            records.append(record | {"slot": len(records)})
    about = make_manifest(
        [*references, *cells, *twins],
        run_id=folder.name,
        started="2026-01-02T03:04:05+00:00",
        finished="2026-01-02T04:04:05+00:00",
        command=["python", "-m", "bench", "run", "--out", str(folder.name)],
        git={"commit": "0123456789abcdef0123456789abcdef01234567", "clean": True},
        baseline=next(iter(backends)),
    )
    about["backends"] = {name: kind(name) for name in ["reference", *backends]}
    folder.mkdir(parents=True)
    (folder / JOURNAL).write_bytes(b"".join(map(encode, records)))
    write_manifest(folder, about | manifest)
    return folder


def write_large_run(folder: Path) -> Path:
    """A run of 500 cells: 12 backends, 7 N, 3 world sizes and 2 precisions, and their references."""
    backends = {f"backend-{i}-{sync}": 1 + i / 20 for i in range(6) for sync in ("eager", "deferred")}
    axes: dict[str, Any] = {"world_size": (1, 2, 4), "precision": ("fp32", "bf16")}
    return write_run(folder, backends, accumulate=(1, 2, 4, 8, 16, 32, 64), **axes)


def _sound(cell: Cell, repeat: int, factor: float, random_: random.Random, noise: float) -> dict[str, Any]:
    trial = STEP_S * factor * math.exp(random_.gauss(0, noise))
    steps = [trial * math.exp(random_.gauss(0, noise)) for _ in range(cell.timed_windows)]
    if cell.backend == REFERENCE:
        return make_record(cell, repeat, time={"step_seconds": steps})
    memory = {}
    for total in (PEAK, HELD):
        parts = {f"{total}_{name}": round((i + 1) * factor * MIB) for i, name in enumerate(Category)}
        memory |= {total: sum(parts.values()), **parts}
    collectives = [
        {
            "op": "all_reduce",
            "group": "world",
            "dtype": "float32",
            "calls": cell.accumulate,
            "payload_bytes": cell.accumulate * 12 * MIB,
        },
        {"op": "broadcast", "group": "world", "dtype": "float32", "calls": 1, "payload_bytes": MIB},
    ]
    extra = {"memory": None if repeat else memory, "collectives": collectives if cell.world_size > 1 else []}
    return make_record(cell, repeat, time={"step_seconds": steps}, **extra)


def report(folder: Path, *, drawn: bool = True) -> tuple[int, str]:
    """Write the report, with plots or without; the exit status, and what was printed."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.MonkeyPatch.context() as patch:
        if not drawn:
            patch.setattr(figures, "draw", lambda *_: [])
        status = finish(folder, folder / "plots")
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
            one
            for one in self.walk()
            if (not tags or one.tag in tags) and all(one.attributes.get(key) == v for key, v in wanted.items())
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
    """A page as elements."""
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    return reader.root


def data_of(page: Element) -> Any:
    """What the page's script reads."""
    (found,) = page.find("script", id="data")
    return json.loads(found.text)
