"""A student's tree: what is cut from it, what stays, and that no part of a solution is left."""

from __future__ import annotations

import argparse
import ast
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from milestones.chain import ELECTIVES, above, below, chain, course_place, milestones, place
from milestones.course import catalog
from milestones.course.diff import lesson_html
from milestones.course.diff.lesson import lesson
from milestones.course.release import command as release
from milestones.course.release import cut
from milestones.course.release.imports import without_unused_imports
from milestones.course.release.student_tests import naming, pruned
from milestones.staff.maintain import one_step
from tests.conftest import ROOT
from tests.helpers import mini_course

DOCS = "milestones/docs"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    return mini_course.make(tmp_path / "course")


def texts(tree: Path) -> dict[str, str]:
    """Return every text file of a tree by its path, except git's own files."""
    return {
        path.relative_to(tree).as_posix(): path.read_text("utf-8")
        for path in sorted(tree.rglob("*"))
        if path.is_file() and ".git" not in path.parts and path.suffix != ".png"
    }


def test_a_body_is_cut_and_nothing_else(tree: Path) -> None:
    source = (tree / "m2_mini/shelf.py").read_text()
    assert (
        '''
    # A student sees the comment above a definition.
    def put(self, item: int) -> int:
        """Add an item, and return how many there are now.

        Raises `ValueError` when there is no room.
        """
        raise NotImplementedError(
            "m2.1: Shelf.put is yours to write; see "
            "milestones/m2_mini/README.md#m21-put-it-there"
        )

    def total(self) -> float:
'''
        in source
    )
    assert source.count("raise NotImplementedError") == 3
    assert "self.items: deque[int] = deque()" in source  # the constructor is in no exercise


def test_what_only_solutions_used_goes(tree: Path) -> None:
    source = (tree / "m2_mini/shelf.py").read_text()
    assert "_append" not in source and "import math" not in source
    assert "from collections import deque" in source  # the code that stays uses it
    assert "ROOM = 3  # items" in source  # a public constant is a parameter


@pytest.mark.parametrize("place", ["milestones/m2_mini/README.md", "tests/exercises/test_m2_1.py"])
def test_a_helper_that_the_student_is_told_of_stays(
    course: Path, tmp_path: Path, place: str
) -> None:
    path = course / place
    path.write_text(path.read_text() + "\n# Use `_append`.\n")
    done = release.release("m2_mini", tmp_path / "student", course)
    assert "def _append" in (tmp_path / "student/m2_mini/shelf.py").read_text()
    assert done.removed == ()


def test_nothing_of_a_solution_is_in_the_tree(tree: Path) -> None:
    shelf = set(re.split(r"\n+", mini_course.SHELF))
    left = set((tree / "m2_mini/shelf.py").read_text().split("\n"))
    secret = {line.strip() for line in shelf - left if len(line.strip()) > 12}
    assert secret
    for name, text in texts(tree).items():
        if name != "milestones/m2_mini/exercises.toml":  # a hint may hold a line of the solution
            assert not [line for line in secret if line in text], name


def test_the_tree_has_one_commit_and_nothing_above(tree: Path) -> None:
    git = ["git", "-C", str(tree)]
    log = subprocess.run([*git, "log", "--oneline"], capture_output=True, text=True).stdout
    status = subprocess.run([*git, "status", "--short"], capture_output=True, text=True).stdout
    assert len(log.splitlines()) == 1 and status == ""
    names = texts(tree)
    assert not [name for name in names if "m3_mini" in name or "mutants" in name or ".pyc" in name]
    assert {"README.md", "AGENTS.md", "Makefile", "LICENSE", "m1_mini/shelf.py"} <= names.keys()
    assert "milestones/course/release/command.py" not in names
    assert "m2_mini/shelf.py:Shelf.put" in names["AGENTS.md"]
    assert "Version 1.2.3 of the course" in names["README.md"]
    needed = {
        line.split("|")[3].strip() for line in names["README.md"].splitlines() if "[m2." in line
    }
    assert needed == {"none", "m2.1"}


def test_without_git_there_is_a_tree_all_the_same(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    release.release("m2_mini", tmp_path / "student", course)
    assert (tmp_path / "student/README.md").exists() and not (tmp_path / "student/.git").exists()


def test_a_folder_with_something_in_it_is_refused(
    course: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("years of work")
    for directory, said in ((tmp_path / "full", "not empty"), (course / "x", "outside")):
        with pytest.raises(release.ReleaseError, match=said):
            release.release("m2_mini", directory, course)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["thesis.txt"]
    args = argparse.Namespace(milestone="m9", directory=tmp_path / "new")
    assert release.main(args) == 1 and "no milestone 'm9'" in capsys.readouterr().out


def test_a_release_that_fails_leaves_nothing(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "make_repository", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        release.release("m2_mini", tmp_path / "student", course)
    assert [path.name for path in tmp_path.iterdir()] == ["course"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def f(): return 1\n", "def f():\n    raise"),
        ("def f():\n    # think\n    return 1\n    # done\n\nX = 1\n", "def f():\n    raise"),
        ("@cache\nasync def f(\n    a: int,\n) -> int:\n    return 1\n", ") -> int:\n    raise"),
        ('def f():\n    """Doc."""\n', '"""Doc."""\n    raise'),
        ("class f:\n    pass\n\n\ndef f():\n    return 1\n", "def f():\n    raise"),
    ],
)
def test_bodies_of_every_shape(before: str, after: str) -> None:
    result = cut.without_body(before, "f", ("m1.1: f is yours to write; see ", "x.md#f"))
    ast.parse(result)
    assert after in result and "return 1" not in result and "think" not in result
    assert "done" not in result and result.count("raise NotImplementedError") == 1
    assert ("X = 1" in result) == ("X = 1" in before)


def test_a_property_and_its_setter_are_both_cut() -> None:
    source = (
        "class C:\n    @property\n    def p(self):\n        return 1\n\n"
        "    @p.setter\n    def p(self, value):\n        self.x = value\n"
    )
    result = cut.without_body(source, "C.p", ("m1.1: C.p is yours to write; see ", "x.md#f"))
    assert result.count("raise NotImplementedError") == 2 and "return 1" not in result


def test_imports_that_are_not_used_any_more() -> None:
    before = (
        "from __future__ import annotations\n\nimport os\nfrom typing import TYPE_CHECKING, Any\n"
        "from .a import (\n    kept,\n    lost,\n    patched,\n)\n\nif TYPE_CHECKING:\n"
        "    from .b import Hint\n\nX: Any = kept(os)\n"
    )
    after = before
    before += "\ndef f(x: Hint) -> None:\n    lost()\n    patched()\n"
    result = without_unused_imports(before, after, {"patched"})
    assert result == (
        "from __future__ import annotations\n\nimport os\nfrom typing import Any\n"
        "from .a import kept, patched\n\n\nX: Any = kept(os)\n"
    )


def test_tests_of_absent_milestones_go() -> None:
    source = (
        "import math\nimport pytest\n\npytestmark = [pytest.mark.since('m1_a'), "
        "pytest.mark.before(\"m3_c\")]\n\n\n@pytest.mark.since('m3_c')\ndef test_a():\n"
        "    math.pi\n\n\n@pytest.mark.before('m3_c')\ndef test_b():\n    pass\n"
    )
    assert pruned(source, {"m3_c"}) == (
        "import pytest\n\npytestmark = [pytest.mark.since('m1_a')]\n\n\ndef test_b():\n    pass\n"
    )
    assert pruned(source, set()) == source
    assert pruned(source, {"m1_a", "m3_c"}) is None


def test_handouts_name_no_command_that_a_students_tree_lacks(tmp_path: Path) -> None:
    """All handouts, in the tree of the highest milestone: no release has `serve`, for example."""
    release.release(milestones()[-1], tmp_path / "student")
    found = texts(tmp_path / "student")
    assert absent_commands("`python -m milestones\nserve m2`", found) == ["serve"]
    for engine in catalog.taught_engines(ROOT):
        page = (ROOT / course_place(engine) / "README.md").read_text("utf-8")
        assert not absent_commands(page, found), engine


@pytest.mark.thorough("a whole tree for each milestone", fast_on=("m2_continuous",))
@pytest.mark.electives
def test_every_milestone_can_be_released(milestone: str, tmp_path: Path) -> None:
    """A real milestone's tree refers to nothing absent, and has no line of a solution."""
    if milestone not in catalog.taught_engines(ROOT):
        return
    tree = tmp_path / "student"
    release.release(milestone, tree)
    found = texts(tree)
    assert not [name for name, text in found.items() if "`make slides`" in text], "no slides here"
    for name in one_step.STEPS.keys() & {*chain(milestone)}:
        page = f"{course_place(name)}/README.md"
        _, start, rest = (ROOT / page).read_text("utf-8").partition(f"<!-- {one_step.BLOCK} -->")
        block, end, _ = rest.partition(f"<!-- /{one_step.BLOCK} -->")
        assert start and end and start + block + end in found[page], "each handout keeps its table"
    absent = above(milestone)
    for name, text in found.items():
        if absent and not name.endswith(".md") and not name.startswith("milestones/"):
            assert not re.search(naming(set(absent)), text), f"{name} names an absent milestone"
        if name.endswith(".md"):
            assert not dead_references(name, text, found), name
        if name.endswith((".md", ".toml")):
            assert not absent_tests(text, found), name
        if name.endswith(".py"):
            ast.parse(text, name)
        of_console = name.startswith("milestones/") and not name.startswith(f"{ELECTIVES}/")
        if of_console and name.endswith(".py"):  # an engine is tested by its suite
            assert not missing_modules(name, text, found), name
    assert not solution_lines(milestone, found)
    pages = {f"{DOCS}/{name}.md" for name in ("GLOSSARY", "QUESTIONS", "WHERE")}
    assert {*pages, "ARCHITECTURE.md"} <= found.keys()
    if lower := below(milestone):
        shown = lesson_html.page(lesson(lower, milestone, tree), tree, tree)
        assert "<li>Exercise <a" in shown and "<li>Slide" not in shown, "no slides here"
    commands = "break_it", "check", "doctor", "hint", "list", "measure", "predict", "reset"
    for module in (*commands, "engine_answers"):
        assert f"milestones/course/student/{module}.py" in found
    assert all((tree / folder).is_dir() for folder in checked_by_mypy(found["pyproject.toml"]))
    run = mini_course.shared_runner().run(tree, ["tests"], options=["--collect-only"])
    assert run.error is None and not run.results, run.error or run.results


@pytest.mark.thorough("the first tier of a whole tree")
def test_a_released_tree_is_green_with_the_solutions(milestone: str, tmp_path: Path) -> None:
    """The suite that a student runs at the end has no test that only the whole project passes."""
    tree = tmp_path / "student"
    release.release(milestone, tree)
    for source in {name for exercise in catalog.load(milestone) for name in exercise.sources}:
        shutil.copyfile(ROOT / source, tree / source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def checked_by_mypy(config: str) -> list[str]:
    found = re.search(r"^files = \[(.*)\]$", config, re.MULTILINE)
    assert found is not None
    return re.findall(r'"(\w+)"', found[1])


def absent_tests(text: str, files: dict[str, str]) -> list[str]:
    return [test for test in re.findall(r"\btests/[\w/]+\.py", text) if test not in files]


def missing_modules(name: str, source: str, files: dict[str, str]) -> list[str]:
    """Return the modules that a module of the console imports or runs, and that are absent."""
    started = [module.replace(".", "/") for module in re.findall(r'"(milestones\.[\w.]+)"', source)]
    missing = [path for path in started if f"{path}.py" not in files]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level:
            up = [".."] * (node.level - 1)
            module = (node.module or "").split(".")
            path = posixpath.normpath(posixpath.join(posixpath.dirname(name), *up, *module))
            there = {f"{path}.py", *(f"{path}/{alias.name}.py" for alias in node.names)}
            missing += [] if there & files.keys() else [path]
    return missing


def dead_references(page: str, text: str, files: dict[str, str]) -> list[str]:
    """Return the links, commands and modules of a page that are not in the tree."""
    folders = {posixpath.dirname(name) for name in files}
    dead = []
    for target in re.findall(r"\]\(([^)#\s]+)", text):
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if "://" not in target and path not in files and path.rstrip("/") not in folders:
            dead.append(target)
    text = " ".join(text.split())
    for module in re.findall(r"python -m ((?:common|milestones|m\d_\w+)[\w.]*\w)", text):
        path = module.replace(".", "/")
        if path.startswith(ELECTIVES) and f"{path}/__init__.py" in files:
            continue  # its `__main__.py` is that of the milestone
        if not {f"{path}.py", f"{path}/__main__.py"} & files.keys():
            dead.append(module)
    return dead + absent_commands(text, files)


def absent_commands(text: str, files: dict[str, str]) -> list[str]:
    """Return the commands of the console that a page names and the tree lacks."""
    absent = []
    for command in re.findall(r"python -m milestones ([a-z][\w-]*)", " ".join(text.split())):
        entry = re.search(rf'"{command}": \(\s*"([\w.]+)"', files["milestones/__main__.py"])
        if not entry or f"milestones/{entry[1].replace('.', '/')}.py" not in files:
            absent.append(command)
    return absent


def solution_lines(milestone: str, tree: dict[str, str]) -> list[str]:
    """Return the lines that were cut from the milestone but are in other files of the tree."""
    kept = {
        line.strip() for name, text in tree.items() for line in text.split("\n")
        if name.startswith(("m", "common/")) and name.endswith(".py")
    }  # fmt: skip
    paths = (ROOT / place(milestone)).rglob("*.py")
    lost = {
        line.strip()
        for path in paths for line in path.read_text("utf-8").split("\n")
    } - kept  # fmt: skip
    telling = [line for line in lost if len(line) > 40 and not line.startswith(("import", "from"))]
    # Files in common/ belong to no milestone, so their lines are not solutions. A handout and a
    # hint may show a line.
    others = {
        n: t for n, t in tree.items()
        if not n.endswith(("README.md", ".toml")) and not n.startswith("common/")
    }  # fmt: skip
    return [f"{n}: {line}" for n, text in others.items() for line in telling if line in text]
