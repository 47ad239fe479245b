"""What students hand in: odd, broken and hostile zip files and folders cost no other student a
grade, and no honest one is left out without a word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from milestones.staff.grading import command as grade
from milestones.staff.grading import submission
from milestones.staff.grading.submission import Course, Submission
from milestones.staff.grading.upload import Upload, Uploads
from tests.helpers.mini_course import SHELF
from tests.helpers.submissions import SOURCE, Content, arguments, hand_in, make_course, zipped


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    folder = tmp_path_factory.mktemp("course")
    return submission.prepare("m2_mini", make_course(folder / "root"), folder / "template")


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    (tmp_path / "scratch").mkdir()
    return Uploads("m2_mini", ["shelf.py"], tmp_path / "scratch")


def damaged(folder: Path) -> dict[str, bytes]:
    """Return zip files that cannot be unpacked."""
    sound = zipped(folder / "sound.zip", {SOURCE: SHELF}).read_bytes()
    wrong = bytearray(sound)
    wrong[len(SOURCE) + 40] ^= 255  # a byte of its content
    encrypted = bytearray(sound)
    encrypted[6] |= 1
    encrypted[sound.index(b"PK\x01\x02") + 8] |= 1
    both = zipped(folder / "both.zip", {"m2_mini": "a file", SOURCE: SHELF}).read_bytes()
    long = zipped(folder / "long.zip", {f"m2_mini/{'x' * 300}.py": SHELF}).read_bytes()
    method = bytearray(sound)
    for place in (8, sound.index(b"PK\x01\x02") + 10):
        method[place] = 99  # a compression that Python does not have
    return {
        "sum": bytes(wrong), "secret": bytes(encrypted), "both": both, "long": long,
        "deep": zipped(folder / "deep.zip", {f"m2_mini/{'x/' * 1500}a.py": ""}).read_bytes(),
        "method": bytes(method), "cut": sound[:40] + sound[60:],
    }  # fmt: skip


def test_a_damaged_zip_file_costs_no_other_student_a_grade(
    uploads: Uploads, tmp_path: Path
) -> None:
    names = damaged(tmp_path)
    files: dict[str, Content] = {f"{name}_1_m2.zip": data for name, data in names.items()}
    files |= {f"in_{name}/m2.zip": data for name, data in names.items()}
    files |= {"anna_2_m2.zip": tmp_path / "sound.zip", "bob/shelf.py": SHELF}
    found = {u.name: u for u in uploads.find([zipped(tmp_path / "canvas.zip", files)])}
    assert not found["anna_2_m2"].problem and not found["bob"].problem
    bad = {name for name, upload in found.items() if "cannot be read" in upload.problem}
    assert bad == {f"{name}_1_m2" for name in names} | {f"in_{name}" for name in names}


def test_no_student_of_a_download_vanishes(uploads: Uploads, tmp_path: Path) -> None:
    """A student who hands in something else has a line in the table, or is named below it."""
    files: dict[str, Content] = {
        f"anna/{SOURCE}": SHELF, f"bob/{SOURCE}": SHELF, "carl/answers.pdf": "%PDF",
        "dora_1_shelf.py": SHELF, "emil/a.zip": "PK", "emil/m2.rar": "Rar!",
    }  # fmt: skip
    found = uploads.find([zipped(tmp_path / "moodle.zip", files)])
    assert [upload.name for upload in found] == ["anna", "bob", "carl", "emil"]
    assert "dora_1_shelf.py" in "".join(uploads.strays)


def test_an_old_zip_file_beside_the_work_is_not_the_work(uploads: Uploads, tmp_path: Path) -> None:
    old = zipped(tmp_path / "old.zip", {SOURCE: ""})
    files: dict[str, Content] = {
        "shelf.py": SHELF,
        "old.zip": old,
        "notes/a.txt": "",
        "b/a.txt": "",
    }
    (upload,) = uploads.find([zipped(tmp_path / "anna.zip", files)])
    assert upload.name == "anna" and (upload.folder / "shelf.py").read_text() == SHELF


def test_of_several_zip_files_none_is_chosen(uploads: Uploads, tmp_path: Path) -> None:
    for name in ("m2.zip", "m2 (1).zip"):
        zipped(tmp_path / "given/anna" / name, {SOURCE: SHELF})
    (upload,) = uploads.find([tmp_path / "given/anna"])
    assert "2 zip files" in upload.problem


def test_a_student_cannot_hand_in_for_others(uploads: Uploads, tmp_path: Path) -> None:
    """Beside other paths, the name of a folder in a zip file is not the name of a grade."""
    anna = zipped(tmp_path / "anna.zip", {f"bob/{SOURCE}": "", f"carl/{SOURCE}": SHELF})
    bob = zipped(tmp_path / "bob.zip", {SOURCE: SHELF})
    found = {upload.name: upload.folder for upload in uploads.find([anna, bob])}
    assert (found["bob"] / SOURCE).read_text() == SHELF
    assert all(name.startswith("anna") for name in found if name != "bob")


def test_names_stay_apart(uploads: Uploads, tmp_path: Path) -> None:
    """A zip file in the folder of each student has the same name everywhere."""
    paths = [zipped(tmp_path / "given" / name / "m2.zip", {SOURCE: SHELF}) for name in "ab"]
    found = uploads.find([*paths, hand_in(tmp_path / "other/m2", SHELF)])
    names = [upload.name for upload in found]
    assert len(set(names)) == 3 and "a-m2" in names and "b-m2" in names


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "far"])
def test_what_is_no_file_is_not_opened(
    kind: str, uploads: Uploads, tmp_path: Path, course: Course
) -> None:
    """A link could lead to another student's work, and a named pipe never ends."""
    zipped(tmp_path / "given/bob/work.zip", {SOURCE: SHELF})
    anna = tmp_path / "given/anna"
    anna.mkdir()
    if kind == "link":
        (anna / "work.zip").symlink_to("../bob/work.zip")
    elif kind == "far":
        (anna / "m2_mini").symlink_to("../bob")
    elif kind == "pipe":
        os.mkfifo(anna / "work.zip")
    else:
        (anna / "work.zip").mkdir()
    (upload,) = uploads.find([anna])
    taken = submission.take(upload, course)
    assert not taken.files and SOURCE in taken.refused


@pytest.mark.parametrize("name", ["a\x1b[2Jb", "a\nb: 100 points", "a\u202eb", "a\x9bb"])
def test_a_name_writes_nothing_else_on_a_screen(
    name: str, uploads: Uploads, tmp_path: Path, course: Course
) -> None:
    folder = hand_in(tmp_path / "given" / name, SHELF)
    (folder / "m2_mini" / f"{name}.py").write_text("")
    (upload,) = uploads.find([folder])
    taken = submission.take(upload, course)
    assert taken.notes and all(text.isprintable() for text in [upload.name, *taken.notes])


LAID_OUT: dict[str, tuple[dict[str, str], list[str], str]] = {
    # Also where the folder of the milestone has another name, or none.
    **{
        place: (
            {f"{place}/{file}": SHELF for file in ("shelf.py", "parts/__init__.py", "parts/a.py")},
            [SOURCE, "m2_mini/parts/__init__.py", "m2_mini/parts/a.py"],
            "added by the student",
        )
        for place in ("m2_mini", "homework of week 2", ".")
    },
    # Some students have a whole environment in the folder: what is not used is said.
    "many": (
        {
            SOURCE: SHELF, "m2_mini/helper.py": "",
            **{f"m2_mini/env/lib/package/part_{number:02}.py": "" for number in range(80)},
        },
        [SOURCE, "m2_mini/helper.py"], "31 more",
    ),
    "two": ({f"backup/{SOURCE}": "", f"work/{SOURCE}": SHELF}, [SOURCE], "work/m2_mini"),
    "folder": ({f"{SOURCE}/inside.py": ""}, [], ""),
}  # fmt: skip


@pytest.mark.parametrize("name", LAID_OUT)
def test_what_is_taken_of_a_folder(name: str, tmp_path: Path, course: Course) -> None:
    files, wanted, note = LAID_OUT[name]
    for file, text in files.items():
        (tmp_path / "anna" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "anna" / file).write_text(text)
    taken = submission.take(Upload("anna", tmp_path / "anna"), course)
    assert {*wanted} <= taken.files.keys() and note in " ".join(taken.notes)
    assert taken.refused == ({} if wanted else {SOURCE: "this is not a regular file"})
    submission.lay_out(taken, course.template, tmp_path / "tree")


def test_a_folder_that_cannot_be_read_costs_one_grade(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tree of folders can be so deep that no walk comes to its end."""
    take = submission.take

    def limited(upload: Upload, course: Course) -> Submission:
        if upload.name == "anna":
            raise RecursionError("too deep")
        return take(upload, course)

    monkeypatch.setattr(submission, "take", limited)
    folders = [hand_in(tmp_path / name, SHELF) for name in ("anna", "bob")]
    course = make_course(tmp_path / "course")
    assert grade.main(arguments(course, *map(str, folders))) == 3
    said = capsys.readouterr()
    assert "anna: cannot be read: RecursionError: too deep" in said.out
    assert "[2/2] bob: 10 points" in said.err
