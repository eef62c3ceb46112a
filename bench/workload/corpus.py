"""Token sources: a Markov chain with a known entropy rate, or the bytes of a file.

Both use token ids below 256, which every model's vocabulary contains. ``samples(count, length)`` returns samples 0 to
``count`` - 1 as token ids of shape [count, length]; sample i does not depend on ``count``.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MARKOV_TOKENS = 32
"""Number of distinct tokens of the Markov source: few, so that short runs already learn."""


class MarkovCorpus:
    """A stationary first-order Markov chain over the tokens 0 to 31.

    Each row of the transition matrix is drawn from a symmetric Dirichlet distribution; the small concentration, 0.1, makes it
    peaked, so that there is something to learn. Samples start from the stationary distribution.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        rows = np.random.default_rng([seed, 1]).dirichlet(np.full(MARKOV_TOKENS, 0.1), size=MARKOV_TOKENS)
        # Mixing in the uniform distribution makes the chain ergodic, so the stationary distribution is unique.
        self.transitions: NDArray[np.float64] = 0.99 * rows + 0.01 / MARKOV_TOKENS

    @cached_property
    def stationary(self) -> NDArray[np.float64]:
        """The distribution pi with pi P = pi and sum(pi) = 1, shape [32]."""
        system = np.vstack([self.transitions.T - np.eye(MARKOV_TOKENS), np.ones(MARKOV_TOKENS)])
        solution = np.linalg.lstsq(system, np.append(np.zeros(MARKOV_TOKENS), 1.0), rcond=None)[0]
        return np.asarray(solution / solution.sum(), dtype=np.float64)

    @cached_property
    def entropy_floor(self) -> float:
        """Entropy rate in nats per token: -sum_i pi_i sum_j P_ij ln P_ij (Cover and Thomas, theorem 4.2.4)."""
        row_entropy = -(self.transitions * np.log(self.transitions)).sum(axis=1)
        return float(self.stationary @ row_entropy)

    def samples(self, count: int, length: int) -> NDArray[np.int64]:
        """Draw by inverting the cumulative distributions; all samples advance together, one position at a time."""
        uniform = np.random.default_rng([self._seed, 2]).random((count, length))
        # Row i's cumulative distribution lies in (i, i + 1], so one sorted array serves all rows at once.
        steps = np.cumsum(self.transitions, axis=1)
        table = (steps / steps[:, -1:] + np.arange(MARKOV_TOKENS)[:, None]).ravel()
        start = np.cumsum(self.stationary)
        tokens = np.empty((count, length), dtype=np.int64)
        tokens[:, 0] = np.minimum(np.searchsorted(start / start[-1], uniform[:, 0], side="right"), MARKOV_TOKENS - 1)
        for position in range(1, length):
            state = tokens[:, position - 1]
            found = np.searchsorted(table, uniform[:, position] + state, side="right") - state * MARKOV_TOKENS
            tokens[:, position] = np.clip(found, 0, MARKOV_TOKENS - 1)
        return tokens


class FileCorpus:
    """The bytes of a file; sample i starts at a seeded random position. Its entropy is unknown."""

    entropy_floor: float | None = None

    def __init__(self, path: Path, seed: int) -> None:
        self._bytes = np.fromfile(path, dtype=np.uint8)
        self._seed = seed

    def samples(self, count: int, length: int) -> NDArray[np.int64]:
        uniform = np.random.default_rng([self._seed, 3]).random(count)
        starts = (uniform * (len(self._bytes) - length + 1)).astype(np.int64)
        tokens: NDArray[np.int64] = self._bytes[starts[:, None] + np.arange(length)].astype(np.int64)
        return tokens
