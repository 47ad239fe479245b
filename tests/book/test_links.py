"""The links of the built site, its address, and what needs the address."""

from __future__ import annotations

from pathlib import Path

import pytest

from milestones.book import address, links
from tests.conftest import ROOT

SITE = "https://example.org/ladder/"


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        ('<a href="sub/b.html#there">', None),
        ('<a href="sub/">', None),
        ('<a href="#here">', None),
        ('<a href="sub/b.html?x=1#step=4">', None),
        ('<a href="sub/b.html#/3">', None),
        ('<script>say(`<a href="${x}">`)</script>', None),
        ('<a href="https://example.org">', None),
        ('<img class="p" src="data:image/png;base64,">', None),
        ('<link rel="canonical" href="https://example.org/ladder/a.html">', None),
        ('<a href="sub/b.html#nowhere">', "place"),
        ('<a href="#nowhere">', "place"),
        ('<a href="c.html">', "file"),
        ('<a href="../a.html">', "file"),
        ('<img src="p.png">', "file"),
        ('<a href="/a.html">', "root"),
        ('<script src="https://example.org/x.js">', "host"),
        ('<img src="//example.org/x.png">', "host"),
    ],
)
def test_a_link_leads_to_a_place_of_the_site(tmp_path: Path, link: str, reason: str | None) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.html").write_text(f'<p id="here"></p>{link}')
    for name in ("b", "index"):
        (tmp_path / "sub" / f"{name}.html").write_text('<h1 class="x" id="there"></h1>')
    found = links.faults(tmp_path)
    assert len(found) == (reason is not None)
    assert not reason or reason in found[0]


def test_readme_links_to_the_book_as_soon_as_it_has_an_address() -> None:
    readme = address.README.read_text("utf-8")
    assert readme == address.linked(readme, address.SITE)
    with_link = address.linked(readme, SITE)
    assert f"[a book]({SITE})" in with_link
    assert address.linked(with_link, "") == readme.replace(f"[a book]({address.SITE})", "a book")
    with pytest.raises(ValueError, match="one place"):
        address.linked("no book", SITE)


def test_without_an_address_no_page_claims_one() -> None:
    assert address.card("") == ""
    assert f'content="{SITE}_static/card.png"' in address.card(SITE)
    assert (ROOT / "milestones/book/static/card.png").is_file()
    assert 'href="/ladder/"' in address.not_found(SITE)
    assert 'href="/"' in address.not_found("")
