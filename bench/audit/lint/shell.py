"""Shell scripts as their simple commands, with the variables that a script sets itself.

Nothing is executed. A variable is known where the script has set it on every way to the command.
What the caller, a branch, a loop or another program sets stays ``${NAME}``: a value that is not
known.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

MAX_WORDS = 20_000
"""Words of a script, and of those inside it, that are looked at."""
MAX_LENGTH = 50_000
"""Characters of a word, or items of an array."""
MAX_DEPTH = 100
"""Compound commands inside each other."""
MAX_SCRIPTS = 10
"""Scripts inside each other."""
WORD = 50
"""Characters of a script inside another that count as a word of it."""
MAX_DIGITS, MAX_CALCULATION = 20, 1000
"""Characters of a number, and of what is calculated."""
LARGEST = 2**53
PRINTED = "${command}"
"""What a command prints, which only the shell knows."""
UNKNOWN = re.compile(r"\$\{[^{}]*\}")
"""What stands in a word for a value that the script does not tell."""
CONTINUED, ARRAY = "\0", "\1"
"""The end of a line that the next one continues; the end of an item of an array."""
NAME = re.compile(r"[A-Za-z_]\w*")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+)?=")
ANY_ASSIGNMENT = re.compile(r"(?<![\w$-])([A-Za-z_]\w*)\+?=")
PARAMETER = re.compile(r"([A-Za-z_]\w*)(\[(?:[@*]|\d+)\])?(?::?[-=?].*)?", re.DOTALL)
"""Inside ``${...}``: a variable or items of an array, and what to do if it is not set."""
REDIRECTION = re.compile(r"(?:\d*|&)(?:<<<|<<-?|<>|>>|>\||[<>])(?!\()(?:(&[\d-]+)|&)?")
QUOTATION = re.compile(r"\$?['\"]")
PLACEHOLDER = re.compile(r"<[A-Za-z][^<>\n;|&\0]*>(?=\s|\0|$)")
"""What the reader of a script is to fill in, which the shell would take for two redirections."""
OPERATOR = re.compile(r";;&|;;|;&|&&|\|\||\|&|[;|&()]")
CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%]?=(?!=))|(?:\+\+|--)\s*([A-Za-z_]\w*)")
"""A variable that an arithmetic command sets."""
DECLARE = {"export", "local", "declare", "readonly", "typeset"}
SETS = {"read", "mapfile", "readarray", "unset", "getopts", "let", "for", "select"}
"""Commands whose arguments are variables that they set."""
READS = {"source", "."}
"""Commands that run another script here, which may set any variable."""
ACTIVATES = r"(\S*/)?activate( .*)?"
"""A script that activates a virtual environment, and sets no variable of ours."""
SHELLS = {"bash", "sh", "sbatch"}
OPENS = {
    **dict.fromkeys(("for", "while", "until", "select"), "done"),
    "if": "fi",
    "case": "esac",
    "{": "}",
}
"""What begins a compound command, and what ends it."""
ENDS = {*OPENS.values()}
BRANCHES = {"elif", "else"}
BESIDE = {"then", "do", "!", "time"}
"""Words before a command that say nothing of it."""
ARITHMETIC = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
Value = str | tuple[str, ...] | None
"""Of a variable: text, an array, or None where it is not known."""


@dataclass(frozen=True)
class Word:
    """A word of a command, with its line."""

    text: str
    line: int


@dataclass
class _Compound:
    """A compound command that has begun; what it sets is not known behind it."""

    end: str
    before: dict[str, Value]
    is_group: bool
    """Whether it runs here and once, so that what it sets is known."""
    changed: set[str] = field(default_factory=set)


@dataclass
class _Pieces:
    """The words that are read in one place: one, or as many as a variable holds."""

    found: list[str] = field(default_factory=list)
    last: str = ""
    is_there: bool = False
    """Whether the last word is one though it may be empty."""

    def add(self, text: str) -> None:
        self.last += text
        self.is_there = True
        if len(self.last) > MAX_LENGTH:
            raise _TooLongError

    def expand(self, value: str | tuple[str, ...], *, is_quoted: bool) -> None:
        """Add what a variable holds, split as the shell does."""
        if isinstance(value, str):
            if is_quoted or ASSIGNMENT.match(self.last):
                self.add(value)
                return
            if value[:1].isspace():
                self._end()
        items = value.split() if isinstance(value, str) else value
        for place, item in enumerate(items):
            if place:
                self._end()
            self.add(item)
        if isinstance(value, str) and value[-1:].isspace():
            self._end()

    def _end(self) -> None:
        if self.is_there:
            self.found.append(self.last)
            if len(self.found) > MAX_WORDS:
                raise _TooLongError
        self.last, self.is_there = "", False

    def words(self) -> list[str]:
        self._end()
        return self.found


class _UnendedError(ValueError):
    """The script ends within a quotation or a substitution."""


class _TooLongError(ValueError):
    """A word, a value, or the nesting is longer than in any script for people."""


@dataclass
class _Limits:
    """How much more of a script, and of those inside it, is looked at."""

    words: int = MAX_WORDS
    scripts: int = MAX_SCRIPTS


def simple_commands(text: str) -> Iterator[list[Word]]:
    """The simple commands of a script, in its order, with what is known of their words.

    A here-document that is a script follows the command that reads it.
    """
    text = re.sub(r"\\[ \t]+\n", " \\\n", text.replace("\r", ""))
    yield from _Script(text.replace("\\\n", CONTINUED), {}, 1, _Limits()).commands()


class _Script:
    """A script, read once from its beginning to its end."""

    def __init__(self, text: str, values: dict[str, Value], line: int, limits: _Limits) -> None:
        self.text, self.values, self.line = text, values, line
        self.place = 0
        self.compounds: list[_Compound] = []
        self.documents: list[tuple[str, bool]] = []
        """Ends of the here-documents that the next lines hold, and whether variables expand."""
        self.words: list[Word] = []
        self.joined_by = ""
        """The operator before this command."""
        self.subshells: list[tuple[int, dict[str, Value]]] = []
        """Of each ``(`` that is open: how many compound commands were, and the values before it."""
        self.begins_function = False
        self.limits = limits
        times = Counter(ANY_ASSIGNMENT.findall(text))
        self.set_often = {name for name, number in times.items() if number > 1}

    def commands(self) -> Iterator[list[Word]]:
        try:
            while self.place < len(self.text) and self.limits.words > 0:
                yield from self._next()
        except (_UnendedError, _TooLongError, RecursionError):
            return
        if self.limits.words > 0:
            yield from self._ended("")

    def _next(self) -> Iterator[list[Word]]:
        """Read a blank, a comment, an operator, a redirection or a word."""
        here = self.text[self.place]
        redirection = REDIRECTION.match(self.text, self.place)
        separator = OPERATOR.match(self.text, self.place)
        if here == "\n":
            self._step()
            readers = [word.text for word in self.words]
            yield from self._ended("\n")
            yield from self._documents(readers)
        elif here in (" ", "\t", CONTINUED):
            self._step()
        elif here == "#":
            self._comment()
            yield from self._ended("\n")
        elif placeholder := PLACEHOLDER.match(self.text, self.place):
            self.place = placeholder.end()
            self._keep([placeholder.group()], self.line)
        elif redirection:
            self._redirected(redirection)
        elif self.text.startswith("((", self.place):
            self._arithmetic()
        elif separator:
            self.place = separator.end()
            yield from self._ended(separator.group())
        else:
            self._keep(*self._word())

    def _comment(self) -> None:
        """Skip a comment, which no backslash continues."""
        while self.place < len(self.text) and self.text[self.place] not in ("\n", CONTINUED):
            self.place += 1
        if self.text.startswith(CONTINUED, self.place):
            self._step()

    def _arithmetic(self) -> None:
        """Skip ``((...))``; what it sets is not known."""
        start = self.place
        self._skip_to(")", "(")
        for names in CHANGED.findall(self.text[start : self.place]):
            self._assign("".join(names), None)

    def _step(self) -> None:
        if self.text[self.place] in ("\n", CONTINUED):
            self.line += 1
        self.place += 1

    def _redirected(self, found: re.Match[str]) -> None:
        """Leave out where output goes and input comes from; remember a here-document."""
        self.place = found.end()
        if found.group(1) is not None:  # to a descriptor
            return
        while self.text[self.place : self.place + 1] in (" ", "\t", CONTINUED):
            self._step()
        start = self.place
        words, _ = self._word()
        is_document = found.group().lstrip("0123456789").rstrip("-") == "<<"
        if is_document and words:
            expands = not re.search(r"['\"\\]", self.text[start : self.place])
            self.documents.append((words[0], expands))

    def _documents(self, reader: Sequence[str]) -> Iterator[list[Word]]:
        """The commands of here-documents that are scripts; the others are left out."""
        for end, expands in self.documents:
            line, lines = self.line, []
            while self.place < len(self.text):
                stop = re.compile(f"\n|{CONTINUED}|$").search(self.text, self.place)
                assert stop is not None
                each = self.text[self.place : stop.start()]
                self.place = max(stop.end(), self.place + 1)
                self.line += 1
                if each.strip() == end:
                    break
                lines.append(each + stop.group())
            body = "".join(lines)
            runs = any(word.rpartition("/")[2] in SHELLS for word in reader)
            if runs or body.startswith("#!"):
                values = dict(self.values) if expands else {}
                yield from self._inside(body, values, line)
        self.documents = []

    def _inside(self, text: str, values: dict[str, Value], line: int) -> Iterator[list[Word]]:
        """The commands of a script inside this one; none if it is too deep in others."""
        limits = self.limits
        if not limits.scripts:
            return
        limits.scripts -= 1
        limits.words -= len(text) // WORD
        yield from _Script(text, values, line, limits).commands()
        limits.scripts += 1

    def _keep(self, texts: Sequence[str], line: int) -> None:
        """Add the words of one place to the command; the first may open or close another."""
        self.limits.words -= len(texts)
        for text in texts:
            if text == "{" and self.words and self.words[0].text == "function":
                self.begins_function, self.words = True, []
            if self.words or not self._is_grammar(text):
                self.words.append(Word(text, line))

    def _is_grammar(self, word: str) -> bool:
        """Whether a first word only orders commands; opens or closes what it says."""
        if word in OPENS:
            self._open(word)
            return word not in SETS and word != "case"
        if word in BRANCHES:
            self._branch()
        elif self.compounds and word == self.compounds[-1].end:
            self._close()
        else:
            return word in BESIDE or word in ENDS
        return True

    def _open(self, word: str) -> None:
        is_function = word == "{" and self.begins_function
        is_group = word == "{" and not is_function and self.joined_by not in {"&&", "||"}
        self._need_depth(self.compounds)
        compound = _Compound(OPENS[word], dict(self.values), is_group)
        if is_function:  # it may run behind any of the assignments
            for name in self.set_often & set(self.values):
                self.values[name] = None
        self.begins_function = False
        self.compounds.append(compound)

    def _branch(self) -> None:
        """Another branch begins: it knows what the compound command knew."""
        if self.compounds:
            top = self.compounds[-1]
            top.changed |= {
                name for name, value in self.values.items() if top.before.get(name, "") != value
            }
            self.values = dict(top.before)

    def _close(self) -> None:
        compound = self.compounds[-1]
        if not compound.is_group:
            self._branch()
            for name in compound.changed:
                self.values[name] = None
        self.compounds.pop()

    def _ended(self, by: str) -> Iterator[list[Word]]:
        """The command that ends here, after what it sets; none if it has no words."""
        words, self.words = self.words, []
        if by == ")" and not self._ends_subshell():
            words = []  # a pattern of case
        names_function = by == "(" and self.text.startswith(")", self.place)
        if words and (names_function or words[0].text == "function"):
            self.begins_function, words = True, []
        if words and words[0].text == "eval":
            text = " ".join(word.text for word in words[1:])
            yield from self._inside(text, dict(self.values), words[0].line)
        elif words:
            self._set(words)
            yield words
        if by in {";;", ";&", ";;&"}:
            self._branch()
        self._subshell(by)
        self.joined_by = by

    def _subshell(self, by: str) -> None:
        """Begin or end ``(...)``, which sets nothing for what follows it."""
        if by == "(":
            self.limits.words -= 1
            self._need_depth(self.subshells)
            self.subshells.append((len(self.compounds), dict(self.values)))
        elif by == ")" and self._ends_subshell():
            _, self.values = self.subshells.pop()

    def _ends_subshell(self) -> bool:
        """Whether a ``)`` here is none of a pattern of case."""
        return bool(self.subshells) and self.subshells[-1][0] == len(self.compounds)

    def _set(self, words: Sequence[Word]) -> None:
        """Keep what a command sets."""
        texts = [word.text for word in words]
        if texts[0] in SETS:
            last = 2 if texts[0] in {"for", "select"} else len(texts)
            for text in texts[1:last]:
                self._assign(text.partition("=")[0].strip("+-*/"), None)
            return
        if texts[0] in READS and not re.fullmatch(ACTIVATES, " ".join(texts[1:])):
            self.values = dict.fromkeys(self.values)
            return
        if texts[0] in DECLARE:
            texts = texts[1:]
        elif not all(ASSIGNMENT.match(text) for text in texts):
            return  # they are of the environment of one command
        for text in texts:
            if found := ASSIGNMENT.match(text):
                self._assign_text(found, text[found.end() :])

    def _assign_text(self, found: re.Match[str], text: str) -> None:
        name, item, more = found.groups()
        value: Value = text
        if text.startswith(ARRAY):
            value = tuple(text.split(ARRAY)[1:-1])
        before = self.values.get(name)
        if item is not None:
            value = None
        elif more:
            if before is None or isinstance(before, tuple) is not isinstance(value, tuple):
                value = None
            else:
                value = before + value  # type: ignore[operator]
        self._assign(name, value)

    def _assign(self, name: str, value: Value) -> None:
        if self.joined_by in {"&&", "||"} and self.values.get(name, "") != value:
            value = None  # it may not be reached
        if value is not None and len(value) > MAX_LENGTH:
            value = None
        if NAME.fullmatch(name):
            self.values[name] = value

    def _word(self) -> tuple[list[str], int]:
        """Read a word; it is several, or none, where a variable holds as many."""
        line, pieces = self.line, _Pieces()
        while self.place < len(self.text):
            here = self.text[self.place]
            if here == "(" and ASSIGNMENT.fullmatch(pieces.last):
                self._array(pieces)
            elif self.text.startswith(("<(", ">("), self.place):
                self._skip_to(")", "(")
                pieces.add(PRINTED)
            elif here in " \t\n;|&()<>":
                break
            elif quotation := QUOTATION.match(self.text, self.place):
                self.place = quotation.end() - 1
                self._quoted(pieces)
            elif here in "$`":
                self._expansion(pieces, is_quoted=False)
            elif here == "\\":
                if self.place + 1 < len(self.text):
                    pieces.add(self.text[self.place + 1])
                self.place += 2
            else:
                if here != CONTINUED:
                    pieces.add(here)
                self._step()
        return pieces.words(), line

    def _quoted(self, pieces: _Pieces) -> None:
        if self.text[self.place] == '"':
            self._double_quoted(pieces)
        else:
            pieces.add(self._single_quoted())

    def _array(self, pieces: _Pieces) -> None:
        """Read ``(...)`` behind ``NAME=``."""
        self.place += 1
        items: list[str] = []
        while not self.text.startswith(")", self.place):
            self._need()
            if self.text[self.place] in (" ", "\t", "\n", CONTINUED):
                self._step()
            elif self.text[self.place] == "#":
                self._comment()
            else:
                before = self.place
                words, _ = self._word()
                items += words
                if len(items) > MAX_WORDS:
                    raise _TooLongError
                if self.place == before:
                    self.place += 1
        self.place += 1
        pieces.add("".join(f"{ARRAY}{item}" for item in items) + ARRAY)

    def _need_depth(self, opened: Sequence[object]) -> None:
        if len(opened) >= MAX_DEPTH:
            raise _TooLongError

    def _need(self) -> None:
        if self.place >= len(self.text):
            raise _UnendedError

    def _single_quoted(self) -> str:
        end = self.text.find("'", self.place + 1)
        if end < 0:
            raise _UnendedError
        text = self.text[self.place + 1 : end]
        self.line += text.count("\n") + text.count(CONTINUED)
        self.place = end + 1
        return text.replace(CONTINUED, " ")

    def _double_quoted(self, pieces: _Pieces) -> None:
        self.place += 1
        pieces.add("")
        while not self.text.startswith('"', self.place):
            self._need()
            here = self.text[self.place]
            if here in "$`":
                self._expansion(pieces, is_quoted=True)
            elif here == "\\":
                escaped = self.text[self.place + 1 : self.place + 2]
                if escaped not in tuple('$`"\\'):
                    escaped = here + escaped
                pieces.add(escaped)
                self.place += 2
            else:
                if here != CONTINUED:
                    pieces.add(here)
                self._step()
        self.place += 1

    def _expansion(self, pieces: _Pieces, *, is_quoted: bool) -> None:
        """Read what begins with ``$`` or a backtick, and add what is known of it."""
        text, here = self.text, self.place
        name = NAME.match(text, here + 1)
        value: Value
        if text[here] == "`":
            self.place = text.find("`", here + 1) + 1
            if not self.place:
                raise _UnendedError
            value = PRINTED
        elif text.startswith("$((", here):
            self._skip_to(")", "(")
            value = self._calculated(text[here + 3 : self.place - 2])
        elif text.startswith("$(", here):
            self._skip_to(")", "(")
            value = PRINTED
        elif text.startswith("$[", here):
            self._skip_to("]", "[")
            value = self._calculated(text[here + 2 : self.place - 1])
        elif text.startswith("${", here):
            self._skip_to("}", "{")
            value = self._parameter(text[here + 2 : self.place - 1])
        elif name:
            self.place = name.end()
            value = self._variable(name.group())
        elif text[here + 1 : here + 2] in tuple("0123456789@*#?$!-"):
            self.place += 2
            value = f"${{{text[here + 1]}}}"
        else:
            self.place += 1
            value = "$"
        self.line += text.count("\n", here, self.place) + text.count(CONTINUED, here, self.place)
        pieces.expand(value, is_quoted=is_quoted)

    def _skip_to(self, end: str, start: str) -> None:
        """Go behind the end of what starts here, over what is quoted or nested in it."""
        depth, quote = 0, ""
        for place in range(self.place, len(self.text)):
            here = self.text[place]
            if self.text[place - 1] == "\\":
                continue
            if quote:
                if here == quote:
                    quote = ""
            elif here in "'\"":
                quote = here
            elif here == start:
                depth += 1
            elif here == end:
                depth -= 1
                if not depth:
                    self.place = place + 1
                    return
        raise _UnendedError

    def _variable(self, name: str) -> str | tuple[str, ...]:
        value = self.values.get(name)
        if isinstance(value, tuple):
            value = "".join(value[:1])
        if value is None:
            return f"${{{name}}}"
        return value

    def _parameter(self, inside: str) -> str | tuple[str, ...]:
        """The value of ``${...}``."""
        found, named = PARAMETER.fullmatch(inside), NAME.search(inside)
        name, item, known = "@", "", None
        if found is not None:
            name, item = found.groups(default="")
            known = self._items(name, item)
        elif named is not None:
            name = named.group()
        has_alternative = inside != name + item  # what holds for an empty one is not read
        if known is None or (has_alternative and not known):
            return f"${{{name}{item}}}"
        return known

    def _items(self, name: str, item: str) -> Value:
        """The items of an array, or the text of a variable; None if it is not known."""
        value = self.values.get(name)
        if isinstance(value, str):
            return value if item in {"", "[0]"} else None
        if value is None or item in {"[@]", "[*]"}:
            return value
        place = 0
        if item:
            place = int(item[1:-1])
        return "".join(value[place : place + 1])

    def _calculated(self, text: str) -> str:
        """The value of ``$((...))``, if its numbers are known."""

        def value(found: re.Match[str]) -> str:
            number = str(self._variable(found.group(1)))
            if len(number) > MAX_DIGITS:
                raise _TooLongError
            return number

        if len(text) > MAX_CALCULATION:
            return PRINTED
        try:
            filled = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", value, text.replace(CONTINUED, " "))
            number = _number(ast.parse(filled.strip(), mode="eval").body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return PRINTED
        return str(number)


def _number(tree: ast.expr) -> int:
    """The value of integer arithmetic, as the shell has it. Raises ValueError for anything else."""
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return tree.value
    if isinstance(tree, ast.BinOp) and type(tree.op) in ARITHMETIC:
        left, right = _number(tree.left), _number(tree.right)
        found: int = ARITHMETIC[type(tree.op)](left, right)
        if min(left, right) >= 0 and abs(found) <= LARGEST:  # below 0, division differs
            return found
    raise ValueError
