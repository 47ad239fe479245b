"""The frame of electives: a folder with the files that differ is a complete engine.

It also tests which packages lie below an engine.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import re
from pathlib import Path

import pytest

from milestones import chain
from milestones.chain import (
    EXTENDED,
    ROOT,
    electives,
    extended,
    load,
    own_name,
    package,
    place,
    sources,
)
from milestones.staff.maintain.types import merged

MOST_LINES = {
    # Two schedulers, two cores, and what passes between them. The part for CUDA, the restarts of
    # sides, and the seams for processes, some 130 lines, are none of its exercises.
    "disaggregated": 1180,
    # Two lessons, windows and states: its diff has stops. The caches of Hugging Face's layers with
    # states, 127 lines, are in none of its exercises.
    "hybrid_memory": 1550,
    # Three formats. The Triton kernels and lines of 4 bits, 300 lines, are none of its exercises.
    "kv_quant": 700,
    # The files for PEFT and for the passes, 307 lines, are none of its exercises.
    "lora": 1000,
    "multi_step": 250,
    "priority": 750,  # two lessons: requests that make way, and pages that move to the host
    "vision": 722,  # prompts with images, 100 lines, are none of its exercises
    "structured_output": 1050,  # grammars that a library compiles, after a trial; late sampling
}  # lines of a lesson, without its demo
COPIES = ("structured_output/stream.py",)  # four classes change, each by one line
ELECTIVES = electives()
TOP = chain.milestones()[-1]


def differing_lines(name: str) -> int:
    """Return the number of lines that an elective adds or removes, without its displays."""
    old, new, bases = sources(below(name)), sources(name), extended(name)
    all_new = chain.extending(old, new)
    count = 0
    shown = {file for file in new if file.startswith("demo/") or file == "virtual_costs.py"}
    for file in [file for file in new if file not in shown and file not in bases]:
        is_new = file in all_new or file not in old
        before = [] if is_new else old[file].read_text(encoding="utf-8").splitlines()
        after = new[file].read_text(encoding="utf-8").splitlines()
        lines = difflib.unified_diff(before, after, n=0)
        count += sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in lines)
    return count


def below(name: str) -> str:
    """Return the package that an elective lies on."""
    under = chain.below(name)
    assert under is not None
    return under


@pytest.mark.parametrize("name", ELECTIVES)
def test_an_elective_has_only_files_that_differ(name: str) -> None:
    under, folder = sources(below(name)), ROOT / place(name)
    for file, path in sources(name).items():
        if path.is_relative_to(folder) and file in under:
            assert path.read_bytes() != under[file].read_bytes(), f"{file} is that of the other"


@pytest.mark.parametrize("name", ELECTIVES)
def test_the_lesson_is_small(name: str) -> None:
    assert 0 < differing_lines(name) <= MOST_LINES.get(name, 600)


@pytest.mark.parametrize("name", ELECTIVES)
def test_each_call_of_an_electives_engine_is_guarded(name: str) -> None:
    """An interrupt between the milestone's guard and the end of a call would lose its result."""
    tree = ast.parse(sources(name)["engine.py"].read_text(encoding="utf-8"))
    [shell] = (x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == "LLMEngine")
    calls = [x for x in shell.body if isinstance(x, ast.FunctionDef)]
    for call in calls:
        if call.name not in ("__init__", "make_core", "queued_requests"):  # the shell calls these
            guarded = f"with self.guard('{call.name}')" in ast.unparse(call)
            assert guarded, f"{name}: {call.name} stands under no guard"


@pytest.mark.parametrize("name", ELECTIVES)
def test_every_module_is_the_electives_own(name: str) -> None:
    """I1: a class that exists twice would make two parts of one engine disagree."""
    own = package(name)
    for file, path in sources(name).items():
        if file.startswith("demo/"):
            continue
        module = importlib.import_module(
            f"{own}.{file.removesuffix('.py').replace('/', '.')}".removesuffix(".__init__")
        )
        assert module.__file__ is not None and Path(module.__file__) == path
        for value in vars(module).values():
            origin = getattr(value, "__module__", None) or ""
            assert origin.partition(".")[0] != TOP, f"{file} has {value} of {TOP}"
    assert load(name, "attention").NAME != load(TOP, "attention").NAME


@pytest.mark.parametrize("name", ELECTIVES)
def test_a_class_exists_once_apart_from_what_it_extends(name: str) -> None:
    """I1: only `scheduler.py` may import `m5_scheduler`: others would get another class by name.

    A class or a function in a file that is extended is that of the elective's file, if this has one
    of the same name.
    """
    for file in extended(name):
        base = importlib.import_module(f"{package(name)}.{file.removesuffix('.py')}")
        own = importlib.import_module(f"{package(name)}.{own_name(file).removesuffix('.py')}")
        for symbol, value in vars(own).items():
            inherited = vars(base).get(symbol)
            if isinstance(value, type) and inherited is not None and inherited is not value:
                assert issubclass(value, inherited), f"{name}: {symbol} is two classes"
    importers = re.compile(rf"from \.+((?:{EXTENDED.pattern.strip('^')})\w+) import")
    for path in (ROOT / place(name)).rglob("*.py"):
        for module in importers.findall(path.read_text(encoding="utf-8")):
            assert own_name(f"{module}.py") == path.name, f"{path} imports {module}"


@pytest.mark.parametrize("name", ELECTIVES)
def test_a_third_of_a_file_is_its_own(name: str) -> None:
    """A file that has the name of one of the milestone's extends it, or is mostly another one."""
    old, new = sources(below(name)), sources(name)
    for file in old.keys() & new.keys():
        if old[file] == new[file] or file.startswith(("demo/", "__init__")):
            continue
        if f"{name}/{file}" in COPIES:
            continue
        before, after = (x[file].read_text(encoding="utf-8").splitlines() for x in (old, new))
        matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
        copied = sum(block.size for block in matcher.get_matching_blocks())
        assert copied <= 2 / 3 * len(after), f"{name}/{file}: {copied} of {len(after)} lines"


def test_the_tree_for_mypy_has_complete_electives(tmp_path: Path) -> None:
    tree = merged(ROOT, tmp_path)
    for name in ELECTIVES:
        for file, path in sources(name).items():
            assert (tree / place(name) / file).resolve() == path.resolve()
    assert (tree / TOP / "engine.py").samefile(ROOT / TOP / "engine.py")
    assert (tree / "milestones/chain.py").samefile(ROOT / "milestones/chain.py")
    assert (tree / "pyproject.toml").exists()


def test_an_elective_may_lie_on_another_one() -> None:
    """Its files extend those of both: a module of each package, imported under its own name."""
    for name, under in chain.STANDS_ON.items():
        assert chain.below(name) == under and chain.chain(name)[-2:] == [under, name]
        assert extended(under).items() <= extended(name).items()
        assert name in chain.above(under) and under in chain.above(TOP)
    core = load("agents", "engine").EngineCore
    modules = [cls.__module__.removeprefix(f"{package('agents')}.") for cls in core.__mro__]
    assert modules[:3] == ["engine", "priority_engine", "m5_engine"]
    assert own_name("priority_engine.py") == own_name("m5_engine.py") == "engine.py"
    assert chain.extending(sources("priority"), sources("agents")) <= {*sources("priority")}


def test_milestones_lie_one_above_the_other(tmp_path: Path) -> None:
    names = ["m1_one", "m2_two", "m3_three"]
    for name in [*reversed(names), "common", "milestones"]:
        (tmp_path / name).mkdir()
    assert chain.milestones(tmp_path) == names
    assert [chain.below(name, tmp_path) for name in names] == [None, *names[:2]]
    assert chain.chain("m2_two", tmp_path) == names[:2]
    assert chain.above("m1_one", tmp_path) == names[1:]
    assert chain.at_least("m2_two", "m2_two", tmp_path)
    assert chain.at_least("m3_three", "m1_one", tmp_path)
    assert not chain.at_least("m1_one", "m2_two", tmp_path)


def test_the_electives_of_a_tree(tmp_path: Path) -> None:
    """An elective lies on the highest milestone, and takes the files that it does not have."""
    for file in (
        "m1_one/__init__.py", "m2_two/__init__.py", "m2_two/engine.py", "m2_two/demo/x.py",
        "milestones/electives/__init__.py", "milestones/electives/three/__init__.py",
        "milestones/electives/three/engine.py", "milestones/electives/three/more.py",
    ):  # fmt: skip
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert chain.electives(tmp_path) == ["three"]
    assert chain.engines(tmp_path) == ["m1_one", "m2_two", "three"]
    assert chain.chain("three", tmp_path) == ["m1_one", "m2_two", "three"]
    assert chain.above("m1_one", tmp_path) == ["m2_two", "three"]
    assert chain.at_least("three", "m2_two", tmp_path)
    assert not chain.at_least("m2_two", "three", tmp_path)
    found = {name: path.relative_to(tmp_path).parts[0] for name, path in (
        chain.sources("three", tmp_path).items()
    )}  # fmt: skip
    assert found == {
        "__init__.py": "milestones", "demo/x.py": "m2_two", "engine.py": "milestones",
        "more.py": "milestones",
    }  # fmt: skip
    assert (chain.place("three"), chain.short("three")) == ("milestones/electives/three", "three")
    assert (chain.place("m2_two"), chain.short("m2_two")) == ("m2_two", "m2")
