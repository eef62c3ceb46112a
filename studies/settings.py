"""The page on settings: what every framework is told that is not its default, why, and what the default would cost.

``python -m studies.settings RUN`` writes it from the settings that a run of all backends has recorded, such as
one of the matrix ``smoke``. What is said of them is in settings.toml.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.backends.base import registry
from bench.backends.deepspeed import ZeroBackend
from bench.backends.torchtitan import REPLACED
from bench.judge.loading import load
from bench.run.trial_record import TrialRecord
from studies import ROOT, objections

ABOUT = Path(__file__).with_suffix(".toml")
DOCS = "docs/settings.md"

WHOLE = ("replaced", "zero_optimization.leaf_module")
"""Settings that are one value, though they are tables."""
ABOVE = ("Trainer.__init__", "CUDA graphs", "process group timeouts")
"""Of what is replaced in torchtitan, what the tables on settings and patches have."""


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings by dotted path."""
    for name, value in settings.items():
        path = prefix + name
        if isinstance(value, Mapping) and path not in WHOLE:
            yield from flat(value, f"{path}.")
        else:
            yield path, value


def of_frameworks(records: Iterable[TrialRecord]) -> dict[str, dict[str, list[Any]]]:
    """The different values of each setting, by the framework of the backends that have it; not DeepSpeed's own."""
    found: dict[str, dict[str, list[Any]]] = {}
    backends = registry()
    for record in records:
        backend = backends.get(record.cell.backend)
        if backend is None or record.time is None:
            continue
        if issubclass(backend, ZeroBackend) and backend.own_defaults:
            continue
        for path, value in flat(record.time.settings):
            values = found.setdefault(backend.framework, {}).setdefault(path, [])
            if value not in values:
                values.append(value)
    return found


def page(records: Iterable[TrialRecord]) -> str:
    """The page. Raises AssertionError for a setting that settings.toml does not explain, or that no backend has."""
    about, recorded = tomllib.loads(ABOUT.read_text())["frameworks"], of_frameworks(records)
    measured = objections.words()
    left = {(framework, path) for framework, settings in recorded.items() for path in settings}
    lines = [
        "# Settings",
        "",
        "Settings that differ from a framework's default, and what the default costs; what is patched; and",
        "what maintainers could object to. Written by `nox -s results -- settings` from what trials have recorded.",
        "",
        "ZeRO's sizes are like for like: stage 2 has DDP's bucket, and stage 3 gathers one block at a time, as FSDP2.",
        "`deepspeed-zero2-defaults-eager` and `deepspeed-zero3-defaults-eager` have DeepSpeed's own.",
        "",
        "Objections are answered by ratios of step times, with 95 % intervals, at N = 4 on two ranks over gloo, from",
        f"one run of `python -m studies.objections` ({measured['about']}).",
        "",
    ]
    for framework in about:
        rows: list[tuple[str, ...]] = []
        for path, words in framework["settings"].items():
            having = [name for name in framework["of"] if path in recorded.get(name, {})]
            assert having, f"{framework['title']}: no backend has the setting {path}"
            left -= {(name, path) for name in having}
            if "with" in words:
                first, *others = next(row for row in rows if f"`{words['with']}`" in row[0])
                rows[rows.index((first, *others))] = (f"{first}, `{path}`", *others)
                continue
            if "same" in words:
                continue
            values = [value for name in having for value in recorded[name][path]]
            shown = words.get("here") or ", ".join(
                dict.fromkeys(json.dumps(value).strip('"') for value in values)
            )
            rows.append((f"`{path}`", shown, words["default"], words["why"], words["cost"]))
        lines += [
            f"## {framework['title']}",
            "",
            f"[Documentation]({framework['documentation']})",
            "",
        ]
        for setting, here, default, why, cost in rows:
            changed = f" *By default*: {cost}." if cost else ""
            lines.append(f"- {setting}: {here} (default: {default}). {why}{changed}")
        lines += ["", *patches(framework)]
        objection = framework["objection"].format(**measured)
        lines += [f"**Objections.** {objection}", ""]
    own = "; ".join(f"{what}: {how}" for what, how in REPLACED.items() if what not in ABOVE)
    lines += [
        "`Trainer.train()` and all it calls are torchtitan's own. Not so, since all backends train the same model, "
        f"tokens and optimizer: {own}.",
        "",
    ]
    assert not left, f"settings.toml says nothing of {sorted(left)}"
    return "\n".join(lines)


def patches(framework: Mapping[str, Any]) -> list[str]:
    """What of a framework is replaced; settings.toml has the function of bench/backends, too."""
    told = [f"{what}: {instead}" for what, instead, _ in framework.get("patched", ())]
    return [f"**Patched.** {'; '.join(told)}.", ""] if told else []


def main(run: str) -> None:
    (ROOT / DOCS).write_text(page(load(Path(run)).records), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
