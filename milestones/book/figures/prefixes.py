"""m4: type prompts, and watch the radix tree of their words."""

from __future__ import annotations

from typing import Any

from ...drawing import svg
from ...drawing.tree import tree
from ..core_run import make_core, request_of, steps
from ..figure import Control, Figure, Shown
from ..picture import NAMES, frame

PAGE_SIZE, MAX_TOKENS, LETTER, ROW, GAP = 2, 4, 7, 34, 22
POLICIES = ("fcfs", "lpm", "dfs-weight")
PROMPTS = """\
a patient teacher says to small children why is the sky blue
a strict lawyer writes to all clients what is in a contract
a patient teacher says to small children what is the moon
a strict lawyer writes to all clients why we need a letter"""


def draw(prompts: str, policy: int, pages: int, step: int) -> Shown:
    """Draw the tree after a step. One row; a page holds two words."""
    lines = [line.split() for line in prompts.splitlines() if line.split()]
    if not lines:
        raise ValueError("type at least one prompt")
    known = dict.fromkeys(word for line in lines for word in line)
    words = {word: number for number, word in enumerate(known, start=1000)}
    core = make_core(
        "m4", pages, page_size=PAGE_SIZE, max_num_seqs=1, schedule_policy=POLICIES[policy],
        max_num_batched_tokens=64,
    )  # fmt: skip
    requests = {
        name: request_of(name, [words[word] for word in line], MAX_TOKENS)
        for name, line in zip(NAMES, lines, strict=False)
    }
    number = 0
    for number, _ in enumerate(steps(core, requests), start=1):
        if number == step:
            break
    named = {token: word for word, token in words.items()}
    cache = core.scheduler.kv_cache.radix_cache
    nodes = dict[int, dict[str, Any]]()
    _collect(cache.root, 0, nodes, named)
    widest = [8.0]

    def node(_: str, about: Any, x: float, y: float) -> float:
        right = x + 16 + LETTER * len(about["words"])
        widest[0] = max(widest[0], right)
        kind = "request0 pale" if about["locked"] else "slot"
        parts.append(svg.rect(x, y, right - x, ROW - 12, kind, rx=4))
        parts.append(svg.text(x + 8, y + 15, about["words"]))
        return right

    parts = [svg.text(8, 16, "root", "t")]
    below = tree(parts, nodes, 30, 30, ROW, 11, GAP, node)
    cached = sum(r.num_cached_tokens or 0 for r in requests.values())
    total = sum(len(line) for line in lines[: len(NAMES)])
    said = (
        f"After step {number}, {cached} of {total} prompt tokens were found in the tree, and "
        f"{core.scheduler.kv_cache.num_free_pages} of {pages} pages are free or can be evicted. "
        "Filled nodes are locked."
    )
    return Shown(frame(parts, max(420, widest[0] + 10), max(60, below + 6), said), said, cached)


def _collect(node: Any, number: int, nodes: dict[int, dict[str, Any]], named: Any) -> None:
    """Add the children of a node, with the words of their tokens. A generated token is a dot."""
    for child in node.children.values():
        words = " ".join(named.get(token, "·") for token in child.tokens)
        key = len(nodes) + 1
        nodes[key] = {"parent": number, "words": words, "locked": child.lock_count > 0}
        _collect(child, key, nodes, named)


FIGURE = Figure(
    name="prefixes",
    title="A tree of prompts",
    question=(
        "Each word is a token, a page holds two tokens, one request runs at a time, and the pool "
        "has nine pages. In the order of arrival (fcfs), 6 of the 47 prompt tokens are found in "
        "the tree. How many are found if the longest cached prefix comes first (lpm)?"
    ),
    controls=(
        Control("prompts", "prompts, one in a line", PROMPTS),
        Control("policy", "policy", 0, choices=POLICIES),
        Control("pages", "pages", 9, 8, 40),
        Control("step", "step", 6, 1, 60),
    ),
    draw=draw,
    asked={"policy": 1, "step": 60},
)
