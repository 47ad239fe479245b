"""The central pictures of attention: the triangle, the weights of a step, the tiles of a kernel."""

from __future__ import annotations

import math
from typing import Any

from milestones.drawing import svg
from milestones.drawing.svg import line, text

from .facts import data
from .figures import forwards_of
from .svg import SMALL, WIDTH, hue, labelled, picture, rect, text_width

Json = dict[str, Any]


def triangle(name: str = "m1_example", who: str = "A") -> str:
    """Draw which scores each step of a request computes, without the cache and with it.

    A row is a query and a column is a key.
    """
    counts = [batch[who] for batch in forwards_of(data(name)) if who in batch]
    ends = [sum(counts[: n + 1]) for n in range(len(counts))]
    pitch, cell = WIDTH / len(counts), (WIDTH / len(counts) - 66) / ends[-1]
    parts, height = list[str](), cell * ends[-1]
    for number, (count, end) in enumerate(zip(counts, ends, strict=True)):
        x = number * pitch
        for top in (20.0, 118 + height):
            parts.append(text(x, top, f"step {number + 1}", "soft"))
        for top, start, kind in ((32.0, 0, "hot"), (130 + height, end - count, "")):
            parts += _triangle(x, top, cell, end, start, kind or ("output", "computed")[count > 1])
            rows = end - start
            tokens = f"{rows} tokens" if rows > 1 else "1 token"
            scores = sum(range(start + 1, end + 1))
            parts.append(text(x, top + height + 24, tokens, "strong"))
            parts.append(text(x, top + height + 48, f"{scores} scores", "soft"))
    for top, words in ((0.0, "without the cache"), (98 + height, "with the cache")):
        parts.append(text(WIDTH, top + 20, words, "strong", 22, "end"))
    return picture(WIDTH, 130 + 2 * height + 56, parts, f"Scores of each step of request {who}")


def _triangle(x: float, y: float, cell: float, end: int, start: int, kind: str) -> list[str]:
    """Draw the rows of a causal triangle. Rows before `start` have been computed before."""
    parts = []
    for row in range(end):
        for column in range(row + 1):
            now = kind if row >= start else "idle"
            box = (x + column * cell, y + row * cell, cell - 1.5, cell - 1.5)
            parts.append(rect(*box, now, 1))
    if start:  # the keys that the new rows read from the cache
        parts.append(rect(x - 2, y + start * cell - 2, start * cell, cell + 2, "key-frame", 2))
    return parts


def streaming(*rows: str, of: str = "requests") -> str:
    """Draw the weights that pass by rows of input, and how long reading and arithmetic take.

    of: what several rows are, the tokens of "requests" or of a "prompt".
    """
    measured = data("m2_linears")
    read = measured["weights_gb"] / measured["bytes_per_second"] * 1e12
    each = measured["gflop_per_row"] / measured["flops_per_second"] * 1e12
    scale = (WIDTH - 250) / max(read, *(each * int(n) for n in rows))
    parts, y = list[str](), 0.0
    for number, count in enumerate(map(int, rows)):
        many = f"{count} requests" if of == "requests" else f"a {of} of {count} tokens"
        words = "1 row: one token of one request" if count == 1 else f"{count} rows: {many}"
        parts.append(text(0, y + 24, words, "strong", 24))
        parts += _weights(y + 38, count, number, of == "requests")
        for row, (what, took, kind) in enumerate(
            (("read the weights", read, "plan"), ("multiply", each * count, "prompt"))
        ):
            top = y + 118 + 38 * row
            parts.append(text(0, top + 23, what, ""))
            parts.append(rect(180, top, max(3, took * scale), 30, kind, 3))
            end = 180 + took * scale
            parts.append(text(end + 10, top + 23, f"{took:.1f} ms", "strong"))
        y += 216
    return picture(WIDTH, y - 10, parts, f"Weights that pass by {' and by '.join(rows)} rows")


def _weights(y: float, count: int, number: int, differ: bool) -> list[str]:
    """Draw weights that move from memory to the rows that they are multiplied with."""
    left, right, pitch = 180.0, WIDTH - 230.0, 42.0
    tiles = [
        rect(left + n * pitch, y + 15, pitch - 8, 40, "plan", 3)
        for n in range(-1, int((right - left) / pitch))
    ]
    clip = f"stream-{number}"
    window = svg.element("clipPath", svg.rect(left, y, right - left, 70), id=clip)
    moving = svg.element("g", "".join(tiles), kind="stream")
    parts = [
        window,
        svg.element("g", moving, clip_path=f"url(#{clip})"),
        rect(0, y, 168, 70, "frame", 6),
        text(84, y + 31, "memory", "strong", anchor="middle"),
        text(84, y + 57, "538 MB", "soft", anchor="middle"),
        rect(right + 12, y, 218, 70, "frame", 6),
    ]
    size = min(24.0, 200.0 / count)
    for row in range(count):
        x = right + 121 + (row - count / 2) * size
        parts.append(rect(x, y + 10, size - 2.5, 50, "chip", 2, hue(row * differ)))
    return parts


def tiles(name: str = "m3_scores") -> str:
    """Draw the scores of a query in tiles, and what the kernel keeps after each tile."""
    run = data(name)
    scores, size = run["scores"], run["tile"]
    width, top = (WIDTH - 190) / len(scores), 190.0
    low, high = min(0.0, min(scores)), max(scores)
    parts = [text(0, 110, "score", "", 22)]
    parts += [text(0, top + 84 + 40 * n, words, "", 22) for n, words in enumerate(STATE)]
    before, total = -math.inf, 0.0
    for start in range(0, len(scores), size):
        tile = scores[start : start + size]
        x = 190 + start * width
        maximum = max(before, *tile)
        decay = math.exp(before - maximum)
        total = total * decay + sum(math.exp(score - maximum) for score in tile)
        parts.append(rect(x, 0, width * len(tile) - 8, top + 44, "frame", 8))
        for n, score in enumerate(tile):
            tall = 140 * (score - low) / (high - low)
            kind = "forward" if score == maximum else "work"
            parts.append(rect(x + n * width + 8, top - tall, width - 24, tall, kind, 3))
            middle = x + n * width + width / 2 - 4
            parts.append(text(middle, top - tall - 8, f"{score:.1f}", anchor="middle"))
            word = run["tokens"][start + n].strip()
            shown = min(22.0, (width - 8) / text_width(word, 1))
            parts.append(text(middle, top + 30, word, "soft", shown, "middle"))
        scaled = "first tile" if before == -math.inf else f"times {decay:.2f}"
        for n, words in enumerate((f"{maximum:.2f}", scaled, f"{total:.2f}")):
            kind = ("forward-ink strong", "hot-ink", "strong")[n]
            parts.append(text(x + 12, top + 84 + 40 * n, words, kind, 24))
        before = maximum
    return picture(WIDTH, top + 178, parts, "Scores in tiles, and the running maximum")


STATE = ("running maximum", "the sums so far", "sum of weights")


def futures(name: str = "m5_futures") -> str:
    """Draw the inputs of forwards with placeholders, the map, and the tokens that replace them."""
    run = data(name)
    words, y = run["words"], 0.0
    parts = [
        text(x, 22, title, "soft", SMALL)
        for x, title in ((150, "planned by the host"), (480, "map, on the device"),
                         (800, "after resolve"), (1010, "sampled, stored"))
    ]  # fmt: skip
    held: dict[str, int] = {}
    for number, shown in enumerate(run["forwards"]):
        top = y + 40
        held = {str(-t): a for t, a in zip(shown["before"], shown["after"], strict=True) if t < 0}
        parts.append(text(0, top + 33, f"forward {shown['forward']}", "strong", 24))
        for row, (before, after) in enumerate(zip(shown["before"], shown["after"], strict=True)):
            middle = top + 26 + 52 * row
            if before < 0:
                target = f"[{-before}]  {words[str(held[str(-before)])].strip()}"
                parts += _token(150, middle, str(before), "stall", "hot-ink")
                parts.append(line(310, middle, 472, middle, "arrow"))
                parts += _token(480, middle, target, "frame", "strong")
                parts.append(line(640, middle, 792, middle, "arrow"))
            else:
                parts += _token(150, middle, words[str(before)])
                parts.append(line(310, middle, 792, middle, "back"))
            parts += _token(800, middle, words[str(after)])
        for row, (index, token) in enumerate(shown["stored"].items()):
            place = f"[{index}]  {words[str(token)].strip()}"
            parts += _token(1010, top + 26 + 52 * row, place, "frame", "strong")
        y += 52 * len(shown["before"]) + (24 if number + 1 < len(run["forwards"]) else 0)
    return picture(WIDTH, y + 36, parts, "Placeholders and the tokens that replace them")


def _token(x: float, middle: float, word: str, kind: str = "output", ink: str = "on") -> list[str]:
    return labelled(x, middle - 22, 150, 42, word.strip(), kind, f"{ink} strong", 22, 6)
