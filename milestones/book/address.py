"""Where the site is published. The address is empty until someone publishes it: none is invented.

To publish the site, set `SITE`, and run `python -m milestones.book.address`, which writes the
link into README.md.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from ..chain import ROOT

SITE = ""  # such as https://example.org/llm-ladder/

README = ROOT / "README.md"
# The words in README.md that become the link.
WORDS = re.compile(r"builds (?:a book|\[a book\]\([^)]*\)) in which they run")


def linked(readme: str, site: str) -> str:
    """Return the text of README.md with a link to the site, or without one if site is "".

    Raises `ValueError` if README.md has lost the words that become the link.
    """
    book = f"[a book]({site})" if site else "a book"
    text, count = WORDS.subn(f"builds {book} in which they run", readme)
    if count != 1:
        raise ValueError(f"README.md needs one place for the link to the book, not {count}")
    return text


def card(site: str) -> str:
    """Return the tags with which other sites show a link to the book. They need its address."""
    if not site:
        return ""
    said = {
        "og:type": "website",
        "og:title": "LLM Ladder",
        "og:description": "Five small engines serve a language model, and run in this book.",
        "og:image": f"{site.rstrip('/')}/_static/card.png",
        "og:url": site,
    }
    tags = [f'<meta property="{name}" content="{text}">' for name, text in said.items()]
    return "\n".join([*tags, '<meta name="twitter:card" content="summary_large_image">'])


def not_found(site: str) -> str:
    """Return the page for an address that does not exist. A server shows it at any depth.

    So its links are absolute, and it has no other file.
    """
    home = urlsplit(site).path or "/"
    home = home if home.endswith("/") else f"{home}/"
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<title>LLM Ladder: no such page</title>
<style>body {{ font: 1.1rem/1.6 sans-serif; margin: 15vh auto; max-width: 32rem; padding: 0 1rem }}
</style>
<h1>This step is missing</h1>
<p>The book has no page with this address. It may have moved.</p>
<p><a href="{home}">The first page</a> · <a href="{home}search.html">Search the book</a></p>
</html>
"""


def main() -> None:
    """Write the link into README.md."""
    README.write_text(linked(README.read_text("utf-8"), SITE), encoding="utf-8")


if __name__ == "__main__":
    main()
