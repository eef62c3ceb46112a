"""What pages and figures call things: pairs of backends, machines, sizes of models."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import pandas as pd

from bench.formatting import alike, plural
from bench.plan.cell import Sync
from bench.run.manifest import Machine

SCALES = ((1e9, " G"), (1e6, " M"), (1e3, " k"))


def eager_and_deferred(
    backends: Mapping[str, Mapping[str, object]], how: Sync = Sync.DEFERRED
) -> list[tuple[str, str]]:
    """The eager and the deferred backend of each framework and sharding.

    Of several, those that are named alike but for that.
    """
    alike: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, facts in backends.items():
        kind = str(facts.get("framework")), str(facts.get("sharding"))
        alike.setdefault(kind, {}).setdefault(str(facts.get("sync")), []).append(name)
    found = []
    for _, syncs in sorted(alike.items()):
        every_eager, every_deferred = syncs.get(Sync.EAGER, []), syncs.get(how, [])
        is_only = len(every_eager) == len(every_deferred) == 1
        for eager, deferred in itertools.product(every_eager, every_deferred):
            if is_only or deferred == eager.replace(Sync.EAGER, how):
                found.append((eager, deferred))
    return found


def one_or_many(count: int, singular: str, plural_form: str) -> str:
    """The form of a verb that goes with so many: ``need``, or ``needs`` with one."""
    if count == 1:
        return singular
    return plural_form


def without_sync(eager: str) -> str:
    """The name that an eager backend shares with its deferred one."""
    return eager.removesuffix(f"-{Sync.EAGER}")


def tied_backends(cells: pd.DataFrame, column: str, value: float) -> list[str]:
    """The backends of the cells that have this size."""
    is_tied = cells[column].map(lambda size: alike(float(size), value))
    return cells["backend"][is_tied].tolist()


def gpu_names(machine: Machine) -> str:
    """The GPUs of a machine with their number, ``8 x NVIDIA H200``; empty without any."""
    counts = Counter(gpu.name for gpu in machine.gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def machine_words(machine: Machine) -> str:
    """The CPU, its cores and the GPUs."""
    gpus = gpu_names(machine)
    if not gpus:
        gpus = "no GPU"
    return f"{cpu_name(machine)}, {gpus}"


def cpu_name(machine: Machine) -> str:
    """The CPU and its cores: ``AMD EPYC, 2 cores``."""
    name = machine.cpu
    if not name:
        name = "unknown CPU"
    if machine.cores:
        name += f", {plural(machine.cores, 'core')}"
    return name


def parameters(count: float | None) -> str:
    """The number of a model's parameters: ``3.08 M parameters``."""
    if count is None or pd.isna(count):
        return "unknown number of parameters"
    for scale, unit in SCALES:
        if count >= scale:
            return f"{count / scale:.3g}{unit} parameters"
    return f"{count:.3g} parameters"
