"""Citations as a page's script puts them together: what several of them share is stored once.

A page of 500 cells and 12 baselines cites 6,000 ratios in three formats. Each is made of parts that others have too
(names, sentences on machine and versions, the words around the numbers), and those are escaped here, once, for each
format: the script joins them and escapes nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.judge.quoting import Quotes, RatioQuote, place_of
from bench.judge.standing import Standing
from bench.report.citation import (
    AGAINST,
    ESCAPES,
    Citation,
    Parts,
    entry_key,
    fields_of,
    harmless,
    hash_of,
    joined,
    parts,
    render,
    statement_of,
    words_of_quote,
)

NUMBER = re.compile(r"\d+\.\d+")
"""Of a statement: what stands between its numbers is shared by many. No format escapes a digit or a point."""
SLOT = re.compile("\0([a-z]+)\0")
SLOTS = ("subject", "statement", "place", "fields", "tail", "key")
"""Parts that differ from ratio to ratio."""


def packed(citations: Mapping[str, Citation]) -> dict[str, Any]:
    """Citations by format: how all of them end, once, and what comes before it in each."""
    found = {}
    for name in ESCAPES:
        texts = {key: str(getattr(citation, name)) for key, citation in citations.items()}
        end = _common_end(texts.values())
        found[name] = {"end": end, "of": {key: text.removesuffix(end) for key, text in texts.items()}}
    return found


def _common_end(texts: Iterable[str]) -> str:
    """The longest text that all of them end with."""
    backwards = sorted(text[::-1] for text in texts)
    if not backwards:
        return ""
    # What the first and the last of them share, all share.
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(backwards[0], backwards[-1], strict=False))
    return "".join(one for one, _ in same)[::-1]


def ratios(quotes: Quotes, standings: Mapping[str, Standing], ids: Sequence[str]) -> dict[str, Any]:
    """The citations of the ratios of these cells to every baseline.

    ``of`` has, by cell, for each baseline with such a cell: its place in ``standings``, that of its cell in ``ids``,
    that of the words of its statement and of its fields, the numbers between these words, and the place of what follows
    the line for machines. ``forms`` has, by format, the words at those places, and a template: what stands between
    SLOTS, and their names in turn. ``fields`` has the words of the fields, which no format escapes.
    """
    run = quotes.run
    by_cell = {cell: cell_id for cell_id, cell in run.cells.items()}
    places = {cell_id: place for place, cell_id in enumerate(ids)}
    shared = _Shared(quotes)
    of: dict[str, list[list[Any]]] = {}
    for number, standing in enumerate(standings.values()):
        for row in standing.rows:
            cell_id, other_id = by_cell[row.pair.b], by_cell[row.pair.a]
            if cell_id in places and other_id in places:
                quote = quotes.ratio(cell_id, other_id)
                said = shared.places(quote, cell_id, other_id)
                of.setdefault(cell_id, []).append([number, places[other_id], *said])
    start = place_of(run.name, "")
    labels = [harmless(run.labels[cell_id]) for cell_id in ids]
    for form, kit in shared.forms.items():
        escape = ESCAPES[form]
        kit["place"] = escape(start) if form == "bibtex" else start
        kit["labels"] = [escape(label) for label in labels]
    every = {"ids": list(ids), "key": entry_key(start), "against": AGAINST, "fields": shared.fields}
    return {"of": of, **every, "forms": shared.forms}


class _Shared:
    """The words that ratios share, by format, each once."""

    def __init__(self, quotes: Quotes) -> None:
        self._run = quotes.run
        self.forms: dict[str, dict[str, Any]] = {
            form: {"template": [], "statements": [], "tails": []} for form in ESCAPES
        }
        self.fields: list[list[str]] = []
        self._statements: dict[tuple[str, ...], int] = {}
        self._tails: dict[tuple[str, tuple[str, ...]], int] = {}

    def places(self, quote: RatioQuote, cell_id: str, other_id: str) -> tuple[int, str, int]:
        """Where the words of the statement and of the fields are, their numbers, and where what follows them is."""
        statement = statement_of(quote)
        between = tuple(NUMBER.split(statement))
        if between not in self._statements:
            self._statements[between] = len(self._statements)
            self.fields.append(NUMBER.split(joined(fields_of(quote) | hash_of(self._run.manifest))))
            for form, kit in self.forms.items():
                kit["statements"].append(NUMBER.split(ESCAPES[form](statement)))
        after = cell_id, quote.caveats
        if after not in self._tails:
            self._tails[after] = self._tail(quote, cell_id, other_id)
        return self._statements[between], " ".join(NUMBER.findall(statement)), self._tails[after]

    def _tail(self, quote: RatioQuote, cell_id: str, other_id: str) -> int:
        """Where the sentences behind the line for machines are; most cells of a run have the same."""
        words = words_of_quote(self._run, quote, cell_id, other_id)
        every = {form: parts(words, form) for form in ESCAPES}
        for form, kit in self.forms.items():
            kit["template"] = kit["template"] or _template(form, every[form])
        known = self.forms["text"]["tails"]
        if every["text"].tail in known:
            return int(known.index(every["text"].tail))
        for form, kit in self.forms.items():
            kit["tails"].append(every[form].tail)
        return len(known) - 1


def _template(form: str, of: Parts) -> list[str]:
    """A citation of a format as literal text and names of SLOTS, in turn. Escaped parts hold no NUL."""
    slots: dict[str, Any] = {name: f"\0{name}\0" for name in SLOTS}
    return SLOT.split(render(form, replace(of, **slots)))
