"""The book as a web site: its sources, its links, its figures and exercises in a browser."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import shutil
import threading
import time
import zipfile
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from milestones.book import browser_files, command
from milestones.book.figures import NAMES
from milestones.book.staging import PAGES, Staging
from milestones.course.museum.exhibit import exhibits
from slides.facts import RUN_PAGES
from tests.conftest import ROOT
from tests.helpers.browser import Tab, tab
from tests.slides.test_slide_runs import CLAIMS


def test_links_lead_to_pages_of_the_site_or_nowhere(tmp_path: Path) -> None:
    page = "milestones/m3_paged/README.md"
    for written, expected in {
        "[a](../docs/SPEED.md#x)": "[a](../docs/SPEED.md#x)",
        "[`a`](../../m3_paged/engine.py)": "[`a`](../../code/m3_paged/engine.py.md)",
        "[a](../m2_continuous)": "[a](../m2_continuous/README.md)",
        "[a](../docs/INSTRUCTORS.md)": "a",
        "[a](https://example.org/b)": "[a](https://example.org/b)",
        '<a href="../docs/USING.md#watch">': '<a href="../docs/USING.html#watch">',
        "`[a](../docs/INSTRUCTORS.md)`": "`[a](../docs/INSTRUCTORS.md)`",
        "```\n[a](b.md)\n```": "```\n[a](b.md)\n```",
    }.items():
        assert Staging(tmp_path).linked(written, page) == expected
    chapter = "milestones/book/pages/m1.md"
    text = Staging(tmp_path).linked("[a](m2.md) [b](../../m1_single/README.md)", chapter)
    assert text == "[a](m2.md) [b](milestones/m1_single/README.md)"
    made = Staging(tmp_path)
    made.linked("[a](../../m3_paged/engine.py)", page)
    assert made.code == {"m3_paged/engine.py"}


def test_a_picture_comes_along(tmp_path: Path) -> None:
    text = "![p](pages.svg)"
    assert Staging(tmp_path).linked(text, "milestones/m3_paged/README.md") == text
    assert (tmp_path / "milestones/m3_paged/pages.svg").is_file()


def test_the_answers_of_instructors_are_not_in_the_site() -> None:
    assert not [page for page in PAGES if "INSTRUCTORS" in page]
    assert all((ROOT / page).is_file() for page in PAGES)


def test_each_figure_is_in_a_chapter() -> None:
    chapters = (ROOT / "milestones/book/pages").glob("*.md")
    text = "".join(chapter.read_text("utf-8") for chapter in chapters)
    assert sorted(re.findall(r"```\{live\} (\w+)", text)) == sorted(NAMES)


def test_what_a_chapter_says_of_a_run_is_what_the_handout_says() -> None:
    chapters = (ROOT / "milestones/book/pages").glob("*.md")
    text = "".join(chapter.read_text("utf-8") for chapter in chapters)
    steps = re.findall(r"```\{frame\} slides/dist/run_(\w+)\.html#step=(\d+)", text)
    assert {(name, int(step)) for name, step in steps} < CLAIMS.keys()
    assert {name for name, _ in steps} == {*RUN_PAGES}


def test_a_browser_gets_the_files_of_the_engines_and_no_others(tmp_path: Path) -> None:
    files = browser_files.figure_files()
    assert {"m3_paged/scheduler.py", "m4_radix/radix_cache.py", "m5_overlap/engine.py"} <= {*files}
    assert not [name for name in files if "model_runner" in name or name.startswith("tests")]
    for name in ("a", "b"):
        browser_files.write_zip(tmp_path / name, {"b": b"2", "a": b"1"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_without_npm_the_command_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(browser_files.BookError, match=r"nodejs\.org"):
        browser_files.fetch(tmp_path)


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a built site in `ladder`."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("web")
    assert command.main(Namespace(out=folder / "ladder")) == 0
    return folder


@pytest.fixture(scope="module")
def site(web: Path) -> Iterator[str]:
    """The address of a built site, below a path of its own as on GitHub Pages."""
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(web))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/ladder"
        server.shutdown()


def hashes(folder: Path) -> dict[str, str]:
    """Return the hash of each file by its path."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*") if path.is_file()
    }  # fmt: skip


def two_builds_give_the_same_bytes(first: Path, second: Path) -> None:
    assert command.main(Namespace(out=second)) == 0
    one, other = hashes(first), hashes(second)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []


def the_front_page_is_small(site: str, folder: Path) -> None:
    """What a browser loads at first, before compression: the page, and all that it names."""
    with tab(folder, f"{site}/index.html") as page:
        page.wait_until("document.readyState === 'complete'")
        size = page.evaluate(
            "['navigation', 'resource'].flatMap((kind) => performance.getEntriesByType(kind))"
            ".reduce((sum, entry) => sum + entry.decodedBodySize, 0)"
        )
        assert 50_000 < float(str(size)) <= 300_000


KINDS_OF_PAGES = (
    "index", "m3", "milestones/m3_paged/m3_1", "diffs/m4_1", "museum",
    f"museum/{exhibits()[0].id}", "milestones/m3_paged/README", "code/m3_paged/kv_cache.py",
)  # fmt: skip
FINDINGS = """axe.run(document, {iframes: false}).then((found) => {
    window.findings = found.violations.filter(({impact}) => /serious|critical/.test(impact))
        .map(({id, nodes}) => `${id}: ${nodes[0].html.slice(0, 200)}`).join("; ");
}); 1"""


def axe_finds_nothing_serious(site: str, folder: Path) -> None:
    packages = browser_files.fetch(command.BUILD / "npm")
    axe = (packages / "node_modules/axe-core/axe.min.js").read_text("utf-8")
    for name in KINDS_OF_PAGES:
        with tab(folder, f"{site}/{name}.html") as page:
            page.wait_until("location.href !== 'about:blank' && document.readyState === 'complete'")
            page.evaluate(axe)
            for scheme in ("light", "dark"):
                feature = {"name": "prefers-color-scheme", "value": scheme}
                page.ask("Emulation.setEmulatedMedia", features=[feature])
                page.evaluate("delete window.findings; 1")
                page.evaluate(FINDINGS)
                page.wait_until("window.findings !== undefined")
                assert page.evaluate("findings") == "", f"{scheme}: {name}"


def frames_follow_the_switch(site: str, folder: Path) -> None:
    """The reader chooses light or dark, and a run in a frame has the same colours."""
    with tab(folder, f"{site}/m3.html") as page:
        page.wait_until("document.readyState === 'complete'")
        page.evaluate("document.querySelector('.frame').scrollIntoView()")
        frame = "document.querySelector('.frame iframe').contentWindow"
        dark = f"{frame}.matchMedia('(prefers-color-scheme: dark)').matches"
        page.wait_until(f"{frame}.document.readyState === 'complete'")
        for theme in ("dark", "light"):
            page.evaluate(f"document.body.dataset.theme = '{theme}'")
            page.wait_until(f"{dark} === {json.dumps(theme == 'dark')}")


# Whether a figure has drawn. On a busy machine a run may be ended: then it is drawn once more.
DRAWN = """(() => {{
    const section = document.querySelector("#figure-{name}");
    const words = section.querySelector(".words");
    const ended = words.textContent.includes("was ended after");
    if (ended && section.dataset.python === "ready")
        section.querySelector(".controls").dispatchEvent(new Event("input"));
    return words.textContent !== {before!r} && !ended && !words.matches(".error");
}})()"""


def words(page: Tab, name: str) -> str:
    return str(page.evaluate(f"document.querySelector('#figure-{name} .words').textContent"))


def figures_move_with_the_keyboard(site: str, folder: Path) -> None:
    for chapter, figures in {
        "m1": ["triangle"], "m2": ["batches"], "m3": ["pages", "chunks"],
        "m4": ["prefixes"], "m5": ["overlap"], "scale": ["replicas"],
    }.items():  # fmt: skip
        with tab(folder, f"{site}/{chapter}.html") as page:
            page.wait_until("document.querySelector('.live')?.dataset.python === 'ready'")
            for name in figures:
                before = words(page, name)
                control = f"document.querySelector('#figure-{name} .controls input[type=range]')"
                page.evaluate(f"{control}.focus()")
                for _ in range(3):
                    page.press("ArrowLeft")
                page.wait_until(DRAWN.format(name=name, before=before))
                assert f"{name}." in str(page.evaluate("location.search"))
            assert page.errors == []
            loaded = page.evaluate("performance.getEntriesByType('resource').map(e => e.name)")
            assert loaded and all(address.startswith(site) for address in loaded)


def a_guess_is_shown_beside_the_answer_and_kept(site: str, folder: Path) -> None:
    with tab(folder, f"{site}/m1.html") as page:
        page.wait_until("document.querySelector('.guess')?.hidden === false")
        page.evaluate(
            "document.querySelector('.guess input').value = 40;"
            "document.querySelector('.guess button').click()"
        )
        said = "document.querySelector('.guess output')?.textContent"
        assert page.evaluate(said) == "You guessed 40. It is 68."
        page.ask("Page.reload")
        page.wait_until(f"{said}.includes('40')")
        assert page.evaluate("document.querySelector('.answer').open")


def an_endless_loop_ends(site: str, folder: Path) -> None:
    """Its worker is ended, another one starts, and the reader's text stays."""
    with tab(folder, f"{site}/m2.html") as page:
        page.wait_until("document.querySelector('.live')?.dataset.python === 'ready'")
        field = "document.querySelector('#figure-schedule textarea')"
        page.evaluate(
            f"{field}.value = 'while True: pass';"
            f"{field}.dispatchEvent(new Event('input', {{bubbles: true}}))"
        )
        page.wait_until(
            "document.querySelector('#figure-schedule .error')?.textContent.includes('ended')"
        )
        assert page.evaluate(f"{field}.value") == "while True: pass"
        page.wait_until("document.querySelector('#figure-schedule').dataset.python === 'ready'")


EDITOR = "document.querySelector('section.exercise')"
REPORT = "document.querySelector('.exercise .report')"


def write(page: Tab, file: str, text: str, version: str | None = None) -> None:
    """Let the storage of the browser have a text, as the editor keeps it, and load the page.

    version: of the course that the text began with; today's by default.
    """
    today = f"JSON.parse({EDITOR}.dataset.exercise).versions[{file!r}]"
    version = json.dumps(version) if version else today
    page.evaluate(
        "import(document.querySelector('script[src*=book]').src.replace(/book.js.*/, 'saved.js'))"
        f".then((saved) => saved.keepCode({file!r}, {json.dumps(text)}, {version}))"
        ".then(() => { window.kept = true; })"
    )
    page.wait_until("window.kept")
    page.ask("Page.reload")
    page.wait_until(f"!window.kept && {EDITOR}?.dataset.python === 'ready'")


def check(page: Tab, words: str) -> None:
    """Check with the button, and wait for words of the report."""
    page.evaluate("document.querySelector('.exercise .check').click()")
    page.wait_until(f"{REPORT}.innerText.includes({words!r})")


def an_exercise_is_written_in_the_page(site: str, folder: Path) -> None:
    """Not written, right, wrong, without an end; and the zip of it."""
    file = "m3_paged/kv_cache.py"
    solution = (ROOT / file).read_text("utf-8")
    with tab(folder, f"{site}/milestones/m3_paged/m3_1.html") as page:
        page.wait_until("!!document.querySelector('.cm-content')")
        page.evaluate(f"{EDITOR}.scrollIntoView()")
        page.wait_until(f"{EDITOR}.dataset.python === 'ready'")
        check(page, "m3.1 is not written yet")
        write(page, file, solution)
        check(page, "m3.1 passes: 15 points")
        page.evaluate("document.querySelector('.exercise .export').click()")
        page.wait_until("document.querySelector('.exercise .status').innerText.includes('.zip')")
        packed = folder / "m3_paged.zip"
        for _ in range(100):
            if packed.exists():
                break
            time.sleep(0.1)
        with zipfile.ZipFile(packed) as archive:
            assert archive.read(file).decode() == solution
            assert b'"m3.1"' in archive.read(".ladder/progress.json")
        write(page, file, solution.replace("+ self.num_free_pages", "- self.num_free_pages"))
        check(page, "room for 20 more tokens")
        endless = "        while True:\n            pass\n        missing = self.pages_for"
        write(page, file, solution.replace("        missing = self.pages_for", endless))
        check(page, "does not end")
        assert "while True" in str(page.evaluate("document.querySelector('.cm-content').innerText"))
        page.wait_until(f"{EDITOR}.dataset.python === 'ready'")
        assert page.errors == []


def the_text_of_an_older_course_is_never_lost(site: str, folder: Path) -> None:
    file = "m4_radix/radix_cache.py"
    old = (ROOT / file).read_text("utf-8").replace("class TreeNode:", "class OldNode:")
    with tab(folder, f"{site}/milestones/m4_radix/m4_1.html") as page:
        page.wait_until("!!document.querySelector('.cm-content')")
        write(page, file, old, version="an older one")
        kept = f"JSON.parse(localStorage['book.code.{file}'])"
        page.wait_until("!!document.querySelector('.renewal .added')")
        assert page.evaluate(f"{kept}.text") == old, "the editor has it until the reader chooses"
        page.evaluate("document.querySelector('.renewal button').click()")
        page.wait_until("document.querySelector('.renewal').hidden")
        assert "class TreeNode:" in str(page.evaluate(f"{kept}.text"))
        assert page.evaluate(f"{kept}.earlier[0]") == old
        assert "an older one" not in str(page.evaluate(f"{kept}.version"))


def no_page_overwrites_what_another_one_has_written(site: str, folder: Path) -> None:
    """Exercises share files. A frame stands for the other page: it has the same storage."""
    key = "book.code.m4_radix/radix_cache.py"
    kept = f"JSON.parse(localStorage[{key!r}])"
    shown = "document.querySelector('.cm-content').innerText"

    def stored(text: str) -> str:
        value = json.dumps(json.dumps({"text": text, "version": "1", "earlier": []}))
        return f"localStorage.setItem({key!r}, {value})"

    with tab(folder, f"{site}/milestones/m4_radix/m4_1.html") as page:
        page.wait_until("!!document.querySelector('.cm-content')")
        page.evaluate("document.body.append(document.createElement('iframe'))")
        page.evaluate(f"frames[0].{stored('from another page')}")
        page.wait_until(f"{shown}.includes('from another page')")
        page.evaluate(stored("not noticed"))  # a page gets no event of its own changes
        page.evaluate("document.querySelector('.cm-content').focus()")
        page.ask("Input.insertText", text="typed here, ")
        page.wait_until(f"{kept}.text.includes('typed here')")
        assert page.evaluate(f"{kept}.text") == "typed here, from another page"
        assert page.evaluate(f"{kept}.earlier") == ["not noticed"]
        page.evaluate("Storage.prototype.setItem = () => { throw new Error('full'); }")
        page.ask("Input.insertText", text="and here, ")
        said = "document.querySelector('.exercise .status').innerText"
        page.wait_until(f"{said}.includes('does not keep your text')")
        assert page.errors == []


def a_call_of_python_that_cannot_start_is_answered(site: str, folder: Path) -> None:
    with tab(folder, f"{site}/milestones/m4_radix/m4_1.html") as page:
        page.wait_until("!!document.querySelector('.cm-content')")
        page.evaluate(
            "Worker = class { terminate() {} constructor() { setTimeout(() => "
            "this.onmessage({ data: { failed: 'no network' } })); } };"
            "const book = document.querySelector('script[src*=book]').src;"
            "import(book.replace(/book.js.*/, 'python.js'))"
            ".then(({ Python }) => new Python('exercises', () => {}))"
            ".then((python) => python.call('check', [], { seconds: 9 }))"
            ".then(({ error }) => { window.error = error; })"
        )
        page.wait_until("window.error?.includes('no network')")


def the_keyboard_leaves_the_editor(site: str, folder: Path) -> None:
    """Tab indents, and Esc, then Tab leaves."""
    with tab(folder, f"{site}/milestones/m4_radix/m4_1.html") as page:
        page.wait_until("!!document.querySelector('.cm-content')")
        page.evaluate("document.querySelector('.cm-content').focus()")
        inside = "document.activeElement.matches('.cm-content')"
        press(page, "Tab", 9)
        assert page.evaluate(inside)
        press(page, "Escape", 27)
        press(page, "Tab", 9)
        assert not page.evaluate(inside)


def press(page: Tab, key: str, code: int) -> None:
    """Press a key that does something by itself in a browser."""
    for kind in ("rawKeyDown", "keyUp"):
        page.ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)


def a_question_comes_before_its_answer(site: str, folder: Path) -> None:
    with tab(folder, f"{site}/milestones/m2_continuous/m2_1.html") as page:
        page.wait_until("!!document.querySelector('.prediction')")
        shown = "document.querySelector('.prediction + details').checkVisibility()"
        assert not page.evaluate(shown)
        page.evaluate(
            "document.querySelector('.prediction textarea').value = 'two rows';"
            "document.querySelector('.prediction button').click()"
        )
        page.wait_until(shown)
        page.ask("Page.reload")
        page.wait_until("document.querySelector('.prediction textarea')?.value === 'two rows'")


def a_bug_of_the_museum_is_found(site: str, folder: Path) -> None:
    exhibit = exhibits()[0]
    with tab(folder, f"{site}/museum/{exhibit.id}.html") as page:
        page.wait_until("document.querySelector('.diagnosis')?.hidden === false")

        def said(step: int, invariant: str) -> str:
            page.evaluate(
                f"document.querySelector('.diagnosis input').value = {step};"
                f"document.querySelector('.diagnosis select').value = {invariant!r};"
                "document.querySelector('.diagnosis button').click()"
            )
            return str(page.evaluate("document.querySelector('.diagnosis output').value"))

        other = "I2" if exhibit.invariant == "I1" else "I1"
        assert "earlier" in said(exhibit.step + 1, exhibit.invariant)
        assert "it is not" in said(exhibit.step, other)
        opened = "document.querySelector('details.answer').open"
        assert not page.evaluate(opened)
        assert said(exhibit.step, exhibit.invariant).startswith("Yes") and page.evaluate(opened)
        frame = "document.querySelector('.frame iframe').contentDocument"
        page.evaluate("document.querySelector('.frame').scrollIntoView()")
        page.wait_until(f"{frame}?.body?.innerText.includes('step 1 of')")


@pytest.mark.extra("book")
@pytest.mark.thorough("it builds the site twice, and starts Python in a browser")
def test_a_reader_uses_the_site(web: Path, site: str, tmp_path: Path) -> None:
    """One test, because each process that ran one of several would build the site for it."""
    two_builds_give_the_same_bytes(web / "ladder", tmp_path / "again")
    the_front_page_is_small(site, tmp_path)
    axe_finds_nothing_serious(site, tmp_path)
    frames_follow_the_switch(site, tmp_path)
    figures_move_with_the_keyboard(site, tmp_path)
    a_guess_is_shown_beside_the_answer_and_kept(site, tmp_path)
    an_endless_loop_ends(site, tmp_path)
    a_question_comes_before_its_answer(site, tmp_path)
    the_keyboard_leaves_the_editor(site, tmp_path)
    the_text_of_an_older_course_is_never_lost(site, tmp_path)
    no_page_overwrites_what_another_one_has_written(site, tmp_path)
    a_call_of_python_that_cannot_start_is_answered(site, tmp_path)
    an_exercise_is_written_in_the_page(site, tmp_path)
    a_bug_of_the_museum_is_found(site, tmp_path)


def test_the_front_page_claims_what_readme_claims() -> None:
    page = (ROOT / "milestones/book/pages/index.md").read_text("utf-8")
    [claim] = re.findall(r"\*\*Eight chats.*?\*\*", page)
    assert claim in (ROOT / "README.md").read_text("utf-8")
