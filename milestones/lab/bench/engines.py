"""The engines that the bench measures: milestones, Hugging Face, and other engines.

`python -m milestones.lab.bench.engines hf-static` serves a workload with an engine of Hugging Face.
These engines support neither arrivals nor turns. All requests of a turn are there when it starts,
which is an advantage for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from common import EngineConfig, LoadedModel, load_model
from common.displays.workload import Workload, WorkloadResult, percentile
from common.displays.workload_process import run_module
from common.hf.gguf_folders import embedded_gguf, hugging_face_folder, is_embedded

from ...chain import milestones, package

HF_PAGE_SIZE = 32
SECONDS_TO_END = 10.0
GGUF_ENGINES = {"llama": True, "llama-stored": False, "openvino": False, "openvino-float32": True}
SERVE = Path(__file__).parent / "peers/serve.py"

Generate = Callable[[LoadedModel, list[list[int]], list[int], float], list[list[int]]]


@dataclass
class BenchEngine:
    """An engine, and its results: for each workload, one result per round."""

    name: str
    command: tuple[str, ...] = ()
    results: dict[str, list[WorkloadResult]] = field(default_factory=dict)

    def run(self, workload: Workload) -> WorkloadResult:
        """Serve the workload in a new process, after a warm-up."""
        return run_module(workload, *self.command)

    def summary(self, workload: str) -> Summary:
        """Return the medians over the rounds of a workload."""
        return Summary.of(self.results[workload])

    def close(self) -> None:
        """End the process of this engine, if there is one."""


@dataclass(frozen=True)
class Summary:
    """The medians that a table shows. Times are in seconds."""

    tokens_per_second: float
    first_token: tuple[float, float]  # p50 and p95 over the requests
    inter_token: tuple[float, float] | None  # p50 and p95 over the tokens; None: no streaming
    gap: float | None  # time between two forwards: the cost of the host per step
    kv_waste: float | None  # share of the reserved KV memory that holds no token
    stats: dict[str, int]

    @staticmethod
    def of(results: list[WorkloadResult]) -> Summary:
        """Compute percentiles within each round, and then the median of them over the rounds."""

        def over(name: str, percent: float) -> float:
            return median(percentile(getattr(result, name), percent) for result in results)

        latest = results[-1]
        return Summary(
            tokens_per_second=median(result.tokens_per_second for result in results),
            first_token=(over("first_token_seconds", 50), over("first_token_seconds", 95)),
            inter_token=(over("inter_token_seconds", 50), over("inter_token_seconds", 95))
            if latest.inter_token_seconds
            else None,
            gap=over("gap_seconds", 50) if latest.gap_seconds else None,
            kv_waste=latest.kv_waste,
            stats=latest.stats,
        )


class PipedEngine(BenchEngine):
    """An engine that runs in another Python environment, and gets workloads through a pipe.

    All rounds have the same prompts, so the engine must not keep a cache from the round before.
    Its process empties the cache after each workload, or each measurement gets a new process.
    """

    def __init__(
        self, name: str, python: Path, model: Callable[[], Path | str], *, forgets: bool,
        options: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """model: returns the model for `serve.py`; called when a process starts. forgets: the cache
        is empty after each workload, so the process can stay (a start may take minutes)."""
        super().__init__(name, (str(python), str(SERVE), name.partition("-")[0]))
        self.model, self.forgets, self.options = model, forgets, options
        self._process: subprocess.Popen[str] | None = None

    def run(self, workload: Workload) -> WorkloadResult:
        """Serve the workload after a warm-up. Raises `RuntimeError` if the engine does not run."""
        if not self.forgets:
            self.close()
        self._ask(workload.warm_up())
        return self._ask(workload)

    def close(self) -> None:
        if self._process is not None:
            self._process.terminate()  # it then removes its files
            try:
                self._process.wait(timeout=SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _ask(self, workload: Workload) -> WorkloadResult:
        if self._process is None:
            self._process = subprocess.Popen(
                [*self.command, str(self.model()), *self.options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, cwd="/",
            )  # fmt: skip
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        try:
            pipe_in.write(json.dumps(asdict(workload)) + "\n")
            pipe_in.flush()
            answer = pipe_out.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"{self.name} ended; to see why: {' '.join(self.command)} MODEL")
        return WorkloadResult(**json.loads(answer))


def folder_or_id(model: str) -> Path | str:
    """Return the model for vLLM and ONNX Runtime GenAI: a folder or an id of Hugging Face."""
    return hugging_face_folder(embedded_gguf()) if is_embedded(model) else model


def gguf_file(model: str) -> Path | str:
    """Return the model as one file. Raises `ValueError` if it is not a `.gguf` file."""
    if not is_embedded(model) and not model.endswith(".gguf"):
        raise ValueError(f"llama.cpp and OpenVINO GenAI read .gguf files, not {model!r}")
    return embedded_gguf() if is_embedded(model) else model


def of_tree(name: str) -> BenchEngine:
    """Return a milestone or an elective."""
    return BenchEngine(name, ("common.displays.workload_process", package(name)))


def all_engines(model: str, **pythons: Path | None) -> list[BenchEngine]:
    """Return every milestone, and other engines: those that have a Python in `pythons`."""
    found = [*map(of_tree, milestones())]
    found += [BenchEngine(name, ("milestones.lab.bench.engines", name)) for name in HUGGING_FACE]
    folder, gguf = partial(folder_or_id, model), partial(gguf_file, model)
    for name in ("vllm", "onnx"):
        if python := pythons.get(name):
            found.append(PipedEngine(name, python, folder, forgets=True))
    for name, float32 in GGUF_ENGINES.items():
        if python := pythons.get(name.partition("-")[0]):
            options = ("--float32",) if float32 else ()  # see the engine's file in peers/
            found.append(PipedEngine(name, python, gguf, forgets=False, options=options))
    return found


def sampling(temperature: float) -> dict[str, Any]:
    """Return Hugging Face's parameters: without its own top-k of 50."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def hf_static(
    loaded: LoadedModel, prompts: list[list[int]], max_tokens: list[int], temperature: float
) -> list[list[int]]:
    """Call Hugging Face `generate` on one padded batch, which ends with its longest request."""
    longest = max(map(len, prompts))
    padded = [[0] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    model: Any = loaded.model
    tokens = model.generate(
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max(max_tokens),
        min_new_tokens=max(max_tokens),
        pad_token_id=0,
        **sampling(temperature),
    )[:, longest:].tolist()
    return [row[:n] for row, n in zip(tokens, max_tokens, strict=True)]


def hf_batch(
    loaded: LoadedModel, prompts: list[list[int]], max_tokens: list[int], temperature: float
) -> list[list[int]]:
    """Call Hugging Face `generate_batch` (continuous batching), with the largest `max_tokens`."""
    model: Any = loaded.model
    config = GenerationConfig(
        max_new_tokens=max(max_tokens), eos_token_id=-1, pad_token_id=0, **sampling(temperature)
    )
    longest = max(len(prompt) + n for prompt, n in zip(prompts, max_tokens, strict=True))
    # Memory for all requests at once. By default `generate_batch` takes all memory, which takes a
    # minute.
    memory: Any = ContinuousBatchingConfig(
        num_blocks=len(prompts) * (longest // HF_PAGE_SIZE + 2), max_batch_tokens=2048
    )
    # Newer versions of transformers say page for block.
    setattr(memory, "page_size" if hasattr(memory, "page_size") else "block_size", HF_PAGE_SIZE)
    outputs = model.generate_batch(
        prompts, generation_config=config, continuous_batching_config=memory
    )
    by_prompt = {tuple(output.prompt_ids): output.generated_tokens for output in outputs.values()}
    return [by_prompt[tuple(p)][:n] for p, n in zip(prompts, max_tokens, strict=True)]


HUGGING_FACE: dict[str, Generate] = {"hf-static": hf_static, "hf-batch": hf_batch}


def run_hugging_face(generate: Generate, loaded: LoadedModel, workload: Workload) -> WorkloadResult:
    """Serve all requests at the same time, then all their next turns, and so on."""
    users = len(workload.prompts)
    prompts, answers = workload.prompts, [list[list[int]]() for _ in range(users)]
    first_token_seconds: list[float] = []
    begin = time.perf_counter()
    for turn in range(1 + len((workload.follow_ups or [[]])[0])):
        if turn > 0:
            said = [follow_up[turn - 1] for follow_up in workload.follow_ups]
            prompts = [p + a[-1] + s for p, a, s in zip(prompts, answers, said, strict=True)]
        started = time.perf_counter()
        said_now = generate(loaded, prompts, workload.max_tokens, workload.temperature)
        for answer, tokens in zip(answers, said_now, strict=True):
            answer.append(tokens)
        first_token_seconds += [time.perf_counter() - started] * users  # the engine does not stream
    tokens_of = [tokens for answer in answers for tokens in answer]
    return WorkloadResult(tokens_of, time.perf_counter() - begin, first_token_seconds)


def main() -> None:
    """Read a workload from standard input, and write the result to standard output."""
    generate = HUGGING_FACE[sys.argv[1]]
    workload = Workload(**json.load(sys.stdin))
    loaded = load_model(EngineConfig(**workload.config), plain=True)
    words, sys.stdout = sys.stdout, sys.stderr  # the engine may print
    run_hugging_face(generate, loaded, workload.warm_up())
    words.write(json.dumps(asdict(run_hugging_face(generate, loaded, workload))))
    words.flush()  # Python flushes only `sys.stdout` at exit, and `words` is not that any more


if __name__ == "__main__":
    main()
