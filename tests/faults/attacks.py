"""What strangers and accidents can do to a run, a job or a terminal: before, now, and the tests that show it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.faults.form import FORM, marked


@dataclass(frozen=True)
class Attack:
    """One kind of attack, as a row of docs/reliability.md."""

    what: str
    before: str
    """What came of it in version 1.1.0."""
    now: str
    """What has to come of it, which the tests require."""
    tests: tuple[str, ...]
    """Names of test functions in tests/faults."""


ATTACKS = (
    Attack(
        "run.json names another CPU, package, commit, date or environment",
        "`check` found no error, and `cite` printed the edit",
        "an error of `check`: each record carries the hash of what run.json said when the run began",
        (
            "test_an_edited_manifest_contradicts_the_records",
            "test_a_manifest_that_lies_beside_the_records_is_an_error",
        ),
    ),
    Attack(
        "run.json and trials.jsonl are both rewritten",
        "a citation still fitted, since it pinned the journal only",
        "the citation's hash is over both files, and differs",
        ("test_the_hash_that_pins_a_run_is_one_that_any_shell_computes",),
    ),
    Attack(
        "run.lock is removed during a run, and a second process resumes it",
        "two writers; a crashed trial was replaced; `check` found no error",
        "the second process is refused: the lock is on the journal; records of two writers are an error of `check`",
        (
            "test_two_writers_are_refused_whatever_became_of_the_lock_file",
            "test_a_journal_that_was_removed_meanwhile_is_not_begun_again",
            "test_records_of_two_writers_are_an_error_of_check",
        ),
    ),
    Attack(
        "plots, a table or a draft in a stranger's folder is a link",
        "`report` overwrote files outside the folder",
        "nothing outside is written; a link in place of plots is refused",
        ("test_nothing_is_written_through_a_link",),
    ),
    Attack(
        "300 silent connections and 20 wrong answers to node 0",
        "the job ended",
        "one line in the log; the other node joins",
        ("test_strangers_cost_the_job_one_line",),
    ),
    Attack(
        "a run's reason, CPU, package or id holds escape sequences",
        "`check`, `compare` and `report` sent them to the terminal",
        "they are printed as visible characters",
        (
            "test_what_a_run_says_moves_no_cursor",
            "test_an_error_says_what_is_wrong_without_control_characters",
        ),
    ),
    Attack(
        "a file of a run is a FIFO, a device, a folder, a loop of links, empty, or 1 TiB of nothing",
        "`check` waited forever or ended in a traceback",
        "one line that names the file",
        ("test_what_is_no_file_of_a_run_is_refused_at_once",),
    ),
    Attack(
        "a table of 8e8 equal rows in a small file, or one text in every row",
        "`check` filled the memory",
        "an error of `check`, before anything is unpacked",
        ("test_a_table_that_would_fill_the_memory_is_not_unpacked",),
    ),
    Attack(
        "20,000 more trials in a journal",
        "`check` took more than 150 s",
        "an answer within 30 s",
        ("test_a_journal_of_very_many_trials_is_answered_in_time",),
    ),
    Attack(
        "a matrix of 100,000 seeds, 9,000,000 cells or 3,000 groups",
        "`plan` took more than 90 s",
        "one line within a second",
        ("test_a_matrix_that_is_too_large_is_refused_at_once",),
    ),
    Attack(
        "step times, rates or links that no machine can have",
        "a traceback",
        "one line that names the file, the key and the value",
        ("test_times_that_no_clock_shows_are_named", "test_rates_that_nothing_reaches_are_named"),
    ),
    Attack(
        "any file of a committed run in another state, or any value replaced by any other",
        "tracebacks, among others by a table that was cut off",
        "a result or one line, within 10 s of CPU time, in 2 GiB of memory, and nothing written outside",
        ("test_no_mutation_of_a_committed_run_fails",),
    ),
    Attack(
        "PYTHONOPTIMIZE=2, no such network interface, /dev/shm full, loopback down",
        "a raw error in each trial, or minutes per trial",
        "one line before the first trial",
        (
            "test_what_would_break_every_trial_is_told_before_the_first",
            "test_full_shared_memory_and_a_dead_loopback_are_told_by_name",
        ),
    ),
    Attack(
        "an empty name of a folder",
        "the run went into the current folder",
        "one line",
        ("test_an_empty_name_is_not_the_current_folder",),
    ),
)


def note_attacks(outcomes: Mapping[str, str]) -> None:
    """Note the row of each attack of which every test ran; ``outcomes`` by the tests' node ids."""
    for attack in ATTACKS:
        found: dict[str, list[str]] = {name: [] for name in attack.tests}
        for node, outcome in outcomes.items():
            name = node.rpartition("::")[2].partition("[")[0]
            if name in found:
                found[name].append(outcome)
        if not all(found.values()):
            continue
        each = [outcome for several in found.values() for outcome in several]
        passed = each.count("passed")
        shown = marked(f"{passed} of {len(each)}", good=passed == len(each))
        FORM.note("attacks", attack.what, attack.what, attack.before, attack.now, shown)
