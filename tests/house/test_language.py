"""Public text names the subjects of its sentences, and says "milestone" and not "rung".

"Who reads a prefix locks it" makes a student guess the subject. "A request locks the prefix that it
reads" says it. This test finds the words for people that have stood for requests, pages and steps.
It reads pages, docstrings, comments and messages, and the names of tests and mutants. It does not
read other code and quotations.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from itertools import accumulate

import pytest

from tests.conftest import ROOT

SUFFIXES = (".py", ".md", ".toml", ".html", ".c", ".h", ".css", ".js", ".in", ".patch")
WORDS = re.compile(r"\b(?:who(?:ever|m|se)?|(?:no|some|any|every)bodys?|rungs?)\b", re.IGNORECASE)
PEOPLE = (
    r"(?:student|reader|person|instructor|lecturer|teacher|author|engineer|user|colleague|beginner"
    r"|developer|programmer|researcher|contributor|maintainer|speaker|listener)s?"
    r"|people|someone|anyone|everyone|those|the\s+ones?"
)
ABOUT_PEOPLE = rf"(?i)\b(?:{PEOPLE}),?\s+(?:(?:for|from|of|to|with)\s+)?(?:who|whom|whose)\b"

# Sentences that may keep such a word: (file, words of the sentence), and the reason.
ALLOWED: dict[tuple[str, str], str] = {
    (f"{milestone}/demo/agents.py", "name who might"): "a prompt: its words are tokens of figures"
    for milestone in ("m4_radix", "m5_overlap")
}

CODE = "\0"  # in the place of code, so that no sentence goes across it
# Backticks and quotation marks quote, up to the end of a paragraph.
QUOTED = "|".join(rf"{a}(?:[^{b}\n\0]|\n(?!\s*\n))*{b}" for a, b in ("``", '""', "“”"))
SOURCE = re.compile(
    r"#[^\n]*|(?P<prefix>[rbuf]{0,2})(?P<quote>\"\"\"|'''|\"|')(?P<text>(?:\\.|.)*?)(?P=quote)",
    re.IGNORECASE | re.DOTALL,
)
FENCED = re.compile(r"^ *(?P<fence>```+)(?P<kind>\w*).*?^ *(?P=fence) *$", re.MULTILINE | re.DOTALL)
TEXT_BLOCKS = ("boxes", "figure", "gantt", "keys", "sequence")  # a deck shows the text in these

Reader = Callable[[str], str]


def blank(pattern: str, text: str) -> str:
    """Replace each match by spaces. Line breaks stay, so that line numbers stay."""
    return re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def hidden(code: str) -> str:
    return re.sub(r"\S", CODE, code)


def markdown(text: str) -> str:
    """Return a page without code, block quotes, quotations and the targets of links."""
    text = FENCED.sub(lambda b: b[0] if b["kind"] in TEXT_BLOCKS else hidden(b[0]), text)
    for pattern in (r"(?m)^ *(?:```.*|>.*)$", r"\]\([^)\s]*\)", r"\{\{.*?\}\}", r"<[^>\n]*>"):
        text = blank(pattern, text)
    return blank(QUOTED, text)


def toml(text: str) -> str:
    """Return the comments and strings of a TOML file. Marks of a quotation are escaped there."""
    return blank(QUOTED, re.sub(r'(?<!\\)"', CODE, text))


def patch(text: str) -> str:
    """Return the heads of patches, which describe mistakes. The rest is code."""
    return blank(QUOTED, re.sub(r"(?m)^[-+ @].*$", lambda line: hidden(line[0]), text))


def python(source: str, is_wanted: Callable[[int], bool] = lambda start: True) -> str:
    """Return the comments and strings of a source, each in its place. Code is `CODE`.

    A string without spaces is a name. `is_wanted` takes the place where a string begins.
    """
    parts, end = [], 0
    for token in SOURCE.finditer(source):
        parts.append(hidden(source[end : token.start()]))
        end, text = token.end(), token["text"]
        if text is None:
            parts.append(blank("^#+", token[0]))
        elif len(text.split()) > 1 and is_wanted(token.start()):
            inside = blank(r"\{[^{}]*\}", text) if "f" in token["prefix"].lower() else text
            marks = " " * len(token["quote"])
            parts += [" " * len(token["prefix"]), marks, inside.replace(r"\n", "  "), marks]
        else:
            parts.append(hidden(token[0]))
    return blank(QUOTED, "".join(parts))


def python_test(source: str) -> str:
    """Return the comments, docstrings and assert messages of a test.

    Other strings of a test are inputs, or texts that the project prints. These are checked where
    the project prints them.
    """
    said: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and node.msg is not None:
            said.append(node.msg)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            said += [x.value for x in node.body[:1] if isinstance(x, ast.Expr)]
    lines = source.split("\n")
    starts = [0, *accumulate(len(line) + 1 for line in lines)]

    def offset(line: int | None, column: int | None) -> int:
        assert line is not None and column is not None
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    spans = [(offset(x.lineno, x.col_offset), offset(x.end_lineno, x.end_col_offset)) for x in said]
    return python(source, lambda start: any(first <= start < last for first, last in spans))


def reader_of(path: str) -> Reader:
    """Return the function that keeps what people read in such a file."""
    if path.startswith("tests/"):
        return python_test
    readers: dict[str, Reader] = {
        ".py": python, ".md": markdown, ".md.in": markdown, ".toml": toml, ".patch": patch,
    }  # fmt: skip
    return next((read for suffix, read in readers.items() if path.endswith(suffix)), str)


def problems(path: str, text: str) -> Iterator[str]:
    """Return each sentence of a file that has one of the `WORDS`, as `path:line: sentence`."""
    if not WORDS.search(text):
        return
    said = blank(ABOUT_PEOPLE, reader_of(path)(text))
    for file, phrase in ALLOWED:
        if file == path:
            said = blank(re.escape(phrase), said)
    for word in WORDS.finditer(said):
        first, last = max(0, word.start() - 200), word.end() + 200
        before = re.split(r"[.?!]\s|\n\s*\n|[|\0]", said[first : word.start()])[-1]
        after = re.split(r"(?<=[.?!])\s|\n\s*\n|[|\0]", said[word.start() : last])[0]
        line = said.count("\n", 0, word.start()) + 1
        yield f"{path}:{line}: {' '.join((before + after).split())}"


def names(path: str, text: str) -> list[str]:
    """Return the names of tests or of mutants in a file: students read both."""
    if path.endswith(".patch"):
        return re.findall(r"(?m)^Mutant: (.*)", text)
    if not path.startswith("tests/"):
        return []
    return re.findall(r"(?m)^\s*(?:async )?def (test_\w+)", text)


def is_plain(name: str) -> bool:
    return not WORDS.search(blank(ABOUT_PEOPLE, name.replace("_", " ")))


def public_files() -> list[str]:
    """Return the paths of the repository's texts, also of those that are not committed yet."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [p for p in listed.splitlines() if p.endswith(SUFFIXES) and (ROOT / p).is_file()]


def test_sentences_name_their_subjects() -> None:
    """Public text says "a request" or "no page" and not "who" or "nobody"; and "milestone"."""
    files = public_files()
    assert len(files) > 100
    found = [x for path in files for x in problems(path, (ROOT / path).read_text("utf-8"))]
    if found:
        listed = "\n".join(found)
        pytest.fail(f"{len(found)} words to replace:\n{listed}", pytrace=False)


def test_names_of_tests_name_their_subjects() -> None:
    found = [
        f"{path}: {name}"
        for path in public_files()
        for name in names(path, (ROOT / path).read_text("utf-8"))
    ]
    assert len(found) > 1000
    if bad := [name for name in found if not is_plain(name)]:
        pytest.fail("names to replace:\n" + "\n".join(bad), pytrace=False)


def test_exceptions_are_in_use() -> None:
    """Each exception belongs to a sentence that is there, and has a reason."""
    assert all(ALLOWED.values())
    for path, phrase in ALLOWED:
        assert phrase in (ROOT / path).read_text("utf-8"), f"remove {phrase!r} of {path}"


DOC = '"""Pages.\n\n{}\n"""\n'


@pytest.mark.parametrize(
    ("path", "text", "line"),
    [
        ("m4_radix/a.py", DOC.format("Who reads a prefix locks it."), 3),
        ("m4_radix/a.py", 'x = 1\nraise ValueError(f"{x}: nobody is retracted")\n', 2),
        ("m4_radix/a.py", "x = 1  # of two requests, the one\ny = 2  # who waits\n", 2),
        ("m4_radix/a.py", "# whoever ends\n", 1),
        ("m4_radix/a.py", "'''a request\nwhose page is free'''", 2),
        ("tests/test_a.py", 'def test_a() -> None:\n    """Nobody waits."""\n', 2),
        ("tests/test_a.py", 'assert "é" == x, f"I3: {x} is held by somebody"\n', 1),
        ("README.md", "A `page`\nand anybody\n", 2),
        ("README.md", '# Pages\n\nSay "one\n\nwho waits" twice.\n', 5),
        ("README.md", "```python\nwho = 1\n```\n\nEach rung\n", 5),
        ("slides/decks/a.md", "```keys\nstall: computed for nobody\n```\n", 2),
        ("milestones/a/DELTA.toml", '[added]\n"a.py" = "who owns which row"\n', 2),
        ("milestones/a/mutants.patch", "--- a/a.py\n-    # x\n\nMistake: Everybody waits.\n", 4),
        ("common/a.c", "int x; /* tokens whose page is full */\n", 1),
        ("common/a.html", '<b>\n"Nobody runs."</b>\n', 2),
    ],
)
def test_a_bad_sentence_is_found(path: str, text: str, line: int) -> None:
    (found,) = problems(path, text)
    assert found.startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("m4_radix/a.py", DOC.format("A student who reads this, and people for whom it is new.")),
        (
            "m4_radix/a.py",
            DOC.format("A request locks the prefix that it reads. The one\nwho asks."),
        ),
        ("m4_radix/a.py", DOC.format('The model is asked "who are you?", or `who` is run.')),
        (
            "m4_radix/a.py",
            'def who(rung: str) -> str:\n    return say("rung", f"{rung} is here")\n',
        ),
        ("tests/test_a.py", 'assert shown == "Nobody runs here.", "a request is shown"\n'),
        (
            "README.md",
            "Some say\n\n> Nobody knows.\n\nAsk [them](who.md) “whose page?” {{rung.x}}.\n",
        ),
        ("README.md", "```text\nnobody runs\n```\n"),
        ("milestones/a/DELTA.toml", '"a.py" = "the answer to \\"who runs\\" is printed"\n'),
        ("milestones/a/mutants.patch", "Mistake: None.\n\n--- a/a.py\n-    # who waits\n"),
        ("data.json", "{}"),
    ],
)
def test_a_good_sentence_passes(path: str, text: str) -> None:
    assert not list(problems(path, text))


@pytest.mark.parametrize(
    ("path", "text", "is_good"),
    [
        ("tests/test_a.py", "def test_who_runs() -> None:", False),
        ("tests/test_a.py", "async def test_padding_is_nobodys_token(x: int) -> None:", False),
        ("tests/test_a.py", "def test_a_page_whose_end_is_full(", False),
        ("m5_overlap/mutants.patch", "Mutant: forgets_who_runs\n", False),
        ("tests/test_a.py", "def test_a_whole_step(", True),
        ("tests/test_a.py", "def test_a_student_who_asks_is_answered(", True),
        ("m5_overlap/mutants.patch", "Mutant: forgets_all\n", True),
    ],
)
def test_names_are_checked(path: str, text: str, is_good: bool) -> None:
    (name,) = names(path, text)
    assert is_plain(name) == is_good
