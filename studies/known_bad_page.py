"""``python -m studies.known_bad_page``: docs/known-bad.md and docs/upstream/ from the advisories."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence

from packaging.version import Version

from bench.audit.advisories import FILE, Advisory, Measured, Wanted, load
from bench.tabular import markdown_table
from studies import ROOT

REPORTS = ROOT / "studies" / "known_bad" / "upstream.toml"
PAGE = ROOT / "docs" / "known-bad.md"
UPSTREAM = ROOT / "docs" / "upstream"
GATHERS = ROOT / "docs" / "zero3.json"
"""How far losses are off by configuration and seed: from tests/cuda/plain_zero3.py."""
PACKAGES = {
    "deepspeed": "DeepSpeed",
    "lightning": "Lightning",
    "accelerate": "Accelerate",
    "transformers": "transformers",
    "trl": "TRL",
    "torch": "torch",
}
INTRODUCTION = """# Known-bad versions

Versions of frameworks in which accumulation does something else than it seems to. Each defect was measured on the \
CPU over gloo with a small program without the bench: its *reproducer*. `doctor` compares what is installed with \
this list, `lint` a config of DeepSpeed, and `audit` what a training uses.

Unless an entry says otherwise, training goes on without an error, while updates are wrong by the rule of \
[semantics](semantics.md), at each N >= 2. *Stops or misinforms*: no update is wrong, but training stops or a number \
is wrong. *To know*: a default or a rule that is documented. Weights are those of four micro-batches; 1/4 each is \
right unless an entry says otherwise. A range begins at the oldest bad version that was measured or whose source was \
read. It ends where a version was measured to be right or its source was read: upgrade, or do what stands after \
*Else*. `<=`, and `<2.14` of torch, end at the newest version that was measured, and later ones may be bad too. \
Written from [advisories.toml](../bench/audit/advisories.toml), which has each cause, and each measured version with \
its result and date.
"""
SEVERAL = {"accumulate": Wanted(least=2)}
"""What an entry is about if it does not say otherwise."""
SPELLINGS = ("float32", "torch.float32")
"""Of fp32, which the page does not repeat."""
IN_TITLES = ("loop.", "uneven")
"""Beginnings of conditions that have no key in a config; titles and effects tell them."""
RIGHT = " instead of 1/4 each"
"""What effects say of weights, and the introduction for all of them."""
LEVELS = {"error": "", "warning": "*stops or misinforms*: ", "note": "*to know*: "}
"""What is said before a defect, by its level."""


def page(advisories: Sequence[Advisory]) -> str:
    """A list of each package, below the conditions that all its entries have."""
    lines = [INTRODUCTION]
    for package, name in PACKAGES.items():
        own = [advisory for advisory in advisories if advisory.package == package]
        shared: dict[str, Wanted] = {}
        if len(own) > 1:
            shared = {
                key: wanted
                for key, wanted in own[0].condition.items()
                if all(advisory.condition.get(key) == wanted for advisory in own)
            }
        lines += [f"## {name}", ""]
        if shared:
            lines += [f"In all entries: {conditions(shared)}.", ""]
        lines += [*(entry(advisory, shared) for advisory in own), ""]
    return "\n".join(lines)


def entry(advisory: Advisory, shared: Mapping[str, Wanted]) -> str:
    """What is known of one defect as a list item, without the conditions that all entries share."""
    found = versions(advisory.affected)
    for name, needed in advisory.beside.items():
        found += f" with {PACKAGES[name]} {versions(needed)}"
    effect = advisory.effect.replace(RIGHT, "")
    return (
        f'- <a id="{advisory.id}"></a>**{found}**: {LEVELS[advisory.level]}{advisory.title}; {effect}. '
        f"{where(advisory.condition, shared)}{remedy(advisory)}{', '.join(links(advisory))}"
    )


def where(condition: Mapping[str, Wanted], shared: Mapping[str, Wanted]) -> str:
    """The conditions of an entry that are told neither before nor by its title, as a sentence; empty without any."""
    known = {**shared, **SEVERAL}
    own = {
        key: wanted
        for key, wanted in condition.items()
        if known.get(key) != wanted and not key.startswith(IN_TITLES)
    }
    texts = [] if SEVERAL.keys() <= condition.keys() else ["any N"]
    texts += [conditions(own)] if own else []
    return f"*Where*: {'; '.join(texts)}. " if texts else ""


def remedy(advisory: Advisory) -> str:
    """What helps beside a newer version, as a sentence; empty if nothing does."""
    if not advisory.fixed_in:
        return f"*Remedy*: {advisory.remedy}. "
    newer = f"use {PACKAGES[advisory.package]} {advisory.fixed_in} or newer"
    other = advisory.remedy.removeprefix(newer).removeprefix(", or ")
    return f"*Else*: {other}. " if other else ""


def links(advisory: Advisory) -> Iterator[str]:
    """Where to read on, as links of Markdown."""
    yield f"[reproducer](../{advisory.reproducer})"
    if advisory.issue:
        yield f"[report]({advisory.issue})"
    if advisory.fix and advisory.fix != advisory.issue:
        yield f"[change]({advisory.fix})"
    if (UPSTREAM / f"{advisory.id}.md").exists():
        yield f"[draft](upstream/{advisory.id}.md)"


def versions(specifier: str) -> str:
    return specifier.replace(",", ", ") or "all"


def measured(row: Measured) -> list[str]:
    return [", ".join(sorted(row.versions, key=Version)), row.date.isoformat(), row.result]


def ending(advisory: Advisory) -> str:
    if advisory.fixed_in:
        return f"fixed in {advisory.fixed_in}"
    measured_bad = {version for row in advisory.bad for version in row.versions}
    if len(measured_bad) == 1:
        return f"measured in {newest(advisory)} alone"
    return f"still in {newest(advisory)}, the newest that was measured"


def newest(advisory: Advisory) -> str:
    """The newest version in which it was measured."""
    return max((version for row in advisory.bad for version in row.versions), key=Version)


def conditions(condition: Mapping[str, Wanted]) -> str:
    """All that must hold, in words."""
    return "; ".join(f"`{key}` {wish(wanted)}" for key, wanted in condition.items()) or "always"


def wish(wanted: Wanted) -> str:
    words = list(dict.fromkeys(str(value).lower() for value in wanted.values))
    if "fp32" in words:
        words = [word for word in words if word not in SPELLINGS]
    if wanted.least is not None:
        words.append(f">= {wanted.least:g}")
    if wanted.present:
        words.append("set")
    if wanted.unset:
        words.append("not set")
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def report(advisory: Advisory, words: Mapping[str, str]) -> str:
    """A report that can be filed as it is."""
    rows = [[*measured(row), "wrong"] for row in advisory.bad] + [
        [*measured(row), "right"] for row in advisory.good
    ]
    code = (ROOT / advisory.reproducer).read_text(encoding="utf-8").rstrip()
    run = _launch(advisory.reproducer, advisory.ranks)
    if "import deepspeed" in code:
        run = f"DS_ACCELERATOR=cpu LOCAL_SIZE={advisory.ranks} {run}"
    return _report(
        words,
        f"{PACKAGES[advisory.package]} {versions(advisory.affected)}, {ending(advisory)}. Python 3.11, "
        "torch 2.13.0 (CPU build), gloo.",
        f"The program prints lines of JSON. The table has `measured` of the line whose `case` is `{advisory.case}`; "
        f"right would be {advisory.right}.",
        markdown_table(["version", "date", advisory.case, ""], rows),
        run,
        code,
    )


def suspicion(words: Mapping[str, str]) -> str:
    """A report on the order of ZeRO-3's gathers, which only the stub of CUDA has shown."""
    deviations = json.loads(GATHERS.read_text(encoding="utf-8"))["deviation"]
    rows = []
    for name, by_seed in deviations.items():
        off = by_seed.values()
        rows.append([name, f"{min(off):.2g} to {max(off):.2g}" if any(off) else "0"])
    return _report(
        words,
        words["versions"],
        words["shown"].strip(),
        markdown_table(["configuration", "largest deviation of a loss, by seed"], rows),
        _launch(words["reproducer"], 2),
        (ROOT / words["reproducer"]).read_text(encoding="utf-8").rstrip(),
    )


def _launch(reproducer: str, ranks: int) -> str:
    return f"torchrun --nproc-per-node {ranks} {reproducer.rpartition('/')[2]}"


def _report(
    words: Mapping[str, str],
    versions_measured: str,
    shown: str,
    table: Sequence[str],
    run: str,
    code: str,
) -> str:
    parts = [
        f"# {words['title']}",
        f"For {words['project']}. Written by `python -m studies.known_bad_page`; this project has not filed it.",
        f"**Versions:** {versions_measured}",
        "## Expected, and what happens",
        words["expected"].strip(),
        shown,
        "\n".join(table).rstrip(),
        "## Reproducer",
        f"Run it with `{run}`.",
        f"```python\n{code}\n```",
        "## Cause",
        words["line"].strip(),
        "## Suggested change",
        words["suggestion"].strip(),
    ]
    return "\n\n".join(parts) + "\n"


def reports() -> dict[str, str]:
    """All reports by the name of their file."""
    advisories = {advisory.id: advisory for advisory in load(FILE)}
    stored = tomllib.loads(REPORTS.read_text(encoding="utf-8"))
    found = {}
    for name, words in stored.items():
        text = report(advisories[name], words) if name in advisories else suspicion(words)
        found[f"{name}.md"] = text
    return found


def main() -> None:
    UPSTREAM.mkdir(exist_ok=True)
    for name, text in reports().items():
        (UPSTREAM / name).write_text(text, encoding="utf-8")
    PAGE.write_text(page(load(FILE)), encoding="utf-8")
    print(PAGE.relative_to(ROOT), UPSTREAM.relative_to(ROOT))


if __name__ == "__main__":
    main()
