"""A tokenizer with added tokens for which the embedding has no row is served, without these tokens.

Many fine-tuned models add a padding token and do not resize the embedding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from common import EngineConfig, LoadedModel, SamplingParams, StructuredOutputsParams, load_model
from tests.conftest import EngineFactory, ModuleOf, plain_model, shared_model
from tests.electives.test_lora_answers import serve, written
from tests.helpers.oracle import assert_one_answer, drain, greedy

MODEL = "tiny-llama"  # its embedding has 259 rows
PAD, PAD_ID = "[PAD]", 259
PROMPTS = [[5, 6, 7], [40] * 9]
OUTSIDE = rf"{PAD_ID}, outside the vocabulary \[0, 259\)"


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A checkpoint with an added padding token and end token, and the embedding from before."""
    folder = tmp_path_factory.mktemp("padded")
    model, tokenizer = plain_model(MODEL).model, load_model(EngineConfig(model=MODEL)).tokenizer
    tokenizer.add_special_tokens({"pad_token": PAD, "eos_token": "[END]"})
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD_ID, PAD_ID + 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pad_token_id": PAD_ID}))
    return load_model(EngineConfig(model=str(folder), device="cpu"))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([5, PAD_ID], {}, f"prompt holds token id {OUTSIDE}"),
        ([5, PAD_ID], {"n": 2}, f"prompt holds token id {OUTSIDE}"),
        (f"a{PAD}b", {}, f"prompt holds token id {OUTSIDE}"),
        ([5], {"logit_bias": {5: 1.0, PAD_ID: 1.0}}, f"logit_bias holds {OUTSIDE}"),
        ([5], {"stop_token_ids": [5, PAD_ID]}, f"stop_token_ids holds {OUTSIDE}"),
    ],
)
def test_an_added_token_is_refused_by_name(
    make_engine: EngineFactory,
    padded: LoadedModel,
    prompt: Any,
    params: dict[str, Any],
    message: str,
) -> None:
    """I4: the request beside it does not notice."""
    engine = make_engine(padded)
    name = engine.add_request([5, 6, 7], greedy(8))
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, greedy(8, **params))
    assert_one_answer(MODEL, drain(engine)[name][-1], 8)


def test_an_added_token_in_a_message_is_refused(
    make_engine: EngineFactory, padded: LoadedModel
) -> None:
    with pytest.raises(ValueError, match=f"prompt holds token id {OUTSIDE}"):
        make_engine(padded).chat([{"role": "user", "content": f"a{PAD}"}], greedy(3))


def test_an_added_end_token_is_never_sampled(
    make_engine: EngineFactory, padded: LoadedModel
) -> None:
    """`min_tokens` forbids the end tokens that the model can sample, and only these."""
    hot = [SamplingParams(max_tokens=40, min_tokens=20, temperature=2.0, seed=s) for s in range(4)]
    for output in make_engine(padded).generate([[5, 6, 7]] * 4, hot, progress=False):
        assert output.outputs[0].error is None
        assert len(output.outputs[0].token_ids) >= 20 and max(output.outputs[0].token_ids) < PAD_ID


@pytest.mark.since("structured_output")
@pytest.mark.extra("grammar")
def test_a_grammar_writes_the_text_of_an_added_token(
    make_engine: EngineFactory, padded: LoadedModel
) -> None:
    """The library takes one token for a text that has no choice. The model lacks that token."""
    grammar = StructuredOutputsParams(regex=r"(yes|no) \[PAD\]\[END\]!{3}")
    params = SamplingParams(max_tokens=40, temperature=0.0, structured_outputs=grammar)
    (output,) = make_engine(padded).generate([[5, 6, 7]], params, progress=False)
    assert output.outputs[0].error is None and output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].text in ("yes [PAD][END]!!!", "no [PAD][END]!!!")


@pytest.mark.since("speculative")
def test_a_draft_model_may_lack_or_have_the_added_tokens(
    make_engine: EngineFactory, module_of: ModuleOf, padded: LoadedModel
) -> None:
    """The tokens that the models share are equal, and a draft holds no others."""
    plain, draft_model = shared_model(MODEL), module_of("draft_model").DraftModel
    for draft, target in ((plain, padded), (padded, plain), (padded, padded)):
        engine: Any = make_engine(target)
        engine.core.scheduler.drafting.drafter = draft_model(draft, target)
        for output in engine.generate(PROMPTS, greedy(8), progress=False):
            assert_one_answer(MODEL, output, 8)
        assert engine.stats().num_accepted_tokens > 0


@pytest.mark.since("lora")
def test_an_adapter_of_such_a_model(
    make_engine: EngineFactory, padded: LoadedModel, tmp_path: Path
) -> None:
    """Answers with and without an adapter are those of the model with the smaller tokenizer."""
    adapters, names = {"A": written(tmp_path, "A")}, ("A", None)
    found = serve(make_engine(padded), PROMPTS, names, adapters)
    assert found == serve(make_engine(), PROMPTS, names, adapters)
    assert found[0].token_ids != serve(make_engine(), PROMPTS, (None, None), {})[0].token_ids
