"""Corpora: the Markov source against theory and brute force, the file source against its bytes, errors in words."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.errors import InputError
from bench.plan.models import describe_file
from bench.workload.llama import MARKOV_TOKENS, FileCorpus, MarkovCorpus

MARKOV = MarkovCorpus(seed=5)


def test_entropy_rate_of_a_chain_worked_out_by_hand() -> None:
    """Two halves of the alphabet: within a half all tokens are alike, and the halves follow a chain of two states."""
    a, b = 0.1, 0.3
    half = MARKOV_TOKENS // 2
    corpus = MarkovCorpus(seed=0)
    corpus.transitions = np.kron(
        np.array([[1 - a, a], [b, 1 - b]]), np.full((half, half), 1 / half)
    )

    def entropy(p: float) -> float:
        return -p * math.log(p) - (1 - p) * math.log(1 - p)

    by_hand = (b * entropy(a) + a * entropy(b)) / (a + b) + math.log(half)
    assert corpus.entropy_floor == pytest.approx(by_hand, abs=1e-9)
    assert corpus.stationary[:half].sum() == pytest.approx(b / (a + b), abs=1e-9)


def test_samples_follow_the_chain() -> None:
    """Empirical cross-entropy under the true transitions is near the floor, and so is that of a model that counts."""
    tokens = MARKOV.samples(400, 513)
    before, after = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
    nats = -np.log(MARKOV.transitions[before, after])
    standard_error = nats.std() / math.sqrt(nats.size)
    assert abs(nats.mean() - MARKOV.entropy_floor) < 6 * standard_error
    assert standard_error < 0.01
    counts = np.zeros((MARKOV_TOKENS, MARKOV_TOKENS))
    np.add.at(counts, (before, after), 1)
    often = counts.sum(axis=1) > 500
    assert often.sum() > MARKOV_TOKENS / 2
    observed = counts[often] / counts[often].sum(axis=1, keepdims=True)
    # Total variation between what was seen and what should be; peaked rows need few counts.
    assert (0.5 * np.abs(observed - MARKOV.transitions[often]).sum(axis=1)).mean() < 0.1


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "text.bin"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 997, dtype=np.uint8).tobytes())
    return path


@settings(max_examples=30)
@given(
    few=st.integers(1, 40),
    more=st.integers(0, 40),
    length=st.integers(1, 60),
    seed=st.integers(0, 2**32),
    file=st.booleans(),
)
def test_sample_i_does_not_depend_on_how_many_are_asked_for(
    text: Path, few: int, more: int, length: int, seed: int, file: bool
) -> None:
    corpus = FileCorpus(text, seed) if file else MarkovCorpus(seed)
    samples = corpus.samples(few + more, length)
    assert samples.shape == (few + more, length)
    assert samples.dtype == np.int64
    assert samples.min() >= 0 and samples.max() < (256 if file else MARKOV_TOKENS)
    np.testing.assert_array_equal(samples[:few], corpus.samples(few, length))


def test_file_samples_are_its_bytes_from_all_over_it(text: Path) -> None:
    data = text.read_bytes()
    samples = FileCorpus(text, 0).samples(5000, 20)
    starts = {data.find(bytes(sample.tolist())) for sample in samples}
    assert -1 not in starts
    # 5000 draws leave each of the 978 places out with a chance of 0.6 %.
    assert len(starts) > 900
    assert min(starts) < 20 and max(starts) > len(data) - 40


def test_the_last_place_of_a_file_is_used_too(tmp_path: Path) -> None:
    path = tmp_path / "two.txt"
    path.write_bytes(b"abcde")
    assert {bytes(sample) for sample in FileCorpus(path, 0).samples(64, 4).astype(np.uint8)} == {
        b"abcd",
        b"bcde",
    }


def test_describe_file_names_the_bytes_not_the_place(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_bytes(b"some text")
    expected = "text.txt@sha256:" + hashlib.sha256(b"some text").hexdigest()[:16]
    assert (
        describe_file(tmp_path / "a" / "text.txt", 9)
        == describe_file(tmp_path / "b" / "text.txt", 1)
        == expected
    )
    (tmp_path / "b" / "text.txt").write_bytes(b"some test")
    assert describe_file(tmp_path / "b" / "text.txt", 9) != expected


@pytest.mark.parametrize(
    "name", ["/dev/zero", "pipe", "with a NUL \0", ""], ids=["device", "pipe", "NUL", "folder"]
)
def test_describe_file_refuses_what_is_no_file(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match=r"is a device or pipe|cannot be read"):
        describe_file(tmp_path / name, 10)
