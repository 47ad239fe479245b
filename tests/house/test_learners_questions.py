"""QUESTIONS.md has thirty answers. Its commands start, its names exist, its numbers are right."""

from __future__ import annotations

import argparse
import importlib
import math
import re
import shlex
from typing import Any

import pytest

from common import EngineConfig
from common.config import DEFAULT_MAX_MODEL_LEN
from common.displays.demo import parser as demo_parser
from m5_overlap.cuda_graph import graph_sizes
from milestones.__main__ import COMMANDS
from milestones.chain import course_place, find_engine, load
from milestones.course import catalog
from milestones.course.student.measure import MEASUREMENTS, MORE
from tests.conftest import ROOT
from tests.helpers.documented_symbols import OURS, is_path, spans, wrong_in_ours

DOCS = ROOT / "milestones/docs"
PAGE = (DOCS / "QUESTIONS.md").read_text(encoding="utf-8")
SIZING = (ROOT / "milestones/m3_paged/README.md").read_text(encoding="utf-8").partition(
    "\n## Sizing the pool\n"
)[2].partition("\n## ")[0]  # fmt: skip
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
PROSE = FENCED.sub("", PAGE)
QUESTION = re.compile(r"^### (\d+)\. ([^\n]+\?)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
QUESTIONS = {int(number): body for number, _, body in QUESTION.findall(PAGE)}
COMMAND = re.compile(r"`python -m milestones ([^`]+)`")
TIMES = "\N{MULTIPLICATION SIGN}"
CALCULATION = re.compile(r"[\d., ()+*/-]* [+*/-] [\d., ()+*/-]* = [\d,.]+")
TREES = {"vllm": "vllm-project/vllm", "sglang": "sgl-project/sglang"}
# The number of a thread has no other source in the repository.
THREADS = {
    "vllm": "235 550 822 1512 4723 17891 17023 2978 8418 2492 6641 13875 389 18681 2257 3395 6150"
    " 31515 54644 13073 18115 5176 12077 31920 53749 54607 51198 42317 23138 5898 7779 3432 47069"
    " 1069 1128 1334 2657 4449 13661 15598 8439 21278 2607 4266 11345 23144",
    "sglang": "6778 3186 10279 6411",
}


def flat(text: str) -> str:
    return " ".join(text.split())


def tables(text: str) -> list[str]:
    """Return the header and the rows of all tables."""
    return [line for line in text.splitlines() if line.startswith("| ")]


def cells(milestone: str, header: str, first: str) -> list[str]:
    """Return the row of a handout's table that begins with these cells."""
    text = (ROOT / course_place(milestone) / "README.md").read_text(encoding="utf-8")
    lines = text.partition(f"\n{header}")[2].partition("\n\n")[0].splitlines()
    [row] = [line for line in lines if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_there_are_thirty_questions_in_order() -> None:
    assert list(QUESTIONS) == list(range(1, 31))
    assert PAGE.count("\n### ") == 30, "a heading of a question is `### N. question?`"


@pytest.mark.parametrize("number", range(1, 31))
def test_a_question(number: int) -> None:
    """It has an answer, then something to try with a source, then the threads."""
    answer, tried, rest = re.split(r"^(?:Try|Asked in): ", QUESTIONS[number], flags=re.MULTILINE)
    assert 30 < len(answer.split()) < 230 and rest.strip()
    assert COMMAND.search(tried) or OURS.search(flat(tried)) or "](" in tried
    assert COMMAND.findall(flat(tried)) or any(map(is_path, spans(tried))) or ".md" in tried


def wrong_commands(text: str) -> list[str]:
    """Return the commands of a page that would not start, with the reason."""
    wrong = []
    for line in COMMAND.findall(flat(text)):
        name, *words = shlex.split(line)
        options = words[words.index("--") + 1 :] if "--" in words else []
        try:
            parser = argparse.ArgumentParser()
            module = importlib.import_module(f"milestones.{COMMANDS[name][0]}")
            module.add_arguments(parser)
            args = parser.parse_args(words)
            if name == "demo":
                demo_parser("A demo.", requests=1, max_tokens=1).parse_args(options)
            if name == "measure":
                assert args.milestone in MEASUREMENTS
                chosen = [option for option in MORE if getattr(args, option)]
                assert all(MORE[option][0] == args.milestone for option in chosen)
            for word in words:
                if exercise := re.fullmatch(r"(m\d)\.\d", word):
                    known = catalog.load(find_engine(exercise[1], ROOT), ROOT)
                    assert word in {one.id for one in known}
                elif re.fullmatch(r"m\d", word):
                    assert find_engine(word, ROOT)
        except (SystemExit, KeyError, AssertionError, ValueError) as error:
            wrong.append(f"{line}: {error!r}")
    return wrong


def test_the_commands_start() -> None:
    assert len(COMMAND.findall(flat(PROSE))) >= 8
    assert wrong_commands(PROSE) == []


@pytest.mark.parametrize(
    "command",
    [
        "weigh m3",
        "measure m9",
        "measure m3 --static",
        "measure m3 --pages",
        "predict m5.9",
        "demo m3 -- --loud",
    ],
)
def test_a_wrong_command_is_found(command: str) -> None:
    assert len(wrong_commands(f"`python -m milestones {command}`")) == 1


def test_the_tests_that_the_page_names_exist() -> None:
    named = re.findall(r"tests/[\w/]+\.py", PAGE)
    assert named and all((ROOT / test).is_file() for test in named)


def test_the_symbols_exist() -> None:
    """Each file of Python stands behind a symbol. Commands of pytest are no symbols."""
    text = flat(PROSE)
    named = [match[0] for match in OURS.finditer(text)]
    assert len(named) >= 25
    assert [wrong for ours in named for wrong in wrong_in_ours(ours)] == []
    files = [span for span in spans(text) if span.endswith(".py")]
    assert len(files) == len(named), "write `symbol` in `file.py`"


def anchors(page: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_headings() -> None:
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", PAGE)
    assert len(links) >= 15
    for target, anchor in links:
        page = (DOCS / target).read_text(encoding="utf-8") if target else PAGE
        assert anchor in anchors(page), f"{target} has no heading {anchor}"


def test_the_threads_are_those_that_were_collected() -> None:
    found = re.findall(r"\[(\w+)#(\d+)\]\(https://github\.com/([\w/-]+)/issues/(\d+)\)", PAGE)
    assert all(TREES[name] == tree and number == linked for name, number, tree, linked in found)
    for name, numbers in THREADS.items():
        assert {n for of, n, *_ in found if of == name} == set(numbers.split())
        assert not re.search(rf"(?<![\[\w-]){name}#\d", PAGE), "a thread of this tree has a link"


def calculations(text: str) -> list[str]:
    """Return the code that is a calculation with a result."""
    named = (span.replace(TIMES, "*") for span in spans(text))
    return [span for span in named if CALCULATION.fullmatch(span)]


def is_right(calculation: str) -> bool:
    """Return whether the result is right, rounded to the digits that it has."""
    left, _, right = calculation.replace(",", "").rpartition(" = ")
    digits = len(right.partition(".")[2])
    return math.isclose(eval(left), float(right), rel_tol=0, abs_tol=0.501 * 10**-digits)


def test_the_calculations_are_right() -> None:
    found = calculations(flat(PROSE + SIZING))
    assert len(found) >= 20
    assert [calculation for calculation in found if not is_right(calculation)] == []
    assert not is_right("2 * 3 = 7") and not is_right("1,500 / 127 = 11.9")


def test_the_calculations_begin_with_numbers_of_the_code() -> None:
    sizes = graph_sizes(256)
    assert f"gives {len(sizes)} sizes for 256 requests, {sum(sizes):,} rows" in flat(QUESTIONS[23])


def test_the_tables_are_those_of_the_handouts() -> None:
    for number, milestone in ((6, "m3_paged"), (28, "speculative")):
        shown = tables(QUESTIONS[number])
        handout = (ROOT / course_place(milestone) / "README.md").read_text(encoding="utf-8")
        assert len(shown) >= 4 and set(shown) <= set(tables(handout))


def test_numbers_of_sentences_are_those_of_tables() -> None:
    work = {name: cells("m2_continuous", "| | forwards |", name) for name in
            ("static: six requests at a time", "m2, 6 rows")}  # fmt: skip
    static, rows = (int(row[1]) for row in work.values())
    [output] = re.findall(r"(\d+) output tokens together", flat(
        (ROOT / "milestones/m2_continuous/README.md").read_text(encoding="utf-8")
    ))  # fmt: skip
    per_step = [f"{int(output) / steps:.1f}" for steps in (rows, static)]
    assert f"14 requests take {rows} forwards, and {static} in static groups" in flat(QUESTIONS[10])
    assert f"{per_step[0]} tokens in a forward instead of {per_step[1]}" in flat(QUESTIONS[10])
    retractions = cells("m3_paged", "| | forwards |", "m3, 24 pages of 8")[-1]
    assert f"m3 needs {retractions} retraction." in flat(QUESTIONS[13])
    few, many = (cells("m4_radix", "| pages |", pages)[2] for pages in ("24", "64"))
    assert (
        f"with 24 pages, {few} of the prompt tokens are reused, and with 64 pages {many}"
        in flat(QUESTIONS[16])
    )
    dropped, counted = re.findall(
        r"\d+", cells("m5_overlap", "| | steps,", "all end by stop tokens")[-1]
    )
    assert f"drop {dropped} tokens beside {counted} that count" in flat(QUESTIONS[26])
    gap = cells("m5_overlap", "| running |", "16")[4]
    assert f"m4's gap is {gap} µs with 16 requests" in flat(QUESTIONS[27])
    host = cells("m5_overlap", "| running |", "16")[3]
    assert f"with 16 requests, m4's host works for {host} µs" in flat(QUESTIONS[21])
    hybrid = (ROOT / "milestones/electives/hybrid_memory/README.md").read_text(encoding="utf-8")
    for number in ("77,856,768 bytes", "3,168 tokens"):
        assert number in flat(QUESTIONS[17]) and number in flat(hybrid)


def test_the_script_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    """Question 3 has the counters of its last engine."""
    [script] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(script.replace("print(", "stats = engine.stats(); print("), names)
    said = re.findall(r"\d+ \d+", script.partition("# ")[2])
    assert capsys.readouterr().out.splitlines() == said
    stats: Any = names["stats"]
    pages = f"{stats.kv_pages_free} of {stats.kv_pages_total} pages are free"
    assert f"{pages} and {stats.kv_pages_cached} are cached" in flat(QUESTIONS[3])


def test_a_sum_in_another_order() -> None:
    [(code, said)] = re.findall(r'`python -c "print\((.+?)\)"` prints `(\w+)`', QUESTIONS[19])
    assert str(eval(code)) == said


def test_the_pool_of_the_handout() -> None:
    """The largest pool with defaults follows from the bytes of a page, which are above it."""
    config = EngineConfig(device="cpu")
    pages = config.max_num_seqs * DEFAULT_MAX_MODEL_LEN // config.page_size
    [page] = re.findall(r"page of 16 tokens `16 \S 46,080 = ([\d,]+)`", flat(SIZING))
    gigabytes = int(page.replace(",", "")) * pages / 1e9
    told = f"{config.max_num_seqs} requests of {DEFAULT_MAX_MODEL_LEN:,} tokens"
    assert f"{told}, the pool is at most {pages:,} pages" in flat(SIZING)
    assert f"which are {gigabytes:.1f} GB" in flat(SIZING)
    share = load("m3_paged", "kv_pool").FREE_MEMORY_SHARE
    assert f"from {gigabytes / share:.1f} GB of free memory on a GPU" in flat(SIZING)
    assert f"from {gigabytes / (share / 2):.1f} GB on a CPU" in flat(SIZING)
