"""Figures of what a step computes: the tokens of a request, and the inputs of a forward."""

from __future__ import annotations

from typing import Any

from milestones.drawing.svg import line, text

from .facts import data
from .figures import forwards_of
from .svg import NUMBER, SMALL, WIDTH, chip, hue, labelled, picture, rect

Json = dict[str, Any]


def tokens_of(run: Json, letter: str, number: int) -> list[str]:
    """Return the tokens of a request after a step, in order of position."""
    said = [step["said"][letter] for step in run["steps"][:number] if step["said"].get(letter)]
    return [token.strip() or "␣" for token in [*run["prompts"][letter], *said]]


def computed_before(run: Json, letter: str, number: int) -> int:
    """Return how many tokens of a request had been computed before a step."""
    return int(run["steps"][number - 2]["requests"][letter]["computed"]) if number > 1 else 0


def request(name: str = "m1_example", letter: str = "B", *numbers: str) -> str:
    """Draw a request before some steps: its tokens, its KV cache, and what the step feeds."""
    run, parts, y, left = data(name), list[str](), 0.0, 132.0
    most = max(len(tokens_of(run, letter, int(number) - 1)) for number in numbers)
    pitch = (WIDTH - left - 270) / most
    for number in map(int, numbers):
        tokens, computed = tokens_of(run, letter, number - 1), computed_before(run, letter, number)
        prompt = len(run["prompts"][letter])
        fed = f"the {len(tokens) - computed} tokens" if len(tokens) - computed > 1 else "one token"
        parts.append(text(0, y + 22, f"step {number} feeds {fed} in the blue frame", "strong", 23))
        parts.append(text(0, y + 88, "token_ids", "", 22))
        parts.append(text(0, y + 146, "KV cache", "", 22))
        for place, token in enumerate(tokens):
            x, kind = left + place * pitch, "computed" if place < prompt else "output"
            middle = x + pitch / 2 - 3
            parts.append(text(middle, y + 54, f"{place}", "soft", SMALL, "middle"))
            parts += labelled(x, y + 62, pitch - 6, 42, token, kind, "on strong", 22)
            kept = "cached" if place < computed else "idle"
            parts.append(rect(x, y + 120, pitch - 6, 38, kept))
        width = (len(tokens) - computed) * pitch
        parts.append(rect(left + computed * pitch - 4, y + 58, width + 2, 50, "box fed", 6))
        end = left + len(tokens) * pitch + 12
        parts.append(text(end, y + 90, f"num_tokens = {len(tokens)}", "", 22))
        parts.append(text(end, y + 146, f"num_computed_tokens = {computed}", "", 22))
        y += 194
    return picture(WIDTH, y - 26, parts, f"The two integers of request {letter}")


def rectangle(name: str = "m2_example", *numbers: str) -> str:
    """Draw the inputs of steps of m2: one row for each request, and one column for each position.

    A decode also shows the slots that its rows read.
    """
    run, parts, y, left = data(name), list[str](), 0.0, 112.0
    shown = [(number, forwards_of(run)[number - 1]) for number in map(int, numbers)]
    longest = max(computed_before(run, w, n) + count for n, b in shown for w, count in b.items())
    pitch = (WIDTH - left - 150) / longest
    for number, batch in shown:
        rows, columns = len(batch), max(batch.values())
        ends = {letter: computed_before(run, letter, number) + n for letter, n in batch.items()}
        kind = "prefill" if columns > 1 else "decode"
        words = f"step {number}, {kind}: input_ids [{rows}, {columns}]"
        parts.append(text(0, y + 22, words, "strong", 23))
        parts.append(text(0, y + 54, "position", "soft"))
        parts.append(text(WIDTH, y + 54, "sampled", "soft", SMALL, "end"))
        for place in range(max(ends.values())):
            middle = left + (place + 0.5) * pitch - 2
            parts.append(text(middle, y + 54, f"{place}", "soft", SMALL, "middle"))
        for row, (letter, end) in enumerate(ends.items()):
            top, tokens = y + 64 + row * 50, tokens_of(run, letter, number - 1)
            parts.append(chip(28, top + 21, letter, NUMBER[letter], 36))
            for place in range(max(ends.values())):
                box = (left + place * pitch, top, pitch - 4, 42.0)
                if place >= end:  # computed in a prefill, read and hidden in a decode
                    parts += (
                        labelled(*box, "0", "padding") if columns > 1 else [rect(*box, "stall")]
                    )
                elif place >= end - batch[letter]:
                    fed = "computed" if columns > 1 else "output"
                    parts += labelled(*box, tokens[place], fed, "on strong")
                else:
                    parts.append(rect(*box, "chip", 4, hue(NUMBER[letter])))
            word = run["steps"][number - 1]["said"].get(letter, "").strip()
            parts.append(text(WIDTH, top + 28, word, "output-ink strong", 22, "end"))
        y += 64 + 50 * rows + 30
    return picture(WIDTH, y - 30, parts, f"Inputs of the steps {' and '.join(numbers)} of {name}")


def flat(name: str, number: str) -> str:
    """Draw the flat list of tokens of a step, the slots that store them, and the page tables."""
    run, step = data(name), int(number)
    batch, after, size = (
        forwards_of(run)[step - 1],
        run["steps"][step - 1],
        run["config"]["page_size"],
    )
    left, pool = 160.0, 272.0
    pitch, pages = (WIDTH - left) / sum(batch.values()), run["config"]["num_pages"] + 1
    width = WIDTH / pages / size  # of a slot in the pool
    parts, count = list[str](), 0
    for y, words in ((82, "token"), (122, "position"), (154, "query_start_loc")):
        parts.append(text(0, y, words, "soft"))
    written: dict[int, tuple[str, bool]] = {}  # by slot: its request, and whether it is new
    for letter, computed in batch.items():
        start, begin = computed_before(run, letter, step), left + count * pitch
        table, tokens = after["tables"][letter], tokens_of(run, letter, step - 1)
        for position in range(start + computed):
            slot = table[position // size] * size + position % size
            written[slot] = (letter, position >= start)
            if position < start:
                continue
            x = begin + (position - start) * pitch
            middle, target = x + pitch / 2 - 3, (slot + 0.5) * width
            box, style = (x, 50.0, pitch - 6, 48.0), hue(NUMBER[letter])
            parts += labelled(*box, tokens[position], "chip", "chip-ink strong", 22, style=style)
            parts.append(text(middle, 122, f"{position}", "", 21, "middle"))
            parts.append(line(middle, 166, target, pool - 4, "arrow"))
        said = after["said"].get(letter, "").strip()
        words = f"next: {said}" if said else "no next token: the prompt goes on"
        parts.append(chip(begin + 18, 22, letter, NUMBER[letter], 34))
        beside = (begin + 42, "") if count else (begin - 8, "end")  # left of it is more room
        ink = "output-ink strong" if said else "soft"
        parts.append(text(beside[0], 29, words, ink, 21, beside[1]))
        parts.append(line(begin - 3, 44, begin - 3, 136))
        parts.append(text(begin - 3, 156, f"{count}", "strong", 21, "middle"))
        count += computed
    parts.append(text(WIDTH - 6, 156, f"{count}", "strong", 21, "end"))
    for slot in range(pages * size):
        owner, is_new = written.get(slot, ("", False))
        kind = "chip" if owner else "padding" if slot < size else "idle"
        style = hue(NUMBER[owner]) if owner else ""
        box, word = (slot * width + 1, pool, width - 2, 44.0), f"{slot}" if is_new else ""
        parts += labelled(*box, word, kind, "chip-ink strong", radius=2, style=style)
    for page in range(pages):
        edge = page * size * width
        parts.append(rect(edge, pool - 1, size * width - 1, 46, "page", 3))
        parts.append(text(edge + size * width / 2, pool + 68, f"{page}", "soft", SMALL, "middle"))
    words = f"Pages of {size} slots. A number in a slot: this step writes it."
    parts.append(text(0, pool + 98, words))
    for place, letter in enumerate(batch):
        x, below = place * WIDTH / 2, pool + 118
        parts.append(chip(x + 18, below + 20, letter, NUMBER[letter], 34))
        for column, page in enumerate(after["tables"][letter]):
            parts += labelled(x + 46 + column * 46, below, 42, 40, f"{page}", "frame", "strong", 22)
        end = x + 58 + len(after["tables"][letter]) * 46
        parts.append(
            text(end, below + 27, f"seq_lens: {after['requests'][letter]['computed']}", "", 21)
        )
    return picture(WIDTH, pool + 162, parts, f"The flat batch of step {number} of {name}")
