"""Engines without embeddings refuse `PoolingParams` by name, and go on."""

from __future__ import annotations

from typing import Any

import pytest

from common import PoolingParams
from tests.conftest import EngineFactory
from tests.helpers.oracle import greedy


@pytest.mark.electives
@pytest.mark.before("embedding")
def test_pooling_parameters_are_refused_by_name(make_engine: EngineFactory) -> None:
    engine: Any = make_engine()
    for call in (engine.add_request, engine.stream):
        with pytest.raises(ValueError, match=r"params.*elective embedding"):
            call([1, 2, 3], PoolingParams())
    with pytest.raises(ValueError, match="params must be a list of SamplingParams.*PoolingParams"):
        engine.generate([1, 2, 3], PoolingParams())
    assert not hasattr(engine, "embed") and not engine.has_unfinished_requests()
    [output] = engine.generate([[1, 2]], greedy(2), progress=False)
    assert output.finished
