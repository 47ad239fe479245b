"""Lay out the sources of the site in one folder: the chapters, and pages of this repository.

A page keeps its path, so that its links to other pages stay right. A link to a file of code leads
to a page that shows this file. A link to anything else that the site does not have leads to the
repository if its address is known (`REPOSITORY`), and is plain text if not. No text is copied into
the repository: the folder is made anew for each build.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from ..chain import ROOT, electives, milestones
from ..drawing import svg, theme

REPOSITORY = os.environ.get("LADDER_REPOSITORY", "")  # such as https://example.org/llm-ladder
BUILT = "slides/dist"
CHAPTERS = "milestones/book/pages"  # they stand at the top of the site
PAGES = (
    "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "milestones/README.md",
    *(f"milestones/docs/{name}.md" for name in (
        "TOUR", "GLOSSARY", "WHERE", "QUESTIONS", "INSIDE", "USING", "MODELS", "SERVING", "SCALING",
        "SPEED", "RIVALS", "UPSTREAM", "TERM",
    )),
    *(f"milestones/project/{name}.md" for name in ("README", "proposal", "topics")),
    *(f"milestones/{name}/README.md" for name in milestones()),
    *(f"milestones/electives/{name}/README.md" for name in electives()),
)  # fmt: skip
ICON = "favicon.svg"  # in the folder
CODE = {".py": "python", ".toml": "toml", ".c": "c", ".js": "javascript", ".sh": "bash"}
PICTURES = (".svg", ".png", ".gif")
OUT_OF_SLIDES = re.compile(r'\bhref="(\.\./\.\./[^"]+)"')  # to a page of this repository
# A fence, code in a line, a link or a picture, or an address in an HTML tag.
MARKED = re.compile(
    r"(?P<code>^```.*?^```|`[^`\n]+`)"
    r"|(?P<start>!?\[(?P<text>(?:[^\[\]]|!?\[[^\]]*\]\([^)]*\)|`[^`]*`)*)\]\()(?P<link>[^)\s]+)\)"
    r'|(?P<tag>\b(?:src|srcset|href)=")(?P<address>[^"]+)"',
    re.DOTALL | re.MULTILINE,
)


class Staging:
    """A folder that becomes the sources of the site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code: set[str] = set()  # the files of code that pages link to, from the root
        self.built = built_pages()  # of the slides

    def fill(self) -> None:
        """Fill the folder with all pages."""
        (self.folder / "_extra").mkdir(parents=True)  # copied as it is: pictures that HTML names
        (self.folder / ICON).write_text(icon(), encoding="utf-8")
        (self.folder / "repo").symlink_to(ROOT, target_is_directory=True)  # for `literalinclude`
        chapters = sorted((ROOT / CHAPTERS).glob("*.md"))
        for page in (*(path.relative_to(ROOT).as_posix() for path in chapters), *PAGES):
            self.write(staged(page), self.linked((ROOT / page).read_text("utf-8"), page))
        for page in self.built:
            self.write(
                f"_extra/{page}", self._with_site_links((ROOT / page).read_text("utf-8"), page)
            )
        for name in sorted(self.code):
            self.write(f"code/{name}.md", code_page(name))

    def write(self, name: str, text: str) -> None:
        """Write a page. name: its path in the folder."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def html(self, text: str) -> str:
        """Keep HTML in a file, and return the directive that shows it in a page."""
        name = f"_made/{hashlib.sha256(text.encode()).hexdigest()[:16]}.html"
        self.write(name, text)
        return f"```{{made}} {name}\n```\n"

    def change(self, name: str, changed: Callable[[str], str]) -> None:
        """Change the text of a page that is written already. name: its path in the folder."""
        path = self.folder / name
        path.write_text(changed(path.read_text("utf-8")), encoding="utf-8")

    def linked(self, text: str, page: str) -> str:
        """Return the text of a page with links that the site can follow. page: its path."""

        def replaced(found: re.Match[str]) -> str:
            if found["code"]:
                return found[0]
            if found["tag"]:
                return f'{found["tag"]}{self._address(found["address"], page)}"'
            name = found["text"]
            if "](" in name:  # a picture inside a link
                name = MARKED.sub(replaced, name)
            target = self._target(found["link"], page)
            if target is None:
                return name
            if f"/{BUILT}/" in f"/{target}":  # no page of Sphinx
                return f'<a href="{target}">{name}</a>'
            mark = "!" if found["start"].startswith("!") else ""
            return f"{mark}[{name}]({target})"

        return MARKED.sub(replaced, text)

    def _with_site_links(self, text: str, page: str) -> str:
        """Return HTML of the slides with links to pages of the site. page: its path."""

        def replaced(found: re.Match[str]) -> str:
            return f'href="{self._address(found[1], page)}"'

        return OUT_OF_SLIDES.sub(replaced, text)

    def _address(self, address: str, page: str) -> str:
        """Return an address in HTML as the site needs it. A picture is copied to this place."""
        name, mark, anchor = address.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
        if path in PAGES:  # Sphinx does not follow links in HTML
            return f"{name.removesuffix('.md')}.html{mark}{anchor}"
        if Path(path).suffix in CODE and (ROOT / path).is_file():
            self.code.add(path)
            there = posixpath.relpath(f"code/{path}.html", posixpath.dirname(staged(page)) or ".")
            return f"{there}{mark}{anchor}"
        if path.endswith(PICTURES) and (ROOT / path).is_file():
            copy = self.folder / "_extra" / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / path, copy)
        return address

    def _target(self, link: str, page: str) -> str | None:
        """Return where a link leads in the site, or None if it leads nowhere."""
        if re.match(r"[a-z]+:|#", link):
            return link
        name, _, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), name))
        if f"{path}/README.md" in PAGES:
            path = f"{path}/README.md"
        file, folder = ROOT / path, posixpath.dirname(staged(page)) or "."
        if path in PAGES or (path.startswith(CHAPTERS) and file.is_file()):
            return posixpath.relpath(staged(path), folder) + (f"#{anchor}" if anchor else "")
        if path in self.built:
            return posixpath.relpath(path, folder) + (f"#{anchor}" if anchor else "")
        if file.suffix in PICTURES and file.is_file():
            copy = self.folder / path
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
            return posixpath.relpath(path, folder)
        if file.suffix in CODE and file.is_file():
            self.code.add(path)
            return posixpath.relpath(f"code/{path}.md", folder)
        return f"{REPOSITORY}/{path}" if REPOSITORY and file.exists() else None


def built_pages() -> tuple[str, ...]:
    """Return the pages that `python -m slides build` has made: decks, and runs in the player."""
    return tuple(f"{BUILT}/{path.name}" for path in sorted((ROOT / BUILT).glob("*.html")))


def staged(page: str) -> str:
    """Return the path of a page in the site."""
    return page.removeprefix(f"{CHAPTERS}/")


def icon() -> str:
    """Return the icon of the site: a ladder."""
    style = f"path{{fill:none;stroke:{theme.colours('light')['output']};stroke-width:2}}"
    ladder = svg.path("M4 1v14M12 1v14M4 4h8M4 8h8M4 12h8")
    return svg.document([ladder], 16, 16, style, "a ladder")


def code_page(name: str) -> str:
    """Return a page that shows a file of code."""
    language = CODE[Path(name).suffix]
    fence = f"```{{literalinclude}} /repo/{name}\n:language: {language}\n:linenos:\n```"
    return f"---\norphan: true\n---\n\n# {name}\n\n{fence}\n"
