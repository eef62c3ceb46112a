"""Hostile input: whatever the files and the arguments are, there is no traceback, and nothing is written elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import cli
from bench.audit import dtypes, monitor
from bench.audit.lint import lint
from bench.audit.lint.lint_options import LintOptions
from bench.audit.lint.rules import rules
from bench.backends.base import registry
from bench.commands import COMMANDS
from bench.errors import BAD, GOOD, UNCHECKED, WRONG, InputError
from bench.launch import launcher
from bench.plan import matrix as matrix_file
from bench.plan.expand import expand
from bench.plan.matrix import KEYS
from bench.report import canvas, figures
from bench.run import start
from bench.run.journal import JOURNAL, MANIFEST, Journal, encode, write_document
from tests.audit.test_lint import engine, lightning
from tests.factories import FakeLauncher, make_cell, make_document, make_manifest, make_record
from tests.faults.form import FORM
from tests.faults.sandbox import Call, ReachedError, call

pytestmark = pytest.mark.timeout(3600)
ROOM_BYTES = 4 * 2**30
"""What this process may allocate beside what it has: no number in an argument may ask for more."""
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([2**31, 2**63, -(2**63), 10**30])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        [
            "all",
            "auto",
            "",
            "../../escape",
            "/escape",
            "=1+1",
            "<script>",
            "[red]",
            "a\nb",
            "é",
            "nan",
        ]
    )
)
ANY = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
)
"""What JSON, TOML or YAML can hold, mostly."""
PARSED = (
    "the matrix parser: files",
    "the matrix parser: documents",
    "the journal reader: files",
    "the lint readers: YAML and JSON",
)
"""What is read by itself."""


COUNTS: Counter[str] = Counter()
"""Inputs, by the names of the page's rows."""


def spelled(arguments: Sequence[str]) -> str:
    """How the page calls a command that reads a hostile run."""
    return f"an edited or broken run, read by {' '.join(word for word in arguments if word not in BOTH)}"


def count(name: str) -> None:
    """One more input, for the page."""
    COUNTS[name] += 1
    FORM.note("fuzz", name, name, f"{COUNTS[name]:,}")


def changed(good: bytes) -> st.SearchStrategy[bytes]:
    """A text with some pieces cut out, doubled or replaced."""
    piece = st.tuples(
        st.integers(0, len(good)), st.integers(0, 12), st.binary(max_size=6) | _SYNTAX
    )

    def apply(pieces: list[tuple[int, int, bytes]]) -> bytes:
        text = good
        for place, length, instead in pieces:
            text = text[:place] + instead + text[place + length :]
        return text

    return st.lists(piece, min_size=1, max_size=4).map(apply)


_SYNTAX = st.sampled_from(
    [b"{", b"}", b"[", b"]", b'"', b"'", b"=", b":", b",", b"\n", b"#", b"- ", b"&a ", b"*a", b"<<: ", b"!!python/",
     b"\\", b"1e999", b"-", b"0x", b"nan", b".", b"\t", b"\x00", b"\xff", b"\xef\xbb\xbf", b"null", b"? "]
)  # fmt: skip


def put(value: Any, path: list[Any], new: Any) -> Any:
    """The nested value with another one at some place: each step of the path chooses a key by its number."""
    if not path or not isinstance(value, dict | list) or not value:
        return new
    if isinstance(value, list):
        index = path[0] % len(value)
        return [*value[:index], put(value[index], path[1:], new), *value[index + 1 :]]
    key = list(value)[path[0] % len(value)]
    if new is Ellipsis and len(path) == 1:
        return {name: kept for name, kept in value.items() if name != key}
    return {**value, key: put(value[key], path[1:], new)}


def edits(good: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """A nested value with some places edited: another value, or none."""
    step = st.lists(st.integers(0, 40), min_size=1, max_size=5)
    edit = st.tuples(step, ANY | st.just(...))

    def apply(several: list[tuple[list[int], Any]]) -> dict[str, Any]:
        value: Any = dict(good)
        for path, new in several:
            value = put(value, path, None if new is ... and len(path) == 0 else new)
        return json.loads(json.dumps(value, default=lambda _: None))

    return st.lists(edit, min_size=1, max_size=3).map(apply)


def read_matrix(folder: Path, content: bytes) -> None:
    (folder / "fuzzed.toml").write_bytes(content)
    with contextlib.suppress(InputError):
        expand(matrix_file.load(str(folder / "fuzzed.toml")), registry(), 0)


def read_journal(folder: Path, content: bytes) -> None:
    (folder / JOURNAL).write_bytes(content)
    with contextlib.suppress(InputError):
        Journal(folder).read()
    with contextlib.suppress(InputError):
        Journal(folder).append(RECORDS[0])


MATRIX = (Path(matrix_file.FOLDER) / "smoke.toml").read_bytes()
DOCUMENT = make_document() | {
    "training": {"seed": 1},
    "virtual": {"world_size": [8]},
    "description": "d",
}


@FORM.examples(60, 3000)
@given(
    content=st.binary(max_size=80)
    | st.text(max_size=80).map(lambda text: text.encode())
    | changed(MATRIX)
)
def test_no_matrix_file_fails(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    count("the matrix parser: files")
    read_matrix(tmp_path_factory.getbasetemp(), content)


@FORM.examples(100, 5000)
@given(
    document=edits(DOCUMENT)
    | st.dictionaries(
        st.sampled_from([*KEYS, *(key.partition(".")[0] for key in KEYS)]), ANY, max_size=4
    ).map(lambda more: DOCUMENT | more)
)
def test_no_matrix_document_fails(document: dict[str, Any]) -> None:
    count("the matrix parser: documents")
    with contextlib.suppress(InputError):
        expand(matrix_file.parse(document, name="fuzzed", source="fuzzed.toml"), registry(), 0)


CELLS = [make_cell(backend=name) for name in ("reference", "ddp-eager")]
RECORDS = [json.loads(json.dumps(make_record(cell))) for cell in CELLS]
RUN = json.loads(json.dumps(make_manifest(CELLS)))


def write_run(folder: Path, manifest: Any, records: list[Any]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / JOURNAL).unlink(missing_ok=True)
    write_document(folder, RUN)
    for record in records:
        Journal(folder).append(record)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def journal(folder: Path) -> bytes:
    write_run(folder, RUN, RECORDS)
    return (folder / JOURNAL).read_bytes()


@FORM.examples(60, 3000)
@given(data=st.data())
def test_no_journal_fails(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.getbasetemp() / "fuzzed-journal"
    good = journal(folder)
    count("the journal reader: files")
    read_journal(folder, data.draw(st.binary(max_size=60) | changed(good[:2000]) | changed(good)))


CONFIGS = {
    "c.yaml": b"trainer:\n  devices: 2\n  strategy: ddp\n  accumulate_grad_batches: 4\n  callbacks:\n  - class_path: "
    b"lightning.pytorch.callbacks.ThroughputMonitor\n    init_args: &a {batch_size_fn: my.size}\ndata:\n  <<: *a\n",
    "c.yml": json.dumps(lightning("deepspeed_stage_2"), indent=1).encode(),
    "c.json": json.dumps(engine(), indent=1).encode(),
    "c.sh": b"N=4\ntorchrun --nproc_per_node 2 train.py --bf16 True --save_steps 9 --per_device_train_batch_size 1 \\\n"
    b"--gradient_accumulation_steps $N --torch_dtype bfloat16 --deepspeed none.json > log\n",
    "c.toml": b"[training]\nlocal_batch_size = 1\nglobal_batch_size = 16\nsteps = 9\nseq_len = 8\nmax_norm = 1.0\n"
    b'dtype = "bfloat16"\n[model]\nflavor = "8B"\n',
}


def read_config(name: str, folder: Path, content: bytes) -> None:
    path = folder / name
    path.write_bytes(content)
    refusal, findings = str(path), []
    try:
        findings = lint([path], LintOptions(samples=100, world_size=2, batch_size=2))
    except InputError as error:
        refusal = str(error)
    assert refusal.startswith(str(path))
    assert all(
        len(str(finding).splitlines()) == 4 and finding.code in rules() for finding in findings
    )


@FORM.examples(80, 5000)
@given(data=st.data(), name=st.sampled_from(sorted(CONFIGS)))
def test_no_changed_config_fails(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    count("the lint readers: YAML and JSON")
    read_config(name, tmp_path_factory.getbasetemp(), data.draw(changed(CONFIGS[name])))


NASTY = [
    "", " ", "-", "--", "-1", "0", "1", "2", "16", "1,2", ",", "1,,2", "nan", "inf", "1e400", "9" * 30, "9" * 400,
    "0.5", "5%", "1.5h", "80GiB", "٣", "½", "all", "auto", "..", "../../escape", "/escape", "a/b", "x\ny", "\udcff",
    "%s", "%(x)s", "{0}", "=1+1", "<script>alert(1)</script>", "[red]", "💥", "a" * 5000, "@file", "~", "$HOME",
    "llama", "json:loads", "no:such", "no.toml", "file", "good", "None", "true", "a,a", "1000000007", "1e308B",
    "1e-300B/s", "1e300s", "1e-320s", "/dev/zero", "/dev/full",
]  # fmt: skip
"""No option needs more than a refusal for most of these."""
OUT = [
    "out",
    "a/b/c",
    "./x",
    "a/../y",
    "file",
    "file/x",
    "",
    ".",
    "x\ny",
    "é",
    "\udcff",
    "n" * 300,
    "good",
    "p.md",
]
"""Where a user may ask for output: always in the folder."""
WRITES = {"out", "plots", "docs"}
GOOD_VALUES = {
    "B[,B]": ["ddp-eager", "all", "fsdp2-deferred,lightning-ddp"],
    "CONFIG": list(CONFIGS),
    "DIR": ["out"],
    "FILE": ["file", "m.toml", "text.txt"],
    "GPU|RATE": ["H100", "989TFLOP/s"],
    "M": ["2", "tiny", "135m"],
    "MODULE:FACTORY": ["json:loads"],
    "NAME|FILE": ["cpu", "smoke", "m.toml", "bad.toml"],
    "P": ["5%"],
    "RATE": ["50GB/s"],
    "RUN": ["good", "broken", "cut", "nowhere", "file"],
    "SECONDS": ["5"],
    "SIZE": ["80GiB", "tiny"],
    "TIME": ["20us", "90s"],
}
"""Good values by metavar; others take a small number."""


def template(folder: Path) -> Path:
    """What lies in the folder of every call."""
    folder.mkdir()
    write_run(folder / "good", RUN, RECORDS)
    write_run(folder / "other", RUN, RECORDS)
    write_run(
        folder / "broken",
        {"schema_version": RUN["schema_version"], "run_id": "../../escape"},
        RECORDS,
    )
    write_run(folder / "cut", RUN, RECORDS)
    content = (folder / "cut" / JOURNAL).read_bytes()
    (folder / "cut" / JOURNAL).write_bytes(content[100:])
    (folder / "file").write_text("")
    (folder / "text.txt").write_text("x" * 400)
    (folder / "m.toml").write_bytes(MATRIX)
    (folder / "bad.toml").write_bytes(MATRIX.replace(b"[axes]", b"[axes"))
    for name, text in CONFIGS.items():
        (folder / name).write_bytes(text)
    return folder


def parsers() -> dict[str, argparse.ArgumentParser]:
    parser = cli._parser()
    commands = next(
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    return dict(commands.choices)


def values(action: argparse.Action) -> st.SearchStrategy[str]:
    """Good and nasty values of an option or an argument."""
    if action.dest in WRITES:
        return st.sampled_from(OUT)
    good = GOOD_VALUES.get(str(action.metavar), ["1", "2", "8"])
    if action.choices:
        good = [str(choice) for choice in action.choices]
    return (
        st.sampled_from(good)
        | st.sampled_from(NASTY)
        | st.text(st.characters(exclude_characters="\0"), max_size=6)
    )


@st.composite
def command_lines(draw: st.DrawFn, command: str, parser: argparse.ArgumentParser) -> list[str]:
    """Arguments of a command: most of those that it must have, and some others."""
    words: list[str] = []
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    optional = [action for action in actions if action.option_strings and not action.required]
    chosen = draw(st.lists(st.sampled_from(optional), max_size=4)) if optional else []
    needed = [action for action in actions if action.required and draw(st.integers(0, 9))]
    loose = [
        action
        for action in actions
        if not action.option_strings and not action.required and draw(st.booleans())
    ]
    for action in [*chosen, *needed, *loose]:
        if action.option_strings:
            words.append(draw(st.sampled_from(action.option_strings)))
        if action.nargs != 0:
            words += draw(
                st.lists(
                    values(action), min_size=1, max_size=2 if action.nargs in {"+", "*"} else 1
                )
            )
    if not draw(st.integers(0, 9)):
        words.insert(
            draw(st.integers(0, len(words))), draw(st.sampled_from([*NASTY, "--help", "--no-such"]))
        )
    return [command, *words]


def works(*_: Any, **__: Any) -> Any:
    """Takes the place of what would train, measure, simulate or draw."""
    raise ReachedError


@contextlib.contextmanager
def limited(room_bytes: int = ROOM_BYTES) -> Iterator[None]:
    """Let no argument take all of the machine's memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Calls the command line with given arguments, and checks what must be true of every call."""
    folder = tmp_path_factory.mktemp("fuzzed")
    source = template(folder / "template")
    with pytest.MonkeyPatch.context() as patch, limited():
        patch.setattr(launcher, "Launcher", lambda *_, **__: FakeLauncher(works))
        patch.setattr(dtypes, "table", works)
        patch.setattr(monitor, "measure", works)
        patch.setattr(figures, "draw", lambda *_: [])
        patch.setattr(canvas, "save", lambda figure, stem, words: stem)
        patch.setattr("sys.dont_write_bytecode", True)

        def check(arguments: list[str], files: Mapping[str, bytes] = MappingProxyType({})) -> Call:
            ended = call(arguments, folder / "place", source, files)
            assert ended.outside == [], arguments
            assert "Traceback" not in ended.out + ended.err
            assert ended.status in {GOOD, BAD, WRONG, UNCHECKED, None}, ended.err
            lines = [line for line in ended.err.splitlines() if not line.startswith("skipped: ")]
            if ended.status == WRONG and lines[0].startswith("problem: "):
                # One of several files of lint cannot be read; the others are judged.
                assert all(line.partition(": ")[0] in OF_FILES for line in lines), ended.err
            elif ended.status == WRONG:
                assert (
                    len(lines) == 1 and lines[0].startswith("bench: ") and ended.err.endswith("\n")
                ), ended.err
            return ended

        yield check


OF_FILES = {"problem", "unknown", "note", "hint"}
"""What begins the lines of lint that are no findings."""
BOTH = [cell.cell_id for cell in CELLS]
READERS = [
    ["report", "good"],
    ["report", "good", "--rebuild"],
    ["compare", "other", "good"],
    ["compare", "good", "--backend", "ddp-eager", "--against", "reference", "--json"],
    ["check", "good"],
    ["cite", "good", *BOTH],
    ["export", "good", "--format", "csv", "--out", "out"],
    ["export", "good", "--format", "parquet", "--out", "out"],
    ["export", "good", "--format", "pytest-benchmark", "--out", "out.json"],
    ["export", "good", "--table", "trials", "--head", "3"],
    ["run", "--resume", "good"],
]
"""Commands that read a run."""
RESUMED = {
    **{key: value for key, value in RUN.items() if key not in {"machine", "packages"}},
    "code": start.code(CELLS, registry()),
}
"""A run that was begun by this very code, on any machine."""


@st.composite
def hostile_runs(draw: st.DrawFn, manifest: dict[str, Any]) -> tuple[bytes, bytes]:
    """Manifest and journal, of which one or both are not as the bench writes them: edited, or broken."""
    records, edited = RECORDS, draw(st.sampled_from(["manifest", "journal", "both"]))
    if edited != "journal":
        manifest = draw(edits(manifest))
    if edited != "manifest":
        record = draw(edits(RECORDS[1]))
        record.pop("sha256", None)
        records = draw(st.sampled_from([[RECORDS[0], record], [record], [*RECORDS, record]]))
    texts = [json.dumps(manifest).encode(), b"".join(encode(dict(record)) for record in records)]
    if not draw(st.integers(0, 3)):
        which = draw(st.integers(0, 1))
        texts[which] = draw(changed(texts[which]))
    return texts[0], texts[1]


@pytest.mark.parametrize("arguments", READERS, ids=lambda words: " ".join(words[:4]))
def test_no_hostile_run_fails(arguments: list[str], fuzzed: Callable[..., None]) -> None:
    @FORM.examples(8, 400)
    @given(files=hostile_runs(RESUMED if "--resume" in arguments else RUN))
    def fuzz(files: tuple[bytes, bytes]) -> None:
        count(spelled(arguments))
        fuzzed(arguments, {f"good/{MANIFEST}": files[0], f"good/{JOURNAL}": files[1]})

    fuzz()


@pytest.mark.parametrize("arguments", READERS, ids=lambda words: " ".join(words[:4]))
def test_what_is_not_edited_is_read(
    arguments: list[str], tmp_path: Path, fuzzed: Callable[..., None]
) -> None:
    """The fuzzing proves little if every run were refused."""
    write_run(tmp_path / "run", RESUMED if "--resume" in arguments else RUN, RECORDS)
    files = {f"good/{name}": (tmp_path / "run" / name).read_bytes() for name in (MANIFEST, JOURNAL)}
    assert fuzzed(arguments, files).status in {GOOD, BAD, None}


@pytest.mark.parametrize("command", list(chain(*COMMANDS.values())))
def test_no_arguments_fail(command: str, fuzzed: Callable[[list[str]], None]) -> None:
    parser = parsers()[command]

    # The doctor measures for seconds before it answers.
    @FORM.examples(*((3, 60) if command == "doctor" else (12, 700)))
    @given(arguments=command_lines(command, parser))
    def fuzz(arguments: list[str]) -> None:
        count(f"arguments of {command}")
        fuzzed(arguments)

    fuzz()


def test_the_watch_sees_what_is_written_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fuzzing proves nothing if nothing would be noticed."""
    (tmp_path / "template").mkdir()

    def write(*_: Any) -> int:
        (tmp_path / "elsewhere").write_text("x")
        Path("here").write_text("x")
        return 0

    monkeypatch.setattr("tests.faults.sandbox.main", write)
    ended = call(["backends"], tmp_path / "place", tmp_path / "template")
    assert ended.outside == [f"open {(tmp_path / 'elsewhere').resolve()}"]
