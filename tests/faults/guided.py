"""Hostile input found by coverage: ``python -m tests.faults.guided TARGET FOLDER [libFuzzer's options]``.

test_guided.py runs it in a process of its own: atheris instruments what is imported after it, and ends the process.
Anything but a result or an InputError is a finding: libFuzzer then ends with the traceback and an exit status of 77.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["bench"]):
    import tests.faults.test_fuzz as made

TARGETS: dict[str, tuple[Callable[[Path, bytes], None], Callable[[Path], bytes]]] = {
    "matrix": (made.read_matrix, lambda _: made.MATRIX),
    "journal": (made.read_journal, made.journal),
    **{name: (partial(made.read_config, name), lambda _, name=name: made.CONFIGS[name]) for name in made.CONFIGS},  # type: ignore[misc]
}
"""The reader of an input, and a good input to begin with, by name."""


def main(name: str, folder: Path, options: list[str]) -> None:
    """Feed inputs to a reader until the options' limits; does not return."""
    read, good = TARGETS[name]
    corpus, place = folder / "corpus", folder / "place"
    corpus.mkdir(parents=True)
    place.mkdir()
    (corpus / "good").write_bytes(good(place))
    arguments = [sys.argv[0], f"-artifact_prefix={folder}/", *options, str(corpus)]
    atheris.Setup(arguments, lambda content: read(place, content))
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
