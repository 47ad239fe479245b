"""Engines without grammars refuse `structured_outputs` by name, and go on."""

from __future__ import annotations

import pytest

from common import SamplingParams, StructuredOutputsParams
from tests.conftest import EngineFactory


@pytest.mark.electives
@pytest.mark.before("structured_output")
@pytest.mark.parametrize("n", [1, 2])
def test_structured_outputs_are_refused_by_name(make_engine: EngineFactory, n: int) -> None:
    engine = make_engine()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]+"), n=n)
    with pytest.raises(ValueError, match="structured_outputs: this engine has no grammars"):
        engine.add_request([1, 2], params)
    assert not engine.has_unfinished_requests()
    [output] = engine.generate([[1, 2]], SamplingParams(max_tokens=2), progress=False)
    assert output.finished
