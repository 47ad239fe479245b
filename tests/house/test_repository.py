"""The files around the code: they can be read, and those that state the same fact agree."""

from __future__ import annotations

import json
import re
from importlib import metadata
from typing import Any

import pytest
import transformers
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from milestones.course.delta import tomllib
from tests.conftest import ROOT
from tests.helpers.sweep_models import MODEL_TYPES, PAGE
from tests.helpers.tiny_configs import NOT_BUILT

CUDA = re.compile(r"(nvidia|cuda)-")
PYTHONS = ("3.10.0", "3.11.0", "3.12.0", "3.13.0")
PLATFORMS = (("Linux", "x86_64"), ("Linux", "aarch64"), ("Darwin", "arm64"))


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def from_yaml(name: str) -> Any:
    return yaml.safe_load(text(name))


def requirements(name: str) -> list[Requirement]:
    lines = (line.partition(" #")[0].strip() for line in text(name).splitlines())
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def environment(python: str, system: str, machine: str) -> dict[str, str]:
    """The variables of markers for a Python on a platform."""
    return {
        "python_version": python.rpartition(".")[0],
        "python_full_version": python,
        "platform_system": system,
        "sys_platform": system.lower(),
        "platform_machine": machine,
        "extra": "",
    }


def applies(marker: Marker | None, where: dict[str, str]) -> bool:
    return marker is None or marker.evaluate(where)


def pins(where: dict[str, str] | None = None) -> dict[str, Version]:
    """What constraints.txt fixes, here or in another environment."""
    found: dict[str, Version] = {}
    for pin in requirements("constraints.txt"):
        if applies(pin.marker, where or {"extra": ""}):
            (specifier,) = pin.specifier
            assert specifier.operator == "==" and pin.name not in found, str(pin)
            found[canonicalize_name(pin.name)] = Version(specifier.version)
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize(("system", "machine"), PLATFORMS)
def test_what_is_required_is_pinned(python: str, system: str, machine: str) -> None:
    where = environment(python, system, machine)
    found = pins(where)
    for requirement in requirements("requirements.txt"):
        if applies(requirement.marker, where):
            version = found[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version), requirement
    assert not [name for name in found if CUDA.match(name)]


def test_what_the_pinned_packages_need_is_pinned() -> None:
    """As far as the packages that are installed here have the pinned versions."""
    found = pins()
    for name, version in found.items():
        try:
            installed = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        if Version(installed.version).public != version.public:
            continue
        for needed in map(Requirement, installed.requires or ()):
            if applies(needed.marker, {"extra": ""}) and not CUDA.match(needed.name):
                pinned = found.get(canonicalize_name(needed.name))
                assert pinned is not None, f"{name} needs {needed}: not in constraints.txt"
                assert needed.specifier.contains(pinned), f"{name} needs {needed}: {pinned}"


def test_contributors_are_told_how_the_versions_were_found() -> None:
    command = re.search(r"^# +(uv pip compile .*)$", text("constraints.txt"), re.MULTILINE)
    assert command is not None and command[1] in text("CONTRIBUTING.md")


def test_hooks_run_the_ruff_of_the_project() -> None:
    repos = from_yaml(".pre-commit-config.yaml")["repos"]
    (ruff,) = [repo for repo in repos if repo["repo"].endswith("/ruff-pre-commit")]
    assert Version(ruff["rev"]) == pins()["ruff"]
    assert {hook["id"] for hook in ruff["hooks"]} == {"ruff-check", "ruff-format"}


def test_the_workflow_calls_what_ci_runs() -> None:
    (job,) = from_yaml(".github/workflows/ci.yml")["jobs"].values()
    steps = [step for step in job["steps"] if "run" in step]
    assert [step["run"] for step in steps] == [".ci/run"] and (
        ROOT / ".ci/run"
    ).stat().st_mode & 0o100
    assert job["timeout-minutes"] > 0
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w/-]+@v\d+(\.\d+)*", action) for action in used), used


def test_the_book_is_published_as_make_site_builds_it() -> None:
    (job,) = from_yaml(".github/workflows/book.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make site"]
    used = [step["uses"].partition("@")[0] for step in job["steps"] if "uses" in step]
    assert used == [
        f"actions/{name}" for name in ("checkout", "upload-pages-artifact", "deploy-pages")
    ]


def test_the_container_is_set_up_by_make() -> None:
    folder = ROOT / ".devcontainer"
    config = json.loads((folder / "devcontainer.json").read_text(encoding="utf-8"))
    assert config["postCreateCommand"] == "make setup"
    built_from = (folder / config["build"]["dockerfile"]).read_text(encoding="utf-8")
    assert {"gcc", "git", "libc6-dev", "make"} <= set(built_from.split())


def test_a_bug_report_asks_for_the_doctor() -> None:
    form = from_yaml(".github/ISSUE_TEMPLATE/bug.yml")
    assert form["name"] and form["description"]
    labels = {field["id"]: field["attributes"]["label"] for field in form["body"]}
    assert "python -m milestones doctor" in labels["doctor"]


def released() -> list[tuple[str, str]]:
    """Versions and dates of CHANGELOG.md, the newest first."""
    return re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)$", text("CHANGELOG.md"), re.M)


def test_the_version_is_the_changelogs() -> None:
    version = Version(tomllib.loads(text("pyproject.toml"))["project"]["version"])
    newest = Version(released()[0][0])
    if version.is_devrelease:
        assert version > newest and "## [Unreleased]" in text("CHANGELOG.md")
    else:
        assert version == newest
    versions = [Version(number) for number, _ in released()]
    assert versions == sorted(set(versions), reverse=True)


def test_the_citation_names_the_newest_release() -> None:
    citation = from_yaml("CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert (citation["version"], citation["date-released"]) == released()[0]
    assert citation["license"] == tomllib.loads(text("pyproject.toml"))["project"]["license"]


@pytest.mark.parametrize("name", [".ci/run", "README.md", ".devcontainer/devcontainer.json"])
def test_the_make_targets_that_are_named_exist(name: str) -> None:
    targets = set(re.findall(r"^(\w+):", text("Makefile"), re.MULTILINE))
    named = set(re.findall(r"(?:^ *|[\"`])make (\w+)", text(name), re.MULTILINE))
    assert named and named <= targets, named - targets


def test_the_page_lists_every_model_type_and_no_wrong_answer() -> None:
    """MODELS.md lists the model types of the version of transformers that it names."""
    page = PAGE.read_text(encoding="utf-8")
    assert "WRONG" not in page
    listed = set(re.findall(r"^\| ([\w-]+)[ ,]", page, re.MULTILINE)) - {"model"}
    known = {*MODEL_TYPES, *NOT_BUILT}
    assert listed == known or f"transformers {transformers.__version__} " not in page
