"""Which versions are measured with which scripts: the weights of micro-batches, and what shows each advisory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.audit.advisories import Advisory, load
from studies import ROOT
from studies.versions.layers import ENVIRONMENTS, Job, Record, measure_into

RECORDS = ROOT / "docs" / "version-weights.jsonl"
FRAMEWORKS = ("engine", "accelerate", "lightning", "trainer")
"""Who trains with DeepSpeed: its engine in a loop, and three frameworks on top of it."""
DEEPSPEED = (
    *(
        "0.15.1",
        "0.15.2",
        "0.15.4",
        "0.16.9",
        "0.17.5",
        "0.17.6",
        "0.18.2",
        "0.18.3",
        "0.18.4",
        "0.18.5",
    ),
    *("0.18.6", "0.18.9", "0.19.0", "0.19.2", "0.19.3", "0.19.7", "0.19.8"),
)
LIGHTNING = ("2.2.0", "2.2.1", "2.4.0", "2.5.6", "2.6.0", "2.6.6")
OLD_LIGHTNING = {"2.1.4": "0.15.4"}
"""With a DeepSpeed that newer ones refuse. Lightning 2.0 needs more than the environment has."""
ACCELERATE = ("0.34.2", "1.0.1", "1.6.0", "1.10.1", "1.15.0")
TRANSFORMERS = {
    "4.45.2": "1.0.1",
    "4.46.3": "1.1.1",
    "4.47.1": "1.2.1",
    "4.48.3": "1.3.0",
    "4.51.3": "1.6.0",
    "4.52.4": "1.7.0",
    "4.55.4": "1.10.1",
    "4.56.2": "1.10.1",
    "4.57.6": "1.12.0",
    "5.24.0": "1.15.0",
}
"""Each with the Accelerate of its time."""
TRL = ("1.5.1", "1.9.0", "1.9.1", "1.16.0")
VERSIONS: Mapping[str, Sequence[tuple[str, ...]]] = {
    "deepspeed": [(f"deepspeed=={number}",) for number in DEEPSPEED],
    "lightning": [
        *((f"lightning=={own}", f"deepspeed=={other}") for own, other in OLD_LIGHTNING.items()),
        *((f"lightning=={number}",) for number in LIGHTNING),
    ],
    "accelerate": [(f"accelerate=={number}",) for number in ACCELERATE],
    "transformers": [
        (f"transformers=={own}", f"accelerate=={other}") for own, other in TRANSFORMERS.items()
    ],
    "trl": [(f"trl=={number}",) for number in TRL],
    "torch": [()],
}
"""What is installed, by package, oldest first. Of torch there is the one that the project's environment has."""
ON_TOP = {
    "deepspeed": FRAMEWORKS,
    "lightning": ("lightning",),
    "accelerate": ("accelerate",),
    "transformers": ("trainer",),
}
"""Whose weights are measured for the versions of a package."""
IMPORTS = {
    "deepspeed": ("torch", "deepspeed"),
    "lightning": ("torch", "deepspeed", "lightning.pytorch"),
    "accelerate": ("torch", "deepspeed", "accelerate"),
    "transformers": ("torch", "accelerate", "transformers.trainer"),
    "trl": ("torch", "accelerate", "transformers.trainer"),
    "torch": ("torch",),
    "engine": ("torch", "deepspeed"),
    "trainer": ("torch", "deepspeed", "accelerate", "transformers.trainer"),
}


def script_of(advisory: Advisory) -> str:
    """The name of its reproducer under studies/."""
    return advisory.reproducer.removeprefix("studies/").removesuffix(".py")


def jobs_of(package: str) -> list[Job]:
    """What is measured for a version of a package."""
    found = [Job(f"versions/weights_{name}", 1, IMPORTS[name]) for name in ON_TOP.get(package, ())]
    its = [advisory for advisory in load() if advisory.package == package]
    found += [Job(script_of(advisory), advisory.ranks, IMPORTS[package]) for advisory in its]
    return list(dict.fromkeys(found))


def every_version() -> Iterator[tuple[str, tuple[str, ...]]]:
    """Packages, each with the versions to ask for; none for what the project's environment has."""
    for package, asked in VERSIONS.items():
        for each in asked:
            yield package, each


def measure_grid(
    wanted: Sequence[tuple[str, tuple[str, ...]]],
    path: Path = RECORDS,
    *,
    again: bool = False,
    environments: Path = ENVIRONMENTS,
) -> Iterator[Record]:
    """Measure versions; yields the new records, which ``path`` then has."""
    for package, asked in wanted:
        yield from measure_into(
            path, jobs_of(package), asked, again=again, environments=environments
        )
