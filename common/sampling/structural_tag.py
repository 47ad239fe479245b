"""Structural tags: free text with parts that a marker begins, and that satisfy a schema.

A tool call of Hermes is such a part. The format is xgrammar's `triggered_tags`, as in vLLM:

    {"type": "structural_tag", "format": {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [{"begin": "<tool_call>\\n{...", "end": "}\\n</tool_call>",
                  "content": {"type": "json_schema", "json_schema": {...}}}],
        "at_least_one": false, "stop_after_first": false}}

The text is free up to a trigger, which must be the beginning of each tag. With `at_least_one`, the
output begins with a tag. With `stop_after_first`, it ends after the first tag.
"""

from __future__ import annotations

from typing import Any

from ..validation import require_text, shown
from .json_schema import json_object, schema_text

NAME = "structured_outputs: structural_tag"
MAX_TAGS = 128


def structural_tag_text(given: Any) -> str:
    """Return a structural tag as text. Raises `ValueError` for one that is not as above."""
    text, tag = json_object(NAME, given)
    form = tag.get("format")
    if set(tag) != {"type", "format"} or tag["type"] != "structural_tag":
        raise ValueError(f"{NAME} must have the type 'structural_tag' and a format")
    if not isinstance(form, dict) or form.get("type") != "triggered_tags":
        raise ValueError(f"{NAME}: format must have the type 'triggered_tags', got {shown(form)}")
    options = {"at_least_one": False, "stop_after_first": False}
    if unknown := form.keys() - {"type", "triggers", "tags"} - options.keys():
        raise ValueError(f"{NAME}: format must not have {shown(min(unknown))}")
    if any(type(form.get(name, False)) is not bool for name in options):
        raise ValueError(f"{NAME}: {' and '.join(options)} must be true or false")
    triggers, tags = form.get("triggers"), form.get("tags")
    if not isinstance(triggers, list) or len(triggers) != 1:
        raise ValueError(f"{NAME}: triggers must be a list of one string, got {shown(triggers)}")
    require_text(f"{NAME}: triggers", triggers[0])
    if not isinstance(tags, list) or not 1 <= len(tags) <= MAX_TAGS:
        raise ValueError(f"{NAME}: tags must be a list of 1 to {MAX_TAGS} tags")
    for each in tags:
        _check(each, triggers[0])
    return text


def _check(tag: Any, trigger: str) -> None:
    if not isinstance(tag, dict) or set(tag) != {"begin", "content", "end"}:
        raise ValueError(f"{NAME}: a tag must have begin, content and end, got {shown(tag)}")
    require_text(f"{NAME}: begin", tag["begin"])
    require_text(f"{NAME}: end", tag["end"])
    if not tag["begin"].startswith(trigger):
        raise ValueError(f"{NAME}: begin must start with {trigger!r}, got {shown(tag['begin'])}")
    content = tag["content"]
    is_schema = isinstance(content, dict) and set(content) == {"type", "json_schema"}
    if not is_schema or content["type"] != "json_schema":
        raise ValueError(f"{NAME}: content must be a json_schema, got {shown(content)}")
    if not isinstance(content["json_schema"], dict):
        raise ValueError(f"{NAME}: json_schema must be an object, got {shown(content)}")
    schema_text(f"{NAME}: json_schema", content["json_schema"])
