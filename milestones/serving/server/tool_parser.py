"""`ToolParser`: find tool calls in the text of a model, while it is generated.

The format is that of Hermes. A grammar has forced each call to be exactly so:

    text <tool_call>
    {"name": "NAME", "arguments": {...}}
    </tool_call> text
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MARKER = "<tool_call>"
BEGIN = MARKER + '\n{"name": "%s", "arguments": '  # with the name of the function
END = "}\n</tool_call>"  # no string of JSON contains a line break, so it ends the arguments
HEAD = re.compile(re.escape(BEGIN).replace("%s", r"([\w-]+)"))


@dataclass
class CallDelta:
    """A new part of a call: its name at its start, then its arguments as text.

    index: of the call among the calls of the answer.
    """

    index: int
    name: str | None
    arguments: str


class ToolParser:
    """The text of one choice."""

    def __init__(self) -> None:
        self.num_calls = 0  # that have begun
        self._rest = ""  # of the text: it may be the beginning of a marker
        self.is_in_call = False
        self._after_call = False  # line breaks between calls are no content

    def feed(self, text: str, *, is_last: bool) -> tuple[str, list[CallDelta]]:
        """Return the new content, and the new parts of calls.

        is_last: no text follows. What could have been the beginning of a marker is text then.
        """
        self._rest += text
        content, calls = "", list[CallDelta]()
        while True:
            if self.is_in_call:
                part, is_over = self._until(END, is_last)
                if not is_over and is_last and (size := overlap(part, END)) > 1:
                    part = part[:-size]  # the arguments are complete, and only the end is cut off
                if part:
                    calls.append(CallDelta(self.num_calls - 1, None, part))
                if not is_over:
                    return content, calls
                self.is_in_call, self._after_call = False, True
            if self._after_call:
                self._rest = self._rest.lstrip()
                self._after_call = not self._rest
            if head := HEAD.match(self._rest):
                self._rest = self._rest[head.end() :]
                calls.append(CallDelta(self.num_calls, head[1], ""))
                self.num_calls += 1
                self.is_in_call = True
                continue
            part, found = self._until(MARKER, is_last, keep=True)
            content += part
            if found and not HEAD.match(self._rest):  # the beginning of the call is not complete
                if is_last:
                    content, self._rest = content + self._rest, ""
                return content, calls
            if not found:
                return content, calls

    def _until(self, end: str, is_last: bool, *, keep: bool = False) -> tuple[str, bool]:
        """Take the text before `end`, and `end` too unless it is to be kept.

        Return the text, and whether `end` was there. Without it, what may be its beginning stays.
        """
        before, found, after = self._rest.partition(end)
        if found:
            self._rest = found + after if keep else after
            return before, True
        kept = 0 if is_last else overlap(self._rest, end)
        place = len(self._rest) - kept
        before, self._rest = self._rest[:place], self._rest[place:]
        return before, False


def overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of a text that is the beginning of a marker."""
    sizes = range(min(len(text), len(marker) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(marker[:size])), 0)
