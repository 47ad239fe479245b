"""The pages of a student's tree do not refer to what the tree does not have."""

from __future__ import annotations

import pytest

from milestones.course.release.pages import (
    without_absent_tests,
    without_dead_links,
    without_quotations,
    without_run_pages,
)


def test_links_to_what_is_not_there_become_text() -> None:
    page = "[a](../x.py) [b](../y.py#part) ![c](z.png) [d](https://e.org) [e](#here) [f](../)"
    files = {"docs/page.md": b"", "x.py": b""}
    assert without_dead_links("docs/page.md", page, files) == (
        "[a](../x.py) b c [d](https://e.org) [e](#here) [f](../)"
    )


def test_a_paragraph_about_the_pages_of_the_slides_is_left_out() -> None:
    page = "One.\n\nThe page that `make slides` builds. At\n[step 1](p.html#step=1), …\n\nTwo.\n"
    assert without_run_pages(page) == "One.\n\nTwo.\n"


def test_a_quotation_of_code_that_was_cut_is_left_out() -> None:
    page = "```python\n# a/x.py, C\ndef f():\n    return 1\n```\n\n```python\n# y.py\ng()\n```\n"
    assert without_quotations(page, {"a/x.py"}) == (
        "```python\n# a/x.py, C\n...\n```\n\n```python\n# y.py\ng()\n```\n"
    )
    assert without_quotations(page, {"b.py"}) == page


@pytest.mark.parametrize(
    ("page", "left"),
    [
        ("One. `tests/a.py` checks\nit. Two.\n\nThree.\n", "One. Two.\n\nThree.\n"),
        ("- One.\n- `tests/a.py` checks it.\n- Two.\n", "- One.\n- Two.\n"),
        ("- One.\n  `tests/a.py`\n", "- One."),
        ("One. `tests/b.py` checks it.\n", "One. `tests/b.py` checks it.\n"),
        ("| x | `tests/a.py`, `tests/b.py` |\n", "| x | `tests/b.py` |\n"),
        ("```\ntests/ `tests/a.py`\n```\n", "```\ntests/ `tests/a.py`\n```\n"),
    ],
)
def test_what_names_absent_tests_is_left_out(page: str, left: str) -> None:
    assert without_absent_tests(page, {"tests/b.py"}).rstrip() == left.rstrip()
