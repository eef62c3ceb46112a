"""``python -m bench semantics``: measure what a backend computes."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.commands.options import backend_names, split_names
from bench.errors import BAD, GOOD, INTERRUPTED, InputError, suggest
from bench.plan.cell import REFERENCES, Device

if TYPE_CHECKING:
    from bench.audit.scenario import Scenario

TIMEOUT_S = 30.0
"""Per scenario; the shipped ones take less than a second."""
LONGEST_TIMEOUT_S = 86400.0

EPILOG = """The backend trains a model with one weight per use of a sample by SGD with learning rate 1, so that an
update lowers each weight by that sample's coefficient. Exit status 1 if an update, a counter or the end of training is
wrong."""


def add(commands: Any) -> None:
    """Add the command's parser."""
    from bench.audit import scenario
    from bench.audit.scenario import Fault, Reduction, Split

    parser = commands.add_parser(
        "semantics", help="measure what a backend computes: which samples reach which update", epilog=EPILOG
    )
    option = parser.add_argument
    option(
        "--backend",
        action="append",
        type=backend_names,
        metavar="B[,B]",
        help="only these backends, module:Class for your own, or all (default); see 'backends'",
    )

    one = parser.add_argument_group("one scenario")
    one.add_argument("--samples", type=int, metavar="S", help="samples in the data set")
    one.add_argument("--micro-batch", type=int, metavar="M", help="samples per micro-batch on a rank")
    one.add_argument("--accumulate", metavar="N[,N]", help="micro-batches per window; a list is one N per epoch")
    one.add_argument(
        "--engine-accumulate",
        type=int,
        metavar="N",
        help="gradient_accumulation_steps in DeepSpeed's config, if different",
    )
    one.add_argument("--epochs", type=int, metavar="E", help="default: 1, or no limit with --max-steps")
    one.add_argument("--world-size", type=int, metavar="W", help="ranks (default: 2)")
    one.add_argument("--drop-last", action="store_true", help="the loader drops an incomplete last micro-batch")
    one.add_argument(
        "--sampler-drop-last", action="store_true", help="DistributedSampler drops samples, not repeats some"
    )
    one.add_argument("--limit-batches", type=int, metavar="B", help="micro-batches of an epoch, as limit_train_batches")
    one.add_argument("--max-steps", type=int, metavar="K", help="the framework's limit of steps")
    one.add_argument("--token-weights", metavar="T[,T]", help="tokens of samples 0, 1, 2 ..., over and over")
    one.add_argument(
        "--reduction",
        metavar="|".join(Reduction),
        help="the loss of a micro-batch: the mean over its tokens (default), or its share of the window's mean",
    )
    one.add_argument("--clip", type=float, metavar="C", help="the framework's clipping threshold")
    one.add_argument("--fault", metavar="|".join(Fault), help="what happens in mid-window or at an epoch's end")
    one.add_argument("--at", type=int, metavar="I", help="the micro-batch, from 1, at which it happens")
    one.add_argument("--split", metavar="|".join(Split), help="who splits the samples among the ranks")

    suite = parser.add_argument_group("the suite")
    suite.add_argument(
        "--suite",
        nargs="?",
        type=Path,
        const=scenario.SUITE,
        metavar="FILE",
        help="run the shipped scenarios, or those of a TOML file",
    )
    suite.add_argument("--scenario", action="append", metavar="NAME[,NAME]", help="only these scenarios of the suite")

    option("--json", action="store_true", help="print JSON: an object, or a list if there are several")
    option(
        "--out",
        type=Path,
        metavar="DIR",
        help="write JSON, parquet, Markdown and plots (default with --suite: under results/ and plots/)",
    )
    option("--docs", type=Path, metavar="FILE", help="with --suite: write the page of docs; it links to the plots")
    option("--device", default="cpu", metavar="|".join(Device), help="what the ranks run on (default: cpu)")
    option("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS", help=f"per scenario (default: {TIMEOUT_S:g})")
    option("--separate", action="store_true", help="a process group of its own for each scenario")
    parser.set_defaults(command=_semantics)


SCENARIO_OPTIONS = {
    "samples": "samples",
    "micro_batch": "batch_size",
    "accumulate": "accumulate",
    "engine_accumulate": "engine_accumulate",
    "epochs": "epochs",
    "world_size": "world_size",
    "limit_batches": "limit_batches",
    "max_steps": "max_steps",
    "token_weights": "token_weights",
    "reduction": "reduction",
    "clip": "clip_norm",
    "fault": "fault",
    "at": "at",
    "split": "split",
}
"""Options of one scenario, with the field of Scenario that each sets."""


def _semantics(arguments: argparse.Namespace) -> int:
    from bench.audit import suite as audit_suite
    from bench.audit.diagnosis import observation
    from bench.audit.reading import Reading
    from bench.audit.semantics_files import show, write
    from bench.launch.launcher import Launcher, LauncherError

    scenarios = _scenarios(arguments)
    device = _device(arguments, scenarios)
    if not 0 < arguments.timeout <= LONGEST_TIMEOUT_S:
        raise InputError(f"--timeout {arguments.timeout}: must be seconds, at most {LONGEST_TIMEOUT_S:g}")
    backends = _backends(arguments.backend, device)
    folders = _folders(arguments)
    found: list[dict[str, Any]] = []
    total = len(backends) * len(scenarios)
    interrupted = False
    try:
        with Launcher(device) as launcher:
            for backend, of, ranks in audit_suite.run(
                launcher,
                backends,
                scenarios,
                device=device,
                timeout_s=arguments.timeout,
                shared=not arguments.separate,
            ):
                found.append(observation(Reading(backend, of, ranks)))
                if total > 1:
                    print(f"[{len(found)}/{total}] {backend} {of.name}: {found[-1]['verdict']}", file=sys.stderr)
    except LauncherError as error:
        print(f"bench: {error}", file=sys.stderr)
        return BAD
    except KeyboardInterrupt:
        interrupted = True
        print(f"interrupted: {len(found)} of {total} observations are kept", file=sys.stderr)
    if arguments.json:
        print(json.dumps(found[0] if total == 1 and found else found))
    else:
        show(found)
    if folders and found:
        write(arguments, found, *folders)
    if interrupted:
        return INTERRUPTED
    return BAD if any(one["level"] == "wrong" for one in found) else GOOD


def _scenarios(arguments: argparse.Namespace) -> list[Scenario]:
    """The scenarios of the options. Raises InputError naming the option."""
    from bench.audit.scenario import Scenario

    given = [name for name in SCENARIO_OPTIONS if getattr(arguments, name) is not None]
    flags = {name: getattr(arguments, name) for name in ("drop_last", "sampler_drop_last")}
    given += [name for name, is_set in flags.items() if is_set]
    if arguments.suite or arguments.scenario:
        if given:
            raise InputError(f"--{given[0].replace('_', '-')}: describes one scenario; leave it out or --suite")
        return _of_suite(arguments)
    if arguments.docs:
        raise InputError(f"--docs {arguments.docs}: is written from a suite; add --suite")
    for name in ("samples", "micro_batch", "accumulate"):
        if name not in given:
            raise InputError(
                f"--{name.replace('_', '-')}: is missing; one scenario needs --samples, --micro-batch and "
                "--accumulate, or give --suite"
            )
    values: dict[str, Any] = {field: getattr(arguments, name) for name, field in SCENARIO_OPTIONS.items()}
    values = {field: value for field, value in values.items() if value is not None}
    for field, name in (("accumulate", "--accumulate"), ("token_weights", "--token-weights")):
        if field in values:
            values[field] = _integers(name, values[field])
    if arguments.max_steps is not None and arguments.epochs is None:
        values["epochs"] = None
    options = {field: f"--{name.replace('_', '-')}" for name, field in SCENARIO_OPTIONS.items()}
    return [Scenario.from_dict(values | flags, "", lambda key: options.get(key, key))]


def _of_suite(arguments: argparse.Namespace) -> list[Scenario]:
    from bench.audit import scenario

    path = arguments.suite or scenario.SUITE
    suite = scenario.load(path)
    wanted = _names(arguments.scenario)
    known = [one.name for one in suite]
    for name in wanted:
        if name not in known:
            raise InputError(f"--scenario {name}: {path.name} has no such scenario; {suggest(name, known)}")
    return [one for one in suite if not wanted or one.name in wanted]


def _device(arguments: argparse.Namespace, scenarios: Sequence[Scenario]) -> Device:
    from bench.launch import gpus

    if arguments.device not in list(Device):
        raise InputError(f"--device {arguments.device}: use {' or '.join(Device)}")
    device = Device(arguments.device)
    needed = max(one.world_size for one in scenarios)
    if device is Device.CUDA and needed > (there := len(gpus.gpus())):
        raise InputError(f"--device cuda: {needed} ranks need as many GPUs, there are {there}; use --device cpu")
    return device


def _backends(wanted: list[list[str]] | None, device: Device) -> list[str]:
    """The backends to audit: those asked for, or all that this machine can run; stderr names the others."""
    from bench.backends.base import registry

    names = [name for part in wanted or [] for name in part]
    known = registry(names)
    if wanted and not names:
        raise InputError(f"--backend: names no backend; use {', '.join(known)}, or all")
    if not names or names == ["all"]:
        names = [name for name in known if name not in REFERENCES]
        for name in list(names):
            if reason := known[name].missing(device):
                print(f"skipped: {name}: {reason}", file=sys.stderr)
                names.remove(name)
    for name in names:
        if name in REFERENCES:
            raise InputError(f"--backend {name}: accumulates nothing: the others are compared with it; name another")
        if name not in known:
            raise InputError(f"--backend {name}: unknown; {suggest(name, known)}")
        if reason := known[name].missing(device):
            raise InputError(f"--backend {name}: {reason}")
    return list(dict.fromkeys(names))


def _names(parts: list[str] | None) -> list[str]:
    return [name for part in parts or [] for name in split_names(part)]


def _integers(option: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"{option} {text}: must be integers with commas between, such as 1,4,2") from None


def _folders(arguments: argparse.Namespace) -> tuple[Path, Path] | None:
    """The folders of --out and --suite, created before anything is measured; None if nothing is to be written."""
    if not (arguments.out or arguments.suite or arguments.scenario):
        return None
    from bench.files import new_folder, plots_folder

    folder = arguments.out or new_folder("semantics")
    plots = plots_folder(folder)
    for option, place in (("--out", folder), ("--out", plots), ("--docs", arguments.docs and arguments.docs.parent)):
        if place is None:
            continue
        try:
            place.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as error:
            raise InputError(
                f"{option} {place}: cannot be written ({error.strerror}); name a folder that can"
            ) from error
    return folder, plots
