"""Space on the disk, and what is not for a spreadsheet to run."""

from __future__ import annotations

import pytest

from bench.backends import base
from bench.errors import InputError
from bench.plan.cell import REFERENCE
from bench.plan.models import SIZES
from bench.run import start
from bench.run.journal import encode
from tests.factories import make_backend, make_cell, make_record


def test_what_a_run_needs_grows_with_its_trials_and_references() -> None:
    cell = make_cell(timed_windows=1000)
    once, often = start.needed([cell], 1), start.needed([cell], 11)
    assert once > start.RESERVE_BYTES
    record = make_record(cell)
    record["time"]["rank_step_seconds"] = [record["time"]["step_seconds"]] * cell.world_size
    assert (often - once) / 10 > len(encode(record))
    reference = start.needed([cell.reference()], 1) - start.RESERVE_BYTES
    assert reference > 4 * SIZES["tiny"].num_parameters
    assert cell.reference().backend == REFERENCE


@pytest.mark.parametrize("name", ["", "../x", "a/b", "=1+1", "a|b", "<b>", "a\nb", "a b", ".x", "x" * 81, "-x", None])
def test_a_backend_that_cannot_be_a_file_name_or_a_cell_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_backend(name)

    class Entry:
        name, value = "entry", "module:Class"

        def load(self) -> object:
            return made

    monkeypatch.setattr(base, "_entry_points", lambda: [Entry()])
    with pytest.raises(InputError, match="may only contain letters, digits"):
        base.registry(["entry"])
