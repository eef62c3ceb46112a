"""How far two right trainings may be apart by rounding alone, by the dtype in which they compute.

A sum of n terms in another order differs by about sqrt(n) u of the size of its terms, where u is
the unit roundoff (Higham and Mary 2019, *A New Approach to Probabilistic Rounding Error Analysis*);
products of matrices add in fp32 also where their factors are bf16. A result that is rounded L times
one after the other differs by about sqrt(L) u.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

UNITS = {
    "float64": 2.0**-53,
    "float32": 2.0**-24,
    "tfloat32": 2.0**-11,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
    "float8_e4m3fn": 2.0**-4,
    "float8_e4m3fnuz": 2.0**-4,
    "float8_e5m2": 2.0**-3,
    "float8_e5m2fnuz": 2.0**-3,
}
"""Unit roundoff: half of the gap between 1 and the next number. TF32 is no dtype of tensors: factors
of products are rounded to it."""
TERMS = 2**21
"""Terms of the longest sums, which are added in fp32."""
LAYERS = 100
"""Results that are rounded one after the other."""
LEAST = 1e-9
"""A bound for float64 that leaves room for ill-conditioned sums."""
CARRIED = 4.0
"""By how much more than themselves parameters that differ may change the next gradients, as
shares of both."""
LIMIT = 0.5
"""With a larger bound nothing but a factor is told from rounding."""
STEP = 0.1
"""Parameters move by a ratio of two moments, which is as wrong as they are: a change is the same
up to this."""
STORED = 4.0
"""Roundings of a parameter that is stored."""
UNSTABLE = 0.3
"""The same where an optimizer amplifies rounding on purpose, as inverse roots and orthogonal
factors do."""
LINEAR = frozenset(
    {
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "square_avg",
        "grad_avg",
        "sum",
        "exp_inf",
        "acc_delta",
    }
)
"""States of optimizers that add gradients or their squares."""


def unit(dtypes: Iterable[str]) -> float:
    """The largest unit roundoff of these dtypes; that of fp32 if none is known."""
    known = UNITS.keys() & set(dtypes)
    return max(map(UNITS.__getitem__, known), default=UNITS["float32"])


def of_gradients(dtypes: Iterable[str]) -> float:
    """The bound of a relative difference of gradients that are computed in these dtypes."""
    names = set(dtypes)
    if names == {"float64"}:
        return max(LEAST, math.sqrt(TERMS) * UNITS["float64"])
    return max(math.sqrt(TERMS) * UNITS["float32"], math.sqrt(LAYERS) * unit(names))


def of_later_gradients(first: float, parameters: float) -> float:
    """The bound after updates whose changes of parameters differed by the share ``parameters``."""
    return first + CARRIED * parameters


def of_changes(least: float, gradients: float) -> float:
    """The bound of a change of a parameter, where gradients differ by ``gradients`` of their norm.

    A step of Adam has the sign of the gradient, so where the size of an element is below its
    rounding, it may be reversed. Of normal elements a share of 0.8 r is below r times their
    standard deviation, and so a change differs by 2 sqrt(0.8 r) of its norm; heavier tails have
    half as much again.
    """
    return max(least, 3 * math.sqrt(gradients))
