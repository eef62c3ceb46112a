"""What published sentences may say, and whether a journal (tests/recomputed.py) bears it out.

Each rule accounts for some words of a text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache

import numpy as np
from scipy import special, stats

from tests.recomputed import (
    IDLE,
    LEAST_TRIALS,
    ROOT,
    Cell,
    Groups,
    Run,
    pool_of,
    reach_of_days,
    shows,
    shows_interval,
    shows_size,
)

MIB = 2**20
NUMBER = r"\d+(?:\.\d+)?(?:e-\d+)?"
NEXT = r"(?:[,;] (?:the )?next run:? (?P<nlow>[\d.]+) ?(?:-|to) ?(?P<nhigh>[\d.]+))?"
ENDS = (
    r"\(95 % (?:interval )?(?P<low>[\d.]+) ?(?:-|to) ?(?P<high>[\d.]+)"
    rf"(?:, n = (?P<n>\d+) (?:blocks|trials)|, over (?P<runs>\d+) runs)?{NEXT}\)"
)
Check = Callable[[Run, str, Groups], bool]
RULES: list[tuple[str, Check]] = []


def rule(*patterns: str) -> Callable[[Check], Check]:
    """What a text may say: ``<x>`` is a number, ``<a:cell>`` and ``<a:cells>`` name cells, ``<a:size>`` are bytes,
    and ``<ends>`` is an interval.

    The check is given the text followed by the group of cells that it is about, and what was matched.
    """

    def add(check: Check) -> Check:
        RULES.extend((pattern, check) for pattern in patterns)
        return check

    return add


@cache
def compiled(pattern: str, run: Run) -> re.Pattern[str]:
    name = rf"(?<![\w-])(?:{'|'.join(sorted(map(re.escape, run.names), key=len, reverse=True))})(?![\w-])"
    kinds = {
        "": NUMBER,
        "cell": name + r"(?: (?:[NW]=\d+|fp32|bf16|B ?= ?\d+|adamw-foreach|sgd)(?!\w))*",
        "cells": rf"{name}(?:(?:, | and ){name})*(?: and \d+ more)?",
        "word": "[a-z]+",
        "size": r"[\d,]+(?:\.\d+)? [MG]iB",
        "list": r"\d+(?:(?:, | and )\d+)*",
    }
    parts = re.sub(
        r"(?<!P)<(\w+):?(\w*)>",
        lambda m: f"(?P<{m[1]}>{kinds[m[2]]})",
        pattern.replace("<ends>", ENDS),
    )
    return re.compile(parts)


def numbers(text: str) -> list[int]:
    return [int(found) for found in re.findall(r"\d+", text)]


@rule(
    r"Fastest correct backend[.:] <a:cell>",
    r"<a:cell> is fastest \(<s> s\)",
    r"<a:cell> has the shortest step time \(<s> s\)",
)
@rule(r"Not shown to be slower(?=: )|\d+ others? (?:is|are) not shown to be slower")
def fastest(run: Run, where: str, m: Groups) -> bool:
    """It has the least time; the others of its group are slower by the verdict, or named or counted as undecided."""
    first, *others = run.good(where)
    undecided = {c["backend"] for c in others if run.verdict(c, first) != "slower"}
    told = where.partition("Not shown to be slower")[2]
    counted = re.search(r"(\d+) others? (?:is|are) not shown to be slower", where)
    named = {c["backend"] for c in others if re.search(rf"(?<![\w-]){c['backend']}(?![\w-])", told)}
    is_first = m.get("a", first["backend"]).split()[0] == first["backend"]
    right = len(undecided) == int(counted[1]) if counted else undecided == named
    return is_first and right and shows(m.get("s", ""), math.exp(run.time(first).centre))


@rule(r"Alone, <a:cells> looks? slower; among <n> comparisons that may be chance")
def left_open(run: Run, where: str, m: Groups) -> bool:
    first, *others = run.good(where)
    told = {
        cell["backend"] for cell in others if run.verdict(cell, first).endswith("many verdicts")
    }
    told = {name for name in told if run.ratio(run.find(name, where), first).centre > 0}
    return told == set(re.split(", | and ", m["a"])) and int(m["n"]) == run.num_judged(
        first["backend"]
    )


@rule(r"Alone, it looks faster; among <n> comparisons that may be chance")
def undecided_family(run: Run, where: str, m: Groups) -> bool:
    """Said of FSDP2, deferred against eager."""
    cell, base = (run.find(f"fsdp2-{sync}", where) for sync in ("deferred", "eager"))
    is_open = run.verdict(cell, base).endswith("many verdicts") and run.ratio(cell, base).centre < 0
    return is_open and int(m["n"]) == run.num_judged("fsdp2-eager")


@rule(
    r"in this run(?![\w-])",
    r"over <k> runs",
    r"in the first of <k> runs, of (?P<days>\d[\d-]+(?: and \d[\d-]+)?)",
    r"in the first of <k> runs, on (?P<num_days>\d+) days from (?P<span>\d[\d-]+ to \d[\d-]+)",
)
@rule(
    r"(?P<words>Times are means)(?= over)", r"verdicts are of this run(?=[:,])", r"runs=<k>(?=[ ])"
)
def scope(run: Run, where: str, m: Groups) -> bool:
    """One run, or how many of which days."""
    k = 1 + len(run.others)
    days = sorted({each.about["started"][:10] for each in (run, *run.others)})
    when = {
        "days": " and ".join(days),
        "num_days": str(len(days)),
        "span": f"{days[0]} to {days[-1]}",
    }
    if any(m[key] != right for key, right in when.items() if key in m):
        return False
    return int(m.get("k") or k) == k and (k > 1 or "k" not in m)


@rule(
    r"on another day a ratio may be <more> % larger or <less> % smaller \(95 %, from <runs> runs on such machines\)",
)
def other_days(run: Run, where: str, m: Groups) -> bool:
    """Rounded to per cent, and within one of it: the bench drops blocks that lack a cell."""
    reach = reach_of_days()
    kept = sum(1 + len(pool_of(name)) for name in ("cpu", "popular")) + 4
    right = shows(m["more"], 100 * math.expm1(reach), 1) and shows(
        m["less"], -100 * math.expm1(-reach), 1
    )
    return right and int(m["runs"]) == kept


@rule(
    r"the runs are of different commits of the bench: (?P<commits>[0-9a-f]{12}(?:, [0-9a-f]{12})*)"
)
@rule(r"pooled with the run of (?P<day>\d{4}-\d\d-\d\d), (?P<sum>[0-9a-f]{64})")
def of_the_pool(run: Run, where: str, m: Groups) -> bool:
    if "sum" in m:
        return any(
            each.sha256 == m["sum"] and each.about["started"][:10] == m["day"]
            for each in run.others
        )
    every = {each.about["git"]["commit"][:12] for each in (run, *run.others)}
    return set(m["commits"].split(", ")) == every


@rule(
    r"<n> comparisons(?= over)",
    r"of which <turning> may differ on another day: [^.;]*",
    r"where one is faster or slower, so should be the next run",
)
def turning(run: Run, where: str, m: Groups) -> bool:
    found = [c for c in run.timed if c["backend"] != run.baseline and run.is_correct(c)]
    count = sum(run.may_differ(c, run.partner(c, run.baseline)) for c in found)
    return int(m.get("n") or len(found)) == len(found) and (
        "n" in m or int(m.get("turning") or 0) == count
    )


@rule(
    r"<a:cell>: <x> s per (?:optimizer )?step(?: <ends>)?(?:, <size:size> per rank)?",
    r"<a:cell> takes <x> s per step",
)
@rule(r"<a:cell>: .*; peak memory <size:size> \(<bytes> bytes, tracked tensors\)")
def of_a_cell(run: Run, where: str, m: Groups) -> bool:
    cell = run.find(m["a"], where)
    size = run.memory(cell)
    memory = shows(m.get("bytes", ""), size) and shows_size(m.get("size", ""), size)
    return memory and shows_interval(run.time(cell), m, len(run.times(cell)))


@rule(r"(?:(?P<next>Next): )?<a:cell>, <x> (?:times the step time )?<ends>(?: times its time)?")
def over_the_fastest(run: Run, where: str, m: Groups) -> bool:
    first, second, *_ = run.good(where)
    cell = run.find(m["a"], where)
    is_slower = run.verdict(cell, first) == "slower"
    right = (cell is second and is_slower) if m["next"] else not is_slower
    return right and shows_interval(run.ratio(cell, first), m, len(run.times(first)))


@rule(r"Least memory[.:] <a:cells>: (?:peak memory per rank )?<size:size>(?:, and <s> s per step)?")
@rule(r"<a:cells> needs? the least memory \(<size:size>\)")
def least_memory(run: Run, where: str, m: Groups) -> bool:
    cells = run.good(where)
    least = min(map(run.memory, cells))
    named = [c for c in cells if shows_size(m["size"], run.memory(c))]
    right = {c["backend"] for c in named} == set(re.split(", | and ", m["a"])) and shows_size(
        m["size"], least
    )
    return right and shows(m.get("s", ""), math.exp(run.time(named[0]).centre))


@rule(r"(?<=: )<share> % less than <b:cell>, at <x>(?: to <y>)? times its step time")
def at_a_price(run: Run, where: str, m: Groups) -> bool:
    base, named = run.find(m["b"], where), set(re.findall(r"[\w-]+", where.partition(":")[0]))
    cells = [c for c in run.good(where) if c["backend"] in named]
    times = sorted(math.exp(run.ratio(cell, base).centre) for cell in cells)
    saved = 100 * (1 - run.memory(cells[0]) / run.memory(base))
    ends = shows(m["x"], times[0]) and shows(m["y"] or m["x"], times[-1])
    return (
        ends
        and shows(m["share"], saved)
        and "faster" not in {run.verdict(cell, base) for cell in cells}
    )


@rule(
    r"<a:cell> / <b:cell>: time <x> <ends>, <verdict:word>(?: in this run| over \d+ runs)?"
    r"(?P<may>, may differ on another day)?; memory <m> \(<ma:size> / <mb:size>\)"
)
@rule(r"<a:cell> against <b:cell>: <x> times the step time <ends>; verdict: <verdict:word>")
@rule(r"<a:cell> <x> \(<verdict:word>\), <m>")
@rule(
    r"(?P<family>FSDP2), deferred against eager: <x> times the step time <ends> and <m> times the memory"
)
def of_two_cells(run: Run, where: str, m: Groups) -> bool:
    """Either both are named, or a deferred one or a family is, and the other is its eager one."""
    a = m.get("a") or f"{m['family'].lower()}-deferred"
    cell, base = run.find(a, where), run.find(m.get("b") or a.replace("deferred", "eager"), where)
    ratio, memory = run.ratio(cell, base), [run.memory(c) for c in (cell, base)]
    right = shows_interval(ratio, m, len(run.times(base)))
    said = m.get("verdict") or ("ambiguous" if "Alone, it looks" in where else "faster")
    verdict = run.verdict(cell, base).startswith(said)
    verdict = verdict and bool(m.get("may")) == ("may" in m and run.may_differ(cell, base))
    sizes = zip(("ma", "mb"), memory, strict=True)
    right = right and all(shows_size(m.get(key, ""), size) for key, size in sizes)
    return right and verdict and shows(m.get("m", ""), memory[0] / memory[1])


@rule(r"deferring the sync is shown to be faster in <k> of <n> pairs \((?P<families>[^)]*)\)")
def faster_pairs(run: Run, where: str, m: Groups) -> bool:
    """By the verdicts, and no pair is slower."""
    pairs = run.sync_pairs(where)
    verdicts = {cell["backend"]: run.verdict(cell, base) for cell, base in pairs}
    faster = {name for name, verdict in verdicts.items() if verdict.startswith("faster")}
    told = {f"{name}-deferred" for name in re.split(r", | and ", m["families"])}
    is_slower = any(verdict.startswith("slower") for verdict in verdicts.values())
    return (
        told == faster and (int(m["k"]), int(m["n"])) == (len(faster), len(pairs)) and not is_slower
    )


@rule(
    r"deferring the sync cuts what a rank hands to collectives to between <low> and <high> % in <k> of <n> pairs"
)
def handed_by_pairs(run: Run, where: str, m: Groups) -> bool:
    shares = [run.handed(cell) / run.handed(base) for cell, base in run.sync_pairs(where)]
    less = sorted(100 * share for share in shares if share < 1)
    right = shows(m["low"], less[0]) and shows(m["high"], less[-1])
    return right and (int(m["k"]), int(m["n"])) == (len(less), len(shares))


@rule(
    r"<x> times the peak memory \(<a> / <b> bytes\)",
    r"<x> times the bytes to collectives \(<a> / <b>\)",
)
def of_bytes(run: Run, where: str, m: Groups) -> bool:
    """A ratio of bytes of some cell and its eager one."""
    found = []
    for size in (run.memory, run.handed):
        found += [
            (size(cell), size(base)) for n in (1, 4, 8) for cell, base in run.sync_pairs(f"N = {n}")
        ]
    a, b = int(m["a"]), int(m["b"])
    return (a, b) in found and shows(m["x"], a / b)


@rule(r"The trials are those of the first of <k> runs")
def of_first(run: Run, where: str, m: Groups) -> bool:
    return int(m["k"]) == 1 + len(run.others)


@rule(r"<x> MiB \(<bytes> bytes\) per step to collectives")
def payload(run: Run, where: str, m: Groups) -> bool:
    return int(m["bytes"]) in map(run.handed, run.cells) and shows(m["x"], int(m["bytes"]) / MIB)


@rule(
    r"accumulation-bench:\w+:(?P<hash>[0-9a-f+]+)/(?P<a>\w+)(?:/(?P<b>\w+))? value=<x> low=<low> high=<high>"
    r"(?: n=<n>| runs=<num>)(?: nextlow=<nlow> nexthigh=<nhigh>)?"
    r"(?: verdict=<verdict:word>)?(?: bytes=<bytes>)?(?: memory=<memory>)?(?: payload=<payload>)?"
    r" sha256=(?P<sum>[0-9a-f+]+)"
)
def identified(run: Run, where: str, m: Groups) -> bool:
    """The line of a citation that a program reads."""
    by_id: dict[str, Cell] = {c["id"]: c for c in run.everything}
    cell, base = by_id[m["a"]], by_id.get(m["b"])
    right = shows_interval(
        run.ratio(cell, base) if base else run.time(cell), m, len(run.times(cell))
    )
    verdict = base is None or run.verdict(cell, base).partition(":")[0] == m["verdict"]
    sums = [each.sha256 for each in (run, *run.others)]
    right = (
        right and m["hash"].split("+") == [one[:12] for one in sums] and m["sum"].split("+") == sums
    )
    handed: float = run.handed(cell)
    if base is not None:
        handed /= run.handed(base)
        right = right and shows(m["memory"] or "", run.memory(cell) / run.memory(base))
    right = right and shows(m["payload"] or "", handed)
    return right and verdict and shows(m["bytes"], run.memory(cell))


@rule(
    r"Do not use[.] <a:cells>(?: \(N = <ns:list>\))?: .*?every (?:gradient|update) is (?:1/N of the right|N times)"
)
@rule(
    r"every gradient is (?:1/)?<n> (?:of the right one|times too small).*"
    r"<fixed:cell> multiplies the loss by N, so whole windows are right"
)
def divided_twice(run: Run, where: str, m: Groups) -> bool:
    """Of updates before they are clipped."""
    wrong = [c for c in run.cells if not run.is_correct(c)]
    scales = [
        run.first(c, "update")["scale"] * c["accumulate"] for c in wrong if not c["clip_norm"]
    ]
    named = "a" not in m or {c["backend"] for c in wrong} == set(re.split(", | and ", m["a"]))
    told = not m.get("ns") or {c["accumulate"] for c in wrong} == set(numbers(m["ns"]))
    fixed = "fixed" not in m or (
        run.is_correct(run.find(m["fixed"], where)) and f"N = {m['n']}" in where
    )
    return np.allclose(scales, 1) and named and told and fixed


@rule(
    r"Do not use[.] <a:cells>: no update to check: the update pass did not run, or the reference has none"
)
def unchecked(run: Run, where: str, m: Groups) -> bool:
    """Of all that are not correct, no update was compared."""
    wrong = [c for c in run.cells if not run.is_correct(c)]
    compared = [r for c in wrong for r in run.trials[c["id"]] if "update" in r]
    return not compared and {c["backend"] for c in wrong} == set(re.split(", | and ", m["a"]))


@rule(
    r"Undecided[.] (?P<places>[^:]*): [^.]*"
    r"(?P<why>contains 1, and is wider than the margin|among <n> comparisons that may be chance)[^.]*[.]"
)
def undecided(run: Run, where: str, m: Groups) -> bool:
    """Of all that are timed, these cells and no others are ambiguous for that reason."""
    places = [place.split(" at ") for place in m["places"].split("; ")]
    told = {run.find(name, at)["id"] for names, at in places for name in names.split(", ")}
    reason = f"ambiguous: {'wide interval' if 'margin' in m['why'] else 'many verdicts'}"
    counted = int(m.get("n") or run.num_judged(run.baseline)) == run.num_judged(run.baseline)
    return counted and told == {
        c["id"] for c in run.timed if run.verdicts(run.baseline).get(c["id"]) == reason
    }


@rule(
    r"A difference of 5 % from <a:cell> would be found in 8 of 10 runs, before Holm's correction, "
    r"with <needed> trials per cell, "
    r"about <more> minutes(?: of trials)?; this run has <n>, in <minutes>"
)
def resolution(run: Run, where: str, m: Groups) -> bool:
    """Chow, Shao, Wang and Lokhnygina: n ((z + z') s / log(1.05)) ** 2, of the widest interval."""
    trials = len(run.times(run.timed[0]))
    error = max(run.widths()) / 2 / stats.t.ppf(0.975, trials - 1)
    least = (
        trials * (float(special.ndtri(0.975) + special.ndtri(0.8)) * error / math.log(1.05)) ** 2
    )
    right = shows(m["needed"], least, 0.5) and shows(m["n"], trials)
    right = right and shows(m["minutes"], run.minutes()) and m["a"] == run.baseline
    return right and shows(m["more"], run.minutes() * float(m["needed"]) / trials)


@rule(r"widest interval of a ratio <percent> %")
@rule(
    r"A/A pair(?: is| at N ?= ?<an>)?:? <x> \(<low>(?:-| to )<high>\)",
    r"A/A pair(?: at N ?= ?<an>)?: <low> - <high>(?=[.;])(?![.]\d)",
)
def precision(run: Run, where: str, m: Groups) -> bool:
    if percent := m.get("percent"):
        return shows(percent, float(f"{100 * math.expm1(max(run.widths())):.2g}"))
    (twin,) = [c for c in run.everything if c["twin"]]
    return (
        shows_interval(run.control, m, 0)
        and int(m.get("an") or twin["accumulate"]) == twin["accumulate"]
    )


@rule(r"--budget <minutes>m")
def budget(run: Run, where: str, m: Groups) -> bool:
    """A tenth more than so many blocks take, in tens of minutes."""
    walls = [
        [r["wall_s"] for r in trials]
        for key, trials in run.trials.items()
        if key not in run.about["once"]
    ]
    block_s = sum(sum(wall) / len(wall) for wall in walls)
    blocks = numbers(where.partition("--repeats ")[2])[0]
    return m["minutes"] == f"{10 * math.ceil(1.1 * blocks * block_s / 600)}"


@rule(
    r"n = <n>(?: to <most>)? good trials? per cell",
    r"one run of <n> trials",
    r"<n> trials per compared cell",
    r"--repeats <double>",
)
@rule(
    r"<all> cells: <ratios> compared with <a:cell>, <own> of <b:cell> itself, <ref> references?, 1 A/A twin"
)
@rule(r"(?<=twin; )<bad> more without a good trial")
@rule(rf"An interval needs {LEAST_TRIALS} blocks with both cells; there (?:is|are) <n>")
def counts(run: Run, where: str, m: Groups) -> bool:
    trials = [len(run.times(c)) for c in run.cells if run.is_correct(c)]
    of_baseline, bad = (
        sum(c["backend"] == run.baseline for c in run.cells),
        len(run.cells) - len(trials),
    )
    known = {
        "n": min(trials),
        "most": max(trials),
        "double": max(2 * max(trials), 10),
        "own": of_baseline,
        "all": len(run.everything) - bad,
        "bad": bad,
    }
    known |= {"ratios": len(trials) - of_baseline, "ref": len(run.everything) - len(run.cells) - 1}
    named = {m[key] for key in "ab" if key in m} <= {run.baseline}
    return named and all(shows(m.get(key, ""), value) for key, value in known.items())


@rule(
    r"(?<![\d.])<x> ?(?P<unit>[MG]) (?:parameters|model)",
    r"a Llama of <x> (?P<unit>M) parameters",
    r"(?<![\w.-])(?P<model>\d+[bm])(?= \()",
)
def parameters(run: Run, where: str, m: Groups) -> bool:
    if "model" in m:
        return {c["model"] for c in run.everything} == {m["model"]}
    unit = {"M": 1e6, "G": 1e9}[m["unit"]]
    known = {r["num_parameters"] for records in run.trials.values() for r in records}
    return all(shows(m["x"], count / unit) for count in known)


@rule(r"python -m bench run --matrix (?P<options>[\w-]+(?: --budget \w+)? --out \S+)")
@rule(
    r"(?i)\bcommit: (?P<commit>[0-9a-f]{40})",
    r"SHA-256 of run.json and journal: (?P<sum>[0-9a-f]{64})",
)
@rule(
    r"(?<![\w-])(?P<name>[A-Za-z-]+) (?P<number>\d+\.\d+\.\d+[^\s,;]*?)(?=[,;.]?(?:\s|$))",
    r"(?P<cpu>AMD EPYC|Intel\(R\) Xeon\(R\) Processor), <cores> cores",
)
def origin(run: Run, where: str, m: Groups) -> bool:
    about = run.about["machine"]
    known = run.about["distributions"] | run.about["packages"] | {"Python": about["python"]}
    known |= {"Linux": about["system"].split()[1]}
    right = m.get("cpu", about["cpu"]) == about["cpu"]
    right = (
        right
        and m.get("number") == known.get(m.get("name"))
        and m.get("commit", run.about["git"]["commit"])
    )
    right = right == run.about["git"]["commit"] and m.get("sum", run.sha256) == run.sha256
    return (
        right
        and m.get("options", "") in " ".join(run.about["command"])
        and shows(m.get("cores", ""), about["cores"])
    )


@rule(r"(?:^## |\brun )(?P<id>[a-z\d]+(?:-[a-z\d]+)*)(?=$|; machine)")
@rule(
    r"(?<![\w.])<gpus> x (?P<gpu>NVIDIA [\w ]+\w)(?=[,;])",
    r"one (?:GPU|rank), so (?:no bytes move|nothing is sent or sharded)",
)
def machine(run: Run, where: str, m: Groups) -> bool:
    """Which run on which GPUs, and that one rank sends nothing."""
    gpus = [gpu["name"] for gpu in run.about["machine"]["gpus"]]
    if "id" in m:
        return m["id"] == run.about["run_id"]
    if "gpu" in m:
        return gpus == [m["gpu"]] * int(m["gpus"])
    return {cell["world_size"] for cell in run.cells} == {1}


@rule(r"FSDP2 on bf16 copies needs <sharded> GiB, DDP under autocast <whole>(?=[.])")
def memory_of_two_ways(run: Run, where: str, m: Groups) -> bool:
    """Of all cells of each, which compute in these ways."""
    told = {"fsdp2": (m["sharded"], "bf16 copies"), "ddp": (m["whole"], "autocast")}
    right = []
    for kind, (text, way) in told.items():
        for cell in run.good(where):
            if kind in cell["backend"].split("-"):
                right.append(shows_size(f"{text} GiB", run.memory(cell)))
                right.append(run.about["backends"][cell["backend"]]["bf16_as"].startswith(way))
    return len(right) > 2 and all(right)


@rule(
    r"<a:cell> is <verdict:word> than <b:cell>(?: in this run| over \d+ runs), and <other:word> beside its A/A copy: "
    r"<x> \(<low> to <high>\)"
)
def beside_the_copy(run: Run, where: str, m: Groups) -> bool:
    """What a cell of the A/A pair shows, its copy does not, after the correction."""
    cell, base = run.find(m["a"], where), run.find(m["b"], where)
    (twin,) = [c for c in run.everything if c["twin"] and c["backend"] == base["backend"]]
    time = run.ratio(cell, twin)
    is_open = m["other"] == "ambiguous" and time.p * run.num_judged(run.baseline) >= 0.05
    return is_open and run.verdict(cell, base) == m["verdict"] and shows_interval(time, m, 0)


def as_expected(run: Run, there: Run) -> list[bool]:
    """Of each ratio of a pool, whether a run on another processor is where the pool expects a next one."""
    found = []
    for cell in run.timed:
        eager = cell["backend"].replace("-deferred", "-eager")
        for other in dict.fromkeys((run.baseline, eager)):
            if other == cell["backend"] or other not in run.names or not run.is_correct(cell):
                continue
            kept, again = (each.ratio(cell, each.partner(cell, other)) for each in (run, there))
            found.append(kept.next_low <= again.centre <= kept.next_high)
    return found


@cache
def elsewhere() -> list[Run]:
    """The runs on other processors, in the order of their names."""
    folders = sorted((ROOT / "results" / "elsewhere" / "cpu").glob("*/run.json"))
    return [Run(str(folder.parent.relative_to(ROOT / "results"))) for folder in folders]


@rule(
    r"on two Intel Xeons, (?P<within>[\d and,]+) of (?P<of>\d+) ratios \((?P<due>\d+) are due\) were where these "
    r"runs expect the next"
)
def on_another_processor(run: Run, where: str, m: Groups) -> bool:
    processors = {there.about["machine"]["cpu"] for there in elsewhere()}
    if len(processors) != 2 or not all("Xeon" in name for name in processors):
        return False
    found = [as_expected(run, there) for there in elsewhere()]
    told = [int(number) for number in re.findall(r"\d+", m["within"])]
    if told != [sum(each) for each in found] or int(m["due"]) != round(0.95 * int(m["of"])):
        return False
    return {int(m["of"])} == set(map(len, found))


@rule(r"torch (?P<version>\d+\.\d+)(?=,)")
def on_torch(run: Run, where: str, m: Groups) -> bool:
    """The minor version of all runs that a text is about."""
    packages = [each.about["packages"]["torch"] for each in (run, *run.others)]
    return all(found.startswith(f"{m['version']}.") for found in packages)


@rule(r"By closed form ZeRO-2's memory ratio is (?P<ratio>\d\.\d) for 8b on 8 GPUs")
def in_a_large_model(run: Run, where: str, m: Groups) -> bool:
    """As the page of claims has the GiB of 8b, eager and deferred."""
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    (large,) = re.findall(
        r"GiB of 8b on 8 GPUs[^.]*? by closed form: [^.]*?ZeRO-2 (\d+) and (\d+)\.", page
    )
    eager, deferred = map(int, large)
    return m["ratio"] == f"{deferred / eager:.1f}"


@rule(r"FSDP2's times vary between trials")
def varying(run: Run, where: str, m: Groups) -> bool:
    """By more than a tenth in each of its cells, and by less than a hundredth in those of DDP."""
    spreads: dict[str, list[float]] = {"fsdp2": [], "ddp": []}
    for cell in run.good(where):
        times = run.times(cell).values()
        for kind in spreads.keys() & set(cell["backend"].split("-")):
            spreads[kind].append(max(times) - min(times))
    return min(spreads["fsdp2"]) > math.log(1.1) and max(spreads["ddp"]) < math.log(1.01)


@rule(r"<a:cell>: (?P<remark>on one rank ZeRO-3 gathers nothing, .* larger worlds)")
def remark(run: Run, where: str, m: Groups) -> bool:
    """As the run has stored it."""
    return run.about["remarks"].get(run.find(m["a"], where)["id"]) == m["remark"]


@rule(r"(?P<way>bf16 copies of fp32 parameters|autocast over fp32 parameters)[^(]*\(<a:cells>\)")
def ways_of_bf16(run: Run, where: str, m: Groups) -> bool:
    """All backends that the run has stored with it, but for references."""
    ways = {name: about["bf16_as"] for name, about in run.about["backends"].items()}
    found = {c["backend"] for c in run.cells if ways[c["backend"]] == m["way"]}
    return found == set(re.split(", | and ", m["a"]))


@rule(
    r"(?<!frameworks, at )(?<![(])\b(?P<axis>[NWB]) ?= ?<values:list>(?: samples of <tokens> tokens)?"
)
@rule(
    r"on <W> ranks? of",
    r"<B> samples of <tokens> tokens",
    r"micro-batch <size>",
    r"clipped to <clip_norm>",
)
@rule(r"(?P<optimizer>sgd|adamw-foreach|adamw-fused) \(lr <learning_rate>")
def settings(run: Run, where: str, m: Groups) -> bool:
    """Several values are all that the run has."""
    axes = {"N": "accumulate", "W": "world_size", "B": "global_batch_size"}
    told = {axes[key]: numbers(m.get(key, "")) for key in axes} | {
        "sequence_length": numbers(m.get("tokens", ""))
    }
    told |= {axes[m["axis"]]: numbers(m["values"])} if "axis" in m else {}
    of = [c for c in run.cells if m.get("optimizer", c["optimizer"]) == c["optimizer"]]
    known = {key: sorted({c[key] for c in of}) for key in (*told, "clip_norm", "learning_rate")}
    right = all(
        values == known[key] if len(values) > 1 else set(values) <= set(known[key])
        for key, values in told.items()
    )
    sizes = [
        c["global_batch_size"] / c["accumulate"] / c["world_size"]
        for c in run.select(where, run.cells)
    ]
    known |= {"size": sizes}
    return right and all(
        float(m[key]) in known[key] for key in ("clip_norm", "learning_rate", "size") if key in m
    )


@rule(
    r"others took <x> % of its CPUs \(limit <limit> %\); <n> repeat, and an interval needs <needed>"
)
@rule(
    r"Times need an idle machine[.] other programs may use at most <limit> % of its CPUs while the trials run, "
    r"which took <minutes> minutes? here"
)
def disturbed(run: Run, where: str, m: Groups) -> bool:
    right = float(m["limit"]) == 100 * IDLE and int(m.get("needed", LEAST_TRIALS)) == LEAST_TRIALS
    right = right and ("x" not in m or any(shows(m["x"], 100 * run.taken(c)) for c in run.cells))
    right = right and shows(m.get("minutes", ""), run.minutes())
    return right and int(m.get("n", 1)) == max(len(run.times(c)) for c in run.cells)


@rule(
    r"<a:cells> needs? <x>x the memory of <b:cells>(?P<use>, mostly for \w+(?: \w+)?)",
    r"<a:cells> needs? <x>x the memory of <b:cells>(?P<use>: <mib> MiB more for \w+(?: \w+)? "
    r"and <mib2> MiB more for \w+(?: \w+)?)",
    r"<a:cells> needs? <x>x the memory of <b:cells>(?P<use>)(?=$|;)",
    r"<a:cells> hands? <x>x the bytes of <b:cells> to collectives",
)
def extremes(run: Run, where: str, m: Groups) -> bool:
    """The largest over the smallest of the good cells of the group, whose names are all there or counted."""
    size = run.memory if "use" in m else run.handed
    cells = sorted(run.good(where), key=size)
    cells = [cell for cell in cells if size(cell) <= 5 * size(cells[len(cells) // 2])]
    for told, end in ((m["a"], cells[-1]), (m["b"], cells[0])):
        names, more = set(re.findall(r"[\w-]+-[\w-]+", told)), re.search(r"and (\d+) more", told)
        alike = {c["backend"] for c in cells if math.isclose(size(c), size(end), rel_tol=1e-3)}
        if not names <= alike or len(names) + int(more[1] if more else 0) != len(alike):
            return False
    least, most = (run.first(c, "memory") for c in (cells[0], cells[-1]))
    parts = [key for key in most if key.startswith("peak_") and "allocator" not in key]
    away = {key[5:]: most[key] - least[key] for key in parts}
    first, second = sorted(away, key=away.__getitem__, reverse=True)[:2]
    is_most = 2 * away[first] > sum(number for number in away.values() if number > 0)
    told = [
        set(words.split())
        for words in re.findall(r" for ((?!and)\w+(?: (?!and)\w+)?)", m.get("use", ""))
    ]
    right = told in ([], [set(use.split("_")) for use in ([first] if is_most else [first, second])])
    right = right and all(
        shows(m.get(key, ""), away[use] / MIB) for key, use in (("mib", first), ("mib2", second))
    )
    return right and shows(m["x"], size(cells[-1]) / size(cells[0]))


rule(
    r"Parts without a key are below 0\.5 % of the axis",
    r"in a ring, an all-reduce sends twice as much as an all-gather or a reduce-scatter of the same payload",
    r"a dot above the line of its row was slower than the mean",
)(lambda *_: True)  # how the figures are drawn, and what follows from no run


@rule(r"<a:cells> (?:is|are) beyond the axis")
def beyond(run: Run, where: str, m: Groups) -> bool:
    cells = sorted(run.good(where), key=run.memory)
    far = [c["backend"] for c in cells if run.memory(c) > 5 * run.memory(cells[len(cells) // 2])]
    return set(far) == set(re.findall(r"[\w-]+-[\w-]+", m["a"]))


@rule(r"Not timed: (?P<all>.*?)\.", r"Without a value: (?P<all>.*?)\.")
def not_timed(run: Run, where: str, m: Groups) -> bool:
    """All backends that are correct nowhere, and no others."""
    found = set(re.findall(r"([\w-]+)(?: at N = \d+)? \(invalid\)", m["all"]))
    return found == {c["backend"] for c in run.cells} - {
        c["backend"] for c in run.cells if run.is_correct(c)
    }


@rule(r"<a:cells> deviates? from the reference's loss by up to <x> nats/token")
@rule(
    r"All <n> backends stay within <x> nats/token of the reference's loss(?:, but <wrong> (?:is|are) invalid)?"
)
def deviating(run: Run, where: str, m: Groups) -> bool:
    """Visible are 0.01 nats/token; bounds are rounded up to a digit."""
    largest = max(c["accumulate"] for c in run.cells)
    cells, away = [c for c in run.cells if c["accumulate"] == largest], list[float]()
    for cell in cells:
        truth = run.reference(cell)
        away.append(
            np.abs(np.subtract(*(run.first(c, "time")["losses"] for c in (cell, truth)))).max()
        )
    far = {c["backend"] for c, distance in zip(cells, away, strict=True) if distance > 0.01}
    named = set(re.findall(r"[\w-]+-[\w-]+", m.get("a", "")))
    more = re.search(r"and (\d+) more", m.get("a", ""))
    unit = 10 ** math.floor(math.log10(max(away)))
    right = named <= far and len(far) == len(named) + int(more[1] if more else 0)
    right = right and math.isclose(float(m["x"]), math.ceil(max(away) / unit) * unit)
    wrong = {c["backend"] for c in cells if not run.is_correct(c)}
    return right and (
        bool(named)
        or [m["n"], m["wrong"] or "0"] == [str(len({c["backend"] for c in cells})), str(len(wrong))]
    )


@rule(r"no backend is shown to be faster than <a:cell>; <slower> of <n> others (?:is|are) slower")
def nothing_faster(run: Run, where: str, m: Groups) -> bool:
    found = [
        run.verdicts(m["a"])[c["id"]]
        for c in run.select(where, run.timed)
        if c["backend"] != m["a"]
    ]
    return "faster" not in found and [int(m["slower"]), int(m["n"])] == [
        found.count("slower"),
        len(found),
    ]


@rule(r"<turning> verdicts? may differ on another day")
def turning_of_a_title(run: Run, where: str, m: Groups) -> bool:
    """Of the comparisons that a title tells, with the run's baseline."""
    told = [c for c in run.select(where, run.timed) if c["backend"] != run.baseline]
    turning = [c for c in told if run.may_differ(c, run.partner(c, run.baseline))]
    return int(m["turning"]) == len(turning)


@rule(
    r"Half of the trials are within <x> % of the mean of their cell; "
    r"blocks (?:(?P<blocks>differ)|do not differ) significantly"
)
@rule(r"The triangles? (?:is|are) (?:a|<n>) trials? beyond the axis \((?:up to )?<most> %\)")
def scatter(run: Run, where: str, m: Groups) -> bool:
    """Friedman's test, over the blocks that all cells have; the axis reaches 1.4 times as far as 98 % of trials."""
    away, times = run.deviations(), [run.times(c) for c in run.timed]
    if "most" in m:
        return (
            shows(m["most"], away.max())
            and int(m["n"] or 1) == (away > 1.4 * np.quantile(away, 0.98)).sum()
        )
    common = set.intersection(*map(set, times))
    p_value = stats.friedmanchisquare(*([time[block] for time in times] for block in common)).pvalue
    return shows(m["x"], np.median(away)) and (p_value < 0.01) == bool(m["blocks"])


@rule(
    r"blocks of the run differ over all cells, from block <a> by (?P<least>[-+][\d.]+) % "
    r"to block <b> by (?P<most>[-+][\d.]+) %"
)
def blocks(run: Run, where: str, m: Groups) -> bool:
    """How much longer the cells that have every trial, the A/A twin among them, took than in the mean block."""
    times = [run.times(c) for c in run.everything if run.is_correct(c)]
    full = [time for time in times if len(time) == max(map(len, times))]
    of = {
        b: 100 * math.expm1(np.mean([time[b] - np.mean([*time.values()]) for time in full]))
        for b in full[0]
    }
    least, most = min(of, key=of.__getitem__), max(of, key=of.__getitem__)
    return (
        (str(least), str(most)) == (m["a"], m["b"])
        and shows(m["least"], of[least])
        and shows(m["most"], of[most])
    )


@rule(
    r"(?<=: )geometric mean over blocks, below 1 is faster",
    r"below 1 is faster(?=; memory and n trials: of the first)",
    r"where the ratio of another run falls in 95 of 100 cases",
    r"may differ on another day where that contains 1",
    r"thin lines: where the next run falls",
    r"geometric mean",
    "95 % intervals",
    "x86_64",
    "a bucket of 5e8 elements",
    "two modes: [0-9]+ % of the trials are [0-9.]+ x slower",
    "add repeats, or compare fewer cells",
    "1/N",
)
@rule(
    "Below 1 is faster",
    "Rings: invalid",
    "Lower left is better",
    "times differ",
    "median step after warm-up",
    "the slowest rank",
)
@rule(
    "[Gg]loo reduces and scatters by a copy and an all-reduce, so these step times include a cost of gloo's own",
    "largest peak(?: of a rank)?",
    "(?:Times cannot|No times can) be compared",
    "More frameworks, at N = 4: popular",
)
def about_the_method(run: Run, where: str, m: Groups) -> bool:
    """How to read the numbers."""
    return True
