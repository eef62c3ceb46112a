"""A matrix file becomes cells."""

from bench.matrix.cells import TWIN, baseline, expand, once
from bench.matrix.document import FOLDER, Matrix, check_stored, load, names, parse
from bench.matrix.keys import KEYS, OPTIMIZERS

__all__ = [
    "FOLDER",
    "KEYS",
    "OPTIMIZERS",
    "TWIN",
    "Matrix",
    "baseline",
    "check_stored",
    "expand",
    "load",
    "names",
    "once",
    "parse",
]
