"""What pages and figures call things: pairs of backends, machines, sizes of models."""

from __future__ import annotations

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
    """The eager and the deferred backend of each framework and sharding; of several, those named alike but for that."""
    alike: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name, facts in backends.items():
        kind = str(facts.get("framework")), str(facts.get("sharding"))
        alike.setdefault(kind, {}).setdefault(str(facts.get("sync")), []).append(name)
    found = []
    for _, syncs in sorted(alike.items()):
        eager, deferred = syncs.get(Sync.EAGER, []), syncs.get(how, [])
        is_only = len(eager) == len(deferred) == 1
        found += [(a, b) for a in eager for b in deferred if is_only or b == a.replace(Sync.EAGER, how)]
    return found


def without_sync(eager: str) -> str:
    """The name that an eager backend shares with its deferred one."""
    return eager.removesuffix(f"-{Sync.EAGER}")


def tied_backends(cells: pd.DataFrame, column: str, value: float) -> list[str]:
    """The backends of the cells that have this size."""
    return [name for name, size in zip(cells["backend"], cells[column], strict=True) if alike(float(size), value)]


def gpu_names(machine: Machine) -> str:
    """The GPUs of a machine with their number, ``8 x NVIDIA H200``; empty without any."""
    counts = Counter(gpu.name for gpu in machine.gpus)
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def machine_words(machine: Machine) -> str:
    """The CPU, its cores and the GPUs."""
    return ", ".join([cpu_name(machine), gpu_names(machine) or "no GPU"])


def cpu_name(machine: Machine) -> str:
    """The CPU and its cores: ``AMD EPYC, 2 cores``."""
    words = [machine.cpu or "unknown CPU"]
    if machine.cores:
        words.append(plural(machine.cores, "core"))
    return ", ".join(words)


def parameters(count: float | None) -> str:
    """The number of a model's parameters: ``3.08 M parameters``."""
    if count is None or pd.isna(count):
        return "unknown number of parameters"
    value, unit = next(((count / scale, name) for scale, name in SCALES if count >= scale), (count, ""))
    return f"{value:.3g}{unit} parameters"
