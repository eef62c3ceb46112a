"""Hostile input found by coverage: ``python -m tests.faults.guided TARGET FOLDER [libFuzzer's options]``.

Run by test_guided.py in a process of its own: atheris instruments what is imported after it, and ends the process.
Anything but a result or an InputError is a finding: libFuzzer then ends with the traceback and an exit status of 77.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path

import atheris

import tests.faults.test_fuzz as made

with atheris.instrument_imports(include=["bench"]):
    from bench.audit.lint.known import Options
    from bench.backends.base import registry
    from bench.errors import InputError
    from bench.plan import matrix as matrix_file
    from bench.plan.expand import expand
    from bench.run.journal import JOURNAL, Journal


def read_matrix(folder: Path, content: bytes) -> None:
    path = folder / "guided.toml"
    path.write_bytes(content)
    with contextlib.suppress(InputError):
        expand(matrix_file.load(str(path)), registry(), 0)


def read_journal(folder: Path, content: bytes) -> None:
    (folder / JOURNAL).write_bytes(content)
    with contextlib.suppress(InputError):
        Journal(folder).read()


def linted(name: str) -> Callable[[Path, bytes], None]:
    def read(folder: Path, content: bytes) -> None:
        made.never_fails(folder, name, content, Options(samples=100, world_size=2, batch_size=2))

    return read


TARGETS: dict[str, tuple[Callable[[Path, bytes], None], Callable[[Path], bytes]]] = {
    "matrix": (read_matrix, lambda _: made.MATRIX),
    "journal": (read_journal, made.journal),
    **{name: (linted(name), lambda _, name=name: made.CONFIGS[name]) for name in made.CONFIGS},  # type: ignore[misc]
}
"""By name: what reads an input, and an input that is good, to begin with."""


def main(name: str, folder: Path, options: list[str]) -> None:
    """Feed inputs to a reader until the options' limits; does not return."""
    read, good = TARGETS[name]
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    place = folder / "place"
    place.mkdir()
    (corpus / "good").write_bytes(good(place))
    atheris.Setup(
        [sys.argv[0], f"-artifact_prefix={folder}/", *options, str(corpus)], lambda content: read(place, content)
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
