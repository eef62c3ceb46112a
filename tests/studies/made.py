"""The runs and pages that are committed: what makes each, and which code and what else it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from bench.run.machine import MEASURING
from tests.studies.semantics import PICTURED

TRAINING = (*(f"bench/{stage}" for stage in MEASURING), ":!bench/plan/columns.py")
"""The code that a trial runs."""
SUITE = ("bench/audit", ":!bench/audit/lint", *TRAINING)


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One thing that is committed and can be made again."""

    name: str
    paths: tuple[str, ...]
    """What to commit."""
    commands: tuple[str, ...]
    """For a shell."""
    code: tuple[str, ...]
    """The files and folders whose changes put it out of date, as git takes them."""
    sources: tuple[str, ...] = ()
    """Names of what it is made from."""
    minutes: float
    """About how long it takes on two cores; how long it last took counts for more."""
    is_run: bool = False
    """Whether the paths hold runs, which are removed before they are made again."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """Why ``check`` may warn of a run, by topic."""


TWICE = {"gates": "Lightning with DeepSpeed divides the loss by N twice, and the run shows it"}
NOISY = {
    "outliers": "the trimmed mean leaves them out",
    "A/A pair": "the machine is shared; all intervals are wider by what it shows",
    "blocks": "the machine is shared; ratios are taken within blocks",
    "two modes": "the machine is shared; the intervals cover both",
}
TIMED = TWICE | NOISY | {"verdicts": "40 minutes are what it gets"}
CROWDED = dict.fromkeys(("ranks", "A/A pair", "verdicts"), "four ranks share two cores, and five trials are few")
UNTIMED = dict.fromkeys(("machine", "ranks", "A/A pair", "verdicts"), "run once, for something else than times")


def _run(
    name: str, minutes: float, *code: str, warnings: Mapping[str, str], options: str = "", also: tuple[str, ...] = ()
) -> Made:
    """A run of the matrix of that name."""
    return Made(
        name=name,
        paths=(f"results/{name}", f"plots/{name}"),
        commands=(f"python -m bench run --matrix {name}{options} --out results/{name}", *also),
        code=(*TRAINING, f"bench/matrices/{name}.toml", *code),
        minutes=minutes,
        is_run=True,
        warnings=warnings,
    )


def _studies(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/studies/{name}.py" for name in names)


DRAWN = ("cpu", "popular", "curves")
"""Runs whose plots are committed."""
DTYPES = "python -m bench accumulation --errors --json > results/bytes/accumulation.jsonl"
LINKS = "python -m tests.studies.links"
"""Runs what is not finished, then draws."""
ROWS = (
    _run("cpu", 40, options=" --budget 40m", warnings=TIMED),
    _run("popular", 45, warnings=TIMED),
    _run("curves", 9, warnings=TWICE | UNTIMED),
    _run("bytes", 75, "bench/audit/dtypes.py", also=(DTYPES,), warnings=TWICE | UNTIMED),
    _run("bytes-8b", 15, warnings=UNTIMED),
    Made(
        name="links",
        paths=("results/links", "plots/links"),
        commands=(LINKS,),
        code=(*TRAINING, "tests/hosts", "tests/studies/links.toml"),
        minutes=50,
        is_run=True,
        warnings=NOISY | CROWDED,
    ),
    Made(
        name="links-page",
        paths=("results/links/links.md", "plots/links"),
        commands=(LINKS,),
        code=("bench/forecast", *_studies("links", "markdown")),
        sources=("links",),
        minutes=0.1,
    ),
    Made(
        name="noise",
        paths=("results/noise",),
        commands=("python -m tests.studies.realtrials",),
        code=(*TRAINING, *_studies("realtrials"), "tests/delayed.py"),
        minutes=57,
    ),
    Made(
        name="throughput",
        paths=("results/throughput",),
        commands=("python -m bench throughput --out results/throughput",),
        code=SUITE,
        minutes=10,
    ),
    Made(
        name="semantics",
        paths=("results/semantics",),
        commands=("python -m bench semantics --suite --out results/semantics",),
        code=SUITE,
        minutes=9,
    ),
    Made(
        name="semantics-page",
        paths=(
            *("docs/semantics.md", "results/semantics/conformance.md", "results/semantics/conformance.parquet"),
            *(f"plots/semantics/weights-{name}.png" for name in PICTURED),
        ),
        commands=("python -m tests.studies.semantics",),
        code=("bench/audit", ":!bench/audit/lint", *_studies("semantics")),
        sources=("semantics", "throughput"),
        minutes=0.2,
    ),
    Made(
        name="versions",
        paths=("docs/versions.md", "docs/versions.json"),
        commands=("nox -s versions",),
        code=("tests/studies/versions", "pyproject.toml", "bench/matrices/smoke.toml", *SUITE),
        minutes=50,
    ),
    Made(
        name="claims",
        paths=("docs/claims.md", "docs/claims.json"),
        commands=("python -m tests.studies.claims --probes",),
        code=(*_studies("claims", "probes"), "bench/judge", "bench/workload"),
        sources=("cpu", "throughput", "semantics", "versions"),
        minutes=1,
    ),
    Made(
        name="memory",
        paths=("docs/memory-and-bytes.md",),
        commands=("python -m tests.studies.bytes_page",),
        code=(*_studies("bytes_page", "markdown"), "bench/forecast", "bench/judge"),
        sources=("bytes", "bytes-8b"),
        minutes=0.2,
    ),
    Made(
        name="statistics",
        paths=("docs/statistics.md",),
        commands=("python -m tests.studies",),
        code=(
            *_studies("__main__", "choices", "page", "rivals", "study", "trial_noise"),
            *(f"bench/judge/{name}.py" for name in ("pairs", "evidence", "baseline", "statistics", "verdicts")),
            "bench/run/trial_record.py",
        ),
        sources=("noise", "cpu", "popular"),
        minutes=3,
    ),
    Made(
        name="reliability",
        paths=("docs/reliability.md", "docs/reliability.json"),
        commands=("nox -s faults",),
        code=("tests/faults", "bench", ":!bench/audit", ":!bench/forecast", ":!bench/report"),
        minutes=60,
    ),
    Made(
        name="performance",
        paths=("docs/performance.md", "docs/performance.json"),
        commands=("nox -s overhead",),
        code=("tests/overhead", "bench"),
        minutes=55,
    ),
    Made(
        name="gpu",
        paths=("docs/gpu.md",),
        commands=("nox -s cuda -- --all -k counts --gpu-page docs/gpu.md",),
        code=("tests/cuda", "tests/cuda_stub", *TRAINING),
        minutes=15,
    ),
    Made(
        name="hosts",
        paths=("docs/hosts.md",),
        commands=("nox -s hosts",),
        code=("tests/hosts", "bench/launch", "bench/run"),
        minutes=40,
    ),
    Made(
        name="audit",
        paths=("docs/audit.md", "docs/audit.json"),
        commands=("python -m tests.studies.audit_page --again",),
        code=("bench/audit/command", "tests/audit_command", *_studies("audit_page")),
        minutes=15,
    ),
    Made(
        name="epoch-end",
        paths=("bench/report/epoch_end.json",),
        commands=("python -m tests.studies.bundle",),
        code=_studies("bundle"),
        sources=("semantics",),
        minutes=0.1,
    ),
    Made(
        name="reports",
        paths=tuple(f"{folder}/{name}" for name in DRAWN for folder in ("results", "plots")),
        commands=tuple(f"python -m bench report results/{name}" for name in DRAWN),
        code=("bench/judge", "bench/report", ":!bench/report/epoch_end.json", "bench/plan/columns.py"),
        sources=(*DRAWN, "epoch-end"),
        minutes=1,
    ),
)
"""In the order in which they are made: what changes a file of the bench itself comes after all that is measured."""
