"""`RecordedStep`: the values of one step. `lines_of` lays them out with a column for each request.

A value that belongs to no single request, such as a tensor of all tokens, is divided: each column
has the part of its request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch

from common import RequestOutput

MOST_COLUMNS, MOST_LINES = 110, 26
NOTHING = "·"
LEGEND = (
    "`token_ids` are those at the start of the step: the prompt, `|`, the output. An arrow is a",
    "change during the step, and a dot says that the request has no such value.",
)
METADATA = ("slot_mapping", "query_start_loc", "seq_lens", "page_table")
PER_REQUEST = ("rows", "last_token", "seq_lens", "page_table", "attention_mask")  # [B, ...]


@dataclass
class Progress:
    """What a request says about itself at one moment."""

    queue: str  # waiting, running, or why it has ended
    token_ids: list[int]
    num_computed_tokens: int
    row: int | None


@dataclass
class RecordedStep:
    """One step of an engine. Dicts of requests are by request id."""

    prompts: dict[str, str] = field(default_factory=dict)
    num_prompt_tokens: dict[str, int] = field(default_factory=dict)
    progress: list[dict[str, Progress]] = field(default_factory=list)  # before, scheduled, after
    batch: list[str] = field(default_factory=list)  # request ids, in the order of the batch
    num_scheduled_tokens: list[int] = field(default_factory=list)
    sampled_indices: list[int] = field(default_factory=list)  # in `batch`
    builder: str = ""  # the structure that the tensors are in
    tensors: dict[str, Any] = field(default_factory=dict)  # of the forward, by name, as lists
    shapes: dict[str, list[int]] = field(default_factory=dict)  # of the tensors, and of `logits`
    scalars: dict[str, int] = field(default_factory=dict)  # of the forward, by name
    cached: int | None = None  # m1: tokens in `past_key_values` before the forward
    sampled: list[tuple[int, str]] = field(default_factory=list)  # each token, and its text
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor. m5 uses the memory of its inputs again two steps later."""
        self.tensors[name] = tensor.tolist()
        self.shapes[name] = list(tensor.shape)

    def sampled_requests(self) -> list[str]:
        """Return the ids of the requests that get a next token, in the order of the logits."""
        return [self.batch[i] for i in self.sampled_indices]


class Row(NamedTuple):
    """A line of the table: a field of a structure, and its value for each request."""

    structure: str
    field: str
    cells: dict[str, str]


def lines_of(step: RecordedStep) -> list[str]:
    """Return the lines of a step. Raises `ValueError` if they do not fit on a page."""
    requests = list(step.prompts)
    rows = [*_of_requests(step), *_of_forward(step), *_of_outputs(step)]
    scalars = ", ".join(f"{name} {value}" for name, value in step.scalars.items())
    table, structure = [["", scalars, *requests]], ""
    for row in rows:
        title = row.structure if row.structure != structure else ""
        table.append([title, row.field, *(row.cells.get(name, NOTHING) for name in requests)])
        structure = row.structure
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        *_listed("prompt", {name: _quoted(text) for name, text in step.prompts.items()}),
        *_listed("token_ids", {name: _tokens(step, name) for name in requests}),
        *("  ".join(map(str.ljust, line, widths)).rstrip() for line in table),
    ]
    if len(lines) > MOST_LINES or max(map(len, lines)) > MOST_COLUMNS:
        raise ValueError(f"{len(lines)} lines of {max(map(len, lines))} columns are too many")
    return lines


def _listed(title: str, texts: dict[str, str]) -> list[str]:
    """Return one line for each request. Prompts are too long for columns."""
    lines = [f"{title:13}  {name}  {text}" for name, text in texts.items()]
    return [lines[0], *(line.replace(title, " " * len(title), 1) for line in lines[1:])]


def _tokens(step: RecordedStep, name: str) -> str:
    """Return the tokens of a request when it is scheduled: its prompt | its output."""
    tokens, n = step.progress[1][name].token_ids, step.num_prompt_tokens[name]
    return _numbers(tokens[:n]) + (f" | {_numbers(tokens[n:])}" if tokens[n:] else "")


def _of_requests(step: RecordedStep) -> list[Row]:
    """Return what a request says about itself, each change with an arrow, and the batch."""

    def changes(what: str) -> dict[str, str]:
        cells = {}
        for name in step.prompts:
            values = [_said(moment[name], what) for moment in step.progress]
            cells[name] = " → ".join(value for value, _ in groupby(values))
        return cells

    has_rows = any(p.row is not None for moment in step.progress for p in moment.values())
    order = {name: f"[{i}]" for i, name in enumerate(step.batch)}
    counts = dict(zip(step.batch, map(str, step.num_scheduled_tokens), strict=True))
    return [
        Row("Request", "num_tokens", changes("num_tokens")),
        Row("Request", "num_computed_tokens", changes("num_computed_tokens")),
        *([Row("Request", "row", changes("row"))] if has_rows else []),
        Row("queue", "", changes("queue")),
        Row("ScheduleBatch", "requests", order),
        Row("ScheduleBatch", "num_scheduled_tokens", counts),
    ]


def _said(progress: Progress, what: str) -> str:
    if what == "num_tokens":
        return str(len(progress.token_ids))
    value = getattr(progress, what)
    return NOTHING if value is None else str(value)


def _of_forward(step: RecordedStep) -> list[Row]:
    """Return the tensors, divided among the requests, and where the logits are."""
    rows = []
    for name, values in step.tensors.items():
        structure = ".metadata" if name in METADATA else step.builder
        row = Row(structure, f"{name} {step.shapes[name]}", _divided(step, name, values))
        if name == "resolved":
            row = Row("future_map", "resolve(input_ids)", row.cells)
        rows.append(row)
    if step.cached is not None:
        cells = {step.batch[0]: f"{step.cached} tokens"}
        rows.append(Row(step.builder, "past_key_values", cells))
    lines = {name: f"row {i}" for i, name in enumerate(step.sampled_requests())}
    return [*rows, Row("logits", str(step.shapes["logits"]), lines)]


def _divided(step: RecordedStep, name: str, values: Any) -> dict[str, str]:
    """Return the part of a tensor that belongs to each request of the batch."""
    shape = step.shapes[name]
    if name == "logits_indices":
        return dict(zip(step.sampled_requests(), map(str, values), strict=True))
    if name == "query_start_loc":
        parts = [f"{start} to {end}" for start, end in pairwise(values)]
    elif name == "attention_mask":
        parts = ["".join("0" if number == 0 else "-" for number in row[0][0]) for row in values]
    elif name in PER_REQUEST or (len(shape) == 2 and shape[0] > 1):  # m2: [B, T]
        parts = [_numbers(row) if isinstance(row, list) else str(row) for row in values]
    else:
        flat = values[0] if isinstance(values[0], list) else values
        parts, start = [], 0
        for count in step.num_scheduled_tokens:
            parts.append(_numbers(flat[start : start + count]))
            start += count
        assert start == len(flat), f"{name} has {len(flat)} tokens, and the batch {start}"
    return dict(zip(step.batch, parts, strict=True))


def _of_outputs(step: RecordedStep) -> list[Row]:
    """Return the sampled tokens, and what `step` returned to the caller."""
    sampled = [f"{token} {_quoted(text)}" for token, text in step.sampled]
    ends = {name: output.outputs[0] for name, output in step.outputs.items()}
    rows = [
        Row("sampled", "", dict(zip(step.sampled_requests(), sampled, strict=True))),
        Row("RequestOutput", "text", {name: _quoted(end.text) for name, end in ends.items()}),
        Row("RequestOutput", "token_ids", {n: _numbers(end.token_ids) for n, end in ends.items()}),
    ]
    finished = {name: str(output.finished) for name, output in step.outputs.items()}
    return [*rows, Row("RequestOutput", "finished", finished)]


def _numbers(values: list[int]) -> str:
    return " ".join(map(str, values))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
