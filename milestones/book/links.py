"""Test the links of a built site: each leads to a file and a place that are there.

Sphinx tests the links of its own sources. This tests what a browser gets: also the links in HTML,
in pictures and of the theme. Each is relative, so the site works below any path.
"""

from __future__ import annotations

import posixpath
import re
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

ADDRESS = re.compile(r'<(?P<tag>\w+)\b[^>]*?\s(?:href|src|srcset|poster)="(?P<link>[^"]*)"')
PLACE = re.compile(r'\s(?:id|name)="([^"]*)"')
SCRIPT = re.compile(r"(<script\b[^>]*>).*?</script>", re.DOTALL)
OF_A_SCRIPT = re.compile(r"/|.*=")  # the number of a slide, or the step of a run
LEAVES = {"a"}  # a link of this tag may lead to another host, because the reader decides
SAYS_WHERE = 'rel="canonical"'  # a tag that says where this page is, and loads nothing
OWN_ROOT = {"404.html"}  # a server shows it at any depth


def faults(site: Path) -> list[str]:
    """Return what is wrong with the links of all pages below a folder, one line for each."""
    texts = {
        path.relative_to(site).as_posix(): SCRIPT.sub(r"\1", path.read_text(encoding="utf-8"))
        for path in sorted(site.rglob("*.html"))
    }
    places = {page: {unescape(name) for name in PLACE.findall(t)} for page, t in texts.items()}
    found = []
    for page, text in texts.items():
        if page in OWN_ROOT:
            continue
        links = {
            (match["tag"], unescape(match["link"]))
            for match in ADDRESS.finditer(text)
            if SAYS_WHERE not in match[0]
        }
        for tag, link in sorted(links):
            if reason := _fault(tag, link, page, site, places):
                found.append(f"{page}: {link}: {reason}")
    return found


def _fault(tag: str, link: str, page: str, site: Path, places: dict[str, set[str]]) -> str | None:
    """Return what is wrong with a link, or None."""
    parts = urlsplit(link)
    if parts.scheme in ("data", "mailto"):
        return None
    if parts.scheme or parts.netloc:
        return None if tag in LEAVES else "the page would load it from another host"
    if parts.path.startswith("/"):
        return "it begins at the root of the server, and the site may lie below a path"
    path = unquote(parts.path)
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
    if (site / target).is_dir():
        target = f"{target}/index.html"
    if target.startswith("..") or not (site / target).is_file():
        return "no such file"
    anchor = unquote(parts.fragment)
    if OF_A_SCRIPT.match(anchor):
        return None
    if anchor and target in places and anchor not in places[target]:
        return "no such place on the page"
    return None
