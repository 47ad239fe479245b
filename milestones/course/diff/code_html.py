"""Write lines of code as HTML, coloured, with the changed words of a line marked.

A line is an element with its number. `lesson.css` puts old and new lines side by side, or one below
the other.
"""

from __future__ import annotations

import difflib
import math
from html import escape
from itertools import groupby

from pygments.lexers.python import PythonLexer
from pygments.token import Token

from ..outline import Line
from .align import ALIKE, aligned, likeness, words
from .parts import Block, Part

COLOURS = (  # a token has the class of the first type that contains it
    (Token.Literal.String.Doc, "s"),
    (Token.Literal.String.Interpol, "i"),
    (Token.Literal.String, "s"),
    (Token.Comment, "c"),
    (Token.Keyword, "k"),
    (Token.Operator.Word, "k"),
    (Token.Literal.Number, "n"),
    (Token.Name.Function, "f"),
    (Token.Name.Class, "f"),
    (Token.Name.Decorator, "d"),
    (Token.Name.Builtin, "b"),
    (Token.Name.Exception, "b"),
)
Pieces = list[tuple[str, str]]  # of a line: class or "", and text
Coloured = dict[int, Pieces]  # by the number of a line


def segments(part: Part, starts: list[int]) -> list[str]:
    """Return the code of a part, cut before some of its lines, which are given by their numbers.

    Only a file or a class that was added is cut. Its code is coloured as a whole.
    """
    old = _coloured([line for block in part.blocks for line in block.old])
    new = _coloured([line for block in part.blocks for line in block.new])
    one_sided = "" if part.kind == "changed" else " one"
    pieces = []
    for first, end in zip([0, *starts], [*starts, math.inf], strict=True):
        blocks = part.blocks
        if starts:
            lines = [line for block in part.blocks for line in block.new]
            blocks = [Block("change", [], [x for x in lines if first <= x.number < end])]
        body = "".join(_block(block, old, new) for block in blocks if block.old or block.new)
        pieces.append(f'<div class="code{one_sided}">{body}</div>' if body else "")
    return pieces


def _block(block: Block, old: Coloured, new: Coloured) -> str:
    if block.kind != "change":
        rows = "".join(
            _cell("old same", row, a, old[a.number]) + _cell("new same", row, b, new[b.number])
            for row, (a, b) in enumerate(zip(block.old, block.new, strict=True), start=1)
        )
        grid = f'<div class="block">{rows}</div>'
        if block.kind == "same":
            return grid
        return f"<details><summary>{len(block.new)} unchanged lines</summary>{grid}</details>"
    gone, come = [], []
    for row, (a, b) in enumerate(aligned(block.old, block.new), start=1):
        was, now = old[a.number] if a else [], new[b.number] if b else []
        if a and b:
            was, now = _marked(was, now)
        gone += [_cell("old gone", row, a, was)] if a else []
        come += [_cell("new come", row, b, now)] if b else []
    return f'<div class="block">{"".join(gone + come)}</div>'


def _cell(kind: str, row: int, line: Line, pieces: Pieces) -> str:
    text = "".join(f'<i class="{c}">{escape(t)}</i>' if c else escape(t) for c, t in pieces)
    indent = len(line.text) - len(line.text.lstrip())
    style = f"--row:{row};--in:{indent}"
    return f'<div class="{kind}" style="{style}" data-n="{line.number}">{text}\n</div>'


def _coloured(lines: list[Line]) -> Coloured:
    """Colour the pieces of each line. All lines are coloured together, because of docstrings."""
    pieces: list[Pieces] = [[]]
    source = "\n".join(line.text for line in lines)
    for token, text in PythonLexer(stripnl=False, ensurenl=False).get_tokens(source):
        kind = next((name for of, name in COLOURS if token in of), "")
        first, *others = text.split("\n")
        pieces[-1].append((kind, first))
        pieces += [[(kind, other)] for other in others]
    return {line.number: found for line, found in zip(lines, pieces, strict=False)}


def _marked(old: Pieces, new: Pieces) -> tuple[Pieces, Pieces]:
    """Return the pieces of two lines. If these are similar, changed words have the class `w`."""
    if likeness(*("".join(text for _, text in pieces) for pieces in (old, new))) < ALIKE:
        return old, new
    before, after = (
        [(kind, word) for kind, text in pieces for word in words(text)] for pieces in (old, new)
    )
    was, now = ([word for _, word in pieces] for pieces in (before, after))
    for tag, i, j, k, end in difflib.SequenceMatcher(None, was, now, False).get_opcodes():
        if tag != "equal":
            before[i:j] = [(f"{kind} w".strip(), word) for kind, word in before[i:j]]
            after[k:end] = [(f"{kind} w".strip(), word) for kind, word in after[k:end]]
    return _joined(before), _joined(after)


def _joined(pieces: Pieces) -> Pieces:
    """Return the pieces, with those of one class in a row as one piece."""
    runs = groupby(pieces, lambda piece: piece[0])
    return [(kind, "".join(text for _, text in run)) for kind, run in runs]
