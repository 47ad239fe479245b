"""Serve our workloads with vLLM, in its own environment: `PYTHON peer_vllm.py MODEL_FOLDER`.

The environment needs nothing of this project. For each workload, a line of JSON on standard input,
the script writes the results as a line of JSON. vLLM takes minutes to start, so it starts once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import pairwise
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def serve(engine: Any, workload: dict[str, Any]) -> dict[str, Any]:
    """Serve a workload as the driver of `common/displays/workload.py` does, with vLLM's engine."""
    from vllm import SamplingParams

    count = len(workload["prompts"])
    due = list(workload["arrivals"]) or [0.0] * count
    prompts = [[prompt] for prompt in workload["prompts"]]  # for each user, turn by turn
    to_say = [list(user) for user in workload["follow_ups"]] or [[] for _ in range(count)]
    coming, users = list(range(count)), dict[str, int]()
    tokens, times, requested = dict[str, list[int]](), dict[str, list[float]](), dict[str, float]()
    started = time.perf_counter()
    while coming or users:
        now = time.perf_counter() - started
        if not users:
            time.sleep(max(0.0, min(due[user] for user in coming) - now))
            now = max(now, min(due[user] for user in coming))
        for user in [user for user in coming if due[user] <= now]:
            name = f"{started}-{user}-{len(prompts[user])}"
            params = SamplingParams(
                temperature=workload["temperature"], max_tokens=workload["max_tokens"][user],
                ignore_eos=workload["ignore_eos"], detokenize=False,
            )  # fmt: skip
            engine.add_request(name, {"prompt_token_ids": prompts[user][-1]}, params)
            users[name], requested[name], tokens[name], times[name] = user, due[user], [], []
            coming.remove(user)
        for output in engine.step():
            name, now = output.request_id, time.perf_counter() - started
            new = list(output.outputs[0].token_ids)
            times[name] += [now] * (len(new) - len(tokens[name]))
            tokens[name] = new
            if output.finished:
                user = users.pop(name)
                if to_say[user]:
                    prompts[user].append(prompts[user][-1] + new + to_say[user].pop(0))
                    due[user] = now
                    coming.append(user)
    return {
        "token_ids": list(tokens.values()),
        "seconds": time.perf_counter() - started,
        "first_token_seconds": [times[name][0] - requested[name] for name in tokens],
        "inter_token_seconds": [b - a for each in times.values() for a, b in pairwise(each)],
    }


def main() -> None:
    """Start the engine, then answer each line of standard input with a line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its libraries may print: keep that out of the answers
    import torch
    from vllm import LLM

    on_gpu = torch.cuda.is_available()  # as our engines: `EngineConfig` and `workloads.py`
    llm = LLM(
        sys.argv[1], dtype="auto" if on_gpu else "float32", max_model_len=2048,
        max_num_seqs=256 if on_gpu else 16, seed=0, enable_prefix_caching=True,
    )  # fmt: skip
    for line in sys.stdin:
        workload = json.loads(line)
        answers.write(json.dumps(serve(llm.llm_engine, workload)) + "\n")
        answers.flush()
        llm.reset_prefix_cache()  # the next round sends the same prompts


if __name__ == "__main__":
    main()
