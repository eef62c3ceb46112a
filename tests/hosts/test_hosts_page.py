from __future__ import annotations

import json

from tests.hosts.__main__ import DATA, HEADING, PAGE, page


def test_the_page_is_of_the_rows_that_are_kept() -> None:
    head, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    assert PAGE.read_text(encoding="utf-8") == page(head, json.loads(DATA.read_text(encoding="utf-8")))
