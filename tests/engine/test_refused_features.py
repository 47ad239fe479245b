"""Engines without the feature of an elective refuse its parameters by name, and go on."""

from __future__ import annotations

from typing import Any

import pytest

from common import PoolingParams, SamplingParams, StructuredOutputsParams
from tests.conftest import EngineFactory
from tests.helpers.oracle import greedy

pytestmark = pytest.mark.electives


def require_use(engine: Any) -> None:
    assert not engine.has_unfinished_requests()
    [output] = engine.generate([[1, 2]], greedy(2), progress=False)
    assert output.finished


@pytest.mark.before("embedding")
def test_pooling_parameters_are_refused_by_name(make_engine: EngineFactory) -> None:
    engine: Any = make_engine()
    for call in (engine.add_request, engine.stream):
        with pytest.raises(ValueError, match=r"params.*elective embedding"):
            call([1, 2, 3], PoolingParams())
    with pytest.raises(ValueError, match="params must be a list of SamplingParams.*PoolingParams"):
        engine.generate([1, 2, 3], PoolingParams())
    assert not hasattr(engine, "embed")
    require_use(engine)


@pytest.mark.before("structured_output")
@pytest.mark.parametrize("n", [1, 2])
def test_structured_outputs_are_refused_by_name(make_engine: EngineFactory, n: int) -> None:
    engine = make_engine()
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]+"), n=n)
    with pytest.raises(ValueError, match="structured_outputs: this engine has no grammars"):
        engine.add_request([1, 2], params)
    require_use(engine)
