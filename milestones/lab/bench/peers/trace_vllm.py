"""Record decode steps of vLLM with its own profiler: `PYTHON trace_vllm.py MODEL_FOLDER FOLDER`.

The environment has vLLM 0.13 or newer, and needs nothing of this project. Standard input is a line
of JSON with the prompts. `LLM.start_profile` and `stop_profile` are vLLM's interface to
`torch.profiler`, and `stop_profile` writes the trace into the folder. The engine runs in this
process, so the span "step" and vLLM's operations are in one lane.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

MAX_TOKENS = 64  # of a request: it does not end while steps are recorded
WARM_UP_STEPS = 12  # the prompts, and decode steps until all memory was used once
STEPS = 5


def profiler_config(folder: str) -> dict[str, Any]:
    """Return vLLM's settings of a trace. Recorded stacks would make the steps slow."""
    return {
        "profiler": "torch",
        "torch_profiler_dir": folder,
        "torch_profiler_with_stack": False,
    }


def main() -> None:
    """Serve the prompts, and record some steps in which all requests decode."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    with_vllm = importlib.import_module("peers.with_vllm")
    del sys.path[0]  # vLLM must not find our other files
    from torch.profiler import record_function

    prompts = json.load(sys.stdin)["prompts"]
    llm = with_vllm.llm_of(sys.argv[1], profiler_config=profiler_config(sys.argv[2]))
    engine = with_vllm.Engine(llm.llm_engine)
    for number, prompt in enumerate(prompts):
        engine.add_request(
            str(number), prompt, MAX_TOKENS, {"temperature": 0.0, "ignore_eos": True}
        )
    for _ in range(WARM_UP_STEPS):
        list(engine.step())
    llm.start_profile()
    for _ in range(STEPS):
        with record_function("step"):
            list(engine.step())
    llm.stop_profile()


if __name__ == "__main__":
    main()
