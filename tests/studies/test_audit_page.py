"""The page on ``audit`` is of its data, and every script has got its verdict."""

from __future__ import annotations

import json

from tests.audit_command.cases import CASES
from tests.studies.audit_page import DATA, PAGE, page


def test_the_page_is_of_its_data() -> None:
    data = json.loads(DATA.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(data)
    assert {case.name: data[case.name]["verdict"] for case in CASES} == {case.name: case.verdict for case in CASES}
