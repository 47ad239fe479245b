"""The rules of the repository that a test can check: imports, file sizes, links, commands."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from _pytest.config import get_config

import common.fast
from milestones.chain import ELECTIVES, course_place, electives, place, sources
from slides.facts import RUN_PAGES
from tests.conftest import MILESTONES, ROOT

SOURCES = sorted(
    path
    for folder in ("common", "milestones", "slides", *MILESTONES)
    for path in (ROOT / folder).rglob("*.py")
)
PLAIN_DATA = (
    "scheduler.py", "schedule_batch.py", "admission.py", "policy.py", "kv_cache.py",
    "radix_cache.py", "in_flight.py",
)  # fmt: skip
BUILT = {f"../../slides/dist/run_{name}.html" for name in RUN_PAGES}  # by `make slides`
PAGES = sorted(
    path for path in ROOT.rglob("*.md") if not {".venv", "build"} & {*path.relative_to(ROOT).parts}
)


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a file imports absolutely."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def modules() -> dict[str, Path]:
    """Return the file of each module of the project. An elective has the files that it takes."""
    places = {path.relative_to(ROOT).as_posix(): path for path in SOURCES}
    for name in electives():
        places |= {f"{place(name)}/{file}": path for file, path in sources(name).items()}
    return {
        inside.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for inside, path in places.items()
    }


def imported_names(name: str, path: Path) -> Iterator[tuple[str, set[str]]]:
    """Iterate over a file's statements `from ... import`: the module, and the names."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module, {alias.name for alias in node.names}


def imported_modules(name: str, path: Path, known: set[str]) -> set[str]:
    """Return the modules of this repository that a file imports, also for type hints only."""
    found = set()
    for module, names in imported_names(name, path):
        within = {f"{module}.{name}" for name in names}
        found |= {name if name in known else module for name in within}
    return found & known


def test_no_circle_of_imports() -> None:
    """`TopologicalSorter` raises `CycleError`, with the files of the circle."""
    known = modules()
    graph = {name: imported_modules(name, path, {*known}) for name, path in known.items()}
    assert graph["m5_overlap.scheduler"] >= {"m5_overlap.in_flight", "common"}
    TopologicalSorter(graph).prepare()


def test_no_import_runs_upwards_between_the_houses() -> None:
    """ARCHITECTURE.md describes the houses. Each one may import only those that stand below it."""
    below = {
        "milestones.serving.server": (),
        "milestones.serving": (),
        "milestones.lab": (),
        "milestones.course": ("milestones.lab",),
        "milestones.staff": ("milestones.course", "milestones.lab"),
    }
    known = modules()
    for name, path in known.items():
        house = next((one for one in below if f"{name}.".startswith(f"{one}.")), None)
        if house is not None:
            allowed = (house, *below[house], "milestones.electives", "milestones.drawing", "common")
            deep = [one for one in imported_modules(name, path, {*known}) if one.count(".") > 1]
            assert all(one.startswith(allowed) for one in deep), f"{name} imports {deep}"


def test_a_milestone_stands_alone() -> None:
    """A milestone imports itself (relatively) and common; common imports no milestone."""
    of_electives = tuple(f"{ELECTIVES}/{name}/" for name in electives())
    for path in SOURCES:
        inside = path.relative_to(ROOT).as_posix()
        if inside.startswith(of_electives):
            assert not imported(path) & {*MILESTONES, "tests"}, f"{inside}: classes would be others"
        elif not inside.startswith(("milestones/", "slides/")):
            assert not imported(path) & {*MILESTONES, "milestones", "tests"}, inside


def test_the_fast_path_has_one_door() -> None:
    """Engines and the rest of `common` import only what `common.fast` exports.

    What measures or checks the parts of the fast path may import them.
    """
    known, inside = modules(), "common.fast"
    callers = {
        name: path
        for name, path in known.items()
        if name.startswith(("common", *MILESTONES, ELECTIVES.replace("/", ".")))
        and not f"{name}.".startswith(f"{inside}.")
    }
    taken = set()
    for name, path in callers.items():
        for module, names in imported_names(name, path):
            assert not module.startswith(f"{inside}."), f"{name} reaches into {module}"
            taken |= names if module == inside else set()
    assert taken == {*common.fast.__all__}, "it exports what is called, and nothing else"


def test_files_are_small() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert [path for path, number in lines.items() if number > 260] == []


@pytest.mark.electives
def test_a_milestone_has_its_page_and_roles(milestone: str) -> None:
    files = sources(milestone)
    roles = {"__init__.py", "engine.py", "scheduler.py", "model_runner.py", "demo/__init__.py"}
    assert roles <= files.keys()
    assert (ROOT / course_place(milestone) / "README.md").exists()


@pytest.mark.electives
def test_schedulers_and_caches_have_no_tensors(milestone: str) -> None:
    """They decide with plain data, so a student can test a scheduler without a model."""
    for name in PLAIN_DATA:
        path = sources(milestone).get(name)
        if path is not None:
            assert "torch" not in imported(path), path


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths_in_pages_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text)
    for target in [*links, *re.findall(r'<(?:img|source)[^>]* src(?:set)?="([^"]+)"', text)]:
        if target in BUILT:
            continue
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for module in re.findall(r"python -m ((?:m\d_\w+|common|milestones)[\w.]*)", text):
        relative = module.replace(".", "/")
        assert (ROOT / f"{relative}.py").exists() or (ROOT / relative / "__main__.py").exists(), (
            module
        )


def test_every_milestone_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{milestone}`" in text for milestone in MILESTONES)


def test_the_readme_is_short() -> None:
    """A newcomer decides on this page what to do next. All else has a page of its own."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900 and len(text.encode()) <= 7000


def told(text: str) -> set[str]:
    """Return the options in a page's commands of pytest and `make test` that have --milestone."""
    text = " ".join(text.split()).replace("{{milestone}}", MILESTONES[0])
    commands = re.findall(r"pytest((?: [\w./=-]+)*? --milestone[ =]\w+(?: --mode \w+)?)", text)
    return {*commands, *re.findall(r"ARGS=[\"']([^\"']*--milestone[^\"']*)", text)}


def test_the_commands_that_run_one_milestone_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pytest must find the option in `tests/conftest.py`, and not take m1's folder for tests."""
    monkeypatch.chdir(ROOT)
    pages = [*PAGES, ROOT / "Makefile", *(ROOT / "milestones/course/release/templates").iterdir()]
    commands = {command for page in pages for command in told(page.read_text("utf-8"))}
    assert len(commands) > len(MILESTONES)
    for command in sorted(commands):
        config = get_config(words := command.split())
        try:
            config.parse(words)
        except pytest.UsageError as error:
            pytest.fail(f"pytest {command} does not start: {error}")
        finally:
            config._ensure_unconfigure()
        assert {path.partition("/")[0] for path in config.args} == {"tests"}, command


# Files that Python code names and the tree does not have.
NOT_HERE = (
    "ANSWERS.md", ".ladder/progress.json", ".ladder/answers.json",  # of a student
    "results.json",  # of the grader
    "dist/shots/",  # `make slides`
    "m5_scheduler.py",  # a module of an elective without a file: see `milestones/electives`
    "ggml-quants.h", "adapter_config.json",  # of llama.cpp and PEFT
    "schedular.py",  # a page with a wrong name, in a test
)  # fmt: skip


def test_the_files_that_code_names_exist() -> None:
    """Docstrings and comments name files and folders in back-ticks: `policy.py`, `slides/`."""
    tops = [path for path in ROOT.iterdir() if path.name not in (".venv", ".git")]
    tree = [path for top in tops for path in (top, *top.rglob("*"))]
    ends = {"/".join(path.parts[-n:]) for path in tree for n in range(1, len(path.parts))}
    named = re.compile(r"`([\w.-]+/[\w./-]*|[\w.-]+\.(?:py|md|toml|html|json|c|h|svg|txt|yml|sh))`")
    missing = [
        (path.relative_to(ROOT).as_posix(), name)
        for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")]
        for name in named.findall(path.read_text(encoding="utf-8"))
        if name.rstrip("/") not in ends and name not in NOT_HERE
    ]
    assert missing == []
