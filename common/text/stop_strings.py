"""`StopStrings`: finds the stop strings of a request in a growing text (I6).

The search follows Aho and Corasick (Efficient string matching, CACM 1975). It reads each character
once. Its only state is `held`, the longest end of the text that begins a stop string:

    stop  ["\\nQuestion:", "\\nUser:"]       text  "The answer is 42\\nQu"       held  "\\nQu"

The automaton of Aho and Corasick stores a node for each character of each string. Python needs
hundreds of milliseconds to build it for 10,000 strings. Here the strings are only sorted, and a
binary search decides whether a string begins with a given text. The cost per character therefore
grows with the logarithm of the number of strings. This growth is hardly measurable.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class StopStrings:
    """The stop strings of a request, prepared for the search. Requests may share it: no state."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.complete = frozenset(strings)
        self.sorted = sorted(self.complete)
        self.lengths = sorted({len(string) for string in self.complete})
        self.first_characters = frozenset(string[0] for string in self.complete)

    def find(self, held: str, piece: str) -> tuple[str, int | None]:
        """Search in `piece`, the text that follows `held`.

        Returns the new `held`, and the index in `piece` at which the first complete stop string
        starts: below 0 if it starts in `held`, None if no string is complete. Of two strings that
        are complete at the same character, the longer one counts.
        """
        if not held and self.first_characters.isdisjoint(piece):
            return "", None  # the usual case
        for end, character in enumerate(piece, start=1):
            held = self.longest_start(held + character)
            if length := self.length_at_end(held):
                return held, end - length
        return held, None

    def skip(self, held: str, piece: str) -> str:
        """Return the new `held` after `piece`, which no stop string ends."""
        for character in piece:
            held = self.longest_start(held + character)
        return held

    def longest_start(self, text: str) -> str:
        """Return the longest end of `text` that begins a stop string; "" if there is none."""
        while text and not self.begins_one(text):
            text = text[1:]
        return text

    def begins_one(self, text: str) -> bool:
        """Return whether a stop string begins with `text`.

        In sorted order, such strings stand at the place of `text` and directly after it.
        """
        place = bisect_left(self.sorted, text)
        return place < len(self.sorted) and self.sorted[place].startswith(text)

    def length_at_end(self, text: str) -> int:
        """Return the length of the longest stop string at the end of `text`; 0 if there is none."""
        found = 0
        for length in self.lengths:
            if length > len(text):
                break
            if text[-length:] in self.complete:
                found = length
        return found
