"""Put a function of a file back as it is in another version of the file. The rest stays."""

from __future__ import annotations

import ast

from ..outline import span_of
from ..release.cut import body_span, functions


class ResetError(Exception):
    """The exercise cannot be reset. The message says why. Nothing was changed."""


def put_back(source: str, original: str, symbol: str, name: str) -> str:
    """Return a source in which a function is as in the original.

    A function that was deleted is put back in its class, after the function that precedes it.
    """
    there, wanted = definitions(source), definitions(original)
    lines, block = source.splitlines(), wanted[symbol]
    if symbol in there:
        first, last = there[symbol][0], there[symbol][1]
        lines[first - 1 : last] = original.splitlines()[block[0] - 1 : block[1]]
        return "\n".join(lines) + "\n"
    order = list(wanted)
    before = [other for other in order[: order.index(symbol)] if other in there]
    same = [other for other in before if other.partition(".")[0] == symbol.partition(".")[0]]
    if "." in symbol and not same:
        raise ResetError(f"{name} has no class for {symbol} any more: put the class back first")
    at = there[(same or before)[-1]][1] if same or before else len(lines)
    gap = [""] if "." in symbol else ["", ""]
    lines[at:at] = [*gap, *original.splitlines()[block[0] - 1 : block[1]]]
    return "\n".join(lines) + "\n"


def definitions(source: str) -> dict[str, tuple[int, int]]:
    """Return the first and last line of each function, with decorators and the comments above."""
    lines = source.splitlines()
    found: dict[str, tuple[int, int]] = {}
    previous = None
    for symbol, node in functions(ast.parse(source)):
        first, last = span_of(node, lines).first, body_span(node, lines).last
        if symbol == previous:  # a property and its setter are neighbours with the same name
            first = found[symbol][0]
        found[symbol], previous = (first, last), symbol
    return found
