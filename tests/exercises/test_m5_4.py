"""m5.4: two buffers take turns; a buffer is filled again when its last step has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.sampling.sampler import SamplerOutput
from m5_overlap.buffers import ALIGNMENT, StepBuffers
from m5_overlap.model_runner import StepResult
from milestones.lab.instruments.streams import LateStream

CPU = torch.device("cpu")


def two_buffers() -> Any:
    return [StepBuffers(CPU, size=256) for _ in range(2)]


def test_buffers_are_filled_again_when_their_step_is_done_and_not_before() -> None:
    """Three steps use two buffers, on a stream that runs its work as late as possible."""
    buffers, stream, seen = two_buffers(), LateStream(), []
    for step in range(3):
        mine = buffers[step % 2]
        mine.begin()
        inputs = mine.upload(torch.full((4,), step))
        mine.in_use = stream.launch(lambda x=inputs: seen.append(x.tolist()))  # type: ignore[misc]
    stream.synchronize()
    assert seen == [[0] * 4, [1] * 4, [2] * 4], (
        "I2: each step must read its own inputs: a buffer was filled again before its step had run"
    )


def test_no_step_waits_for_more_than_the_step_before_last() -> None:
    buffers, stream = two_buffers(), LateStream()
    waits = []
    for step in range(4):
        mine = buffers[step % 2]
        mine.begin()
        waits.append(stream.num_waits)
        mine.in_use = stream.launch(lambda: None)
    assert waits == [0, 0, 1, 2], (
        "the first two steps find unused buffers; the third waits for the first step, the fourth "
        "for the second, once each"
    )


def test_a_buffer_that_no_step_uses_is_free() -> None:
    mine: Any = StepBuffers(CPU)
    mine.begin()
    mine.begin()
    assert mine.in_use is None
    stream = LateStream()
    mine.in_use = stream.launch(lambda: None)
    mine.begin()
    mine.begin()
    assert stream.num_waits == 1, "one wait is enough; after it the buffer is free"


def test_a_step_begins_at_the_beginning() -> None:
    """Each step begins at the same address: the memory does not grow from step to step."""
    mine = StepBuffers(CPU, size=256)
    places = []
    for _ in range(50):
        mine.begin()
        places.append(mine.upload(torch.zeros(16, dtype=torch.int64)).data_ptr())
    assert len(set(places)) == 1, f"50 steps began at {len(set(places))} different addresses"


@pytest.mark.parametrize("size", [4096, 32], ids=["enough memory", "memory that must grow"])
def test_pieces_do_not_overlap(size: int) -> None:
    """What comes back has a place too."""
    mine = StepBuffers(CPU, size=size)
    mine.begin()
    tensors: list[torch.Tensor] = [
        torch.arange(3, dtype=torch.int32),
        torch.arange(50, dtype=torch.int64),
        torch.tensor([True, False, True]),
        torch.rand(7),
        torch.empty(0, dtype=torch.int64),
        torch.arange(6, dtype=torch.int32).view(2, 3),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    taken = [mine.upload(tensor) for tensor in tensors]
    answer = mine.download(torch.tensor([7, 8]))
    for before, after in zip(tensors, taken, strict=True):
        assert before.dtype == after.dtype and before.shape == after.shape
        assert torch.equal(before, after), (
            "I2: this was uploaded, and has changed after other uploads of the same step"
        )
    assert answer.tolist() == [7, 8], "this was downloaded"


def test_each_piece_is_aligned() -> None:
    """A copy from an unaligned address is slow, and a view as int64 at one is an error."""
    mine = StepBuffers(CPU, size=4096)
    mine.begin()
    base = mine.memory.data_ptr()
    for size in (1, 3, 16, 17, 5):
        piece = mine.upload(torch.zeros(size, dtype=torch.uint8))
        offset = piece.data_ptr() - base
        assert offset % ALIGNMENT == 0, f"a piece begins at byte {offset}"


def launched(stream: LateStream, buffers: Any, tokens: list[int]) -> Any:
    """Launch a step with a forward that yields these tokens when it runs."""
    result: Any = StepResult(buffers)

    def forward() -> None:
        valid = torch.ones(len(tokens), dtype=torch.bool)
        result.output = SamplerOutput(torch.tensor(tokens), valid, None, None, [None] * len(tokens))

    result.done = buffers.in_use = stream.launch(forward)
    return result


def test_a_result_is_read_after_its_own_step() -> None:
    stream, buffers = LateStream(), two_buffers()
    first = launched(stream, buffers[0], [10, 11])
    second = launched(stream, buffers[1], [20, 21])
    assert first.wait() == [(10, None), (11, None)], (
        "wait returns a list of the tokens, each with its log probabilities, or None"
    )
    assert len(stream.pending) == 1, "the next step is still in flight: wait must not wait for it"
    assert second.wait() == [(20, None), (21, None)], "the second step gave tokens 20 and 21"


def test_a_result_does_not_wait_for_the_next_step_in_its_buffer() -> None:
    """The event in `in_use` may be that of a later step. A result has an event of its own."""
    stream, buffers = LateStream(), two_buffers()
    first = launched(stream, buffers[0], [10])
    first.done.wait()
    launched(stream, buffers[0], [20])  # a later step uses the same buffer
    assert first.wait() == [(10, None)], "the first step gave token 10"
    assert len(stream.pending) == 1, "the later step is in flight: wait must not wait for it"


def test_log_probabilities_come_with_their_tokens() -> None:
    result: Any = StepResult(StepBuffers(CPU))
    result.done = LateStream().launch(lambda: None)
    valid, ids = torch.ones(2, dtype=torch.bool), torch.tensor([10, 20])
    logprobs, places = torch.tensor([[-0.5], [-0.25]]), ids[:, None]
    result.output = SamplerOutput(ids, valid, logprobs, places, [None, 0])
    assert result.wait() == [(10, None), (20, {20: -0.25})], (
        "the second request asked for log probabilities: the rows of the output have them"
    )


def test_the_buffer_is_free_once_its_result_was_read() -> None:
    """Otherwise the next step that uses the buffer waits for the same event again."""
    stream, buffers = LateStream(), two_buffers()
    result = launched(stream, buffers[0], [10])
    other = launched(stream, buffers[1], [20])
    result.wait()
    buffers[0].begin()
    assert stream.num_waits == 1, "the host must wait once for the step"
    assert buffers[1].in_use is other.done, "the other step's buffer is still in use"


def test_a_failed_forward_raises_where_it_is_waited_for() -> None:
    stream, buffers = LateStream(), two_buffers()
    result: Any = StepResult(buffers[0])
    result.done = buffers[0].in_use = stream.launch(lambda: 1 / 0)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        result.wait()
