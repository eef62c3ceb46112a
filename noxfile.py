"""What this project is run with: ``nox -s`` and a name (``nox -l`` lists them); arguments go after ``--``."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

import nox
from nox.command import CommandFailed

nox.needs_version = ">=2026.7.11"
nox.options.sessions = ["tests"]

INSTALLED_FROM = ("pyproject.toml", "constraints.txt", "bench/__init__.py")
"""Files that, changed, make the environment out of date; the last has the version."""


@nox.session(default=False, venv_backend="uv|virtualenv", reuse_venv=True)
def install(session: nox.Session) -> None:
    """Install the project and its tools; the other sessions do this by themselves."""
    if sys.platform != "linux":
        session.error(
            f"the bench trains on Linux alone, and this is {platform.system()}: use a Linux machine, WSL, or the "
            "container of Containerfile; what only reads runs without nox: pip install ."
        )
    # torch is gigabytes, so there is one environment, whose programs the other sessions find first on the path.
    os.environ["PATH"] = os.pathsep.join([session.bin, os.environ.get("PATH", os.defpath)])
    digest = hashlib.sha256(
        b"".join(Path(name).read_bytes() for name in INSTALLED_FROM)
    ).hexdigest()
    stamp = Path(session.virtualenv.location) / "installed.sha256"
    if stamp.exists() and stamp.read_text() == digest:
        session.log(
            f"{', '.join(INSTALLED_FROM)} are as they were when this environment was installed"
        )
        return
    for index in os.environ.get("PIP_EXTRA_INDEX_URL", "").split():
        try:
            urllib.request.urlopen(index, timeout=10)
        except urllib.error.HTTPError:
            pass  # it answers
        except OSError as error:
            session.warn(
                f"PIP_EXTRA_INDEX_URL: {index} does not answer ({error}); unset it, or pip retries per package"
            )
    session.log("installing torch, Lightning, DeepSpeed and the tools, maybe gigabytes")
    # DeepSpeed comes as source; with its operators off, nothing is compiled, and torch need not be there first.
    environment = {"DS_BUILD_OPS": "0"}
    wanted = ["-e", ".[frameworks,hf,torchtitan]", "--group", "test", "--group", "lint"]
    if session.venv_backend == "uv":
        environment |= pip_settings()
        wanted.append("pip")  # some sessions use it, and an environment by uv has none
    session.install("-c", "constraints.txt", *wanted, env=environment, silent=False)
    stamp.write_text(digest)


UV_NAMES = {
    "find-links": "UV_FIND_LINKS",
    "extra-index-url": "UV_EXTRA_INDEX_URL",
    "index-url": "UV_DEFAULT_INDEX",
}
"""uv's variables for pip's settings of where packages are."""


PIP_SECTIONS = ("global", "install", ":env:")
"""What ``pip install`` reads of its settings, the later the more it counts; variables are the last."""


def pip_settings() -> dict[str, str]:
    """Variables that make uv, which reads no setting of pip, find packages, such as torch's build, where pip does."""
    if not (pip := shutil.which("pip") or shutil.which("pip3")):
        return {}
    listed = subprocess.run(
        [pip, "config", "list"], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip's: the best version of all indexes
    for section in PIP_SECTIONS:
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            place, _, name = key.rpartition(".")
            if place == section and name in UV_NAMES:
                found[UV_NAMES[name]] = value.strip("'")
    return found


@nox.session(venv_backend="none", requires=["install"])
def bench(session: nox.Session) -> None:
    """Run a matrix: ``python -m bench run`` with the given arguments; the exit status is the program's."""
    command = ("python", "-m", "bench", "run", *session.posargs)
    try:
        # Interrupted, the program ends its trials and writes what it has; nox by default kills it after 0.5 s.
        session.run(*command, stderr=None, interrupt_timeout=60, terminate_timeout=30)
    except CommandFailed as failure:
        # nox itself would make 1 of any failure; 1 (something measured is bad) is not 2 (the input is wrong).
        raise SystemExit(failure.return_code or 1) from None


@nox.session(venv_backend="none", requires=["install"])
def tests(session: nox.Session) -> None:
    """Run the tests: ``pytest`` with the given arguments, two files at a time; --all for those that take long too."""
    # Most tests wait for process groups to start; each file's shared runs are made by one worker.
    options = ("-n", "2", "--dist", "loadfile")
    session.run("python", "-m", "pytest", *options, *session.posargs)


WITHOUT_TORCH = ("plan", "judge", "report", "forecast", "audit/test_lint.py", "audit/test_steps.py")
"""Tests, under tests/, of what needs no torch."""


@nox.session(venv_backend="none", requires=["install"])
def quick(session: nox.Session) -> None:
    """Run the tests of plan, judge, report, predict, lint and steps that need no torch, in about a minute."""
    paths = [f"tests/{name}" for name in WITHOUT_TORCH]
    options = ("-n", "2", "--dist", "loadfile", "--quick", "--ignore=tests/report/test_browser.py")
    session.run("python", "-m", "pytest", *options, *paths, *session.posargs)


SKIPPED = 77
"""Exit status of tests/cuda_stub/build.py where the machine cannot build it."""


@nox.session(venv_backend="none", requires=["install"])
def cuda(session: nox.Session) -> None:
    """Run tests/cuda on GPUs that are not there: torch for CUDA over a stub, in .nox/cuda-stub or where CUDA_STUB says.

    Without --all in a short form.
    """
    folder = os.environ.get("CUDA_STUB", ".nox/cuda-stub")
    build = subprocess.run(
        ["python", "tests/cuda_stub/build.py", folder],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if build.returncode == SKIPPED:
        session.skip(build.stderr.strip())
    if build.returncode:
        session.error(build.stderr.strip())
    session.run("python", "-m", "pytest", "tests/cuda", "--cuda-stub", folder, *session.posargs)


BROWSER_TESTS = (
    "tests/report/test_browser.py",
    "tests/report/test_page.py",
    "tests/studies/test_site.py",
)
"""The second has a run of 500 cells, which takes too long for the other sessions."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@nox.session(venv_backend="none", requires=["install"])
def browser(session: nox.Session) -> None:
    """Open, use and print reports in a real browser: Debian's Chromium is installed if there is none, as root."""
    _install_browser(session)
    _install_site(session)
    session.run("python", "-m", "pytest", "--browser", "--all", *BROWSER_TESTS, *session.posargs)


@nox.session(venv_backend="none", requires=["install"])
def site(session: nox.Session) -> None:
    """Build the site of README, docs/ and the committed reports, with search, in .nox/site or a given folder."""
    _install_site(session)
    session.run("python", "-m", "studies.site", *session.posargs)


def _install_site(session: nox.Session) -> None:
    session.run("python", "-m", "pip", "install", "-q", "-c", "constraints.txt", "--group", "site")


def _install_browser(session: nox.Session) -> None:
    session.run(
        "python", "-m", "pip", "install", "-q", "-c", "constraints.txt", "--group", "browser"
    )
    if not any(map(shutil.which, BROWSERS)):
        if shutil.which("apt-get") and os.geteuid() == 0:
            session.run("apt-get", "update", "-q", external=True)
            packages = ("chromium", "fonts-dejavu-core")
            session.run(
                "apt-get",
                "install",
                "-q",
                "-y",
                "--no-install-recommends",
                *packages,
                external=True,
            )
        else:
            session.warn(
                f"no browser: install one of {', '.join(BROWSERS)}; until then these tests are skipped"
            )


@nox.session(venv_backend="none", requires=["install"])
def faults(session: nox.Session) -> None:
    """Break trials, runners and files in every way that tests/faults has, and write docs/reliability.md again."""
    page = ("--all", "--reliability", "docs/reliability.md")
    session.run("python", "-m", "pytest", "tests/faults", *page, *session.posargs)


@nox.session(venv_backend="none", requires=["install"])
def hosts(session: nox.Session) -> None:
    """Run the bench on network namespaces under a real Slurm, and write docs/hosts.md; needs root and slurm-wlm."""
    session.run("python", "-m", "tests.hosts", *session.posargs)


@nox.session(venv_backend="none", requires=["install"])
def lint(session: nox.Session) -> None:
    """Check style, format, types, what may import what, and what an index would show of the package."""
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("mypy", "--strict", "bench")
    session.run("lint-imports", "--no-cache")
    dist = session.create_tmp()
    session.run("python", "-m", "build", "--no-isolation", "--wheel", "--outdir", dist)
    session.run("python", "-m", "twine", "check", "--strict", *map(str, Path(dist).glob("*.whl")))


@nox.session(venv_backend="none", requires=["install"])
def results(session: nox.Session) -> None:
    """Say which committed runs and pages are out of date; make those that are named, or with --all all of them."""
    # Some are made by other sessions.
    path = os.pathsep.join([os.environ["PATH"], str(Path(sys.executable).parent)])
    command = ("python", "-m", "studies.results", *session.posargs)
    try:
        session.run(*command, env={"PATH": path}, interrupt_timeout=60, terminate_timeout=30)
    except CommandFailed as failure:
        raise SystemExit(failure.return_code or 1) from None


@nox.session(venv_backend="none", requires=["install"])
def versions(session: nox.Session) -> None:
    """Measure versions of packages, or given PACKAGE==VERSION, or --smoke, or --weights; writes docs/versions.md."""
    # Each gets a small environment of its own, made on top of the one of `install` and thrown away.
    try:
        session.run("python", "-m", "studies.versions", *session.posargs)
    except CommandFailed as failure:
        raise SystemExit(failure.return_code or 1) from None


@nox.session(venv_backend="none", requires=["install"])
def overhead(session: nox.Session) -> None:
    """Measure what the bench costs, beside bare loops and the last committed times; --fixed: without these loops."""
    _install_browser(session)
    others = [argument for argument in session.posargs if argument != "--fixed"]
    program = "studies.overhead.fixed" if len(others) < len(session.posargs) else "studies.overhead"
    session.run("python", "-m", program, *others)


@nox.session(venv_backend="virtualenv", reuse_venv=True)
def build(session: nox.Session) -> None:
    """Build the sdist in dist/, and from it the wheel; check both."""
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist")
    session.run(
        "python", "-m", "twine", "check", "--strict", *map(str, sorted(Path("dist").iterdir()))
    )
    (built,) = Path("dist").glob("*.whl")
    names = {name.partition("/")[0] for name in zipfile.ZipFile(built).namelist()}
    if others := {name for name in names if not name.endswith(".dist-info")} - {"bench"}:
        session.error(f"{built} would install {', '.join(sorted(others))} beside bench")


@nox.session(python=["3.11", "3.12", "3.13"], venv_backend="virtualenv", requires=["build"])
def wheel(session: nox.Session) -> None:
    """Install the wheel and its extras into an empty environment without a compiler, and use it there."""
    (built,) = Path("dist").resolve().glob("*.whl")
    session.env.update(CC="false", CXX="false", DS_BUILD_OPS=None, PYTHONPATH=None)
    pins = ("-c", str(Path("constraints.txt").resolve()))
    (n,) = nox.project.load_toml("bench/matrices/smoke.toml")["axes"]["accumulate"]
    session.install(*pins, str(built))
    session.chdir(session.create_tmp())
    Path("config.yaml").write_text(
        "trainer: {strategy: deepspeed_stage_2, accumulate_grad_batches: 4}\n"
    )
    # Without the extra that brings them, nothing that only reads needs torch or a framework.
    session.run("python", "-c", "import importlib.util as u; assert not u.find_spec('torch')")
    session.run("accumulation-bench", "lint", "config.yaml", success_codes=[1])
    session.run("accumulation-bench", "plan", "--matrix", "cpu")
    session.install(*pins, f"{built}[frameworks,hf,torchtitan]")
    cells = [f"fsdp2-{sync} N={n} W=2 fp32" for sync in ("deferred", "eager")]
    scenarios = ("--scenario", "divisible,resume", "--backend", "ddp-deferred")
    size = (
        "--model",
        "8b",
        "--world-size",
        "64",
        "--accumulate",
        "16",
        "--sequence",
        "8192",
        "--precision",
        "bf16",
    )
    for command in (
        ("run", "--matrix", "smoke", "--out", "smoke"),
        ("report", "smoke", "--rebuild"),
        ("check", "smoke"),
        ("cite", "smoke", *cells),
        ("semantics", "--suite", *scenarios, "--out", "semantics"),
        ("lint", "config.yaml"),
        ("predict", *size),
    ):
        # lint finds that the loss is divided by N twice.
        session.run("accumulation-bench", *command, success_codes=[int(command[0] == "lint")])


@nox.session(default=False, venv_backend="virtualenv", reuse_venv=True)
def wheelhouse(session: nox.Session) -> None:
    """Collect the wheels that a machine without network lacks: --python 3.12 --platform P --exclude torch."""
    parser = argparse.ArgumentParser(prog="nox -s wheelhouse --")
    option = parser.add_argument
    option(
        "--python",
        default=platform.python_version(),
        metavar="3.N",
        help="the machine's (default: as here)",
    )
    option(
        "--platform",
        default=f"manylinux_2_28_{platform.machine()}",
        help="its platform tag (default: %(default)s)",
    )
    option(
        "--exclude", default="", metavar="NAME[,NAME]", help="what it has already, such as torch"
    )
    option(
        "--out",
        type=Path,
        default=Path("wheelhouse"),
        metavar="DIR",
        help="where to (default: wheelhouse)",
    )
    arguments = parser.parse_args(session.posargs)
    project = nox.project.load_toml("pyproject.toml")
    groups = project["dependency-groups"]
    extras = itertools.chain.from_iterable(project["project"]["optional-dependencies"].values())
    # Its tests tell whether all is well there.
    asked = [*project["project"]["dependencies"], *extras, *groups.pop("test")]
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    excluded = arguments.exclude.lower().replace("_", "-").split(",") if arguments.exclude else []
    if unknown := [name for name in excluded if name not in pins]:
        session.error(
            f"--exclude: '{unknown[0]}' is not in constraints.txt, so it is not collected anyway"
        )
    pip = ("python", "-m", "pip", "--disable-pip-version-check")
    if (
        "deepspeed" not in excluded
    ):  # it has no wheel on the index: built without operators, one fits any machine
        built = (
            "wheel",
            "--no-deps",
            "--wheel-dir",
            str(arguments.out),
            f"deepspeed=={pins['deepspeed']}",
        )
        session.run(*pip, *built, env={"DS_BUILD_OPS": "0"})
    tags = [arguments.platform]  # pip takes wheels for an older manylinux only where that is named
    if match := re.fullmatch(r"manylinux_2_(\d+)_(\w+)", arguments.platform):
        tags = [f"manylinux_2_{minor}_{match[2]}" for minor in range(int(match[1]), 4, -1)]
        tags.append(f"manylinux2014_{match[2]}")
    kind = [
        f"--dest={arguments.out}",
        "--only-binary=:all:",
        f"--python-version={arguments.python}",
    ]
    kind += [f"--platform={tag}" for tag in tags]
    left_out = {*excluded, "deepspeed", "torch", *itertools.chain.from_iterable(groups.values())}
    left_out.discard("hatchling")  # with which pip builds the bench there
    wanted = [f"{name}=={version}" for name, version in pins.items() if name not in left_out]
    session.run(*pip, "download", "--no-deps", *kind, *wanted)
    if "torch" not in excluded:  # with the packages of CUDA, which torch pins itself
        session.run(*pip, "download", "-c", "constraints.txt", *kind, f"torch=={pins['torch']}")
    (arguments.out / "requirements.txt").write_text("\n".join(asked) + "\n", encoding="utf-8")
    session.log(
        f"take {arguments.out} and the checkout there; docs/offline.md says how to install it"
    )
