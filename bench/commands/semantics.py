"""``semantics``: which samples reach which update, and with what weight."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import validation
from bench.audit.scenario import SUITE, Fault, Reduction, Scenario, Split
from bench.audit.scenario import load as load_suite
from bench.commands.options import (
    CommandParsers,
    add_backend,
    add_device,
    add_training,
    chosen_backends,
    flag,
    list_of,
    named,
    split_names,
    writable,
)
from bench.errors import BAD, GOOD, INTERRUPTED, InputError, suggest
from bench.files import new_folder, plots_folder
from bench.plan.cell import Device

if TYPE_CHECKING:
    from bench.audit.diagnosis import Observation

TIMEOUT_S = 30.0
"""Per scenario; the shipped ones take less than a second."""
LONGEST_TIMEOUT_S = 86400.0
EPILOG = (
    "The backend trains a model with one weight per use of a sample by SGD with learning rate 1, "
    "so that an update lowers each weight by that sample's coefficient. Exit status 1 if an "
    "update, a counter or the end of training is wrong."
)


def add(commands: CommandParsers) -> None:
    parser = commands.add_parser(
        "semantics",
        help="measure what a backend computes: which samples reach which update",
        epilog=EPILOG,
    )
    option = parser.add_argument
    add_backend(parser)
    group = parser.add_argument_group("one scenario")
    add_training(group, world_size=2)
    for further in OPTIONS:
        group.add_argument(
            further.name, type=further.read, metavar=further.metavar, help=further.words
        )
    for name, words in FLAGS.items():
        group.add_argument(name, action="store_true", help=words)
    group = parser.add_argument_group("the suite")
    words = "run the shipped scenarios, or those of a TOML file"
    group.add_argument("--suite", nargs="?", type=named, const=SUITE, metavar="FILE", help=words)
    words = "only these scenarios of the suite"
    group.add_argument(
        "--scenario",
        action="extend",
        type=split_names,
        default=[],
        metavar="NAME[,NAME]",
        help=words,
    )
    words = "print JSON: an object, or a list if there are several"
    option("--json", action="store_true", help=words)
    words = "write JSON, Markdown and plots (default with --suite: under results/ and plots/)"
    option("--out", type=named, metavar="DIR", help=words)
    add_device(parser, Device.CPU)
    option(
        "--timeout",
        type=float,
        default=TIMEOUT_S,
        metavar="SECONDS",
        help=f"per scenario (default: {TIMEOUT_S:g})",
    )


FLAGS = {
    "--own-loader": "Accelerate's loop goes over a loader that Accelerate has not prepared",
    "--prepared-scheduler": "Accelerate's loop has a scheduler that Accelerate has prepared",
}
FIELDS = {"micro_batch": "batch_size", "clip": "clip_norm"}
"""Options of which the field of Scenario has another name."""
WEIGHTS = list_of(int, "integers such as 1,4,2")


class ScenarioOption(NamedTuple):
    """A further option of one scenario."""

    name: str
    read: Callable[[str], object]
    metavar: str
    words: str


OPTIONS = (
    ScenarioOption("--engine-accumulate", int, "N", "another N in DeepSpeed's config"),
    ScenarioOption(
        "--token-weights", WEIGHTS, "T[,T]", "tokens of samples 0, 1, 2 ..., over and over"
    ),
    ScenarioOption(
        "--reduction",
        str,
        "|".join(Reduction),
        "the loss of a micro-batch: the mean over its tokens (default), or its share of the "
        "window's mean",
    ),
    ScenarioOption("--clip", float, "C", "the framework's clipping threshold"),
    ScenarioOption(
        "--fault",
        str,
        "|".join(Fault),
        "what happens in mid-window or at the end of an epoch",
    ),
    ScenarioOption("--at", int, "I", "the micro-batch, from 1, at which it happens"),
    ScenarioOption("--split", str, "|".join(Split), "who splits the samples among the ranks"),
)


def run(arguments: argparse.Namespace) -> int:
    from bench.audit import scenario_runner
    from bench.audit.decoded_scenario import DecodedScenario
    from bench.audit.diagnosis import observation
    from bench.audit.semantics_files import show, write
    from bench.launch.launcher import Launcher, LauncherError

    scenarios, device = _scenarios(arguments), Device(arguments.device)
    if not 0 < arguments.timeout <= LONGEST_TIMEOUT_S:
        raise InputError(
            f"--timeout {arguments.timeout}: must be seconds, at most {LONGEST_TIMEOUT_S:g}"
        )
    largest = max(scenarios, key=lambda scenario: scenario.world_size)
    backends = _backends(arguments, largest.world_size)
    folders = _folders(arguments)
    found: list[Observation] = []
    total = len(backends) * len(scenarios)
    interrupted = False
    try:
        with Launcher(device) as launcher:
            timeout_s = arguments.timeout
            observed = scenario_runner.run(
                launcher, backends, scenarios, device=device, timeout_s=timeout_s
            )
            for backend, audited, ranks in observed:
                seen = observation(DecodedScenario(backend, audited, ranks))
                found.append(seen)
                if total > 1:
                    line = f"{backend} {audited.name}: {seen['verdict']}"
                    print(f"[{len(found)}/{total}] {line}", file=sys.stderr)
    except LauncherError as error:
        print(f"bench: {error}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted: {len(found)} of {total} observations are kept", file=sys.stderr)
    if not arguments.json:
        show(found)
    elif total == 1 and found:
        print(json.dumps(found[0]))
    else:
        print(json.dumps(found))
    if folders and found:
        write(arguments, found, *folders)
    if interrupted:
        return INTERRUPTED
    return _status(found)


def _status(found: Sequence[Observation]) -> int:
    if any(seen["level"] == "wrong" for seen in found):
        return BAD
    return GOOD


def _scenarios(arguments: argparse.Namespace) -> list[Scenario]:
    """The scenarios of the options. Raises InputError naming the option."""
    known = validation.declared(Scenario)
    options: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, value in vars(arguments).items():
        field = FIELDS.get(name, name)
        if field not in known:
            continue
        options[field] = flag(name)
        if value is not None and value is not False:
            values[field] = value
    if arguments.suite or arguments.scenario:
        for field in values:
            option = options[field]
            raise InputError(f"{option}: describes one scenario; leave it out or --suite")
        path = arguments.suite
        if path is None:
            path = SUITE
        return _of_suite(path, arguments.scenario)
    for field in ("samples", "batch_size", "accumulate"):
        if field not in values:
            needed = "one scenario needs --samples, --micro-batch and --accumulate, or give --suite"
            raise InputError(f"{options[field]}: is missing; {needed}")
    if "max_steps" in values:
        values.setdefault("epochs", None)
    return [Scenario.from_dict(values, "", lambda key: options.get(key, key))]


def _of_suite(path: Path, wanted: Sequence[str]) -> list[Scenario]:
    """The wanted scenarios of a file, or all; in its order."""
    suite = {scenario.name: scenario for scenario in load_suite(path)}
    for name in wanted:
        if name not in suite:
            remedy = suggest(name, suite)
            raise InputError(f"--scenario {name}: {path.name} has no such scenario; {remedy}")
    if not wanted:
        return list(suite.values())
    return [scenario for name, scenario in suite.items() if name in wanted]


def _backends(arguments: argparse.Namespace, num_ranks: int) -> Sequence[str]:
    """The backends to audit.

    What this machine cannot run is refused if it is named, else skipped with a line.
    """
    from bench.launch import gpus

    device = Device(arguments.device)
    if device is Device.CUDA:
        num_gpus = len(gpus.gpus())
        if num_ranks > num_gpus:
            lack = f"{num_ranks} ranks need as many GPUs, there are {num_gpus}"
            raise InputError(f"--device cuda: {lack}; use --device cpu")
    found = []
    for name, backend in chosen_backends(arguments.backend).items():
        reason = backend.missing(device)
        if reason and arguments.backend not in (None, ["all"]):
            raise InputError(f"--backend {name}: {reason}")
        if reason:
            print(f"skipped: {name}: {reason}", file=sys.stderr)
        else:
            found.append(name)
    return found


def _folders(arguments: argparse.Namespace) -> tuple[Path, Path] | None:
    """The folders of --out and --suite, created before anything is measured; None if not needed."""
    if not (arguments.out or arguments.suite or arguments.scenario):
        return None
    folder = arguments.out
    if folder is None:
        folder = new_folder("semantics")
    plots = plots_folder(folder)
    writable(folder)
    writable(plots)
    return folder, plots
